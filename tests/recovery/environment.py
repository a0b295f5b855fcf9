"""The Python environment of the other ways: the site's own torch, and above it what they need."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.lab.site import SITES, site_python

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALL_S = 600.0
ERROR_CHARACTERS_MAX = 200
_ASK = """
import json, sys, importlib.metadata as m
import stepkeeper_trainer
print(json.dumps({
    "base": sys._base_executable,
    "packages": [p for p in sys.path if p.endswith("site-packages")],
    "project": str(__import__("pathlib").Path(stepkeeper_trainer.__file__).parents[1]),
    "torch": m.version("torch"),
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Where the other ways run."""

    python: Path
    project: Path
    """What PYTHONPATH must name for the model and the data of our example."""
    versions: dict[str, str]
    missing: dict[str, str]
    """Package to reason, where one cannot be installed here."""


def peers(user: str) -> Peers:
    """Make the environment, once; what does not install is told, and leaves the others alone."""
    asked = json.loads(_run(site_python(user), "-c", _ASK).stdout.splitlines()[-1])
    wanted = [line.strip() for line in REQUIREMENTS.read_text().splitlines() if line.strip() and line[0] != "#"]
    # without the project: it changes often, and what is installed here goes by the rest
    below = [path for path in asked["packages"] if path != asked["project"]]
    print_of = hashlib.sha256("\0".join([asked["base"], *below, *wanted]).encode()).hexdigest()[:12]
    place = SITES / f"peers-{print_of}"
    found = place / "found.json"
    if not found.exists():
        SITES.mkdir(mode=0o755, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        _run(asked["base"], "-m", "venv", place)
        (packages,) = place.glob("lib/python3*/site-packages")
        (packages / "torch-of-the-site.pth").write_text("".join(f"{path}\n" for path in below))
        found.write_text(json.dumps(_install(place / "bin" / "python", wanted)))
    noted = json.loads(found.read_text())
    versions = {"torch": asked["torch"], **noted["versions"]}
    return Peers(
        python=place / "bin" / "python",
        project=Path(asked["project"]),
        versions=versions,
        missing=noted["missing"],
    )


def _install(python: Path, wanted: list[str]) -> dict[str, dict[str, str]]:
    versions, missing = {}, {}
    for requirement in wanted:
        name = requirement.split(">")[0]
        done = _run(python, "-m", "pip", "install", "--quiet", requirement, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            missing[name] = (said or ["pip refuses it"])[0][:ERROR_CHARACTERS_MAX]
        else:
            ask = f"import importlib.metadata as m; print(m.version({name!r}))"
            versions[name] = _run(python, "-c", ask).stdout.strip()
    return {"versions": versions, "missing": missing}


def _run(*argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in argv], capture_output=True, text=True, timeout=INSTALL_S, check=False, cwd="/"
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {done.stderr.strip()[-2000:]}")
    return done

"""Python environments that ordinary users can run: the repository's own may lie below a closed home directory.

Two layers, as an administrator would install them below /opt: one with the dependencies (built once), one with the
project (rebuilt in a second when the sources change).
"""

import hashlib
import os
import pwd
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from stepkeeper import __version__
from tests.lab.building import locked
from tests.lab.faults import LabError

REPOSITORY = Path(__file__).resolve().parents[2]
SITES = Path("/var/tmp/stepkeeper-site")  # world-writable parent: `locked` checks whose it is
TORCH = REPOSITORY / "tests" / "requirements-torch.txt"
BUILD_S = 600.0
PROJECTS_KEPT = 40  # a checkout that changes while another one plays must not take its environment away
INTERPRETERS = ("/usr/bin/python3", sys.executable)


@cache
def site_python(user: str | None) -> Path:
    """Return an interpreter with torch and Stepkeeper that `user` (None: root) can run."""
    own = Path(sys.executable)
    if user is None or _works(own, user):
        return own
    return _site(torch=True)


@cache
def supervisor_python() -> Path:
    """Return an interpreter with Stepkeeper and without torch: a clean environment for the supervisor."""
    return _site(torch=False)


def dependencies() -> tuple[Path, Path]:
    """Return a Python without packages that everybody can run, and a directory with torch and what Stepkeeper needs."""
    interpreter = _interpreter()
    with locked(SITES):
        return interpreter, _dependencies(interpreter, torch=True)


def _works(python: Path, user: str) -> bool:
    account = pwd.getpwnam(user)
    try:
        return not subprocess.run(
            [python, "-c", "import torch, stepkeeper, stepkeeper_trainer"],
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
            capture_output=True,
            timeout=BUILD_S,
            check=False,
            cwd="/",
        ).returncode
    except PermissionError:
        return False


def _site(*, torch: bool) -> Path:
    interpreter = _interpreter()
    with locked(SITES):
        dependencies = _dependencies(interpreter, torch=torch)
        return _project(dependencies)


def _interpreter() -> Path:
    """Return a Python of 3.11 or newer that everybody can run."""
    for candidate in INTERPRETERS:
        path = Path(candidate).resolve()
        if path.exists() and all(parent.stat().st_mode & 0o001 for parent in path.parents):
            asked = subprocess.run(
                [path, "-c", "import sys, venv, ensurepip; print(sys.version_info >= (3, 11))"],
                capture_output=True,
                text=True,
                timeout=BUILD_S,
                check=False,
            )
            if asked.stdout.strip() == "True":
                return path
    raise LabError(
        f"none of {INTERPRETERS} is a Python >= 3.11 with venv that every user can run: install python3-venv"
    )


def _dependencies(interpreter: Path, *, torch: bool) -> Path:
    """Return the site-packages of the layer with the dependencies."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    kind = "torch" if torch else "light"
    print_of = _fingerprint(str(interpreter), *wanted, TORCH.read_text() if torch else "")
    layer = SITES / f"{kind}-{print_of}"
    if not (layer / "complete").exists():
        shutil.rmtree(layer, ignore_errors=True)
        _call(interpreter, "-m", "venv", layer)
        pip = (layer / "bin" / "python", "-m", "pip", "install", "--quiet")
        if torch:
            _call(*pip, "-r", TORCH)
        _call(*pip, *wanted)
        (layer / "complete").touch()
    (packages,) = layer.glob("lib/python3*/site-packages")
    return packages


def _project(dependencies: Path) -> Path:
    """Return the interpreter of the layer with the project, which sees the dependencies by a .pth file."""
    sources = sorted(
        path
        for top in ("supervisor", "trainer", "sbatch", "pyproject.toml")
        for path in [REPOSITORY / top, *(REPOSITORY / top).rglob("*")]
        if path.is_file() and "__pycache__" not in path.parts and path.name != "_version.py"  # the build writes it
    )
    print_of = _fingerprint(str(dependencies), *(f"{path}:{path.read_bytes().hex()}" for path in sources))
    layer = SITES / f"project-{print_of}"
    python = layer / "bin" / "python"
    if not (layer / "complete").exists():
        shutil.rmtree(layer, ignore_errors=True)
        base = dependencies.parents[2] / "bin" / "python"
        _call(base, "-m", "venv", "--without-pip", layer)
        (packages,) = layer.glob("lib/python3*/site-packages")
        (packages / "dependencies.pth").write_text(f"{dependencies}\n")
        _call(
            base,
            "-m",
            "pip",
            f"--python={python}",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            REPOSITORY,
            env={**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": __version__},  # a build writes it into the checkout
        )
        torchrun = layer / "bin" / "torchrun"
        torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
        torchrun.chmod(0o755)
        (layer / "complete").touch()
    os.utime(layer)  # used: those that have not been for longest go first
    _prune(layer)
    return python


def _prune(keep: Path) -> None:
    found = sorted(SITES.glob("project-*"), key=lambda path: path.stat().st_mtime)
    for old in found[:-PROJECTS_KEPT]:
        if old != keep:
            shutil.rmtree(old, ignore_errors=True)


def _fingerprint(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _call(*argv: str | Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [str(part) for part in argv], capture_output=True, text=True, timeout=BUILD_S, check=False, cwd="/", env=env
    )
    if done.returncode:
        raise LabError(f"{' '.join(map(str, argv))}: {done.stderr.strip()[-2000:]}")

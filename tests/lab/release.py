"""Environments of other releases, for what must understand each other across an upgrade."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.lab.site import REPOSITORY, site_python

RELEASED = REPOSITORY / "tests" / "fixtures" / "releases"
WITHIN_S = 120.0
OURS = ("stepkeeper", "stepkeeper_trainer")
COMMAND = "import sys\nfrom stepkeeper.entry import main\nsys.exit(main())\n"


def laid_out(place: Path, version: str) -> Path:
    """Return the packages of one release, compiled, in a directory of their own: `""` is this checkout."""
    target = place / (version or "now")
    if target.is_dir():
        return target
    if version:
        [wheel] = RELEASED.glob(f"stepkeeper-{version}-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(target, [name for name in packed.namelist() if name.startswith(OURS)])
    else:
        for name, directory in zip(OURS, ("supervisor", "trainer"), strict=True):
            shutil.copytree(REPOSITORY / directory / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "compileall", "-q", target], check=True, timeout=WITHIN_S)
    return target


class Environment:
    """A virtual environment that every user can run, with torch and one release, which can be exchanged."""

    def __init__(self, place: Path, user: str, releases: Path) -> None:
        """Make it, with no release in it yet; `releases`: where the packages of all of them lie."""
        self.releases = releases
        base = site_python(user)
        shown = subprocess.run(
            [base, "-c", "import sys; print(*[p for p in sys.path if 'site-packages' in p], sep='\\n')"],
            capture_output=True, text=True, check=True, timeout=WITHIN_S,
        )  # fmt: skip
        subprocess.run([base, "-m", "venv", "--without-pip", place], check=True, timeout=WITHIN_S)
        self.python = place / "bin" / "python"
        [self.packages] = place.glob("lib/python3*/site-packages")
        (self.packages / "dependencies.pth").write_text(shown.stdout)
        self.stepkeeper.write_text(f"#!{self.python}\n{COMMAND}")
        self.stepkeeper.chmod(0o755)

    @property
    def stepkeeper(self) -> Path:
        """The command."""
        return self.python.parent / "stepkeeper"

    def install(self, version: str) -> Environment:
        """Put a release in place of what is there, at once: what runs goes on, what starts is new."""
        release = laid_out(self.releases, version)
        for name in OURS:
            new = self.packages / f"{name}.new"
            new.symlink_to(release / name)
            new.replace(self.packages / name)
        return self

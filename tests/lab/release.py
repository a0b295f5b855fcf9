"""Environments of other releases, for what must understand each other across an upgrade."""

from __future__ import annotations

import contextlib
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


class Environment:
    """A virtual environment that every user can run, with torch and one release: ours can be exchanged in place."""

    def __init__(self, place: Path, user: str) -> None:
        """Make it, with no release in it yet."""
        base = site_python(user)
        shown = subprocess.run(
            [base, "-c", "import sys; print(*[p for p in sys.path if 'site-packages' in p], sep='\\n')"],
            capture_output=True, text=True, check=True, timeout=WITHIN_S,
        )  # fmt: skip
        subprocess.run([base, "-m", "venv", "--without-pip", place], check=True, timeout=WITHIN_S)
        self.python = place / "bin" / "python"
        [self.packages] = place.glob("lib/python3*/site-packages")
        (self.packages / "dependencies.pth").write_text(shown.stdout)

    @property
    def stepkeeper(self) -> Path:
        """The command."""
        return self.python.parent / "stepkeeper"

    def install(self, version: str) -> Environment:
        """Put a release in place of what is there, as pip does: `""` is this checkout."""
        for name in OURS:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.packages / name)
        if version:
            [wheel] = RELEASED.glob(f"stepkeeper-{version}-*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(self.packages, [name for name in packed.namelist() if name.startswith(OURS)])
        else:
            for directory in ("supervisor/stepkeeper", "trainer/stepkeeper_trainer"):
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(REPOSITORY / directory, self.packages / Path(directory).name, ignore=ignored)
        self.stepkeeper.write_text(f"#!{self.python}\n{COMMAND}")
        self.stepkeeper.chmod(0o755)
        subprocess.run([sys.executable, "-m", "compileall", "-q", self.packages], check=True, timeout=WITHIN_S)
        return self

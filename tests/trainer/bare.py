"""Python environments that have only what a test wants them to have: no package is hidden, it is not there."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(place: Path, *, without: str) -> Path:
    """Make a virtual environment of this one's packages but for one; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=120)
    packages = next(place.glob("lib/python*/site-packages"))
    for directory in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}:
        for entry in Path(directory).iterdir():
            # the package, its shared libraries and its metadata: numpy, numpy.libs, numpy-2.0.dist-info
            if entry.name.split(".")[0].split("-")[0] != without and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    return place / "bin/python"

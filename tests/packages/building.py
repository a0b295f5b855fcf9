"""Building the project's packages from copies of the checkout, and a clean Debian root to install them in."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path("/var/tmp/stepkeeper-dist-tests")
MIRROR = "http://deb.debian.org/debian"
WITHIN_S = 500.0


def run(
    *command: str | Path,
    cwd: Path = REPOSITORY,
    env: Mapping[str, str] | None = None,
    code: int = 0,
    errors: bool = True,
) -> str:
    """Return what a command prints; fail where it ends otherwise than expected."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + (done.stderr if errors else "")


def need(*tools: str) -> None:
    """Skip where a tool is missing."""
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        pytest.skip(f"not installed: {', '.join(missing)}")


def need_root() -> None:
    if os.geteuid():
        pytest.skip("a chroot needs root")


def environment() -> Path:
    """Return the interpreter that builds: pinned tools in an environment of their own."""
    need("make")
    done = subprocess.run(
        ["make", "dist-packages", f"DIST_PACKAGES={ENVIRONMENT}"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"the tools of tests/requirements-dist.txt cannot be installed: {done.stderr[-300:]}")
    return ENVIRONMENT / "bin" / "python"


def copy_of_sources(place: Path) -> Path:
    """Copy the files that git tracks or would: without git, without what was built."""
    names = run(
        "git", "-c", f"safe.directory={REPOSITORY}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"
    )
    for name in filter(None, names.split("\0")):
        if (source := REPOSITORY / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place / name)
    return place


def make_dist(sources: Path, out: Path, version: str) -> Path:
    """Play `make dist`, as if a tag had this version."""
    pretended = {"SETUPTOOLS_SCM_PRETEND_VERSION": version}
    run("make", "dist", f"DIST_PACKAGES={ENVIRONMENT}", f"DIST={out}", cwd=sources, env=pretended)
    return out


def debian_root(place: Path) -> Path:
    """Make a clean Debian 12 with Python and nothing of ours."""
    need_root()
    need("debootstrap", "chroot")
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=python3", "bookworm", place, MIRROR],
        capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"debootstrap could not make a root: {(done.stdout + done.stderr)[-300:]}")
    return place


def files_of(root: Path) -> set[str]:
    """Return the files of a root, but for the package managers' own state and logs."""
    own = ("var/lib/dpkg", "var/lib/rpm", "var/log", "var/cache", "proc", "sys", "dev", "tmp", "root")
    found = set()
    for directory, names, files in os.walk(root):
        inside = os.path.relpath(directory, root)
        names[:] = [name for name in names if os.path.normpath(os.path.join(inside, name)) not in own]
        found |= {os.path.normpath(os.path.join(inside, name)) for name in (*names, *files) if name != "__pycache__"}
        if "__pycache__" in names and "stepkeeper" not in inside:
            names.remove("__pycache__")  # Debian's own Python
    return found

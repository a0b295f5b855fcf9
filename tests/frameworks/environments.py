"""`python -m tests.frameworks.environments`: build the environments with the real frameworks, outside of the checkout.

Each lies above the environment that runs this, whose torch it takes, so none downloads torch again.  They are kept
in STEPKEEPER's cache directory (FRAMEWORKS_CACHE, default /var/tmp/stepkeeper-frameworks) by the digest of what they
need.  Where one cannot be built, its tests are skipped with the reason, and the others are played.

FRAMEWORKS_VERSIONS=oldest takes the oldest releases to which `--attach` attaches, in place of today's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CACHE_VARIABLE = "FRAMEWORKS_CACHE"
CACHE = "/var/tmp/stepkeeper-frameworks"
HERE = Path(__file__).parent
NAMES = ("huggingface", "lightning", "torchtitan", "deepspeed", "megatron", "torch_checkpointing")
WITHOUT_DEPENDENCIES = ("torchtitan", "megatron")
"""What they would pull in needs a GPU; the file lists all that is needed here."""
WITHIN_S = 1200.0
VERSIONS_VARIABLE = "FRAMEWORKS_VERSIONS"


def cache() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or CACHE)


def place(name: str) -> Path:
    """Return where an environment is or would be: a change of its requirements or of torch makes another one."""
    wanted = [sys.version, sys.base_prefix, _below(), requirements(name).read_text()]
    return cache() / f"{name}-{hashlib.sha256(chr(0).join(wanted).encode()).hexdigest()[:12]}"


def requirements(name: str) -> Path:
    """Return the file that lists the packages of an environment."""
    oldest = HERE / f"requirements-{name}-oldest.txt"
    wanted = os.environ.get(VERSIONS_VARIABLE) == "oldest" and oldest.exists()
    return oldest if wanted else HERE / f"requirements-{name}.txt"


def python(name: str) -> tuple[Path | None, str]:
    """Return the interpreter of an environment that was built, or None and why there is none."""
    done = place(name) / "done.json"
    if not done.exists():
        return None, f"no environment for {name}: `make test-frameworks` builds it"
    found = json.loads(done.read_text())
    if found["error"]:
        return None, f"no environment for {name}: {found['error']}"
    return place(name) / "bin/python", ""


def require(name: str) -> Path:
    """Return the interpreter of an environment; skip the test where there is none."""
    interpreter, why = python(name)
    return interpreter or pytest.skip(why)


def build(name: str) -> str:
    """Build an environment where there is none yet; return what went wrong, or nothing."""
    directory = place(name)
    done = directory / "done.json"
    if done.exists() and not json.loads(done.read_text())["error"]:
        return ""
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    error = _make(name, directory)
    directory.mkdir(exist_ok=True)
    done.write_text(json.dumps({"error": error}))
    return error


def _below() -> str:
    return sysconfig.get_paths()["purelib"]


def _make(name: str, directory: Path) -> str:
    base = Path(sys.base_prefix) / f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    pip: list[str | Path] = [directory / "bin/python", "-m", "pip", "install", "--quiet"]
    try:
        _call([base if base.exists() else sys.executable, "-m", "venv", directory])
        (packages,) = directory.glob("lib/python3*/site-packages")
        (packages / "below.pth").write_text(f"{_below()}\n")
        if name in WITHOUT_DEPENDENCIES:
            pip.append("--no-deps")
        if name == "deepspeed":  # it is built from source, without its kernels, and looks at the torch that is there
            _call([*pip, "setuptools", "wheel"])
            pip.append("--no-build-isolation")
        _call([*pip, "--requirement", requirements(name)])
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return str(error)[-300:]
    return ""


def _call(command: list[str | Path]) -> None:
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WITHIN_S, check=False, env=environment, cwd="/"
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{command[0]}: {' '.join(said[-3:])}")


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        error = build(name)
        sys.stdout.write(f"{name}: {error or place(name)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

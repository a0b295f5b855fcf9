"""`python -m tests.torch_oldest OPTIONS...`: play the trainer library's tests on the oldest Python and torch.

They have an environment of their own outside of the checkout, which lasts: `TORCH_OLDEST` says where.  Where it cannot
be made in `TORCH_OLDEST_WITHIN_S` seconds, say so loudly, and end with 0.  `--only-make` makes it and plays nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = Path(os.environ.get("TORCH_OLDEST", "/var/tmp/stepkeeper-torch-oldest"))
REQUIREMENTS = ROOT / "tests/requirements-torch-oldest.txt"
OLDEST = "3.10"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
"""Where a torch without CUDA is to be had; the package index has one with CUDA, of 3 GB, which needs no GPU either."""
MAKE_WITHIN_S = float(os.environ.get("TORCH_OLDEST_WITHIN_S", "900"))
START_WITHIN_S = 120.0
MODULES = (
    "against_stock",
    "any_state",
    "contract",
    "dcp_storage",
    "exactness",
    "formats",
    "initial_weights",
    "interface",
    "keeper",
    "load",
    "notice_anywhere",
    "oldest",
    "parts",
    "sampler",
    "save",
    "serialise",
    "staging",
    "state",
    "unusual_state",
    "verify",
    "verify_metadata",
    "without_numpy",
)
"""What rests on torch, in tests/trainer: modules that need the supervisor need its Python, too."""
WHOLE = ("any_state", "unusual_state")
"""Each row of docs/state.md is promised for the oldest torch, too: their campaign is played as well."""
PLAY_WITHIN_S = 1500.0


class UnavailableError(Exception):
    """The environment cannot be made here."""


def main(options: list[str]) -> None:
    """Make the environment, then become its pytest."""
    line = "=" * 100
    try:
        python = make()
    except UnavailableError as error:
        sys.stderr.write(
            f"{line}\nSKIPPED: NOTHING IS TESTED ON THE OLDEST TORCH, which cannot be had here:\n{error}\n{line}\n"
        )
        return
    versions = "import platform, torch; print('Python', platform.python_version(), 'with torch', torch.__version__)"
    if options == ["--only-make"]:
        return
    subprocess.run([python, "-c", versions], check=True, timeout=START_WITHIN_S)
    path = os.pathsep.join(str(ROOT / each) for each in ("trainer", "supervisor", "."))
    codes = []
    for marked, modules in (("not campaign", MODULES), ("campaign", WHOLE)):
        tests = [str(ROOT / f"tests/trainer/test_{name}.py") for name in modules]
        command = [str(python), "-m", "pytest", "-m", marked, "--dist", "loadscope", *options, *tests]
        played = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, timeout=PLAY_WITHIN_S, check=False)
        codes.append(played.returncode)
    sys.exit(max(codes))


def make() -> Path:
    """Return the environment's Python; make the environment where there is none for these requirements.

    Raises:
        UnavailableError: with what pip said last.
    """
    base = find_python() or sys.executable
    import tomllib  # noqa: PLC0415 - the tests on the oldest Python import this module, too

    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = [base, REQUIREMENTS.read_text(), *needed]
    ready, python = ENVIRONMENT / ".ready", ENVIRONMENT / "bin/python"
    digest = hashlib.sha256("\0".join(wanted).encode()).hexdigest()
    if ready.exists() and ready.read_text() == digest:
        return python
    until = time.monotonic() + MAKE_WITHIN_S
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    _call(until, base, "-m", "venv", ENVIRONMENT)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    [torch] = [line for line in wanted[1].splitlines() if line.startswith("torch==")]
    try:
        _call(until, *pip, "--retries", "0", "--timeout", "15", "--index-url", CPU_BUILDS, torch)
    except UnavailableError:
        sys.stderr.write(f"{CPU_BUILDS} has no {torch} for this machine: the build with CUDA is taken, 3 GB\n")
    _call(until, *pip, "--requirement", REQUIREMENTS, *needed)
    ready.write_text(digest)
    return python


def find_python() -> str | None:
    """Return a Python of the oldest version, on the PATH or below pyenv; None where there is none."""
    below = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{OLDEST}"), *map(str, sorted(below.glob(f"{OLDEST}.*/bin/python{OLDEST}")))]
    for candidate in filter(None, found):  # pyenv's shims are on the PATH for versions that are not chosen, too
        says = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        asked = subprocess.run([candidate, "-c", says], capture_output=True, text=True, timeout=60, check=False)
        if asked.stdout.strip() == OLDEST:
            return candidate
    return None


def _call(until: float, *command: str | Path) -> None:
    """Run a command, which is killed when `until` (monotonic) has come."""
    within_s = max(0.0, until - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise UnavailableError(f"{' '.join(map(str, command))}: {said}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Builds the library once for all tests and sessions: the result is named after what it was made from."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.lab import requirements

SOURCE = Path(__file__).with_name("nvml.c")
NAME = "libnvidia-ml.so.1"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
FLAGS = ("-std=c11", "-O2", "-g", *WARNINGS, "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")


def library(*, old: bool = False) -> Path:
    """Return the library's path.  Skips the test where there is no C compiler; fails it where there must be one."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        reason = "no C compiler for the fake NVML library: apt-get install gcc libc6-dev"
        if requirements.required():
            pytest.fail(reason)
        pytest.skip(reason)
    flags = [*FLAGS, f"-Wl,-soname,{NAME}", *(["-DFAKE_OLD"] if old else [])]
    made_from = hashlib.sha256(SOURCE.read_bytes() + repr([compiler, flags]).encode()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"stepkeeper-fake-nvml-{os.getuid()}-{made_from}"
    result = directory / NAME
    if result.exists() and directory.stat().st_uid == os.getuid():
        return result
    directory.mkdir(mode=0o755, exist_ok=True)
    directory.chmod(0o755)  # whatever the umask: lab jobs run as other users
    if directory.stat().st_uid != os.getuid():
        pytest.fail(f"{directory} belongs to someone else: remove it")
    scratch = directory / f"{os.getpid()}.tmp"  # two workers may build at the same time
    subprocess.run([compiler, *flags, "-o", str(scratch), str(SOURCE)], check=True, timeout=90)
    scratch.chmod(0o755)
    scratch.replace(result)
    return result

"""Processes that are forked from one with torch end, hear and say what started ones would."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import warm

LIMIT_S = 150.0


def test_a_forked_process_has_its_own_arguments_environment_input_and_directory(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], sys.stdin.read(), os.environ['OWN'], os.getcwd()); sys.exit(7)"
    line = [sys.executable, "-c", code, "a", "b c"]

    done = warm.run(line, text="words", timeout=LIMIT_S, cwd=tmp_path, env={"OWN": "yes"})

    assert (done.returncode, done.stdout) == (7, f"['a', 'b c'] words yes {tmp_path}\n"), done.stderr


def test_an_error_looks_as_that_of_a_started_one_and_a_signal_is_told() -> None:
    failed = warm.run([sys.executable, "-c", "raise ValueError('no')"], timeout=LIMIT_S)
    killed = warm.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], timeout=LIMIT_S)

    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ValueError: no")
    assert killed.returncode == -signal.SIGKILL


def test_a_process_that_is_does_not_end_in_time_is_killed() -> None:
    process = warm.Process(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"

    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()

    assert process.wait(LIMIT_S) == -signal.SIGKILL
    process.stdout.close()


def test_torch_is_there_without_an_import() -> None:
    done = warm.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], timeout=LIMIT_S)

    assert done.stdout == "True\n"
    with pytest.raises(ValueError, match="with -m or -c"):
        warm.Process(["/bin/true"])

"""What happens before the supervisor's loop begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.core.exits import ExitCode

WITHIN_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_slurm_that_is_away(tmp_path: Path, number: signal.Signals) -> None:
    """An orphan whose controller is gone would else ask for five minutes, and SIGTERM would change nothing."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    (commands / "scontrol").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NAME": "x", "SLURM_NTASKS_PER_NODE": "1"}
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_SUBMIT_DIR": str(tmp_path), **job,
    }  # fmt: skip
    command = [sys.executable, "-m", "stepkeeper", "run", "--run-dir", str(tmp_path / "run"), "--", "train"]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "asking again" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        process.send_signal(number)
        _, said = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
        process.wait(WITHIN_S)

    assert process.returncode == ExitCode.NO_SLURM
    assert "a signal came while Slurm did not answer, and nothing runs yet" in said

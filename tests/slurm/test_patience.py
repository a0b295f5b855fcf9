"""A controller that is overloaded answers late: after a call without an answer the next one is given more time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import PATIENT_S, SlurmCommands

CAPTURED = Path(__file__).parent / "captured"


@pytest.fixture
def slow_scontrol(tmp_path, monkeypatch):
    """Put a scontrol on PATH that answers after a second."""
    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\nsleep 1\ncat {CAPTURED}/running.txt\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_after_a_call_without_an_answer_the_next_one_may_take_longer(slow_scontrol):  # noqa: ARG001 - on PATH
    client = SlurmCommands(call_within_s=0.2)
    with pytest.raises(SlurmError, match=r"no answer in 0\.2 s"):
        client.job("7")

    assert client.job("7").restarts == 0

    began = time.monotonic()
    with pytest.raises(SlurmError, match=r"no answer in 0\.2 s"):
        client.job("7")
    assert time.monotonic() - began < PATIENT_S, "it answered again: the patience is over"

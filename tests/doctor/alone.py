"""A fixture for what the doctor says of a command: no other settings, an empty home, a stand-in `scontrol`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.doctor.test_storage import scontrol


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("STEPKEEPER_", "XDG_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(scontrol(tmp_path)))
    monkeypatch.chdir(tmp_path)

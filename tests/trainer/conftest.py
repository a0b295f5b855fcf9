from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer import warm
from tests.trainer.ranks import finish


@pytest.fixture(scope="session", autouse=True)
def forked_processes_end() -> Iterator[None]:
    """What `tests.trainer.warm` has started ends with the session."""
    yield
    warm.close()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A run of two ranks that nothing happened to: its directory and its losses."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    return run_dir, finish(2, run_dir, "--step-seconds-min=0.05")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CheckpointManager in this very process: what it installs is taken back."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "STEPKEEPER_")):
            monkeypatch.delenv(name)
    hook = sys.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    random.seed(0)
    torch.manual_seed(0)
    gc.freeze()  # what lives already is none of the test's, and a look among all objects takes 50 ms
    yield
    gc.unfreeze()
    sys.excepthook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def mounted() -> Iterator[Callable[[Path, str], Path]]:
    """A real file system of its own: `mounted(directory, "size=8m,nr_inodes=100")`."""
    found: list[Path] = []

    def mount(at: Path, options: str) -> Path:
        at.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        found.append(at)
        return at

    yield mount
    for at in found:
        subprocess.run(["umount", "--lazy", str(at)], check=True, timeout=90)  # a manager may have it open still

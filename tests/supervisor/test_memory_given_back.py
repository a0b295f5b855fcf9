"""A node's watcher removes the snapshots that ranks hold in its memory, when the run leaves the node."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats import messages as words
from stepkeeper_trainer.tiers.tier import Tiers

WITHIN_S = 60.0


def assignment(tmp_path: Path) -> bus.Assignment:
    return bus.Assignment(
        run_directory=str(tmp_path / "run"),
        run_id=secrets.token_hex(6),
        job_id=7,
        slurm_name="7",
        restart_count=0,
        attempt=0,
        nodes=("n1",),
        kill_wait_s=30.0,
        nonce=secrets.token_hex(8),
    )


@pytest.mark.parametrize("ends", ["quit", "killed"])
def test_an_orderly_end_gives_memory_back_and_a_kill_leaves_it_to_a_relaunch(tmp_path: Path, ends: str) -> None:
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o700)
    own = Tiers(snapshot_directory=str(shm)).snapshots_of(tmp_path / "run", "1", "n1")
    (own / "step_00000005").mkdir(parents=True)
    for each in (own, own.parent, own.parent.parent):
        each.chmod(0o700)
    told = assignment(tmp_path)
    environment = {**os.environ, **told.environment(), "SLURMD_NODENAME": "n1"}
    with subprocess.Popen(
        [sys.executable, "-m", "stepkeeper.watcher.main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        try:
            while b'"ready"' not in watcher.stdout.readline():
                pass
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
                rank.bind("")
                hello = words.Hello(
                    launch="0.0", rank=0, world_size=1, pid=os.getpid(), version="0", memory=str(own.parent)
                )
                rank.sendto(words.encode(hello), "\0" + told.socket_name("n1")[1:])
            while b'"hello"' not in watcher.stdout.readline():
                pass
            assert own.is_dir(), "a relaunch finds it"
            if ends == "quit":
                watcher.stdin.write(bus.encode(bus.Quit()))
                watcher.stdin.flush()
            else:
                watcher.kill()
            watcher.wait(WITHIN_S)
        finally:
            watcher.kill()
    assert own.is_dir() == (ends == "killed")
    assert bool(os.listdir(shm)) == (ends == "killed")

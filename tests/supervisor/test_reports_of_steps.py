"""A node's watcher passes on one report of a step a second, and tells how long it has held it back."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.main import PROGRESS_EVERY_S
from stepkeeper_trainer.formats import messages as words
from tests.supervisor.assignments import assigned

APART_S = 0.1
WITHIN_S = 60.0


def test_a_report_that_was_held_back_tells_so(tmp_path: Path) -> None:
    told = assigned(tmp_path / "run", run_id=secrets.token_hex(6), nonce=secrets.token_hex(8))
    over = threading.Event()

    def train() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
            rank.bind("")
            step = 0
            while not over.wait(APART_S):
                step += 1
                word = words.Progress(launch="0.0", rank=0, step=step, tokens=step, step_seconds=APART_S)
                rank.sendto(words.encode(word), "\0" + told.socket_name("n1")[1:])

    training = threading.Thread(target=train)
    with subprocess.Popen(
        [sys.executable, "-m", "stepkeeper.watcher.main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **told.environment(), "SLURMD_NODENAME": "n1"},
    ) as watcher:
        assert watcher.stdout is not None
        limit = threading.Timer(WITHIN_S, watcher.kill)  # the loops below then end with its output
        limit.start()
        said: list[bus.Rank] = []
        try:
            while line := watcher.stdout.readline():
                if b'"ready"' in line:
                    training.start()
                if b'"progress"' in line:
                    said.append(msgspec.json.decode(line, type=bus.Rank))
                if any(each.late_s for each in said):  # a machine so busy that none waits is busy for a while only
                    break
        finally:
            limit.cancel()
            over.set()
            watcher.kill()
            if training.ident is not None:
                training.join(WITHIN_S)

    assert any(each.late_s for each in said), said
    assert all(0.0 <= each.late_s <= PROGRESS_EVERY_S for each in said)

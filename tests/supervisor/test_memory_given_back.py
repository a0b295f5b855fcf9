"""A node's watcher removes the snapshots that ranks hold in its memory, when the run leaves the node."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.state import Nodes
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.sources.bus import Bus
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats import messages as words
from stepkeeper_trainer.tiers.holding import hold, let_go
from stepkeeper_trainer.tiers.tier import Tiers
from tests.supervisor.assignments import assigned
from tests.supervisor.test_journal_growth import NODES, SizedJournal, make

WITHIN_S = 60.0


@pytest.mark.parametrize("ends", ["for good", "held", "left", "other node left", "for another bus", "killed"])
def test_the_end_of_the_run_gives_memory_back_and_all_else_leaves_it_to_a_relaunch(tmp_path: Path, ends: str) -> None:
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o700)
    own = Tiers(snapshot_directory=str(shm)).snapshots_of(tmp_path / "run", "1", "n1")
    (own / "step_00000005").mkdir(parents=True)
    for each in (own, own.parent, own.parent.parent):
        each.chmod(0o700)
    told = assigned(tmp_path / "run", run_id=secrets.token_hex(6), nonce=secrets.token_hex(8))
    later: list[int] = []
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
            if ends == "held":  # by ranks of a later launch: this watcher is slow to end
                later.append(hold(own.parent))
            if ends != "killed":
                if "left" in ends:
                    watcher.stdin.write(bus.encode(bus.Leave(node="n1" if ends == "left" else "n2")))
                watcher.stdin.write(bus.encode(bus.Quit(for_good=ends in ("for good", "held"))))
                watcher.stdin.flush()
            else:
                watcher.kill()
            watcher.wait(WITHIN_S)
            last = watcher.stdout.read().splitlines()[-1:]
        finally:
            watcher.kill()
            for each in later:
                let_go(each)
    assert (last == [bus.encode(bus.Left(node="n1")).strip()]) == (ends != "killed"), "srun is ended then"
    given_back = ends in ("for good", "left")
    assert own.is_dir() != given_back
    assert bool(os.listdir(shm)) != given_back


@pytest.mark.parametrize("for_good", [True, False])
def test_a_bus_that_another_one_replaces_does_not_say_that_the_run_leaves(tmp_path: Path, *, for_good: bool) -> None:
    heard = tmp_path / "heard"
    inbox = Inbox(Clock())
    watchers = Bus(
        1,
        ["sh", "-c", 'printf "%s" "$READY"; cat >"$HEARD"'],
        {
            "READY": bus.encode(bus.Ready(node="a", pid=1, version="1")).decode(),
            "HEARD": str(heard),
            "PATH": os.environ["PATH"],
        },
        inbox=inbox,
        attempt=0,
        note=lambda *_: None,
        on_shard=lambda _shard: None,
    )
    assert isinstance(inbox.get(WITHIN_S), on.WatcherReady)
    if for_good:
        watchers.close()
    else:
        watchers.abandon()
    assert isinstance(inbox.get(WITHIN_S), on.BusEnded)
    assert bus.decode_to_watcher(heard.read_bytes()) == bus.Quit(for_good=for_good)


def test_nodes_that_are_given_back_hear_it_before_slurm_ends_their_watchers(tmp_path: Path) -> None:
    said: list[object] = []

    class Slurm:
        def keep(self, job: str, nodes: tuple[str, ...]) -> None:
            said.append((job, nodes))

    supervisor = make(tmp_path, SizedJournal())
    supervisor.client = Slurm()
    supervisor.state = msgspec.structs.replace(supervisor.state, nodes=Nodes(usable=NODES[:1]))
    supervisor.bus = type("Heard", (), {"say": lambda _self, word: said.append(word)})()
    supervisor._perform(do.ReleaseNodes(keep=NODES[:1]))
    assert isinstance(supervisor.inbox.get(WITHIN_S), on.NodesReleased)
    assert said == [bus.Leave(node=NODES[1]), ("7", NODES[:1])]

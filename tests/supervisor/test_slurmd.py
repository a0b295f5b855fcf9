"""A late watcher's node is lost only where its kernel refuses connections to slurmd: real sockets and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.sources import bus as sources
from stepkeeper.supervisor.sources import slurmd
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines

ANSWER_S = 60.0

LISTENS = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        server.accept()[0].close()
"""


def nothing(_: str) -> bool:
    return False


class Places:
    """Where slurmd of each node is."""

    def __init__(self) -> None:
        self.servers: dict[str, socket.socket] = {}
        self.addresses: dict[str, tuple[str, int]] = {}

    def listen(self, node: str) -> None:
        port = self.addresses.get(node, ("", 0))[1]
        self.servers[node] = socket.create_server(("127.0.0.1", port), backlog=100)
        self.addresses[node] = self.servers[node].getsockname()

    def end(self, node: str) -> None:
        self.servers.pop(node).close()


@pytest.fixture
def places() -> Iterator[Places]:
    made = Places()
    for node in ("a", "b", "c"):
        made.listen(node)
    yield made
    for server in made.servers.values():
        server.close()


def followed(
    places: Places,
    late: str,
    *,
    spoke: Callable[[str], bool] = nothing,
    at: dict[int, Callable[[], None]] | None = None,
    looks: int = 3 * slurmd.REFUSALS,
) -> list[str]:
    """Look at nodes so many times without a pause in between, do something before some looks, return what is told."""
    told: list[str] = []
    numbers = iter(range(looks + 1))

    def wait(_: float) -> bool:
        number = next(numbers)
        (at or {}).get(number, lambda: None)()
        return number == looks

    slurmd.follow(late.split(), "a", places.addresses, spoke=spoke, wait=wait, report=told.append)
    return told


def test_a_node_that_refuses_connections_is_told_again_and_again(places: Places) -> None:
    """The supervisor may learn only later that no rank runs there."""
    places.end("b")

    assert followed(places, "b c") == ["b", "b", "b"]


def test_a_slurmd_that_is_restarted_is_not_told(places: Places) -> None:
    places.end("b")

    assert followed(places, "b", at={slurmd.REFUSALS - 1: lambda: places.listen("b")}) == []


def test_a_node_that_speaks_again_is_not_told(places: Places) -> None:
    places.end("b")
    heard = threading.Event()

    assert followed(places, "b", spoke=lambda _: heard.is_set(), at={slurmd.REFUSALS - 2: heard.set}) == []


def test_where_no_slurmd_takes_connections_nothing_is_known_of_one(places: Places) -> None:
    """An upgrade restarts all of them, and a wrong port is refused everywhere."""
    places.end("b")
    places.end("a")

    assert followed(places, "b") == []


def test_a_paused_node_is_not_told(places: Places) -> None:
    """Its kernel takes connections, whatever its processes do."""
    process = subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        places.addresses["b"] = ("127.0.0.1", int(process.stdout.readline()))
        process.send_signal(signal.SIGSTOP)

        assert followed(places, "b") == []
    finally:
        process.kill()
        process.wait()


def test_a_host_that_does_not_answer_is_not_told(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a cut or slow network: nothing is known but the silence.  Here its queue of connections is full."""
    monkeypatch.setattr(slurmd, "CONNECT_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as waiting:
        places.addresses["b"] = server.getsockname()
        with contextlib.suppress(TimeoutError):
            while True:
                waiting.enter_context(socket.create_connection(places.addresses["b"], 0.2))

        assert not slurmd.connects(places.addresses["b"])
        assert followed(places, "b") == []


def test_a_name_that_is_not_resolved_is_not_told(places: Places) -> None:
    places.addresses["b"] = ("no-such-host.invalid", 6818)

    assert followed(places, "b") == []


SRUN = """printf "%s" "$READY"
exec 3<&0
while read word <&3; do printf "%s" "$SPEAKS"; done &
while printf "%s" "$ALIVE"; do sleep 0.1; done"""
SCONTROL = """#!/bin/sh
case "$*" in
"show config") echo "SlurmdPort              = 6818" ;;
"-o show node b,a")
  echo "NodeName=b NodeAddr=127.0.0.1 Port={b} "
  echo "NodeName=a NodeAddr=127.0.0.1 Port={a} " ;;
*) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""


def test_the_bus_looks_at_the_node_of_a_late_watcher(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only b says nothing; where slurmd is, Slurm tells.  Once b has spoken, it is looked at anew."""
    places.end("b")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL.format(a=places.addresses["a"][1], b=places.addresses["b"][1]))
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sources, "LATE_AFTER_S", 0.5)
    monkeypatch.setattr(slurmd, "LOOK_EVERY_S", 0.02)
    ready = b"".join(lines.encode(lines.Ready(node=node, pid=1, version="1")) for node in ("a", "b")).decode()
    inbox = Inbox(Clock())
    notes: list[tuple[str, str]] = []
    bus = sources.Bus(
        1,
        ["sh", "-c", SRUN],
        {
            "READY": ready,
            "ALIVE": lines.encode(lines.Alive(node="a")).decode(),
            "SPEAKS": lines.encode(lines.Alive(node="b")).decode(),
            "PATH": os.environ["PATH"],
        },
        inbox=inbox,
        attempt=0,
        note=lambda node, text: notes.append((node, text)),
        on_shard=lambda _share: None,
        size=2,
    )

    suspected: list[tuple[str, ...]] = []

    def told() -> on.SlurmdGone:
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until:
            bus.look_at_late()
            found = inbox.get(0.1)
            if isinstance(found, on.Suspected):
                suspected.append(found.nodes)
            if isinstance(found, on.SlurmdGone):
                return found
        raise AssertionError(notes)

    try:
        found = told()
        assert (found.node, found.bus, notes) == ("b", 1, [])
        assert found.silent_s >= 0.5
        assert suspected == [("b",)]

        bus.say(lines.ReadNoMore(number=1))
        while inbox.get(1.0) is not None:  # until b is followed no more, and late again
            pass
        assert told().node == "b"
    finally:
        bus.abandon()

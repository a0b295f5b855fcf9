"""NCCL's RAS as a witness: documents of the documented format, and real servers that speak its protocol, well or ill.

No NCCL runs here.  The documents are made after `src/ras/client_support.cc` of NCCL 2.30, not recorded from a job.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.diagnosis import collectives
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.actions.stack_collector import StackCollector, is_awaited, recorded_first, trust
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as bus
from stepkeeper.watcher import nccl_ras
from stepkeeper.watcher.nccl_ras import RasWitness, Status, address_of, ask, find_behind
from stepkeeper.watcher.stacks import StackTaker
from stepkeeper_trainer.formats.collectives import Place, expand
from tests.supervisor.assignments import assigned

HERE, THERE = "127.0.0.1", "192.0.2.7"  # the second one is of no machine (RFC 5737)
OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
PIDS = {0: 100, 1: 101}  # of this node


def member(number: int, rank: int, *, count: int, gathers: int = 3) -> dict[str, Any]:
    counts = dict.fromkeys(OPERATIONS, 0) | {"AllReduce": count, "AllGather": gathers}
    return {
        "rank": number,
        "host": HERE if rank < len(PIDS) else THERE,
        "pid": 100 + rank % len(PIDS),  # of another node: the same pids
        "cuda_dev": rank % len(PIDS),
        "nvml_dev": rank % len(PIDS),
        "status": {
            "init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False,
        },
        "collective_counts": counts,
    }  # fmt: skip


def communicator(name: str, counts: dict[int, int]) -> dict[str, Any]:
    """Make one of these ranks, with how many all-reduces each has issued."""
    return {
        "hash": name,
        "secondary_hash": "0x1:0x2",
        "size": len(counts),
        "ranks_count": len(counts),
        "missing_ranks_count": 0,
        "ranks": [member(number, rank, count=count) for number, (rank, count) in enumerate(counts.items())],
        "missing_ranks": [],
    }


def document(*communicators: dict[str, Any]) -> dict[str, Any]:
    return {
        "nccl_version": "2.30.0",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-26 15:00:00",
        "communicators_count": len(communicators),
        "communicators": copy.deepcopy(list(communicators)),
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }


def status(*communicators: dict[str, Any]) -> Status:
    return msgspec.json.decode(json.dumps(document(*communicators)), type=Status)


WORLD = communicator("0xaa", {0: 50, 1: 50, 2: 49, 3: 50})


def places(found: list[nccl_ras.Behind]) -> dict[int, list[Place]]:
    known: dict[int, list[Place]] = {}
    for each in found:
        for rank in expand(each.ranks) | {each.first}:
            known.setdefault(rank, []).append(each.place)
    return known


# --- what counts ----------------------------------------------------------------------------------


def test_the_one_rank_that_is_behind_is_named_by_the_comparison_of_flight_recorders() -> None:
    known = places(find_behind(status(WORLD), status(WORLD), PIDS))

    standstills = collectives.compare(known, range(4))
    assert collectives.find_suspect(standstills) == 2
    assert collectives.in_words(standstills, known) == (
        "ranks 0, 1, 3 wait in AllReduce #53 of group NCCL (0xaa), rank 2 has not entered it (the newest it entered is "
        "AllReduce #52)"
    )


def test_it_shows_that_others_wait_for_a_rank_that_only_sleeps() -> None:
    stood = [
        bus.Stood(node="n", number=1, rank=rank, where="is in step (train.py:9)", idle=True, sleeps=rank == 2)
        for rank in range(4)
    ]

    assert not is_awaited(stood)
    known = places(find_behind(status(WORLD), status(WORLD), PIDS))
    assert is_awaited(stood, collectives.compare(known, range(4)))


@pytest.mark.parametrize(
    ("where", "state", "suspect"),
    [
        ("is in step (train.py:9)", {}, None),  # in `loss.item()`, for all that its stack tells
        ("is in step (train.py:9)", {"idle": True}, None),
        ("waits in synchronize", {"waits": True}, None),
        ("is in step (train.py:9)", {"idle": True, "sleeps": True}, 2),
        ("was stopped by a signal", {"halted": True}, 2),
        ("is in the data loader (train.py:9 in step)", {}, 2),
    ],
)
def test_who_has_issued_less_may_wait_for_its_gpu(where: str, state: dict[str, bool], suspect: int | None) -> None:
    stood = [bus.Stood(node="n", number=1, rank=rank, where="is in step (train.py:9)") for rank in (0, 1, 3)]
    stood.append(bus.Stood(node="n", number=1, rank=2, where=where, **state))
    standstills = collectives.compare(places(find_behind(status(WORLD), status(WORLD), PIDS)), range(4))

    assert collectives.find_suspect(trust(standstills, stood)) == suspect
    assert not trust(standstills, stood[:3]), "nothing is known of the rank"


def test_flight_recorders_count_first() -> None:
    """All have entered: NCCL's counts must not name the one that waits for its GPU."""
    entered = Place(group="0", what="default_pg", members="0-3", last=49, last_op="all_reduce", at=49, op="all_reduce")
    known = places(find_behind(status(WORLD), status(WORLD), PIDS))
    both = collectives.compare({rank: [entered, *known[rank]] for rank in range(4)}, range(4))

    assert collectives.find_suspect(both) == 2
    assert collectives.find_suspect(recorded_first(both)) is None


def changed(change: Callable[[dict[str, Any]], None]) -> Status:
    made = document(WORLD)
    change(made)
    return msgspec.json.decode(json.dumps(made), type=Status)


def _on(made: dict[str, Any], host: str) -> None:
    for each in made["communicators"][0]["ranks"]:
        each["host"] = host


def _with_stranger(made: dict[str, Any]) -> None:
    other = communicator("0xbb", {0: 5, 9: 5})
    other["ranks"][1]["pid"] = 777
    made["communicators"].append(other)


def _counts(made: dict[str, Any], rank: int, **counts: int) -> None:
    made["communicators"][0]["ranks"][rank]["collective_counts"] |= counts


SAYS_NOTHING: dict[str, Callable[[dict[str, Any]], None]] = {
    "all are level": lambda made: _counts(made, 2, AllReduce=50),
    "two are behind": lambda made: _counts(made, 3, AllReduce=49),
    "one is behind in one operation and others in another": lambda made: _counts(made, 2, AllGather=4),
    "a rank is missing": lambda made: made["communicators"][0]["missing_ranks"].append({"rank": 4}),
    "another job's processes": lambda made: made["communicators"][0]["ranks"][0].update(pid=7),
    "the same pids on another node": lambda made: _on(made, THERE),
    "no communicator of all ranks": lambda made: made["communicators"][0].update(size=5),
    "a rank twice": lambda made: made["communicators"][0]["ranks"][3].update(rank=2),
    "nothing at all": lambda made: made["communicators"].clear(),
    "a process that is in no communicator of all ranks": _with_stranger,
}


@pytest.mark.parametrize("change", SAYS_NOTHING.values(), ids=SAYS_NOTHING)
def test_it_says_nothing_where_it_is_not_certain(change: Callable[[dict[str, Any]], None]) -> None:
    assert find_behind(changed(change), changed(change), PIDS) == []


def test_it_says_nothing_while_anything_moves() -> None:
    before = changed(lambda made: _counts(made, 0, AllReduce=49))

    assert find_behind(before, status(WORLD), PIDS) == []
    assert find_behind(status(WORLD), status(WORLD), PIDS)


def test_ranks_of_smaller_communicators_are_those_of_the_job() -> None:
    pairs = [communicator("0xbb", {0: 9, 2: 8}), communicator("0xcc", {1: 9, 3: 9})]
    level = communicator("0xaa", dict.fromkeys(range(4), 50))

    [late, waits] = find_behind(status(level, *pairs), status(level, *pairs), PIDS)

    assert (late.ranks, late.place.at, waits.ranks, waits.place.group) == ("2", None, "0", "0xbb")
    other = [communicator("0xbb", {0: 9, 2: 8}), communicator("0xcc", {1: 9, 3: 8})]
    assert find_behind(status(level, *other), status(level, *other), PIDS) == [], "another one in another communicator"


def test_eight_thousand_ranks_are_two_short_lines() -> None:
    counts = dict.fromkeys(range(8192), 50) | {4000: 49}
    made = communicator("0xaa", counts)
    for rank, each in enumerate(made["ranks"]):
        each |= {"pid": 100 + rank % 8, "host": HERE if rank < 8 else f"10.0.{rank // 8 // 250}.{rank // 8 % 250}"}
    began = time.process_time()

    found = find_behind(status(made), status(made), {rank: 100 + rank for rank in range(8)})

    assert [each.ranks for each in found] == ["4000", "0-3999", "4001-8191"]
    lines = [bus.Entered(node="n", number=1, rank=each.first, place=each.place, ranks=each.ranks) for each in found]
    assert all(len(bus.encode(line)) < bus.LINE_BYTES_MAX for line in lines)
    assert time.process_time() - began < 10


# --- the protocol ---------------------------------------------------------------------------------


Answer = Callable[[socket.socket, str], bool]  # of one line; false: close


def right(connection: socket.socket, line: str) -> bool:
    """Answer as NCCL does."""
    if line.startswith("CLIENT PROTOCOL "):
        connection.sendall(b"SERVER PROTOCOL 2\n")
    elif line.startswith("TIMEOUT ") or line == "SET FORMAT json":
        connection.sendall(b"OK\n")
    elif line == "STATUS":
        data = json.dumps(document(WORLD), indent=2).encode()
        for begin in range(0, len(data), 700):  # in pieces, as over a network
            connection.sendall(data[begin : begin + 700])
        return False
    return True


@contextmanager
def server(answer: Answer, *, takes: bool = True) -> Iterator[tuple[str, int]]:
    """Listen as the RAS threads of a node do."""
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(0.05)
        over = threading.Event()

        def serve(connection: socket.socket) -> None:
            with connection, connection.makefile() as lines:
                try:
                    for line in lines:
                        if not answer(connection, line.strip()):
                            return
                except OSError:
                    return  # the other end has given up

        def run() -> None:
            while takes and not over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                connection.settimeout(5)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            over.set()
            thread.join(5)


def asked(address: tuple[str, int], within_s: float = 5.0) -> Status | None:
    return ask(address, time.monotonic() + within_s)


def test_the_protocol_is_spoken_as_its_own_client_does() -> None:
    said = []

    def note(connection: socket.socket, line: str) -> bool:
        said.append(line)
        return right(connection, line)

    with server(note) as address:
        assert asked(address) == status(WORLD)

    assert said == ["CLIENT PROTOCOL 2", "TIMEOUT 4", "SET FORMAT json", "STATUS"]


def silent(_connection: socket.socket, _line: str) -> bool:
    return True


def old(connection: socket.socket, line: str) -> bool:
    """Answer as NCCL 2.27, which has no JSON."""
    if line.startswith("SET "):
        connection.sendall(f"ERROR: Unknown command {line}\n".encode())
        return True
    return right(connection, line)


def stranger(connection: socket.socket, _line: str) -> bool:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    return False


def endless_line(connection: socket.socket, _line: str) -> bool:
    while True:
        connection.sendall(b"x" * 65536)


def to_status(data: bytes, *, then_stops: bool = False) -> Answer:
    """Answer the question itself with these bytes, and end the connection, or say nothing more."""

    def answer(connection: socket.socket, line: str) -> bool:
        if line == "STATUS":
            connection.sendall(data)
            return then_stops
        return right(connection, line)

    return answer


def with_other_types() -> bytes:
    made = document(WORLD)
    made["communicators"][0]["ranks"][0]["rank"] = -1
    return json.dumps(made).encode()


@pytest.mark.parametrize(
    "answer",
    [
        old,
        stranger,
        endless_line,
        pytest.param(to_status(json.dumps(document(WORLD)).encode()[:500]), id="half"),
        pytest.param(to_status(b"\xff\x00[[[["), id="not_json"),
        pytest.param(to_status(with_other_types()), id="other_types"),
    ],
)
def test_other_answers_are_none_and_take_no_time(answer: Answer) -> None:
    began = time.monotonic()

    with server(answer) as address:
        assert asked(address, 60.0) is None

    assert time.monotonic() - began < 30, "it is not waited for"


@pytest.mark.parametrize(
    "answer",
    [silent, pytest.param(to_status(b'{"communicators": [', then_stops=True), id="stops_half_way")],
)
def test_who_does_not_answer_costs_no_more_than_the_limit(answer: Answer) -> None:
    with server(answer) as address:
        began = time.monotonic()
        assert asked(address, 1.0) is None
        assert time.monotonic() - began < 10


def test_a_stopped_process_does_not_answer_for_the_others() -> None:
    """Processes of a node share the port: the next connection is another one's."""
    count = iter(range(10))
    silent_ones = {0, 1}
    of_connection: dict[int, int] = {}

    def answer(connection: socket.socket, line: str) -> bool:
        number = of_connection.setdefault(connection.fileno(), -1)
        if line.startswith("CLIENT"):
            number = of_connection[connection.fileno()] = next(count)
        return number in silent_ones or right(connection, line)

    with server(answer) as address:
        assert asked(address, 20.0) == status(WORLD)


def test_an_answer_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "DOCUMENT_BYTES_MAX", 1 << 20)
    sent = []

    def endless(connection: socket.socket, line: str) -> bool:
        while line == "STATUS":
            sent.append(connection.send(b" " * 65536))
        return right(connection, line)

    with server(endless) as address:
        assert asked(address, 60.0) is None
    assert sum(sent) < 64 << 20


def test_nobody_listens_costs_nothing() -> None:
    with socket.create_server((HERE, 0)) as listener:
        address = listener.getsockname()[:2]
    began = time.monotonic()

    assert asked(address, 60.0) is None
    assert time.monotonic() - began < 5


# --- where it listens -----------------------------------------------------------------------------


@contextmanager
def process(**environment: str) -> Iterator[int]:
    """Start a process that only sleeps, with this environment."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], environment)
    try:
        give_up_at = time.monotonic() + 10
        while b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        yield pid
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, ("localhost", 28028)),
        ({"NCCL_RAS_ADDR": "127.0.0.1:1234"}, ("127.0.0.1", 1234)),
        ({"NCCL_RAS_ADDR": "0.0.0.0:1234"}, ("127.0.0.1", 1234)),
        ({"NCCL_RAS_ENABLE": "0"}, None),
        ({"NCCL_RAS_ADDR": "192.0.2.7:1234"}, None),
        ({"NCCL_RAS_ADDR": "login1:1234"}, None),
        ({"NCCL_RAS_ADDR": "localhost:x"}, None),
        ({"NCCL_RAS_ADDR": "localhost"}, None),
    ],
)
def test_the_ranks_own_environment_says_where_it_listens(
    environment: dict[str, str], address: tuple[str, int] | None
) -> None:
    with process(**environment) as pid:
        assert address_of(pid) == address


def test_two_looks_are_taken_and_only_by_the_watcher_of_rank_0() -> None:
    asked_for = []

    def note(connection: socket.socket, line: str) -> bool:
        asked_for.append(line)
        if line == "STATUS":
            made = document(communicator("0xaa", {0: 50, 1: 49}))
            for number, rank in enumerate(made["communicators"][0]["ranks"]):
                rank["pid"] = pids[number]
            connection.sendall(json.dumps(made).encode())
            return False
        return right(connection, line)

    with server(note) as (_, port), process(NCCL_RAS_ADDR=f"{HERE}:{port}") as one, process() as two:
        pids = {0: one, 1: two}
        witness = RasWitness(pids)
        give_up_at = time.monotonic() + 10
        while not witness._looks:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        assert witness.take() == [], "one look is none"
        witness.look_again()
        assert [each.ranks for each in witness.take()] == ["1", "0"]
        assert asked_for.count("STATUS") == 2
        other = RasWitness({1: two})
        other.look_again()
        assert other.take() == []
        assert asked_for.count("STATUS") == 2


@pytest.mark.parametrize("look", ["brief", "whole"])
def test_a_watcher_asks_beside_the_stacks_and_the_supervisor_joins_what_both_say(look: str, tmp_path: Path) -> None:
    pids: dict[int, int] = {}

    def answer(connection: socket.socket, line: str) -> bool:
        if line == "STATUS":
            made = document(communicator("0xaa", {0: 50, 1: 49}))
            for number, rank in enumerate(made["communicators"][0]["ranks"]):
                rank["pid"] = pids[number]
            connection.sendall(json.dumps(made).encode())
            return False
        return right(connection, line)

    inbox = Inbox(Clock())
    collector = StackCollector(inbox)
    number = collector.begin(do.CollectStacks(launch=3, nodes=("n1",), within_s=600.0))
    taker = StackTaker(assigned(tmp_path), "n1", find_spy=lambda: None, apart_s=1.0)
    with server(answer) as (_, port), process(NCCL_RAS_ADDR=f"{HERE}:{port}") as one, process() as two:
        pids |= {0: one, 1: two}
        taker.take(bus.Stacks(launch=3, number=number, brief=look == "brief"), pids)
        os.set_blocking(taker.fileno(), True)
        over = False
        while not over:
            for word in taker.words():
                heard = bus.decode_from_watcher(bus.encode(word))
                over = isinstance(heard, bus.StacksTaken)
                if not isinstance(heard, bus.Note):
                    collector.receive(heard)  # type: ignore[arg-type]

    event = inbox.get(60.0)

    assert isinstance(event, on.StacksCollected)
    assert event.rank is None, "there is no stack of it, and it may wait for its GPU"
    assert "rank 0 waits in AllReduce #53 of group NCCL (0xaa), rank 1 has not entered it" in event.summary

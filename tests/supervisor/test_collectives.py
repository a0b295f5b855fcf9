"""Who waits in which collective, and for whom: torch's own words, reduced, compared, and said."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import collect
from stepkeeper.diagnosis.classify import classify
from stepkeeper.diagnosis.collectives import compare, find_suspect, in_words
from stepkeeper.loop_tools import Clock
from stepkeeper.run_store.paths import STACKS_NAME
from stepkeeper.supervisor.actions.stack_collector import StackCollector
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher.flight_recorder import FlightRecorderRequest
from stepkeeper_trainer.formats import collectives
from stepkeeper_trainer.formats.collectives import Account, Place, trim
from stepkeeper_trainer.formats.plain import DecodeError


def waits(at: int = 812, *, op: str = "all_reduce", group: str = "0", last: int | None = None, **fields) -> Place:
    """A rank that has entered a collective that has not ended."""
    what = "default_pg" if group == "0" else ""
    newest = at if last is None else last
    return Place(group=group, what=what, members="0-3", last=newest, last_op=op, at=at, op=op, **fields)


def left(last: int = 811, *, op: str = "all_gather", group: str = "0") -> Place:
    """A rank all whose collectives have ended."""
    return Place(group=group, what="default_pg" if group == "0" else "", members="0-3", last=last, last_op=op)


def said(places: dict[int, tuple[Place, ...]], ranks: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[str, int | None]:
    found = compare(places, ranks)
    return in_words(found, places), find_suspect(found)


def test_the_rank_that_has_not_come_is_named_with_where_it_is() -> None:
    places = {0: (waits(),), 1: (waits(last=814),), 2: (left(),), 3: (waits(),)}

    assert said(places) == (
        (
            "ranks 0, 1, 3 wait in all_reduce #812 of the default group, "
            "rank 2 has not entered it (the newest it entered is all_gather #811)"
        ),
        2,
    )


def test_a_rank_that_gives_no_account_is_the_one_that_is_missing() -> None:
    assert said({0: (waits(),), 1: (waits(),), 3: (waits(),)}) == (
        "ranks 0, 1, 3 wait in all_reduce #812 of the default group, rank 2 does not answer",
        2,
    )


def test_a_rank_that_never_used_the_group_has_entered_none_of_it() -> None:
    text, suspect = said({0: (waits(),), 1: (waits(),), 2: (), 3: (waits(),)})

    assert "rank 2 has not entered it (it has entered none)" in text
    assert suspect == 2


def test_where_all_have_come_nobody_is_suspected() -> None:
    text, suspect = said({rank: (waits(),) for rank in range(4)})

    assert text == "all 4 known ranks have entered all_reduce #812 of the default group, and it does not end"
    assert suspect is None


def test_a_gpu_that_has_not_begun_what_others_have_is_named() -> None:
    places = {rank: (waits(queued=rank == 3),) for rank in range(4)}

    text, suspect = said(places)

    assert text.endswith("on rank 3 the GPU has not begun it")
    assert suspect == 3
    assert said({rank: (waits(queued=True),) for rank in range(4)})[1] is None, "all wait for something before it"


def test_ranks_that_are_in_different_collectives_at_one_number_disagree() -> None:
    places = {0: (waits(),), 1: (waits(op="broadcast"),), 2: (waits(),), 3: (waits(),)}
    shapes = {rank: (waits(shape="63 Float" if rank == 1 else "64 Float"),) for rank in range(4)}

    assert said(places) == (
        "the ranks disagree at #812 of the default group: ranks 0, 2, 3 wait in all_reduce, rank 1 waits in broadcast",
        None,
    )
    assert said(shapes)[0].endswith(
        "ranks 0, 2, 3 wait in all_reduce of 64 Float, rank 1 waits in all_reduce of 63 Float"
    )
    parts = {rank: (waits(op="reduce_scatter", shape=f"{rank} Float"),) for rank in range(4)}
    assert "disagree" not in said(parts)[0], "there the shapes may differ"


def test_of_several_groups_the_rank_that_waits_nowhere_is_the_one() -> None:
    """Ranks 0 and 1 wait for each other's stage, whose other members wait for rank 3."""
    pair = {"members": "0,2"}
    places = {
        0: (Place(group="5", last=7, last_op="broadcast", at=7, op="broadcast", **pair), left()),
        1: (waits(op="barrier"), left(group="9")),
        2: (Place(group="5", last=6, last_op="broadcast", **pair), waits(op="barrier")),
        3: (left(),),
    }

    text, suspect = said(places)

    assert suspect == 3, text
    assert "rank 0 waits in broadcast #7 of group 5" in text
    assert "ranks 1, 2 wait in barrier #812 of the default group" in text


def test_receiving_from_another_rank_is_told_and_not_compared() -> None:
    places = {0: (left(),), 1: (Place(group="pp", last=3, at=3, op="recv 1<-0", direct=True),)}

    assert said(places, (0, 1)) == ("rank 1 waits in recv 1<-0 of group pp", None)


def test_collectives_that_have_ended_say_nothing() -> None:
    assert said({rank: (left(),) for rank in range(4)}) == ("", None)


@pytest.mark.parametrize("ranks", [5000])
def test_of_many_ranks_some_are_named(ranks: int) -> None:
    members = f"0-{ranks - 1}"
    place = Place(group="0", members=members, last=9, at=9, op="all_reduce")
    behind = Place(group="0", members=members, last=8, last_op="all_reduce")
    places = {rank: (behind if rank % 100 == 7 else place,) for rank in range(ranks)}

    text, suspect = said(places, tuple(range(ranks)))

    assert len(text) < 400
    assert "50 ranks (7, 107, " in text
    assert suspect is None


# --- what a rank says -----------------------------------------------------------------------------


def entry(number: int, state: str, name: str = "nccl:all_reduce", **fields) -> dict[str, object]:
    """As `FlightRecorder::dump_json` writes it: hand-made, for the states that only a GPU knows."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": name, "time_created_ns": number,
        "input_sizes": [[64, 128]], "input_dtypes": ["Float"], "output_sizes": [[64, 128]], "output_dtypes": ["Float"],
        "state": state, "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": False,
        "timeout_ms": 600000, "is_p2p": False, **fields,
    }  # fmt: skip


def dumped(*entries: dict[str, object]) -> bytes:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}).encode()


def test_the_oldest_open_collective_of_a_gpu_counts() -> None:
    data = dumped(
        entry(5, "completed", retired=True), entry(6, "started"), entry(7, "scheduled", "nccl:_reduce_scatter_base")
    )

    (place,) = collectives.reduce([(data, True)])

    assert place == Place(
        group="0", what="default_pg", members="0-3", last=7, last_op="_reduce_scatter_base",
        at=6, op="all_reduce", shape="64x128 Float",
    )  # fmt: skip


def test_a_gpus_collective_that_is_given_up_without_an_end_is_open() -> None:
    (place,) = collectives.reduce([(dumped(entry(6, "scheduled", retired=True)), True)])

    assert (place.at, place.queued) == (6, True)
    (same,) = collectives.reduce([(dumped(entry(6, "scheduled", retired=True)), False)])
    assert same.at is None, "a CPU group's recorder says the end in no other way"


def test_messages_between_two_ranks_count_by_themselves() -> None:
    data = dumped(entry(6, "completed"), entry(6, "started", "nccl:recv 1<-0", is_p2p=True, p2p_seq_id=2))

    direct, group = collectives.reduce([(data, True)])

    assert (direct.direct, direct.at, direct.op) == (True, 2, "recv 1<-0")
    assert (group.direct, group.at) == (False, None)


def test_nothing_recorded_is_no_place() -> None:
    assert collectives.reduce([(b'{"version": "2.10", "pg_config": {}, "pg_status": {}}', True)]) == ()


@pytest.mark.parametrize("data", [b"", b"[]", b'{"entries": [{}]}', b"\xff", dumped(entry(6, "started"))[:-9]])
def test_what_torch_would_not_write_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        collectives.reduce([(data, True)])


def test_a_word_fits_into_a_line_whatever_a_rank_has_written() -> None:
    wild = '"\\\n\u2603' * 400
    place = Place(
        group=wild, what=wild, members=wild, last=2**200, last_op=wild, at=-(2**200), op=wild, shape=wild,
        queued=True, direct=True,
    )  # fmt: skip

    word = lines.Entered(node="n" * 64, number=2**31, rank=2**20, place=trim(place))

    assert lines.decode_from_watcher(lines.encode(word)) == word


# --- what NCCL writes by itself -------------------------------------------------------------------


def pickled(*entries: dict[str, object]) -> bytes:
    """As torch's writer makes it, which knows protocol 2 and no shared parts."""
    return pickle.dumps(json.loads(dumped(*entries)), protocol=2)


def test_a_pickled_dump_says_the_same() -> None:
    many = [entry(number, "completed", retired=True) for number in range(1, 2000)] + [entry(2000, "started")]

    data = pickled(*many)

    assert pickle.LONG_BINPUT in data
    assert collectives.reduce_parsed(collectives.parse_nccl_dump(data)) == collectives.reduce([(dumped(*many), True)])


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


HUGE_PLACE = pickle.PROTO + b"\2" + pickle.EMPTY_LIST + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f" + pickle.STOP


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps({"entries": [Evil()]}, protocol=2), "what no dump of a flight recorder does"),
        (pickle.dumps(Evil(), protocol=4), "what no dump of a flight recorder does"),
        (HUGE_PLACE, "what no dump of a flight recorder does"),
        (pickled(entry(6, "started"))[:-9], "torn"),
        (b"", "torn"),
        (pickle.SETITEMS + pickle.STOP, "torn or damaged"),
    ],
)
def test_a_pickle_that_does_more_than_hold_data_is_not_loaded(data: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        collectives.parse_nccl_dump(data)


@pytest.mark.parametrize("dump", [[], {"entries": 7}, {"entries": [{"process_group": [1, 2]}]}])
def test_data_of_another_shape_is_refused(dump: object) -> None:
    with pytest.raises(DecodeError):
        collectives.reduce_parsed(collectives.parse_nccl_dump(pickle.dumps(dump, protocol=2)))


def test_a_timeout_of_nccl_is_explained_by_what_the_ranks_recorded(tmp_path: Path) -> None:
    """One of the four was killed while it wrote."""
    place = tmp_path / STACKS_NAME
    place.mkdir()
    open_one, before = entry(6, "started", retired=True), entry(5, "completed", retired=True)
    for rank, entries in {0: (before, open_one), 1: (before,), 2: (before, open_one)}.items():
        collectives.nccl_dump_file(place, rank).write_bytes(pickled(*entries))
    collectives.nccl_dump_file(place, 3).write_bytes(pickled(before)[:-20])
    (tmp_path / "n1.log").write_text(
        "0: [rank0]:[E1121 10:00:00.000000000 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=8192, NumelOut=8192, Timeout(ms)=600000) ran for 600010 "
        "milliseconds before timing out.\n"
    )

    verdict = classify(collect.of_logs(tmp_path))

    assert verdict.cause is Cause.COLLECTIVE_TIMEOUT
    (recorded,) = [piece for piece in verdict.evidence if piece.rule == "nccl-flight-recorder"]
    assert recorded.rank == 1
    assert recorded.text == (
        "ranks 0, 2 wait in all_reduce #6 of the default group, "
        "rank 1 has not entered it (the newest it entered is all_reduce #5)"
    )
    assert collect.of_logs(tmp_path, enough=lambda: True) == []


# --- asking ---------------------------------------------------------------------------------------


def test_who_cannot_tell_is_neither_ended_nor_waited_for(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as rank:  # the signal would end it
        try:
            assert FlightRecorderRequest(tmp_path, {0: rank.pid}, clock=lambda: 0.0).take() == {}
            assert rank.poll() is None
        finally:
            rank.kill()


MUTE = """
import faulthandler, sys, time
from stepkeeper_trainer.formats import collectives
faulthandler.register(collectives.SIGNAL, file=open("/dev/null", "w"), chain=False)
print("ready", flush=True)
time.sleep(600)
"""


def test_an_account_of_an_earlier_request_does_not_count(tmp_path: Path) -> None:
    """A rank that holds the interpreter's lock writes no new one."""
    path = collectives.file(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(json.dumps({"rank": 0}).encode())
    ticks = iter(range(0, 1000, 2))
    with subprocess.Popen([sys.executable, "-c", MUTE], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"

        assert FlightRecorderRequest(tmp_path, {0: rank.pid}, clock=lambda: float(next(ticks))).take() == {}

        assert rank.poll() is None
        rank.kill()
    assert collectives.decode_account(path.read_bytes()) == Account(rank=0)


def test_each_word_of_a_watcher_names_its_node() -> None:
    """The bus's reader looks there first: a word without one would end it."""
    assert all("node" in word.__struct_fields__ for word in get_args(lines.FromWatcher))


def test_the_supervisor_joins_what_stacks_and_collectives_say() -> None:
    """Over the bus's own reader: each word of a watcher is of a node."""
    inbox = Inbox(Clock())
    standing = StackCollector(inbox)
    number = standing.begin(do.CollectStacks(launch=4, nodes=("a", "b"), within_s=600.0))
    words: list[lines.Stood | lines.Entered | lines.StacksTaken] = [
        lines.Stood(node="a", number=number, rank=0, where="is in step (train.py:7)"),
        lines.Entered(node="a", number=number, rank=0, place=left()),
        lines.Stood(node="b", number=number, rank=1, where="is in step (train.py:7)"),
        lines.Entered(node="b", number=number, rank=1, place=waits()),
        lines.Entered(node="b", number=number - 1, rank=0, place=waits()),
        lines.StacksTaken(node="a", number=number),
        lines.StacksTaken(node="b", number=number),
    ]
    for word in words:
        heard = lines.decode_from_watcher(lines.encode(word))
        assert isinstance(heard, lines.Stood | lines.Entered | lines.StacksTaken)
        assert heard.node
        standing.receive(heard)

    event = inbox.get(60.0)

    assert isinstance(event, on.StacksCollected)
    assert (event.rank, event.node) == (0, "a"), "the stacks alone tell nothing"
    assert event.summary.startswith("ranks 0, 1: each is in step (train.py:7); rank 1 waits in all_reduce #812 of the")
    assert "rank 0 has not entered it" in event.summary

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.run_analytics import nodes, reading
from stepkeeper.run_analytics.nodes import Nodes, NodeState
from stepkeeper.run_analytics.report.page import for_programs
from stepkeeper.run_store import lines
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build as runs
from tests.run_analytics.build import START, Journal, killed
from tests.run_analytics.test_timeline import RECORDED


def taken(growing: lines.Growing) -> tuple[bool, list[bytes]]:
    with growing.look() as (another, found):
        return another, list(found)


def test_each_look_takes_the_lines_that_came_since(tmp_path: Path) -> None:
    path = tmp_path / "file"
    growing = lines.Growing(path)
    assert taken(growing) == (False, [])
    path.write_bytes(b"one\ntwo\nthr")
    assert taken(growing) == (False, [b"one", b"two"])
    assert taken(growing) == (False, [])

    with path.open("ab") as file:
        file.write(b"ee\n\nfour\n")

    assert taken(growing) == (False, [b"three", b"", b"four"]), "a line is taken when it has its end, and whole"


@pytest.mark.parametrize("how", ["replaced", "cut off", "removed"])
def test_a_file_that_is_another_one_is_read_from_its_start(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    growing = lines.Growing(path)
    assert taken(growing) == (False, [b"one", b"two"])

    if how == "replaced":
        (tmp_path / "other").write_bytes(b"1\n2\n3\n4\n5\n")
        os.replace(tmp_path / "other", path)
        assert taken(growing) == (True, [b"1", b"2", b"3", b"4", b"5"])
    elif how == "cut off":
        path.write_bytes(b"1\n")
        assert taken(growing) == (True, [b"1"])
    else:
        path.unlink()
        assert taken(growing) == (True, [])
        path.write_bytes(b"1\n")
        assert taken(growing) == (False, [b"1"])


def test_of_a_line_beyond_the_limit_the_rest_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 10)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 25)
    growing = lines.Growing(path)
    assert taken(growing) == (False, [])

    with path.open("ab") as file:
        file.write(b"y\nshort\n")

    assert taken(growing) == (False, [b"x" * 10, b"short"])
    monkeypatch.setattr(lines, "PASSED_OVER_MAX", 10)
    with pytest.raises(OSError, match="are no lines"):
        taken(lines.Growing(path))


def test_a_run_that_is_read_while_it_grows_is_the_run_that_is_read_at_once(tmp_path: Path) -> None:
    """Whatever is written between two looks, torn lines too, the timeline is that of a reader who comes new."""
    run = runs.make_run(tmp_path / "run")
    reader = reading.Reader(run)
    whole = {name: (RECORDED / name).read_bytes() for name in ("journal.jsonl", "metrics.csv")}
    now = START + 1e6

    for part in range(1, 14):
        for name, data in whole.items():
            (run.path / name).touch()
            with (run.path / name).open("r+b") as file:
                file.seek(0, os.SEEK_END)
                file.write(data[file.tell() : len(data) * part // 13])
        assert for_programs(reader.see(now=now)) == for_programs(reading.see(run, now=now)), part
    assert reader.see(now=now).run_state == "finished"


def test_a_timeline_changes_nothing_for_the_next_one(tmp_path: Path) -> None:
    """A run that was silent for a while and goes on has no launch that ended without a word."""
    run = runs.make_run(tmp_path / "run")
    told = Journal()
    told.begin(0)
    told.launch(0)
    runs.write_journal(run, told.records)
    reader = reading.Reader(run)

    assert reader.see(now=START + 5000).run_state == "silent"
    assert [launch.ending for launch in reader.see(now=START + 5000).launches()] == ["no word"]
    assert [launch.ending for launch in reader.see(now=START + 1).launches()] == ["running"]


def test_a_step_directory_is_looked_at_again_when_it_changes_or_after_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.make_run(tmp_path / "run")
    first, second = runs.make_steps(run, 2)
    looked: list[str] = []
    look = reading.look

    def counted(entry: reading.steps.StepDirectory, cache: reading.Cache) -> object:
        looked.append(entry.path.name)
        return look(entry, cache)

    monkeypatch.setattr(reading, "look", counted)
    reader = reading.Reader(run)
    reader.see()
    assert sorted(looked) == [first.name, second.name]
    looked.clear()
    (first / "__0_0.distcp").unlink()
    seen = reader.see()

    assert looked == [first.name]
    assert [each.states[0] for each in seen.checkpoints] == ["damaged", "committed, not yet verified"]
    looked.clear()
    monkeypatch.setattr(reading, "LOOK_AGAIN_S", -1.0)
    (second / "new").touch()
    reader.see()
    reader.see()
    assert looked == [second.name, second.name]


def states(told: Journal) -> dict[str, tuple[str, str]]:
    found = Nodes()
    for record in told.records:
        found.take(record)
    return {each.name: (each.state.value, each.why) for each in found.listed()}


def test_states_of_nodes() -> None:
    told = Journal(nodes=("n1", "n2", "n3", "n4"))
    told.begin(0, nodes_wanted=3)
    told.launch(0)
    launch = told.state.launch.number
    assert states(told)["n4"] == ("spare", "")
    told.tell(
        on.NodesPaced(
            at=START + 5, launch=launch, step=5, step_seconds=1.0,
            own=(("n1", 0.5), ("n2", 0.5), ("n3", 0.5)), slowest=(("n2", 7, 0.0),),
        ),
    )  # fmt: skip
    told.tell(on.RankExited(at=START + 6, launch=launch, rank=3, node="n1", signal=9))
    found = Nodes()
    for record in told.records:
        found.take(record)
    first, *_ = found.listed()

    assert (first.name, first.state, first.ended) == ("n1", NodeState.RANKS_ENDED, {3: "signal 9"})
    assert {each.name: each.slowest_rank for each in found.listed()}["n2"] == 7
    assert nodes.count(found.listed()) == {NodeState.RANKS_ENDED: 1, NodeState.IN_USE: 2, NodeState.SPARE: 1}


def test_a_node_that_was_left_says_why_and_a_new_attempt_knows_nothing_of_it() -> None:
    told = Journal(nodes=("n1", "n2", "n3"))
    told.begin(0, nodes_wanted=2)
    told.launch(0)
    fault = {"incident": "i", "name": "XID 79", "action": "drain", "leave": True, "why": "fell off the bus"}
    told.tell(on.NodeFaulted(at=START + 6, node="n2", **fault))  # type: ignore[arg-type]
    assert states(told)["n2"] == ("left", "XID 79: fell off the bus")
    told.begin(100)

    assert set(states(told).values()) == {("in use", "")}


def test_a_slow_node_is_slow_until_it_keeps_up() -> None:
    told = killed()
    slow = do.ReportSlowNode(node="n2", factor=1.5, since=START)
    found = Nodes()
    for record in told.records:
        found.take(record)
    paced = on.NodesPaced(at=START + 200, launch=0, step=20, step_seconds=1.0, own=(("n1", 0.5), ("n2", 0.75)))
    record = told.records[-1]
    found.take(msgspec.structs.replace(record, event=paced, effects=(slow,)))
    assert found.listed()[0].why == "1.50 times as long for a step as the others"
    over = msgspec.structs.replace(
        record, event=paced, effects=(do.ReportSlowNode(node="n2", factor=1.0, since=START, over=True),)
    )
    found.take(over)

    assert {each.state for each in found.listed()} == {NodeState.IN_USE}


def test_following_reads_no_line_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: RunDirectory = runs.make_run(tmp_path / "run")
    runs.write_journal(run, killed().records)
    taken: list[object] = []
    monkeypatch.setattr(Nodes, "take", lambda _, record: taken.append(record))
    reader = reading.Reader(run)
    reader.see()
    reader.see()

    assert len(taken) == len(killed().records)


def found_nodes(told: Journal, ranks_each: int | None = None) -> dict[str, tuple[tuple[int, int] | None, int]]:
    found = Nodes()
    for record in told.records:
        found.take(record)
    return {each.name: (each.ranks, each.running) for each in found.listed(ranks_each)}


def test_ranks_are_known_while_all_is_well_and_counted_when_one_ends() -> None:
    told = Journal(nodes=("n1", "n2", "n3"))
    told.begin(0, gpus_per_node=2, nodes_wanted=2)
    assert set(found_nodes(told).values()) == {(None, 0)}

    told.launch(10)
    assert found_nodes(told) == {"n1": ((0, 1), 2), "n2": ((2, 3), 2), "n3": (None, 0)}
    assert found_nodes(told, 4)["n2"] == ((4, 7), 4)

    launch = told.state.launch.number
    told.tell(on.RankExited(at=START + 20, launch=launch, rank=3, node="n2", code=1))
    assert found_nodes(told)["n2"] == ((2, 3), 1)
    told.tell(on.LaunchEnded(at=START + 21, launch=launch, code=1))
    assert {running for _, running in found_nodes(told).values()} == {0}


def test_ranks_that_are_elsewhere_than_expected_are_not_guessed() -> None:
    told = Journal(nodes=("n1", "n2"))
    told.begin(0, gpus_per_node=2)
    told.launch(10)
    told.tell(on.RankExited(at=START + 20, launch=told.state.launch.number, rank=1, node="n2", code=1))
    assert {ranks for ranks, _ in found_nodes(told).values()} == {None}

    unwrapped = Journal(nodes=("n1", "n2"))
    unwrapped.begin(0, gpus_per_node=2, wrapped=False)
    unwrapped.launch(10)
    assert {ranks for ranks, _ in found_nodes(unwrapped).values()} == {None}

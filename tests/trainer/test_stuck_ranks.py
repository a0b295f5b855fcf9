"""What real torch tells of ranks that stand still in real collectives (gloo), asked while they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper.diagnosis.collectives import compare, find_suspect, in_words
from stepkeeper.watcher import flight_recorder
from stepkeeper.watcher.flight_recorder import FlightRecorderRequest
from stepkeeper_trainer.formats import collectives
from stepkeeper_trainer.formats.collectives import raw_file, reduce_parsed
from tests.trainer.stuck_ranks import LATE, SCENES, WORLD

LIMIT_S = 150.0  # a busy machine takes its time to get there


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, dict[int, int]]]]:
    """All scenes, playing: the directory, and the pids by scene and rank."""
    directory = tmp_path_factory.mktemp("stuck")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.stuck_ranks", str(directory), *SCENES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        yield directory, {scene: {int(rank): pid for rank, pid in of.items()} for scene, of in pids.items()}


Told = tuple[str, int | None, int]


@pytest.fixture
def told(ranks: tuple[Path, dict[str, dict[int, int]]]) -> Callable[[str, Callable[[str], bool]], Told]:
    """Return a function that asks until what is said is `enough`: ranks take a while to stand still.

    It returns what is said, who is suspected, and how many gave an account.
    """
    directory, pids = ranks

    def ask(scene: str, enough: Callable[[str], bool], accounts: int = WORLD) -> Told:
        give_up_at = time.monotonic() + LIMIT_S
        while True:
            for pid in pids[scene].values():
                # as a watcher does: the kernel gives the second of two signals to another thread, torch's or gloo's
                flight_recorder.ask(pid, collectives.STACKS_SIGNAL)
            places = FlightRecorderRequest(directory / scene, pids[scene]).take()
            found = compare(places, pids[scene])
            text = in_words(found, places)
            if (len(places) == accounts and enough(text)) or time.monotonic() > give_up_at:
                return text, find_suspect(found), len(places)

    return ask


def test_the_rank_that_has_not_come(told, ranks: tuple[Path, dict[str, dict[int, int]]]) -> None:
    expected = (
        "ranks 0, 1 wait in all_reduce #3 of the default group, "
        f"rank {LATE} has not entered it (the newest it entered is all_reduce #2)"
    )

    assert told("waits_alone", expected.__eq__) == (expected, LATE, WORLD)
    give_up_at = time.monotonic() + LIMIT_S
    while (found := _newest_sizes(ranks[0] / "waits_alone")) != [[4, 5]] and time.monotonic() < give_up_at:
        time.sleep(0.05)  # they are written last
    assert found == [[4, 5]], "torch's own words are kept for people"


def _newest_sizes(directory: Path) -> object:
    """Return the sizes of the newest collective by what torch itself said on rank 0; None where it has not yet."""
    try:
        return json.loads(raw_file(directory, 0, "cpu").read_bytes())["entries"][-1]["input_sizes"]
    except FileNotFoundError:
        return None


def _at_the_second(text: str) -> bool:
    begin = "ranks 0, 1 wait in all_reduce #2 of the default group"
    return text.startswith(begin) and f"rank {LATE} has not" in text


def test_the_oldest_of_several_open_collectives(told) -> None:
    text, suspect, _ = told("ahead", _at_the_second)

    assert _at_the_second(text), text
    assert suspect == LATE


def test_the_recorders_other_form_says_the_same(told, ranks: tuple[Path, dict[str, dict[int, int]]]) -> None:
    """NCCL writes this one by itself, by the same writer; here it was asked of the recorder of CPU groups."""
    text, _, _ = told("ahead", _at_the_second)

    files = {rank: collectives.nccl_dump_file(ranks[0] / "ahead", rank) for rank in range(WORLD)}
    give_up_at = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in files.values()) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    parsed = {rank: collectives.parse_nccl_dump(path.read_bytes()) for rank, path in files.items()}
    places = {rank: reduce_parsed(dump, of_gpu=False) for rank, dump in parsed.items()}
    assert in_words(compare(places), places) == text
    assert any("stuck_ranks.py" in frame["filename"] for frame in parsed[0]["entries"][0]["frames"])


def test_ranks_that_disagree(told) -> None:
    expected = (
        f"the ranks disagree at #2 of the default group: ranks 0, 1 wait in all_reduce, rank {LATE} waits in broadcast"
    )

    assert told("disagrees", expected.__eq__) == (expected, None, WORLD)


def test_a_rank_that_all_wait_for_by_way_of_another_group(told) -> None:
    waits = "rank 1 waits in barrier #2 of group tp"
    lacks = f"rank {LATE} has not entered it (the newest it entered is all_reduce #1)"

    text, suspect, _ = told("in_a_group", lambda text: all(words in text for words in (waits, lacks, "rank 0 waits")))

    assert waits in text
    assert lacks in text
    assert suspect == LATE, text


@pytest.mark.campaign
def test_a_rank_that_keeps_the_interpreters_lock_gives_no_account(told) -> None:
    expected = f"ranks 0, 1 wait in all_reduce #2 of the default group, rank {LATE} does not answer"

    assert told("deaf", expected.__eq__, WORLD - 1) == (expected, LATE, WORLD - 1)


def test_where_every_collective_has_ended_there_is_nothing_to_say(told) -> None:
    assert told("done", "".__eq__) == ("", None, WORLD)

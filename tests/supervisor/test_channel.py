"""A watcher's lines through a real pipe that nobody reads for a while."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.channel import Channel
from stepkeeper_trainer.formats.messages import Finished, Progress, TaskExited

MAX = 50


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    yield ends
    for end in ends:
        os.close(end)


def clog(channel: Channel) -> int:
    """Fill the pipe, and return how many lines are in it."""
    count = 0
    while not len(channel):
        channel.put(bus.Note(node="n1", text=f"{count:0800}"))
        count += 1
    return count - 1


def drain(channel: Channel, reader: int) -> list[bus.FromWatcher]:
    """Read and write in turns, as supervisor and watcher do, until nothing waits."""
    data = b""
    while len(channel) or select.select([reader], [], [], 0)[0]:
        data += os.read(reader, 65536)
        channel.flush()
    words = [bus.decode_from_watcher(line) for line in data.splitlines()]
    assert None not in words, "each line is whole"
    return [word for word in words if word is not None]


def progress(step: int) -> bus.Rank:
    return bus.Rank(node="n1", message=Progress(launch="0.0", rank=0, step=step, tokens=step, step_seconds=1.0))


def test_what_decides_is_kept_and_states_are_replaced_by_the_newest(pipe: tuple[int, int]) -> None:
    channel = Channel(pipe[1], "n1", lines_max=MAX)
    clogged = clog(channel)
    exits = [bus.Rank(node="n1", message=TaskExited(launch="0.0", rank=n, code=1, at=1.0)) for n in range(2 * MAX)]
    for number, word in enumerate(exits):
        channel.put(word)
        channel.put(progress(number))
        channel.put(bus.Alive(node="n1"))
        channel.put(bus.Note(node="n1", text=f"note {number}"))

    words = drain(channel, pipe[0])[clogged:]

    assert [word for word in words if word in exits] == exits, "all of them, in their order"
    assert words.count(bus.Alive(node="n1")) == 1
    assert [word for word in words if isinstance(word, bus.Rank) and isinstance(word.message, Progress)] == [
        progress(2 * MAX - 1)
    ]
    last = words[-1]
    assert isinstance(last, bus.Note)
    notes = [word for word in words if isinstance(word, bus.Note)]
    dropped = 1 + 2 * MAX - (len(notes) - 1)  # the one that clogged it, too
    assert f"{dropped} lines were dropped ({dropped} Note)" in last.text


def test_progress_stays_before_what_was_said_after_it(pipe: tuple[int, int]) -> None:
    channel = Channel(pipe[1], "n1")
    clogged = clog(channel)
    finished = bus.Rank(node="n1", message=Finished(launch="0.0", step=2))
    for word in (progress(1), progress(2), finished):
        channel.put(word)

    assert drain(channel, pipe[0])[clogged + 1 :] == [progress(2), finished]


def test_a_channel_that_nobody_can_read_any_more_holds_nothing() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    channel = Channel(writer, "n1")
    clog(channel)
    os.close(reader)

    channel.put(bus.Alive(node="n1"))

    assert not len(channel)
    os.close(writer)

"""The supervisor tries the storage with bytes that nobody needs, and says in figures what came of it."""

from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.actions import checkpoints
from stepkeeper.supervisor.sources.process import Inbox

WITHIN_S = 90.0


def outcome(directory: Path, effect: do.TestStorage) -> on.StorageTested:
    inbox = Inbox(Clock())
    thread = checkpoints.test_storage(directory, effect, within_s=WITHIN_S, inbox=inbox)
    thread.join(WITHIN_S)
    event = inbox.get(0.0)  # before the thread ends: what waits for it comes later
    assert isinstance(event, on.StorageTested), event
    return event


def test_good_storage_passes_with_figures_and_nothing_is_left(tmp_path: Path):
    event = outcome(tmp_path, do.TestStorage())

    assert event.ok
    assert not event.thorough
    assert event.bytes == checkpoints.QUICK_BYTES
    assert event.write_s > 0
    assert event.read_s > 0
    assert not list(tmp_path.iterdir())


def test_suspect_storage_is_tried_with_more_bytes(tmp_path: Path):
    event = outcome(tmp_path, do.TestStorage(thorough=True))

    assert event.ok
    assert event.thorough
    assert event.bytes > 4 * checkpoints.QUICK_BYTES


def test_storage_that_is_not_there_fails_and_the_act_is_named(tmp_path: Path):
    event = outcome(tmp_path / "unmounted", do.TestStorage())

    assert not event.ok
    assert not event.untrue
    assert "cannot make a directory: No such file or directory" in event.problem

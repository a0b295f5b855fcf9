"""Only watchers that know how are asked to read: one of an older version would never answer."""

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.sources.bus import Bus
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines
from stepkeeper_trainer.formats import messages as words
from stepkeeper_trainer.formats.messages import shorten

ANSWER_S = 90.0


def started(*said: bytes) -> tuple[Bus, Inbox]:
    """Start a bus whose other end says something and then listens."""
    text = b"".join(said).decode().replace("'", "")
    inbox = Inbox(Clock())
    argv = ["sh", "-c", f"printf %s '{text}'; cat >/dev/null"]
    bus = Bus(1, argv, {}, inbox=inbox, attempt=0, note=lambda *_: None, on_shard=lambda _share: None)
    return bus, inbox


def test_a_watcher_of_an_older_version_is_not_asked_to_read():
    older = b'{"type":"ready","node":"old","pid":1,"version":"0.1"}\n'
    newer = lines.encode(lines.Ready(node="new", pid=2, version="0.2", reads=True))
    bus, inbox = started(older, newer)

    heard = [inbox.get(ANSWER_S), inbox.get(ANSWER_S)]
    readers = bus.readers()
    bus.close()

    assert [type(event) for event in heard] == [on.WatcherReady, on.WatcherReady]
    assert readers == {"new"}
    assert isinstance(inbox.get(ANSWER_S), on.BusEnded)


def test_a_node_that_takes_no_part_is_looked_at_and_only_the_newest_answer_counts():
    """A late answer to an earlier check is old news."""
    said = [lines.Checked(node="b", number=number, unfit=why) for number, why in ((1, "late"), (2, ""), (2, "no GPU"))]
    inbox = Inbox(Clock())
    words = b"".join(map(lines.encode, said)).decode()
    heard_both = 'read first; read second; printf "%s" "$WORDS"; echo "$first" "$second" >&2; exit 3'
    bus = Bus(
        1,
        ["sh", "-c", heard_both],
        {"WORDS": words},
        inbox=inbox,
        attempt=0,
        note=lambda *_: None,
        on_shard=lambda _share: None,
    )

    for _ in range(2):
        bus.check(do.CheckNodes(nodes=("b",)))
    first, second, ended = (inbox.get(ANSWER_S) for _ in range(3))

    assert [each.unfit for each in (first, second)] == [(), (on.Unfit(node="b", why="no GPU"),)]
    assert (first.nodes, second.nodes) == (("b",), ("b",))
    assert isinstance(ended, on.BusEnded)
    assert '"node":"b","number":2' in ended.error


def test_a_report_of_a_step_tells_how_long_it_was_held_back():
    step = words.Progress(launch="0.0", rank=0, step=7, tokens=7, step_seconds=0.2)
    bus, inbox = started(lines.encode(lines.Rank(node="a", message=step, late_s=0.4)))

    heard = inbox.get(ANSWER_S)
    bus.close()

    assert isinstance(heard, on.Progressed)
    assert (heard.step, heard.late_s) == (7, 0.4)


def test_an_older_watcher_skips_what_it_does_not_know():
    """As any unknown line: so that the newer supervisor may say `ReadNoMore` to all."""
    assert lines.decode_to_watcher(b'{"type":"not_yet_invented","number":1}') is None


@pytest.mark.parametrize("message", [
    lines.Read(node="n" * 64, number=2**31, directory="step_" + "9" * 40, index=10**6, of=10**6, mib_per_s=1e6,
               from_disk=True),
    lines.ShardRead(node="n" * 64, number=2**31, index=10**6, of=10**6, bytes_read=2**60, done=True,
                    problem=shorten("x" * 999), problems=10**6, manifest="f" * 32, seen="f" * 32, began_at=1e10 / 3),
])  # fmt: skip
def test_the_longest_words_fit_into_a_line(message: lines.Read | lines.ShardRead):
    assert len(lines.encode(message)) <= lines.LINE_BYTES_MAX
    assert msgspec.json.decode(lines.encode(message))

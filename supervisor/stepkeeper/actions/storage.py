"""Trying the storage with bytes that nobody needs, on a thread of its own."""

from __future__ import annotations

import threading
from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.sources.inbox import Inbox, Part
from stepkeeper_trainer.store import space

QUICK_BYTES = 4 * 1024 * 1024
PROBLEM_CHARACTERS_MAX = 500


def test(directory: Path, effect: do.TestStorage, *, within_s: float, inbox: Inbox) -> threading.Thread:
    """Make a dummy save below a directory; `StorageTested` comes within the limit, before the thread ends."""

    def work() -> None:
        size = space.TEST_BYTES if effect.thorough else QUICK_BYTES
        found = space.storage_test(directory, size=size, limit_s=within_s)
        inbox.put(
            on.StorageTested(
                at=inbox.clock.now(),
                ok=found.problem is None,
                problem=(found.problem or "")[:PROBLEM_CHARACTERS_MAX],
                untrue=found.untrue,
                thorough=effect.thorough,
                bytes=found.bytes,
                write_s=found.write_s or 0.0,
                read_s=found.read_s or 0.0,
                from_disk=found.from_disk,
            )
        )

    return inbox.run(
        Part.TEST_STORAGE,
        work,
        answer=lambda error: on.StorageTested(at=inbox.clock.now(), ok=False, problem=error, thorough=effect.thorough),
    )

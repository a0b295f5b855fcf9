"""What people ask of the run (`stepkeeper save`, `stepkeeper stop`): files that are looked for now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from stepkeeper.core.events import Requested
from stepkeeper.sources.inbox import Inbox, Part
from stepkeeper.store import asks

LOOK_EVERY_S = 5.0


def watch(run_directory: Path, job_id: int, *, inbox: Inbox, on_error: Callable[[OSError], None]) -> None:
    """Emit `Requested` for each ask, again and again until it is answered.  On a thread: shared storage may hang."""
    pause = threading.Event()  # never set: the thread ends with the process

    def work() -> None:
        while True:
            try:
                found = asks.waiting(run_directory, job_id)
            except OSError as error:
                on_error(error)
                found = {}
            except Exception as error:  # noqa: BLE001 - what somebody wrote there must not end the looking
                inbox.failed(Part.REQUESTS, error)
                found = {}
            for name, ask in found.items():
                inbox.put(Requested(at=inbox.clock.now(), name=name, kind=ask.kind, by=ask.by))
            pause.wait(LOOK_EVERY_S)

    inbox.run(Part.REQUESTS, work)

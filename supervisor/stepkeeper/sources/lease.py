"""Watching the lease file: a newer attempt of the same run makes this one leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from stepkeeper.core.events import Superseded
from stepkeeper.sources.inbox import Inbox, Part
from stepkeeper.store import tenure
from stepkeeper_trainer.formats.lease import Lease, LeaseError

LOOK_EVERY_S = 5.0


def watch(run_directory: Path, ours: Lease, *, inbox: Inbox, on_error: Callable[[Exception], None]) -> None:
    """Emit `Superseded` once a newer attempt holds the lease.  On a thread: shared storage may hang."""
    pause = threading.Event()  # never set: the thread ends with the process

    def work() -> None:
        while True:
            try:
                newer = tenure.superseded(run_directory, ours)
            except (OSError, LeaseError) as error:
                on_error(error)
                newer = None
            except Exception as error:  # noqa: BLE001 - what somebody wrote there must not end the looking
                inbox.failed(Part.LEASE, error)
                newer = None
            if newer is not None:
                at = inbox.clock.now()
                inbox.put(Superseded(at=at, by_job_id=newer.job_id, by_restart_count=newer.restart_count))
                return
            pause.wait(LOOK_EVERY_S)

    inbox.run(Part.LEASE, work)

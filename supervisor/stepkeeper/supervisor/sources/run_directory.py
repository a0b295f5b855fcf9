"""Watching the lease file: a newer attempt of the same run ends this one, and so does a run directory that is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepkeeper.core.events import Requested, RunDirectoryGone
from stepkeeper.run_store import lease, requests
from stepkeeper.supervisor.sources.process import Inbox, Part, superseded
from stepkeeper_trainer.formats.lease import LEASE_NAME, Lease, LeaseError

LOOK_EVERY_S = 5.0
GONE_AFTER_S = 20.0  # a mount that comes back within it, or a directory that is being replaced, is none that is gone
_NOT_THERE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ESTALE))


def watch_lease(run_directory: Path, ours: Lease, *, inbox: Inbox, on_error: Callable[[Exception], None]) -> None:
    """Emit `Superseded` once a newer attempt holds the lease.  On a thread: shared storage may hang."""
    pause = threading.Event()  # never set: the thread ends with the process

    there = _Directory(run_directory)

    def work() -> None:
        newer: Lease | None = None
        while newer is None:
            try:
                with there.opened() as found:
                    newer = lease.superseded(run_directory, ours, opened=found) if found is not None else None
            except (OSError, LeaseError) as error:
                on_error(error)
            except Exception as error:  # noqa: BLE001 - what somebody wrote there must not end the looking
                inbox.failed(Part.LEASE, error)
            if there.missing_s() >= GONE_AFTER_S:
                inbox.put(RunDirectoryGone(at=inbox.clock.now(), path=str(run_directory)))
                return
            if newer is None:
                pause.wait(LOOK_EVERY_S)
        inbox.put(superseded(inbox.clock.now(), newer))

    inbox.run(Part.LEASE, work)


class _Directory:
    """The run directory as it was at the start; one that somebody makes anew in its place is not it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        with contextlib.suppress(OSError):  # then its lease shows it
            self._identity = _identity(os.stat(path))
        self._missing_since: float | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path | None]:
        """Open the directory: what is written below the path that this yields never lands in one that replaces it.

        Yields None where it is missing.

        Raises:
            OSError: it is not known now whether it is there.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                self._missing_since = None
                raise
            self._missed()
            yield None
            return
        try:
            found = Path(f"/proc/self/fd/{descriptor}")
            if _identity(os.fstat(descriptor)) == self._identity or (found / LEASE_NAME).exists():
                self._missing_since = None
                yield found
            else:
                self._missed()
                yield None
        finally:
            os.close(descriptor)

    def missing_s(self) -> float:
        """Return for how long it has been missing, as far as it was looked at; 0.0 where it is there."""
        return time.monotonic() - self._missing_since if self._missing_since is not None else 0.0

    def _missed(self) -> None:
        if self._missing_since is None:
            self._missing_since = time.monotonic()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# What people ask of the run (`stepkeeper save`, `stepkeeper stop`): files that are looked for now and then.


def watch_requests(run_directory: Path, job_id: int, *, inbox: Inbox, on_error: Callable[[OSError], None]) -> None:
    """Emit `Requested` for each ask, again and again until it is answered.  On a thread: shared storage may hang."""
    pause = threading.Event()  # never set: the thread ends with the process

    def work() -> None:
        while True:
            try:
                found = requests.waiting(run_directory, job_id)
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

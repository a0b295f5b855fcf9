"""What a launch knows of its storage: whether the next save fits, how long to wait after a failure, a first test.

A failure is told, periodic saves wait longer each time, and training goes on; an urgent save is tried anyway.
"""

from __future__ import annotations

import errno
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import NoRoomError, UsageError
from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.store import space

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.save.commit import Commits, CommittedStep


HOLD_S, HOLD_MAX_S = 30.0, 900.0  # periodic saves wait so long after the first failure, and at most
ASK_WITHIN_S = 10.0
QUICK_BYTES = 8 * 1024 * 1024  # of a test at the start: enough for each act of a save, too little to be felt
TEST_WITHIN_S = 60.0
STOP_WITHIN_S = 5.0
SLOW_FACTOR, SLOW_BY_S = 4.0, 1.0  # a save that takes so many times the usual, and so much longer, is told
SAVES_KEPT = 8  # whose median is the usual
STORAGE_ERRORS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EROFS,
        errno.ESTALE,
        errno.ENODEV,
        errno.ENXIO,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EFBIG,
        errno.EUCLEAN,
    }
)


@dataclass(slots=True)
class Backoff:
    """How long periodic saves wait for storage that has failed.  Pure: instants are arguments, of one clock."""

    first_s: float = HOLD_S
    longest_s: float = HOLD_MAX_S
    failures: int = 0  # in a row
    until: float | None = None

    def failed(self, now: float) -> float:
        """Take in a failure, and return how long saves wait now."""
        self.failures += 1
        wait_s = min(self.longest_s, self.first_s * 2.0 ** min(self.failures - 1, 32))
        self.until = now + wait_s
        return wait_s

    def succeeded(self) -> None:
        """Take in that a save was written."""
        self.failures, self.until = 0, None

    def holding(self, now: float) -> bool:
        """Whether periodic saves wait."""
        return self.until is not None and now < self.until


def of_storage(error: BaseException) -> bool:
    """Whether the storage is what has failed: by the error itself, or by what it came from."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, NoRoomError) or (isinstance(at, OSError) and at.errno in STORAGE_ERRORS):
            return True
        at = at.__cause__ or at.__context__
    return False


class Guard:
    """Stands before each save of a rank, and hears how it ended; on the saves' thread, but for `held`."""

    def __init__(
        self,
        checkpoints: Path,
        *,
        rank: int,
        world_size: int,
        last: Manifest | None = None,
        on_trouble: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        """Prepare.

        The first rank asks for all whether there is room, by the save that this launch resumed from (`last`); each
        waits for its own failures.  `on_trouble` is called when the storage has failed: something may be removed.
        """
        self._checkpoints = checkpoints
        self._rank, self._world_size = rank, world_size
        self._last = last
        self._on_trouble = on_trouble
        self._clock = clock
        self._backoff = backoff or Backoff()
        self._took: deque[float] = deque(maxlen=SAVES_KEPT)

    @property
    def held(self) -> bool:
        """Whether periodic saves wait, for what this rank knows."""
        return self._backoff.holding(self._clock())

    def committed(self, step: CommittedStep) -> None:
        """Take note of a commit: the next save will be like it; one that took far longer than usual is told."""
        self._last = step.manifest or self._last
        if step.persist_s is None:
            return
        usual_s = statistics.median(self._took) if self._took else step.persist_s
        if step.persist_s > max(SLOW_FACTOR * usual_s, usual_s + SLOW_BY_S):
            warn(
                "storage_slow",
                step=step.step,
                seconds=round(step.persist_s, 2),
                usual_s=round(usual_s, 2),
                why="the storage took that long; training went on",
            )
        self._took.append(step.persist_s)

    def close(self, _limit_at: float) -> None:
        """Nothing is under way."""

    def check_room(self, tensors: Mapping[str, torch.Tensor], limit_at: float) -> None:
        """See whether a save that nobody waits for fits.  Asked on rank 0, and never for long.  Raises NoRoomError."""
        if self._rank != 0:
            return
        size = sum(tensor.nbytes for tensor in tensors.values()) if self._last is None else 0
        needs = space.estimate(self._last, state_bytes=size, world_size=self._world_size)
        within_s = max(0.5, min(ASK_WITHIN_S, (limit_at - time.time()) / 2))
        why = space.lacking(self._checkpoints, needs, within_s=within_s)
        if why is not None:
            raise NoRoomError(why)

    def succeeded(self) -> None:
        """Take in that this rank's share was written."""
        if self._backoff.failures:
            say("storage_works_again", rank=self._rank, failures=self._backoff.failures)
        self._backoff.succeeded()

    def failed(self, error: BaseException) -> None:
        """Take in why a save came to nothing: where it was the storage, the next periodic one waits."""
        if of_storage(error):
            self.trouble(str(error))

    def trouble(self, why: str) -> None:
        """Say what is wrong with the storage, and have periodic saves wait."""
        wait_s = self._backoff.failed(self._clock())
        warn(
            "storage_alarm",
            rank=self._rank,
            why=shorten(why),
            failures=self._backoff.failures,
            next_save_after_s=round(wait_s),
        )
        self._on_trouble()


class StartTest:
    """A dummy save beside the first steps: bad storage is found before hours of work depend on it.

    Beside, because good storage needs no waiting for and bad storage may hang; on a thread of its own, because the
    saves' thread must be free for a save that is asked for now.
    """

    def __init__(self, commits: Commits, size: int, rank: int, on_problem: Callable[[str], object]) -> None:
        self._directory = _place_to_test(commits.run_directory, commits.checkpoints)
        self._size, self._rank = size, rank
        self._on_problem = on_problem
        self._thread = threading.Thread(target=self._work, name="stepkeeper-storage-test", daemon=True)
        self._thread.start()

    def committed(self, _step: CommittedStep) -> None:
        """Nothing to do."""

    def close(self, limit_at: float) -> None:
        """Wait for its end, so that nothing of it is left behind."""
        self._thread.join(max(0.0, min(STOP_WITHIN_S, limit_at - time.time())))

    def _work(self) -> None:
        found = space.storage_test(self._directory, size=self._size, limit_s=TEST_WITHIN_S)
        if found.problem is not None:
            self._on_problem(f"test at the start: {found.problem}")
            return
        say(
            "storage_tested",
            rank=self._rank,
            bytes=found.bytes,
            write_s=round(found.write_s or 0.0, 3),
            read_s=round(found.read_s or 0.0, 3),
            from_disk=found.from_disk,
        )


def bytes_to_test(wanted: str | int) -> int:
    """Return how many bytes a test at the start writes; 0 for none.

    Raises:
        UsageError: it is neither `quick`, `off` nor a number of bytes.
    """
    if wanted == "off":
        return 0
    if wanted == "quick":
        return QUICK_BYTES
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
        return wanted
    raise UsageError(f"storage_test={wanted!r}: give `quick`, `off`, or a number of bytes")


def _place_to_test(run_directory: Path, checkpoints: Path) -> Path:
    """Return where to test: beside the checkpoints where they are on the same file system, else among them."""
    try:
        same = run_directory.stat().st_dev == checkpoints.stat().st_dev
    except OSError:
        return checkpoints  # the test will say what is wrong with it
    return run_directory if same and not checkpoints.is_symlink() else checkpoints

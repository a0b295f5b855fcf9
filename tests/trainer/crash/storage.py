"""Storage that fails in the middle of a save: `python -m tests.trainer.crash.storage SCRATCH STRIDE FAULT…`.

FAULT is a disk's name (see `disks`), or `injected NAME`: one call alone ends with this error.  With ` of two ranks`
behind it, the call is one of either rank.

One line of JSON a fault.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from stepkeeper_trainer.formats.steps import list_steps, newest_verified
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.crash.campaign import place, points_of, warm_up
from tests.trainer.crash.disks import DISKS, Disk, NotHereError
from tests.trainer.crash.gates import Point, steady_names
from tests.trainer.crash.playing import Meanwhile, Played, Tell, play
from tests.trainer.crash.scenes import Words, age, leftovers, wrong_next, wrong_steps
from tests.trainer.crash.training import digests, train, train_on

SAVES = 3  # that are made at least
STEPS_MAX = 300  # while the fault is being ended, saves fail one after the other, in no time
TRIES = 20
OF_TWO = " of two ranks"
FIRST = ".tmp-step_00000001"
INJECTED = tuple(f"injected {name}" for name in ("EIO", "ESTALE", "EDQUOT", "ENOSPC", "EROFS"))


@dataclass
class Report:
    """What became of a fault."""

    fault: str
    points: int = 0  # all there are
    played: int = 0
    failed: int = 0  # saves, of those
    busy: int = 0  # points at which the fault could not begin
    absent: str = ""  # why it was not played at all
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main(scratch: Path, stride: int, faults: list[str]) -> None:
    wanted = digests(STEPS_MAX + 1)
    warm_up()
    for number, fault in enumerate(faults):
        began = time.monotonic()
        report = Report(fault)
        try:
            with place(scratch, on_disk=not fault.startswith("injected ")) as where:
                _Fault(fault, where / str(number), wanted, report).run(stride)
        except NotHereError as error:
            report.absent = str(error)
        report.seconds = round(time.monotonic() - began, 1)
        print(json.dumps(asdict(report)), flush=True)


class _Fault:
    def __init__(self, fault: str, scratch: Path, wanted: dict[int, str], report: Report) -> None:
        self._root, self._backing = scratch / "root", scratch / "backing"
        self._kind = next((disk for disk in DISKS if disk.name == fault), None)
        self._error = fault.removeprefix("injected ").removesuffix(OF_TWO) if self._kind is None else ""
        self._ranks = 2 if fault.endswith(OF_TWO) else 1
        assert self._kind or hasattr(errno, self._error), f"no such fault: {fault}"
        self._steps_max = STEPS_MAX if self._kind is None or self._kind.heals else 6
        self._wanted, self._report = wanted, report

    def run(self, stride: int) -> None:
        points = self._points()
        self._report.points = len(points)
        put_off = False
        for number, point in enumerate(points):
            if number % stride == stride // 2 or put_off:
                put_off = not self._play(point)

    def _fresh(self) -> Disk | None:
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)
        if self._kind is None:
            return None
        shutil.rmtree(self._backing, ignore_errors=True)
        return self._kind(self._root / self._kind.below, self._backing)

    def _points(self) -> list[Point]:
        """Return all calls of the saves after the first one, which has to be there."""
        disk = self._fresh()
        try:
            watched = play(self._act, self._ranks, watch=True)
        finally:
            if disk is not None:
                disk.remove()
        assert watched.codes == [0] * self._ranks, watched.output
        assert not [words for words in watched.said if "failed" in words], watched.output
        points = points_of(watched, self._root / "run/checkpoints")
        found: list[Point] = []
        for rank in range(self._ranks):
            own = [point for point in points if point.rank == rank]
            later = (n for n, point in enumerate(own) if ".tmp-step_" in point.about and FIRST not in point.about)
            found += own[next(later) :]
        return found

    def _act(self, rank: int, tell: Tell) -> None:
        steady_names()
        if self._ranks == 1:
            train_on(self._root / "run", SAVES, self._steps_max, tell)
        else:
            train(self._root / "run", 2 * SAVES, tell, rank=rank, world_size=self._ranks)

    def _play(self, point: Point) -> bool:
        """Play one point, and return whether the fault could begin there."""
        for _ in range(TRIES):  # which of a save's threads takes which file is a matter of luck
            if (begun := self._try(point)) is not None:
                return begun
        raise AssertionError(f"{point}: did not fire in {TRIES} runs")

    def _try(self, point: Point) -> bool | None:
        """Do as `_play`, once; None where the ranks have not come to this point."""
        disk = self._fresh()
        try:
            try:
                played = self._played(point, disk)
            except BlockingIOError:
                self._report.busy += 1
                return False
            if played is None:
                return None
            self._report.played += 1
            self._report.failed += any("failed" in words for words in played.said)
            if disk is not None:
                disk.again()
            problems = self._wrong(played)
        finally:
            if disk is not None:
                disk.remove()
        if problems:
            self._report.problems.append(f"{point}: {'; '.join(problems)}\n{played.output}")
        return True

    def _played(self, point: Point, disk: Disk | None) -> Played | None:
        if disk is None:
            played = play(self._act, self._ranks, at=point, what=f"error={self._error}")
            return played if any("(INJECTED)" in call.rest for _, call in played.calls[point.rank]) else None
        busy: list[BlockingIOError] = []
        struck: list[float] = []

        def strike() -> None:
            try:
                disk.strike()
                struck.append(time.monotonic())
            except BlockingIOError as error:
                busy.append(error)

        def mend(words: dict[str, object]) -> None:
            if "failed" in words or ("stepped" in words and struck and time.monotonic() > struck[0] + 1):
                disk.mend()

        played = play(self._act, 1, at=point, what="signal=SIGSTOP", meanwhile=Meanwhile(strike, mend))
        if busy:
            raise busy[0]
        return played if struck else None

    def _wrong(self, played: Played) -> list[str]:
        """Say what is wrong: training goes on, older steps are whole, the event is clear, later saves are made."""
        said, checkpoints = played.said, self._root / "run/checkpoints"
        heals = self._kind is None or self._kind.heals
        stepped = [words["stepped"] for words in said if "stepped" in words]
        problems = []
        if played.codes != [0] * self._ranks and (
            self._ranks > 1 or heals or stepped[-1] < self._steps_max or "could not be saved" not in played.output
        ):
            problems.append(f"training ended with {played.codes} at step {stepped[-1:]}")
        problems += wrong_steps(checkpoints, said)
        failures = [words["failed"] for words in said if "failed" in words]
        names = (*self._kind.says, "the save may take") if self._kind else (os.strerror(getattr(errno, self._error)),)
        unclear = [f for f in failures if not any(name in f for name in names) or str(self._root) not in f]
        if unclear and (self._ranks == 1 or unclear == failures):  # another rank only says that one could not write
            problems.append(f"the event does not say what is wrong with which file: {unclear[0]}")
        commits = sum("committed" in words for words in said)
        if not failures and (
            self._kind is None or commits < len(stepped)
        ):  # else it needed nothing of the disk any more
            problems.append("nobody was told")
        at = next((n for n, words in enumerate(said) if "failed" in words), 0)
        if heals and not any("committed" in words for words in said[at:]):
            problems.append("no save was made when the fault was over")
        return problems or self._wrong_next(said)

    def _wrong_next(self, said: Words) -> list[str]:
        run_dir = self._root / "run"
        chosen = newest_verified(run_dir / "checkpoints", cached=False).chosen
        before = chosen.step if chosen else 0
        age(run_dir)
        after = play(partial(_next, run_dir, before + 1), 1)
        problems = wrong_next(after.said, before, self._wanted, before + 1) + wrong_steps(
            run_dir / "checkpoints", said + after.said
        )
        torn = [step.path.name for step in list_steps(run_dir / "checkpoints") if not verify(step.path).ok]
        problems += [f"{name} is left over" for name in [*leftovers(run_dir), *torn]]
        return [*problems, after.output] if problems else []


def _next(run_dir: Path, upto: int, _rank: int, tell: Tell) -> None:
    train(run_dir, upto, tell)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or [*(disk.name for disk in DISKS), *INJECTED])

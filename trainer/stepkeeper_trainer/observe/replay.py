"""Steps that a resume does again: their losses, and the random numbers that they draw, compared with the first time.

Losses are compared with those in `metrics.csv`, on rank 0.  It says once what came of it, when the recorded steps are
done again, or at once where a run that says it is deterministic comes to another loss.  What follows from that the
supervisor decides.

`random.json` has what random numbers are compared with.  After each save, rank 0 records the generators as they were
saved, and as they were at the next `step_done`: hashes of a few bytes.  A resume that starts from the same generators
and comes to others at that `step_done` has drawn otherwise.  A step that itself draws at random comes to the same.
"""

from __future__ import annotations

import csv
import math
import threading
from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer.formats.decoding import DecodeError, decode_format
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.messages import Replayed, shorten
from stepkeeper_trainer.formats.plain import open_plain, read_plain
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.observe.metrics import METRICS_NAME
from stepkeeper_trainer.save.save import conditions
from stepkeeper_trainer.state import random_state

if TYPE_CHECKING:
    from pathlib import Path

    from stepkeeper_trainer.environment import Environment
    from stepkeeper_trainer.formats.lineage import LeftOut
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.load.resume import Resumed


STEPS_MAX = 200  # that are compared, the first ones after the resume
BYTES_MAX = 1024 * 1024  # of the end of `metrics.csv`


class Replay:
    """Compares each step's loss; done with the last recorded one."""

    def __init__(self, recorded: dict[int, float], link: Link, *, deterministic: bool, changed: str) -> None:
        """Take the recorded losses by step; `changed` names conditions that are others now."""
        self._recorded, self._link = recorded, link
        self._deterministic, self._changed = deterministic, changed
        self._last = max(recorded, default=0)
        self._steps, self._first = 0, 0
        self._worst: tuple[float, int, float, float] | None = None  # how far, step, then, now

    def observe(self, step: int, loss: float) -> None:
        """Take in the loss of a step."""
        if not self._recorded:
            return
        then = self._recorded.pop(step, None)
        if then is not None:
            self._steps += 1
            apart = distance(then, loss)
            if apart:
                self._first = self._first or step
                self._worst = max(self._worst or (0.0, 0, 0.0, 0.0), (apart, step, then, loss))
        if (self._first and self._deterministic) or step >= self._last:
            self._recorded.clear()
            self._report(step)

    def _report(self, step: int) -> None:
        if not self._steps:
            return  # none of them was done again
        _, worst, then, now = self._worst or (0.0, 0, 0.0, 0.0)
        if worst:
            warn("replay_differs", first=self._first, step=worst, then=then, now=now, steps=self._steps)
        else:
            say("replay_equal", steps=self._steps, upto=step)
        self._link.send(
            Replayed(
                step=step,
                steps=self._steps,
                first=self._first or None,
                worst=worst or None,
                then=then if worst and math.isfinite(then) else None,
                now=now if worst and math.isfinite(now) else None,
                deterministic=self._deterministic,
                changed=shorten(self._changed),
            ),
            keep=True,
        )


def distance(then: float, now: float) -> float:
    """Return how far two losses lie apart, as logarithm of their ratio; 0 for equal bits, infinite where one is none.

    >>> distance(2.0, 2.0), distance(float("nan"), float("nan")), distance(1.0, float("nan"))
    (0.0, 0.0, inf)
    """
    if then == now or (math.isnan(then) and math.isnan(now)):
        return 0.0
    if not (math.isfinite(then) and math.isfinite(now)):
        return math.inf
    if then <= 0 or now <= 0:
        return abs(then - now)
    return abs(math.log(now / then)) or math.ulp(1.0)  # so near that the logarithm does not tell


def begin_replay(
    environment: Environment, run_directory: Path, resumed: Resumed, world_size: int, link: Link
) -> Replay:
    """Prepare to compare what follows a resume with what was recorded of it; nothing at a first start."""
    manifest = resumed.manifest
    if manifest is None:
        return Replay({}, link, deterministic=False, changed="")
    then = {**manifest.conditions, "world_size": manifest.world_size}
    now = {**conditions(), "world_size": world_size}
    changed = [f"{name}: {then[name]}, now {now[name]}" for name in now if name in then and then[name] != now[name]]
    return Replay(
        comparable_losses(run_directory, manifest.step, environment.skip_data),
        link,
        deterministic=bool(then.get("deterministic") and now["deterministic"]) and not changed,
        changed="; ".join(changed),
    )


def comparable_losses(run_directory: Path, after: int, windows: tuple[LeftOut, ...]) -> dict[int, float]:
    """Return the recorded losses of steps after one that were, and will be, of the same data.

    Where data is left out, steps from there on are others.  What was left out before is in the state already; then
    only what was recorded since is compared: what an older launch did beyond that may have been on other data.
    """
    found = recorded_losses(run_directory, after, newest=any(window.step <= after for window in windows))
    before = min((window.step for window in windows if window.step > after), default=math.inf)
    return {step: loss for step, loss in found.items() if step < before}


def recorded_losses(run_directory: Path, after: int, *, newest: bool = False) -> dict[int, float]:
    """Return the losses of the steps after one; a later row of a step counts.  Nothing where they cannot be read.

    Args:
        run_directory: of the run.
        after: the step that training resumed from.
        newest: of the newest state only: a row leaves nothing of what was recorded of its step and later ones.
    """
    try:
        with open_plain(run_directory / METRICS_NAME, within=run_directory) as file:
            header = file.readline().decode(errors="replace").strip().split(",")
            file.seek(max(file.tell(), file.seek(0, 2) - BYTES_MAX))
            text = file.read(BYTES_MAX).decode(errors="replace")
    except OSError:
        return {}  # there may be none; what cannot be compared is not
    found: dict[int, float] = {}
    last = 0  # step of the row before
    for row in csv.DictReader(text.splitlines(), fieldnames=header):
        try:
            step, loss = int(row["step"]), float(row["loss"] or "")
        except (KeyError, TypeError, ValueError):
            continue  # torn, or a step without a loss
        if not row.get("launch"):
            continue  # torn in its middle
        if newest and step <= last:
            found = {each: kept for each, kept in found.items() if each < step}
        last = step
        if after < step <= after + STEPS_MAX:
            found[step] = loss
    return found


RANDOM_NAME = "random.json"
SAVES_MAX = 16  # that are remembered, the newest
RANDOM_BYTES_MAX = 64 * 1024


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of the generators around the step after a save."""

    step: int  # that was saved
    saved: dict[str, str]
    next: dict[str, str]


class RandomRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    format: int = 1
    saves: tuple[Drawn, ...] = ()


_DECODER = msgspec.json.Decoder(RandomRecord)


class Redrawn:
    """Of rank 0; used by its main thread alone."""

    def __init__(self, run_directory: Path, resumed: Resumed, *, comparable: bool) -> None:
        """Begin right after a resume; one on other hardware, ranks or data is not `comparable`."""
        self._path = run_directory / RANDOM_NAME
        self._record = _read(self._path)
        self._saved: tuple[int, dict[str, str]] | None = None  # by the newest save, at its step
        self._expected: Drawn | None = None
        if comparable and resumed.step is not None:
            here = random_state.digests()
            same = [each for each in self._record.saves if each.step == resumed.step and each.saved == here]
            self._expected = same[-1] if same else None
        self._writing: threading.Thread | None = None

    def saved(self, step: int) -> None:
        """Note the generators of a save that has just begun."""
        self._saved = step, random_state.digests()

    def arrive(self, step: int) -> None:
        """Compare, or record, the generators at a `step_done`."""
        saved, self._saved = self._saved, None
        expected, self._expected = self._expected, None
        if saved is None and expected is None:
            return
        here = random_state.digests()
        if expected is not None:
            others = sorted(
                name for name in expected.next if here.get(name, expected.next[name]) != expected.next[name]
            )
            if others:
                _say_differs(step, others)
        if saved is not None:
            self._append(Drawn(step=saved[0], saved=saved[1], next=here))

    def _append(self, drawn: Drawn) -> None:
        others = [each for each in self._record.saves if (each.step, each.saved) != (drawn.step, drawn.saved)]
        self._record = RandomRecord(saves=(*others, drawn)[-SAVES_MAX:])
        if self._writing is None or not self._writing.is_alive():  # on a disk that hangs the next one has it all
            data = msgspec.json.encode(self._record)
            self._writing = threading.Thread(
                target=_write, args=(self._path, data), name="stepkeeper-random", daemon=True
            )
            self._writing.start()


def _say_differs(step: int, generators: list[str]) -> None:
    warn(
        "random_numbers_differ",
        step=step,
        generators=",".join(generators),
        why="this step has drawn others after the resume than before it, so losses differ",
        remedy="evaluate before manager.step_done(), make iterators after manager.resume(), "
        "and call manager.restore_random_state() next",
    )


def _read(path: Path) -> RandomRecord:
    try:
        return decode_format(_DECODER, read_plain(path, RANDOM_BYTES_MAX, within=path.parent), newest=1)
    except (OSError, DecodeError):
        return RandomRecord()  # there may be none yet; what cannot be compared is not


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        say("random_numbers_unrecorded", file=path, why=error.strerror)

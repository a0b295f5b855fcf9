"""What would make a resumed run another one, looked for on rank 0 while it trains: each is said once, with the remedy.

A resume goes on right after `step_done`, with the generators and the data position that were saved there.  So it is
another run where

* an evaluation after `step_done` draws random numbers: `Evaluations` sees it while it happens;
* anything else draws where a resume does not, or does not where a resume draws: `Redrawn` compares the generators at
  the next `step_done` after a save with those at the same `step_done` after a resume;
* the data position is not in the state, does not move, or runs ahead: `Position` looks at the first two `step_done`;
* training uses another part that is not in the state: `Omissions` looks at the same two, and `Replaced` at each save;
* the state changes after `step_done`, or the weights do after `resume`: `Afterwards` compares as the loop comes round.

A step that draws random numbers itself, draws the same ones in both, and none of these says anything of it.  What goes
wrong in a look ends the looks, and no training.

Steps that a resume does again: their losses, and the random numbers that they draw, compared with the first time.

Losses are compared with those in `metrics.csv`, on rank 0.  It says once what came of it, when the recorded steps are
done again, or at once where a run that says it is deterministic comes to another loss.  What follows from that the
supervisor decides.

`random.json` has what random numbers are compared with.  After each save, rank 0 records the generators as they were
saved, and as they were at the next `step_done`: hashes of a few bytes.  A resume that starts from the same generators
and comes to others at that `step_done` has drawn otherwise.  A step that itself draws at random comes to the same.
"""

from __future__ import annotations

import csv
import inspect
import math
import threading
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

import msgspec
import torch

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.messages import Replayed, shorten
from stepkeeper_trainer.formats.plain import DecodeError, decode_format, open_plain, read_plain
from stepkeeper_trainer.living import living
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.observe import schedules
from stepkeeper_trainer.observe.afterwards import Afterwards
from stepkeeper_trainer.observe.metrics import METRICS_NAME
from stepkeeper_trainer.observe.omissions import Omissions, Replaced
from stepkeeper_trainer.observe.position import Position
from stepkeeper_trainer.save.save import conditions
from stepkeeper_trainer.state import random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType

    from stepkeeper_trainer.environment import Environment
    from stepkeeper_trainer.formats.lineage import LeftOut
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.load.resume import Resumed
    from stepkeeper_trainer.state.training import TrainingState


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


def begin_replay(environment: Environment, run_directory: Path, resumed: Resumed, link: Link) -> Replay:
    """Prepare to compare what follows a resume with what was recorded of it; nothing at a first start."""
    manifest = resumed.manifest
    if manifest is None:
        return Replay({}, link, deterministic=False, changed="")
    changed = [f"{name}: {then}, now {now}" for name, (then, now) in resumed.changes.items() if name != "torch"]
    deterministic = manifest.conditions.get("deterministic") and conditions()["deterministic"] and not changed
    losses = comparable_losses(run_directory, manifest.step, environment.skip_data)
    return Replay(losses, link, deterministic=bool(deterministic), changed="; ".join(changed))


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

    With `newest` of the newest state only: a row leaves nothing of what was recorded of its step and later ones.
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


P = ParamSpec("P")
EVALUATIONS = 3  # that are looked at: if they draw nothing, later ones will not either


def _ends_no_training(look: Callable[Concatenate[Exactness, P], None]) -> Callable[Concatenate[Exactness, P], None]:
    """Warn of what goes wrong in a look, and look no more: scripts have objects of any kind."""

    @wraps(look)
    def guarded(self: Exactness, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.ended:
            return
        try:
            look(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # a warning says what it was
            self.end(error)

    return guarded


class Exactness:
    """Of rank 0; used by its main thread alone."""

    def __init__(self, state: TrainingState) -> None:
        """Take what is saved; nothing is looked at yet."""
        self._state = state
        self.ended = False
        self._sequence = 0  # of the newest save that was seen
        self._evaluations = Evaluations(None, self.end)  # of no model yet

    def end(self, error: Exception) -> None:
        """Look no more: something has gone wrong in a look."""
        self.ended = True
        self._evaluations.stop()
        warn(
            "looks_ended",
            why=f"{type(error).__name__}: {error}",
            remedy="training goes on without checks for what a resume would lose; please report it",
        )

    @_ends_no_training
    def resumes(self) -> None:
        """Note what the script has made, before a resume changes it."""
        self._made = schedules.options_of(self._state.others)

    @_ends_no_training
    def resumed(
        self,
        resumed: Resumed,
        tensors: Mapping[str, torch.Tensor],
        *,
        hooked: torch.nn.Module | None,
        run_directory: Path,
        environment: Environment,
    ) -> None:
        """Begin right after a resume.

        Args:
            resumed: what the launch has resumed from.
            tensors: what was gathered of the state then.
            hooked: the model, where hooks may be attached to it.
            run_directory: of the run.
            environment: of this launch.
        """
        state = self._state
        if resumed.step is not None:
            schedules.tell_restored(self._made, schedules.options_of(state.others))
        self._position = Position(state.others, tensors)
        self._omissions, self._replaced = Omissions(state), Replaced(state)
        self._afterwards = Afterwards(state, resumed.step)
        self._evaluations = Evaluations(hooked, self.end)
        self._redrawn = Redrawn(run_directory, resumed, comparable=not (resumed.changes or environment.skip_data))

    @_ends_no_training
    def begin(self) -> None:
        """Look around as the loop begins."""
        self._afterwards.begin()

    @_ends_no_training
    def turn(self) -> None:
        """Look around as the loop comes round."""
        self._afterwards.turn()

    @_ends_no_training
    def arrive(self, step: int) -> None:
        """Look around as `step_done` begins."""
        self._evaluations.forget()
        self._redrawn.arrive(step)
        self._position.arrive(step)
        self._omissions.arrive(step)

    @_ends_no_training
    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Look at what was gathered of the state after the first step."""
        self._position.gathered(tensors)

    @_ends_no_training
    def leave(self, step: int, sequence: int, *, of_now: bool) -> None:
        """Note how things are as `step_done` ends; `sequence` is that of the newest save, `of_now` if of this step."""
        if sequence != self._sequence:
            self._sequence = sequence
            self._replaced.saved(step)
            if of_now:
                self._redrawn.saved(step)
        self._evaluations.leave(step)
        self._afterwards.leave(step)


class _Left(NamedTuple):
    """How things were as `step_done` ended."""

    step: int
    generators: dict[str, bytes]
    lines: dict[tuple[int, CodeType], int]  # of each caller, the line that it was at


class Evaluations:
    """Forwards without gradients between a `step_done` and the first forward with gradients of the next step.

    One before the loop comes round to its next turn is not done again by a resume.  Whether it has come round, the
    lines tell: of the innermost function that is on the stack both times, a line further down than that of
    `step_done` belongs to the same turn.  Where somebody keeps the state that the generators had at `step_done` (as
    `torch.random.fork_rng` does), it is going to be put back.
    """

    def __init__(self, model: torch.nn.Module | None, failed: Callable[[Exception], None]) -> None:
        """Attach hooks to a model, if there is one; `failed` hears what goes wrong in a look."""
        self._left: _Left | None = None
        self._forwards = 0  # of the evaluation at hand
        self._clean = 0  # evaluations that drew nothing

        def look(*_: object) -> None:  # no method: a copy of the model (an average of weights) has the same observer
            if not torch.compiler.is_compiling() and self._left is not None:
                try:
                    self._on_forward(self._left)
                except Exception as error:  # noqa: BLE001  # a warning says what it was, and the forward goes on
                    failed(error)

        wrapped = getattr(model, "module", None)  # evaluated without its DistributedDataParallel
        modules = [each for each in (model, wrapped) if isinstance(each, torch.nn.Module)]
        self._hooks = [module.register_forward_pre_hook(look) for module in modules]

    def leave(self, step: int) -> None:
        """Note how things are as `step_done` ends."""
        if self._hooks:
            self._left, self._forwards = _Left(step, random_state.peek(), _lines()), 0

    def forget(self) -> None:
        """Look no more until the next `leave`."""
        self._left = None

    def _on_forward(self, left: _Left) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # generators do not tell their state then
        if torch.is_grad_enabled() and self._forwards:
            self._passed()
        place = None if torch.is_grad_enabled() else _further_down(left.lines)
        if place is None:  # the next turn has begun
            self.forget()
            return
        self._forwards += 1
        if self._forwards & (self._forwards - 1):  # the first, second, fourth, eighth: an evaluation may be long
            return
        if random_state.peek() == left.generators:
            return
        if _kept(left.generators):
            self._passed()
            return
        warn(
            "evaluation_draws",
            step=left.step,
            place=place,
            why="random numbers are drawn after step_done, and a resume from this step does not draw them: "
            "its losses will differ",
            remedy="evaluate before step_done(), or inside torch.random.fork_rng()",
        )
        self.stop()

    def _passed(self) -> None:
        """Take in an evaluation that changes nothing for the next step."""
        self.forget()
        self._clean += 1
        if self._clean == EVALUATIONS:
            self.stop()

    def stop(self) -> None:
        """Look no more."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _kept(generators: Mapping[str, bytes]) -> bool:
    """Whether a tensor other than the library's own holds such a state of torch's generators."""
    sizes = {len(state) for state in generators.values()}
    for each in living(torch.Tensor):
        if type(each) is torch.Tensor and each.dtype is torch.uint8 and each.device.type == "cpu":
            whole = each.numel() in sizes and each.numel() == each.untyped_storage().nbytes()  # no part of another
            if whole and not random_state.is_ours(each) and bytes(view_bytes(each)) in generators.values():
                return True
    return False


def _lines() -> dict[tuple[int, CodeType], int]:
    return {(id(frame), frame.f_code): frame.f_lineno for frame in _frames(inspect.currentframe())}


def _further_down(lines: Mapping[tuple[int, CodeType], int]) -> str | None:
    """Return where the innermost common function is now, if that is further down than it was."""
    for frame in _frames(inspect.currentframe()):
        then = lines.get((id(frame), frame.f_code))
        if then is not None:
            name = Path(frame.f_code.co_filename).name
            return f"{name}:{frame.f_lineno}" if frame.f_lineno > then else None
    return None


def _frames(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back

"""Which step directories are kept, and how the others are removed: a crash at any point leaves every kept one whole.

Only verified steps count.  Nothing is removed while the newest step is not verified; what is damaged is never
removed, for it may be all that is left of a step.  A removal is one rename, and the bytes go afterwards.

After each commit rank 0 does so beside training.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats.durable import fsync_directory
from stepkeeper_trainer.formats.manifest import CONFIRMED
from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.steps import StepDirectory, current_lineage, list_steps
from stepkeeper_trainer.formats.verify import SETTLED_S, Cache, verify
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


TRASH = ".trash-"
KEEP_LAST = 3  # one to go on from, and two to step back to


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is kept; a step that any rule wants is kept.

    A milestone is the first verified step at or past each mark: saves do not always fall on round numbers.
    """

    keep_last: int = KEEP_LAST  # the newest
    every_steps: int | None = None  # milestones
    every_percent: float | None = None  # milestones, of `total_steps`
    total_steps: int | None = None
    epochs: bool = True  # steps marked as the end of an epoch
    best: int = 0  # how many
    best_by: str = "loss"  # or a name in the manifest's `metrics`
    best_is_highest: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.  Raises ValueError."""
        if self.keep_last < 1:
            raise ValueError("keep_last is below 1: the newest verified step is always kept")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError("every_steps is below 1")
        if self.every_percent is not None and not (0 < self.every_percent <= 100 and self.total_steps):  # noqa: PLR2004
            raise ValueError("every_percent is above 0 and up to 100, and needs total_steps")
        if self.best < 0:
            raise ValueError("best is below 0")


_NEWEST = re.compile(r"newest (\d+)")
_EVERY = re.compile(r"every (\d+(?:\.\d+)?) ?(steps?|percent|%)")
_BEST = re.compile(r"best (\S+) (\d+)( highest)?")


def parse_policy(text: str, *, total_steps: int | None = None) -> Policy | None:
    """Read `newest 3, every 1000 steps, every 10 percent, epoch ends, best loss 2`; None for `all`: nothing is removed.

    `best NAME N` means the lowest, with `highest` behind it the highest.

    Raises:
        ValueError: which part cannot be read, or cannot be meant.
    """
    if text.strip().lower() == "all":
        return None
    policy = Policy(epochs=False, total_steps=total_steps)
    for part in (part.strip() for part in text.split(",")):
        if match := _NEWEST.fullmatch(part):
            policy = replace(policy, keep_last=int(match[1]))
        elif (match := _EVERY.fullmatch(part)) and match[2].startswith("step") and match[1].isdigit():
            policy = replace(policy, every_steps=int(match[1]))
        elif match and not match[2].startswith("step"):
            policy = replace(policy, every_percent=float(match[1]))
        elif part == "epoch ends":
            policy = replace(policy, epochs=True)
        elif match := _BEST.fullmatch(part):
            policy = replace(policy, best_by=match[1], best=int(match[2]), best_is_highest=bool(match[3]))
        else:
            raise ValueError(
                f"retention {text!r}: {part!r} cannot be read; write `all`, or some of `newest 3`, `every 1000 steps`, "
                "`every 10 percent`, `epoch ends`, `best loss 2`, with commas between"
            )
    return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A step directory, as retention sees it."""

    name: str
    step: int
    save_id: str | None  # None: it has no manifest
    verified: bool
    current: bool = True  # leads to the state that training is in now
    marks: frozenset[str] = frozenset()
    metric: float | None = None
    confirmed: int | None = None  # the newest step that was confirmed before it was saved


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to become of each step directory."""

    kept: Mapping[str, tuple[str, ...]]  # by name: why
    removed: tuple[str, ...]  # names, oldest first
    blocked: str | None = None  # why nothing is removed although the policy would


def decide(candidates: list[Candidate], policy: Policy) -> Plan:
    """Say what is kept and why; `candidates` are newest first, as `list_steps` returns them."""
    reasons: dict[str, list[str]] = defaultdict(list)
    counted = [c for c in candidates if c.verified and c.current and lineages.SUSPECT not in c.marks]
    for name, why in [*_untouchable(candidates), *_wanted(counted, policy)]:
        reasons[name].append(why)
    removed = [c.name for c in reversed(candidates) if c.name not in reasons]
    blocked = _blocked(candidates, counted) if removed else None
    if blocked is not None:
        for name in removed:
            reasons[name].append(blocked)
        removed = []
    return Plan({name: tuple(why) for name, why in reasons.items()}, tuple(removed), blocked)


def _untouchable(candidates: list[Candidate]) -> Iterator[tuple[str, str]]:
    for candidate in candidates:
        if lineages.PINNED in candidate.marks:
            yield candidate.name, "pinned"
        if lineages.SUSPECT in candidate.marks:
            yield candidate.name, "suspect: kept for a person to look at"
        if not candidate.verified:
            yield candidate.name, "not verified: never removed, never counted"


def _wanted(counted: list[Candidate], policy: Policy) -> Iterator[tuple[str, str]]:
    for candidate in counted[: policy.keep_last]:
        yield candidate.name, f"one of the newest {policy.keep_last}"
    confirmed = next((each.confirmed for each in counted), None)
    for candidate in [each for each in counted if confirmed is not None and each.step <= confirmed][:1]:
        yield candidate.name, "the newest that is confirmed: silent corruption leads back to it"
    yield from _milestones(counted, policy)
    for candidate in counted:
        if policy.epochs and lineages.EPOCH in candidate.marks:
            yield candidate.name, "end of an epoch"
    for name in _best(counted, policy):
        yield name, f"best by {policy.best_by}"


def _blocked(candidates: list[Candidate], counted: list[Candidate]) -> str | None:
    if not counted:
        return "there is no verified step to resume from"
    newest = next((c for c in candidates if c.current), None)
    if newest is not None and not newest.verified:
        return f"the newest step, {newest.name}, is not verified"
    return None


def _milestones(counted: list[Candidate], policy: Policy) -> list[tuple[str, str]]:
    found = []
    oldest_first = counted[::-1]
    if policy.every_steps is not None:
        found += _first_past(oldest_first, policy.every_steps, f"milestone of every {policy.every_steps} steps")
    if policy.every_percent is not None and policy.total_steps:
        width = policy.total_steps * policy.every_percent / 100
        found += _first_past(oldest_first, width, f"milestone of every {policy.every_percent:g} %")
    return found


def _first_past(oldest_first: list[Candidate], width: float, why: str) -> list[tuple[str, str]]:
    found, reached = [], 0
    for candidate in oldest_first:
        mark = math.floor(candidate.step / width + 1e-9)
        if mark > reached:
            found.append((candidate.name, why))
            reached = mark
    return found


def _best(counted: list[Candidate], policy: Policy) -> list[str]:
    sign = -1.0 if policy.best_is_highest else 1.0
    rated = [(sign * c.metric, at, c.name) for at, c in enumerate(counted) if c.metric is not None]
    return [name for value, _, name in sorted(rated) if math.isfinite(value)][: policy.best]


# On disk ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done."""

    plan: Plan
    removed: tuple[str, ...]  # renamed: they no longer exist as steps
    spared: tuple[tuple[str, str], ...] = ()  # by name: why it was not removed after all


def look(
    checkpoints: Path, policy: Policy, *, reading: Reading | None = None, should_stop: Callable[[], bool] | None = None
) -> list[Candidate]:
    """Return the candidates; the newest and those that could count are verified, unchanged ones without reading.

    Raises:
        OSError: the directory cannot be listed or the lineage not read.
    """
    steps = list_steps(checkpoints)
    lineage = lineages.read(checkpoints, pruned=False)
    current = {step.path for step in current_lineage(steps, lineage)}
    cache = Cache(checkpoints)
    stop = should_stop or (lambda: False)
    marks = lineage.marks if lineage is not None else {}
    found = []
    for step in steps:
        manifest = step.manifest
        verdict = verify(step.path, reading=reading, cache=cache, should_stop=stop) if manifest is not None else None
        found.append(
            Candidate(
                name=step.path.name,
                step=step.step,
                save_id=manifest.save_id if manifest else None,
                verified=verdict is not None and verdict.ok,
                current=step.path in current,
                marks=marks.get(manifest.save_id, frozenset()) if manifest else frozenset(),
                metric=_metric(step, policy),
                confirmed=manifest.state.get(CONFIRMED) if manifest else None,
            )
        )
    return found


def _metric(step: StepDirectory, policy: Policy) -> float | None:
    manifest = step.manifest
    if manifest is None:
        return None
    return manifest.metrics.get(policy.best_by, manifest.loss if policy.best_by == "loss" else None)


def remove(
    checkpoints: Path, plan: Plan, candidates: Iterable[Candidate], *, fence: Callable[[], object] = lambda: None
) -> Outcome:
    """Rename what the plan removes, oldest first; `empty_trash` frees the space afterwards.

    `fence` is called before each rename; it raises where another attempt has taken over.

    Raises:
        OSError: the disk refuses; what was renamed before stays so.
    """
    save_ids = {candidate.name: candidate.save_id for candidate in candidates}
    removed, spared = [], []
    for name in plan.removed:
        fence()
        save_id = save_ids[name]
        assert save_id is not None, "only verified steps are removed"
        # A person or a rollback may have spoken since the plan was made.
        lineage = lineages.read(checkpoints, pruned=False)
        if lineage is not None and lineage.has_steps and lineage.head == save_id:
            spared.append((name, "training continues from it"))
            continue
        if lineage is not None and lineages.PINNED in lineage.marks.get(save_id, ()):
            spared.append((name, "pinned"))
            continue
        lineages.append(checkpoints, lineages.Mark(at=time.time(), save_id=save_id, mark=lineages.PRUNED))
        try:
            os.rename(checkpoints / name, _trash_name(checkpoints, name))
        except FileNotFoundError:
            spared.append((name, "somebody else has removed it"))
            continue
        fsync_directory(checkpoints)
        removed.append(name)
    return Outcome(plan, tuple(removed), tuple(spared))


def _trash_name(checkpoints: Path, name: str) -> Path:
    for count in range(10_000):
        path = checkpoints / f"{TRASH}{name}.{count}"
        if not os.path.lexists(path):
            return path
    raise FileExistsError(f"{checkpoints}: too much in the trash: remove {TRASH}*")


def empty_trash(checkpoints: Path, *, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Free the space of what was removed, also of what a crash has left; return how many directories are gone.

    What cannot be removed now is tried again the next time.
    """
    gone = 0
    try:
        names = sorted(name for name in os.listdir(checkpoints) if name.startswith(TRASH))
    except FileNotFoundError:
        return 0
    for name in names:
        if should_stop():
            break
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        gone += not os.path.lexists(checkpoints / name)
    if gone:
        digests = [step.manifest.manifest_xxh3_128 for step in list_steps(checkpoints) if step.manifest is not None]
        Cache(checkpoints).forget_others(digests)
    return gone


def prune(
    checkpoints: Path,
    policy: Policy,
    *,
    reading: Reading | None = None,
    fence: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
) -> Outcome:
    """Apply a policy: look, decide, rename.  Raises OSError, and whatever `fence` raises."""
    candidates = look(checkpoints, policy, reading=reading, should_stop=should_stop)
    plan = decide(candidates, policy)
    if dry_run or should_stop():
        return Outcome(plan, ())
    return remove(checkpoints, plan, candidates, fence=fence)


READ_THREADS = 2  # each new step is read once to be counted: training has the other cores
READ_BYTES_PER_S = 2e9
BEHIND_STEPS = 3  # committed while it reads older ones: it is too slow for them
STOP_WITHIN_S = 5.0  # it stops between two reads, unless the storage hangs


class Retention:
    """Removes steps that no rule wants, once newer ones are verified: on a thread beside training, one look at a time.

    What goes wrong is said, and harms nothing.
    """

    def __init__(self, checkpoints: Path, policy: Policy, *, fence: Callable[[], object] = lambda: None) -> None:
        """Prepare; nothing is done before the first commit.  `fence` raises where another attempt has taken over."""
        self._checkpoints, self._policy, self._fence = checkpoints, policy, fence
        self._wanted, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._looking = False
        self._meanwhile = 0  # commits since the look that is under way began
        self._behind = False  # which was said
        self._blocked: str | None = None

    def committed(self, _step: object) -> None:
        """Look at the steps soon."""
        if self._looking:
            self._note_late()
        self.request()

    def request(self) -> None:
        """Look at the steps soon.  Never waits."""
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="retention", daemon=True)
            self._thread.start()

    def close(self, limit_at: float) -> None:
        """Stop, at any point without harm; what is not done now is done after the next commit."""
        self._stopped.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(max(0.0, min(STOP_WITHIN_S, limit_at - time.time())))
            if self._thread.is_alive():
                warn("retention_late", why="it still waits for the storage: it is left behind")

    def _note_late(self) -> None:
        """Say it once when steps come faster than they are read: they pile up, for only read ones are removed."""
        self._meanwhile += 1
        if self._meanwhile < BEHIND_STEPS or self._behind:
            return
        self._behind = True
        warn(
            "retention_behind",
            steps=self._meanwhile,
            why=f"older ones are still being read, by rank 0 alone and at most at {READ_BYTES_PER_S / 1e9:g} GB/s, and "
            "removed: save less often, or have all nodes read with `--read-back all`",
        )

    def _work(self) -> None:
        reading = Reading(threads=READ_THREADS, bytes_per_s=READ_BYTES_PER_S)
        stopped = self._stopped.is_set
        while True:
            self._wanted.wait()
            # what is verified so late is remembered, and need not be read again after the next commit
            if self._stopped.wait(SETTLED_S):
                return
            self._wanted.clear()
            try:
                if len(list_steps(self._checkpoints)) <= self._policy.keep_last:
                    continue  # nothing to remove: nothing need be read to find out
                self._meanwhile, self._looking = 0, True
                self._say(
                    prune(self._checkpoints, self._policy, reading=reading, fence=self._fence, should_stop=stopped)
                )
                empty_trash(self._checkpoints, should_stop=stopped)
            except Exception as error:  # noqa: BLE001  # retention must never end training
                warn("retention_failed", why=shorten(f"{type(error).__name__}: {error}"))
            finally:
                self._looking = False

    def _say(self, outcome: Outcome) -> None:
        if outcome.removed:
            say("steps_removed", steps=",".join(outcome.removed), kept=len(outcome.plan.kept))
        for name, why in outcome.spared:
            say("step_spared", step=name, why=why)
        if outcome.plan.blocked != self._blocked and outcome.plan.blocked is not None:
            warn("retention_blocked", why=outcome.plan.blocked)
        self._blocked = outcome.plan.blocked


def choose_policy(environment: str | None, wanted: str | Policy | None, *, total_steps: int | None) -> Policy | None:
    """Return the policy that counts: the environment's, else the script's, else the usual one; None keeps all steps.

    Raises:
        UsageError: it cannot be read or meant.
    """
    choice = environment if environment is not None else wanted
    if choice is None:
        return Policy(total_steps=total_steps)
    if isinstance(choice, Policy):
        return choice
    try:
        return parse_policy(choice, total_steps=total_steps)
    except ValueError as error:
        raise UsageError(str(error)) from error

"""What is usual in a run, over its launches and attempts: how long a start takes, and a step.  Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from stepkeeper.core.policy import Policy

# Middle and spread of measurements of which some are far off.  Pure.

MAD_TO_SIGMA = 1.4826  # of a normal distribution


def median_mad(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation as the median distance from it tells it; of at least one value."""
    median = statistics.median(values)
    return median, MAD_TO_SIGMA * statistics.median([abs(each - median) for each in values])


LAUNCHES_KEPT = 6
WORDS = 30  # of steps, without the warm-up, until a launch has a pace to compare
SIGMAS = 4.0


class LaunchPace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a launch was."""

    nodes: int  # its number of nodes
    seconds: float  # its median time for a step


class Baseline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long starts and steps of this run usually take."""

    start_s: float = 0.0  # the longest time from the start of a launch to its first message; 0: none yet
    paces: tuple[LaunchPace, ...] = ()  # one for each of the newest launches


class Slower(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that steps slower than those before it."""

    seconds: float
    baseline: float
    launches: int  # that it was compared with


def started(baseline: Baseline, seconds: float) -> Baseline:
    """Take in how long a start took."""
    return replace(baseline, start_s=max(baseline.start_s, round(seconds, 3)))


def stepped(baseline: Baseline, nodes: int, seconds: float, policy: Policy) -> tuple[Baseline, Slower | None]:
    """Take in the median step of a launch, and compare it with launches of as many nodes."""
    before = [each.seconds for each in baseline.paces if each.nodes == nodes]
    rounded = float(f"{seconds:.4g}")
    paces = (*baseline.paces, LaunchPace(nodes=nodes, seconds=rounded))[-LAUNCHES_KEPT:]
    baseline = replace(baseline, paces=paces)
    if not before:
        return baseline, None
    median, spread = median_mad(before)
    if seconds <= max(policy.slow_launch_times * median, median + SIGMAS * spread):
        return baseline, None
    return baseline, Slower(seconds=seconds, baseline=median, launches=len(before))


# How fast a run steps, from its own history: what silence is longer than usual.  Pure.
#
# A launch begins without statistics of its own: those of the launch before count until it has some.  The first steps
# of a launch compile, load and fill caches, so they are none of them.

KEPT_MAX = 64  # intervals
ENOUGH = 5  # of them to know what is usual
WARM_UP_STEPS = 3
STEADY = 32  # of them to know that a run is even
STEADY_TIMES = 5.0  # as many usual steps as are waited for elsewhere
LONGEST_TIMES = 3.0  # what took long once may take so many times as long
CERTAIN_TIMES = 10.0  # as many steps, the 99th percentile, until a first look
CERTAIN_SHARE = 0.99
CERTAIN_LONGEST_TIMES = 1.5  # a pause that was seen is not looked at each time that it comes
SAVES_ENOUGH = 3  # to know how long one takes at least
QUICKER_TIMES = 0.25  # of the quickest one: beside training all are slower, yet none will be quicker than that


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that steps took."""

    steps: int = msgspec.field(default=0, name="heard")  # reports of steps in this launch
    recent: tuple[float, ...] = ()  # of this launch, the newest last, without its first ones
    longest: float = 0.0  # of the same
    first: float | None = None  # the first step of this launch
    save: float = 0.0  # the longest save of the attempt
    saves: int = 0  # that went straight to shared storage
    quickest: float = 0.0  # of these
    before: Pace | None = None  # of the launch before


def launched(pace: Pace) -> Pace:
    """Begin a launch; one that came to no statistics leaves those before it."""
    known = replace(pace, before=None) if len(pace.recent) >= ENOUGH else pace.before
    return Pace(save=pace.save, saves=pace.saves, quickest=pace.quickest, before=known)


def step_taken(pace: Pace, seconds: float) -> Pace:
    """Take in a step."""
    pace = replace(pace, steps=pace.steps + 1, first=pace.first if pace.first is not None else seconds)
    if pace.steps <= WARM_UP_STEPS:
        return pace
    return replace(pace, recent=(*pace.recent, seconds)[-KEPT_MAX:], longest=max(pace.longest, seconds))


def saved(pace: Pace, seconds: float, *, by_disk: bool) -> Pace:
    """Take in how long a save took; by way of the nodes' disks it tells nothing of the quickest way."""
    pace = replace(pace, save=max(pace.save, seconds))
    if by_disk:
        return pace
    quickest = min(pace.quickest, seconds) if pace.saves else seconds
    return replace(pace, saves=pace.saves + 1, quickest=quickest)


def stop_within_s(pace: Pace, policy: Policy) -> float:
    """Return how long a save that a person or growth asks for may take, until the ranks are killed."""
    return max(policy.stop_within_s, LONGEST_TIMES * pace.save)


def least_save_s(pace: Pace) -> float:
    """Return the time in which no save can become durable, however quick; 0 where too little is known."""
    return QUICKER_TIMES * pace.quickest if pace.saves >= SAVES_ENOUGH else 0.0


def silence_s(pace: Pace, policy: Policy, *, saving: bool) -> float:
    """Return how long no word may come before the ranks' stacks are looked at."""
    known = pace if len(pace.recent) >= ENOUGH else pace.before
    if known is None:
        return policy.hang_most_s
    median, spread = median_mad(known.recent)
    allowed = max(policy.hang_steps * (median + 3 * spread), LONGEST_TIMES * known.longest)
    if pace.steps == 0:  # loading, compiling, the first step
        allowed += LONGEST_TIMES * (known.first or 0.0)
    if saving:
        allowed = allowed + LONGEST_TIMES * pace.save if pace.save else policy.hang_most_s
    return min(max(allowed, policy.hang_least_s), policy.hang_most_s)


def steady_s(pace: Pace, policy: Policy, *, saving: bool) -> float | None:
    """Return after which shorter silence a run of even steps may be looked at; None where that is no shorter one."""
    if saving or len(pace.recent) < STEADY:
        return None
    median, spread = median_mad(pace.recent)
    usual = STEADY_TIMES * policy.hang_steps * (median + 3 * spread)
    soon = max(policy.hang_steady_s, usual, LONGEST_TIMES * pace.longest)
    return soon if soon < silence_s(pace, policy, saving=saving) else None


def is_even(pace: Pace) -> bool:
    """Tell whether this launch has made enough steps to know what is unusual in it."""
    return len(pace.recent) >= STEADY


def certain_s(pace: Pace, policy: Policy, *, saving: bool) -> float | None:
    """Return after which silence the ranks are looked at for one that cannot go on; None where that is no first look.

    A few steps tell enough: the look ends nothing that would not be ended later.
    """
    if len(pace.recent) < ENOUGH or (saving and not pace.save):
        return None
    ordered = sorted(pace.recent)
    usual = ordered[math.ceil(CERTAIN_SHARE * len(ordered)) - 1]
    soon = max(policy.hang_certain_s, CERTAIN_TIMES * usual, CERTAIN_LONGEST_TIMES * pace.longest)
    return soon + CERTAIN_LONGEST_TIMES * pace.save if saving else soon

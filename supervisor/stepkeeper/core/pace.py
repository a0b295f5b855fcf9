"""How fast a run steps, from its own history: what silence is longer than usual.  Pure.

A launch begins without statistics of its own: those of the launch before count until it has some.  The first steps of
a launch compile, load and fill caches, so they are none of them.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core.policy import Policy
from stepkeeper.core.robust import median_mad

KEPT_MAX = 64  # intervals
ENOUGH = 5  # of them to know what is usual
WARM_UP_STEPS = 3
STEADY = 32  # of them to know that a run is even
STEADY_TIMES = 5.0  # as many usual steps as are waited for elsewhere
LONGEST_TIMES = 3.0  # what took long once may take so many times as long
SAVES_ENOUGH = 3  # to know how long one takes at least
QUICKER_TIMES = 0.25  # of the quickest one: beside training all are slower, yet none will be quicker than that

replace = msgspec.structs.replace


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that steps took."""

    heard: int = 0  # words of steps in this launch
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


def stepped(pace: Pace, seconds: float) -> Pace:
    """Take in a step."""
    pace = replace(pace, heard=pace.heard + 1, first=pace.first if pace.first is not None else seconds)
    if pace.heard <= WARM_UP_STEPS:
        return pace
    return replace(pace, recent=(*pace.recent, seconds)[-KEPT_MAX:], longest=max(pace.longest, seconds))


def saved(pace: Pace, seconds: float, *, by_disk: bool) -> Pace:
    """Take in how long a save took; by way of the nodes' disks it tells nothing of the quickest way."""
    pace = replace(pace, save=max(pace.save, seconds))
    if by_disk:
        return pace
    quickest = min(pace.quickest, seconds) if pace.saves else seconds
    return replace(pace, saves=pace.saves + 1, quickest=quickest)


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
    if pace.heard == 0:  # loading, compiling, the first step
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

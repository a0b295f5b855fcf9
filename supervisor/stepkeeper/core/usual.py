"""What is usual in a run, over its launches and attempts: how long a start takes, and a step.  Pure."""

from __future__ import annotations

import msgspec

from stepkeeper.core.policy import Policy
from stepkeeper.core.robust import median_mad

LAUNCHES_KEPT = 6
WORDS = 30  # of steps, without the warm-up, until a launch has a pace to compare
SIGMAS = 4.0

replace = msgspec.structs.replace


class LaunchPace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a launch stepped."""

    nodes: int  # how many it had
    seconds: float  # the median step


class Baseline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the launches of a run had in common."""

    start_s: float = 0.0  # the longest from the start of a launch to the trainer library's first word; 0: none yet
    paces: tuple[LaunchPace, ...] = ()  # of the newest launches


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

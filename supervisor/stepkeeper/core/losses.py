"""Losses that go wrong, by a run's own history: no number at all, or far above what was usual.  Pure.

The history is of words, at most one a second, and survives a relaunch up to the step that training resumed from, and
a requeue (from `metrics.csv`): so a jump right after a resume is seen as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from stepkeeper.core.baseline import median_mad
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import LossWrong

KEPT_MAX = 128  # words
ENOUGH = 20  # of them to know what is usual
JUST_RESUMED = 20  # words: a jump within them has to do with the resume
NOT_FINITE, SPIKE, DISCONTINUITY = "loss-not-finite", "loss-spike", "loss-discontinuity"


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run's losses."""

    recent: tuple[tuple[int, float], ...] = ()  # (step, logarithm of the loss), the newest last
    count: int = msgspec.field(default=0, name="heard")  # losses of this launch
    resumed: bool = False
    wrong_words: int = 0  # in a row, up to now
    wrong_since: int | None = None  # the step of the first of them
    reported: bool = msgspec.field(default=False, name="told")  # these


def carried(known: Sequence[tuple[int, float]]) -> Losses:
    """Begin an attempt with (step, loss) of those before, oldest first."""
    logs = tuple((step, math.log(loss)) for step, loss in known if 0 < loss < math.inf)
    return Losses(recent=logs[-KEPT_MAX:])


def launched(losses: Losses, resume_step: int | None) -> Losses:
    """Begin a launch: what lies beyond its first step did not happen."""
    kept = tuple(each for each in losses.recent if resume_step is not None and each[0] <= resume_step)
    return Losses(recent=kept, resumed=bool(kept))


def observe(losses: Losses, step: int, loss: float | None, policy: Policy) -> tuple[Losses, LossWrong | None]:
    """Take in a loss; report an anomaly once it has lasted.

    Args:
        losses: so far.
        step: that was completed.
        loss: of it; NaN where it was no number, None where nobody said.
        policy: how much is too much.
    """
    if loss is None:
        return losses, None
    losses = replace(losses, count=losses.count + 1)
    wrong = _wrong(losses, step, loss, policy)
    if wrong is None:
        return _usual(losses, step, loss), None
    since = losses.wrong_since if losses.wrong_since is not None else step
    losses = replace(losses, wrong_words=losses.wrong_words + 1, wrong_since=since)
    if losses.wrong_words < policy.loss_words:
        return losses, None
    if losses.reported:  # a level that stays becomes the usual one
        return (losses if wrong.rule == NOT_FINITE else _kept(losses, step, loss)), None
    return replace(losses, reported=True), replace(wrong, step=since)


def _usual(losses: Losses, step: int, loss: float) -> Losses:
    losses = replace(losses, wrong_words=0, wrong_since=None, reported=False)
    return _kept(losses, step, loss) if loss > 0 else losses  # of others no logarithm: they are no likelihoods


def _kept(losses: Losses, step: int, loss: float) -> Losses:
    return replace(losses, recent=(*losses.recent, (step, math.log(loss)))[-KEPT_MAX:])


def _wrong(losses: Losses, step: int, loss: float, policy: Policy) -> LossWrong | None:
    """Return the rule that a loss breaks, and how; None for a usual one."""
    if not math.isfinite(loss):
        return LossWrong(rule=NOT_FINITE, step=step)
    if loss <= 0 or len(losses.recent) < ENOUGH:
        return None
    logs = [log for _, log in losses.recent]
    median, sigma = median_mad(logs)
    above = math.log(loss) - median
    if above <= max(policy.loss_sigmas * sigma, math.log(policy.loss_times)):
        return None
    just_resumed = losses.resumed and losses.count <= JUST_RESUMED + losses.wrong_words
    return LossWrong(rule=DISCONTINUITY if just_resumed else SPIKE, step=step, loss=loss, baseline=math.exp(median))

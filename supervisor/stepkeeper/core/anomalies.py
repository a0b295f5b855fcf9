"""What follows from a loss that goes wrong: a report, or a rollback to a step before it.  Pure."""

from __future__ import annotations

import itertools
import math
import statistics

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.baseline import MAD_TO_SIGMA
from stepkeeper.core.causes import Cause
from stepkeeper.core.losses import ENOUGH, NOT_FINITE, Losses, observe
from stepkeeper.core.phases import Decision, kill_for
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Finding, Why
from stepkeeper.core.state import Phase, State

OFF, REPORT, ROLLBACK = WATCH = ("off", "report", "rollback")

replace = msgspec.structs.replace


def watch_loss(state: State, event: on.Progressed, policy: Policy) -> Decision:
    """Take in the loss of a step."""
    if event.step_seconds is None:  # a sign of life between steps: its loss came before
        return Decision(state)
    losses, anomaly = observe(state.losses, event.step, math.nan if event.not_finite else event.loss, policy)
    state = replace(state, losses=losses)
    wanted = policy.loss_not_finite if anomaly is not None and anomaly.rule == NOT_FINITE else policy.loss_spike
    if anomaly is None or wanted == OFF:
        return Decision(state)
    if wanted == REPORT or state.phase is not Phase.TRAINING:
        return Decision(state, (), (anomaly,))
    found = Finding(cause=Cause.NUMERICAL, rule=anomaly.rule, reasons=(anomaly,), step=anomaly.step)
    return kill_for(state, event.at, found, policy)


# What follows from steps that were done again after a resume, and their losses.  Pure.
#
# The same bits prove that the state came back whole and that this hardware computes as the one before.  Other losses
# in a run that says it is deterministic are a wrong state or a device that computes wrongly, here or there.  Where a
# run is not deterministic, what counts is how far they are, beside what is usual between its steps.

CHOICES = (REPORT, ROLLBACK)
RULE = "replay-differs"
NOISE_SHARE = 0.5  # of what neighbouring steps differ by: the same step on the same data differs by less


def on_replayed(state: State, event: on.Replayed, policy: Policy) -> Decision:
    """Judge the losses of steps that were done again."""
    if not state.launch.runs(event.launch):
        return Decision(state)
    if event.worst is None:
        why: Why = (because.ReplayEqual(steps=event.steps),)
        return Decision(state, (do.ReportReplay(equal=True, steps=event.steps, reasons=why),), why)
    apart = _distance(event.then, event.now)
    tolerance = _tolerance(state.losses, policy)
    if not event.deterministic and apart <= tolerance:
        then, now = event.then, event.now
        why = (because.ReplayEqual(steps=event.steps, exact=False, step=event.worst, then=then, now=now),)
        return Decision(state, (_report(event, (), why, equal=True),), why)
    before = state.nodes.launched_before
    new = tuple(node for node in state.launch.nodes if before and node not in before)
    why = (
        because.ReplayDiffers(
            step=event.worst,
            then=event.then,
            now=event.now,
            deterministic=event.deterministic,
            new=new,
            changed=event.changed,
        ),
    )
    report = _report(event, new, why, equal=False)
    if policy.replay_differs == REPORT or state.phase is not Phase.TRAINING:
        return Decision(state, (report,), why)
    found = Finding(cause=Cause.NUMERICAL, rule=RULE, reasons=why, step=event.worst)
    ended = kill_for(state, event.at, found, policy)
    return Decision(ended.state, (report, *ended.effects), why)


def _report(event: on.Replayed, nodes: tuple[str, ...], why: Why, *, equal: bool) -> do.ReportReplay:
    return do.ReportReplay(
        equal=equal, steps=event.steps, step=event.worst, then=event.then, now=event.now, nodes=nodes, reasons=why
    )


def _tolerance(losses: Losses, policy: Policy) -> float:
    """Return how far the loss of a step may be from itself, as a logarithm."""
    logs = [log for _, log in losses.recent]
    least = math.log(policy.replay_times)
    if len(logs) < ENOUGH:
        return max(least, math.log(policy.loss_times))
    between = [abs(later - earlier) for earlier, later in itertools.pairwise(logs)]
    return max(least, NOISE_SHARE * MAD_TO_SIGMA * statistics.median(between))


def _distance(then: float | None, now: float | None) -> float:
    if then is None or now is None:
        return math.inf
    return abs(math.log(now / then)) if then > 0 and now > 0 else abs(now - then)

"""What follows from a loss that goes wrong: it is told, or training goes on from before it.  Pure."""

from __future__ import annotations

import math

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.losses import NOT_FINITE, observe
from stepkeeper.core.phases import Decision, kill
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Finding
from stepkeeper.core.state import Next, Phase, Plan, State

OFF, REPORT, ROLLBACK = WATCH = ("off", "tell", "rollback")

replace = msgspec.structs.replace


def watch_loss(state: State, event: on.Progressed, policy: Policy) -> Decision:
    """Take in the loss of a step."""
    if event.step_seconds is None:  # a sign of life between steps: its loss was heard before
        return Decision(state)
    losses, anomaly = observe(state.losses, event.step, math.nan if event.not_finite else event.loss, policy)
    state = replace(state, losses=losses)
    wanted = policy.loss_not_finite if anomaly is not None and anomaly.rule == NOT_FINITE else policy.loss_spike
    if anomaly is None or wanted == OFF:
        return Decision(state)
    if wanted == REPORT or state.phase is not Phase.TRAINING:
        return Decision(state, (), (anomaly,))
    found = Finding(cause=Cause.NUMERICAL, rule=anomaly.rule, reasons=(anomaly,), step=anomaly.step)
    plan = Plan(next=Next.RELAUNCH, why=(anomaly,))
    state = replace(state, phase=Phase.STOPPING, plan=plan, first_failure=(anomaly,), found=found)
    return kill(state, event.at, policy, (anomaly,))

"""Which events reach the journal, and what its reader must know of those that do not.

A training says far more than a journal of months may hold: messages of steps are samples there, and of quick saves some
are left out.  What was left out has changed the state all the same, so the next record holds these changes (`missed`):
a reader that applies them decides what we decided.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Announced, Launch, Ranks, State, Timer, Timers
from stepkeeper.loop_tools import RateLimiter
from stepkeeper.reason_text import text
from stepkeeper.run_store.journal import VERSION, Record
from stepkeeper_trainer.formats.lease import Lease

SAMPLED = (on.Progressed, on.NodesPaced)
SAVES = (on.SaveBegan, on.CheckpointCommitted)
EVIDENCE = (on.Progressed, on.RankExited, on.BusEnded, on.Judged)  # journaled also where they changed nothing
NODES_PACED_EVERY_S = 3600.0  # where nothing follows from it: of 2,000 nodes it is a long record
SAVES_AT_ONCE, SAVES_EVERY_S = 100, 10.0
NODES_AT_ONCE, NODES_EVERY_S = 1000, 1.0  # messages of watchers and ends of ranks that nothing follows from
WINDOW_LEAST = 4  # of a shorter list nothing is saved by naming only what is new


class Recorder:
    """Of one attempt.  A week of training must not fill the journal: 100 MB is the limit."""

    def __init__(self, lease: Lease, policy: Policy) -> None:
        """Begin with the state that an attempt begins with."""
        self._lease = lease
        self._number = 0  # of the newest record
        self._known = State()  # as a reader of the journal knows it
        self._limiters: dict[type[on.Event], RateLimiter] = {
            on.Progressed: RateLimiter(1 / policy.progress_every_s, 1),
            on.NodesPaced: RateLimiter(1 / NODES_PACED_EVERY_S, 1),
            on.SaveBegan: RateLimiter(1 / SAVES_EVERY_S, SAVES_AT_ONCE),
            on.CheckpointCommitted: RateLimiter(1 / SAVES_EVERY_S, SAVES_AT_ONCE),
            on.WatcherReady: RateLimiter(1 / NODES_EVERY_S, NODES_AT_ONCE),
            on.RankExited: RateLimiter(1 / NODES_EVERY_S, NODES_AT_ONCE),
        }

    def record(self, before: State, event: on.Event, decision: Decision) -> Record | None:
        """Return the record of an event; None where it has none."""
        state = decision.state
        came_to_nothing = not decision.effects and not decision.why
        if came_to_nothing and state == before and not isinstance(event, EVIDENCE):
            return None
        sample = came_to_nothing and isinstance(event, SAMPLED)
        limited = came_to_nothing or (not decision.effects and isinstance(event, SAVES))
        limiter = self._limiters.get(type(event)) if limited else None
        if limiter is not None and not limiter.take(event.at):
            return None
        self._number += 1
        missed: dict[str, Any] = {}
        if not sample:
            missed, self._known = changes(self._known, before), state
        return Record(
            v=VERSION,
            job_id=self._lease.job_id,
            restart_count=self._lease.restart_count,
            attempt=self._lease.attempt,
            launch=state.launch.number,
            phase=state.phase,
            event=event,
            why=text(decision.why),
            reasons=decision.why,
            effects=decision.effects,
            failures=state.budgets.failures,
            node_losses=state.budgets.node_losses,
            best_step=state.budgets.best_step,
            nodes=state.nodes.usable,
            excluded=state.nodes.excluded,
            tried=state.budgets.tried,
            baseline=state.baseline,
            skipped_data=state.resume.skipped_data,
            number=self._number,
            sample=sample,
            missed=missed,
        )


# A change is named by one key each, whichever record of the state holds it: journals outlive a change of the records.
KEYS = {
    "phase": ("", "phase"),
    "failure": ("", "failure"),
    "answered": ("", "answered"),
    "suspended": ("", "suspended"),
    "pace": ("", "pace"),
    "baseline": ("", "baseline"),
    "losses": ("", "losses"),
    "stragglers": ("", "stragglers"),
    "job_id": ("identity", "job_id"),
    "restart_count": ("identity", "restart_count"),
    "attempt": ("identity", "attempt"),
    "batch_node": ("identity", "batch_node"),
    "kill_wait_s": ("identity", "kill_wait_s"),
    "batch": ("identity", "has_batch_script"),
    "wrapped": ("identity", "wrapped"),
    "started_at": ("identity", "started_at"),
    "end_at": ("identity", "end_at"),
    "nodes": ("nodes", "usable"),
    "nodes_wanted": ("nodes", "wanted"),
    "nodes_min": ("nodes", "min"),
    "node_counts": ("nodes", "counts"),
    "allocated": ("nodes", "allocated"),
    "lost": ("nodes", "lost"),
    "excluded": ("nodes", "excluded"),
    "readmit": ("nodes", "readmit"),
    "releasing": ("nodes", "releasing"),
    "growth": ("nodes", "growth"),
    "switches": ("nodes", "switches"),
    "launched_before": ("nodes", "launched_before"),
    "bus": ("watchers", "bus"),
    "ready": ("watchers", "ready"),
    "silent": ("watchers", "silent"),
    "watchers_answered": ("watchers", "answered"),
    "watchers_without": ("watchers", "without"),
    "bus_error": ("watchers", "error"),
    "bus_complete_at": ("watchers", "complete_at"),
    "bus_restarts": ("watchers", "restarts"),
    "bus_tries": ("watchers", "tries"),
    "slurm_reachability": ("watchers", "reachability"),
    "bus_status": ("watchers", "status"),
    "wait_until": ("start", "wait_until"),
    "unfit_since": ("start", "unfit_since"),
    "slurm_away_since": ("start", "slurm_away_since"),
    "choice": ("resume", "choice"),
    "resume_from": ("resume", "directory"),
    "resume_step": ("resume", "step"),
    "went_back": ("resume", "went_back"),
    "not_led_back": ("resume", "not_led_back"),
    "skipped_data": ("resume", "skipped_data"),
    "same_world": ("resume", "same_world"),
    "suspect": ("storage", "suspect"),
    "storage_since": ("storage", "failing_since"),
    "storage_tries": ("storage", "tries"),
    "reading_back": ("storage", "reading_back"),
    "read_back_wrong": ("storage", "read_back_wrong"),
    "verifying": ("storage", "verifying"),
    "launch": ("launch", "number"),
    "launched": ("launch", "nodes"),
    "launched_at": ("launch", "began_at"),
    "bus_restarted_in_launch": ("launch", "bus_restarted"),
    "slurm_sent": ("launch", "slurm_sent"),
    "step": ("launch", "step"),
    "snapshot": ("launch", "snapshot"),
    "saving": ("launch", "saving"),
    "hints": ("launch", "hints"),
    "first_failure": ("launch", "first_failure"),
    "found": ("launch", "found"),
    "paced": ("launch", "paced"),
    "patience": ("silence", "patience"),
    "looking": ("silence", "looking"),
    "early_s": ("silence", "early_s"),
    "certain_s": ("silence", "certain_s"),
    "plan": ("leaving", "plan"),
    "fallback_plan": ("leaving", "fallback_plan"),
    "term_at": ("leaving", "term_at"),
    "leave_at": ("leaving", "leave_at"),
    "preempted_at": ("leaving", "preempted_at"),
    "eviction_confirmed": ("leaving", "eviction_confirmed"),
    "signal": ("query", "signal"),
    "question": ("query", "question"),
    "question_stale": ("query", "stale"),
    "requeue_tries": ("requeue", "tries"),
    "resubmitting": ("requeue", "resubmitting"),
    "failures": ("budgets", "failures"),
    "node_losses": ("budgets", "node_losses"),
    "nodes_lost_at": ("budgets", "nodes_lost_at"),
    "tried": ("budgets", "tried"),
    "best_step": ("budgets", "best_step"),
    "failure_counted": ("budgets", "failure_counted"),
}


# What holds of a launch, one key each: `ranks` and `announced` say it in two words.
FLAGS = ("running", "killed", "all_tasks_started", "library_seen", "library_withdrawn")

# Timers have keys as well, and what the phase waits for has two: journals of earlier releases say only until when.
BESIDE = {
    "storage_test_at": Timer.STORAGE_TEST,
    "storage_retry_at": Timer.STORAGE_RETRY,
    "hang_at": Timer.HANG,
    "limit_at": Timer.LIMIT,
    "requeue_by": Timer.REQUEUE_END,
}
WAIT, WAIT_UNTIL = "waits_for", "deadline_at"
# Each key -> the field of `State` that holds its value.
HOLDERS = {
    **{key: record or field for key, (record, field) in KEYS.items()},
    **dict.fromkeys(FLAGS, "launch"),
    **dict.fromkeys((*BESIDE, WAIT, WAIT_UNTIL), "timers"),
}


def changes(old: State, new: State) -> dict[str, Any]:
    """Return what has to be changed in a state to make it another one; of windows that slid only what is new."""
    found: dict[str, Any] = {}
    same = {name for name in State.__struct_fields__ if getattr(old, name) is getattr(new, name)}
    for key, holder in HOLDERS.items():
        if holder in same:  # few events change more than one or two records
            continue
        then, now = _value(old, key), _value(new, key)
        if then is not now and then != now:
            found[key] = _change(_plain(then), _plain(now))
    return found


def _value(state: State, key: str) -> object:
    if key == WAIT:
        return state.timers.wait
    if key == WAIT_UNTIL:
        return state.deadline_at
    if key in BESIDE:
        return state.timers.get(BESIDE[key])
    record, field = KEYS.get(key, ("launch", key))
    value: object = getattr(getattr(state, record) if record else state, field)
    return value


def _plain(value: object) -> Any:
    """Return a value as a reader of the journal has it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def changed(state: State, missed: dict[str, Any]) -> State:
    """Return the state with such changes.

    Raises:
        msgspec.ValidationError: they are not of this version's state.
    """
    plain: dict[str, Any] = {}
    for key, change in missed.items():
        if key in KEYS:
            record, field = KEYS[key]
            value = _apply(_plain(_value(state, key)), change)
            (plain.setdefault(record, {}) if record else plain)[field] = value
    state = msgspec.structs.replace(state, timers=_timers(state.timers, missed), launch=_launch(state.launch, missed))
    made = msgspec.convert(plain, State)
    for key in missed.keys() & KEYS.keys():
        record, field = KEYS[key]
        value = {field: _value(made, key)}
        if record:
            value = {record: msgspec.structs.replace(getattr(state, record), **value)}
        state = msgspec.structs.replace(state, **value)
    return state


def _launch(launch: Launch, missed: dict[str, Any]) -> Launch:
    said = {key: msgspec.convert(missed.get(key, getattr(launch, key)), bool) for key in FLAGS}
    running = Ranks.RUNNING if said["running"] else Ranks.NONE
    killed = Ranks.KILLED if said["running"] else Ranks.GONE
    announced = (
        (Announced.WITHDRAWN, said["library_withdrawn"]),
        (Announced.LIBRARY, said["library_seen"]),
        (Announced.TASKS_STARTED, said["all_tasks_started"]),
    )
    return msgspec.structs.replace(
        launch,
        ranks=killed if said["killed"] else running,
        announced=next((word for word, holds in announced if holds), Announced.NOTHING),
    )


def _timers(timers: Timers, missed: dict[str, Any]) -> Timers:
    for key in missed.keys() & BESIDE.keys():
        timers = timers.beside(BESIDE[key], msgspec.convert(missed[key], float | None))
    if not missed.keys() & {WAIT, WAIT_UNTIL}:
        return timers
    wait = msgspec.convert(missed.get(WAIT, timers.wait), Timer | None)
    known = timers.get(timers.wait) if timers.wait is not None else None
    return timers.waiting(wait, msgspec.convert(missed.get(WAIT_UNTIL, known), float | None))


def _change(then: Any, now: Any) -> Any:
    """Return a plain value, or how to come to it: `in` a record, `new` behind what is `kept` of a list, or `set`."""
    if isinstance(then, dict) and isinstance(now, dict) and then.keys() <= now.keys():
        parts = {
            key: _change(then[key], value) if key in then else {"set": value}
            for key, value in now.items()
            if key not in then or then[key] != value
        }
        return {"in": parts}
    if isinstance(now, dict):
        return {"set": now}
    if isinstance(then, list) and isinstance(now, list) and len(now) >= WINDOW_LEAST:
        kept = next((length for length in range(min(len(then), len(now)), 0, -1) if then[-length:] == now[:length]), 0)
        return {"kept": kept, "new": now[kept:]} if kept else now
    return now


def _apply(then: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    if "set" in change:
        return change["set"]
    if "in" in change:
        return {**then, **{key: _apply(then.get(key), part) for key, part in change["in"].items()}}
    return [*then[-change["kept"] :], *change["new"]]

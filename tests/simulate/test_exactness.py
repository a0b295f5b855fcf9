"""A journal leaves most words of a training out, and still tells all that the decisions came from."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.core import events as on
from stepkeeper.core.decide import decide
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import BESIDE as TIMERS_BESIDE
from stepkeeper.core.state import Announced, Launch, Ranks, State, Timer
from stepkeeper.run_store import journal
from stepkeeper.run_store.recorder import BESIDE, FLAGS, KEYS, Recorder, changed, changes
from stepkeeper.simulate.replay import replay
from stepkeeper.simulate.scenario import given_training, parse
from stepkeeper.simulate.simulator import Simulator
from stepkeeper.simulate.world import World
from stepkeeper_trainer.formats.lease import Lease
from tests.core.histories import FIELDS, arbitrary
from tests.core.realistic import realistic

POLICY = Policy()
RECORDS = {record for record, _ in KEYS.values() if record}
LEASE = Lease(job_id=7, restart_count=0, attempt=0, node="a", pid=1, taken_at=0.0)
EXAMPLES = int(os.environ.get("STEPKEEPER_EXAMPLES", "40"))
check = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def journaled(events: Iterable[on.Event], policy: Policy = POLICY, begin: State | None = None) -> list[journal.Line]:
    """Return what a supervisor would have written, as it is read again."""
    recorder, state, lines = Recorder(LEASE, policy), begin or State(), []
    for event in events:
        decision = decide(state, event, policy)
        record = recorder.record(state, event, decision)
        state = decision.state
        if record is not None:
            data = msgspec.json.encode(record)
            lines.append(journal.Line(msgspec.json.decode(data, type=journal.Record), data))
    return lines


def chatty(events: list[on.Event], words: list[on.Event]) -> list[on.Event]:
    """Return a history with words of steps and nodes between its events, at the times that lie there."""
    told, at = [], 0.0
    for index, event in enumerate(events):
        told.append(event)
        at = event.at
        until = events[index + 1].at if index + 1 < len(events) else at + 30.0
        for number, word in enumerate(words):
            told.append(msgspec.structs.replace(word, at=at + (until - at) * number / len(words)))
    return told


_words = st.lists(
    st.one_of(
        [
            st.builds(kind, at=st.just(0.0), **{**FIELDS[kind], "launch": st.integers(0, 1)})
            for kind in (on.Progressed, on.NodesPaced, on.SaveBegan, on.CheckpointCommitted)
        ]
    ),
    max_size=25,
)


@check
@given(arbitrary() | realistic(POLICY), _words)
def test_the_replay_of_any_history_shows_no_difference(events: list[on.Event], words: list[on.Event]) -> None:
    lines = journaled(chatty(events, words))

    found = replay(lines, {0: POLICY}, words=True)

    assert found.differences == []
    assert (found.unknown, found.unreadable, found.without_start) == (0, 0, 0)
    assert found.records + found.samples + found.repeated == len(lines)


def a_training_with_a_slow_node() -> list[on.Event]:
    """Return two hours of words, a slow node, a loss that jumps, a silence, and a launch that is slower."""
    words = [
        "0 AttemptStarted nodes=a,b,c,d",
        *[f"1 WatcherReady node={node}" for node in "abcd"],
        "2 CheckpointChosen",
    ]
    words += ["3 NodesCleared launch=0", "5 RankHello launch=0"]
    at, step = 6.0, 0
    for _ in range(3600):
        at, step = at + 1, step + 1
        loss = 3.0 - step / 3600 + 0.05 * math.sin(step) + (4.0 if 3000 < step < 3020 else 0.0)
        words.append(f"{at} Progressed launch=0 step={step} loss={loss!r} step_seconds={1.0 + 0.01 * math.cos(step)!r}")
        if step % 10 == 0:
            slow = 0.9 if step > 1800 else 0.5
            words.append(f"{at} NodesPaced launch=0 step={step} own=a:0.5,b:0.51,c:0.49,d:{slow}")
        if step % 4 == 0:
            words.append(f"{at} SaveBegan launch=0 step={step} save_id=s{step}")
            words.append(f"{at + 0.5} CheckpointCommitted launch=0 step={step} save_id=s{step}")
    words += [
        f"{at + 400} Tick",
        f"{at + 405} StacksCollected launch=0 rank=1 node=b",
        f"{at + 406} LaunchEnded launch=0",
    ]
    words.append(f"{at + 407} CheckpointChosen directory=step_00003600 step=3600")
    words.append(f"{at + 407.1} Judged launch=0 cause=hang rule=progress-silence step=3600")
    words += [f"{at + 408} NodesCleared launch=1", f"{at + 410} RankHello launch=1"]
    at += 411
    for _ in range(600):
        at, step = at + 1.4, step + 1
        words.append(f"{at} Progressed launch=1 step={step} loss=2.0 step_seconds=1.4")
    words += [f"{at + 1} SignalReceived", f"{at + 1.1} SlurmAnswered preempt={at} end={at + 120}"]
    state = given_training()
    return [
        parse(line, msgspec.structs.replace(state, watchers=msgspec.structs.replace(state.watchers, bus=1)))
        for line in words
    ]


def test_hours_of_words_fit_into_samples_and_the_replay_is_exact() -> None:
    events = a_training_with_a_slow_node()
    lines = journaled(events)

    found = replay(lines, {0: POLICY}, words=True)

    assert found.differences == []
    assert len(lines) < len(events) / 5
    said = " ".join(line.record.why for line in lines if line.record is not None)
    for told in ("d is slow", "the loss is", "the stacks of the ranks are collected", "steps slower", "preempts"):
        assert told in said


@pytest.mark.parametrize("grow_back", ["launch", "checkpoint"])
def test_the_replay_of_simulated_weeks_is_exact(grow_back: str) -> None:
    """Preemptions, limits, faults, lost nodes, smaller worlds: over many attempts, each with what it carries over."""
    policy = Policy(grow_back=grow_back, hang_watch=False)  # as the simulated world has it
    world = World(
        nodes=32, nodes_min=24, spares=1, failures=60.0, days=10.0, preemptions_per_day=1.0, time_limit_s=86_400.0
    )
    lines: list[journal.Line] = []
    recorders: list[Recorder] = []

    def listen(before: State, event: on.Event, decision: Decision) -> None:
        if isinstance(event, on.AttemptStarted):
            number = len(recorders)
            recorders.append(Recorder(msgspec.structs.replace(LEASE, restart_count=number, attempt=number), policy))
        record = recorders[-1].record(before, event, decision)
        if record is not None:
            data = msgspec.json.encode(record)
            lines.append(journal.Line(msgspec.json.decode(data, type=journal.Record), data))

    Simulator(world, policy, seed=2, listener=listen).run()
    found = replay(lines, dict.fromkeys(range(1000), policy), words=True)

    assert found.differences == []
    assert found.attempts > 10
    assert found.records > 1000


def test_without_what_was_missed_the_same_journal_would_differ() -> None:
    """So the test above can fail: the samples alone are not the state."""
    lines = [
        journal.Line(msgspec.structs.replace(line.record, missed={}), line.data)
        for line in journaled(a_training_with_a_slow_node())
        if line.record is not None
    ]

    assert replay(lines, {0: POLICY}).differences


def test_each_field_of_the_state_has_one_key() -> None:
    state = State()
    fields = [("", name) for name in State.__struct_fields__ if name not in (*RECORDS, "timers")]
    fields += [(record, name) for record in RECORDS for name in getattr(state, record).__struct_fields__]

    assert sorted([*KEYS.values(), ("launch", "ranks"), ("launch", "announced")]) == sorted(fields)
    assert {*BESIDE.values()} == {*TIMERS_BESIDE}


@pytest.mark.parametrize("announced", Announced)
@pytest.mark.parametrize("ranks", Ranks)
def test_what_holds_of_a_launch_is_said_one_by_one_as_journals_always_did(ranks: Ranks, announced: Announced) -> None:
    state = State(launch=Launch(ranks=ranks, announced=announced))
    said = changes(State(), state)

    assert set(said) <= set(FLAGS)
    assert changed(State(), said) == state
    assert changed(state, dict.fromkeys(FLAGS, False)) == State()


def test_a_flag_alone_changes_what_it_says_and_nothing_else() -> None:
    runs = State(launch=Launch(ranks=Ranks.RUNNING, announced=Announced.LIBRARY))

    assert changed(runs, {"killed": True}).launch == Launch(ranks=Ranks.KILLED, announced=Announced.LIBRARY)
    assert changed(runs, {"running": False}).launch == Launch(announced=Announced.LIBRARY)
    assert changed(runs, {"library_seen": False}).launch == Launch(
        ranks=Ranks.RUNNING, announced=Announced.TASKS_STARTED
    )


def test_a_journal_that_says_only_until_when_is_read() -> None:
    state = State().waiting(Timer.LIBRARY, 10.0).beside(Timer.HANG, 20.0)

    assert changed(state, {"deadline_at": 15.0}) == state.waiting(Timer.LIBRARY, 15.0)
    assert changed(state, {"deadline_at": None, "hang_at": 30.0}) == State().beside(Timer.HANG, 30.0)


def test_changes_of_a_state_of_another_version_are_counted_and_passed_over() -> None:
    lines = journaled(a_training_with_a_slow_node())
    strange = {"pace": {"set": {"recent": "fast"}}}
    told = [
        line._replace(record=msgspec.structs.replace(line.record, missed=strange))
        if line.record is not None and line.record.missed
        else line
        for line in lines
    ]

    found = replay(told, {0: POLICY}, stop_after=10_000)

    assert found.unknown > 0


@check
@given(arbitrary(), arbitrary())
def test_changes_lead_from_any_state_to_any_other(one: list[on.Event], other: list[on.Event]) -> None:
    states = []
    for events in (one, other):
        state = State()
        for event in events:
            state = decide(state, event, POLICY).state
        states.append(state)
    first, second = states

    told = msgspec.json.decode(msgspec.json.encode(changes(first, second)))

    assert changed(first, told) == second

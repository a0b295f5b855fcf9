from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.policy import Policy
from stepkeeper.core.stragglers import Stragglers, Suspect
from stepkeeper.reason_text import text
from stepkeeper.run_analytics import history, timeline
from stepkeeper.run_analytics.model import SECOND, Ending, Rows, Use
from stepkeeper.run_analytics.timeline import RunState, Timeline
from stepkeeper.run_store import journal
from stepkeeper.run_store.journal import VERSION, Record
from tests.core import histories
from tests.core.realistic import realistic
from tests.run_analytics.build import START, Journal, killed, read_rows, see, wrong_loss

RECORDED = Path(__file__).parent / "recorded"


def wall(seen: Timeline) -> dict[str, float]:
    return {use.value: time / SECOND for use, time in seen.accounts.wall.items() if time}


def assert_adds_up(seen: Timeline) -> None:
    accounts = seen.accounts
    for before, after in pairwise(seen.spans):
        assert before.end == after.begin, (before, after)
    assert all(span.length > 0 and 0 <= span.working <= span.held for span in seen.spans)
    assert sum(accounts.wall.values()) == accounts.wall_total == seen.until - seen.began
    assert sum(accounts.node_time.values()) == accounts.node_total
    assert min([*accounts.wall.values(), *accounts.node_time.values()]) >= 0
    assert accounts.ettr is None or 0 <= accounts.ettr <= 1
    assert accounts.goodput is None or 0 <= accounts.goodput <= 1


def failed_and_relaunched() -> Journal:
    """20 steps, the newest checkpoint at 10, a rank dies; 10 steps are done again, and 5 more."""
    told = Journal()
    told.begin(0)
    told.launch(10)
    told.steps(1, 20, at=20)
    told.commit(10, at=31)
    told.rank_dies(40.5, left=1.5)
    told.launch(45, resume=10)
    told.steps(11, 15, at=50)
    return told


def test_steps_that_were_done_again_are_lost_and_counted_once() -> None:
    seen = failed_and_relaunched().see(updated_at=round((START + 65) * SECOND))

    assert_adds_up(seen)
    assert wall(seen) == {
        "productive": 25.0,
        "lost": 10.5,  # ten steps, and half of the one that the end cut off
        "starting": 10 + 10 + 3 + 5,
        "stopping": 1.5,
    }
    assert seen.steps_lost == 10
    assert seen.accounts.ettr == pytest.approx(25 / 65)
    assert seen.run_state is RunState.RUNNING
    first, second = seen.launches()
    assert (first.ending, first.decided) == (Ending.FAILURE, "relaunch in the allocation")
    assert "rank 1 on n2 ended with exit code 1" in first.why
    assert (second.ending, second.resumed_step) == (Ending.RUNNING, 10)


def test_a_save_costs_what_its_steps_last_longer_than_usual() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 10, at=0)
    told.steps(11, 1, at=10, seconds=3.5)  # one step of 3.5 s while the save is on its way
    told.commit(10, at=13, seconds=2.5)
    told.steps(12, 10, at=13.5)

    seen = told.see()

    assert_adds_up(seen)
    assert wall(seen) == {"productive": 21.0, "saving": 2.5}
    assert seen.accounts.goodput == pytest.approx(21 / 23.5)


def test_silence_before_somebody_acts_is_hung() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 10, at=0)
    told.commit(10, at=10, seconds=0)
    told.rank_dies(610)

    seen = told.see()

    assert_adds_up(seen)
    assert wall(seen) == {"productive": 10.0, "lost": 1.0, "hung": 599.0}


def suspended(told: Journal, until: float, seconds: float) -> None:
    told.tell(on.Suspended(at=START + until, seconds=seconds))


def test_a_suspended_step_is_no_longer_than_the_others() -> None:
    """Ranks are stopped a little later than the supervisor: a step that was completed meanwhile is training."""
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 10, at=0)
    suspended(told, until=109.5, seconds=100)
    told.steps(11, 1, at=10, seconds=100.5)
    told.steps(12, 9, at=110.5)

    seen = told.see()

    assert_adds_up(seen)
    assert wall(seen) == {"productive": 20.0, "suspended": 99.5}
    assert seen.accounts.ettr == pytest.approx(20 / 119.5)
    assert seen.accounts.node_time[Use.SUSPENDED] == 2 * 99.5 * SECOND


def test_steps_that_went_on_while_the_batch_host_stood_still_were_not_suspended() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 10, at=0)
    suspended(told, until=200, seconds=190)
    told.steps(11, 200, at=10)

    assert wall(told.see()) == {"productive": 210.0}


def test_a_short_turn_of_another_job_is_counted_though_the_ranks_are_stopped_later() -> None:
    """Seven seconds, of which the ranks stood still for five; the supervisor had waited for one before."""
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 13, at=0)
    told.steps(14, 1, at=13, seconds=6)
    suspended(told, until=18.5, seconds=8)
    told.steps(15, 20, at=19)

    seen = told.see()

    assert_adds_up(seen)
    assert wall(seen) == {"productive": 34.0, "suspended": 5.0}


def test_turns_of_a_gang_that_are_shorter_than_a_step_are_all_counted() -> None:
    """Five seconds ours, five the other job's; a step needs eight of ours, and none is ever seen whole."""
    told = Journal()
    told.begin(0)
    told.launch(0)
    for turn in range(1, 17):
        suspended(told, until=10 * turn, seconds=5)
    for step in range(1, 11):
        ours = 8 * step
        told.steps(step, 1, at=0, seconds=ours + 5 * (ours // 5))

    seen = told.see()

    assert_adds_up(seen)
    assert wall(seen)["suspended"] == pytest.approx(80, abs=5)
    assert wall(seen)["productive"] == pytest.approx(80, abs=8)


def test_what_was_suspended_at_the_start_in_a_save_and_at_the_end_is_in_none_of_them() -> None:
    told = Journal()
    told.begin(0)
    suspended(told, until=50, seconds=40)
    told.launch(60)
    told.steps(1, 10, at=65)
    told.steps(11, 1, at=75, seconds=33)  # thirty suspended, one the step, two for the save
    suspended(told, until=107, seconds=30)
    told.commit(10, at=107.5, seconds=32)
    told.steps(12, 10, at=108)
    suspended(told, until=219, seconds=100)
    told.rank_dies(220)

    seen = told.see(updated_at=round((START + 220) * SECOND))

    assert_adds_up(seen)
    assert wall(seen)["suspended"] == 40 + 30 + 100
    assert wall(seen)["saving"] == 2
    assert wall(seen)["starting"] == 25
    assert "hung" not in wall(seen) or wall(seen)["hung"] < 2


def test_waiting_for_nodes_costs_time_but_no_nodes() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 10, at=0)
    told.tell(on.SignalReceived(at=START + 10, signal="TERM"))
    facts = {"state": on.JobState.RUNNING, "slurm_state": "RUNNING", "restarts": 0, "end_at": START + 40}
    told.tell(on.SlurmAnswered(at=START + 10, job=on.JobFacts(**facts, preempt_at=START + 9)))
    told.commit(10, at=12, seconds=2, emergency=True)
    launch = told.state.launch.number
    told.tell(on.TrainingStopped(at=START + 12, launch=launch, step=10))
    told.tell(on.CheckpointVerified(at=START + 12, directory="step_00000010", ok=True))
    told.tell(on.LaunchEnded(at=START + 13, launch=launch, code=75, stopped=True))
    told.tell(on.SlurmAnswered(at=START + 13, job=on.JobFacts(**facts)))
    told.tell(on.RequeueAnswered(at=START + 14, ok=True))
    told.tell(on.BusEnded(at=START + 14, bus=1, code=0))
    assert told.records[-1].phase.value == "done"
    assert told.see().run_state is RunState.WAITING
    told.begin(1014)
    told.launch(1014, resume=10)
    told.steps(11, 10, at=1014)
    told.tell(on.TrainingFinished(at=START + 1024, launch=0, step=20))
    told.tell(on.LaunchEnded(at=START + 1024, launch=0, code=0, finished=True))
    told.tell(on.BusEnded(at=START + 1024, bus=1, code=0))

    seen = told.see()

    assert_adds_up(seen)
    assert wall(seen) == {"productive": 20.0, "saving": 2.0, "stopping": 2.0, "queue": 1000.0}
    assert seen.accounts.node_total == 2 * 24 * SECOND
    assert seen.accounts.goodput == pytest.approx(20 / 24)
    assert seen.run_state is RunState.FINISHED
    assert [launch.ending for launch in seen.launches()] == [Ending.PREEMPTED, Ending.FINISHED]
    assert next(seen.launches()).decided == "requeue"


def test_a_launch_that_left_as_somebody_asked_has_not_failed() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 10, at=0)
    told.tell(on.Requested(at=START + 10, name="stop-1", kind="stop", by="ada"))
    told.commit(10, at=12, seconds=2, emergency=True)
    told.tell(on.TrainingStopped(at=START + 12, launch=0, step=10))
    told.tell(on.RankExited(at=START + 12, launch=0, rank=0, node="n1", code=75))
    told.tell(on.CheckpointVerified(at=START + 12, directory="step_00000010", ok=True))
    told.tell(on.LaunchEnded(at=START + 13, launch=0, code=75, stopped=True))
    told.tell(on.BusEnded(at=START + 14, bus=1, code=0))

    seen = told.see()

    (launch,) = seen.launches()
    assert (launch.ending, launch.why) == (Ending.STOPPED, "ada asks to save and end")
    assert (seen.run_state, seen.why) == (RunState.ENDED, "ada asks to save and end")


def test_a_spare_is_held_and_takes_no_part_until_it_is_needed() -> None:
    told = Journal(nodes=("n1", "n2", "n3"))
    told.begin(0, nodes_wanted=2)
    told.launch(0)
    told.steps(1, 10, at=0)
    told.commit(10, at=10, seconds=0)
    fault = {"incident": "i", "name": "XID 79", "action": "drain", "leave": True, "why": "it left the bus"}
    told.tell(on.NodeFaulted(at=START + 10, node="n2", **fault))
    told.tell(on.LaunchEnded(at=START + 10, launch=0, code=137))
    told.launch(10, resume=10)
    told.steps(11, 10, at=10)

    seen = told.see(updated_at=round((START + 20) * SECOND))

    assert_adds_up(seen)
    assert seen.accounts.node_total == (3 * 10 + 2 * 10) * SECOND
    assert seen.accounts.node_time[Use.SPARE] == 10 * SECOND
    assert seen.accounts.node_time[Use.PRODUCTIVE] == 2 * 20 * SECOND
    launches = list(seen.launches())
    assert [launch.nodes for launch in launches] == [("n1", "n2"), ("n1", "n3")]
    assert launches[0].ending is Ending.NODE
    assert seen.attempts[0].left == {"n2": round((START + 10) * SECOND)}
    assert [(incident.kind, incident.node) for incident in seen.incidents] == [("node fault", "n2")]


def test_a_supervisor_that_was_killed_lived_until_the_last_step() -> None:
    told = killed()

    seen = told.see(updated_at=round((START + 115) * SECOND))

    assert_adds_up(seen)
    assert wall(seen) == {"productive": 20.0, "lost": 20.0, "queue": 70.0, "starting": 5.0}
    assert next(seen.launches()).ending is Ending.NO_UPDATE
    assert told.see(now=round((START + 5000) * SECOND)).run_state is RunState.SILENT


def test_what_nobody_will_resume_is_lost_where_the_run_is_over() -> None:
    told = Journal(policy=Policy(failures_max=1))
    told.begin(0)
    told.launch(0)
    told.steps(1, 20, at=0)
    told.commit(15, at=15, seconds=0)
    told.rank_dies(20)
    told.tell(on.CheckpointChosen(at=START + 20, directory="/r/checkpoints/step_00000015", step=15))
    told.launch(20, resume=15)
    told.steps(16, 4, at=20)
    told.rank_dies(24)
    told.tell(on.CheckpointChosen(at=START + 24, directory="/r/checkpoints/step_00000015", step=15))
    told.tell(on.BusEnded(at=START + 24, bus=1, code=0))

    seen = told.see()

    assert_adds_up(seen)
    assert seen.run_state is RunState.ENDED
    assert wall(seen)["productive"] == 15.0
    assert wall(seen)["lost"] == 9.0


def test_a_command_without_the_library_is_not_called_productive() -> None:
    told = Journal()
    told.begin(0)
    ready = [on.WatcherReady(at=START, node=node, bus=1) for node in ("n1", "n2")]
    told.tell(*ready, on.CheckpointChosen(at=START, directory=None, step=None))
    told.tell(on.NodesCleared(at=START + 5, launch=0, address="n1", port=1))
    told.tell(on.LaunchBegan(at=START + 5, launch=0))

    seen = told.see(updated_at=round((START + 105) * SECOND))

    assert_adds_up(seen)
    assert wall(seen) == {"starting": 5.0, "unknown": 100.0}
    assert seen.accounts.ettr == 0.0


def test_without_metrics_the_progress_in_the_journal_counts() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    for minute in range(1, 6):
        told.tell(on.Progressed(at=START + 60 * minute, launch=0, step=60 * minute, tokens=0))
    told.commit(210, at=211, seconds=0)
    told.rank_dies(300.5)
    told.launch(310, resume=210)
    told.tell(on.Progressed(at=START + 370, launch=1, step=270, tokens=0))
    told.rows = {}

    seen = told.see()

    assert_adds_up(seen)
    assert seen.coarse
    assert wall(seen)["lost"] == pytest.approx(90.5, abs=0.01)


def test_a_journal_that_tells_nothing_is_an_empty_timeline() -> None:
    seen = see([], {})

    assert seen.run_state is RunState.EMPTY
    assert_adds_up(seen)
    assert seen.accounts.ettr is None


def test_a_recorded_run_adds_up() -> None:
    """A rank was killed and a job preempted: a run of the reference script on a real Slurm."""
    seen = timeline.build(
        history.read_history(journal.read(RECORDED / "journal.jsonl")), read_rows(RECORDED / "metrics.csv")
    )

    assert_adds_up(seen)
    assert seen.run_state is RunState.FINISHED
    assert [launch.ending for launch in seen.launches()] == [Ending.FAILURE, Ending.PREEMPTED, Ending.FINISHED]
    assert seen.steps_lost == 10
    assert seen.step == 120
    assert seen.accounts.wall_total / SECOND == pytest.approx(52.825, abs=0.001)
    assert wall(seen)["productive"] == pytest.approx(24.34, abs=0.01)
    assert wall(seen)["queue"] == pytest.approx(6.57, abs=0.01)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy()


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Record], dict[tuple[int, int], Rows]]:
    """Attempts of arbitrary or realistic histories with rows that fit or do not, in order or torn apart."""
    records: list[Record] = []
    rows: dict[tuple[int, int], Rows] = {}
    offset = START
    for attempt in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from((histories.arbitrary(20), realistic(Policy(), 25))))
        turns = histories.run(draw(kind), Policy())
        for turn in turns:
            state = turn.after
            event = histories.msgspec.structs.replace(turn.event, at=offset + turn.event.at)
            records.append(
                Record(
                    v=VERSION, job_id=7, restart_count=attempt, attempt=attempt, launch=state.launch.number,
                    phase=state.phase, event=event, why=text(turn.decision.why),
                    reasons=turn.decision.why, effects=turn.decision.effects,
                    node_losses=state.budgets.node_losses, nodes=state.nodes.usable,
                )
            )  # fmt: skip
        long = turns[-1].event.at
        for launch in range(draw(st.integers(0, 3))):
            at = offset + draw(st.floats(-10, max(1.0, long)))
            step = draw(st.integers(0, 30))
            for pause in draw(st.lists(st.floats(0, 100), max_size=8)):
                at += pause
                rows.setdefault((attempt, launch), Rows()).add(at, step, 1.0)
                step += draw(st.sampled_from((1, 1, 1, 5, -2, 0)))
        offset += long * draw(st.sampled_from((1.0, 1.0, 0.5))) + draw(st.sampled_from((0.0, 3.0, 1000.0)))
    if draw(st.booleans()) and len(records) > 1:
        del records[draw(st.integers(0, len(records) - 1))]  # torn
    return records, rows


@given(made=runs(), late=st.none() | st.integers(0, 10**6))
@settings(
    max_examples=15,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_every_microsecond_has_one_use_whatever_happened(
    made: tuple[list[Record], dict[tuple[int, int], Rows]], late: int | None
) -> None:
    records, rows = made
    updated_at = None if late is None else round(records[-1].event.at * SECOND) + late * 1000

    seen = see(records, rows, updated_at=updated_at)

    assert_adds_up(seen)
    if rows or seen.rows:
        assert seen.accounts.wall[Use.UNKNOWN] == 0


def test_the_step_at_hand_of_a_run_that_lives_is_not_called_hung() -> None:
    """Its only step does not tell how long one takes; what is silent for long is called so."""
    told = Journal()
    told.begin(0)
    told.launch(5)
    told.steps(1, 1, at=5)

    assert wall(told.see(updated_at=round((START + 8) * SECOND))) == {"starting": 6.0, "productive": 2.0}
    assert wall(told.see(updated_at=round((START + 300) * SECOND)))["hung"] > 100


def test_a_launch_of_a_single_step_is_measured_by_the_steps_of_others() -> None:
    told = killed()
    told.begin(200)
    told.launch(205, resume=20)
    told.steps(21, 1, at=215)
    told.begin(300)

    seen = told.see()

    assert_adds_up(seen)
    assert [(each.use, each.length) for each in seen.spans if (each.attempt, each.launch) == (2, 0)] == [
        (Use.STARTING, 10 * SECOND),
        (Use.PRODUCTIVE, SECOND),
    ]


def stood_still() -> Journal:
    """A run whose ranks stand still after step 20; we end the launch, and it is judged."""
    told = Journal()
    told.begin(0)
    told.launch(0)
    for step in range(1, 21):
        told.steps(step, 1, at=step - 1)
    told.commit(10, at=20)
    at = 20.0
    while not any(isinstance(each, do.CollectStacks) for each in told.records[-1].effects):
        at += 10
        told.tell(on.Tick(at=START + at))
    launch = told.state.launch.number
    summary = "rank 1 is in load (data.py:7)"
    stands = {"launch": launch, "moved": False, "idle": True, "summary": summary, "rank": 1, "node": "n2"}
    told.tell(on.StacksCollected(at=START + at + 1, **stands))
    told.tell(on.RankExited(at=START + at + 2, launch=launch, rank=1, node="n2", signal=9))
    told.tell(on.LaunchEnded(at=START + at + 3, launch=launch, code=-9))
    return told


def test_a_launch_that_stood_still_is_not_one_that_somebody_stopped() -> None:
    told = stood_still()

    (launch,) = told.see().launches()

    assert (launch.ending, launch.decided) == (Ending.HANG, "relaunch in the allocation")
    assert launch.why.startswith("no progress since step 20: rank 1 is in load")


def test_a_loss_that_went_wrong_is_not_one_that_somebody_stopped() -> None:
    told = wrong_loss()
    assert told.state.phase.value == "stopping"
    told.tell(on.LaunchEnded(at=START + 40, launch=0, code=-9))
    said = {"cause": Cause.NUMERICAL, "rule": "loss-not-finite", "confidence": 0.9, "step": 21}
    told.tell(on.CheckpointChosen(at=START + 41, directory="/r/checkpoints/step_00000010", step=10))
    told.tell(on.Judged(at=START + 42, launch=0, **said))

    (launch,) = told.see().launches()

    assert launch.ending is Ending.LOSS
    assert "no finite number since step 21" in launch.why
    assert launch.decided.startswith("go back to a step before ") or launch.decided == "relaunch in the allocation"


def test_of_a_journal_that_does_not_say_what_the_rules_saw_the_verdict_does() -> None:
    """Written by 0.1, before the rules' finding stood in the order to judge."""
    told = stood_still()
    told.tell(on.Judged(at=START + 99, launch=0, cause=Cause.HANG, rule="progress-silence", confidence=0.9))
    plain = [
        msgspec.structs.replace(
            record,
            effects=tuple(
                msgspec.structs.replace(each, found=None) if isinstance(each, do.JudgeLaunch) else each
                for each in record.effects
            ),
        )
        for record in told.records
        if not isinstance(record.event, on.RankExited)
    ]
    for record in plain:
        if isinstance(record.event, on.LaunchEnded):
            assert any(isinstance(each, do.JudgeLaunch) for each in record.effects)

    (launch,) = see(plain, told.rows).launches()

    assert launch.ending is Ending.HANG


def test_the_last_launch_of_a_run_that_failed_was_not_relaunched() -> None:
    """A checkpoint is chosen while it is judged; then the verdict ends the run."""
    told = Journal(policy=Policy(failures_max=1))
    told.begin(0)
    told.launch(0)
    told.steps(1, 20, at=0)
    told.rank_dies(20.5)
    assert next(told.see().launches()).decided == "relaunch in the allocation"
    told.tell(on.CheckpointChosen(at=START + 21, directory=None, step=None))
    told.tell(on.BusEnded(at=START + 22, bus=1, code=0))
    assert told.state.phase.value == "done"

    (launch,) = told.see().launches()

    assert (launch.ending, launch.decided) == (Ending.FAILURE, "the run ends with exit code 20")


def test_a_slow_node_that_a_spare_replaces_is_no_stop_that_somebody_asked_for() -> None:
    told = Journal(nodes=("n1", "n2", "n3"), policy=Policy(slow_node="replace"))
    told.begin(0, nodes_wanted=2)
    told.launch(0)
    told.steps(1, 10, at=0)
    slow = Stragglers(suspects=(Suspect(node="n2", since=START, reported=True),))
    told.state = msgspec.structs.replace(told.state, stragglers=slow)
    told.commit(10, at=10, seconds=0)
    assert told.state.phase.value in ("saving", "stopping"), told.records[-1].why
    told.tell(on.TrainingStopped(at=START + 12, launch=0, step=10))
    told.tell(on.LaunchEnded(at=START + 13, launch=0, code=75, stopped=True))

    (launch,) = told.see().launches()

    assert (launch.ending, launch.why) == (
        Ending.RESTARTED,
        "step 10 is committed; a spare takes the place of n2",
    )

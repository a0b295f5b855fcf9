"""Software that fails in its own ways: what Stepkeeper takes each for, and what follows."""

import math
import re
import shutil
from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.exits import ExitCode
from stepkeeper_trainer.formats import lineage
from tests.lab import Lab
from tests.training import SMALL, Training, assert_complete, assert_replays

pytestmark = pytest.mark.slurm
SCRIPT = Path(__file__).with_name("failing.py")
ALWAYS = 99


def failing(
    lab: Lab,
    how: str,
    *,
    step: int = 15,
    launches: int = 1,
    rank: int = 1,
    launcher: tuple[str, ...] = (),
    **fields,
) -> Training:
    """Submit a training that fails in its first launches; `launcher` stands in place of Python, as torchrun does."""
    training = Training(lab, **{"name": f"{how}-{launches}", **fields})
    script = training.work / "failing.py"
    shutil.copyfile(SCRIPT, script)
    script.chmod(0o644)
    training.command = (
        *(launcher or (str(training.python),)), str(script), how, str(step), str(launches), str(rank),
        f"--steps={training.steps}", "--seed=7", f"--checkpoint-every-steps={training.every}",
        f"--step-seconds-min={training.step_seconds}", *SMALL,
    )  # fmt: skip
    return training.submit()


def causes(training: Training) -> list[Cause]:
    return [record.event.cause for record in training.events(on.Judged)]


@pytest.mark.campaign
def test_memory_that_ran_out_once_costs_one_relaunch(lab: Lab, reference: Training) -> None:
    training = failing(lab, "out-of-memory", step_seconds=0.05)
    training.wait_end()

    (said,) = [record.event for record in training.events(on.Judged)]
    assert (said.cause, said.rank) == (Cause.GPU_MEMORY, 1), training.story()
    assert "failing.py" in said.location
    assert said.step in (14, 15)
    assert len(training.launches()) == 2
    assert_complete(training, reference)


def test_the_same_exception_again_ends_the_run_and_calls_a_person(lab: Lab) -> None:
    """Two launches, a code of its own, the reason everywhere, and one command: no third try of a bug."""
    told = lab.workdir("games") / "told"
    command = f'echo "$STEPKEEPER_EXIT_CODE $STEPKEEPER_CAUSE $STEPKEEPER_REASON" > {told}; echo sent'
    training = failing(lab, "exception", launches=ALWAYS, step_seconds=0.05, run_args=("--notify-command", command))
    training.wait_end()

    assert causes(training) == [Cause.EXCEPTION] * 2, training.story()
    assert training.exits() == [ExitCode.CAUSE_STAYS]
    assert len(training.launches()) == 2
    assert lab.job(training.job_id).exit_code == f"{int(ExitCode.CAUSE_STAYS)}:0"
    assert "ValueError at" in training.output()
    assert "notified" in training.output()
    shown = lab.run(training.stepkeeper, "logs", str(training.run_dir), "--failed", user=training.user)
    assert shown.stdout.splitlines()[-1].endswith("ValueError: a label lies beyond the vocabulary"), shown
    assert re.match(r"attempt 0, launch 1: rank 1 on \S+ failed first \(exception: ValueError at ", shown.stderr), shown
    assert told.read_text().startswith(f"{int(ExitCode.CAUSE_STAYS)} exception ")
    comment = lab.run("scontrol", "-o", "show", "job", str(training.job_id)).stdout
    assert f"Comment=stepkeeper:{int(ExitCode.CAUSE_STAYS)}:CAUSE_STAYS:exception" in comment


@pytest.mark.campaign
def test_a_wrong_argument_is_not_tried_again(lab: Lab) -> None:
    training = Training(lab, name="wrong-argument", script_args=("--stepz=3",)).submit()
    training.wait_end()

    assert causes(training) == [Cause.CONFIGURATION], training.story()
    assert len(training.launches()) == 1
    assert training.exits() == [ExitCode.CAUSE_STAYS]


@pytest.mark.campaign
def test_a_crash_in_native_code_is_tried_again(lab: Lab, reference: Training) -> None:
    training = failing(lab, "segfault", step_seconds=0.05)
    training.wait_end()

    assert causes(training) == [Cause.SEGFAULT], training.story()
    assert_complete(training, reference)
    (replayed,) = training.events(on.Replayed)  # steps 11 to 14 at most: the same bits as the first time
    assert (replayed.event.worst, replayed.event.deterministic) == (None, True)


@pytest.mark.campaign
def test_a_crash_at_the_same_step_twice_goes_one_checkpoint_back_and_then_ends(lab: Lab) -> None:
    # step 20 is durable before the crash: it waits for that
    training = failing(lab, "segfault", step=28, launches=ALWAYS, step_seconds=0.2)
    training.wait_end()

    assert causes(training) == [Cause.SEGFAULT] * 3, training.story()
    (order,) = [effect for record in training.records() for effect in record.effects if isinstance(effect, do.RollBack)]
    assert order.below_step == 20
    chosen = [record.event.step for record in training.events(on.CheckpointChosen)]
    assert 10 in chosen
    written = (training.run_dir / "checkpoints" / lineage.LINEAGE_NAME).read_text()
    assert written.count('"rollback"') == 1
    assert training.exits() == [ExitCode.CAUSE_STAYS]


@pytest.mark.campaign
def test_a_loss_that_is_no_number_again_ends_the_run(lab: Lab) -> None:
    training = failing(lab, "nan", launches=ALWAYS, step_seconds=0.05)
    training.wait_end()

    assert causes(training) == [Cause.NUMERICAL] * 2, training.story()
    assert training.exits() == [ExitCode.CAUSE_STAYS]


@pytest.mark.campaign
def test_a_loss_that_nobody_checks_is_seen_and_led_back_from(lab: Lab, reference: Training) -> None:
    """The script trains on with NaN, and saves that too: those steps count no more, and are marked."""
    # five words, one a second at most: the save of step 20 is whole by then, and is marked
    training = failing(lab, "silent-nan", step=18, rank=0, step_seconds=0.4)
    training.wait_end()

    (said,) = [record.event for record in training.events(on.Judged)]
    assert (said.cause, said.rule, said.step) == (Cause.NUMERICAL, "loss-not-finite", 18), training.story()
    assert [record.event.step for record in training.events(on.RolledBack)] == [10], training.story()
    told = lineage.read(training.run_dir / "checkpoints")
    assert told is not None
    assert any(lineage.SUSPECT in marks for marks in told.marks.values())
    assert_complete(training, reference)


COLLECTIVE = {
    "hang": r"rank 0 waits in \w+ #\d+ of the default group, rank 1 has not entered it \(the newest it entered is \w+",
    "stopped": r"rank 0 waits in \w+ #\d+ of the default group, rank 1 does not answer",
}


@pytest.mark.campaign
def test_a_rank_that_computes_wrongly_has_its_node_left_and_a_confirmed_step_is_resumed(
    lab: Lab, reference: Training
) -> None:
    """One wrong bit of one product, in the second of two computations: nothing else shows it."""
    run_args = ("--spares=1", "--confirm-every=10")
    training = failing(lab, "corrupt", step=20, nodes=3, step_seconds=0.2, run_args=run_args)
    training.wait_end()

    (said,) = [record.event for record in training.events(on.Corrupted)]
    assert (said.rank, said.step, said.confirmed) == (1, 20, 10), training.story()
    assert [record.event.step for record in training.events(on.RolledBack)] == [10], training.story()
    first, second = training.launches()
    assert said.node == first[1]
    assert said.node not in second, training.story()
    told = lineage.read(training.run_dir / "checkpoints")
    assert told is not None
    suspect = {told.commits[save_id].step for save_id, marks in told.marks.items() if lineage.SUSPECT in marks}
    assert suspect == {20}
    assert "CorruptionError" not in training.output(), "an error of ours has no traceback"
    assert_complete(training, reference)
    assert_replays(training)


IMPATIENT = ("--set", "policy.hang_least_s=8", "--set", "policy.hang_most_s=40")


@pytest.mark.campaign
def test_data_that_makes_the_loss_nan_is_left_out_and_a_launch_that_says_nothing_is_ended(
    lab: Lab, reference: Training
) -> None:
    """The poison is in the data, so that going back alone would meet it again; a relaunch stops before its imports."""
    patience = ("--set", "policy.hang_least_s=8", "--set", "policy.hang_most_s=20")
    skip = ("--set", "policy.skip_data_steps=1")
    training = failing(lab, "poison", step=18, step_seconds=0.3, run_args=(*patience, *skip))
    training.wait_end()

    assert causes(training) == [Cause.NUMERICAL, Cause.HANG], training.story()
    nan, silent = (record.event for record in training.events(on.Judged))
    assert (nan.rule, nan.step) == ("loss-not-finite", 18)
    assert (silent.rule, silent.launch, silent.rank) == ("progress-silence", 1, 1)
    seen = [record.event for record in training.events(on.StacksCollected) if record.event.launch == 1]
    assert "rank 1 was stopped by a signal" in seen[-1].summary, training.story()
    # five words are later than the save of step 20, which is found first and rolled back from
    assert [record.event.step for record in training.events(on.CheckpointChosen)][-2:] == [10, 10], training.story()
    starts = [
        effect for record in training.records() for effect in record.effects if isinstance(effect, do.StartLaunch)
    ]
    assert [[(each.step, each.steps) for each in start.skipped_data] for start in starts] == [[], [(18, 1)], [(18, 1)]]
    logs = "".join(path.read_text() for path in training.run_dir.glob("logs/attempt-000/launch-002/*.log"))
    assert "data_skipped step=18 steps=1 samples=8" in logs
    told = lineage.read(training.run_dir / "checkpoints")
    assert told is not None and told.left_out == (lineage.LeftOut(step=18, steps=1),)  # noqa: PT018 - one fact
    losses, expected = training.losses(), reference.losses()
    assert losses.keys() == expected.keys(), training.story()
    assert {step: losses[step] for step in range(1, 18)} == {step: expected[step] for step in range(1, 18)}
    assert all(math.isfinite(float(loss)) for loss in losses.values())
    assert losses[18] != expected[18], "the data of another step"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("how", "doing"), [("hang", "is in waiting_for_data (failing.py:"), ("stopped", "was stopped by a signal")]
)
def test_a_rank_that_stands_still_is_found_named_and_ended(lab: Lab, reference: Training, how: str, doing: str) -> None:
    """By the run's own pace, seconds after it fell silent: no collective's timeout of half an hour is waited for."""
    training = failing(lab, how, step=25, step_seconds=0.5, run_args=IMPATIENT)
    training.wait_end()

    *_, seen = [record.event for record in training.events(on.StacksCollected)]  # looked at before: it moved still
    assert f"rank 1 {doing}" in seen.summary, training.story()
    assert "rank 0 waits in all_" in seen.summary, seen.summary
    assert re.search(COLLECTIVE[how], seen.summary), seen.summary
    assert seen.rank == 1
    (said,) = [record.event for record in training.events(on.Judged)]
    assert (said.cause, said.rank, said.rule) == (Cause.HANG, 1, "progress-silence")
    assert list(training.run_dir.glob("logs/attempt-000/launch-000/stacks/rank-*.txt"))
    assert_complete(training, reference)
    assert_replays(training)

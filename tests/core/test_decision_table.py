"""Which scenario tells what: each row of the decision table, each trap that Slurm sets, each cause and way to end."""

from __future__ import annotations

import re

import pytest

from stepkeeper.core.causes import Cause, Notice
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from tests.core.test_scenarios import SCENARIOS

TEXTS = {path.stem: path.read_text() for path in SCENARIOS}

# what it is : a scenario that tells it, the orders in it in their sequence, and behind a stroke what is never ordered
DECISIONS = {
    "finished: the end, in grace time too": (
        "finished_in_grace: RequestSave stop > Exit 0 / Requeue, StartLaunch",
        "finished_already: Exit 0 / StartBus, StartLaunch, Requeue",
        "finished_then_scancel_twice: KillRanks > Exit 0 / Requeue",
    ),
    "preempted: a save at the next step, a requeue of our own": (
        "preempted_with_grace: AskSlurm > RequestSave stop > VerifyCheckpoint > AskSlurm > Requeue > Exit 10",
        "preempted_without_grace: AskSlurm > RequestSave stop > VerifyCheckpoint > AskSlurm > Requeue > Exit 10",
        "preempted_user_signal: AskSlurm > RequestSave stop > VerifyCheckpoint > AskSlurm > Requeue > Exit 10",
    ),
    "a script without the trainer library: its own save, and SIGKILL only at the deadline": (
        "no_trainer_library_preempted: AskSlurm > RequestSave stop > Requeue > Exit 10 / KillRanks, JudgeLaunch",
        "no_trainer_library_saves_too_long: RequestSave stop > KillRanks > AskSlurm > Requeue / JudgeLaunch",
        "no_trainer_library_requeues_itself: RequestSave stop > Exit 10 / Requeue, KillRanks, JudgeLaunch",
        "own_srun_line_ends_of_slurms_signal: AskSlurm > Requeue / Exit 0",
    ),
    "the time limit is near: the same, ahead of it": (
        "limit_without_a_signal: StartLaunch > AskSlurm > RequestSave stop > VerifyCheckpoint",
        "time_limit_by_user_signal: AskSlurm > RequestSave stop > AskSlurm > Requeue > Exit 10",
    ),
    "a faulty node: a spare, a smaller world, else a requeue": (
        "node_fault_with_a_spare: KillRanks > ReleaseNodes > StartLaunch / Requeue",
        "node_fault_shrinks: KillRanks > ReleaseNodes > StartLaunch / Requeue",
        "node_fault_without_an_agent: KillRanks > AskSlurm > Requeue without b",
        "node_fault_drained_by_the_agent: KillRanks > AskSlurm > Requeue / Requeue without",
    ),
    "a lost node: the same": (
        "lost_node_with_a_spare: AskSlurm > KillRanks > StartLaunch / Requeue",
        "watcher_not_back: AskSlurm > KillRanks > AskSlurm > Requeue without b > Exit 10 / ReleaseNodes",
        "node_lost_says_slurm: JudgeLaunch > StartLaunch > Requeue / ReleaseNodes",
    ),
    "a node that fails its check: the same": (
        "one_node_is_not_fit: ReleaseNodes > StartLaunch",
        "scale_up_at_the_next_launch: StartLaunch > CheckNodes > StartLaunch / ReleaseNodes",
    ),
    "an exception, no GPU memory left: once more, then stop": (
        "exception_once_and_again: JudgeLaunch > StartLaunch > JudgeLaunch > NotifyUser > Exit 29 / Requeue",
        "gpu_memory_once_and_again: JudgeLaunch > StartLaunch > JudgeLaunch > NotifyUser > Exit 29 / Requeue",
    ),
    "what another start does not change: stop at once": (
        "configuration_stops_at_once: JudgeLaunch > NotifyUser > Exit 29 / StartLaunch, Requeue",
        "version_mismatch_stops_at_once: JudgeLaunch > NotifyUser > Exit 29 / StartLaunch, Requeue",
    ),
    "NaN, a spike, a discontinuity: back, twice: stop": (
        "nan_goes_back_before_it: JudgeLaunch > RollBack > StartLaunch > JudgeLaunch > NotifyUser > Exit 29",
        "nan_right_behind_a_checkpoint: JudgeLaunch > JudgeLaunch > RollBack > StartLaunch > JudgeLaunch > Exit 29",
        "loss_is_no_number: KillRanks > JudgeLaunch",
        "loss_jumps_and_training_goes_back: KillRanks > JudgeLaunch > RollBack > StartLaunch",
        "loss_goes_wrong_and_data_is_skipped: RollBack > StartLaunch leaves out",
    ),
    "a jump of the loss is told, and ends nothing, by default": (
        "loss_jumps_and_is_reported: / KillRanks",
        "loss_jumps_after_a_resume: KillRanks > StartLaunch / RollBack",
    ),
    "a hang: stacks, kill, relaunch; again on the same node: without it": (
        "hang_is_ended: CollectStacks > KillRanks > JudgeLaunch",
        "hang_again_leaves_the_node: KillRanks > CollectStacks > KillRanks > ReleaseNodes > StartLaunch",
        "hang_is_only_slow: CollectStacks / KillRanks",
        "hang_is_certain: CollectStacks > KillRanks > JudgeLaunch",
    ),
    "storage is full: wait with growing pauses": (
        "storage_full_at_the_start: TestStorage > StartLaunch / NotifyUser",
        "storage_full_waits: JudgeLaunch > StartLaunch > JudgeLaunch / NotifyUser, Requeue",
    ),
    "storage lies, or stays unwritable: stop": (
        "storage_lies: TestStorage > NotifyUser > Exit 23 / StartLaunch",
        "storage_stays_read_only: TestStorage > TestStorage > NotifyUser > Exit 23 / StartLaunch",
    ),
    "cancelled: stop, and no requeue": (
        "scancel_in_training: AskSlurm > KillRanks > Exit 11 / Requeue, NotifyUser",
        "scancel_during_save: RequestSave stop > KillRanks > Exit 11 / Requeue",
        "scancel_during_requeue: AskSlurm > AskSlurm > Exit 11 / Requeue",
        "scancel_while_starting: Exit 11 / Requeue, StartLaunch",
    ),
    "most nodes at once: not theirs": ("most_nodes_are_not_fit: StartLaunch / ReleaseNodes, Requeue",),
    "no progress: three launches, then stop": ("three_failures: StartLaunch > StartLaunch > NotifyUser > Exit 20",),
    "the same step twice: one checkpoint back, then stop": (
        "same_step_twice_steps_back: StartLaunch > RollBack > StartLaunch > NotifyUser > Exit 29",
    ),
    "unknown progress is not none": ("script_that_ran_long: StartLaunch > JudgeLaunch / NotifyUser",),
    "what Slurm ended is in no budget": (
        "launch_ends_while_slurm_is_silent: JudgeLaunch > AskSlurm",
        "preempted_says_the_log: JudgeLaunch > StartLaunch / NotifyUser",
    ),
    "a person asks for a save, or for the end": (
        "asked_to_save: AnswerRequest > RequestSave / KillRanks",
        "asked_to_stop: AnswerRequest > RequestSave stop > Exit 27 / Requeue, NotifyUser",
    ),
    "one choice at a notice: a new save": (
        "notice_in_a_save_that_makes_way: RequestSave stop > VerifyCheckpoint / KillRanks",
        "notice_in_a_save_then_a_new_one: RequestSave stop > VerifyCheckpoint / KillRanks",
    ),
    "one choice at a notice: the save in flight": (
        "notice_in_a_save_that_is_finished: RequestSave stop > Requeue > Exit 10 / KillRanks",
        "notice_without_time_for_any_save_but_one_in_flight: RequestSave stop / KillRanks",
    ),
    "one choice at a notice: the nodes' disks": (
        "notice_and_the_local_tier_has_it: RequestSave stop > Requeue > Exit 10 / KillRanks, VerifyCheckpoint",
    ),
    "one choice at a notice: nothing": (
        "notice_without_time_for_any_save: AskSlurm > KillRanks > Requeue > Exit 10 / RequestSave",
    ),
    "a notice in a start: leave at once": (
        "notice_while_starting: AskSlurm > AskSlurm > Requeue > Exit 10 / StartLaunch",
        "notice_while_the_checkpoint_is_read: AskSlurm > AskSlurm > Requeue > Exit 10 / StartLaunch",
        "second_notice_at_the_start: AskSlurm > Requeue / StartLaunch",
    ),
    "a notice while the ranks load: what they load is the newest": (
        "second_notice_while_loading: KillRanks > Requeue > Exit 10 / RequestSave",
    ),
    "a notice in an evaluation, and a shorter one": (
        "notice_in_an_evaluation: RequestSave stop > RequestSave stop > Requeue > Exit 10",
        "second_shorter_notice: RequestSave stop > RequestSave stop",
    ),
    "a notice in the verification, the requeue, at the end": (
        "second_notice_in_the_verification: VerifyCheckpoint > AskSlurm > AskSlurm > Requeue > Exit 10",
        "notice_while_requeueing: AskSlurm > AskSlurm",
        "notice_while_closing: RequestSave stop",
        "notice_while_stopping: KillRanks > AskSlurm",
    ),
}
SLURM = {
    "only the steps are told of a preemption with grace": (
        "preempted_with_grace: AskSlurm > RequestSave stop > Requeue",
        "stragglers_of_a_preemption: AskSlurm > RequestSave stop",
    ),
    "or only the batch process": ("preempted_user_signal: AskSlurm > RequestSave stop > Requeue",),
    "a rank without a handler dies of it": (
        "ranks_die_of_the_preemption: AskSlurm > Requeue > Exit 10 / StartLaunch, JudgeLaunch",
        "no_trainer_library_preempted: AskSlurm > RequestSave stop > AskSlurm / KillRanks, JudgeLaunch",
        "no_trainer_library_preempted_before_it_began: AskSlurm > KillRanks > AskSlurm / RequestSave",
    ),
    "cancel and the end of a preemption look alike": (
        "scancel_in_training: AskSlurm > Exit 11 / Requeue",
        "preempted_without_grace: AskSlurm > Requeue > Exit 10",
    ),
    "so do the time limit": ("time_limit_by_term: AskSlurm > RequestSave stop > Requeue > Exit 10",),
    "and a requeue by others, held or not": (
        "admin_requeue: AskSlurm > RequestSave stop > Exit 10 / Requeue",
        "requeued_and_held_by_an_admin: AskSlurm > RequestSave stop > Exit 10 / Requeue",
    ),
    "and a lost node without --no-kill": ("node_fail_ends_the_job: AskSlurm > Exit 10 / Requeue",),
    "and a signal that ends nothing": (
        "scancel_term_only: AskSlurm > RequestSave",
        "task_term_not_for_us: AskSlurm / RequestSave, KillRanks",
    ),
    "a requeue would revive a cancelled job": (
        "scancel_during_requeue: AskSlurm > AskSlurm > Exit 11 / Requeue",
        "scancel_between_requeue_tries: AskSlurm > AskSlurm > Exit 11",
    ),
    "Slurm cannot be asked: save, no requeue on a guess": (
        "slurm_unreachable: RequestSave stop > AskSlurm > AskSlurm > AskSlurm > Requeue > Exit 10",
        "slurm_stays_unreachable: RequestSave stop > AskSlurm > AskSlurm > NotifyUser > Exit 25 / Requeue",
    ),
    "exit 0 in grace time is COMPLETED": (
        "finished_in_grace: Exit 0 / Requeue",
        "preempted_with_grace: Requeue > Exit 10 / Exit 0",
    ),
    "Slurm starts what is finished": ("finished_already: Exit 0 / StartBus",),
    "a lingering Slurm step holds the nodes": (
        "preempted_with_grace: Requeue > StopBus > Exit 10",
        "ranks_that_do_not_die_in_time_for_slurm: KillRanks > AskSlurm > Requeue",
    ),
    "a site requeues nothing": (
        "requeue_forbidden: AskSlurm > Requeue anew > Exit 10",
        "requeue_forbidden_by_the_site: Requeue > AskSlurm > Requeue anew > Exit 10",
    ),
    "an exclusion that never ends leaves nothing to run on": (
        "known_bad_node_and_no_other: StartBus / ReleaseNodes",
        "exclusion_is_over: Requeue without c",
    ),
    "a node that is given back stays, and one that was excluded comes again": (
        "node_that_slurm_does_not_take_back: ReleaseNodes > ReleaseNodes",
        "known_bad_node_given_again: StartLaunch / KillRanks",
    ),
    "two attempts at once": (
        "superseded_in_training: KillRanks > Exit 12 / Requeue, RequestSave",
        "superseded_while_requeueing: Exit 12 / Requeue",
        "attempt_started_twice: StartBus / StartLaunch, Exit",
    ),
    "our own requeue sends us SIGTERM": ("preempted_with_grace: AskSlurm > AskSlurm > Requeue > StopBus > Exit 10",),
    "a lost node: silence first, Slurm minutes later": (
        "lost_node_missed_by_slurm: StartLaunch > KillRanks > StartLaunch",
        "lost_node_with_a_spare: AskSlurm > KillRanks > StartLaunch",
    ),
    "an order dies with the watchers": (
        "watcher_lost_in_saving: RequestSave stop > StartBus > RequestSave stop",
        "watcher_lost_while_killing: KillRanks > StartBus > KillRanks",
    ),
    "srun hangs, or fails at once": (
        "launch_never_begins: StartLaunch > KillRanks > StartLaunch",
        "launch_cannot_begin_without_slurm: StartLaunch > AskSlurm > AskSlurm > StartLaunch / JudgeLaunch",
        "launch_refused: NotifyUser > Exit 22",
    ),
    "srun's status is the largest, not the first": (
        "exit_93_after_another_failure: NotifyUser > Exit 21 / Requeue",
        "launch_end_overtakes_the_words: JudgeLaunch",
    ),
    "a killed Slurm step may leave processes": (
        "nodes_do_not_clear: AskUncleared > AskSlurm > Requeue",
        "one_node_does_not_clear: AskUncleared > ReleaseNodes > StartLaunch / Requeue",
    ),
    "an extended limit": (
        "limit_was_extended: AskSlurm > AskSlurm > RequestSave stop",
        "limit_was_lifted: AskSlurm / RequestSave, KillRanks",
    ),
    "an allocation without a batch script": (
        "salloc_preempted: RequestSave stop > NotifyUser > Exit 13 / Requeue",
        "salloc_interrupted_by_hand: RequestSave stop > Exit 27 / Requeue, NotifyUser",
    ),
    "suspended": (
        "suspended_in_training: CollectStacks / KillRanks",
        "suspended_while_slurm_is_asked: AskSlurm > AskSlurm",
    ),
    "the controller is away, or stands still, in the requeue": (
        "slurm_call_hangs: AskSlurm > AskSlurm",
        "requeue_answered_too_late: Requeue > AskSlurm",
    ),
}


def orders(text: str) -> list[str]:
    """Return what is ordered in a scenario, in short words."""
    return [_short(kind, fields) for kind, fields in re.findall(r"^>   -> (\w+)(.*)$", text, re.MULTILINE)]


def _short(kind: str, fields: str) -> str:
    said = dict(re.findall(r"(\w+)=('[^']*'|\"[^\"]*\"|\S+)", fields))
    match kind:
        case "Exit":
            return f"Exit {said['code']}"
        case "RequestSave" if said.get("stop") == "yes":
            return "RequestSave stop"
        case "Requeue" if said.get("resubmit") == "yes":
            return "Requeue anew"
        case "Requeue" if "exclude" in said:
            return f"Requeue without {', '.join(re.findall(r'[a-z]+', said['exclude']))}"
        case "StartLaunch" if "skipped_data" in said:
            return "StartLaunch leaves out"
        case _:
            return kind


@pytest.mark.parametrize(("what", "stories"), [*DECISIONS.items(), *SLURM.items()], ids=lambda each: str(each)[:40])
def test_each_row_is_told(what: str, stories: tuple[str, ...]) -> None:
    for story in stories:
        name, _, said = story.partition(":")
        wanted, _, never = (part.strip() for part in said.partition("/"))
        assert name in TEXTS, f"{what}: nobody tells it any more"
        ordered = orders(TEXTS[name])
        rest = iter(ordered)
        for order in (each.strip() for each in wanted.split(">") if each.strip()):
            assert any(each == order or each.startswith(f"{order} ") for each in rest), f"{what}: {name}: no {order}"
        for order in (each.strip() for each in never.split(",") if each.strip()):
            assert not any(each.startswith(order) for each in ordered), f"{what}: {name}: {order}"


def test_each_cause_that_has_a_row_of_its_own_is_judged_in_one() -> None:
    rows = {cause for cause in Cause if hasattr(Policy(), f"on_{cause.value}")}
    told = {Cause(word) for text in TEXTS.values() for word in re.findall(r"Judged cause=(\w+)", text)}

    assert rows - told - {Cause.UNKNOWN} == set()


def test_each_thing_that_slurm_can_mean_is_told() -> None:
    everything = "".join(TEXTS.values())

    said = {Notice(word) for word in re.findall(r"slurm_said notice=(\w+)", everything)}
    assert set(Notice) - said == {Notice.UNKNOWN}
    assert "slurm_unreachable" in everything


def test_each_way_that_the_rules_can_end_is_told() -> None:
    elsewhere = {  # of commands, before or beside the rules
        ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.NO_SLURM, ExitCode.NOT_BATCH_PROCESS, ExitCode.RUN_DIRECTORY,
        ExitCode.RUN_BUSY, ExitCode.CODE_CHANGED, ExitCode.NOTHING_FOUND, ExitCode.NOT_VERIFIED, ExitCode.SITE_UNFIT,
    }  # fmt: skip
    told = {ExitCode(int(word)) for text in TEXTS.values() for word in re.findall(r"-> Exit code=(\d+)", text)}

    assert set(ExitCode) - elsewhere == told

"""Which scenario tells what: each row of the decision table, each trap that Slurm sets, each cause and way to end."""

from __future__ import annotations

import re

import pytest

from stepkeeper.core.causes import Cause
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.judge import Notice
from stepkeeper.core.policy import Policy
from tests.core.test_scenarios import SCENARIOS

TEXTS = {path.stem: path.read_text() for path in SCENARIOS}

DECISIONS = {
    "finished: the end, in grace time too": ("finished_in_grace", "finished_already", "finished_then_scancel_twice"),
    "preempted: a save at the next step, a requeue of our own": (
        "preempted_with_grace",
        "preempted_without_grace",
        "preempted_user_signal",
    ),
    "the time limit is near: the same, ahead of it": ("limit_without_a_signal", "time_limit_by_user_signal"),
    "a faulty node: a spare, a smaller world, else a requeue": (
        "node_fault_with_a_spare",
        "node_fault_shrinks",
        "node_fault_without_an_agent",
    ),
    "a lost node: the same": ("lost_node_with_a_spare", "watcher_not_back", "node_lost_says_slurm"),
    "a node that fails its check: the same": ("one_node_is_not_fit", "growing_back_at_the_next_launch"),
    "an exception, no GPU memory left: once more, then stop": (
        "exception_once_and_again",
        "gpu_memory_once_and_again",
    ),
    "NaN, a spike, a discontinuity: back, twice: stop": (
        "nan_goes_back_before_it",
        "loss_jumps_and_training_goes_back",
        "loss_jumps_after_a_resume",
        "loss_goes_wrong_and_data_is_left_out",
    ),
    "a hang: stacks, kill, relaunch; again on the same node: without it": (
        "hang_is_ended",
        "hang_again_leaves_the_node",
    ),
    "storage is full: wait with growing pauses": ("storage_full_at_the_start", "storage_full_waits"),
    "cancelled: stop, and no requeue": ("scancel_in_training", "scancel_during_save", "scancel_during_requeue"),
    "most nodes at once: not theirs": ("most_nodes_are_not_fit", "both_nodes_have_bad_gpus"),
    "no progress: three launches, then stop": ("three_failures",),
    "the same step twice: one checkpoint back, then stop": ("same_step_twice_steps_back",),
    "unknown progress is not none": ("script_that_ran_long",),
    "one choice at a notice: a new save": ("notice_in_a_save_that_makes_way", "notice_in_a_save_then_a_new_one"),
    "one choice at a notice: the save in flight": (
        "notice_in_a_save_that_is_finished",
        "notice_without_time_for_any_save_but_one_in_flight",
    ),
    "one choice at a notice: the nodes' disks": ("notice_and_the_local_tier_has_it",),
    "one choice at a notice: nothing": ("notice_without_time_for_any_save",),
}
SLURM = {
    "only the steps are told of a preemption with grace": ("preempted_with_grace", "stragglers_of_a_preemption"),
    "or only the batch process": ("preempted_user_signal",),
    "a rank without a handler dies of it": ("ranks_die_of_the_preemption", "no_trainer_library_preempted"),
    "cancel and the end of a preemption look alike": ("scancel_in_training", "preempted_without_grace"),
    "so do the time limit": ("time_limit_by_term",),
    "and a requeue by others, held or not": ("admin_requeue", "requeued_and_held_by_an_admin"),
    "and a lost node without --no-kill": ("node_fail_ends_the_job",),
    "and a signal that ends nothing": ("scancel_term_only", "task_term_not_for_us"),
    "a requeue would revive a cancelled job": ("scancel_during_requeue", "scancel_between_requeue_tries"),
    "Slurm cannot be asked: save, no requeue on a guess": ("slurm_unreachable", "slurm_stays_unreachable"),
    "exit 0 in grace time is COMPLETED": ("finished_in_grace", "preempted_with_grace"),
    "Slurm starts what is finished": ("finished_already",),
    "a lingering Slurm step holds the nodes": ("preempted_with_grace", "ranks_that_do_not_die_in_time_for_slurm"),
    "a site requeues nothing": ("requeue_forbidden", "requeue_forbidden_by_the_site", "resubmit_never"),
    "an exclusion that never ends leaves nothing to run on": ("known_bad_node_and_no_other",),
    "two attempts at once": ("superseded_in_training", "superseded_while_requeueing"),
    "our own requeue sends us SIGTERM": ("preempted_with_grace",),
    "a lost node: silence first, Slurm minutes later": ("lost_node_missed_by_slurm", "lost_node_with_a_spare"),
    "an order dies with the watchers": ("watcher_lost_in_saving", "watcher_lost_while_killing"),
    "srun hangs, or fails at once": ("launch_never_begins", "launch_cannot_begin_without_slurm"),
    "srun's status is the largest, not the first": ("exit_93_after_another_failure", "launch_end_overtakes_the_words"),
    "a killed Slurm step may leave processes": ("nodes_do_not_clear", "one_node_does_not_clear"),
    "an extended limit": ("limit_was_extended", "limit_was_lifted"),
    "an allocation without a batch script": ("salloc_preempted", "salloc_interrupted_by_hand"),
    "suspended": ("suspended_in_training", "suspended_while_slurm_is_asked"),
}


@pytest.mark.parametrize(("what", "names"), [*DECISIONS.items(), *SLURM.items()], ids=lambda each: str(each)[:40])
def test_each_row_is_told(what: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in TEXTS]

    assert not missing, f"{what}: nobody tells it any more"


def test_each_cause_that_has_a_row_of_its_own_is_judged_in_one() -> None:
    rows = {cause for cause in Cause if hasattr(Policy(), f"on_{cause.value}")}
    told = {Cause(word) for text in TEXTS.values() for word in re.findall(r"Judged cause=(\w+)", text)}

    assert rows - told - {Cause.UNKNOWN} == set()


def test_each_thing_that_slurm_can_mean_is_told() -> None:
    everything = "".join(TEXTS.values())

    assert [notice for notice in Notice if f"# {notice.value} (" not in everything] == []


def test_each_way_that_the_rules_can_end_is_told() -> None:
    elsewhere = {  # of commands, before or beside the rules
        ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.NO_SLURM, ExitCode.NOT_BATCH_PROCESS, ExitCode.RUN_DIRECTORY,
        ExitCode.RUN_BUSY, ExitCode.CODE_CHANGED, ExitCode.NOTHING_FOUND, ExitCode.NOT_VERIFIED, ExitCode.SITE_UNFIT,
    }  # fmt: skip
    told = {ExitCode(int(word)) for text in TEXTS.values() for word in re.findall(r"-> Exit code=(\d+)", text)}

    assert set(ExitCode) - elsewhere == told

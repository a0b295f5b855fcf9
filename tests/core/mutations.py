"""Mistakes that somebody could make in the rules, each of which a scenario tells, and the promises must find.

Each changes one place of one function of the core, by one of the `operators`; what it breaks is said in words.
`test_mutations` looks that the scenario tells it, in each run of the tests; `mutating` plays the promises against it.
After a change of the core `mutating --mend` finds the places that have moved.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.core.operators import (
    Operator,
    always,
    becomes,
    bound,
    does_nothing,
    drop,
    extreme,
    first,
    invert,
    last,
    member,
    mirror,
    never,
    one_more,
    opposite,
    swap,
)


class Mutation(NamedTuple):
    """One mistake."""

    where: str  # module of core, and function
    operator: Operator
    at: str  # a name in the place that is changed
    breaks: str  # which promise
    told_by: str  # a scenario that ends otherwise with it
    found_by: str = "leaves"  # a word in the name of the property test that finds it soon
    nth: int = 0  # of several places with that name, from 1; 0: there is one


MUTATIONS = (
    # --- the requeue, and the end -------------------------------------------------------------------
    Mutation(
        "notices.on_slurm_answered",
        never,
        "again",
        "a signal after the question is asked about before the requeue",
        "question_from_before_the_requeue",
        "grows",
        nth=1,
    ),
    Mutation(
        "phases.can_save",
        always,
        "library_seen",
        "a script without the trainer library has the time that is left to save",
        "no_trainer_library_preempted",
        "told",
    ),
    Mutation(
        "training._ends_as_asked",
        invert,
        "SAVING",
        "a rank that ends of the stop signal does not end those that save",
        "no_trainer_library_preempted",
        "told",
    ),
    Mutation(
        "training._after_unasked_end",
        always,
        "wrapped",
        "ranks that end of Slurm's own signal are not taken for finished",
        "own_srun_line_ends_of_slurms_signal",
        "told",
        nth=1,
    ),
    Mutation(
        "training._slurm_may_have_ended_it",
        becomes("False"),
        "return",
        "a rank that dies of Slurm's own signal does not end those that save for it",
        "own_srun_line_rank_dies_of_slurms_signal",
        "told",
    ),
    Mutation(
        "phases.request_save",
        always,
        "wrapped",
        "ranks that have Slurm's own signal do not get it twice",
        "own_srun_line_rank_dies_of_slurms_signal",
        "told",
    ),
    Mutation(
        "notices._requeue_if_right",
        never,
        "CANCELLED",
        "what was cancelled meanwhile is not requeued",
        "scancel_during_requeue",
    ),
    Mutation(
        "notices._requeue_if_right",
        never,
        "REQUEUED",
        "what Slurm requeued is not requeued again",
        "requeue_timed_out_and_was_done",
    ),
    Mutation(
        "notices.on_requeue_answered",
        member("REQUEUE"),
        "END",
        "a requeue that was accepted is the end",
        "preempted_with_grace",
        "promises",
        nth=1,
    ),
    Mutation("eviction.judge_eviction", never, "restarts", "a restart that we did not order is seen", "admin_requeue"),
    Mutation(
        "eviction.judge_eviction",
        member("PREEMPTED"),
        "CANCELLED",
        "COMPLETING for no reason is a cancellation",
        "scancel_in_training",
    ),
    Mutation("phases.take", becomes("False"), "ends", "a plan to end stays one", "exit_93_and_a_notice", "promises"),
    Mutation(
        "phases.closed", never, "has_batch_script", "without a batch script nothing is requeued", "salloc_preempted"
    ),
    Mutation(
        "notices._ask_about",
        never,
        "requesting",
        "our own requeue's signal starts no second one",
        "notice_while_requeueing",
    ),
    Mutation(
        "training.on_launch_ended",
        never,
        "finished",
        "a finished training is finished, in grace time too",
        "finished_in_grace_says_only_the_file",
        "told",
    ),
    Mutation(
        "training.on_launch_ended",
        drop,
        "event.code",
        "the word that it is finished counts unless it is denied",
        "finished_without_outcome_file",
        nth=1,
    ),
    Mutation("training._on_rank_failed", member("RELAUNCH"), "END", "93 means: not again", "exit_93", "promises"),
    Mutation(
        "phases.finish",
        always,
        "needs_person",
        "a person is called only where one is needed",
        "preempted_with_grace",
        "promises",
    ),
    Mutation(
        "notices.retry_requeue",
        never,
        "requeue_tries_max",
        "a requeue is tried only so often",
        "slurm_stays_unreachable",
        "time",
    ),
    # --- time ---------------------------------------------------------------------------------------
    Mutation(
        "phases.closed",
        member("HANG"),
        "REQUEUE_END",
        "a requeue that Slurm never answers has an end",
        "requeue_that_is_never_answered",
        "time",
    ),
    Mutation(
        "notices.on_signal",
        first,
        "_earlier",
        "SIGTERM ends a requeue that nobody takes",
        "terminated_while_nobody_takes_the_requeue",
        "time",
    ),
    Mutation(
        "bus.restart_bus",
        always,
        "all_ready",
        "a watcher that is lost has its full time to come back",
        "watcher_lost_while_the_nodes_are_cleared",
        "time",
    ),
    Mutation(
        "deadlines._on_late",
        does_nothing,
        "STOPPING",
        "ranks are killed at the deadline of a save",
        "bus_restarts_run_out_in_saving",
    ),
    Mutation(
        "phases.kill",
        extreme,
        "hurry_within_s",
        "ranks that do not die do not use up Slurm's time",
        "ranks_that_do_not_die_in_time_for_slurm",
    ),
    Mutation(
        "training._leave_soon", extreme, "known", "ranks that leave put off no deadline", "end_of_grace_while_saving"
    ),
    Mutation(
        "silence.on_suspended",
        first,
        "min",
        "a suspension does not put off Slurm's limit",
        "suspended_while_leaving",
    ),
    Mutation(
        "eviction._with_margin", opposite, "save_margin_s", "a save ends before Slurm does", "preempted_with_grace"
    ),
    Mutation(
        "notices._save_until", never, "shorter", "ranks hear of a shorter notice", "second_shorter_notice", "told"
    ),
    Mutation(
        "baseline.least_save_s",
        always,
        "saves",
        "no save is given up for lack of knowledge",
        "notice_after_one_slow_save",
        "told",
    ),
    Mutation(
        "notices._save_if_it_can",
        drop,
        "saving",
        "a save in flight is not given up",
        "notice_without_time_for_any_save_but_one_in_flight",
    ),
    Mutation(
        "eviction.expecting",
        member("HANG"),
        "LIMIT",
        "the time limit is seen without a signal, in a start too",
        "limit_before_the_launch",
        "promises",
    ),
    Mutation("starting.on_attempt_started", drop, "timers", "a start has a deadline", "fresh_start", "promises"),
    Mutation("silence.on_silence", always, "looking", "silence alone ends nothing", "hang_is_ended", "promises", nth=3),
    Mutation(
        "silence.on_stacks", never, "moved", "ranks that move are left alone", "hang_is_only_slow", "promises", nth=3
    ),
    Mutation(
        "silence.on_stacks",
        always,
        "lasts",
        "a first look ends only what the next one would end",
        "sleep_in_even_steps",
        "promises",
    ),
    # --- launches -----------------------------------------------------------------------------------
    Mutation(
        "phases.all_ready", becomes("True"), "return", "a launch waits for every watcher", "fresh_start", "promises"
    ),
    Mutation(
        "gates.closed_gates",
        drop,
        "STORAGE_RETRY",
        "no launch starts on storage that failed its test",
        "storage_full_at_the_start",
        "failure",
    ),
    Mutation(
        "starting.on_nodes_cleared",
        drop,
        "clearing",
        "a launch waits until the nodes were asked",
        "watcher_lost_while_the_nodes_get_clear",
        "failure",
        nth=1,
    ),
    Mutation(
        "deadlines._on_ranks_late",
        never,
        "killed",
        "ranks that do not leave are killed",
        "finished_ranks_linger",
        "promises",
    ),
    Mutation(
        "starting._say_again",
        never,
        "killed",
        "an order that died with the watchers is said again",
        "watcher_lost_while_killing",
        "nodes_that_fail",
    ),
    Mutation(
        "recovery._roll_back", one_more, "step", "a rollback goes back", "same_step_twice_steps_back", "again", nth=3
    ),
    Mutation(
        "phases.leave_out",
        becomes("()"),
        "skipped_data",
        "a rollback says to the lineage which data is left out",
        "skipped_data_stays_so_in_the_next_attempt",
        "again",
    ),
    Mutation(
        "starting.on_attempt_started",
        becomes("()"),
        "skipped_data",
        "the next attempt leaves out the same data",
        "skipped_data_stays_so_in_the_next_attempt",
        "again",
    ),
    Mutation(
        "recovery._roll_back",
        never,
        "wrong_at",
        "what a tier has of a loss gone wrong does not return",
        "nan_after_the_newest_step",
        "again",
        nth=1,
    ),
    Mutation(
        "phases._leave_out_what_is_wrong",
        always,
        "went_back",
        "what silent corruption made is left out before the job leaves",
        "a_rank_computes_wrongly_and_the_job_leaves_before_the_choice",
        "grows",
    ),
    Mutation(
        "phases.closed",
        drop,
        "leads_back",
        "the job leaves when the lineage leads back",
        "a_rank_computes_wrongly_and_the_job_leaves_before_the_choice",
        "grows",
    ),
    Mutation(
        "starting._led_back",
        always,
        "went_back",
        "silent corruption before any checkpoint is in the lineage too",
        "a_rank_computes_wrongly_before_any_checkpoint",
        "grows",
    ),
    # --- budgets ------------------------------------------------------------------------------------
    Mutation(
        "recovery.settle",
        bound,
        "failures_max",
        "three launches without a new step end the run",
        "three_failures",
        "failure",
        nth=1,
    ),
    Mutation(
        "gates.relaunch",
        first,
        "counts",
        "each failure counts, also before the first word",
        "launch_never_begins",
        "failure",
    ),
    Mutation(
        "starting.on_checkpoint_chosen",
        always,
        "progressed",
        "only verified progress fills a budget again",
        "storage_suspect_and_the_run_ends_anyway",
        "failure",
    ),
    Mutation(
        "recovery.settle",
        drop,
        "row",
        "a full file system is waited for only so often",
        "preempted_says_the_log",
        "again",
    ),
    Mutation(
        "recovery.settle",
        becomes("1"),
        "count",
        "a failure in the same way goes on along its row",
        "storage_full_waits",
        "again",
        nth=2,
    ),
    Mutation(
        "recovery.settle",
        never,
        "back",
        "the same step is stepped back from once",
        "same_step_twice_steps_back",
        "again",
    ),
    Mutation(
        "recovery.settle",
        becomes("False"),
        "again",
        "the same step twice steps back",
        "same_step_twice_steps_back",
        "again",
    ),
    Mutation(
        "recovery.past",
        becomes("()"),
        "return",
        "a failure is remembered until it is passed",
        "exception_short_of_the_place",
        "failure",
    ),
    Mutation(
        "recovery.settle",
        never,
        "unseen",
        "the same failure is bounded where launches may have progressed unseen",
        "script_that_fails_the_same_way",
        "same_failure",
        nth=1,
    ),
    Mutation("gates.relaunch", never, "unseen", "unknown progress is not none", "script_that_ran_long", "failure"),
    Mutation(
        "bus.restart_bus",
        never,
        "bus_restarts_max",
        "restarts of the bus are bounded",
        "bus_restarts_run_out",
        "nodes_that_fail",
    ),
    Mutation(
        "notices._leave",
        first,
        "uncount_failure",
        "a preemption is in no budget of the training",
        "preempted_while_judging",
        "told",
    ),
    # --- nodes --------------------------------------------------------------------------------------
    Mutation(
        "faults.on_node_faulted",
        becomes("True"),
        "exclude",
        "a drained node is not excluded",
        "node_fault_drained_at_once",
        "nodes_that_fail",
    ),
    Mutation(
        "faults.without_lost",
        drop,
        "nodes",
        "where Slurm refuses every step, no node is lost",
        "bus_fails_to_start",
        "nodes_that_fail",
    ),
    Mutation(
        "faults._leave",
        never,
        "node_losses_max",
        "lost nodes are bounded, in a start too",
        "nodes_lost_again_and_again",
        "nodes_that_fail",
    ),
    Mutation(
        "faults.on_unfit", last, "found", "what most nodes share is not theirs", "most_nodes_are_not_fit", "failure"
    ),
    Mutation(
        "placement._fewer",
        never,
        "min",
        "a launch shrinks only as far as it may",
        "node_fault_without_an_agent",
        "nodes_that_fail",
    ),
    Mutation(
        "phases.kept",
        always,
        "batch_node",
        "the supervisor's own node is kept",
        "node_fault_on_the_batch_node_and_on_another",
        "nodes_that_fail",
    ),
    Mutation(
        "scale_up.take_back",
        drop,
        "back",
        "only a node that rested comes back",
        "scale_up_without_the_faulty_node",
        "grows",
        nth=1,
    ),
    Mutation(
        "faults.uncount_failure",
        opposite,
        "failures",
        "a fault of a node is in no budget of the training",
        "node_fault_takes_back_a_try",
        "nodes_that_fail",
    ),
    Mutation(
        "placement._fewer",
        last,
        "largest",
        "a smaller launch has a number of nodes that divides its batch",
        "no_number_of_nodes_divides",
        "nodes_that_fail",
    ),
    Mutation(
        "starting._without_known_bad",
        mirror,
        "until",
        "a node with a fault is not used when Slurm gives it again",
        "known_bad_node_given_again",
        "nodes_that_fail",
    ),
    Mutation(
        "faults.without_lost",
        swap,
        "new",
        "lost nodes make room for faulty ones",
        "lost_node_makes_room_for_a_faulty_one",
        "nodes_that_fail",
    ),
)

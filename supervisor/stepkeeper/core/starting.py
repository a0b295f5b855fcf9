"""From the start of an attempt (or a relaunch) to running ranks, and the bus beside them.  Pure.

A launch starts only when every watcher answers, the checkpoint is chosen and verified, and every node has
confirmed that nothing of an earlier launch is left.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.phases import Decision, all_ready, ask_unprompted, closed, finish, request_save, stop
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import NO_SIGNAL, Doubt, Next, Phase, Plan, State

replace = msgspec.structs.replace


def on_attempt_started(state: State, event: on.AttemptStarted, policy: Policy) -> Decision:
    """Start the watchers and look for the checkpoint, unless the work is done already."""
    if state.bus:
        return Decision(state)  # an attempt starts once
    state = replace(
        state,  # a signal may have come before us: what was asked about it stays asked
        job_id=event.job_id,
        restart_count=event.restart_count,
        attempt=event.attempt,
        nodes=event.nodes,
        batch_node=event.batch_node,
        kill_wait_s=event.kill_wait_s,
        wrapped=event.wrapped,
        failures=event.failures,
        node_losses=event.node_losses,
        best_step=event.best_step,
        bus=1,
        bus_open=True,
        deadline_at=event.at + policy.start_within_s,
    )
    if event.finished_step is not None:
        why = f"the training finished at step {event.finished_step} in an earlier attempt"
        return finish(replace(state, bus_open=False), Plan(next=Next.END, why=why, code=ExitCode.FINISHED))
    return Decision(state, (do.StartBus(bus=1), do.ChooseCheckpoint()), "the attempt starts")


def on_watcher_ready(state: State, event: on.WatcherReady, policy: Policy) -> Decision:
    """One more watcher answers."""
    if event.bus != state.bus or event.node not in state.nodes or event.node in state.ready:
        return Decision(state)
    state = replace(state, ready=state.ready | {event.node})
    everyone = all_ready(state)
    if everyone:
        state = replace(state, silent=frozenset(), bus_error="", bus_tries=0, doubt=Doubt.NONE)
    if state.phase in (Phase.SAVING, Phase.STOPPING):
        first = len(state.ready) == 1
        return _say_again(state, first=first) if first or everyone else Decision(state)
    if not everyone:
        return Decision(_bus_comes(state, event.at, policy))
    if state.phase is Phase.TRAINING:
        # a notice meanwhile reached no watcher: only Slurm can tell of it
        unknown = state.wrapped and not state.begun  # the word of the begin may have been lost: only warn, later
        state = replace(state, deadline_at=event.at + policy.announce_within_s if unknown else None)
        return ask_unprompted(state, "every watcher answers again: was a notice missed?")
    return _go_on_starting(state, event.at, policy, "every watcher answers")


def _bus_comes(state: State, at: float, policy: Policy) -> State:
    """Slurm is there again, the first watcher proves it: the others get their usual time."""
    if state.phase is Phase.TRAINING and state.doubt in (Doubt.ASKED, Doubt.AWAY):
        return replace(state, doubt=Doubt.NONE, deadline_at=at + policy.watcher_back_within_s)
    return state


def _say_again(state: State, *, first: bool) -> Decision:
    """The watchers of a new bus missed what the old ones were told.

    Said to the first that is back, for one is enough for the ranks to agree on a save and the others may never
    come, and once more to all: twice a bus, however many nodes there are.
    """
    why = "every watcher is back" if not first or all_ready(state) else "the first watcher is back"
    if state.phase is Phase.SAVING and state.verifying is None:
        return Decision(state, (request_save(state),), f"{why}: ask for the save again")
    if state.killed and state.running:
        return Decision(state, (do.KillRanks(launch=state.launch, why=why),), f"{why}: kill again")
    return Decision(state, (), why)


def on_checkpoint_chosen(state: State, event: on.CheckpointChosen, policy: Policy) -> Decision:
    """The newest verified step directory is known, and with it the progress since the last launch."""
    if state.phase is not Phase.STARTING or state.chosen:
        return Decision(state)
    progressed = event.step is not None and (state.best_step is None or event.step > state.best_step)
    state = replace(
        state,
        chosen=True,
        resume_from=event.directory,
        best_step=event.step if progressed else state.best_step,
        failures=0 if progressed else state.failures,
        node_losses=0 if progressed else state.node_losses,
    )
    if event.directory is None:
        why = "no verified step directory: the training starts from the beginning"
    else:
        why = f"newest verified step directory: {event.directory}"
    if event.skipped:
        why += "; passed over: " + ", ".join(f"{s.directory} ({s.problem})" for s in event.skipped)
    if state.launch and state.failures >= policy.failures_max:
        failed = f"{state.first_failure}; {state.failures} launches without a newly verified step"
        plan = Plan(next=Next.END, why=failed, code=ExitCode.TRAINING_FAILED)
        return stop(state, event.at, plan, policy)
    return _go_on_starting(state, event.at, policy, why)


def on_choice_failed(state: State, event: on.ChoiceFailed, policy: Policy) -> Decision:
    """The storage does not answer as it should: a person is needed."""
    if state.phase is not Phase.STARTING or state.chosen:
        return Decision(state)
    plan = Plan(next=Next.END, why=f"step directories: {event.error}", code=ExitCode.STORAGE)
    return stop(state, event.at, plan, policy)


def _go_on_starting(state: State, at: float, policy: Policy, why: str) -> Decision:
    """In STARTING, clear the nodes once watchers answer and the checkpoint is chosen."""
    if state.phase is not Phase.STARTING:
        return Decision(state)
    if not all_ready(state):
        return Decision(state, (), why)
    if not state.chosen:
        return Decision(replace(state, deadline_at=at + policy.choose_within_s), (), why)
    state = replace(state, clearing=True, deadline_at=at + policy.clear_within_s)
    return Decision(state, (do.ClearNodes(launch=state.launch),), why)


def on_nodes_cleared(state: State, event: on.NodesCleared, policy: Policy) -> Decision:
    """Nothing of an earlier launch is left anywhere: start the ranks."""
    if state.phase is not Phase.STARTING or not state.clearing or event.launch != state.launch:
        return Decision(state)
    state = replace(
        state,
        phase=Phase.TRAINING,
        deadline_at=event.at + (policy.begin_within_s if state.wrapped else policy.announce_within_s),
        clearing=False,
        running=True,
        begun=False,
        heard=False,
        bus_restarted_in_launch=False,
        told=False,
        doubt=Doubt.NONE,
        step=None,
        saving=None,
        killed=False,
        first_failure="",
        plan=None,
    )
    effect = do.StartLaunch(launch=state.launch, resume_from=state.resume_from, address=event.address, port=event.port)
    return Decision(state, (effect,), "the nodes are clear")


def on_launch_refused(state: State, event: on.LaunchRefused, policy: Policy) -> Decision:
    """The launch did not even begin: srun could not be started."""
    if event.launch != state.launch or not state.running:
        return Decision(state)
    plan = Plan(next=Next.END, why=f"the training step: {event.error}", code=ExitCode.START_FAILED)
    return stop(replace(state, running=False), event.at, plan, policy)


def on_watcher_lost(state: State, event: on.WatcherLost, policy: Policy) -> Decision:
    """A watcher is gone: start a new bus beside the training."""
    if event.bus != state.bus or not state.bus_open or state.phase in (Phase.CLOSING, Phase.REQUEUEING):
        return Decision(state)
    state = replace(state, silent=state.silent | {event.node})
    return _restart_bus(state, event.at, f"the watcher of {event.node} is gone: {event.why}", policy)


def on_bus_ended(state: State, event: on.BusEnded, policy: Policy) -> Decision:
    """All watchers are gone: as we wanted, or a new bus is started beside the training."""
    if event.bus != state.bus or not state.bus_open:
        return Decision(state)
    if state.phase in (Phase.CLOSING, Phase.REQUEUEING):
        state = replace(state, bus_open=False, ready=frozenset())
        if state.phase is Phase.CLOSING:
            return closed(state, event.at, policy, "the watchers left")
        return Decision(state, (), "the watchers left")
    why = f"the watchers' Slurm step ended with {event.code} {event.error}".rstrip()
    state = replace(state, bus_open=False, bus_error=event.error)
    return _restart_bus(state, event.at, why, policy)


def _restart_bus(state: State, at: float, why: str, policy: Policy) -> Decision:
    """Start a new bus beside the training; a node that does not come back is lost."""
    # beside training, a bus on which nobody answered is in no budget: its deadline asks Slurm first
    unheard = state.phase is Phase.TRAINING and not state.ready
    restarts = state.bus_restarts + (not unheard)
    tries = state.bus_tries + unheard
    if restarts > policy.bus_restarts_max:
        why = f"{why}; {restarts - 1} restarts of the bus"
        if state.plan is not None:  # we leave already: a save may still come to its end
            return Decision(replace(state, bus_open=False, ready=frozenset()), (), why)
        return stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.START_FAILED), policy)
    deadline = state.deadline_at
    if state.phase in (Phase.STARTING, Phase.TRAINING):
        back = at + policy.watcher_back_within_s
        # a node that was lost already keeps its deadline: restarts must not put it off for ever
        lost_before = deadline is not None and (state.phase is Phase.STARTING or not all_ready(state))
        deadline = min(deadline, back) if lost_before and deadline is not None else back
    state = replace(
        state,
        bus=state.bus + 1,
        bus_open=True,
        bus_restarts=restarts,
        bus_tries=tries,
        bus_restarted_in_launch=True,
        ready=frozenset(),
        clearing=False,
        deadline_at=deadline,
    )
    # a bus that cannot start must not spin; the first restarts are at once
    number = restarts + tries
    after_s = min(policy.bus_retry_max_s, 0.25 * 2.0 ** min(number, 30)) if number > 1 else 0.0
    return Decision(state, (do.StartBus(bus=state.bus, after_s=after_s),), why)


def on_no_watcher(state: State, at: float, policy: Policy) -> Decision:
    """Beside training, no watcher at all came back in time: are the nodes lost, or is only Slurm away?"""
    if state.doubt is Doubt.ASKED and state.asking and state.signal == NO_SIGNAL:
        state = replace(state, asking=False, again=False, signal="")
        return try_bus_again(state, at, f"no answer in {policy.ask_within_s:g} s", policy, answered=False)
    state = replace(state, doubt=Doubt.ASKED, deadline_at=at + policy.ask_within_s)
    why = "no watcher answers on any node"
    if state.asking:
        return Decision(state, (), f"{why}: wait for what Slurm says")
    return ask_unprompted(state, f"{why}: is Slurm there?")


def try_bus_again(state: State, at: float, said: str, policy: Policy, *, answered: bool) -> Decision:
    """Training goes on; without Slurm for as long as it takes, with it for one more time."""
    if answered:
        why = f"Slurm answers ({said}): the watchers are tried once more"
    else:
        why = f"Slurm does not answer either ({said}): training goes on, the watchers are tried again"
    deadline = at + policy.watcher_back_within_s
    state = replace(state, doubt=Doubt.LAST if answered else Doubt.AWAY, deadline_at=deadline)
    if answered:
        state = replace(state, bus_tries=0)  # the time is short: almost at once
    return _restart_bus(state, at, why, policy)

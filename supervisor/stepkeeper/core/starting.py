"""From the start of an attempt (or a relaunch) to running ranks.  Pure.

A launch starts only when every watcher answers, the checkpoint is chosen and verified, and every node has
confirmed that nothing of an earlier launch is left and that it is fit.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepkeeper.core import baseline, losses, stragglers
from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.eviction import expecting
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.faults import are_lost, lose_nodes, on_unfit, was_lost
from stepkeeper.core.gates import clearing, go_on_starting
from stepkeeper.core.phases import (
    Decision,
    all_ready,
    finish,
    query_slurm_unprompted,
    request_save,
    stop,
)
from stepkeeper.core.placement import common, places, room
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Why
from stepkeeper.core.recovery import past, roll_back_below, settle
from stepkeeper.core.scale_up import launched, take_back
from stepkeeper.core.silence import first_word_by
from stepkeeper.core.state import (
    Blame,
    Budgets,
    BusStatus,
    Choice,
    Identity,
    Launch,
    Next,
    Nodes,
    Phase,
    Plan,
    Ranks,
    Silence,
    SlurmReachability,
    State,
    Timer,
    Watchers,
)


def on_attempt_started(state: State, event: on.AttemptStarted, policy: Policy) -> Decision:
    """Start the watchers and look for the checkpoint, unless the work is done already."""
    if state.watchers.bus:
        return Decision(state)  # an attempt starts once
    nodes, known_bad = _without_known_bad(event)
    state = replace(  # a signal may have come before us: what was asked about it stays asked
        state,
        identity=Identity(
            job_id=event.job_id,
            restart_count=event.restart_count,
            attempt=event.attempt,
            batch_node=event.batch_node,
            kill_wait_s=event.kill_wait_s,
            has_batch_script=event.batch,
            wrapped=event.wrapped,
            started_at=event.at,
            end_at=event.end_at,
        ),
        nodes=Nodes(
            usable=nodes,
            allocated=event.nodes,
            releasing=bool(set(event.nodes) - set(nodes) - {event.batch_node}),
            wanted=event.nodes_wanted or len(event.nodes),
            min=event.nodes_min,
            counts=event.node_counts,
            excluded=event.excluded,
            launched_before=event.nodes_before,
        ),
        budgets=Budgets(
            failures=event.failures,
            node_losses=event.node_losses,
            best_step=event.best_step,
            tried=event.tried,
        ),
        baseline=event.baseline,
        resume=replace(state.resume, skipped_data=event.skipped_data),
        losses=losses.carried(event.losses),
        watchers=Watchers(bus=1, status=BusStatus.OPEN),
        timers=state.timers.waiting(Timer.WATCHERS, event.at + policy.start_within_s),
    )
    state = expecting(state, policy)
    if event.finished_step is not None:
        why = (because.TrainingFinished(step=event.finished_step, earlier=True),)
        state = replace(state, watchers=replace(state.watchers, status=BusStatus.ENDED))
        return finish(state, Plan(next=Next.END, why=why, code=ExitCode.FINISHED))
    effects = (do.StartBus(bus=1, nodes=state.nodes.usable), do.TestStorage(), do.ChooseCheckpoint())
    return Decision(state, effects, (because.Plain(because.Fact.ATTEMPT_STARTS), *known_bad))


def _without_known_bad(event: on.AttemptStarted) -> tuple[tuple[str, ...], Why]:
    """Return the nodes without those that we excluded and Slurm gave us all the same, where enough are left.

    One that was lost and is given again may be back: its watcher reports it.
    """
    faulty = [each for each in event.excluded if each.until > event.at and not was_lost(each)]
    bad = tuple(dict.fromkeys(each.node for each in faulty if each.node in event.nodes))
    if not bad:
        return event.nodes, ()
    left = tuple(node for node in event.nodes if node not in bad)
    wanted = event.nodes_wanted or len(event.nodes)
    if not places(State(nodes=Nodes(usable=left, wanted=wanted, min=event.nodes_min, counts=event.node_counts))):
        return event.nodes, (because.FaultyNodesGiven(nodes=bad, used=True),)
    return left, (because.FaultyNodesGiven(nodes=bad, used=False),)


def on_watcher_ready(state: State, event: on.WatcherReady, policy: Policy) -> Decision:
    """One more watcher answers."""
    if event.bus != state.watchers.bus or event.node not in state.nodes.usable or event.node in state.watchers.ready:
        return Decision(state)
    if event.switches:
        switches = {**state.nodes.switches, event.node: event.switches}
        state = replace(state, nodes=replace(state.nodes, switches=switches))
    here = {event.node}
    answered, silent = state.watchers.answered | here, state.watchers.silent - here
    watchers = replace(state.watchers, ready=state.watchers.ready | here, answered=answered, silent=silent)
    state = replace(state, watchers=watchers)
    everyone = all_ready(state)
    if everyone:
        watchers = replace(watchers, silent=frozenset(), answered=frozenset(), error="", complete_at=event.at)
        watchers = replace(watchers, tries=0, reachability=SlurmReachability.NONE)
    state = replace(state, watchers=watchers)
    if state.phase in (Phase.SAVING, Phase.STOPPING):
        first = len(state.watchers.ready) == 1
        return _say_again(state, first=first) if first or everyone else Decision(state)
    if not everyone and _all_but_left_out(state):
        lost = tuple(node for node in state.nodes.usable if node not in state.watchers.ready)
        state = replace(state, watchers=replace(state.watchers, complete_at=event.at))
        return lose_nodes(state, event.at, lost, (are_lost(state, lost),), policy)
    if not everyone:
        return Decision(_bus_comes(state, event.at, policy))
    if state.phase is Phase.TRAINING:
        # a notice meanwhile reached no watcher: only Slurm can report it
        # the message of the begin may have been lost: only warn, later
        unknown = state.identity.wrapped and not state.launch.all_tasks_started
        state = state.waiting_for_nothing()
        if unknown:
            state = state.waiting(Timer.TASKS_STARTED, event.at + policy.announce_within_s)
        return query_slurm_unprompted(state, (because.Plain(because.Fact.NOTICE_PERHAPS_MISSED),))
    return go_on_starting(state, event.at, policy, (because.Plain(because.Fact.WATCHERS_READY),))


def _all_but_left_out(state: State) -> bool:
    """Tell whether every watcher of a bus answers that was started without nodes."""
    ready, without = state.watchers.ready, state.watchers.without
    return len(state.nodes.usable) <= len(ready) + len(without) and (ready | without).issuperset(state.nodes.usable)


def _bus_comes(state: State, at: float, policy: Policy) -> State:
    """Slurm is there again, the first watcher proves it: the others get their usual time."""
    waits_for_slurm = state.watchers.reachability in (SlurmReachability.ASKED, SlurmReachability.AWAY)
    if state.phase is not Phase.TRAINING or not waits_for_slurm:
        return state
    watchers = replace(state.watchers, reachability=SlurmReachability.NONE)
    return replace(state, watchers=watchers).waiting(Timer.WATCHERS, at + policy.watcher_back_within_s)


def _say_again(state: State, *, first: bool) -> Decision:
    """The watchers of a new bus missed the orders to the old ones.

    Said to the first that is back, for one is enough for the ranks to agree on a save and the others may never
    come, and once more to all: twice a bus, however many nodes there are.
    """
    everyone = not first or all_ready(state)
    if state.phase is Phase.SAVING and state.storage.verifying is None:
        back = because.WatchersBack(everyone=everyone, sent_again="save")
        return Decision(state, (request_save(state),), (back,))
    if state.launch.killed and state.launch.running:
        why: Why = (because.WatchersBack(everyone=everyone, sent_again="kill"),)
        return Decision(state, (do.KillRanks(launch=state.launch.number, reasons=why),), why)
    return Decision(state, (), (because.WatchersBack(everyone=everyone),))


def on_checkpoint_chosen(state: State, event: on.CheckpointChosen, policy: Policy) -> Decision:
    """The newest verified step directory is known, and with it the progress since the last launch."""
    if state.phase is not Phase.STARTING or state.resume.choice is not Choice.OPEN:
        return Decision(state)
    led_back = _led_back(state, event, policy)
    if led_back is not None:
        return led_back
    progressed = event.step is not None and (state.budgets.best_step is None or event.step > state.budgets.best_step)
    resume = replace(
        state.resume,
        choice=Choice.CHOSEN,
        directory=event.directory,
        step=event.step,
        same_world=event.same_world,
    )
    state = replace(state, resume=resume)
    if progressed:
        tried = past(state.budgets.tried, event.step)
        budgets = replace(state.budgets, best_step=event.step, failures=0, node_losses=0, tried=tried)
        state = replace(state, budgets=budgets)
    if state.budgets.node_losses > policy.node_losses_max:
        lost = (*state.launch.first_failure, because.FailuresMax(failures=state.budgets.node_losses, of_nodes=True))
        return stop(state, event.at, Plan(next=Next.END, why=lost, code=ExitCode.NODES_LOST), policy)
    why: Why
    if event.directory is None:
        alone = bool(state.identity.attempt or state.launch.number) and not state.has_library
        why = (because.NoCheckpoint(script_resumes=alone),)
    else:
        why = (because.CheckpointFound(directory=event.directory),)
    state, back = take_back(state, event.at)
    why += back
    if event.skipped:
        why += (because.StepsPassedOver(steps=tuple((each.directory, each.problem) for each in event.skipped)),)
    if not places(state):  # the nodes that are left would have shrunk the launch, which this checkpoint does not allow
        plan = Plan(next=Next.REQUEUE, why=(*why, room(state)), blame=Blame.NODE)
        return stop(state, event.at, plan, policy)
    if state.failure is not None and state.failure.judged is not None:
        return settle(state, event.at, state.failure.judged, why, policy)
    if state.failure is None and state.launch.number and state.budgets.failures >= policy.failures_max:
        failed = (*state.launch.first_failure, because.FailuresMax(failures=state.budgets.failures))
        plan = Plan(next=Next.END, why=failed, code=ExitCode.TRAINING_FAILED)
        return stop(state, event.at, plan, policy)
    return go_on_starting(state, event.at, policy, why)


def _led_back(state: State, event: on.CheckpointChosen, policy: Policy) -> Decision | None:
    """After silent corruption take nothing newer than what was confirmed, be it on shared storage or in a tier."""
    wrong = state.launch.found
    if wrong is None or wrong.back_to is None:
        return None
    newest = wrong.back_to if event.step is None else min(wrong.back_to, event.step)
    if state.resume.went_back and event.step in (None, newest):
        return None
    return roll_back_below(state, event.at, newest + 1, wrong.reasons, policy)


def on_choice_failed(state: State, event: on.ChoiceFailed, policy: Policy) -> Decision:
    """The storage does not answer as it should: a person is needed."""
    if state.phase is not Phase.STARTING or state.resume.chosen:
        return Decision(state)
    plan = Plan(next=Next.END, why=(because.Failed(what="list_checkpoints", error=event.error),), code=ExitCode.STORAGE)
    return stop(state, event.at, plan, policy)


def on_nodes_cleared(state: State, event: on.NodesCleared, policy: Policy) -> Decision:
    """Nothing of an earlier launch is left anywhere: start the ranks."""
    if state.phase is not Phase.STARTING or not clearing(state, event.launch):
        return Decision(state)
    if event.nodes and event.nodes != state.nodes.usable:
        return Decision(state)  # a node was left since: the others were asked again
    if event.unfit:
        return on_unfit(state, event, policy)
    nodes = places(state)
    spares = _spares_used(state, nodes)
    timers = state.timers.waiting(Timer.LIBRARY, event.at + policy.announce_within_s)
    if state.identity.wrapped:
        timers = state.timers.waiting(Timer.TASKS_STARTED, event.at + policy.begin_within_s)
    timers = timers.beside(Timer.HANG, first_word_by(state, event.at, policy))
    state = replace(
        state,
        phase=Phase.TRAINING,
        timers=timers,
        start=replace(state.start, unfit_since=None),
        launch=Launch(number=state.launch.number, nodes=nodes, began_at=event.at, ranks=Ranks.RUNNING),
        budgets=replace(state.budgets, failure_counted=False),
        leaving=replace(state.leaving, eviction_confirmed=False, plan=None),
        watchers=replace(state.watchers, reachability=SlurmReachability.NONE),
        storage=replace(state.storage, reading_back=(), read_back_wrong=0),
        pace=baseline.launched(state.pace),
        losses=losses.launched(state.losses, state.resume.step),
        stragglers=stragglers.launched(state.stragglers),
        nodes=replace(state.nodes, launched_before=state.launch.nodes or state.nodes.launched_before),
        silence=Silence(),
    )
    state = launched(state, event.at, policy)
    effect = do.StartLaunch(
        launch=state.launch.number,
        nodes=nodes,
        resume_from=state.resume.directory,
        went_back=state.resume.went_back or None,
        skipped_data=state.resume.skipped_data,
        address=event.address,
        port=event.port,
    )
    return Decision(state, (effect,), (because.Plain(because.Fact.NODES_READY), *spares, *_shape(state)))


def _spares_used(state: State, nodes: tuple[str, ...]) -> Why:
    """Say which spare takes the place of which node in the next launch, where Slurm's switches decided that."""
    before, switches = state.launch.nodes, state.nodes.switches
    if not switches or len(before) != len(nodes):
        return ()
    pairs = zip(before, nodes, strict=True)
    return tuple(
        because.SpareUsed(node=spare, replaces=node, switches=".".join(common(node, spare, switches)))
        for node, spare in pairs
        if node != spare
    )


def _shape(state: State) -> Why:
    """Say it where a launch does not get all nodes of the allocation, or fewer than it wants."""
    if len(state.launch.nodes) < state.nodes.wanted:
        return (room(state), because.LaunchShrinks(nodes=len(state.launch.nodes)))
    spares = tuple(node for node in state.nodes.usable if node not in state.launch.nodes)
    return (because.SparesLeft(nodes=spares),) if spares else ()


def on_launch_refused(state: State, event: on.LaunchRefused, policy: Policy) -> Decision:
    """The launch did not even begin: srun could not be started."""
    plan = Plan(next=Next.END, why=(because.Failed(what="launch", error=event.error),), code=ExitCode.START_FAILED)
    return stop(replace(state, launch=state.launch.ended()), event.at, plan, policy)

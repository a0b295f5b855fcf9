"""Reasons in words, for logs, the status and people.  The only place that words them: no rule reads it.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stepkeeper.core import reasons as r
from stepkeeper.core.causes import Cause, Notice
from stepkeeper.core.losses import DISCONTINUITY
from stepkeeper.core.reasons import Fact
from stepkeeper.core.state import Timer

NAMED_MAX = 4
MIB = 2**20

NOTICES = {
    Notice.PREEMPTED: "Slurm preempts the job",
    Notice.TIME_LIMIT: "the job reaches its time limit",
    Notice.REQUEUED: "Slurm or an administrator requeued the job",
    Notice.CANCELLED: "somebody cancelled the job",
    Notice.ASKED_TO_SAVE: "somebody asks the job to save",
    Notice.NOT_FOR_US: "nothing ends the job",
    Notice.UNKNOWN: "nobody knows why Slurm signaled",
}

LATE: dict[str, str] = {
    Timer.WATCHERS: "some watchers get more time: they did not answer again",
    Timer.CHECKPOINT_CHOICE: "the storage did not show the newest step directory",
    Timer.CAUSE: "no cause was found",
    Timer.CLEARING: "some nodes did not confirm the end of the previous launch's processes",
    Timer.TASKS_STARTED: "some tasks of the training step did not start",
    Timer.SAVE: "the ranks did not save",
    Timer.RANKS_LEAVE: "the ranks did not leave",
    Timer.KILL: "the training step did not end after SIGKILL",
    Timer.READ_BACK: "the last checkpoint was not verified",
    Timer.LEAD_BACK: "the rollback to a confirmed step did not finish",
    Timer.WATCHERS_LEAVE: "the watchers did not leave",
    Timer.SLURM_ANSWER: "Slurm did not answer",
    Timer.STORAGE_TEST: "the storage did not end its test",
    Timer.REQUEUE_END: "Slurm did not take the requeue",
}
RESTING = {
    "checked": "these nodes are checked again",
    "unanswered": "these nodes did not answer the check",
    "fit": "these nodes are fit again, and wait for the next launch",
    "used": "the next launch uses these nodes again",
    "given_back": "these nodes take no part, and are given back",
}

FAILED = {
    "list_checkpoints": "the step directories cannot be listed",
    "launch": "the training step could not be started",
    "roll_back": "the training cannot go back to an older step",
    "requeue": "Slurm does not allow the requeue, so the job may be submitted again",
    "submit": "Slurm refuses to accept the job again",
}
NODE_IS = {
    "suspect": "the next launch does not use {node}, where launches failed",
    "drained": "{node} is drained, so the job need not exclude it",
    "not_clear": "a process of the previous launch still runs on {node}",
    "keeping_up": "{node} keeps up with the other nodes again",
}
CHECKPOINT_READ = {
    "verified": "{directory} is verified",
    "damaged": "{directory} is damaged: {problem}",
    "removed": "{directory} was removed before it was read back",
}

# reasons that have no more facts than their name
FACTS = {
    Fact.ATTEMPT_STARTS: "the attempt starts",
    Fact.WATCHERS_READY: "every watcher answers",
    Fact.NOTICE_PERHAPS_MISSED: "every watcher answers again, and Slurm is asked whether a notice was missed",
    Fact.NODES_READY: "the nodes are clear and fit",
    Fact.STORAGE_TEST_BEGINS: "the storage is tested",
    Fact.CHECKPOINT_BEFORE_USED: "the next launch uses the step directory before it",
    Fact.SAVE_AGAIN: "the ranks are asked to save once more, since the newest step directory is damaged",
    Fact.NO_LIBRARY: (
        "no rank has the trainer library, so the script gets notices as a signal (docs/guides/own-handlers.md)"
    ),
    Fact.STOP_SIGNAL_INSTEAD: (
        "the script has no trainer library, so it gets the stop signal and time until the deadline"
    ),
    Fact.NOTHING_TO_SAVE: "no rank has done a step in this launch, so there is nothing to save",
    Fact.COMMIT_IN_FLIGHT: "the ranks may still complete the commit in flight",
    Fact.SIGNAL_UNEXPLAINED: "Slurm is asked whether its signal ended the rank",
    Fact.ENDED_AS_ASKED: "the rank had been asked to end",
    Fact.END_UNPROVEN: "the command ended with 0, but no checkpoint shows the last step",
    Fact.COMMAND_GAVE_UP: "the command ended with 93, and must not be started again",
    Fact.RANKS_ENDED_SILENTLY: "the ranks ended with 0, but rank 0 never said that the training is finished",
    Fact.CAUSE_STAYS: "another start does not change that",
    Fact.START_OVER: "no checkpoint exists, so the training starts from the beginning",
    Fact.NEWEST_IS_BEFORE: "the newest verified step lies before the one that went wrong",
    Fact.TIME_LIMIT_NEAR: "the time limit of the job is near",
    Fact.WAIT_FOR_SLURM: "the launch waits for Slurm",
    Fact.REQUEUE_FORBIDDEN: "Slurm does not requeue this job (Requeue=0): submit it again with `stepkeeper resume RUN`",
    Fact.NO_BATCH_SCRIPT: "the job has no batch script to requeue: run again with the same --run-dir",
    Fact.SUBMITTED_INSTEAD: "Slurm may not requeue this job, so it is submitted again",
    Fact.NODE_STAYS: "the fault is no reason to leave the node",
    Fact.UNFIT_NODES_LEFT: "the nodes that are not fit were left already",
    Fact.MOST_NODES_UNFIT: "most nodes are not fit, so the cause is common to them",
    Fact.WAIT_OVER: "the wait before the launch is over",
    Fact.SPARE_ONLY: "the node was a spare, so the training continues",
    Fact.WATCHERS_LEFT: "the watchers left",
    Fact.NOTHING_TO_WATCH: "no node is left that could be watched",
    Fact.NO_WATCHER: "no watcher answers on any node, so Slurm is asked whether it is there",
}
# reasons of one form; a fact with several names is a list of them
PLAIN: dict[type[r.Reason], str] = {
    r.CheckpointFound: "the newest verified step directory is {directory}",
    r.LaunchShrinks: "the launch shrinks to {nodes} nodes",
    r.SparesLeft: "spare nodes: {nodes}",
    r.StorageTestFailed: "the storage failed its test: {problem}",
    r.StorageNotRecovered: "the storage has not recovered in {waited_s:.0f} s",
    r.StorageTestAgain: "no launch starts before the storage is tested again in {after_s:.0f} s",
    r.DamagedInARow: "{count} step directories in a row are damaged, so the storage is suspect and is tested",
    r.NotAttached: "not attached to {framework}, so it saves nothing on request: {error}",
    r.CopiesDiffer: "copies differ between ranks, so a device may compute wrongly: {tensors}",
    r.SaveFailed: "the save of step {step} failed, and older steps are untouched: {error}",
    r.CommandEnded: "the command ended with 0, and has no trainer library to say more",
    r.RanksLeave: "the ranks leave at step {step}",
    r.Relaunch: "the next launch is prepared",
    r.DataLeftOut: "the ranks leave out the data of {steps} steps from step {step} on",
    r.DataNotLeftOut: "the ranks left out data {times} times already, so they leave out no more",
    r.GoBackBelow: "the training goes back to a step before {step}",
    r.RolledBack: "the lineage leads back to {directory}",
    r.SlurmUnreachable: "Slurm could not be asked ({error})",
    r.SlurmAway: "Slurm has not answered for {for_s:g} s",
    r.NoTimeToSave: "{left_s:.1f} s are left and the quickest save took {quickest_s:.1f} s, so no save begins",
    r.WithoutNodes: "the requeue excludes {nodes}",
    r.RunDirectoryGone: "the run directory is gone: {path}",
    r.ClockSet: "Slurm's clock was set: it moved by {seconds:+.0f} s",
    r.Superseded: "job {job_id} (restart {restart_count}) holds the lease now",
    r.SlurmdGone: (
        "{node} refuses connections to slurmd, and its watcher is silent for {silent_s:g} s: the node is lost"
    ),
    r.LostRecently: "the node was lost",
    r.GrowInPlace: "{nodes} more nodes can take part in a new launch",
    r.GrowByRequeue: "the job is requeued to get {missing} missing nodes, for as many like ours are idle",
    r.WatcherGone: "the watcher of {node} is gone: {text}",
    r.BusRestarts: "the watchers were started {restarts} times again",
    r.SilentStart: "before the first message of the trainer library, {stacks}",
    r.PartFailed: "a mistake in Stepkeeper stopped {part}, and the training continues (please report it): {error}",
    r.Suspended: "the supervisor did not run for {seconds:.0f} s, and extends its deadlines by as much",
}


def text(why: Iterable[r.Reason]) -> str:
    """Return reasons in words, one clause each."""
    return "; ".join(clause(each) for each in why)


def tag(why: r.Why) -> str:
    """Return the name of the first reason; empty where there is none."""
    return _name(why[0]) if why else ""


def _name(reason: r.Reason) -> str:
    return reason.fact.value if isinstance(reason, r.Plain) else str(reason.__struct_config__.tag)


def clause(reason: r.Reason) -> str:  # noqa: C901, PLR0912, PLR0915 - one case a reason
    """Return one reason in words: a named subject, and at most twenty words besides what others said."""
    if (words := PLAIN.get(type(reason))) is not None:
        facts = msgspec.structs.asdict(reason)
        return words.format(**{name: _all(fact) if isinstance(fact, tuple) else fact for name, fact in facts.items()})
    match reason:
        case r.Sentence(text=said):
            return said
        case r.Plain(fact=fact):
            return FACTS[fact]
        case r.Failed(what=failed, error=error):
            return f"{FAILED[failed]}: {error}"
        # --- an attempt starts
        case r.FaultyNodesGiven(nodes=nodes, used=True):
            return f"Slurm gave excluded nodes ({_named(nodes)}), which are used because too few others are here"
        case r.FaultyNodesGiven(nodes=nodes):
            return f"Slurm gave excluded nodes ({_named(nodes)}), which are not used"
        case r.WatchersBack(everyone=everyone, sent_again=sent):
            who = "every watcher is back" if everyone else "the first watcher is back"
            return f"{who}{', and gets the order to ' + sent + ' again' if sent else ''}"
        case r.NoCheckpoint(script_resumes=True):
            return "no verified step directory and no trainer library are known, so the script itself has to resume"
        case r.NoCheckpoint():
            return "no verified step directory exists: the training starts from the beginning"
        case r.StepsPassedOver(steps=steps):
            return f"newer step directories cannot be used: {', '.join(f'{name} ({said})' for name, said in steps)}"
        case r.FailuresMax(failures=failures, of_nodes=True):
            return f"{failures} nodes were lost or faulty without a newly verified step"
        case r.FailuresMax(failures=failures, same=True):
            return f"this failure came back {failures} times without a newly verified step"
        case r.FailuresMax(failures=failures):
            return f"{failures} launches failed without a newly verified step"
        case r.SpareUsed(node=node, replaces=replaced, switches=switches):
            near = f"below the same switch {switches}" if switches else "no spare is below the same switch"
            return f"{node} takes the place of {replaced}: {near}"
        case r.NodesLeft(usable=usable, wanted=wanted, same_world=True):
            enough = f"{usable} usable nodes are left of the allocation, and a launch wants {wanted}"
            return f"{enough}: its checkpoint needs as many ranks as saved it"
        case r.NodesLeft(usable=usable, wanted=wanted, least=least, counts=counts):
            fewest = f", and at least {least}" if least else ""
            of = f" (one of {', '.join(map(str, counts))})" if counts else ""
            return f"{usable} usable nodes are left of the allocation, and a launch wants {wanted}{fewest}{of}"
        # --- storage
        case r.StorageSuspect(damaged=damaged, directories=directories):
            names = _all(directories)
            return f"{damaged} committed step directories in a row are damaged, so the storage is suspect ({names})"
        case r.CheckpointRead(directory=directory, result=result, problem=problem):
            return CHECKPOINT_READ[result].format(directory=directory, problem=problem)
        case r.StorageTestPassed(bytes=size, write_s=write_s, read_s=read_s, from_disk=from_disk):
            where = "the disk" if from_disk else "perhaps its memory"
            took = f"the storage took {size / MIB:g} MiB in {write_s:.3f} s"
            return f"{took}, and returned them from {where} in {read_s:.3f} s"
        case r.StorageTrusted(directory=directory):
            start = directory.rpartition("/")[2] if directory else "the beginning"
            return f"the thorough test found no error, so the training continues from {start}"
        # --- ranks
        case r.TasksStarted(warm=0, cold=""):
            return "every task of the training step has started"
        case r.TasksStarted(warm=warm, cold=cold):
            others = f" (not all: {cold})" if cold else ""
            return f"every task of the training step has started, {warm} of them by a warm standby{others}"
        case r.LibraryAnswers(framework=framework) if framework:
            return f"attached to {framework}: it saves its own checkpoint on request"
        case r.LibraryAnswers():
            return "the trainer library answers: this script can save and resume"
        case r.ResumedElsewhere(step=step, chosen=chosen):
            start = f"step {chosen}" if chosen is not None else "the beginning"
            return f"the ranks resume from step {step} instead of {start}, as a tier or the script decided"
        case r.Committed(step=step, framework=framework):
            return f"step {step} is {f'saved by {framework}' if framework else 'committed'}"
        case r.TrainingFinished(step=step, earlier=True):
            return f"an earlier attempt finished the training at step {step}"
        case r.TrainingFinished(step=None):
            return "the training is finished"
        case r.TrainingFinished(step=step):
            return f"the training finished at step {step}"
        case r.RanksLeftAlone(step=None):
            return "the ranks left on their own with a checkpoint"
        case r.RanksLeftAlone(step=step):
            return f"the ranks left on their own at step {step}"
        case r.RankFailed(rank=rank, node=node, code=code, signal=signal, faults=faults):
            how = f"signal {signal}" if signal is not None else f"exit code {code}"
            return f"rank {rank} on {node} ended with {how}{f' ({_all(faults)})' if faults else ''}"
        case r.RankLeft(rank=rank, node=node, seen=seen, waiting=waiting):
            how = "stopped" if seen else "has ended, its exit code is unknown"
            said = "rank 0 is expected to say why" if waiting else "rank 0 did not say why"
            return f"rank {rank} on {node} {how}; {said}"
        case r.OutcomeMissing(error=error, code=code):
            return f"rank 0 said that the training is finished, but outcome.json does not: {error or code}"
        case r.EndedBeforeTarget(step=step, target=target):
            newest = "it has no whole checkpoint" if step is None else f"its newest whole checkpoint is of step {step}"
            return f"the command ended with 0 before the last step, {target}: {newest}"
        case r.StepFailed(code=code, error=error):
            return error or f"srun ended with {code}"
        case r.Late(timer=timer, within_s=within_s):
            after = "; continue it with `stepkeeper resume RUN`" if timer == Timer.REQUEUE_END else ""
            return f"{LATE.get(timer, timer)} {f'in {within_s:g} s' if within_s else 'in time'}{after}"
        # --- why a launch failed
        case r.CauseFound():
            return _cause(reason)
        case r.Recovery(action=action, after_s=after_s):
            return f"the next action is {action.value}{f' after {after_s:g} s' if after_s else ''}"
        # --- what Slurm says, and people
        case r.GotSignal(signal=signal, node=node):
            return f"Slurm sent SIG{signal} to the steps on {node}" if node else f"the supervisor got SIG{signal}"
        case r.AskedAgain(suspended=suspended):
            what = "the job was suspended" if suspended else "a signal came"
            return f"{what} after Slurm was asked, so Slurm is asked again"
        case r.SlurmSaid(notice=notice, slurm_state=slurm_state):
            return f"{NOTICES[notice]} (Slurm says {slurm_state})"
        case r.SlurmAsked(about="requeue"):
            return "Slurm is asked once more before the requeue"
        case r.SlurmAsked(about="save"):
            return "Slurm is asked how much time the save has"
        case r.SlurmAsked():
            return "Slurm is asked about it"
        case r.EndedByHand(signal=signal, saves=saves):
            return f"somebody sent SIG{signal} by hand, so the run {'saves and ' if saves else ''}ends"
        case r.Requeued(job_id=None, besides=besides):
            return f"Slurm requeued the job{f'; {besides}' if besides else ''}"
        case r.Requeued(job_id=job_id, besides=besides):
            return f"the job was submitted again as job {job_id}{f'; {besides}' if besides else ''}"
        case r.RequeueFailed(error=error, again_s=None, tries=tries):
            return f"the requeue did not succeed in {tries} tries: {error}"
        case r.RequeueFailed(error=error, again_s=again_s):
            return f"the requeue did not succeed, and is tried again in {again_s:g} s ({error})"
        case r.Requested(by=by, kind=kind):
            return f"{by or 'somebody'} asks {'for a checkpoint' if kind == 'save' else 'to save and end'}"
        case r.SaveRefused(phase=""):
            return "refused: no rank with the trainer library has answered, so none can save"
        case r.SaveRefused(phase=phase):
            return f"refused: no rank trains (the run is {phase})"
        # --- nodes
        case r.NodeFault(node=node, name=name, text=said, gpu=gpu):
            return f"{name} on {node}{f' ({gpu})' if gpu else ''}: {said}"
        case r.NodeIs(node=node, state=state):
            return NODE_IS[state].format(node=node)
        case r.NodesReleased(error=error):
            return f"the nodes that were left {f'stay in the job: {error}' if error else 'are given back'}"
        case r.Suspected(nodes=nodes, rank=None):
            return f"the watchers of {_all(nodes)} are late"
        case r.Suspected(nodes=nodes, rank=rank):
            return f"rank {rank} on {_all(nodes)} does nothing at the first of two looks"
        case r.NodesLost(nodes=nodes, error=error):
            return f"no watcher answers on {_all(nodes)}, so the nodes count as lost{f' ({error})' if error else ''}"
        case r.NodeUnfit(node=node, text=said, again=again):
            return f"{node} is {'still ' if again else ''}not fit: {said}"
        case r.CheckAgain(after_s=0.0):
            return "the nodes are checked again"
        case r.CheckAgain(after_s=after_s):
            return f"the nodes are checked again in {after_s:g} s"
        case r.RestingNodes(nodes=nodes, are=are):
            return f"{RESTING[are]}: {_all(nodes)}"
        case r.IdleNodes(error=error) if error:
            return f"Slurm could not be asked for idle nodes ({error})"
        case r.IdleNodes(idle=idle, missing=missing):
            return f"{idle} nodes like ours are idle, and {missing} are missing"
        case r.BusEnded(code=code, error=error):
            return f"the watchers' Slurm step ended with {code} {error}".rstrip()
        case r.BusTriedAgain(answered=answered, slurm_state=slurm_state, error=error, without=without):
            said = f"Slurm answers ({slurm_state})" if answered else f"Slurm does not answer either ({error})"
            rest = f", without {_all(without)}" if without else ""
            return f"{said}: the training continues, and the watchers are started again{rest}"
        # --- how training goes
        case r.Silent(step=step, starting=starting):
            what = "the trainer library has not answered" if starting else "no rank has completed a step"
            return f"{what} since {_since(step)}, so the stacks of the ranks are collected"
        case r.NoStacks(again=again):
            return f"no stacks came in time{', so they are collected again' if again else ''}"
        case r.StandsStill(step=step, stacks=stacks):
            return f"no progress since {_since(step)}: {stacks or 'no stacks came in time'}"
        case r.StillMoves(stacks=stacks, early=early):
            return f"the ranks {'may still be at work' if early else 'take long, and still move'}: {stacks}"
        case r.LossWrong():
            return _loss(reason)
        case r.NodeSlow(node=node, factor=factor, rank=rank, of_its_place=other):
            who = "its ranks work" if rank is None else f"rank {rank} works"
            said = f"{node} is slow: {who} {factor:.2f} times as long for a step as the others"
            return said + (f"; {other} was slow at the same place, so the work there may be the cause" if other else "")
        case r.LoaderSlow(node=node, rank=rank, loading_s=loading_s, usual_s=usual_s):
            took = f"{loading_s:.3g} s for a step, and {usual_s:.3g} s elsewhere"
            return f"the data loader of rank {rank} on {node} is slow, not the node: it takes {took}"
        case r.SlowNodeStays(its_data=its_data):
            return "the node is not replaced for it" if its_data else "no spare is there to replace the node"
        case r.SpareAtCommit(node=node, now=now):
            return f"a spare takes the place of {node}{'' if now else ' at the next checkpoint'}"
        case r.LaunchSlow():
            return _slow_launch(reason)
        case r.ReplayEqual(steps=steps, exact=True):
            return f"the ranks did {steps} steps again after the resume, with the same losses, bit for bit"
        case r.ReplayEqual(steps=steps, step=furthest, then=then, now=now):
            most = f"that of step {furthest} is {_shown(now)}, and was {_shown(then)}" if furthest is not None else ""
            repeated = f"the ranks did {steps} steps again after the resume, with losses as before"
            return f"{repeated}; {most}" if most else repeated
        case r.ComputedWrongly():
            return _computed_wrongly(reason)
        case r.ReplayDiffers():
            return _replay(reason)
        case _:
            raise LookupError(f"{reason}: it has no words")  # a test asks for those of each kind


def _all(names: Iterable[str]) -> str:
    return ", ".join(names)


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED_MAX} others" if len(names) > NAMED_MAX else ""
    return _all(names[:NAMED_MAX]) + more


def _since(step: int | None) -> str:
    return f"step {step}" if step is not None else "the launch began"


def _cause(said: r.CauseFound) -> str:
    rank = f"rank {said.rank}" if said.rank is not None else ""
    where = _all(part for part in (said.location, rank, said.node) if part)
    at_step = f" at step {said.step}" if said.step is not None else ""
    other = f", else {said.second_cause.value}" if said.second_cause not in (said.cause, Cause.UNKNOWN) else ""
    sure = f"{100 * said.confidence:.0f} %, rule {said.rule}{other}"
    return f"the cause is {said.cause.value}{at_step} ({sure}){f': {where}' if where else ''}"


def _loss(said: r.LossWrong) -> str:
    if said.loss is None or said.baseline is None:
        return f"the loss is no finite number since step {said.step}"
    if said.rule == DISCONTINUITY:
        after = f"the loss after the resume is {said.loss:.4g} since step {said.step}"
        return f"{after}, and was {said.baseline:.4g} before it"
    return f"the loss is {said.loss:.4g}, and was {said.baseline:.4g}, since step {said.step}"


def _slow_launch(said: r.LaunchSlow) -> str:
    if said.new:
        who = f"new in it: {_named(said.new)}"
    elif said.slowest:
        who = f"the slowest node is {said.slowest}: {said.factor:.2f} times as long as the others"
        who += f", for the data of rank {said.rank}" if said.rank is not None else ""
    else:
        who = "all its nodes are new" if said.all_new else "no node of it stands out"
    took = f"{said.seconds:.4g} s a step, and {said.baseline:.4g} s in {said.launches} of them"
    return f"this launch steps slower than those before it: {took}; {who}"


def _replay(said: r.ReplayDiffers) -> str:
    seen = (
        f"the ranks did step {said.step} again after the resume: its loss is {_shown(said.now)}, and was "
        f"{_shown(said.then)} the first time"
    )
    if said.deterministic and said.new:
        return (
            f"{seen}; the run is deterministic, so a device may compute wrongly, on the new node {_named(said.new)} or "
            "the one before; check both with `stepkeeper node check`, and compare a launch without the new one"
        )
    if said.deterministic:
        return (
            f"{seen}; the run is deterministic and its nodes are the same: a device computes wrongly at times, or the "
            "state does not hold all that the losses depend on"
        )
    changed = f"; changed since: {said.changed}" if said.changed else ""
    return f"{seen}{changed}{f'; new nodes: {_named(said.new)}' if said.new else ''}"


def _computed_wrongly(said: r.ComputedWrongly) -> str:
    gpu = f" ({said.gpu})" if said.gpu else ""
    what = f" of {said.what}" if said.what else ""
    return (
        f"rank {said.rank} on {said.node}{gpu} computed a micro-batch twice at step {said.step} and came to other bits"
        f"{what}: its GPU or its node computes wrongly; the newest confirmed step is {said.confirmed}"
    )


def _shown(loss: float | None) -> str:
    return "no finite number" if loss is None else repr(loss)

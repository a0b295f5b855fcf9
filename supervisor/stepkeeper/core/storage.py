"""Whether the storage of the step directories can be trusted: before hours are lost, and once it has lost some.  Pure.

At the start of an attempt a few bytes are saved as a checkpoint is; while that fails, no launch starts, and it is
tried again, less and less often, until `storage_wait_s` is over.  Several damaged step directories in a row are no
accident: the storage is tested thoroughly, and no launch starts on one that fails.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.gates import go_on_starting
from stepkeeper.core.phases import Decision, all_ready, stop
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Reason, Why
from stepkeeper.core.starting import on_checkpoint_chosen
from stepkeeper.core.state import Next, Phase, Plan, State, Timer

NAMED_MAX = 3
ANSWER_MARGIN_S = 10.0  # a test ends by its own limit; its answer needs a moment


def on_chosen(state: State, event: on.CheckpointChosen, policy: Policy) -> Decision:
    """The newest verified step directory is known; where those before it are damaged, so is perhaps the storage."""
    damaged = [skipped.directory for skipped in event.skipped if skipped.damaged]
    if len(damaged) < policy.storage_suspect_after:
        return on_checkpoint_chosen(state, event, policy)
    suspect = because.StorageSuspect(damaged=len(damaged), directories=tuple(damaged[:NAMED_MAX]))
    held = _testing(state, event.at, policy)
    held = replace(held, storage=replace(held.storage, suspect=(suspect,)))
    decision = on_checkpoint_chosen(held, event, policy)
    if decision == Decision(held):
        return Decision(state)  # it changed nothing, nor does this
    if decision.state.phase is not Phase.STARTING:
        return decision  # nothing is started anyway
    test = do.TestStorage(thorough=True)
    why = (*decision.why, suspect, because.Plain(because.Fact.STORAGE_TEST_BEGINS))
    return Decision(decision.state, (*decision.effects, test), why)


def on_run_directory_gone(state: State, event: on.RunDirectoryGone, policy: Policy) -> Decision:
    """Nothing can be saved any more, and no next attempt would find anything: end, whatever was planned."""
    why = (because.RunDirectoryGone(path=event.path),)
    plan = Plan(next=Next.END, why=why, code=ExitCode.RUN_DIRECTORY_GONE)
    return stop(state, event.at, plan, policy)


def _testing(state: State, at: float, policy: Policy) -> State:
    deadline = at + policy.storage_test_within_s + ANSWER_MARGIN_S
    return state.beside(Timer.STORAGE_RETRY, None).beside(Timer.STORAGE_TEST, deadline)


def on_storage_tested(state: State, event: on.StorageTested, policy: Policy) -> Decision:
    """The storage took bytes and gave them back, or it did not."""
    state = state.beside(Timer.STORAGE_TEST, None)
    said: Why = (_result(event),)
    if state.phase is not Phase.STARTING:
        return Decision(state, (), said)
    if not event.ok:
        return _failed(state, event.at, said, policy, untrue=event.untrue)
    if state.storage.suspect and not event.thorough:
        return Decision(_testing(state, event.at, policy), (do.TestStorage(thorough=True),), said)
    passed = state.storage.suspect
    was_held = bool(passed) or state.storage.failing_since is not None
    state = replace(state, storage=replace(state.storage, suspect=(), failing_since=None, tries=0))
    state = state.beside(Timer.STORAGE_RETRY, None)
    if not was_held:
        return Decision(state, (), said)
    if passed:
        said += (because.StorageTrusted(directory=state.resume.directory),)
    if not all_ready(state):
        state = state.waiting(Timer.WATCHERS, event.at + policy.start_within_s)
    return go_on_starting(state, event.at, policy, said)


def _result(event: on.StorageTested) -> Reason:
    if not event.ok:
        return because.StorageTestFailed(problem=event.problem)
    return because.StorageTestPassed(
        bytes=event.bytes, write_s=event.write_s, read_s=event.read_s, from_disk=event.from_disk
    )


def _failed(state: State, at: float, said: Why, policy: Policy, *, untrue: bool) -> Decision:
    """Storage that lies, or is suspect already, ends the run; any other trouble may pass."""
    if state.storage.suspect or untrue:
        why = (*state.storage.suspect, *said)
        return stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.STORAGE), policy)
    since = state.storage.failing_since if state.storage.failing_since is not None else at
    waited = at - since
    if waited >= policy.storage_wait_s:
        why = (*said, because.StorageNotRecovered(waited_s=waited))
        return stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.STORAGE), policy)
    pause = min(policy.storage_retry_max_s, policy.storage_retry_s * 2.0 ** min(state.storage.tries, 30))
    deadline = min(at + pause, since + policy.storage_wait_s)
    storage = replace(state.storage, failing_since=since, tries=state.storage.tries + 1)
    # were the nodes asked already, their answer would start the launch
    state = replace(state, storage=storage).waiting_for_nothing().beside(Timer.STORAGE_RETRY, deadline)
    return Decision(state, (), (*said, because.StorageTestAgain(after_s=deadline - at)))


def on_storage_late(state: State, at: float, policy: Policy) -> Decision:
    """Test it again; a test that did not even end by its own limit has failed."""
    if state.timers.get(Timer.STORAGE_TEST) is not None:
        late = because.Late(timer=Timer.STORAGE_TEST, within_s=policy.storage_test_within_s)
        return _failed(state.beside(Timer.STORAGE_TEST, None), at, (late,), policy, untrue=False)
    return Decision(
        _testing(state, at, policy), (do.TestStorage(),), (because.Plain(because.Fact.STORAGE_TEST_BEGINS),)
    )


# Reading back what was saved, beside training and before it is needed.  Pure.
#
# A step directory that was read back is known to be right at the next start, which then reads nothing; one that is
# wrong is known while the state that it should hold still exists: the ranks are asked to save it once more.

NEWEST, ALL = "newest", "all"
WAITING_MAX = 16  # of `all`: reading that is slower than saving must not fall behind for ever


def from_disk(policy: Policy) -> bool:
    """Tell whether what is read back is read past the page cache."""
    return policy.read_back in (NEWEST, ALL)


def on_commit(state: State, directory: str, policy: Policy) -> Decision:
    """Read a new step directory back, after the one that is being read; of those that wait, perhaps only this."""
    if state.phase is not Phase.TRAINING or not from_disk(policy):
        return Decision(state)
    first, waiting = state.storage.reading_back[:1], state.storage.reading_back[1:]
    waiting = (*waiting, directory)[-WAITING_MAX:] if policy.read_back == ALL else (directory,)
    if first:
        return Decision(replace(state, storage=replace(state.storage, reading_back=(*first, *waiting))))
    return Decision(replace(state, storage=replace(state.storage, reading_back=waiting)), (_read(waiting[0]),))


def _read(directory: str) -> do.VerifyCheckpoint:
    return do.VerifyCheckpoint(directory=directory, from_disk=True)


def on_read_back(state: State, event: on.CheckpointVerified) -> Decision:
    """One is read: go on with the next; where it is wrong, have the state saved once more."""
    waiting = state.storage.reading_back[1:]
    effects: tuple[do.Effect, ...] = (_read(waiting[0]),) if waiting else ()
    state = replace(state, storage=replace(state.storage, reading_back=waiting))
    if event.gone:
        return Decision(state, effects, (because.CheckpointRead(directory=event.directory, result="removed"),))
    if event.ok:
        verified = because.CheckpointRead(directory=event.directory, result="verified")
        return Decision(replace(state, storage=replace(state.storage, read_back_wrong=0)), effects, (verified,))
    state = replace(state, storage=replace(state.storage, read_back_wrong=state.storage.read_back_wrong + 1))
    why: Why = (because.CheckpointRead(directory=event.directory, result="damaged", problem=event.problem),)
    if waiting or state.phase is not Phase.TRAINING or not state.launch.running:
        return Decision(state, effects, why)
    if state.storage.read_back_wrong > 1:  # saving again and again onto bad storage helps nobody
        why += (because.DamagedInARow(count=state.storage.read_back_wrong),)
        return Decision(state, (*effects, do.TestStorage(thorough=True)), why)
    again: Why = (because.Plain(because.Fact.SAVE_AGAIN),)
    return Decision(state, (*effects, do.RequestSave(stop=False, reasons=again)), why + again)

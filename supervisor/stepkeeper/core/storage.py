"""Whether the storage of the step directories can be trusted: before hours are lost, and once it has lost some.  Pure.

At the start of an attempt a few bytes are saved as a checkpoint is; while that fails, no launch starts, and it is
tried again, less and less often, until `storage_wait_s` is over.  Several damaged step directories in a row are no
accident: the storage is tested thoroughly, and no launch starts on one that fails.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.phases import Decision, all_ready, go_on_starting, stop
from stepkeeper.core.policy import Policy
from stepkeeper.core.starting import on_checkpoint_chosen
from stepkeeper.core.state import Next, Phase, Plan, State

ANSWER_MARGIN_S = 10.0  # a test ends by its own limit; its answer needs a moment

replace = msgspec.structs.replace


def on_chosen(state: State, event: on.CheckpointChosen, policy: Policy) -> Decision:
    """The newest verified step directory is known; where those before it are damaged, so is perhaps the storage."""
    damaged = [skipped.directory for skipped in event.skipped if skipped.damaged]
    if len(damaged) < policy.storage_suspect_after:
        return on_checkpoint_chosen(state, event, policy)
    names = ", ".join(damaged[:3])
    why = f"{len(damaged)} committed step directories in a row are damaged ({names}): the storage is suspect"
    held = replace(_testing(state, event.at, policy), suspect=why)
    decision = on_checkpoint_chosen(held, event, policy)
    if decision == Decision(held):
        return Decision(state)  # it changed nothing, nor does this
    if decision.state.phase is not Phase.STARTING:
        return decision  # nothing is started anyway
    test = do.TestStorage(thorough=True)
    return Decision(decision.state, (*decision.effects, test), f"{decision.why}; {why}: it is tested")


def on_run_directory_gone(state: State, event: on.RunDirectoryGone, policy: Policy) -> Decision:
    """Nothing can be saved any more, and no next attempt would find anything: end, whatever was planned."""
    plan = Plan(next=Next.END, why=f"the run directory is gone: {event.path}", code=ExitCode.RUN_DIRECTORY_GONE)
    return stop(state, event.at, plan, policy)


def _testing(state: State, at: float, policy: Policy) -> State:
    return replace(state, testing=True, deadline_at=at + policy.storage_test_within_s + ANSWER_MARGIN_S)


def on_storage_tested(state: State, event: on.StorageTested, policy: Policy) -> Decision:
    """The storage took bytes and gave them back, or it did not."""
    state = replace(state, testing=False)
    said = _in_words(event)
    if state.phase is not Phase.STARTING:
        return Decision(state, (), said)
    if not event.ok:
        return _failed(state, event, said, policy)
    if state.suspect and not event.thorough:
        return Decision(_testing(state, event.at, policy), (do.TestStorage(thorough=True),), said)
    passed = state.suspect
    was_held = bool(passed) or state.storage_since is not None
    state = replace(state, suspect="", storage_since=None, storage_tries=0)
    if not was_held:
        return Decision(state, (), said)
    if passed:
        said += f"; the test finds nothing wrong now: go on with {_name(state.resume_from)}, and watch the storage"
    if not all_ready(state):
        state = replace(state, deadline_at=event.at + policy.start_within_s)
    return go_on_starting(state, event.at, policy, said)


def _name(directory: str | None) -> str:
    return directory.rpartition("/")[2] if directory else "a training from the beginning"


def _in_words(event: on.StorageTested) -> str:
    if not event.ok:
        return f"the storage failed its test: {event.problem}"
    mib = event.bytes / 2**20
    where = "the disk" if event.from_disk else "perhaps its memory"
    return (
        f"the storage took {mib:g} MiB in {event.write_s:.3f} s and gave them back from {where} in {event.read_s:.3f} s"
    )


def _failed(state: State, event: on.StorageTested, said: str, policy: Policy) -> Decision:
    """Storage that lies, or is suspect already, ends the run; any other trouble may pass."""
    if state.suspect or event.untrue:
        why = "; ".join(part for part in (state.suspect, said) if part)
        return stop(state, event.at, Plan(next=Next.END, why=why, code=ExitCode.STORAGE), policy)
    since = state.storage_since if state.storage_since is not None else event.at
    waited = event.at - since
    if waited >= policy.storage_wait_s:
        why = f"{said}; it has not recovered in {waited:.0f} s"
        return stop(state, event.at, Plan(next=Next.END, why=why, code=ExitCode.STORAGE), policy)
    pause = min(policy.storage_retry_max_s, policy.storage_retry_s * 2.0 ** min(state.storage_tries, 30))
    deadline = min(event.at + pause, since + policy.storage_wait_s)
    state = replace(state, storage_since=since, storage_tries=state.storage_tries + 1, deadline_at=deadline)
    state = replace(state, clearing=False)  # were the nodes asked already, their answer would start the launch
    return Decision(state, (), f"{said}; no launch starts on it: it is tested again in {deadline - event.at:.0f} s")


def on_storage_late(state: State, at: float, policy: Policy) -> Decision:
    """Test it again; a test that did not even end by its own limit has failed."""
    if state.testing:
        late = f"its test did not end in {policy.storage_test_within_s:g} s"
        return on_storage_tested(state, on.StorageTested(at=at, ok=False, problem=late), policy)
    return Decision(_testing(state, at, policy), (do.TestStorage(),), "test the storage again")

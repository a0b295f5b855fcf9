"""Reading back what was saved, beside training and before it is needed.  Pure.

A step directory that was read back is known to be right at the next start, which then reads nothing; one that is
wrong is known while the state that it should hold still exists: the ranks are asked to save it once more.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Why
from stepkeeper.core.state import Phase, State

NEWEST, ALL = "newest", "all"
WAITING_MAX = 16  # of `all`: reading that is slower than saving must not fall behind for ever

replace = msgspec.structs.replace


def from_disk(policy: Policy) -> bool:
    """Tell whether what is read back is read past the page cache."""
    return policy.read_back in (NEWEST, ALL)


def on_commit(state: State, directory: str, policy: Policy) -> Decision:
    """Read a new step directory back, after the one that is being read; of those that wait, perhaps only this."""
    if state.phase is not Phase.TRAINING or not from_disk(policy):
        return Decision(state)
    first, waiting = state.reading_back[:1], state.reading_back[1:]
    waiting = (*waiting, directory)[-WAITING_MAX:] if policy.read_back == ALL else (directory,)
    if first:
        return Decision(replace(state, reading_back=(*first, *waiting)))
    return Decision(replace(state, reading_back=waiting), (_read(waiting[0]),))


def _read(directory: str) -> do.VerifyCheckpoint:
    return do.VerifyCheckpoint(directory=directory, from_disk=True)


def on_read_back(state: State, event: on.CheckpointVerified) -> Decision:
    """One is read: go on with the next; where it is wrong, have the state saved once more."""
    waiting = state.reading_back[1:]
    effects: tuple[do.Effect, ...] = (_read(waiting[0]),) if waiting else ()
    state = replace(state, reading_back=waiting)
    if event.gone:
        return Decision(state, effects, (because.CheckpointRemoved(directory=event.directory),))
    if event.ok:
        verified = because.CheckpointVerified(directory=event.directory)
        return Decision(replace(state, read_back_wrong=0), effects, (verified,))
    state = replace(state, read_back_wrong=state.read_back_wrong + 1)
    why: Why = (because.CheckpointDamaged(directory=event.directory, problem=event.problem),)
    if waiting or state.phase is not Phase.TRAINING or not state.running:
        return Decision(state, effects, why)
    if state.read_back_wrong > 1:  # saving again and again onto bad storage helps nobody
        why += (because.DamagedInARow(count=state.read_back_wrong),)
        return Decision(state, (*effects, do.TestStorage(thorough=True)), why)
    again: Why = (because.SaveAgain(),)
    return Decision(state, (*effects, do.RequestSave(stop=False, reasons=again)), why + again)

"""An attempt that ended without a final record: its supervisor was killed, or the node that it lived on was lost.

Nobody could write down which.  The evidence is who had the job run again: Slurm itself does so where a node failed
(NODE_FAIL); else a watcher did, and it is known on which node it was.
"""

from __future__ import annotations

from stepkeeper.core.events import AttemptStarted
from stepkeeper.diagnosis.causes import Cause, Evidence, Plane, Role
from stepkeeper.run_store import lease
from stepkeeper.run_store.paths import RunDirectory


def rescuer(run: RunDirectory, started: AttemptStarted) -> str:
    """Return the node whose watcher requeued the job in an attempt; empty where none did.

    Raises:
        OSError: the file is there and cannot be read.
    """
    attempt = (started.job_id, started.restart_count)
    found = [one.node for one in lease.read_rescues(run.path) if (one.job_id, one.restart_count) == attempt]
    return found[-1] if found else ""


def evidence(started: AttemptStarted, following: AttemptStarted, rescued_by: str) -> list[Evidence]:
    """Return what is known of the end of an attempt that left no record of it.

    Args:
        started: its begin.
        following: the begin of the next one.
        rescued_by: the node whose watcher requeued the job; empty: none did.
    """
    host = started.batch_node
    gone = [node for node in started.nodes if node not in following.nodes]
    node = host if host in gone else (gone[0] if len(gone) == 1 else "")
    missing = f"; {', '.join(gone)} came back to the job no more" if gone else ""
    begin = f"attempt {started.attempt} ended without a final record"
    if rescued_by == host:  # it lives: so does the node
        text = f"{begin}: the watcher on {host} requeued the job, since the supervisor there was gone (killed?)"
        return [_piece("supervisor-gone", Cause.UNKNOWN, 0.5, text, host)]
    if rescued_by:
        text = f"{begin}: the watcher on {rescued_by} requeued the job, since nobody on {host} did{missing}"
        return [_piece("batch-node-gone", Cause.NODE_LOST, 0.9 if host in gone else 0.75, text, host)]
    if (following.job_id, following.restart_count) == (started.job_id, started.restart_count + 1):
        text = f"{begin}, and Slurm requeued the job itself, as it does where a node failed (NODE_FAIL){missing}"
        return [_piece("slurm-requeued-itself", Cause.NODE_LOST, 0.85 if gone else 0.75, text, node)]
    return []  # submitted again, by whom and why ever


def _piece(rule: str, cause: Cause, confidence: float, text: str, node: str) -> Evidence:
    role = Role.CONFIRMATION if cause is Cause.UNKNOWN else Role.ROOT
    return Evidence(plane=Plane.NODE, rule=rule, cause=cause, role=role, confidence=confidence, text=text, node=node)

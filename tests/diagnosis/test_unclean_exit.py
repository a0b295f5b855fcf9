"""An attempt whose supervisor could not say how it ended: what the next one tells of it."""

from __future__ import annotations

import json

import msgspec
import pytest

from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import unclean_exit
from stepkeeper.run_store import lease
from stepkeeper.run_store.paths import RunDirectory
from tests.diagnosis.test_explain import START, explained, write
from tests.reading import build
from tests.reading.conftest import Command, command, run

__all__ = ["command", "run"]  # fixtures of the reading commands
FIRST = on.AttemptStarted(
    at=START, job_id=12, restart_count=0, attempt=0, nodes=("n1", "n2"), batch_node="n1", kill_wait_s=30.0
)


def again(*nodes: str, job_id: int = 12) -> on.AttemptStarted:
    return msgspec.structs.replace(
        FIRST, at=START + 90, job_id=job_id, restart_count=1, attempt=1, nodes=nodes, batch_node=nodes[0]
    )


def silent(run: RunDirectory, following: on.AttemptStarted) -> None:
    """Write an attempt in the middle of a launch, and the begin of the next one."""
    begun = [on.LaunchBegan(at=START + 1, launch=0), on.RankHello(at=START + 2, launch=0, rank=0, node="n1")]
    write(run, [FIRST, *begun])
    write(run, [following], attempt=1)


@pytest.mark.parametrize(
    ("rescued_by", "nodes", "cause", "node"),
    [
        ("", ("n2", "n3"), Cause.NODE_LOST, "n1"),
        ("", ("n1", "n3"), Cause.NODE_LOST, "n2"),
        ("", ("n1", "n2"), Cause.NODE_LOST, ""),
        ("n2", ("n2", "n3"), Cause.NODE_LOST, "n1"),
        ("n1", ("n1", "n2"), Cause.UNKNOWN, "n1"),
    ],
)
def test_who_had_the_job_run_again_tells_what_was_lost(
    rescued_by: str, nodes: tuple[str, ...], cause: Cause, node: str
) -> None:
    (piece,) = unclean_exit.evidence(FIRST, again(*nodes), rescued_by)

    assert (piece.cause, piece.node) == (cause, node)


def test_of_a_job_that_somebody_submitted_again_nothing_is_claimed() -> None:
    assert unclean_exit.evidence(FIRST, again("n1", "n2", job_id=13), "") == []


def test_a_job_that_slurm_requeued_for_a_lost_node_is_explained(command: Command, run: RunDirectory) -> None:
    """Its launch has no end; ranks that were left could only say that others did not answer."""
    silent(run, again("n2", "n3"))
    build.write_log(run, "n2", b"1: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n", 0, 0)

    document = explained(command, run.path)

    assert (document["cause"], document["rule"], document["node"]) == ("node_lost", "slurm-requeued-itself", "n1")
    assert document["otherwise"]["cause"] == "collective_timeout"  # type: ignore[index,call-overload]


def test_a_rescue_by_the_watcher_beside_it_says_that_the_supervisor_was_gone(
    command: Command, run: RunDirectory
) -> None:
    silent(run, again("n1", "n2"))
    rescue = {"at": START + 30, "job_id": 12, "restart_count": 0, "node": "n1"}
    (run.path / lease.RESCUES_NAME).write_text('{"at": 1\n' + json.dumps(rescue) + "\n")

    gone = (
        b'0: watcher_lost why="Connection refused"\n0: rank_lost rank=1 why="[pair.cc:534] Connection closed by peer"\n'
    )
    build.write_log(run, "n1", gone, 0, 0)

    document = explained(command, run.path)

    assert (document["cause"], document["rule"], document["node"]) == ("unknown", "supervisor-gone", "n1")
    assert "the supervisor there was gone" in str(document["message"])
    assert [piece["rule"] for piece in document["evidence"]] == ["supervisor-gone"]  # type: ignore[attr-defined]


def test_what_its_own_logs_say_outweighs_a_node_that_did_not_come_back(command: Command, run: RunDirectory) -> None:
    silent(run, again("n2", "n3"))
    build.write_log(run, "n2", b"1: OSError: [Errno 28] No space left on device\n", 0, 0)

    assert explained(command, run.path)["cause"] == "storage"


def test_a_supervisor_that_heard_of_the_requeue_was_not_lost_with_a_node(command: Command, run: RunDirectory) -> None:
    """Preempted without grace time and killed before it could say so; the next attempt got other nodes."""
    requeued = on.JobFacts(state=on.JobState.COMPLETING, slurm_state="COMPLETING", restarts=1)
    write(run, [FIRST, on.LaunchBegan(at=START + 1, launch=0), on.SlurmAnswered(at=START + 9, job=requeued)])
    write(run, [again("n3", "n4")], attempt=1)

    document = explained(command, run.path)

    assert (document["cause"], document["rule"]) == ("preempted", "slurm-requeued")

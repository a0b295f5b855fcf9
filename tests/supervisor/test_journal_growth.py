"""The journal of a week-long run stays small, however chatty the training is."""

import io

import msgspec
import pytest
import structlog

from stepkeeper.core import events as on
from stepkeeper.core.policy import Policy
from stepkeeper.loop_tools import Clock
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm.launch import Geometry
from stepkeeper.supervisor.actions.launch import Job
from stepkeeper.supervisor.loop import Setting, Supervisor
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper_trainer.formats.lease import Lease
from tests.supervisor.assignments import assigned

DAY_S = 86_400
NODES = ("gpu001", "gpu002")


class SizedJournal:
    """Counts what would be written."""

    def __init__(self):
        self.bytes = 0
        self.records = []
        self.failed = ""

    def flush(self, _within_s):
        return True

    def append(self, record):
        self.bytes += len(msgspec.json.encode(record)) + 1
        self.records.append(record)


@pytest.mark.campaign
def test_a_week_stays_below_100_mb(tmp_path):
    """A step and a checkpoint every second, hellos, a restarted watcher every minute: far more than real runs do."""
    journal = SizedJournal()
    supervisor = make(tmp_path, journal)
    for event in begin():
        supervisor._feed(event)

    for second in range(DAY_S // 4):
        at = 100.0 + second
        save = {"at": at, "launch": 0, "step": second, "save_id": f"{second:032x}"}
        supervisor._feed(
            on.Progressed(at=at, launch=0, step=second, tokens=second * 10**6, loss=1 / 3, step_seconds=0.9)
        )
        supervisor._feed(on.SaveBegan(**save))
        supervisor._feed(on.CheckpointCommitted(**save, directory=f"step_{second:08d}", bytes=10**12, seconds=0.5))
        supervisor._feed(on.RankHello(at=at, launch=0, rank=second % 16, node="gpu001"))

    assert supervisor.state.launch.step == DAY_S // 4 - 1
    assert journal.bytes * 4 * 7 < 100e6, f"{journal.bytes * 4 * 7 / 1e6:.0f} MB a week"
    assert len([r for r in journal.records if isinstance(r.event, on.Progressed)]) >= DAY_S / 4 / 60 - 1


def test_no_environment_and_no_command_in_it(tmp_path):
    """Whoever may read the run directory must not find a token there."""
    journal = SizedJournal()
    supervisor = make(tmp_path, journal, command=("train.py", "--token=sk-secret"), environment={"KEY": "sk-secret"})

    for event in begin():
        supervisor._feed(event)

    assert journal.records
    assert b"sk-secret" not in msgspec.json.encode(journal.records)


def begin():
    """An attempt that comes to the point where its ranks would be started."""
    return [
        on.AttemptStarted(
            at=1.0, job_id=7, restart_count=0, attempt=0, nodes=NODES, batch_node=NODES[0], kill_wait_s=30
        ),
        on.CheckpointChosen(at=2.0, directory=None, step=None),
        *[on.WatcherReady(at=3.0, node=node, bus=1) for node in NODES],
        on.NodesCleared(at=4.0, launch=0, address="gpu001", port=1234),
        on.RankHello(at=5.0, launch=0, rank=0, node="gpu001"),
    ]


def make(directory, journal, command=("false",), environment=None):
    """A supervisor whose acts lead nowhere: there is no srun on its PATH."""
    assignment = assigned(directory, nodes=NODES)
    job = Job(
        command=command, torchrun=False, geometry=Geometry(tasks_per_node=8), run_directory=directory,
        run_id="r", attempt=0, socket=assignment.socket_name(),
    )  # fmt: skip
    return Supervisor(
        setting=Setting(
            directory=RunDirectory(directory),
            assignment=assignment,
            job=job,
            lease=Lease(job_id=7, restart_count=0, attempt=0, node="gpu001", pid=1, taken_at=0.0),
            policy=Policy(),
        ),
        client=None,
        inbox=Inbox(Clock()),
        journal=journal,
        environment={"PATH": str(directory), **(environment or {})},
        log=structlog.wrap_logger(structlog.PrintLogger(io.StringIO())),
    )

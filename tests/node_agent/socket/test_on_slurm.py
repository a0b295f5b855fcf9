"""The socket and a real Slurm: who a job's processes are, and a requeued job that does not wait its 120 s."""

import json
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog

from stepkeeper.node_agent.expedite_requeue import Next, Progress, RequeueRequest, judge_request
from stepkeeper.node_agent.protocol import AgentClient
from stepkeeper.node_agent.server import AgentSocket
from stepkeeper.slurm.client import OwnedJob
from stepkeeper.slurm.nodes import NodeCommands
from tests.lab import Lab
from tests.lab.cluster import PATH
from tests.lab.site import supervisor_python
from tests.node_agent.socket.people import GAMES, NEWS, by, public_directory, until

HASTEN_S = 110.0
SLURMS_OWN_WAIT_S = 30.0  # of 120 s: some of it is over when the job has left COMPLETING, on a busy machine most

ASKER = textwrap.dedent("""\
    import json, os, sys, time
    from stepkeeper.node_agent.protocol import AgentClient, AgentRefusedError

    job, restart = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    def asks(what, *arguments):
        try:
            getattr(client, what)(*arguments)
        except AgentRefusedError as error:
            return error.why
        return "granted"

    client = AgentClient(sys.argv[1])
    asked = [(word, asks(*word)) for word in json.loads(sys.argv[2].replace('"JOB"', str(job)))]
    with open(f"answers-{job}-{restart}.new", "w") as file:
        json.dump([answer for _, answer in asked], file)
    os.rename(file.name, f"answers-{job}-{restart}")
    time.sleep(600)
    """)


@dataclass(frozen=True, slots=True)
class Recorded(NodeCommands):
    """Calls scontrol, and remembers what it was asked to change."""

    changes: list[tuple[str, ...]] = field(default_factory=list)
    seen: list[OwnedJob] = field(default_factory=list)

    def owned_job(self, job_id: int) -> OwnedJob:
        found = super(Recorded, self).owned_job(job_id)  # slots make another class of it
        self.seen.append(found)
        return found

    def expedite(self, job: OwnedJob, exclude: str, after_s: int) -> None:
        self.changes.append(("hasten", str(job.job_id), exclude))
        super(Recorded, self).expedite(job, exclude, after_s)

    def requeue(self, job: OwnedJob) -> None:
        self.changes.append(("requeue", str(job.job_id)))
        super(Recorded, self).requeue(job)


@dataclass
class Node:
    """A lab with the production wait of a requeued job, and the agent's socket of its first node."""

    lab: Lab
    path: str
    client: Recorded
    said: list[dict[str, Any]]

    def asks(self, *words: list[Any], user: str = "games") -> int:
        """Submit a job whose batch process asks the agent; return its id."""
        script = self.lab.workdir(user) / "asker.py"
        script.write_text(ASKER)
        script.chmod(0o644)
        command = [str(supervisor_python()), str(script), self.path, json.dumps(words)]
        quoted = " ".join(f"'{part}'" for part in command)
        return self.lab.submit(
            f"exec {quoted}", sbatch_args=["--requeue", "--mem=100", f"--nodelist={self.lab.node_names[0]}"], user=user
        )

    def answers(self, job_id: int, restart: int = 0, user: str = "games") -> list[str]:
        """Wait for what the job was answered."""
        path = self.lab.workdir(user) / f"answers-{job_id}-{restart}"
        self.lab.until(path.exists, f"{path}: {self.lab.output(job_id)}", 120.0)
        return list(json.loads(path.read_text()))

    def word(self, event: str, job_id: int, within_s: float = 60.0) -> dict[str, Any]:
        """Wait for a line of the agent's log."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.said if line["event"] == event and line.get("job") == job_id]

        until(found, f"{event} of job {job_id}", lambda: self.said, within_s)
        return found()[0]


@pytest.fixture(scope="module")
def node(lab_factory: Callable[..., Lab]) -> Iterator[Node]:
    lab = lab_factory(nodes=2, gpus=0, cred_expire_s=None)
    said: list[dict[str, Any]] = []

    def keep(_: Any, level: str, event: Any) -> Any:
        said.append({"level": level, **event})
        raise structlog.DropEvent

    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[keep])
    client = Recorded(environment={"SLURM_CONF": str(lab.place.conf), "PATH": PATH})
    with public_directory() as directory:
        agent = AgentSocket(
            str(directory / "run" / "agent.sock"),
            node=lab.node_names[0],
            acts=True,
            client=client,
            on_look=lambda: None,
            open_incidents=list,
            log=log,
        )
        agent.start()
        yield Node(lab=lab, path=str(directory / "run" / "agent.sock"), client=client, said=said)
        assert agent.alive
        agent.close()


def test_a_process_of_the_job_joins_by_its_control_group_and_slurm_is_not_asked(node: Node) -> None:
    asked = len(node.client.seen)
    job = node.asks(["join", "JOB", 0])

    assert node.answers(job) == ["granted"]
    by_cgroup = node.lab.place.cgroup_mountpoint is not None and not node.lab.options.linuxproc
    assert node.word("job_joined", job)["by"] == ("control group" if by_cgroup else "Slurm")
    assert (len(node.client.seen) == asked) is by_cgroup
    node.lab.cancel(job)


def test_false_job_ids_and_other_users_jobs_are_refused_inside_a_job_too(node: Node) -> None:
    other = node.asks(["join", "JOB", 0], user="news")
    assert node.answers(other, user="news") == ["granted"]
    job = node.asks(["join", other, 0], ["join", 999_999, 0], ["expedite", other, 0], ["join", "JOB", 0])

    no = f"not a job of yours on {node.lab.node_names[0]}"
    assert node.answers(job) == [no, no, "join with this job first", "granted"]
    node.lab.cancel(job)
    node.lab.cancel(other)


def test_outside_of_every_job_slurms_word_counts(node: Node) -> None:
    job = node.asks(["join", "JOB", 0])
    node.answers(job)

    def joins() -> str:
        with AgentClient(node.path) as client:
            return client.join(job, 0).node

    assert by(GAMES, joins) == node.lab.node_names[0]
    with pytest.raises(AssertionError, match="not a job of yours"):
        by(NEWS, joins)
    node.lab.cancel(job)


def test_a_requeued_job_runs_again_long_before_slurm_would_let_it(node: Node) -> None:
    last = node.lab.node_names[-1]
    job = node.asks(["join", "JOB", 0], ["expedite", "JOB", 0, [last]])
    assert node.answers(job)[1] == "granted"

    node.lab.requeue(job, user="games")
    found = node.lab.wait_job(job, lambda job: job.state == "RUNNING" and job.restarts == 1, HASTEN_S)

    kept_back = [each for each in node.client.seen if each.job_id == job and each.state == "PENDING"]
    assert kept_back[0].eligible_at is not None
    assert found.started_at is not None
    assert kept_back[0].eligible_at - found.started_at.timestamp() > SLURMS_OWN_WAIT_S
    assert node.client.changes.count(("hasten", str(job), last)) == 1
    assert found.excluded == (last,)
    assert node.word("expedite_over", job)["why"] in (
        "the next attempt started: RUNNING",
        "the next attempt has joined",
    )
    node.lab.cancel(job)


@pytest.mark.campaign
def test_a_launch_that_slurm_fails_looks_as_it_is_expected_to(node: Node) -> None:
    """An update to start in this very second can meet the revocation of the credential: half of the tries or so."""
    for _ in range(12):
        job = node.lab.submit("exec sleep 600", sbatch_args=["--requeue", "--mem=100"], user="games")
        node.lab.wait_job(job, "RUNNING")
        node.lab.requeue(job)
        node.lab.wait_job(job, "PENDING")
        node.lab.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        node.lab.wait_job(job, lambda job: job.state != "PENDING")
        time.sleep(0.5)  # it is failed within some milliseconds, if at all
        found = node.client.owned_job(job)
        if found.state == "FAILED":
            break
        node.lab.cancel(job)
    else:
        pytest.skip("Slurm failed none of 12 launches")
    sent = Progress(sent_at=time.time(), sent_restarts=1)

    verdict = judge_request(
        RequeueRequest(job_id=job, uid=GAMES, restart_count=0, exclude=()), sent, found, time.time()
    )

    assert verdict.next is Next.REQUEUE, found
    node.client.requeue(found)
    node.lab.wait_job(job, "PENDING")
    node.lab.cancel(job)


def test_a_cancelled_job_is_left_alone(node: Node) -> None:
    job = node.asks(["join", "JOB", 0], ["expedite", "JOB", 0])
    assert node.answers(job)[1] == "granted"

    node.lab.cancel(job)

    assert node.word("expedite_over", job)["why"] == "it was cancelled"
    assert node.lab.job(job).state == "CANCELLED"
    assert not [change for change in node.client.changes if change[1] == str(job)]


def test_a_job_cancelled_after_its_requeue_is_left_alone(node: Node) -> None:
    job = node.asks(["join", "JOB", 0], ["expedite", "JOB", 0])
    assert node.answers(job)[1] == "granted"

    name = node.lab.node_names[0]
    node.lab.drain(name, "the job must not start again before it is cancelled")  # two commands may take seconds
    try:
        node.lab.requeue(job)
        node.lab.cancel(job)

        assert node.word("expedite_over", job)["why"] == "it was cancelled"
        assert node.lab.wait_ended(job).state == "CANCELLED"
    finally:
        node.lab.undrain(name)


def test_a_held_job_is_left_alone(node: Node) -> None:
    job = node.asks(["join", "JOB", 0], ["expedite", "JOB", 0])
    assert node.answers(job)[1] == "granted"

    node.lab.run("scontrol", "requeuehold", str(job))

    assert node.word("expedite_over", job)["why"] == "it is held"
    assert not [change for change in node.client.changes if change[1] == str(job)]
    node.lab.cancel(job)


def test_a_job_that_is_not_requeued_after_all_goes_on(node: Node) -> None:
    job = node.asks(["join", "JOB", 0], ["expedite", "JOB", 0])
    assert node.answers(job)[1] == "granted"
    asked = len(node.client.seen)

    until(lambda: len([each for each in node.client.seen[asked:] if each.job_id == job]) >= 3, "some questions")

    assert node.lab.job(job).state == "RUNNING"
    assert not [change for change in node.client.changes if change[1] == str(job)]
    node.lab.cancel(job)
    assert node.word("expedite_over", job)["why"] == "it was cancelled"

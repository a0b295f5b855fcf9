"""What every Slurm client must do, on live clusters: this machine's Slurm and the newest, as an ordinary user."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.slurm.client import ClusterSettings, SlurmError
from tests.lab import USERS, Lab, processes
from tests.lab.newest import NOT_BUILT, found
from tests.lab.site import supervisor_python

pytestmark = pytest.mark.slurm
ME, SOMEBODY_ELSE = USERS
GRACE_S = 60
KILL_WAIT_S = 60  # a job that is stubborn completes for so long, unless it is let go
DAY_S = 86_400
NOBODYS_JOB = "424242"
CALL_TAKES_MAX_S = 9.0  # the time limit of a call, 6 s, on a busy machine
DRIVER = Path(__file__).with_name("driver.py")


class ClientOfUser:
    """A client in a process of an ordinary user inside the lab: the real one, seen through a pipe."""

    def __init__(self, lab: Lab, kind: str) -> None:
        self.kind = kind
        # where the user can read it
        driver = lab.workdir(ME) / DRIVER.name
        driver.write_text(DRIVER.read_text())
        driver.chmod(0o644)
        python = str(lab.place.newest.python) if lab.place.newest else ""
        self._process = subprocess.Popen(
            [supervisor_python(), driver, kind, python],
            env=lab.environment(ME),
            cwd=lab.workdir(ME),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **lab.identity(ME),
        )

    def call(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode([method, arguments]).decode() + "\n")
        self._process.stdin.flush()
        answer = msgspec.json.decode(self._process.stdout.readline())
        if "error" in answer:
            raise SlurmError(answer["error"], unreachable=answer["unreachable"])
        return answer["result"]

    def job(self, job: int | str) -> JobFacts:
        return msgspec.convert(self.call("job", str(job)), JobFacts)

    def settings(self) -> ClusterSettings:
        return msgspec.convert(self.call("settings"), ClusterSettings)

    def children(self) -> list[int]:
        path = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def close(self) -> None:
        """End it; what it has started must end by itself."""
        started = self.children()
        self._process.communicate(timeout=60)
        limit = time.monotonic() + 60
        while left := [pid for pid in started if processes.alive(pid)]:
            assert time.monotonic() < limit, f"processes {left} outlive the client"
            time.sleep(0.05)


KINDS = [
    pytest.param(("installed", "commands"), id="installed-commands"),
    pytest.param(("newest", "commands"), id="newest-commands", marks=pytest.mark.newest),
    pytest.param(("newest", "pyslurm"), id="newest-pyslurm", marks=pytest.mark.newest),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> tuple[str, str]:
    if request.param[0] == "newest" and found() is None:
        pytest.skip(NOT_BUILT)
    return request.param


@pytest.fixture(scope="module")
def lab(lab_factory, kind) -> Lab:
    return lab_factory(slurm=kind[0], nodes=3, grace_time_s=GRACE_S, kill_wait_s=KILL_WAIT_S)


@pytest.fixture(scope="module")
def client(lab: Lab, kind) -> Iterator[ClientOfUser]:
    client = ClientOfUser(lab, kind[1])
    yield client
    client.close()


@pytest.fixture
def submit(lab: Lab):
    """Submit a job of an ordinary user; whatever a test submits ends with it."""
    jobs = []

    def put(script: str = "exec sleep 300", *args: str, user: str = ME) -> int:
        jobs.append(lab.submit(script, sbatch_args=["-N1", "--output=/dev/null", *args], user=user))
        return jobs[-1]

    yield put
    for job in jobs:
        lab.run("scancel", str(job), check=False)
    for job in jobs:
        lab.until(lambda job=job: not _holds_nodes(lab, job), f"the end of job {job}", 120)


class Stubborn:
    """A job's script that SIGTERM does not end: only its end or that of KillWait does."""

    def __init__(self, place: Path) -> None:
        self.ready, self.let_go = place / "ready", place / "let-go"
        self.script = f"trap '' TERM; touch {self.ready}; until [ -e {self.let_go} ]; do sleep 0.2; done"

    def running(self, lab: Lab, submit, *args: str) -> int:
        """Submit it, and wait until it bears a signal."""
        job = running(lab, submit, *args, script=self.script)
        lab.until(self.ready.exists, "the job's trap", 120)
        return job


@pytest.fixture
def stubborn(lab: Lab, submit) -> Iterator[Stubborn]:  # noqa: ARG001 - whose jobs end with it
    place = Path(tempfile.mkdtemp(dir=lab.workdir(ME)))
    shutil.chown(place, ME)
    found = Stubborn(place)
    yield found
    found.let_go.touch()


def _holds_nodes(lab: Lab, job: int) -> bool:
    shown = lab.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T", check=False).stdout.split()
    return bool({"RUNNING", "COMPLETING", "SUSPENDED", "PENDING"} & set(shown))


def running(lab: Lab, submit, *args: str, script: str = "exec sleep 300") -> int:
    job = submit(script, *args)
    lab.wait_job(job, "RUNNING")
    lab.batch_pid(job)
    return job


def refused(client: ClientOfUser, method: str, *arguments: Any) -> str:
    """Call what Slurm must refuse; return its words."""
    with pytest.raises(SlurmError) as failure:
        client.call(method, *arguments)
    assert not failure.value.unreachable, failure.value
    return str(failure.value)


# --- the facts of a job ---------------------------------------------------------------------------


def test_a_job_that_waits(client: ClientOfUser, submit) -> None:
    job = submit("true", "--hold", "--job-name=x JobState=RUNNING Restarts=7", "--comment=Requeue=0 two words")
    facts = client.job(job)

    assert (facts.state, facts.slurm_state) == (JobState.PENDING, "PENDING")
    assert facts.reason == "JobHeldUser"
    assert (facts.restarts, facts.preempt_at, facts.requeue_allowed, facts.excluded) == (0, None, True, "")
    assert client.call("job_runs", str(job)) is False


def test_a_job_that_runs_knows_its_end(lab: Lab, client: ClientOfUser, submit) -> None:
    job = running(lab, submit, "--time=10")
    facts = client.job(job)

    assert (facts.state, facts.slurm_state, facts.restarts, facts.preempt_at) == (JobState.RUNNING, "RUNNING", 0, None)
    started = lab.job(job).started_at
    assert started is not None
    assert facts.end_at == pytest.approx(started.timestamp() + 600, abs=1)
    assert client.call("job_runs", str(job)) is True


def test_a_job_without_a_time_limit_has_no_end_that_matters(lab: Lab, client: ClientOfUser, submit) -> None:
    """Slurm shows none, or one in a year."""
    end_at = client.job(running(lab, submit)).end_at

    assert end_at is None or end_at > time.time() + 300 * DAY_S


def test_a_cancelled_job_completes_and_is_over(lab: Lab, client: ClientOfUser, submit, stubborn: Stubborn) -> None:
    job = stubborn.running(lab, submit)

    client.call("cancel", str(job))
    completing = client.job(job)
    holds_nodes = client.call("job_runs", str(job))
    stubborn.let_go.touch()
    lab.wait_ended(job)

    assert (completing.state, completing.restarts, completing.reason) == (JobState.COMPLETING, 0, "None")
    assert holds_nodes is True
    over = client.job(job)
    assert (over.state, over.slurm_state) == (JobState.ENDED, "CANCELLED")
    assert client.call("job_runs", str(job)) is False


def test_a_completed_and_a_failed_job_are_over(lab: Lab, client: ClientOfUser, submit) -> None:
    for script, state in (("true", "COMPLETED"), ("exit 3", "FAILED")):
        job = submit(script)
        lab.wait_ended(job)
        facts = client.job(job)
        assert (facts.state, facts.slurm_state) == (JobState.ENDED, state)


def test_a_requeued_job_counts_one_more_restart_at_once(
    lab: Lab, client: ClientOfUser, submit, stubborn: Stubborn
) -> None:
    job = stubborn.running(lab, submit)

    client.call("requeue", str(job))
    completing = client.job(job)
    stubborn.let_go.touch()
    lab.wait_job(job, "PENDING")
    stubborn.let_go.unlink()
    waiting = client.job(job)
    lab.wait_job(job, "RUNNING", timeout_s=120)

    assert (completing.state, completing.restarts) == (JobState.COMPLETING, 1)
    assert (waiting.state, waiting.restarts) == (JobState.PENDING, 1)
    assert client.job(job).restarts == 1


@pytest.mark.campaign
def test_a_job_at_its_time_limit_says_so_while_it_completes(
    lab: Lab, client: ClientOfUser, submit, stubborn: Stubborn
) -> None:
    """Slurm's shortest limit is a minute; the administrator can move the end nearer."""
    job = stubborn.running(lab, submit, "--time=1")
    lab.run("scontrol", "update", f"JobId={job}", "EndTime=now+1")

    lab.wait_job(job, "COMPLETING", timeout_s=120)
    facts = client.job(job)

    assert (facts.state, facts.reason, facts.restarts) == (JobState.COMPLETING, "TimeLimit", 0)
    stubborn.let_go.touch()
    lab.wait_ended(job)
    assert client.job(job).slurm_state == "TIMEOUT"


def test_a_preempted_job_tells_when_and_how_long_it_has(
    lab: Lab, client: ClientOfUser, submit, stubborn: Stubborn
) -> None:
    job = stubborn.running(lab, submit, "--time=10")
    before = time.time()

    urgent = lab.preempt(job)
    lab.wait_job(job, lambda found: found.preempted_at is not None)
    facts = client.job(job)
    lab.release(urgent)

    assert facts.state is JobState.RUNNING
    assert facts.preempt_at is not None
    assert facts.end_at is not None
    assert before - 1 <= facts.preempt_at <= time.time()
    assert facts.end_at == pytest.approx(facts.preempt_at + GRACE_S, abs=1)


def test_a_job_whose_grace_is_over_is_requeued_by_slurm(lab_factory, kind, stubborn: Stubborn) -> None:
    lab = lab_factory(slurm=kind[0], nodes=1, grace_time_s=0, kill_wait_s=KILL_WAIT_S)
    client = ClientOfUser(lab, kind[1])
    job = lab.submit(stubborn.script, sbatch_args=["-N1", "--output=/dev/null"], user=ME)
    lab.wait_job(job, "RUNNING")
    lab.until(stubborn.ready.exists, "the job's trap", 120)

    urgent = lab.preempt(job)
    lab.wait_job(job, lambda found: found.restarts == 1)
    facts = client.job(job)
    client.call("cancel", str(job))
    stubborn.let_go.touch()
    client.close()
    lab.release(urgent)

    assert (facts.state in (JobState.COMPLETING, JobState.PENDING), facts.restarts) == (True, 1)


def test_a_suspended_job_is_in_no_state_that_decisions_depend_on(lab: Lab, client: ClientOfUser, submit) -> None:
    job = running(lab, submit)

    lab.run("scontrol", "suspend", str(job))
    facts = client.job(job)
    lab.run("scontrol", "resume", str(job))

    assert (facts.state, facts.slurm_state) == (JobState.OTHER, "SUSPENDED")


def test_a_task_of_an_array_is_asked_for_and_requeued_by_its_own_name(lab: Lab, client: ClientOfUser, submit) -> None:
    array = submit("exec sleep 300", "--array=1-2")
    lab.until(lambda: len(_tasks(lab, array, "RUNNING")) == 2, "two tasks", 120)

    client.call("requeue", f"{array}_1")

    assert client.job(f"{array}_1").restarts == 1
    assert (client.job(f"{array}_2").restarts, client.job(f"{array}_2").state) == (0, JobState.RUNNING)
    client.call("cancel", f"{array}_2")
    assert client.job(f"{array}_2").state in (JobState.COMPLETING, JobState.ENDED)


def _tasks(lab: Lab, array: int, state: str) -> Sequence[str]:
    shown = lab.run("squeue", "--noheader", "--array", f"--jobs={array}", "--format=%K %T").stdout.splitlines()
    return [line for line in shown if line.endswith(state)]


# --- what may be asked ----------------------------------------------------------------------------


def test_nodes_are_excluded_one_list_replaces_the_other(lab: Lab, client: ClientOfUser, submit) -> None:
    first, second, third = lab.node_names
    job = submit("true", "--hold")

    for nodes in ([first], [second, third], []):
        client.call("exclude", str(job), nodes)
        excluded = client.job(job).excluded
        assert client.call("hostnames", excluded) == nodes if nodes else excluded == ""
        assert sorted(lab.job(job).excluded) == nodes


def test_a_job_that_runs_gives_back_all_nodes_but_some(lab: Lab, client: ClientOfUser, submit) -> None:
    job = running(lab, submit, "-N3")
    kept = list(lab.job(job).nodes[:2])

    client.call("keep", str(job), kept)

    assert list(lab.job(job).nodes) == kept
    assert client.job(job).state is JobState.RUNNING
    assert not list(lab.workdir(ME).glob("slurm_job_*_resize*"))


def test_a_comment_of_a_job_that_runs_shows(lab: Lab, client: ClientOfUser, submit) -> None:
    job = running(lab, submit)

    client.call("comment", str(job), "stepkeeper:29:CAUSE_STAYS:exception")

    assert "Comment=stepkeeper:29:CAUSE_STAYS:exception" in lab.run("scontrol", "-o", "show", "job", str(job)).stdout


def test_nodes_that_are_drained_are_not_usable(lab: Lab, client: ClientOfUser, submit) -> None:
    job = running(lab, submit)
    drained, *others = lab.node_names

    lab.drain(drained, "a test")
    usable = client.call("usable_nodes", str(job), list(lab.job(job).nodes))
    lab.undrain(drained)

    assert usable == others
    lab.until(lambda: client.call("usable_nodes", str(job)) == lab.node_names, "all nodes", 120)


def test_nodes_like_ours_that_nobody_uses_are_idle(lab: Lab, client: ClientOfUser, submit) -> None:
    job = running(lab, submit)
    ours, drained, *others = [*lab.job(job).nodes, *(n for n in lab.node_names if n not in lab.job(job).nodes)]

    lab.drain(drained, "a test")
    idle = client.call("idle_nodes", str(job), [ours])
    lab.undrain(drained)

    assert idle == others
    assert client.call("idle_nodes", str(job), []) == []
    lab.until(lambda: len(client.call("idle_nodes", str(job), [ours])) == len(lab.node_names) - 1, "all nodes", 120)


def test_node_lists_are_expanded_in_order(client: ClientOfUser) -> None:
    assert client.call("hostnames", "gpu[08-10,2],login") == ["gpu08", "gpu09", "gpu10", "gpu2", "login"]


def test_the_settings_are_those_of_the_cluster(lab: Lab, client: ClientOfUser) -> None:
    version = lab.run("scontrol", "--version").stdout.split()[-1]

    assert client.settings() == ClusterSettings(kill_wait_s=KILL_WAIT_S, version=version, accounting=False)


# --- in place of a requeue ------------------------------------------------------------------------


def test_a_job_is_submitted_again_once_and_waits_for_the_end_of_the_first(lab: Lab, client: ClientOfUser, submit):
    job = running(lab, submit, "--no-requeue", "--time=7", "--ntasks-per-node=2", "--gres=gpu:1", "--mem=100")
    again = client.call("resubmit", str(job), "/tmp/run", 1)
    twice = client.call("resubmit", str(job), "/tmp/run", 1)

    assert (again["found"], twice["found"]) == (False, True)
    assert twice["job_id"] == again["job_id"]
    new, old = lab.job(again["job_id"]).raw, lab.job(job).raw
    alike = ("JobName", "TimeLimit", "NumTasks", "MinMemoryNode", "TresPerNode", "StdOut", "Requeue", "WorkDir")
    assert {key: new[key] for key in alike} == {key: old[key] for key in alike}
    assert new["Reason"] == "Dependency"
    assert new["Dependency"].startswith(f"afterany:{job}")
    client.call("cancel", str(job))
    lab.wait_job(again["job_id"], "RUNNING")
    client.call("cancel", str(again["job_id"]))
    lab.wait_ended(again["job_id"])


def test_a_job_that_slurm_forgot_is_not_submitted_again(client: ClientOfUser) -> None:
    assert "invalid job id" in refused(client, "resubmit", NOBODYS_JOB, "/tmp/run", 1).lower()


# --- what is refused ------------------------------------------------------------------------------


def test_a_job_that_slurm_does_not_know(client: ClientOfUser) -> None:
    assert "invalid job id" in refused(client, "job", NOBODYS_JOB).lower()
    assert client.call("job_runs", NOBODYS_JOB) is False
    refused(client, "requeue", NOBODYS_JOB)


def test_a_job_that_must_not_be_requeued(lab: Lab, client: ClientOfUser, submit) -> None:
    job = running(lab, submit, "--no-requeue")

    assert client.job(job).requeue_allowed is False
    refused(client, "requeue", str(job))
    assert client.job(job).state is JobState.RUNNING


def test_somebody_elses_job_is_left_alone(lab: Lab, client: ClientOfUser, submit) -> None:
    job = submit("exec sleep 300", user=SOMEBODY_ELSE)
    lab.wait_job(job, "RUNNING")

    for method in ("requeue", "cancel"):
        refused(client, method, str(job))

    assert lab.job(job).state == "RUNNING"
    assert lab.job(job).restarts == 0


def test_exclusions_of_a_job_that_runs_are_refused(lab: Lab, client: ClientOfUser, submit) -> None:
    job = running(lab, submit)

    refused(client, "exclude", str(job), [lab.node_names[0]])


# --- when Slurm does not answer -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", "hangs"])
def test_a_controller_that_does_not_answer_costs_no_more_than_the_time_limit(
    lab: Lab, client: ClientOfUser, submit, how: str
) -> None:
    job = running(lab, submit)
    client.job(job)
    if how == "stopped":
        lab.stop_slurmctld()
    else:
        os.kill(_controller(lab), signal.SIGSTOP)

    try:
        began = time.monotonic()
        with pytest.raises(SlurmError) as failure:
            client.job(job)
        took = time.monotonic() - began
    finally:
        if how == "stopped":
            lab.start_slurmctld()
        else:
            os.kill(_controller(lab), signal.SIGCONT)

    assert failure.value.unreachable, failure.value
    assert took < CALL_TAKES_MAX_S or "no answer in" in str(failure.value), "else Slurm's own limit has ended it"
    lab.until(lambda: lab.run("scontrol", "ping", check=False).stdout.count(" UP"), "slurmctld to answer", 120)
    assert client.job(job).state is JobState.RUNNING


def _controller(lab: Lab) -> int:
    pid = lab._daemon_pid("slurmctld")
    assert pid is not None
    return pid


# --- pyslurm alone --------------------------------------------------------------------------------


def test_pyslurms_process_is_started_again_after_it_died(client: ClientOfUser) -> None:
    settings = client.settings()
    if client.kind != "pyslurm":
        assert not client.children(), "Slurm's commands end with their call"
        return
    (child,) = client.children()

    os.kill(child, signal.SIGKILL)

    assert client.settings() == settings
    assert client.children() != [child]


CHOOSE = """
import sys
from stepkeeper.slurm.pyslurm_client import ClientKind, choose

choice = choose(ClientKind.PYSLURM, job=sys.argv[1], python=sys.argv[2])
print(choice.kind, choice.why)
getattr(choice.client, "close", int)()
"""


@pytest.mark.newest
@pytest.mark.parametrize("flavour", ["installed", "newest"])
def test_pyslurm_is_chosen_on_its_own_slurm_and_left_on_another_with_the_reason(lab_factory, flavour: str) -> None:
    """Asked in the job that it is about, as the supervisor would."""
    built = found()
    if built is None:
        pytest.skip(NOT_BUILT)
    lab = lab_factory(slurm=flavour, nodes=3, grace_time_s=GRACE_S, kill_wait_s=KILL_WAIT_S)
    script = lab.workdir(ME) / "choose.py"
    script.write_text(CHOOSE)
    script.chmod(0o644)
    line = shlex.join([str(supervisor_python()), str(script)])
    job = lab.submit(f"{line} $SLURM_JOB_ID {built.python}", sbatch_args=["-N1"], user=ME)

    done = lab.wait_ended(job)

    said = lab.output(job)
    assert done.state == "COMPLETED", said
    assert said.startswith("pyslurm" if flavour == "newest" else "commands"), said
    if flavour == "installed":
        assert "pyslurm does not fit: pyslurm settings" in said

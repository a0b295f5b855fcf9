"""Slurm's own commands: what they print (captured on Slurm 22.05.8), and how they fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands, parse_job, parse_settings

CAPTURED = Path(__file__).parent / "captured"
HOSTILE = "x JobState=COMPLETED UserId=0 Restarts=9"  # the job's name in the captured lines
COMMENT = "Comment=two words Requeue=0 Restarts=7"
PLAIN = "train"


def captured(name: str, job_name: str = PLAIN) -> str:
    text = (CAPTURED / f"{name}.txt").read_text()
    return text.replace(HOSTILE, job_name)


def test_a_running_job():
    assert parse_job(captured("running")) == JobFacts(
        state=JobState.RUNNING,
        slurm_state="RUNNING",
        restarts=0,
        reason="None",
        preempt_at=None,
        end_at=1826772929.0,
        requeue_allowed=True,
    )


def test_a_requeued_job_is_completing_with_one_more_restart():
    facts = parse_job(captured("requeued"))

    assert (facts.state, facts.restarts, facts.end_at) == (JobState.COMPLETING, 1, None)


def test_a_cancelled_job_while_it_completes_and_after():
    assert parse_job(captured("completing")).state is JobState.COMPLETING
    assert parse_job(captured("completing")).requeue_allowed is False
    assert parse_job(captured("cancelled")).state is JobState.ENDED


def test_a_preempted_job():
    text = captured("running").replace("PreemptTime=None", "PreemptTime=1795236990")

    assert parse_job(text).preempt_at == 1795236990.0


@pytest.mark.parametrize(
    "name", ["x JobState=RUNNING", "Requeue=0 Restarts=3", "a  b\tc", "", "UserId=", "PreemptTime=1"]
)
def test_a_name_may_look_like_a_field(name):
    """A job's name is its user's, and may hold anything."""
    assert parse_job(captured("running", name)) == parse_job(captured("running"))


@pytest.mark.parametrize(
    "name", [HOSTILE, "x UserId=0 JobState=CANCELLED", "y UserId=1 JobState=COMPLETING Reason=None"]
)
def test_a_name_may_look_like_the_field_that_follows_it(name):
    assert parse_job(captured("running", name)) == parse_job(captured("running"))


def test_a_comment_may_hold_spaces_and_fields():
    text = captured("running")
    assert COMMENT in text

    facts = parse_job(text)

    assert facts.requeue_allowed
    assert facts.restarts == 0


@pytest.mark.parametrize(
    ("slurm_state", "expected"),
    [
        ("PENDING", JobState.PENDING),
        ("RUNNING", JobState.RUNNING),
        ("COMPLETING", JobState.COMPLETING),
        ("REQUEUED", JobState.PENDING),
        ("REQUEUE_HOLD", JobState.PENDING),
        ("SUSPENDED", JobState.OTHER),
        ("CONFIGURING", JobState.OTHER),
        *(
            (state, JobState.ENDED)
            for state in ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        ),
    ],
)
def test_the_states_of_a_job(slurm_state, expected):
    text = captured("running").replace("JobState=RUNNING", f"JobState={slurm_state}")

    assert parse_job(text).state is expected


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "JobId=7 JobName=x"])
def test_an_unexpected_answer_is_an_error(text):
    with pytest.raises(SlurmError, match="unexpected answer"):
        parse_job(text)


def test_the_settings():
    settings = parse_settings(captured("config"))

    assert (settings.kill_wait_s, settings.version) == (10.0, "22.05.8")


def test_settings_without_kill_wait_are_an_error():
    with pytest.raises(SlurmError, match="KillWait"):
        parse_settings("SLURM_VERSION = 22.05.8\n")


# --- with commands that fail ----------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that puts a command on PATH; what it was called with lands in `calls`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def put(body: str, name: str = "scontrol") -> Path:
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho "$0 $*" >>{tmp_path}/calls\n{body}\n')
        script.chmod(0o755)
        return tmp_path / "calls"

    return put


def test_times_are_asked_for_as_unix_seconds_in_the_c_locale(fake):
    fake(f'test "$SLURM_TIME_FORMAT" = %s && test "$LC_ALL" = C && cat {CAPTURED / "completing.txt"}')

    assert SlurmCommands().job("2").end_at == 1795236932.0


def test_a_call_that_hangs_ends_in_time(fake):
    """Slurm calls hang when the controller is not up."""
    fake("exec sleep 30")
    began = time.monotonic()

    with pytest.raises(SlurmError, match=r"no answer in 0\.2 s") as failure:
        SlurmCommands(call_within_s=0.2).job("7")

    assert failure.value.unreachable
    assert time.monotonic() - began < 20.0, "it did not wait for the command's own end"


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_requeue error: Socket timed out on send/recv operation",
        "scontrol: error: Connection refused",
        "slurm_load_jobs error: Zero Bytes were transmitted or received: Communication connection failure",
    ],
)
def test_a_controller_that_does_not_answer_is_unreachable(fake, said):
    fake(f"echo '{said}' >&2; exit 1")

    with pytest.raises(SlurmError) as failure:
        SlurmCommands().requeue("7")

    assert failure.value.unreachable
    assert said in str(failure.value)


@pytest.mark.parametrize(
    "said", ["Job is pending execution for job 1", "Requested operation is presently disabled for job 2"]
)
def test_a_refusal_is_no_silence(fake, said):
    """Captured: a requeue of a pending job, and of one with --no-requeue."""
    fake(f"echo '{said}' >&2; exit 1")

    with pytest.raises(SlurmError, match=said) as failure:
        SlurmCommands().requeue("1")

    assert not failure.value.unreachable


def test_a_failure_without_a_word_names_its_exit_code(fake):
    fake("exit 3")

    with pytest.raises(SlurmError, match="scontrol requeue 1: exit code 3"):
        SlurmCommands().requeue("1")


def test_no_slurm_at_all(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(SlurmError, match="on PATH"):
        SlurmCommands().settings()


def test_a_job_that_slurm_has_forgotten_does_not_run(fake):
    fake("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")

    assert SlurmCommands().job_runs("99999") is False


def test_whether_a_job_runs_is_unknown_when_slurm_is_silent(fake):
    fake("echo 'Unable to contact slurm controller' >&2; exit 1")

    with pytest.raises(SlurmError):
        SlurmCommands().job_runs("7")


@pytest.mark.parametrize(("name", "runs"), [("running", True), ("completing", True), ("cancelled", False)])
def test_a_job_that_holds_nodes_runs(fake, tmp_path, name, runs):
    (tmp_path / "answer").write_text(captured(name))
    fake(f"cat {tmp_path}/answer")

    assert SlurmCommands().job_runs("7") is runs


def test_what_is_called(fake):
    fake("echo gpu1; echo gpu2")
    calls = fake("exit 0", name="scancel")

    assert SlurmCommands().hostnames("gpu[1-2]") == ("gpu1", "gpu2")
    SlurmCommands().requeue("7")
    SlurmCommands().cancel("7")

    words = [line.partition(" ")[2] for line in calls.read_text().splitlines()]
    assert words == ["show hostnames gpu[1-2]", "requeue 7", "7"]

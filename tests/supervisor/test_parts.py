"""What training can do without may fail: it is reported once, answered, and the supervisor goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.diagnosis import collect
from stepkeeper.loop_tools import Clock, SourceError
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands, parse_submitted
from stepkeeper.supervisor.actions import checkpoints, diagnosis, slurm
from stepkeeper.supervisor.sources.process import ESSENTIAL, Inbox, Part

WITHIN_S = 20.0
Reported = list[tuple[Part, str]]


@pytest.fixture
def reported() -> Reported:
    return []


@pytest.fixture
def inbox(reported: Reported) -> Inbox:
    return Inbox(Clock(), lambda part, _, trace: reported.append((part, trace)))


def events(inbox: Inbox, count: int) -> list[on.Event]:
    found = [inbox.get(WITHIN_S) for _ in range(count)]
    return [each for each in found if each is not None]


def fail() -> None:
    raise ValueError("not a number")


@pytest.mark.parametrize("part", sorted(set(Part) - ESSENTIAL))
def test_an_optional_part_that_fails_is_reported_once_with_its_traceback_and_answered(
    part: Part, inbox: Inbox, reported: Reported
) -> None:
    for _ in range(2):
        inbox.run(part, fail, answer=lambda error: on.IdleNodes(at=0.0, error=error)).join(WITHIN_S)

    failed, *answers = events(inbox, 3)

    assert isinstance(failed, on.PartFailed)
    assert (failed.part, failed.error) == (part.value, "ValueError: not a number")
    assert answers == 2 * [on.IdleNodes(at=0.0, error="ValueError: not a number")]
    assert inbox.get(0.0) is None
    ((said, trace),) = reported
    assert said is part
    assert "in fail" in trace


@pytest.mark.parametrize("part", sorted(ESSENTIAL))
def test_what_training_cannot_do_without_ends_the_supervisor(part: Part, inbox: Inbox) -> None:
    inbox.run(part, fail)

    with pytest.raises(SourceError, match="not a number"):
        inbox.get(WITHIN_S)


def test_a_call_of_the_loop_and_a_thread_of_a_library_are_reported_too(inbox: Inbox, reported: Reported) -> None:
    before = threading.excepthook
    try:
        inbox.watch_threads()
        timer = threading.Timer(0.0, fail)
        timer.start()
        timer.join(WITHIN_S)
    finally:
        threading.excepthook = before
    inbox.guard(Part.METRICS, fail)()

    assert [each.part for each in events(inbox, 2) if isinstance(each, on.PartFailed)] == ["other", "metrics"]
    assert len(reported) == 2


# --- for real -------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, wrapped by a site so that they print what nobody expects."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "scontrol", "squeue", "sinfo"):
        program = programs / name
        program.write_text(
            "#!/bin/sh\necho 'Welcome! Your quota: n/a'\necho 'JobId=x Restarts=many JobState=RUNNING'\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return programs


def test_whatever_a_wrapped_scontrol_prints_the_question_is_answered(inbox: Inbox, site: Path) -> None:
    assert site
    slurm.query_job(SlurmCommands(), "7", inbox=inbox)
    slurm.query_idle_nodes(SlurmCommands(), "7", do.AskIdleNodes(like=("a",)), inbox=inbox)

    found = [each for each in events(inbox, 2) if not isinstance(each, on.PartFailed)]

    assert {type(each) for each in found} <= {on.SlurmAnswered, on.IdleNodes}
    assert any(isinstance(each, on.SlurmAnswered) and each.job is None and each.error for each in found)


@pytest.mark.parametrize(
    ("said", "number"),
    [("4711", 4711), ("4711;cluster\n", 4711), ("Welcome!\n\n 4711;c\nProject a1 has 5 hours left\n", 4711)],
)
def test_the_job_id_is_found_in_what_a_wrapped_sbatch_prints(said: str, number: int) -> None:
    assert parse_submitted(said) == number


@pytest.mark.parametrize("said", ["", "Submitted batch job 4711", "Welcome!\n", "\u0664\u0662"])
def test_without_a_job_id_slurm_is_asked_again_which_finds_the_job(said: str) -> None:
    with pytest.raises(SlurmError) as refused:
        parse_submitted(said)

    assert refused.value.unreachable


def test_a_diagnosis_that_cannot_be_made_is_answered(inbox: Inbox, tmp_path: Path, reported: Reported) -> None:
    """The run directory's name holds a byte that no path may have: nothing there can even be opened."""
    launch = collect.Launch(0, 3, None, (), 0, newest=True)
    diagnosis.diagnose(RunDirectory(Path(f"{tmp_path}/a\0b")), launch, within_s=1.0, inbox=inbox)

    failed, judged = events(inbox, 2)

    assert isinstance(failed, on.PartFailed)
    assert isinstance(judged, on.Judged)
    assert (judged.launch, judged.rule, judged.confidence) == (3, "diagnosis-failed", 0.0)
    assert [part for part, _ in reported] == [Part.DIAGNOSIS]


def test_a_storage_test_that_cannot_be_made_has_failed(inbox: Inbox, tmp_path: Path) -> None:
    checkpoints.test_storage(Path(f"{tmp_path}/a\0b"), do.TestStorage(), within_s=5.0, inbox=inbox).join(WITHIN_S)

    tested = [each for each in events(inbox, 1) if isinstance(each, on.StorageTested)]

    assert [each.ok for each in tested] == [False]

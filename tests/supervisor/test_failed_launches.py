"""What is done about a failed launch: its evidence is gathered, the lineage is led back, a person is called."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import structlog

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.reasons import Finding
from stepkeeper.loop_tools import Clock
from stepkeeper.run_store import lines
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm.client import SlurmError
from stepkeeper.supervisor.actions import checkpoints, diagnosis, notify
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper_trainer.formats import lineage, steps
from stepkeeper_trainer.formats.lease import Lease, write
from stepkeeper_trainer.formats.manifest import Manifest
from stepkeeper_trainer.formats.verify import Verdict
from stepkeeper_trainer.tiers.search import ANCESTORS, counts
from tests.reading import build
from tests.reasons import in_words

WITHIN_S = 90.0
LEASE = Lease(job_id=7, restart_count=0, attempt=1, node="n1", pid=1, taken_at=0.0)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(Clock())


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = build.make_run(tmp_path / "run")
    made.logs(1, 0).mkdir(parents=True)
    return made


# --- why it failed --------------------------------------------------------------------------------


def judged(
    run: RunDirectory, inbox: Inbox, evidence_buffer: diagnosis.EvidenceBuffer, found: Finding | None = None
) -> on.Judged:
    diagnosis.diagnose(
        run, evidence_buffer.launch(do.JudgeLaunch(launch=0, found=found)), within_s=WITHIN_S, inbox=inbox
    )
    event = inbox.get(WITHIN_S)
    assert isinstance(event, on.Judged)
    return event


def evidence_buffer(*events: on.Event) -> diagnosis.EvidenceBuffer:
    """Return one that heard a launch in which rank 1 failed and we killed the other."""
    heard = diagnosis.EvidenceBuffer(1, 1)
    heard.add(on.Tick(at=0), [do.StartLaunch(launch=0, resume_from=None, address="a", port=1)])
    for event in events:
        heard.add(event, [])
    return heard


def exited(rank: int, at: float, **how: int) -> on.RankExited:
    return on.RankExited(at=at, launch=0, rank=rank, node=f"n{rank}", **how)


def test_the_first_rank_that_failed_and_its_log_tell_why(run: RunDirectory, inbox: Inbox) -> None:
    (run.logs(1, 0) / "n1.log").write_text(
        "1: Traceback (most recent call last):\n"
        '1:   File "/w/train.py", line 61, in main\n'
        "1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    (run.path / "metrics.csv").write_text(
        "step,loss,tokens,lr,grad_norm,time,attempt,launch\n1,2.5,8,,,,0,0\n41,2.0,8,,,,1,0\n42,1.9,9,,,,1,0\n"
    )

    said = judged(run, inbox, evidence_buffer(exited(1, 5.0, code=1), on.LaunchEnded(at=6.0, launch=0, code=1)))

    assert (said.cause, said.rank, said.step, said.launch) == (Cause.GPU_MEMORY, 1, 42, 0)
    assert said.location == "OutOfMemoryError at /w/train.py:61 in main"
    assert said.second_cause is Cause.EXCEPTION


def test_a_rank_that_we_killed_ourselves_is_no_evidence(run: RunDirectory, inbox: Inbox) -> None:
    """Else every end of ours would look like a lack of memory."""
    ours, others = diagnosis.EvidenceBuffer(1, 1), diagnosis.EvidenceBuffer(1, 1)
    for heard, kill in ((ours, [do.KillRanks(launch=0, reasons=in_words("late"))]), (others, [])):
        heard.add(on.Tick(at=4.0), kill)
        heard.add(exited(1, 5.0, signal=9), [])

    assert judged(run, inbox, ours).rule == "no-evidence"
    assert judged(run, inbox, others).rule == "exit-killed"


def test_what_the_rules_saw_is_evidence(run: RunDirectory, inbox: Inbox) -> None:
    found = Finding(
        cause=Cause.HANG, rule="progress-silence", reasons=in_words("rank 1 sleeps"), rank=1, node="n1", step=33
    )

    said = judged(run, inbox, evidence_buffer(), found)

    assert (said.cause, said.rank, said.node, said.step) == (Cause.HANG, 1, "n1", 33)
    assert said.confidence >= 0.85


def test_the_first_wrong_loss_counts_and_not_the_first_word_of_it(run: RunDirectory, inbox: Inbox) -> None:
    """Words are one a second, rows one a step."""
    rows = "".join(f"{step},{'nan' if step >= 40 else 2.0},,,,,1,0\n" for step in range(30, 60))
    (run.path / "metrics.csv").write_text("step,loss,tokens,lr,grad_norm,time,attempt,launch\n" + rows)
    found = Finding(cause=Cause.NUMERICAL, rule="loss-not-finite", reasons=in_words("no number"), step=43)

    said = judged(run, inbox, evidence_buffer(), found)

    assert (said.cause, said.rule, said.step) == (Cause.NUMERICAL, "loss-not-finite", 40)


def test_torchs_error_files_are_read(run: RunDirectory, inbox: Inbox) -> None:
    errors = run.logs(1, 0) / "errors"
    errors.mkdir()
    stack = 'Traceback (most recent call last):\n  File "/w/data.py", line 7, in get\n    x\nKeyError: 5\n'
    document = {"message": {"message": "KeyError: 5", "extraInfo": {"py_callstack": stack, "timestamp": "5"}}}
    (errors / "rank-3.json").write_text(json.dumps(document))

    said = judged(run, inbox, evidence_buffer())

    assert (said.cause, said.rank, said.location) == (Cause.EXCEPTION, 3, "KeyError at /w/data.py:7 in get")


def test_logs_that_cannot_be_read_leave_the_rest_of_the_evidence(run: RunDirectory, inbox: Inbox) -> None:
    (run.logs(1, 0) / "n1.log").symlink_to("/nowhere")
    (run.path / "metrics.csv").mkdir()

    said = judged(run, inbox, evidence_buffer(exited(1, 5.0, signal=11)))

    assert said.cause is Cause.SEGFAULT


def test_of_a_thousand_nodes_those_that_failed_are_read_first(
    run: RunDirectory, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what there is no time to read is left: by this clock, all but the first."""
    seconds = itertools.count()
    monkeypatch.setattr(diagnosis, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for node in range(300):
        (run.logs(1, 0) / f"n{node}.log").write_bytes(b"0: waiting for the others, as ever\n" * 4000)
    with (run.logs(1, 0) / "n299.log").open("a") as file:
        file.write("299: torch.OutOfMemoryError: CUDA out of memory.\n")
    heard = evidence_buffer(exited(299, 5.0, code=1))

    diagnosis.diagnose(run, heard.launch(do.JudgeLaunch(launch=0)), within_s=1 / diagnosis.READING_SHARE, inbox=inbox)
    said = inbox.get(WITHIN_S)

    assert isinstance(said, on.Judged)
    assert said.cause is Cause.GPU_MEMORY
    assert next(seconds) == 3, "the start, and a look before each of two files"


def test_a_fault_just_before_the_launch_belongs_to_it_and_old_events_do_not() -> None:
    heard = diagnosis.EvidenceBuffer(1, 1)
    for at in (10.0, 1000.0):
        fault = on.NodeFaulted(at=at, node="n1", incident="i", name="XID 79", action="a", leave=True, why="lost")
        heard.add(fault, [])
    heard.add(exited(1, 1001.0, code=1), [])
    heard.add(on.Tick(at=1050.0), [do.StartLaunch(launch=0, resume_from=None, address="a", port=1)])

    assert [event.at for event in heard.launch(do.JudgeLaunch(launch=0)).events] == [1000.0]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("", None),
        ("5,2.0,,,,,1,0\n", None),
        ("5,2.0,,,,,1,2\n", lines.Ended(5, None)),
        ("5,2.0,,,,,1,2\n6,nan,,,,,1,2\n7,inf,,,,,1,2\n", lines.Ended(7, 6)),
        ("5,2.0,,,,,1,2\nx,,\n6,,,,,,1,2\n", lines.Ended(6, None)),
    ],
)
def test_how_far_a_launch_came(tmp_path: Path, rows: str, expected: lines.Ended | None) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss,tokens,lr,grad_norm,time,attempt,launch\n" + rows)

    assert lines.ended_at(tmp_path, 1, 2) == expected


def test_of_a_long_runs_metrics_only_the_end_is_read(tmp_path: Path) -> None:
    with (tmp_path / "metrics.csv").open("w") as file:
        file.write("step,loss,tokens,lr,grad_norm,time,attempt,launch\n")
        file.writelines(f"{step},2.0,{step},0.001,1.0,1790000000.0,1,2\n" for step in range(100_000))

    assert lines.ended_at(tmp_path, 1, 2) == lines.Ended(99_999, None)
    assert lines.ended_at(tmp_path / "none", 1, 2) is None


# --- going back -----------------------------------------------------------------------------------


def rolled(run: RunDirectory, inbox: Inbox, below: int, *, suspect: bool = False, quick: bool = False) -> object:
    why = in_words("cause segfault at step 350")
    effect = do.RollBack(launch=3, below_step=below, reasons=why, suspect=suspect, quick=quick)
    checkpoints.roll_back(run.checkpoints, effect, LEASE, inbox=inbox)
    return inbox.get(WITHIN_S)


def test_the_lineage_leads_to_the_step_before(run: RunDirectory, inbox: Inbox) -> None:
    directories = build.make_steps(run)

    event = rolled(run, inbox, 300)

    assert isinstance(event, on.RolledBack)
    assert (event.launch, event.step, event.directory, event.error) == (3, 200, str(directories[1]), "")
    chosen = steps.newest_verified(run.checkpoints).chosen
    assert chosen is not None
    assert chosen.path == directories[1]
    assert directories[2].exists(), "nothing is deleted"


def test_steps_within_an_anomaly_are_marked(run: RunDirectory, inbox: Inbox) -> None:
    build.make_steps(run)

    rolled(run, inbox, 150, suspect=True)

    told = lineage.read(run.checkpoints)
    assert told is not None
    assert [save for save, marks in sorted(told.marks.items()) if lineage.SUSPECT in marks] == [
        "00000001-save",
        "00000002-save",
    ]


def test_without_an_older_step_nothing_is_thrown_away(run: RunDirectory, inbox: Inbox) -> None:
    build.make_steps(run)

    event = rolled(run, inbox, 100)

    assert isinstance(event, on.RolledBack)
    assert "older than step 100" in event.error
    assert steps.newest_verified(run.checkpoints).chosen is not None


@pytest.mark.parametrize("below", [201, 50])
def test_steps_that_cannot_be_read_just_now_stay_in_the_lineage(
    run: RunDirectory, inbox: Inbox, monkeypatch: pytest.MonkeyPatch, below: int
) -> None:
    directories = build.make_steps(run)

    def unreadable(path: Path, **_: object) -> Verdict:
        return Verdict(path, (f"{path}: Stale file handle",), 0)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "verify", unreadable)
        event = rolled(run, inbox, below)

    assert isinstance(event, on.RolledBack)
    assert f"older than step {below}" in event.error
    assert ("Stale file handle" in event.error) == (below == 201)
    chosen = steps.newest_verified(run.checkpoints).chosen
    assert chosen is not None
    assert chosen.path == directories[-1]


def test_with_no_whole_step_the_lineage_leads_to_the_very_start_and_no_tier_has_anything_newer(
    run: RunDirectory, inbox: Inbox
) -> None:
    held = manifest(build.make_steps(build.make_run(run.path.with_name("tier")), 1)[0])
    in_a_tier = msgspec.structs.replace(held, state={ANCESTORS: [None]})
    assert counts(in_a_tier, lineage.read(run.checkpoints))

    event = rolled(run, inbox, 21, suspect=True)

    assert isinstance(event, on.RolledBack)
    assert (event.directory, event.step, event.error) == (None, None, "")
    told = lineage.read(run.checkpoints)
    assert told is not None
    assert told.head is None
    assert not counts(in_a_tier, told)


def test_where_the_job_leaves_no_bytes_are_read_and_who_resumes_reads_them(run: RunDirectory, inbox: Inbox) -> None:
    first, second, _ = build.make_steps(run)
    flip(second)

    event = rolled(run, inbox, 300, quick=True)

    assert isinstance(event, on.RolledBack)
    assert event.step == 200
    choice = steps.newest_verified(run.checkpoints)
    assert choice.chosen is not None
    assert choice.chosen.path == first, "300 is left out, and 200 is damaged"


def manifest(directory: Path) -> Manifest:
    found = steps.open_step(directory).manifest
    assert found is not None
    return found


def flip(directory: Path) -> None:
    """Change a byte of a step, and nothing that a look at names and sizes sees."""
    [file] = sorted(directory.glob("__0_0.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)


def test_a_superseded_supervisor_leaves_the_lineage_alone(run: RunDirectory, inbox: Inbox) -> None:
    build.make_steps(run)
    write(run.path, Lease(job_id=7, restart_count=1, attempt=2, node="n1", pid=1, taken_at=1.0))

    assert isinstance(rolled(run, inbox, 300), on.Superseded)
    chosen = steps.newest_verified(run.checkpoints).chosen
    assert chosen is not None
    assert chosen.step == 300


def test_a_supervisor_that_is_superseded_while_it_reads_leaves_the_lineage_alone(
    run: RunDirectory, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.make_steps(run)
    read = steps.newest_verified

    def reads_for_long(*arguments: object, **options: object) -> object:
        chosen = read(*arguments, **options)  # type: ignore[arg-type]
        write(run.path, Lease(job_id=7, restart_count=1, attempt=2, node="n1", pid=1, taken_at=1.0))
        return chosen

    monkeypatch.setattr(checkpoints.steps, "newest_verified", reads_for_long)

    assert isinstance(rolled(run, inbox, 300), on.Superseded)
    chosen = read(run.checkpoints).chosen
    assert chosen is not None
    assert chosen.step == 300


# --- calling a person -----------------------------------------------------------------------------


class Slurm:
    """A controller that takes comments."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.comments: list[tuple[str, str]] = []

    def comment(self, job: str, text: str) -> None:
        if self.error:
            raise SlurmError(self.error)
        self.comments.append((job, text))


def called(slurm: Slurm, inbox: Inbox, command: str | None, within_s: float = WITHIN_S) -> dict[str, dict[str, object]]:
    """Call a person, and return what the log says."""
    events: dict[str, dict[str, object]] = {}

    def keep(_: object, __: str, event: structlog.typing.EventDict) -> str:
        name = event.pop("event")
        events[name] = dict(event)
        raise structlog.DropEvent

    thread = notify.notify_user(
        do.NotifyUser(code=29, reasons=in_words("ValueError: token=abcdefghijklmnop"), cause=Cause.EXCEPTION),
        notify.Call(job="7", run_directory="/r", command=command, within_s=within_s),
        client=slurm,
        environment={"PATH": "/usr/bin:/bin"},
        inbox=inbox,
        log=structlog.wrap_logger(structlog.PrintLogger(), processors=[keep]),
    )
    thread.join(WITHIN_S)
    assert not thread.is_alive()
    return events


def test_the_comment_is_a_code_and_the_command_hears_the_reason(inbox: Inbox) -> None:
    slurm = Slurm()
    command = (
        'echo "$STEPKEEPER_JOB_ID $STEPKEEPER_EXIT_CODE $STEPKEEPER_CAUSE $STEPKEEPER_RUN_DIR: $STEPKEEPER_REASON"'
    )

    events = called(slurm, inbox, command)

    assert slurm.comments == [("7", "stepkeeper:29:CAUSE_STAYS:exception")]
    said = str(events["notified"]["said"])
    assert said.startswith("7 29 exception /r: ValueError")
    assert "abcdefghijklmnop" not in said, "no secret leaves"


def test_nothing_about_calling_is_fatal(inbox: Inbox) -> None:
    events = called(Slurm("away"), inbox, "echo no mail; exit 3")

    assert events["job_comment_not_set"] == {"error": "away"}
    assert events["notify_command_failed"] == {"code": 3, "said": "no mail"}
    assert called(Slurm(), inbox, None) == {}


def test_a_command_that_hangs_is_ended_with_all_that_it_started(inbox: Inbox) -> None:
    began = time.monotonic()

    events = called(Slurm(), inbox, "sleep 600 & sleep 600", within_s=0.5)

    assert time.monotonic() - began < WITHIN_S
    assert events["notify_command_failed"]["code"] == "too slow: killed"

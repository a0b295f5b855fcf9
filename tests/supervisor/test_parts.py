"""What training can do without may fail: it is reported once, answered, and the supervisor goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.diagnosis import collect
from stepkeeper.loop_tools import Clock, SourceError
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands, parse_submitted
from stepkeeper.supervisor.actions import checkpoints, diagnosis, launch, slurm
from stepkeeper.supervisor.actions.foreign import End
from stepkeeper.supervisor.sources.process import ESSENTIAL, Inbox, Part
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher.channel import Channel
from stepkeeper_trainer.formats import messages as words
from tests.supervisor.test_journal_growth import NODES, SizedJournal, begin, make

WITHIN_S = 20.0
Reported = list[tuple[str, str]]


@pytest.fixture
def reported() -> Reported:
    return []


@pytest.fixture
def inbox(reported: Reported) -> Inbox:
    return Inbox(Clock(), lambda part, _, trace: reported.append((part, trace)))


def events(inbox: Inbox, count: int) -> list[on.Event]:
    found = [inbox.get(WITHIN_S) for _ in range(count)]
    return [each for each in found if each is not None]


def fail() -> on.Event:
    raise ValueError("not a number")


@pytest.mark.parametrize("part", sorted(set(Part) - ESSENTIAL))
def test_an_optional_part_that_fails_is_reported_once_with_its_traceback_and_answered(
    part: Part, inbox: Inbox, reported: Reported
) -> None:
    for _ in range(2):
        inbox.ask(part, fail, lambda error: on.IdleNodes(at=0.0, error=error)).join(WITHIN_S)

    failed, *answers = events(inbox, 3)

    assert isinstance(failed, on.PartFailed)
    assert (failed.part, failed.error) == (part.value, "ValueError: not a number")
    assert answers == 2 * [on.IdleNodes(at=0.0, error="ValueError: not a number")]
    assert inbox.get(0.0) is None
    ((said, trace),) = reported
    assert said == part
    assert "in fail" in trace


def test_what_the_world_does_wrong_is_answered_and_no_failure_of_a_part(inbox: Inbox, reported: Reported) -> None:
    inbox.ask(Part.ASK_SLURM, fail, lambda error: on.IdleNodes(at=0.0, error=error), expected=(ValueError,)).join(
        WITHIN_S
    )

    assert events(inbox, 1) == [on.IdleNodes(at=0.0, error="not a number")]
    assert inbox.get(0.0) is None
    assert not reported


@pytest.mark.parametrize("part", sorted(ESSENTIAL))
def test_what_training_cannot_do_without_ends_the_supervisor(part: Part, inbox: Inbox) -> None:
    inbox.run(part, fail)

    with pytest.raises(SourceError, match="not a number"):
        inbox.get(WITHIN_S)


@pytest.fixture
def hook() -> Iterator[None]:
    before = threading.excepthook
    yield
    threading.excepthook = before


@pytest.mark.usefixtures("hook")
def test_a_call_of_the_loop_and_a_thread_of_a_library_are_reported_too(inbox: Inbox, reported: Reported) -> None:
    inbox.watch_threads(Part.OTHER)
    timer = threading.Timer(0.0, fail)
    timer.start()
    timer.join(WITHIN_S)
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


def test_a_clock_that_cannot_be_followed_changes_nothing(reported: Reported) -> None:
    class Broken(Clock):
        def slurm_set(self, slurm_now: float | None) -> float:
            raise ValueError(slurm_now)

    inbox = Inbox(Broken(), lambda part, _, trace: reported.append((part, trace)))
    slurm.ask_time(inbox=inbox).join(WITHIN_S)

    assert [each.part for each in events(inbox, 1) if isinstance(each, on.PartFailed)] == ["slurms-time"]


# --- a whole supervisor, a part of which fails whenever it is used --------------------------------


class Broken:
    """Every call fails; so does every look at it."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == "failed":
            raise ValueError("what became of the journal is not known")

        def call(*_: object, **__: object) -> object:
            raise ValueError(f"{name} is broken")

        return call


# says who is ready, and what goes to the log; then it hears no more
SRUN = """#!/bin/sh
printf '%s' "$WORDS"
while read -r line; do :; done
"""


def play(directory: Path, **parts: object) -> int:
    """Return how a supervisor ends whose watchers say all that is only logged, and which another one replaces."""
    said = [lines.Ready(node=node, pid=1, version="1") for node in NODES]
    noted = [
        lines.Note(node=NODES[0], text="hot"),
        lines.StopSignalSent(node=NODES[0], launch=0, text="has no handler"),
    ]
    srun = directory / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    output = b"".join(map(lines.encode, [*said, *noted])).decode()
    supervisor = make(directory, SizedJournal(), environment={"WORDS": output})
    for name, part in parts.items():
        setattr(supervisor.decision_log if name.startswith("_") else supervisor, name, part)
    inbox, ready = supervisor.inbox, threading.Event()

    def superseded() -> None:
        ready.wait(WITHIN_S)
        inbox.put(on.Superseded(at=inbox.clock.now(), by_job_id=8, by_restart_count=0))

    receive = supervisor._note_stop_signal
    supervisor._note_stop_signal = lambda word: (receive(word), ready.set())  # type: ignore[assignment,func-returns-value]
    started = begin()[0]
    inbox.put(msgspec.structs.replace(started, at=inbox.clock.now()))
    threading.Thread(target=superseded, daemon=True).start()
    return supervisor.run()


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(
    "parts",
    [{}, {"log": Broken(), "_log": Broken()}, {"_journal": Broken()}, {"standbys": Broken()}],
    ids=["nothing", "log", "journal", "standbys"],
)
def test_a_supervisor_outlives_its_log_its_journal_and_its_standbys(parts: dict[str, object], tmp_path: Path) -> None:
    assert play(tmp_path, **parts) == ExitCode.SUPERSEDED


def test_a_log_that_fails_reports_on_stderr(inbox: Inbox, capsys: pytest.CaptureFixture[str]) -> None:
    inbox.report = Broken().report  # type: ignore[assignment]

    inbox.guard(Part.METRICS, fail)()

    assert [each.part for each in events(inbox, 1) if isinstance(each, on.PartFailed)] == ["metrics"]
    assert "metrics failed: ValueError('not a number')" in capsys.readouterr().err


def test_a_launch_ends_though_its_frameworks_checkpoints_and_old_logs_cannot_be_looked_at(
    tmp_path: Path, reported: Reported
) -> None:
    """The run directory's name holds a byte that no path may have, from the end of the launch on."""

    class Foreign:
        def note_launch(self, *given: object) -> None:
            raise ValueError(f"{given}: nobody has foreseen this launch")

        repair = note_launch

        def convert(self, name: str | None, *_: object) -> str | None:
            return name

        def end(self, code: int, *, resumed_from: str | None) -> End:
            raise ValueError(f"{code}, {resumed_from}: nobody has foreseen this checkpoint")

    inbox = Inbox(Clock(), lambda part, _, trace: reported.append((part, trace)))
    job = make(tmp_path, SizedJournal(), command=("srun", "true")).setting.job
    meeting = launch.Meeting(launch=0, nodes=NODES, address="a", port=1, resume_from=None)
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    launch.Launch(job, meeting, {"PATH": str(tmp_path)}, inbox=inbox, foreign=Foreign())  # type: ignore[arg-type]

    found = events(inbox, 2)

    assert {type(each) for each in found} == {on.PartFailed, on.LaunchEnded}
    assert [(each.code, each.finished) for each in found if isinstance(each, on.LaunchEnded)] == [(1, False)]
    assert [part for part, _ in reported] == [Part.FRAMEWORK], "one line, however often"


def test_a_launch_ends_whose_checkpoint_cannot_be_prepared(tmp_path: Path, reported: Reported) -> None:
    class Foreign:
        def note_launch(self, *_: object) -> None:
            """Nothing is noted."""

        def convert(self, *_: object) -> str:
            raise ValueError("nobody has foreseen this checkpoint")

    inbox = Inbox(Clock(), lambda part, _, trace: reported.append((part, trace)))
    job = make(tmp_path, SizedJournal(), command=("srun", "true")).setting.job
    meeting = launch.Meeting(launch=0, nodes=NODES, address="a", port=1, resume_from="/x/step-5")
    launch.Launch(job, meeting, {"PATH": str(tmp_path)}, inbox=inbox, foreign=Foreign())  # type: ignore[arg-type]

    (ended,) = [each for each in events(inbox, 2) if isinstance(each, on.LaunchEnded)]

    assert ended.code == 1
    assert "could not be prepared" in ended.error
    assert "nobody has foreseen this checkpoint" in ended.error
    assert [part for part, _ in reported] == [Part.FRAMEWORK]


# --- a message that is too long -------------------------------------------------------------------


@pytest.mark.parametrize("why", ["x" * 4000, '\u2028\0"' * 900, "\U0001f525" * 700])
@pytest.mark.parametrize("kind", ["save", "faulted", "rank"])
def test_a_message_that_is_too_long_is_cut_where_it_is_longest_and_reported(why: str, kind: str) -> None:
    message: lines.ToWatcher | lines.FromWatcher = {
        "save": lines.Save(launch=3, request_id=7, stop=True, why=why),
        "faulted": lines.Faulted(node="n1", incident="i", name="XID 79", action="drain", leave=True, why=why),
        "rank": lines.Rank(node="n1", message=words.SaveFailed(launch="0.3", step=7, save_id="s", error=why)),
    }[kind]
    cut: list[str] = []

    line = lines.encode(message, on_cut=cut.append)

    assert lines.LINE_BYTES_MAX - 6 < len(line) <= lines.LINE_BYTES_MAX
    assert line.endswith(b"\n")
    heard = lines.decode_to_watcher(line) if kind == "save" else lines.decode_from_watcher(line)
    assert type(heard) is type(message)
    assert repr(heard)[:40] == repr(message)[:40]
    assert len(cut) == 1
    assert "it was cut" in cut[0]


def test_a_message_of_too_many_numbers_is_reported_and_nothing_is_said() -> None:
    class Many(msgspec.Struct, tag_field="type"):
        numbers: list[int]

    assert words.fitted(Many(list(range(1000))), 100) == (
        b"{}", "a message Many had 3917 bytes and may have 100: it was not sent"
    )  # fmt: skip


def test_a_watcher_tells_of_a_line_that_it_had_to_cut() -> None:
    reader, writer = os.pipe()
    try:
        channel = Channel(writer, "n1")
        channel.put(lines.Faulted(node="n1", incident="i", name="XID 79", action="drain", leave=True, why="x" * 4000))
        said = [lines.decode_from_watcher(line) for line in os.read(reader, 9000).splitlines()]
    finally:
        os.close(reader)
        os.close(writer)

    assert [type(each) for each in said] == [lines.Faulted, lines.Note]
    assert isinstance(said[1], lines.Note)
    assert "Faulted had " in said[1].text

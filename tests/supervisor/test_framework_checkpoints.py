"""The supervisor's choice among checkpoints of another framework, and what they tell of a launch's end."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path

import msgspec
import pytest
import structlog

from stepkeeper.cli import attempt
from stepkeeper.config.settings import RunSettings
from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.doctor.rules import examine_command
from stepkeeper.frameworks import choosing, recognise
from stepkeeper.frameworks.adapters.generic import Generic, Patterns
from stepkeeper.frameworks.following import Following, follow
from stepkeeper.frameworks.framework import WorldChange
from stepkeeper.frameworks.recognise import Finding
from stepkeeper.frameworks.script import Script
from stepkeeper.loop_tools import Clock
from stepkeeper.slurm.launch import Geometry
from stepkeeper.supervisor.actions import checkpoints as acts
from stepkeeper.supervisor.actions import foreign as module
from stepkeeper.supervisor.actions.foreign import End, ForeignCheckpoints
from stepkeeper.supervisor.actions.launch import Job, Launch, Meeting
from stepkeeper.supervisor.actions.verify_pool import Limits, VerifyPool
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper_trainer.formats import lease, records
from stepkeeper_trainer.formats.durable import append_line
from stepkeeper_trainer.formats.reading import Reading

WITHIN_S = 120.0
PATTERNS = Patterns(steps="ckpt-{step}", complete=("DONE",), resume=("--from", "{path}", "--at", "{step}"))
HOW = choosing.How(environment={}, deep=False, cached=False, world_size=None, reading=Reading(bytes_per_s=None))


class Case:
    """Checkpoints below a directory, and the supervisor's part that looks at them."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        repairs: lease.Lease | None = None,
        command: tuple[str, ...] = (),
        attached: bool = False,
        **more: object,
    ) -> None:
        self.root = tmp_path / "out"
        self.own = tmp_path / "run" / "checkpoints"
        self.inbox = Inbox(Clock())
        values = {"framework": "generic", "patterns": PATTERNS, "directory": self.root, **more}
        following = Following(title="generic", why="test", where="test", **values)  # type: ignore[arg-type]
        environment = {**os.environ, "HOME": str(tmp_path / "home")}
        environment.pop("XDG_STATE_HOME", None)
        self.run = tmp_path / "run"
        self.run.mkdir(exist_ok=True)
        self.tmp_path, self.more = tmp_path, more
        self.foreign = ForeignCheckpoints(
            following,
            environment,
            run_directory=self.run,
            bytes_per_s=None,
            inbox=self.inbox,
            log=structlog.get_logger(),
            repairs=repairs,
            command=command,
            attached=attached,
        )

    def step(self, number: int, *, done: bool = True) -> Path:
        path = self.root / f"ckpt-{number}"
        path.mkdir(parents=True)
        (path / "weights").write_bytes(bytes([number % 256]) * 1000)
        if done:
            (path / "DONE").touch()
        return path

    def later(self) -> Case:
        """Return the same in a later attempt."""
        return Case(self.tmp_path, **self.more)  # type: ignore[arg-type]

    def choose(self) -> on.CheckpointChosen:
        pool = VerifyPool("n1", 1, Limits(), lambda _node, _text: None)
        acts.choose(self.own, pool=pool, inbox=self.inbox, foreign=self.foreign)
        event = self.inbox.get(WITHIN_S)
        assert isinstance(event, on.CheckpointChosen), event
        return event


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_the_newest_whole_one_is_chosen_with_its_arguments(case: Case) -> None:
    path = case.step(10)
    case.step(20, done=False)

    event = case.choose()

    assert (event.directory, event.step) == (str(path), 10)
    assert case.foreign.arguments(event.directory) == ("--from", str(path), "--at", "10")
    [passed] = event.skipped
    assert (passed.directory, "DONE: missing" in passed.problem, passed.damaged) == ("ckpt-20", True, False)
    assert event.bytes_read >= 1000


def test_rot_since_the_first_verification_is_found(case: Case) -> None:
    older, newer = case.step(10), case.step(20)
    assert case.choose().directory == str(newer)
    status = (newer / "weights").stat()
    (newer / "weights").write_bytes(b"x" * 1000)
    os.utime(newer / "weights", ns=(status.st_atime_ns, status.st_mtime_ns))

    event = case.choose()

    assert event.directory == str(older)
    assert "ckpt-20" in [each.directory for each in event.skipped]


def test_there_is_none_before_the_first_save(case: Case) -> None:
    event = case.choose()

    assert (event.directory, event.step, event.skipped) == (None, None, ())
    assert case.foreign.arguments(None) is None


def test_steps_of_our_own_library_come_first(case: Case) -> None:
    case.step(10)
    (case.own / "step_00000005").mkdir(parents=True)

    event = case.choose()

    assert event.directory is None
    assert [each.directory for each in event.skipped] == ["step_00000005"]


def test_a_directory_that_cannot_be_read_ends_nothing(case: Case) -> None:
    case.root.write_text("not a directory")

    event = case.choose()

    assert event.directory is None
    assert ["failed" in each.problem for each in event.skipped] == [True, True]
    assert case.foreign.end(1, resumed_from=None) == End()


def test_names_that_are_no_text_do_not_hide_the_others(case: Case) -> None:
    path = case.step(10)
    os.mkdir(os.fsencode(case.root) + b"/ckpt-20")
    Path(os.fsdecode(os.fsencode(case.root) + b"/ckpt-20/\xff\xfe")).touch()

    event = case.choose()

    assert event.directory == str(path)


def test_a_reader_that_hangs_is_ended_when_nobody_wants_its_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.step(10)
    monkeypatch.setattr(module, "flags", lambda: ["-c", "import time; time.sleep(3600)"])

    event = case.foreign.choose(lambda: True)

    assert event.directory is None
    assert any("a newer choice has begun" in each.problem for each in event.skipped)


def test_going_back_leaves_out_what_is_newer_until_it_is_written_anew(case: Case) -> None:
    older, newer = case.step(10), case.step(20)
    case.choose()

    case.foreign.roll_back(do.RollBack(launch=3, below_step=20))
    event = case.inbox.get(WITHIN_S)
    assert isinstance(event, on.RolledBack)
    assert (event.launch, event.directory, event.step) == (3, str(older), 10)
    assert case.choose().directory == str(older)

    time.sleep(0.02)
    (newer / "weights").write_bytes(b"again" * 200)
    (newer / "DONE").touch()  # else it would be a mixture of two saves
    assert case.choose().directory == str(newer)

    case.foreign.roll_back(do.RollBack(launch=4, below_step=10))
    event = case.inbox.get(WITHIN_S)
    assert isinstance(event, on.RolledBack)
    assert "older than step 10" in event.error


def gone_back(case: Case) -> tuple[Path, Path]:
    """Return two checkpoints; training went back from the newer one to the older."""
    older, newer = case.step(10), case.step(20)
    case.choose()
    case.foreign.roll_back(do.RollBack(launch=0, below_step=20))
    assert isinstance(case.inbox.get(WITHIN_S), on.RolledBack)
    return older, newer


def test_a_later_attempt_leaves_out_what_was_gone_back_from(tmp_path: Path) -> None:
    case = Case(tmp_path)
    older, newer = gone_back(case)
    with (case.run / module.LEFT_OUT_NAME).open("ab") as file:
        file.write(b'{"directory": "torn')

    later = case.later()
    assert later.choose().directory == str(older)

    shutil.rmtree(older)  # by the framework's own retention
    with structlog.testing.capture_logs() as said:
        assert case.later().choose().directory == str(newer), "better than the beginning"
    [used] = [each for each in said if each["event"] == "left_out_used_again"]
    assert used["checkpoints"] == [str(newer)]


def test_where_the_run_directory_takes_no_notes_going_back_counts_in_this_attempt(tmp_path: Path) -> None:
    case = Case(tmp_path)
    older, _newer = case.step(10), case.step(20)
    (case.run / module.LEFT_OUT_NAME).mkdir()

    with structlog.testing.capture_logs() as said:
        case.choose()
        case.foreign.roll_back(do.RollBack(launch=0, below_step=20))
        assert isinstance(case.inbox.get(WITHIN_S), on.RolledBack)
        assert case.choose().directory == str(older)

    assert [each["event"] for each in said if each["event"] != "notes_not_read"] == ["note_not_written"]


def test_notes_that_cannot_be_read_now_are_read_when_the_storage_answers(tmp_path: Path) -> None:
    case = Case(tmp_path)
    older, _newer = gone_back(case)
    notes, aside = case.run / module.LEFT_OUT_NAME, case.run / "aside"
    notes.rename(aside)
    notes.mkdir()

    later = case.later()
    with structlog.testing.capture_logs() as said:
        later.choose()
    assert "notes_not_read" in [each["event"] for each in said]
    notes.rmdir()
    aside.rename(notes)

    assert later.choose().directory == str(older)


def trainer_state(root: Path, step: int, target: int) -> Path:
    """Write a checkpoint of Hugging Face's Trainer, as far as its end is concerned."""
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    path = layouts.huggingface(root, step)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": target}))
    return path


def test_a_launch_that_wrote_the_last_step_has_finished_whatever_its_exit_code(tmp_path: Path) -> None:
    case = Case(tmp_path, framework="huggingface", patterns=None)
    early = trainer_state(case.root, 10, 20)
    assert case.foreign.end(134, resumed_from=None) == End(step=10)
    assert case.foreign.end(0, resumed_from=None) == End(step=10)  # a callback may end it early

    last = trainer_state(case.root, 20, 20)

    for code in (0, 1, 134):
        assert case.foreign.end(code, resumed_from=str(early)) == End(finished=True, step=20)
    assert case.foreign.end(1, resumed_from=str(last)) == End(step=20)  # it wrote nothing itself
    (last / "scheduler.pt").unlink()
    assert case.foreign.end(134, resumed_from=str(early)) == End(step=10)


def deepspeed(tmp_path: Path, *, repairs: bool = True) -> Case:
    """Return a case with steps 10 and 20 of ZeRO 2, `latest` of 20, and the optimizer's state of a rank lost in 20."""
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    ours = lease.Lease(job_id=1, restart_count=0, attempt=0, node="n1", pid=1, taken_at=0.0)
    case = Case(tmp_path, framework="deepspeed", patterns=None, repairs=ours if repairs else None)
    for step in (10, 20):
        layouts.deepspeed(2)(case.root, step)
    next((case.root / "global_step20").glob("*_rank_1_*_optim_states.pt")).unlink()
    return case


def test_before_a_launch_the_pointer_file_names_what_it_resumes_from(tmp_path: Path) -> None:
    case = deepspeed(tmp_path)
    chosen = case.choose().directory
    assert chosen == str(case.root / "global_step10")
    seen = tmp_path / "seen"

    with structlog.testing.capture_logs() as said:
        ended = launched(case, f"exec cp {case.root}/latest {seen}", resume_from=chosen)
    assert ended.code == 0, (ended, said)

    assert seen.read_text() == "global_step10"
    [repaired] = [each for each in said if each["event"] == "pointer_repaired"]
    assert (repaired["file"], repaired["named"], repaired["names"]) == (
        str(case.root / "latest"), "global_step20", "global_step10",
    )  # fmt: skip
    [world] = module.read_lines(case.run, module.WORLDS_NAME, module.World)
    assert (world.launch, world.ranks) == (0, 1)


@pytest.mark.parametrize("why", ["not asked for", "another attempt has the run", "another checkpoint", "a link"])
def test_a_pointer_file_is_left_alone_where_it_is_not_ours_to_change(tmp_path: Path, why: str) -> None:
    case = deepspeed(tmp_path, repairs=why != "not asked for")
    chosen = case.choose().directory
    if why == "another attempt has the run":
        later = lease.Lease(job_id=2, restart_count=0, attempt=1, node="n2", pid=1, taken_at=1.0)
        (case.run / "lease.json").write_bytes(msgspec.json.encode(later))
    if why == "a link":
        os.rename(case.root / "latest", tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", case.root / "latest")

    with structlog.testing.capture_logs() as said:
        case.foreign.repair("/another" if why == "another checkpoint" else chosen, lambda: False)

    assert (case.root / "latest").read_text() == "global_step20"
    assert [each["event"] for each in said] == (["pointer_not_repaired"] if why == "a link" else [])


def test_where_training_goes_back_the_pointer_file_does_too(tmp_path: Path) -> None:
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    case = deepspeed(tmp_path)
    layouts.deepspeed(2)(case.root, 30)
    assert case.choose().step == 30
    case.foreign.roll_back(do.RollBack(launch=3, below_step=30))
    event = case.inbox.get(WITHIN_S)
    assert isinstance(event, on.RolledBack)

    case.foreign.repair(event.directory, lambda: False)

    assert (case.root / "latest").read_text() == "global_step10"


def test_a_checkpoint_that_the_choice_passed_over_is_none_of_the_launch(tmp_path: Path) -> None:
    case = Case(tmp_path, framework="huggingface", patterns=None)
    early = trainer_state(case.root, 10, 20)
    last = trainer_state(case.root, 20, 20)
    optimizer = last / "optimizer.pt"
    good = optimizer.read_bytes()
    at = len(good) // 2
    optimizer.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
    event = case.choose()
    assert event.directory == str(early), event.skipped

    assert case.foreign.end(1, resumed_from=str(early)) == End(step=10)

    time.sleep(0.02)
    optimizer.write_bytes(good)  # the launch writes it anew
    assert case.foreign.end(1, resumed_from=str(early)) == End(finished=True, step=20)


@pytest.mark.parametrize(
    ("framework", "lost"), [("huggingface", "rng_state_3.pth"), ("accelerate", "random_states_3.pkl")]
)
def test_the_launch_that_saved_a_checkpoint_says_how_many_ranks_it_is_of(
    tmp_path: Path, framework: str, lost: str
) -> None:
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    case = Case(tmp_path, framework=framework, patterns=None)
    build = layouts.LAYOUTS[framework].build
    paths = {step: build(case.root, step) for step in (100, 200, 300)}
    for step, count in ((100, 2), (200, 4), (300, 3)):
        for rank in range(2, count):
            name = lost.replace("3", str(rank))
            shutil.copy(paths[step] / lost.replace("3", "0"), paths[step] / name)
    now = time.time()
    for step, path in paths.items():
        os.utime(path, (now - 1000 + step, now - 1000 + step))
    for at, ranks in ((-850, 4), (-750, 3)):  # before them was another run
        append_line(
            case.run / module.WORLDS_NAME,
            msgspec.json.encode(module.World(at=now + at, attempt=0, launch=0, ranks=ranks)),
        )

    (paths[300] / lost.replace("3", "2")).unlink()
    (paths[200] / lost).unlink()
    for step in (200, 300):
        os.utime(paths[step], (now - 1000 + step, now - 1000 + step))

    event = case.choose()

    assert event.directory == str(paths[100])
    newest, next_one = (each.problem for each in event.skipped)
    assert "missing of rank 2 of 3" in newest
    assert "missing of rank 3 of 4" in next_one
    os.utime(paths[200], (now - 849, now - 849))  # the clocks of two nodes do not tell whether it is of that launch
    assert case.choose().directory == str(paths[200])


def test_a_zero_checkpoint_needs_as_many_ranks_as_saved_it(tmp_path: Path) -> None:
    case = Case(tmp_path, framework="deepspeed", patterns=None, world_change=WorldChange.NO)
    assert case.choose().same_world, "the first save of a script that shrank could not be resumed on all nodes"
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    path = layouts.deepspeed(2)(case.root, 10)

    event = case.choose()

    assert (event.directory, event.same_world) == (str(path), True)
    with structlog.testing.capture_logs() as said:
        case.foreign.say_world(event.directory, 2)
        case.foreign.say_world(None, 3)
        assert not said
        case.foreign.say_world(event.directory, 3)
    [warning] = said
    assert (warning["event"], warning["saved_by"], warning["ranks"]) == ("framework_world_changed", 2, 3)
    assert "universal" in warning["why"]


TOOL = """
import shutil, sys
from pathlib import Path
sys.path.append({repository!r})
from tests.frameworks import layouts
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if Path({fails!r}).exists():
    sys.exit("no space left on the device")
made = layouts.deepspeed_universal(Path({fails!r}).parent / "made", 10)
shutil.move(made, words["--output_folder"])
"""


def training_with_deepspeed(tmp_path: Path) -> tuple[str, ...]:
    """Return a command whose Python has DeepSpeed's tool, or what looks like it; a file `fails` has it fail."""
    package = tmp_path / "site/deepspeed/checkpoint"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    repository = str(Path(__file__).parents[2])
    tool = TOOL.format(repository=repository, fails=str(tmp_path / "fails"))
    (package / "ds_to_universal.py").write_text(tool)
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    paths = f"{tmp_path}/site:{repository}/trainer:{repository}/supervisor"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    torchrun = python.with_name("torchrun")
    torchrun.write_text("#!/bin/sh\n")
    torchrun.chmod(0o755)
    return (str(torchrun), "train.py")


def test_a_zero_checkpoint_is_converted_for_another_number_of_ranks_where_they_attach(tmp_path: Path) -> None:
    command = training_with_deepspeed(tmp_path)
    case = Case(
        tmp_path, framework="deepspeed", patterns=None, world_change=WorldChange.NO, command=command, attached=True
    )
    assert not case.choose().same_world, "a node that is lost before the next choice must not end the allocation"
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    path = layouts.deepspeed(2)(case.root, 10)
    left = case.root / ".stepkeeper-converting-of-one-that-died"
    left.mkdir()

    event = case.choose()

    assert (event.directory, event.same_world) == (str(path), False), "the world may shrink, or grow"
    assert case.foreign.convert(event.directory, 2, lambda: False) == str(path)
    assert case.foreign.convert(None, 1, lambda: False) is None
    assert left.exists(), "nothing was to be converted"
    with structlog.testing.capture_logs() as said:
        case.foreign.say_world(event.directory, 1)
        converted = case.foreign.convert(event.directory, 1, lambda: False)
        again = case.foreign.convert(event.directory, 3, lambda: False)
    assert converted == again == f"{path}_universal"
    assert [each["event"] for each in said] == ["checkpoint_converted"] * 2
    assert [each["made"] for each in said] == ["now", "by an earlier launch"]
    assert (said[0]["saved_by"], said[0]["ranks"], said[0]["resumes_from"]) == (2, 1, converted)
    assert sorted(each.name for each in case.root.iterdir()) == ["global_step10", "global_step10_universal", "latest"]
    assert case.foreign.arguments(converted) == ()
    assert case.choose().directory == str(path), "a conversion is for one launch: the ranks save another kind again"

    time.sleep(0.01)
    shutil.copytree(path, tmp_path / "copy")
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "copy", path, copy_function=shutil.copyfile)  # saved anew, after training went back
    event = case.choose()
    assert case.foreign.convert(event.directory, 1, lambda: False) == f"{path}-2_universal"


def test_a_conversion_that_fails_ends_the_launch_before_it_begins(tmp_path: Path) -> None:
    command = training_with_deepspeed(tmp_path)
    (tmp_path / "fails").touch()
    case = Case(
        tmp_path, framework="deepspeed", patterns=None, world_change=WorldChange.NO, command=command, attached=True
    )
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    path = layouts.deepspeed(2)(case.root, 10)
    case.choose()
    following = Following(framework="deepspeed", title="", why="", directory=case.root, where="")
    job = Job(
        command=("false",), torchrun=False, geometry=Geometry(tasks_per_node=1), run_directory=case.run, run_id="r",
        attempt=0, socket="s", following=following,
    )  # fmt: skip
    meeting = Meeting(launch=1, nodes=("n1",), address="n1", port=1, resume_from=str(path), arguments=())

    Launch(job, meeting, {}, inbox=case.inbox, foreign=case.foreign)

    ended = case.inbox.get(WITHIN_S)
    assert isinstance(ended, on.LaunchEnded), ended
    assert ended.code == 1
    assert "no space left on the device" in ended.error
    assert str(path) in ended.error
    assert sorted(each.name for each in case.root.iterdir()) == ["global_step10", "latest"]


@pytest.mark.parametrize("why", ["pipeline", "tensor parallel", "no tool", "not attached"])
def test_what_is_not_converted_keeps_its_number_of_ranks_and_says_so(tmp_path: Path, why: str) -> None:
    command = training_with_deepspeed(tmp_path)
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    build = {
        "pipeline": layouts.deepspeed_pipeline(stage=1),
        "tensor parallel": layouts.deepspeed(1, model_parallel=2),
    }.get(why, layouts.deepspeed(2))
    case = Case(
        tmp_path, framework="deepspeed", patterns=None, world_change=WorldChange.NO,
        command=("/bin/true",) if why == "no tool" else command, attached=why != "not attached",
    )  # fmt: skip
    path = build(case.root, 10)

    event = case.choose()

    assert (event.directory, event.same_world) == (str(path), True)
    assert case.foreign.convert(event.directory, 1, lambda: False) == str(path)
    with structlog.testing.capture_logs() as said:
        case.foreign.say_world(event.directory, 1)
    if why != "pipeline":  # how many ranks saved it is not known
        assert [each["event"] for each in said] == ["framework_world_changed"]


@pytest.mark.parametrize("takes", [False, True])
def test_a_universal_checkpoint_is_chosen_where_the_script_loads_such_ones(tmp_path: Path, takes: object) -> None:
    option = "--universal-checkpoint" if takes else ""
    case = Case(tmp_path, framework="deepspeed", patterns=None, converted=takes, converted_option=option)
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    plain = layouts.deepspeed(2)(case.root, 10)
    universal = layouts.deepspeed_universal(case.root, 10)

    event = case.choose()

    assert (event.directory, event.same_world) == (str(universal if takes else plain), not takes)
    assert case.foreign.arguments(event.directory) == ((option,) if takes else ())


def saying(said: str, code: int) -> str:
    """What an srun does that says something and ends with a code.

    A child of it that has not become another program yet would look like srun's second process, which we end.
    """
    return f"printf '%s\\n' \"{said}\" >&2\nexit {code}"


def launched(case: Case, srun: str, *, resume_from: str | None = None, foreign: bool = True) -> on.LaunchEnded:
    """Return the end of a launch whose srun is a shell script.  A child of it would be taken for srun's shepherd."""
    bin_directory = case.run / "bin"
    bin_directory.mkdir()
    (bin_directory / "srun").write_text(f"#!/bin/sh\n{srun}\n")
    (bin_directory / "srun").chmod(0o755)
    job = Job(
        command=("python", "train.py"),
        torchrun=False,
        geometry=Geometry(tasks_per_node=1),
        run_directory=case.run,
        run_id="r1",
        attempt=0,
        socket="@x",
    )
    meeting = Meeting(launch=0, nodes=("n1",), address="n1", port=1, resume_from=resume_from)
    environment = {"PATH": f"{bin_directory}:/usr/bin:/bin"}
    Launch(job, meeting, environment, inbox=case.inbox, foreign=case.foreign if foreign else None)
    limit = time.monotonic() + WITHIN_S
    while True:
        assert time.monotonic() < limit
        event = case.inbox.get(1.0)
        if isinstance(event, on.LaunchEnded):
            return event


@pytest.mark.parametrize(
    ("said", "code", "finished"),
    [
        ("", 0, True),
        ("srun: error: n1: task 0: Aborted (core dumped)", 134, True),
        ("srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Killed", 137, True),
        ("srun: error: n1: task 0: Killed", 137, False),
        ("srun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Exited with exit code 1", 143, False),
        ("", 137, False),
    ],
)
def test_ranks_that_were_ended_from_outside_have_not_finished(
    tmp_path: Path, said: str, code: int, finished: object
) -> None:
    case = Case(tmp_path, framework="huggingface", patterns=None)
    trainer_state(case.root, 20, 20)

    event = launched(case, saying(said, code))

    assert (event.code, event.finished) == (code, finished)
    assert event.step == (20 if finished else None)


def test_where_0_is_no_end_the_last_step_must_be_reached(tmp_path: Path) -> None:
    case = Case(tmp_path, target=30, ends_at_target=True)
    assert case.foreign.end(0, resumed_from=None) == End(target=30)
    case.step(20)
    assert case.foreign.end(0, resumed_from=None) == End(step=20, target=30)
    assert case.foreign.end(1, resumed_from=None) == End(step=20)
    last = case.step(30)
    assert case.foreign.end(0, resumed_from=None) == End(finished=True, step=30)
    assert case.foreign.end(1, resumed_from=None) == End(finished=True, step=30)
    assert case.foreign.end(1, resumed_from=str(last)) == End(step=30)  # it wrote nothing itself


def test_a_last_checkpoint_of_the_model_alone_is_the_end_too(tmp_path: Path) -> None:
    from tests.frameworks import layouts  # noqa: PLC0415 - it imports torch

    case = Case(tmp_path, framework="torchtitan", patterns=None, target=300)
    early = layouts.torchtitan(case.root, 200)
    assert case.choose().directory == str(early)
    assert case.foreign.end(1, resumed_from=None) == End(step=200)
    last = case.root / "checkpoint/step-300"
    layouts.save_dcp(last, {"a": layouts.tensor()})

    assert case.foreign.end(1, resumed_from=str(early)) == End(finished=True, step=300)

    assert case.choose().directory == str(early)  # it is passed over now, and is no later launch's own
    assert case.foreign.end(1, resumed_from=str(early)) == End(step=200)


@pytest.mark.parametrize(
    ("said", "code", "launch", "finished"),
    [
        ("", 0, "0.0", True),
        ("srun: error: n1: task 0: Exited with exit code 1", 1, "0.0", True),
        ("srun: error: n1: task 0: Aborted (core dumped)", 134, "0.0", True),
        ("srun: error: n1: task 0: Terminated", 143, "0.0", False),
        ("srun: error: n1: task 0: Exited with exit code 1", 1, "0.1", False),
    ],
)
def test_where_the_framework_has_come_to_its_end_the_run_has_too(
    tmp_path: Path, said: str, code: int, launch: str, finished: object
) -> None:
    case = Case(tmp_path)
    records.write_trained(case.run, records.Trained(launch=launch, step=40, at=0.0))

    event = launched(case, saying(said, code), foreign=code != 134)  # also where no directory of checkpoints is known

    assert (event.code, event.finished) == (code, finished)
    assert event.step == (40 if finished else None)


def test_0_is_no_end_where_the_checkpoints_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, target=30, ends_at_target=True)
    monkeypatch.setattr(module, "flags", lambda: ["-c", "import os; os.abort()"])

    assert case.foreign.end(0, resumed_from=None) == End(target=30)
    assert case.foreign.end(1, resumed_from=None) == End()


def test_0_is_no_end_where_neither_checkpoints_nor_a_last_step_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, ends_at_target=True)

    assert case.foreign.end(0, resumed_from=None) == End(unproven=True)  # nothing was written at all
    case.step(20)
    assert case.foreign.end(0, resumed_from=None) == End(step=20)
    monkeypatch.setattr(module, "flags", lambda: ["-c", "import os; os.abort()"])
    assert case.foreign.end(0, resumed_from=None) == End(unproven=True)
    assert case.foreign.end(1, resumed_from=None) == End()


def test_the_commands_last_step_comes_before_that_of_an_old_checkpoint(tmp_path: Path) -> None:
    case = Case(tmp_path, framework="huggingface", patterns=None, target=30, ends_at_target=True)
    trainer_state(case.root, 20, 20)

    assert case.foreign.end(0, resumed_from=None) == End(step=20, target=30)


def test_by_name_no_checkpoint_is_judged_below_the_first_whole_one(case: Case) -> None:
    for number in (10, 20):
        case.step(number)
    case.step(30, done=False)

    judged = choosing.judge_by_name(Generic(PATTERNS), case.root, HOW)

    assert [(each.number, each.state.chosen_from) for each in itertools.islice(judged, 2)] == [(30, False), (20, True)]
    shutil.rmtree(case.root / "ckpt-10")
    assert list(judged) == []  # it was not judged before


def test_a_process_that_dies_is_told_by_its_last_words(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.step(10)
    monkeypatch.setattr(module, "flags", lambda: ["-c", "import os; os.abort()"])

    event = case.choose()

    assert event.directory is None
    assert "ended with -6" in event.skipped[0].problem


@pytest.mark.parametrize(
    ("more", "command", "argument", "expected"),
    [
        ({"resume": "declares it"}, "train.py", None, []),
        ({}, "train.py", None, ["framework_cannot_resume"]),
        ({}, "train.py {resume}", None, []),
        ({}, "train.py", True, []),
        ({"directory": None}, "train.py", None, ["framework_directory_unknown"]),
    ],
)
def test_the_first_launch_says_what_a_resume_would_lack(
    more: dict[str, object], command: str, argument: object, expected: list[str]
) -> None:
    values = {"framework": "dcp", "title": "DCP", "why": "x", "directory": Path("/c"), "where": "y", **more}
    settings = msgspec.structs.replace(RunSettings(), resume_argument=argument)

    with structlog.testing.capture_logs() as logged:
        attempt.say_framework(Following(**values), command.split(), settings, structlog.get_logger())  # type: ignore[arg-type]
        attempt.say_framework(None, command.split(), settings, structlog.get_logger())

    said = [each["event"] for each in logged]
    assert said == ["framework_recognized", *expected, "cannot_save_on_notice"]


@pytest.mark.parametrize(
    ("framework", "settings", "expected"),
    [
        ("deepspeed", {}, ["framework_cannot_resume", "cannot_save_on_notice"]),
        ("deepspeed", {"repair_pointers": True}, ["cannot_save_on_notice"]),
        ("deepspeed", {"attach": "auto"}, []),
        ("deepspeed", {"attach": "lightning"}, ["framework_cannot_resume", "cannot_save_on_notice"]),
        ("dcp", {"attach": "auto"}, ["framework_cannot_resume", "cannot_save_on_notice"]),
        ("automodel", {"resume_argument": True}, []),
        ("megatron", {"resume_argument": True}, ["cannot_save_on_notice"]),
    ],
)
def test_the_start_says_once_what_a_notice_and_a_resume_would_lack(
    framework: str, settings: dict[str, object], expected: list[str], tmp_path: Path
) -> None:
    known = recognise.known()
    words = Script(("python", "train.py"))
    found = follow(words, tmp_path, known, named=Finding(known[framework], "test"), directory="out")

    with structlog.testing.capture_logs() as logged:
        wanted = msgspec.structs.replace(RunSettings(), **settings)
        attempt.say_framework(found, words.words, wanted, structlog.get_logger())

    assert [each["event"] for each in logged[1:]] == expected
    assert [each.level.value for each in examine_command(
        found, words.words, attach=wanted.attach, resume_argument=wanted.resume_argument, ours=False,
        repair_pointers=wanted.repair_pointers,
    )][1:3] == [
        "warning" if "cannot_save_on_notice" in expected else "ok",
        "warning" if "framework_cannot_resume" in expected else "ok",
    ]  # fmt: skip

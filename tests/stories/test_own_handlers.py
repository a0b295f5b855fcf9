"""Scripts without the trainer library that save by a signal handler of their own, as under plain `sbatch --requeue`."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store import status as status_file
from tests.lab import Lab
from tests.stories import acts
from tests.stories.test_campaign import release_urgent_jobs
from tests.training import Training

pytestmark = pytest.mark.slurm
SAVE_S = 4  # well within the grace time, on a busy machine too
# Each rank counts up, saves its count in the handler, and goes on from it: its way to resume is its own.
SCRIPT = """\
import os, signal, subprocess, sys, time
from pathlib import Path

place, name, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
saved, counted = place / f"saved-{rank}", place / f"counted-{rank}"
count = int(saved.read_text()) if saved.exists() else 0
last = count + 20 if list(place.glob("saved-*")) else 10**6


def save(number, frame):
    with open(place / "handled", "a") as file:
        file.write(f"{rank} {signal.Signals(number).name}\\n")
    time.sleep(2 if how == "quick" else %(seconds)d)
    saved.write_text(str(count))
    if how == "requeues" and rank == "0":
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
    os._exit({"requeues": 255, "fails": 1}.get(how, 0))


if how != "first" or rank == "0":
    signal.signal(getattr(signal, "SIG" + name), save)
while count < last:
    count += 1
    counted.write_text(str(count))
    time.sleep(0.1)
with open(place / "finished", "a") as file:
    file.write(f"{rank} {count}\\n")
""" % {"seconds": SAVE_S}  # noqa: UP031 - the script is full of braces


@dataclasses.dataclass
class Story:
    """A run of the script, and what its ranks left in a directory of theirs."""

    training: Training
    place: Path

    def count(self, rank: int, what: str = "counted") -> int:
        path = self.place / f"{what}-{rank}"
        text = path.read_text() if path.exists() else ""
        return int(text or 0)

    def lines(self, name: str) -> list[str]:
        path = self.place / name
        return sorted(path.read_text().splitlines()) if path.exists() else []

    def wait_counting(self) -> None:
        """Both ranks are at work, and the supervisor knows that they have begun."""
        self.training.wait_event(on.LaunchBegan)
        self.training.until(lambda: min(self.count(0), self.count(1)) > 5, "both ranks")

    def assert_went_on(self, *ranks: int) -> None:
        """The job was requeued once, without a failure, and these ranks went on from what they had saved."""
        training = self.training
        assert training.lab.job(training.job_id).state == "COMPLETED", training.story()
        assert training.lab.job(training.job_id).restarts == 1, training.story()
        assert len(training.launches()) == 2, training.story()
        effects = [effect for record in training.records() for effect in record.effects]
        assert not [each for each in effects if isinstance(each, do.JudgeLaunch | do.KillRanks)], training.story()
        assert training.exits() == [ExitCode.REQUEUED, ExitCode.FINISHED], training.story()
        for rank in ranks:
            assert self.count(rank, "saved") > 5
            assert f"{rank} {self.count(rank, 'saved') + 20}" in self.lines("finished"), training.story()


def begin(
    lab: Lab, name: str, *, signal: str, how: str = "", run_args: tuple[str, ...] = (), line: str = "", **more: object
) -> Story:
    training = Training(lab, name=name, run_args=run_args, **more)  # type: ignore[arg-type]
    place = lab.workdir(training.user) / f"place-{name}"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    script = training.work / f"{name}.py"
    script.write_text(SCRIPT)
    script.chmod(0o644)
    words = f"{script} {place} {signal} {how or 'all'}"
    training.command = tuple((line or "{python} {words}").format(python=training.python, words=words).split(" "))
    return Story(training.submit(), place)


def test_a_handler_has_the_grace_time_to_save_and_the_job_goes_on(lab: Lab) -> None:
    """Only the first rank has a handler: the other one dies of the signal, and is no failure."""
    story = begin(lab, "own-term", signal="TERM", how="first")
    story.wait_counting()

    lab.preempt(story.training.job_id)
    story.training.wait_event(on.RequeueAnswered)
    release_urgent_jobs(lab)
    story.training.wait_end(120.0)

    assert story.lines("handled") == ["0 SIGTERM"]
    story.assert_went_on(0)
    assert "no trainer library there" in story.training.output()


@pytest.mark.campaign
def test_torchruns_ranks_get_the_signal_that_they_expect_and_requeue_the_job_themselves(lab: Lab) -> None:
    """It swallows SIGUSR1, and would kill its ranks after SIGTERM: they get it, and it does not.

    Their handler requeues the job, as those of Lightning and submitit do: it is requeued once.
    """
    line = "{python} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d {words}"
    story = begin(lab, "own-torchrun", signal="USR1", how="requeues", run_args=("--stop-signal", "USR1"), line=line)
    story.wait_counting()

    lab.preempt(story.training.job_id)
    story.training.wait_attempt(1)
    release_urgent_jobs(lab)
    story.training.wait_end(120.0)

    assert story.lines("handled") == ["0 SIGUSR1", "1 SIGUSR1"]
    story.assert_went_on(0, 1)
    assert not [r for r in story.training.records() if any(isinstance(e, do.Requeue) for e in r.effects)]


@pytest.mark.campaign
def test_an_own_srun_line_has_slurms_signal_once(lab: Lab) -> None:
    """Its ranks have no wrapper: Slurm's own SIGTERM reaches them, and they end before we know why."""
    story = begin(lab, "own-srun", signal="TERM", how="fails", line="srun -n2 {python} {words}")
    story.training.until(lambda: min(story.count(0), story.count(1)) > 5, "both ranks")

    lab.preempt(story.training.job_id)
    story.training.wait_event(on.RequeueAnswered)
    release_urgent_jobs(lab)
    story.training.wait_end(120.0)

    assert story.lines("handled") == ["0 SIGTERM", "1 SIGTERM"]
    story.assert_went_on(0, 1)


@pytest.mark.campaign  # `stop` sends what a notice sends, as in the story before
def test_a_shell_script_saves_in_its_trap_when_the_run_is_stopped(lab: Lab) -> None:
    """`stepkeeper stop` and an administrator's requeue are passed on like a preemption."""
    training = Training(lab, name="own-shell")
    place = lab.workdir(training.user) / "place-own-shell"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    script = training.work / "own-shell.sh"
    script.write_text(
        f"trap 'sleep 2; echo saved >> {place}/$SLURM_PROCID; kill $!; exit 0' TERM\n"
        f"echo begun >> {place}/$SLURM_PROCID\n"
        "sleep 1000 &\nwait\n"
    )
    script.chmod(0o644)
    training.command = ("bash", str(script))
    training.submit()
    logs = [place / "0", place / "1"]
    training.until(lambda: all(log.exists() for log in logs), "both ranks")
    training.wait_event(on.LaunchBegan)

    lab.requeue(training.job_id)
    training.wait_attempt(1)
    training.wait_event(on.LaunchBegan, count=2)
    training.until(lambda: all(log.read_text().split().count("begun") == 2 for log in logs), "both ranks again")
    training.until(lambda: status_file.read(training.run_dir / "status.json").phase == "training", "its status")
    status = lab.run(training.stepkeeper, "status", training.run_dir, user=training.user).stdout
    said = lab.run(training.stepkeeper, "stop", training.run_dir, user=training.user).stdout
    training.wait_end(120.0)

    assert [log.read_text().split() for log in logs] == [["begun", "saved"] * 2] * 2, training.story()
    assert training.exits() == [ExitCode.REQUEUED, ExitCode.STOPPED], training.story()
    for text in (status, said):
        assert "no trainer library has answered" in text
        assert "none" not in text.lower(), text
        assert "resumed from" not in text, text


@pytest.mark.campaign  # Slurm may send the signal a minute early: with a limit of one before anything runs
def test_the_time_limit_is_told_by_the_signal_as_well(lab: Lab) -> None:
    story = begin(lab, "own-limit", signal="TERM", sbatch_args=("--time=2",), run_args=("--time-limit-margin", "20"))
    story.wait_counting()

    story.training.wait_attempt(1, 400.0)
    story.training.wait_end(120.0)

    assert story.lines("handled") == ["0 SIGTERM", "1 SIGTERM"]
    story.assert_went_on(0, 1)


@pytest.mark.campaign
def test_a_killed_supervisors_ranks_save_once_their_job_is_requeued(lab: Lab) -> None:
    """The first watcher requeues the job, and each watcher passes the notice on: KillWait is left."""
    story = begin(lab, "own-killed", signal="TERM", how="quick")
    story.wait_counting()

    acts.kill_supervisor(story.training)
    story.training.wait_attempt(1)
    story.training.wait_end(120.0)

    assert story.lines("handled") == ["0 SIGTERM", "1 SIGTERM"]
    assert all(f"{rank} {story.count(rank, 'saved') + 20}" in story.lines("finished") for rank in (0, 1))


SUBMITIT = ("submitit==1.5.4", "cloudpickle", "typing_extensions")
INSTALL_S = 300.0
COUNTER = """\
import time
from pathlib import Path

from submitit.helpers import DelayedSubmission


class Counter:
    def __init__(self, place, count=0):
        self.place, self.count = Path(place), count

    def __call__(self):
        first = self.count
        while self.count < (first + 20 if first else 10**6):
            self.count += 1
            (self.place / "counted-0").write_text(str(self.count))
            time.sleep(0.1)
        (self.place / "finished").write_text(f"{first} {self.count}")

    def checkpoint(self):
        return DelayedSubmission(Counter(self.place, self.count))
"""


@pytest.mark.campaign
def test_submitits_own_handler_checkpoints_and_requeues(lab: Lab) -> None:
    """The real one: it saves on SIGUSR2, bypasses SIGTERM, and calls `scontrol requeue`."""
    training = Training(lab, name="submitit", nodes=1, run_args=("--stop-signal", "USR2"))
    place = training.work / "place-submitit"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place / "packages", *SUBMITIT],
        capture_output=True, text=True, timeout=INSTALL_S, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"submitit cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    (place / "packages" / "counter.py").write_text(COUNTER)
    path = {"PYTHONPATH": str(place / "packages")}
    training.env = {**path, "SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_PREEMPT_SIGNAL": "USR2"}
    training.command = (str(training.python), "-u", "-m", "submitit.core._submit", str(place))
    training.submit()
    dump = (
        "import sys; from counter import Counter; from submitit.helpers import DelayedSubmission; "
        "job = DelayedSubmission(Counter(sys.argv[1])); job.set_timeout(600, 3); job.dump(sys.argv[2])"
    )
    written = place / f"{training.job_id}_submitted.pkl"
    lab.run("env", f"PYTHONPATH={path['PYTHONPATH']}", training.python, "-c", dump, place, written, user=training.user)
    story = Story(training, place)
    training.until(lambda: story.count(0) > 5, "the count")

    lab.preempt(training.job_id)
    training.wait_attempt(1)
    release_urgent_jobs(lab)
    training.wait_end(120.0)

    first, last = map(int, (place / "finished").read_text().split())
    assert first > 5
    assert last == first + 20
    story.assert_went_on()

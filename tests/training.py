"""Running the reference training on a lab, and what its run directory tells: for stories, demo and benchmarks."""

import csv
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepkeeper.cli.dev import recorded_policies
from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.run_store import journal
from stepkeeper.simulate.replay import replay
from stepkeeper_trainer.formats import steps as step_directories
from tests.lab import Lab
from tests.lab.jobs import ENDED
from tests.lab.looking import holds_within
from tests.lab.site import site_python

REPOSITORY = Path(__file__).resolve().parents[1]
STORY_S = 240.0
# small and quick, but a real transformer on real text, with dropout, accumulation and clipping
SMALL = (
    "--layers=2",
    "--width=32",
    "--heads=2",
    "--context=32",
    "--batch=8",
    "--micro-batch=2",
    "--warmup-steps=5",
)


@dataclass
class Training:
    """One run of the reference script, as an ordinary user, on a lab."""

    lab: Lab
    user: str = "games"
    name: str = "run"
    steps: int = 40
    every: int = 10
    step_seconds: float = 0.1
    seed: int = 7
    nodes: int = 2
    sbatch_args: tuple[str, ...] = ()
    run_args: tuple[str, ...] = ()
    script_args: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    env: dict[str, str] = field(default_factory=dict)
    script: Path = REPOSITORY / "sbatch" / "stepkeeper.sbatch"
    job_id: int = 0
    _read: tuple[tuple[int, ...], list[journal.Record]] = field(default=((), []), init=False, repr=False, compare=False)

    @property
    def python(self) -> Path:
        """An interpreter that the user can run, with torch and Stepkeeper."""
        return site_python(self.user)

    @property
    def stepkeeper(self) -> Path:
        """The command beside that interpreter."""
        return self.python.parent / "stepkeeper"

    @property
    def work(self) -> Path:
        return self.lab.workdir(self.user)

    @property
    def run_dir(self) -> Path:
        return self.work / self.name

    @property
    def log(self) -> Path:
        return self.work / f"{self.name}.log"

    def submit(self) -> "Training":
        """`sbatch sbatch/stepkeeper.sbatch python -m stepkeeper_trainer.examples.train_lm ...`."""
        script = self.work / self.script.name
        shutil.copyfile(self.script, script)
        script.chmod(0o755)
        command = self.command or (
            str(self.python), "-m", "stepkeeper_trainer.examples.train_lm", f"--steps={self.steps}",
            f"--seed={self.seed}", f"--checkpoint-every-steps={self.every}",
            f"--step-seconds-min={self.step_seconds}", *SMALL, *self.script_args,
        )  # fmt: skip
        self.job_id = self.lab.submit(
            [script, *self.run_args, *(["--"] if self.run_args else []), *command],
            sbatch_args=[
                f"--nodes={self.nodes}", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", "--cpus-per-task=1",
                f"--output={self.log}", f"--job-name={self.name}", *self.sbatch_args,
            ],
            user=self.user,
            env={"STEPKEEPER": str(self.stepkeeper), "STEPKEEPER_RUN_DIR": str(self.run_dir), **self.env},
        )  # fmt: skip
        return self

    # --- what it tells ----------------------------------------------------------------------------

    def records(self) -> list[journal.Record]:
        """What the journal has; it is read again where it has grown: conditions look many times a second."""
        path = self.run_dir / "journal.jsonl"
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return []
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._read[0] != state:  # taken before it is read: what comes meanwhile is read again
            self._read = (state, list(journal.read(path)))
        return self._read[1]

    def events(self, kind: type) -> list[journal.Record]:
        return [record for record in self.records() if isinstance(record.event, kind)]

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def losses(self) -> dict[int, str]:
        """Step to loss, as printed: a later row supersedes an earlier one of the same step."""
        return {step: row["loss"] for step, row in self.rows().items()}

    def rows(self) -> dict[int, dict[str, str]]:
        try:
            text = (self.run_dir / "metrics.csv").read_text()
        except FileNotFoundError:
            return {}
        # whole lines of one instant: a file that is empty while the header is read may have rows a moment later
        whole, _, _ = text.rpartition("\n")
        rows = csv.DictReader(whole.splitlines())
        return {int(row["step"]): row for row in rows if row["loss"] and row["step"].isdigit()}

    def step(self) -> int:
        """The newest step in metrics.csv."""
        return max(self.rows(), default=0)

    def committed(self) -> list[int]:
        """Step numbers of whole step directories."""
        return sorted(
            entry.step for entry in step_directories.list_steps(self.run_dir / "checkpoints") if entry.manifest
        )

    def launches(self) -> list[tuple[str, ...]]:
        """The nodes of each launch."""
        effects = [effect for record in self.records() for effect in record.effects]
        return [effect.nodes for effect in effects if isinstance(effect, do.StartLaunch)]

    def exits(self) -> list[int]:
        """Exit codes of the attempts that ended with a word."""
        return [
            effect.code for record in self.records() for effect in record.effects if effect.__class__.__name__ == "Exit"
        ]

    # --- waiting ----------------------------------------------------------------------------------

    def until(self, condition, what: str, timeout_s: float = STORY_S) -> None:
        if not holds_within(condition, timeout_s):
            raise AssertionError(f"waited {timeout_s:g} s for {what}\n{self.story()}")

    def wait_step(self, step: int, timeout_s: float = STORY_S) -> None:
        self.until(lambda: self.step() >= step, f"step {step}", timeout_s)

    def wait_event(self, kind: type, timeout_s: float = STORY_S, count: int = 1) -> journal.Record:
        self.until(lambda: len(self.events(kind)) >= count, f"{count} {kind.__name__}", timeout_s)
        return self.events(kind)[count - 1]

    def wait_attempt(self, attempt: int, timeout_s: float = STORY_S) -> None:
        self.wait_event(on.AttemptStarted, timeout_s, attempt + 1)

    def wait_end(self, timeout_s: float = STORY_S) -> None:
        """Wait until the job is over for good."""
        self.until(lambda: self.lab.job(self.job_id).state in ENDED, "the end of the job", timeout_s)

    def story(self) -> str:
        """What happened, for a failed test."""
        lines = [
            f"{r.event.at:.2f} {r.attempt}.{r.launch} {r.phase.value} {type(r.event).__name__} {r.why}"
            for r in self.records()
        ]
        logs = [p.read_text(errors="replace")[-1500:] for p in sorted(self.run_dir.glob("logs/*/*/*.log"))[-2:]]
        output = self.output()[-2000:]
        parts = ["--- journal", *lines[-60:], "--- queue", self.lab.queue(), "--- output", output, "--- ranks", *logs]
        return "\n".join(parts)


def strict_script(training: Training, words: Sequence[str]) -> Path:
    """Return the reference script behind a parser that ends on any argument, as that of many scripts does."""
    script = training.work / f"strict-{training.name}.py"
    script.write_text(
        "import argparse, runpy, sys\n\nargparse.ArgumentParser().parse_args()\n"
        f"sys.argv[1:] = {list(words)!r}\n"
        "runpy.run_module('stepkeeper_trainer.examples.train_lm', run_name='__main__')\n"
    )
    script.chmod(0o644)
    return script


def plain_script(lab: Lab) -> Path:
    """The batch script of somebody who has never heard of `--open-mode`: what the site has set counts."""
    script = lab.directory / "plain.sbatch"
    lines = Training.script.read_text().splitlines(keepends=True)
    script.write_text("".join(line for line in lines if "--open-mode" not in line))
    return script


def assert_complete(training: Training, reference: Training) -> None:
    """The run is complete, and every loss equals the uninterrupted run's bit for bit; tokens never jump."""
    losses, expected = training.losses(), reference.losses()
    assert losses == expected, f"{_difference(losses, expected)}\n{training.story()}"
    rows = training.rows()
    tokens = [int(rows[step]["tokens"]) for step in sorted(rows)]
    assert tokens == [int(row["tokens"]) for _, row in sorted(reference.rows().items())], training.story()


def assert_replays(training: Training) -> None:
    """Today's rules decide the run's journal again, exactly: what the journal leaves out does not matter to it."""
    policies = recorded_policies(training.run_dir)
    found = replay(journal.read_lines(training.run_dir / "journal.jsonl"), policies, words=True)
    assert not found.differences, f"{found.differences}\n{training.story()}"
    assert (found.unknown, found.without_start) == (0, 0), training.story()
    assert found.attempts == len(policies) == len(training.events(on.AttemptStarted)), training.story()


def _difference(found: dict[int, str], expected: dict[int, str]) -> str:
    wrong = [step for step in expected if found.get(step) != expected[step]]
    first = [(step, found.get(step), expected[step]) for step in wrong[:1]]
    return f"{len(wrong)} of {len(expected)} steps differ, the first: {first}"

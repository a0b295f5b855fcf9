"""Real ranks of the reference script, started, watched and ended by their process ids."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tests.ports import reserve
from tests.trainer import warm

if TYPE_CHECKING:
    from typing import Self

ROOT = Path(__file__).parents[2]
TINY = [
    "--layers=1",
    "--width=32",
    "--heads=2",
    "--context=16",
    "--batch=8",
    "--micro-batch=2",
    "--corpus-bytes=50000",
    "--warmup-steps=4",
    "--print-every-steps=1000",
]
STEPS = 24
LIMIT_S = 150.0


class Ranks:
    """A launch: a context manager that leaves no process behind."""

    def __init__(
        self,
        world_size: int,
        run_dir: Path,
        *arguments: str,
        steps: int = STEPS,
        every: int = 4,
        environment: dict[str, str] | None = None,
        of_rank: Callable[[int], dict[str, str]] = lambda _rank: {},
        disk: str | None = None,
        command: Sequence[str] = (),
        cwd: Path = ROOT,
    ) -> None:
        """Start ranks; `disk` is a fault for `tests.trainer.faulty_disk`.

        A `command` runs in place of `train_lm`, in an interpreter of its own; `train_lm` is forked from one with torch.
        """
        start = subprocess.Popen if command else warm.Process
        script = ["-m", "stepkeeper_trainer.examples.train_lm"]
        if disk is not None:
            script = ["-m", "tests.trainer.faulty_disk", disk]
        options = [*TINY, f"--run-dir={run_dir}", f"--steps={steps}", f"--checkpoint-every-steps={every}"]
        command = [*(command or [sys.executable, *script, *options]), *arguments]
        run_dir.parent.mkdir(exist_ok=True)
        port = reserve()
        self.run_dir = run_dir
        self.logs = [run_dir.parent / f"{run_dir.name}.rank{r}.{time.monotonic_ns()}.log" for r in range(world_size)]
        self.processes: list[subprocess.Popen[bytes] | warm.Process] = []
        for rank, log in enumerate(self.logs):
            own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "STEPKEEPER_"))}
            own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path()}
            if world_size > 1:
                own |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            own |= (environment or {}) | of_rank(rank)
            with log.open("wb") as output:
                self.processes.append(start(command, cwd=cwd, env=own, stdout=output, stderr=subprocess.STDOUT))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        if error is not None:
            print(self.output())

    def kill(self) -> None:
        """SIGKILL every rank that is left."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait(LIMIT_S)

    def wait(self) -> list[int]:
        """Return the exit codes."""
        return [process.wait(LIMIT_S) for process in self.processes]

    def output(self) -> str:
        """Return what all ranks have printed."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; a rank that ends before it is met is an error."""
        limit_at = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < limit_at, f"not met in time\n{self.output()}"
            if any(p.poll() is not None for p in self.processes):  # perhaps right after it was met
                assert condition(), f"a rank ended\n{self.output()}"
            time.sleep(0.002)

    def until_step(self, step: int) -> None:
        """Wait until a step is done."""
        self.until(lambda: max(losses(self.run_dir), default=0) >= step)


def finish(world_size: int, run_dir: Path, *arguments: str, **options: object) -> dict[int, str]:
    """Run to the end and return the losses."""
    with Ranks(world_size, run_dir, *arguments, **options) as ranks:  # type: ignore[arg-type]
        assert ranks.wait() == [0] * world_size, ranks.output()
    return losses(run_dir)


def losses(run_dir: Path) -> dict[int, str]:
    """Return the losses by step, as they are printed; a later row of a step supersedes the earlier."""
    found: dict[int, str] = {}
    try:
        text = (run_dir / "metrics.csv").read_text()  # of one instant: rows may follow a header that was not there yet
    except FileNotFoundError:
        return found
    for row in csv.DictReader(text.splitlines()):
        if row["launch"]:
            found[int(row["step"])] = row["loss"]
    return found


def tokens(run_dir: Path) -> dict[int, int]:
    """Return the tokens seen by step."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): int(row["tokens"]) for row in csv.DictReader(file)}


def steps_of(run_dir: Path) -> list[str]:
    """Return the names of the step directories."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


@contextmanager
def watcher_socket(name: str) -> Iterator[socket.socket]:
    """Listen as a node's watcher does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.05)
        sock.bind(f"\0{name}")
        yield sock


def _path() -> str:
    return os.pathsep.join([str(ROOT / "trainer"), str(ROOT), os.environ.get("PYTHONPATH", "")])

"""Playing a training of a real framework: two gloo ranks, killed at a chosen system call on a chosen file."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ports import reserve

SCRIPTS = Path(__file__).parent / "scripts"
WARM = Path(__file__).with_name("warm.py")
OTHER_FILE_SYSTEM = "/dev/shm"  # as a node's /tmp is another one than the storage of checkpoints
READY_S, RUN_S = 300.0, 150.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL to a rank at its first call of a kind on a file, as `killing.c` has it."""

    rank: int
    call: str
    file: str  # below the output directory

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.call} of {self.file}"


@dataclass
class Framework:
    """A process with a framework in memory."""

    process: subprocess.Popen[str]
    script: str
    arguments: list[str] = field(default_factory=list)

    def ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer(within_s)

    def answer(self, within_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], within_s)
        assert ready, f"no answer within {within_s} s"
        line = self.process.stdout.readline()
        assert line, f"the process with {self.script} has ended"
        return json.loads(line)

    def play(
        self,
        out: Path,
        losses: Path,
        *,
        resume: str = "",
        kill: Kill | None = None,
        further: Mapping[str, str] = {},
        arguments: Sequence[str] = (),
    ) -> list[int]:
        """Run both ranks to their ends; return their exit codes."""
        out.mkdir(exist_ok=True)
        port = str(reserve())
        pids = []
        for rank in range(2):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0", "NODE_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }  # fmt: skip
            if kill is not None and kill.rank == rank:
                environment["TEST_KILL"] = f"{kill.call}:{out / kill.file}"
            words = ["--out", str(out), "--losses", str(losses), "--resume", resume, *self.arguments, *arguments]
            request = {
                "do": "begin", "script": str(SCRIPTS / self.script), "arguments": words,
                "environment": environment | dict(further), "log": f"{losses}.log.{rank}",
            }  # fmt: skip
            pids.append(self.ask(request, READY_S)["pid"])
        return self.ask({"do": "wait", "pids": pids, "seconds": RUN_S}, RUN_S + 30)["codes"]


@functools.cache
def shim() -> Path:
    """Compile what kills a rank at a call."""
    library = Path(tempfile.mkdtemp(prefix="killing-")) / "killing.so"
    source = Path(__file__).with_name("killing.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
    atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
    return library


@contextlib.contextmanager
def warm(
    python: Path,
    script: str,
    imports: list[str],
    arguments: list[str],
    *,
    further: Mapping[str, str] = {},
) -> Iterator[Framework]:
    """Start a process with a framework in memory."""
    environment = {
        **os.environ, "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "TMPDIR": OTHER_FILE_SYSTEM,
        "LD_PRELOAD": str(shim()),
    }  # fmt: skip
    environment |= further
    process = subprocess.Popen(
        [python, WARM, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    framework = Framework(process, script, arguments)
    try:
        assert framework.answer(READY_S)["ready"]
        yield framework
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def losses(path: Path, rank: int) -> dict[int, str]:
    """Return what a rank wrote, the last word of each step."""
    rows = Path(f"{path}.{rank}").read_text().splitlines()
    return {int(step): loss for step, loss in (row.split() for row in rows)}

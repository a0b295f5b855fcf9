"""A keeper of warm standbys, and the wrappers that come to it: real processes, with something cheaper than torch."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stepkeeper import standby, wrapper
from stepkeeper.watcher.processes import rank_processes

WITHIN_S = 60.0
NODE = "n1"
# torch is not what is tried here: a spare imports whatever has that name
TORCH = "class cuda:\n    is_initialized = staticmethod(lambda: {cuda})\n{more}\n"


class Site:
    """A keeper, the wrappers that come to it, and the run that both are of."""

    def __init__(self, tmp_path: Path) -> None:
        self.place = tmp_path
        self.run_id = secrets.token_hex(6)
        self.address = f"@stepkeeper-test-{self.run_id}/%N"
        self.processes: list[subprocess.Popen[str]] = []
        self.patient = True
        self.limits = {"HAND_OVER_WITHIN_S": WITHIN_S}
        self.torch()

    def torch(self, *, cuda: bool = False, more: str = "") -> None:
        (self.place / "torch.py").write_text(TORCH.format(cuda=cuda, more=more))

    def program(self, module: ModuleType) -> str:
        """Return the program, which waits longer for the others: a busy machine is no reason to start a rank anew."""
        original = Path(str(module.__file__))
        if not self.patient:
            return str(original)
        copy = self.place / "programs" / original.name
        if not copy.exists():
            text = original.read_text()
            for name, seconds in self.limits.items():
                text = re.sub(rf"^{name} = .*$", f"{name} = {seconds}", text, flags=re.MULTILINE)
            assert f"HAND_OVER_WITHIN_S = {WITHIN_S}\n" in text
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(text)
        return str(copy)

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.place),
            "PYTHONUNBUFFERED": "1",
            "SLURM_PROCID": "3",
            "SLURM_LOCALID": "1",
            "SLURM_NTASKS": "8",
            "SLURMD_NODENAME": NODE,
            "STEPKEEPER_TASKS_PER_NODE": "2",
            "STEPKEEPER_ATTEMPT": "4",
            "STEPKEEPER_LAUNCH": "5",
            "STEPKEEPER_RUN_ID": self.run_id,
            "STEPKEEPER_STANDBY": self.address,
            **more,
        }

    def start(self, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            argv,
            env=environment,
            cwd=self.place,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def keeper(
        self, *modules: str, ready: bool = True, options: tuple[str, ...] = (), **more: str
    ) -> subprocess.Popen[str]:
        """Start one; with `ready`, its spare has imported all."""
        argv = [sys.executable, *options, self.program(standby), *modules, "--", sys.executable, *options]
        process = self.start(argv, self.environment(**more))
        say(process, "prepare")
        if ready:
            assert heard(process)["standby"] == "ready"
        return process

    def wrapper(self, *words: str, **more: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-I", "-S", self.program(wrapper), "--", sys.executable, *words]
        return self.start(argv, self.environment(**{"STEPKEEPER_STANDBY_WORDS": "1", "STEPKEEPER_LAUNCH": "6"} | more))

    def site(self) -> str:
        """Return the directory by which a rank's own Python finds the wrapper, beside that."""
        beside = Path(self.program(wrapper)).parent
        if self.patient:
            shutil.copytree(
                Path(str(wrapper.__file__)).parent / "standby_site", beside / "standby_site", dirs_exist_ok=True
            )
        return str(beside / "standby_site")

    def rank(self, *words: str, python: tuple[str, ...] = (sys.executable,), **more: str) -> subprocess.Popen[str]:
        """Start Python without a wrapper, as torchrun does, or a user's own srun line."""
        variables = self.environment(
            **{"STEPKEEPER_LAUNCH": "6", wrapper.HOOK: self.address, wrapper.SLOT: "SLURM_LOCALID"}
        )
        del variables["STEPKEEPER_STANDBY"]
        variables["PYTHONPATH"] = f"{self.site()}:{variables['PYTHONPATH']}"
        return self.start([*python, *words], variables | more)

    def script(self, text: str) -> str:
        path = self.place / "elsewhere" / "script.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    def ranks(self) -> set[int]:
        return set(rank_processes(self.run_id, NODE, attempt_max=9))


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until something holds."""
    limit = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < limit, f"waited for {what}"
        time.sleep(0.02)


def say(keeper: subprocess.Popen[str], word: str) -> None:
    """Tell a keeper a word of the supervisor's."""
    assert keeper.stdin is not None
    keeper.stdin.write(word + "\n")
    keeper.stdin.flush()


def heard(keeper: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of a keeper's about its spare."""
    assert keeper.stdout is not None
    while True:
        said: dict[str, Any] = json.loads(keeper.stdout.readline())
        if said["standby"] not in ("taken", "refused"):
            return said


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

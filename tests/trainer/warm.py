"""Python processes forked from one that has imported torch, which costs three to five seconds of a core each time.

`Process` stands for `subprocess.Popen([sys.executable, ...])`, `run` for `subprocess.run`.  Each process that uses them
has one server, which imports torch once and forks what is asked for:

    python -m tests.trainer.warm DESCRIPTOR

A forked process has its own environment, directory, arguments and descriptors, and ends as an interpreter ends.  It
shares with the others what an interpreter chooses at its start: the hash seed.  The stories on Slurm start real ones.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
ANSWER_S = 240.0  # the first one waits for the imports
LOOK_S = 0.01
_REQUEST_BYTES_MAX = 1 << 17
_numbers = itertools.count()
_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


class Process:
    """A forked process: what `subprocess.Popen` offers, as far as tests need it."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> None:
        """Start `[sys.executable, "-m" MODULE | "-c" CODE, arguments...]`."""
        python, *words = map(str, command)
        if python != sys.executable or words[:1] not in (["-m"], ["-c"]):
            raise ValueError(f"{command}: a forked process runs this interpreter with -m or -c")
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        theirs: list[int] = []
        if stdin == subprocess.PIPE:
            stdin, own = os.pipe()
            theirs.append(stdin)
            self.stdin = os.fdopen(own, "w", encoding="utf-8")
        if stdout == subprocess.PIPE:
            own, stdout = os.pipe()
            theirs.append(stdout)
            self.stdout = os.fdopen(own, encoding="utf-8")
        out = 1 if stdout is None else _number(stdout)
        error = 2 if stderr is None else out if stderr == subprocess.STDOUT else _number(stderr)
        order = {"words": words, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        self.pid: int = _ask(order, [0 if stdin is None else _number(stdin), out, error])["pid"]
        for descriptor in theirs:
            os.close(descriptor)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, if it has ended."""
        if self.returncode is None:
            self.returncode = _ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end."""
        limit_at = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit_at:
                raise subprocess.TimeoutExpired(f"the forked process {self.pid}", timeout)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it, unless it is known to have ended: until then its number is its own."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    text: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, with `text` as its input; both outputs are captured."""
    with tempfile.TemporaryFile("w+") as read, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        read.write(text)
        read.seek(0)
        process = Process(command, cwd=cwd, env=env, stdin=read, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(command), code, out.read(), err.read())


def close() -> None:
    """End the server of this process, and with it what it has forked."""
    global _server  # noqa: PLW0603 - one for each process
    if _server is not None:
        server, asking = _server
        _server = None
        asking.close()
        server.wait(ANSWER_S)


def _number(file: IO[Any] | int) -> int:
    return file if isinstance(file, int) else file.fileno()


def _ask(what: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
    global _server  # noqa: PLW0603 - one for each process
    if _server is None:
        _server = _started()
    _, asking = _server
    number = next(_numbers)
    socket.send_fds(asking, [json.dumps(what | {"number": number}).encode()], descriptors)
    while answer := asking.recv(_REQUEST_BYTES_MAX):
        found: dict[str, Any] = json.loads(answer)
        if found["number"] == number:  # else to a question of a test that was out of time
            return found
    raise AssertionError("the server of forked processes has ended")


def _started() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        path = os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "STEPKEEPER_", "RANK", "WORLD"))}
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.warm", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=own | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
    ours.settimeout(ANSWER_S)
    return server, ours


# --- the server -----------------------------------------------------------------------------------


def main() -> None:
    from tests.trainer.forked import warm_up  # noqa: PLC0415

    with socket.socket(fileno=int(sys.argv[1])) as asked:
        warm_up()
        order = _serve(asked)
    if order is not None:
        _become(order)


def _serve(asked: socket.socket) -> dict[str, Any] | None:
    """Fork what is asked for until nobody asks any more; return the order in a fork, and None in the server."""
    running: set[int] = set()
    while True:
        text, descriptors, _, _ = socket.recv_fds(asked, _REQUEST_BYTES_MAX, 3)
        if not text:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None
        order = json.loads(text)
        if "poll" in order:
            found, status = os.waitpid(order["poll"], os.WNOHANG)
            running.discard(found)
            answer = {"code": os.waitstatus_to_exitcode(status) if found else None}
        else:
            pid = os.fork()
            if not pid:
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return dict(order)
            running.add(pid)
            answer = {"pid": pid}
            for descriptor in descriptors:
                os.close(descriptor)
        asked.send(json.dumps(answer | {"number": order.get("number")}).encode())


def _become(order: dict[str, Any]) -> None:
    """Go on as the process that was asked for."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    random.seed()
    wanted = order["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in wanted if each and each not in sys.path]
    kind, what, *arguments = order["words"]
    sys.argv = [kind, *arguments]
    if kind == "-m":
        sys.modules.pop(what, None)  # runpy warns of one that has been imported
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        own = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), own.__dict__)  # noqa: S102 - the caller's own program


if __name__ == "__main__":
    main()

"""Forks the ranks of a scene, lets them through their gates, and attaches strace where it is wanted."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepkeeper_trainer.formats.messages import Committed, SaveFailed, decode_from_rank
from tests.ports import reserve
from tests.trainer.crash.calls import Call, read
from tests.trainer.crash.gates import Gate, Point, Strace, injecting, watching

LIMIT_S = 180.0
ALONE_S = 0.5  # how long ranks go on when another was killed, before the launch is ended


@dataclass
class Played:
    """What the ranks did and said."""

    codes: list[int]  # exit codes, negative for signals
    said: list[dict[str, Any]] = field(default_factory=list)  # by `tell`, and what ranks said to their watcher
    calls: list[list[tuple[str, Call]]] = field(default_factory=list)  # of each rank, with the role of the thread
    output: str = ""


Tell = Callable[..., None]
Act = Callable[[int, Tell], None]  # of a rank


@dataclass(frozen=True)
class Meanwhile:
    """What is done while the ranks run."""

    stopped: Callable[[], None] = lambda: None  # when one has got a SIGSTOP; it goes on afterwards
    said: Callable[[dict[str, Any]], None] = lambda _words: None  # when one has said something


def play(
    act: Act,
    world_size: int,
    *,
    at: Point | None = None,
    what: str = "signal=SIGKILL",
    watch: bool = False,
    meanwhile: Meanwhile | None = None,
) -> Played:
    """Play once.

    Args:
        act: what each rank does, in a process of its own.
        world_size: how many there are.
        at: where to have strace inject something.
        what: it injects.
        watch: log all calls.
        meanwhile: what is done on the way.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _Play(act, world_size, Path(scratch), at, what, watch=watch, meanwhile=meanwhile or Meanwhile()).run()


@dataclass
class _Rank:
    pid: int
    words: int  # the read end
    let: int  # the write end
    rest: bytes = b""
    code: int | None = None


class _Play:
    def __init__(
        self,
        act: Act,
        world_size: int,
        scratch: Path,
        at: Point | None,
        what: str,
        *,
        watch: bool,
        meanwhile: Meanwhile,
    ) -> None:
        self._meanwhile = meanwhile
        self._act, self._scratch, self._at, self._what, self._watch = act, scratch, at, what, watch
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")
        self._address = "@" + self._socket.getsockname()[1:].decode()
        self._port = reserve()
        self._played = Played([])
        self._roles: list[dict[int, str]] = [{} for _ in range(world_size)]
        self._straces: list[tuple[int, Strace]] = []
        self._ranks: list[_Rank] = []
        for rank in range(world_size):
            self._ranks.append(self._fork(rank))

    def run(self) -> Played:
        try:
            self._until_all_ended()
        finally:
            for rank in self._ranks:
                if rank.code is None:
                    os.kill(rank.pid, signal.SIGKILL)
                    rank.code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
                os.close(rank.words)
                os.close(rank.let)
            for _, strace in self._straces:
                strace.end()
            self._socket.close()
        played = self._played
        played.codes = [rank.code or 0 for rank in self._ranks]
        played.calls = [[] for _ in self._ranks]
        for number, strace in self._straces:
            roles = self._roles[number] | ({0: self._at.role} if self._at else {})
            played.calls[number] = [(roles.get(call.thread, "other"), call) for call in read(strace.log)]
        played.output = "".join(path.read_text(errors="replace") for path in sorted(self._scratch.glob("*.out")))
        return played

    def _until_all_ended(self) -> None:
        limit_at = time.monotonic() + LIMIT_S
        while any(rank.code is None for rank in self._ranks):
            readable, _, _ = select.select([rank.words for rank in self._ranks] + [self._socket], [], [], 0.005)
            for number, rank in enumerate(self._ranks):
                if rank.words in readable:
                    self._hear(number, rank)
            self._hear_watcher()
            for rank in self._ranks:
                if rank.code is None and self._ended(rank):
                    assert rank.code is not None
                    limit_at = min(limit_at, time.monotonic() + (ALONE_S if rank.code < 0 else LIMIT_S))
            if time.monotonic() > limit_at:
                break
        for number, rank in enumerate(self._ranks):
            self._hear(number, rank)
        self._hear_watcher()

    def _ended(self, rank: _Rank) -> bool:
        pid, status = os.waitpid(rank.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            self._meanwhile.stopped()
            os.kill(pid, signal.SIGCONT)
        elif pid:
            rank.code = os.waitstatus_to_exitcode(status)
        return rank.code is not None

    def _say(self, **words: Any) -> None:
        self._played.said.append(words)
        self._meanwhile.said(words)

    def _hear(self, number: int, rank: _Rank) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(rank.words, 65536):
                rank.rest += data
        *lines, rank.rest = rank.rest.split(b"\n")
        for line in lines:
            words = json.loads(line)
            if "gate" in words:
                self._at_gate(number, rank, words["gate"], words["thread"])
            else:
                self._say(**words, rank=number)

    def _hear_watcher(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message = decode_from_rank(self._socket.recv(65536, socket.MSG_DONTWAIT))
                if isinstance(message, Committed):
                    self._say(committed=message.save_id, step=message.step)
                elif isinstance(message, SaveFailed):
                    self._say(failed=message.error, step=message.step)

    def _at_gate(self, number: int, rank: _Rank, role: str, thread: int) -> None:
        self._roles[number][thread] = role
        log = self._scratch / f"{number}.{len(self._straces)}.strace"
        at = self._at
        if self._watch and role == "main 1":
            self._straces.append((number, watching(rank.pid, log)))
        elif at is not None and (at.rank, at.role) == (number, role):
            self._straces.append((number, injecting(thread, log, at, self._what)))
        with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile
            os.write(rank.let, b"g")

    def _fork(self, rank: int) -> _Rank:
        words, said = os.pipe()
        heard, let = os.pipe()
        pid = os.fork()
        if pid:
            os.close(said)
            os.close(heard)
            os.set_blocking(words, False)
            return _Rank(pid, words, let)
        code = 70
        try:
            output = os.open(self._scratch / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ |= {
                "STEPKEEPER_SOCKET": self._address,
                "STEPKEEPER_RELEASE": "x",
                "MASTER_PORT": str(self._port),
            }
            gate = Gate(said, heard)
            gate.install()
            gate.wait("main")
            self._act(rank, gate.say)
            code = 0
        except BaseException:  # noqa: BLE001  # a fork must not go on as its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

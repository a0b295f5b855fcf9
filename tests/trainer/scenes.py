"""Scenes: small plays of a few ranks, forked from one process that has imported torch already.

    python -m tests.trainer.scenes

reads an `Order` in JSON from each line of its input and answers each with an `Ended`.  A scene is a function
`scene(rank, directory, **arguments)`; what it returns is the rank's exit code.  None, and `sys.exit`, leave as a script
leaves: through the end of the interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.trainer import warm
from tests.trainer.forked import LIMIT_S, ROOT, Ended, Story, warm_up
from tests.trainer.forked import _play as play_story

if TYPE_CHECKING:
    from typing import Self

STARTED_WITHIN_S = 120.0  # beyond a play's own limit: the first one waits for the imports, too
_SET_FLAGS, _UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to play."""

    scene: str  # `module:function`
    directory: str
    ranks: int = 1
    group_s: float = 30.0  # time limit of the ranks' default group
    stop_s: float = 1.0  # how long a rank that stops itself (SIGSTOP) stands still; for good, beyond `limit_s`
    limit_s: float = 120.0  # after which whoever is left is killed
    arguments: dict[str, Any] = field(default_factory=dict)


class Stage:
    """A process that plays scenes; each call waits for the end of one."""

    def __init__(self, *, own_network: bool = False) -> None:
        """Start it; with a network of its own, a scene may take that down (`loopback`): this needs root."""
        self._own_network = own_network
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str] | warm.Process:
        path = os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "STEPKEEPER_", "RANK", "WORLD"))}
        own |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-m", "tests.trainer.scenes"]
        if not self._own_network:
            return warm.Process(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=own)
        line = ["unshare", "--net", *line, "own-network"]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def play(self, scene: str, directory: Path, **options: Any) -> Ended:
        """Play a scene; what is no field of `Order` is an argument of the scene."""
        own = {name: options.pop(name) for name in ("ranks", "group_s", "stop_s", "limit_s") if name in options}
        order = Order(scene=scene, directory=str(directory), arguments=options, **own)
        return self._ask("order", asdict(order), order.limit_s)

    def story(self, story: Story) -> Ended:
        """Play a story of `tests.trainer.forked`."""
        return self._ask("story", asdict(story), LIMIT_S)

    def _ask(self, kind: str, what: dict[str, Any], limit_s: float) -> Ended:
        if self._process.poll() is not None:  # a play without an end, which failed its own test, fails no other
            self._process = self._started()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({kind: what}) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], limit_s + STARTED_WITHIN_S)[0]:
            self._process.kill()
            self._process.wait(10)
            raise AssertionError("the scene has no end")
        answer = self._process.stdout.readline()
        assert answer, "the stage has ended"
        return Ended(**json.loads(answer))


def loopback(*, up: bool) -> None:
    """Have the only interface of a network of our own take words, or none any more: no connection hears of that."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP if up else 0))


def main() -> None:
    if sys.argv[1:] == ["own-network"]:
        loopback(up=True)
    warm_up()
    while line := sys.stdin.readline():
        order = json.loads(line)
        ended = play_story(Story(**order["story"])) if "story" in order else _play(Order(**order["order"]))
        print(json.dumps(asdict(ended)), flush=True)


def _play(order: Order) -> Ended:
    module, name = order.scene.split(":")
    scene = getattr(importlib.import_module(module), name)
    scratch = Path(tempfile.mkdtemp())  # removed here only: a fork that leaves through its end comes by as well
    pids = [_fork(rank, order, scene, scratch) for rank in range(order.ranks)]
    codes = _wait(pids, order)
    said = "".join((scratch / f"{rank}.log").read_text() for rank in range(order.ranks))
    shutil.rmtree(scratch)
    return Ended(codes=codes, said=said)


def _wait(pids: list[int], order: Order) -> list[int]:
    codes: dict[int, int] = {}
    going_on: dict[int, float] = {}
    limit_at = time.monotonic() + order.limit_s
    while len(codes) < len(pids):
        now = time.monotonic()
        for pid in [pid for pid in pids if pid not in codes]:
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                going_on[pid] = now + order.stop_s
            elif found:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif going_on.get(pid, now) < now:
                del going_on[pid]
                os.kill(pid, signal.SIGCONT)
            elif now > limit_at:
                os.kill(pid, signal.SIGKILL)
        if all(going_on.get(pid, now) > limit_at for pid in pids if pid not in codes):
            limit_at = now  # nobody is left but those who stand still for good
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _fork(rank: int, order: Order, scene: Any, scratch: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    code: int | None = 70
    left_with: Any = 0
    try:
        log = os.open(scratch / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(format=f"[{rank}] %(message)s", level=logging.INFO, stream=sys.stderr, force=True)
        with _group(rank, order, scratch):
            code = scene(rank, Path(order.directory), **order.arguments)
    except SystemExit as left:
        code, left_with = None, left.code
    except BaseException:  # noqa: BLE001  # a fork must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if code is not None:
            os._exit(code)
    sys.exit(left_with)


@contextlib.contextmanager
def _group(rank: int, order: Order, scratch: Path) -> Iterator[None]:
    from datetime import timedelta  # noqa: PLC0415

    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.manual_seed(0)
    torch.set_num_threads(1)
    if order.ranks > 1:
        store = dist.FileStore(str(scratch / "store"), order.ranks)
        limit = timedelta(seconds=order.group_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=order.ranks, timeout=limit)
    yield


if __name__ == "__main__":
    main()

"""A process that has imported torch already and waits to become the rank of the next launch.  Standard library only.

The training's own Python runs it, in a Slurm step beside the training, once for each rank.  What Slurm starts is a
keeper, which imports nothing.  When the supervisor says so it forks a spare; that imports, and waits.  The wrapper of
the next launch comes over a Unix socket with its command and environment, then with stdin, stdout and stderr: the
spare becomes the rank once it has imported all, and the keeper reports to the wrapper how it ended.  A wrapper that
ends takes its rank along.
The files come last: left in the socket of a keeper that was stopped, they would hold up the end of their Slurm step.

Usage: PYTHON [OPTIONS] standby.py [MODULE...] -- PYTHON [OPTIONS]
    MODULE  is imported ahead, besides torch and the trainer library
    after --: the words of the training's command up to its script
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # our own directory: no place for a training to find modules in

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import time
import types
from collections.abc import Mapping
from functools import partial
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

NAME = "sk-standby"  # of keepers and spares; a spare that becomes a rank takes its program's
IMPORTS = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "stepkeeper_trainer.api",
)
WITH_TIME = ("torch._dynamo", "torch._inductor")  # which fully_shard and optimizers import when they are first used
GPU_FILES = ("/dev/nvidia", "/dev/kfd")  # open as soon as somebody has asked how many GPUs there are
_GPU_VARIABLES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_")  # which counted then
LEASE_S = 60.0  # without a message of the supervisor for so long, a spare is not wanted any more
HAND_OVER_WITHIN_S = 5.0
IMPORTED_WITHIN_S = 60.0  # that a wrapper waits for: a rank that starts now would not be quicker
SWEEP_WITHIN_S = 5.0
GO, HURRY = b"go\n", b"hurry\n"
FILES = 3  # stdin, stdout, stderr
LINE_BYTES_MAX = 4 * 2**20  # a command and an environment
OOM_SCORE_WAITING = 1000  # when memory runs out, the kernel shall take who only waits
OOM_SCORE_RANK = 500
ABSORBED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
# what an interpreter or a library reads when it is loaded: there a spare cannot follow a change any more
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "GLIBC_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "PYTORCH_",
    "LC_",
    "LANG",
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_UCRED = struct.Struct("3i")


class RefusedError(Exception):
    """Why a wrapper gets no spare."""


class Born(BaseException):
    """No error: it leads out of the keeper's loop, in the process that was forked to be a spare."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        self.channel = channel


class Spare:
    """The keeper's side of a spare."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel, self.ready = pid, channel, False


class Waiting:
    """A wrapper that waits until the spare has imported all."""

    def __init__(self, conn: socket.socket, wanted: bytes) -> None:
        self.conn, self.wanted, self.until = conn, wanted, time.monotonic() + IMPORTED_WITHIN_S


class Keeper:
    """Forks spares, hands them over, watches those that are ranks.  One thread."""

    def __init__(self, address: str, prefix: list[str]) -> None:
        self.prefix = prefix
        self.born = dict(os.environ)
        self.spare: Spare | None = None
        self.waiting: Waiting | None = None
        self.rank = 0  # pid
        self.rank_ended = False
        self.wrapper: socket.socket | None = None
        self.leaving = False
        self.buffered = b""
        self.lease_until = time.monotonic() + LEASE_S
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + address[1:] if address.startswith("@") else address)
        self.listener.listen(128)  # another user may connect as well, and a full queue refuses the wrapper
        self.woken, self.waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, self._on_input)
        self.selector.register(self.woken, selectors.EVENT_READ, self._on_signal)
        self.selector.register(self.listener, selectors.EVENT_READ, self._on_connection)

    def run(self) -> None:
        """Serve until nobody wants a spare any more and no rank is left.  Raises `Born` in each spare."""
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        for number in (*ABSORBED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a rank leaves behind becomes ours to end
        while True:
            self._collect()
            if self.leaving:
                self._end_spare("the standby is about to leave")
                if not self.rank:
                    self._sweep()  # for what a task leaves behind slurmstepd waits a second, and the job with it
                    return
            until = min(self.lease_until, self.waiting.until if self.waiting is not None else self.lease_until)
            ready = self.selector.select(max(0.0, until - time.monotonic()) if not self.leaving else None)
            for key, _ in ready:
                key.data()
            if time.monotonic() > self.lease_until:
                self.leaving = True
            if self.waiting is not None and time.monotonic() > self.waiting.until:
                self._end_spare(f"it still imports after {IMPORTED_WITHIN_S:g} s")

    # --- the supervisor ---------------------------------------------------------------------------

    def _on_input(self) -> None:
        data = os.read(0, 65536)
        *lines, self.buffered = (self.buffered + data).split(b"\n")
        self.lease_until = time.monotonic() + LEASE_S
        if not data:
            self.selector.unregister(0)
        if not data or b"quit" in lines:
            self.leaving = True
        if b"prepare" in lines and self.spare is None and not self.leaving:
            self._prepare()

    def _prepare(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self.selector.close()
            for sock in (ours, self.listener, self.wrapper):
                if sock is not None:
                    sock.close()
            os.close(self.woken)
            os.close(self.waker)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(0)
            raise Born(theirs)
        theirs.close()
        ours.settimeout(HAND_OVER_WITHIN_S)
        self.spare = Spare(pid, ours)
        self.selector.register(ours, selectors.EVENT_READ, partial(self._on_spare, self.spare))

    def _on_spare(self, spare: Spare) -> None:
        """Read that it is ready, or that it cannot be; a wrapper may wait for that."""
        if self.spare is not spare:
            return  # ended by what came in the same moment
        said: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, RefusedError):  # gone: as if it had said nothing
            said = json.loads(read_line(self.spare.channel))
        self.spare.ready = bool(said.get("ready"))
        if not self.spare.ready:
            self._end_spare(str(said.get("why", "it ended")))
        of = int(self.born.get("SLURM_NTASKS", "1"))
        report(
            {"standby": "ready", "of": of, **said}
            if said.get("ready")
            else {"standby": "gone", "why": "it ended", **said}
        )
        waiting = self._drop_gone()
        if waiting is not None:
            self._waits_no_more(waiting)
            self._answer(waiting.conn, waiting.wanted)

    def _end_spare(self, why: str) -> None:
        """End the spare; a wrapper that waits for it gets the reason."""
        if self.waiting is not None:
            self._refuse(self._waits_no_more(self.waiting).conn, why)
        spare, self.spare = self.spare, None
        if spare is not None:
            self.selector.unregister(spare.channel)
            spare.channel.close()
            kill(spare.pid)

    # --- a wrapper --------------------------------------------------------------------------------

    def _on_connection(self) -> None:
        conn, _ = self.listener.accept()
        conn.settimeout(HAND_OVER_WITHIN_S)
        self._answer(conn)

    def _answer(self, conn: socket.socket, wanted: bytes = b"") -> None:
        """Serve a wrapper, or say why not; `wanted`: what it has asked for already."""
        try:
            self._hand_over(conn, wanted)
        except RefusedError as refused:
            self._refuse(conn, str(refused))
        except OSError:
            conn.close()  # it went on without us

    def _refuse(self, conn: socket.socket, why: str) -> None:
        if peer(conn) == os.getuid():
            report({"standby": "refused", "why": why})
        with contextlib.suppress(OSError):  # it went on without us
            conn.sendall(line({"refused": why}))
        conn.close()

    def _waits_no_more(self, waiting: Waiting) -> Waiting:
        self.selector.unregister(waiting.conn)
        self.waiting = None
        return waiting

    def _on_waiting(self, waiting: Waiting) -> None:
        """A wrapper that waits says nothing: it is gone, and the spare is for the next one."""
        if self.waiting is waiting:  # not another one, which came in the same moment
            self._waits_no_more(waiting).conn.close()

    def _drop_gone(self) -> Waiting | None:
        """Return the wrapper that waits, where it has not ended."""
        if self.waiting is not None and is_gone(self.waiting.conn):
            self._on_waiting(self.waiting)
        return self.waiting

    def _hand_over(self, conn: socket.socket, wanted: bytes) -> None:
        """Let the spare become a rank; it runs nothing before the wrapper has said `go`.

        Raises:
            RefusedError: for what is reported to the wrapper.
            OSError: the wrapper is gone.
        """
        if peer(conn) != os.getuid():
            raise RefusedError("you are another user")
        wanted = wanted or read_line(conn)
        spare = self._fit(json.loads(wanted))
        if not spare.ready:
            conn.sendall(line({"importing": IMPORTED_WITHIN_S}))
            with contextlib.suppress(OSError):  # it has just ended, as its channel says next
                spare.channel.sendall(HURRY)
            self.waiting = Waiting(conn, wanted)
            self.selector.register(conn, selectors.EVENT_READ, partial(self._on_waiting, self.waiting))
            return
        self.selector.unregister(spare.channel)
        self.spare = None
        try:
            self._agree(conn, spare, wanted)
        except BaseException:
            kill(spare.pid)
            raise
        finally:
            spare.channel.close()
        self.rank, self.wrapper, self.rank_ended = spare.pid, conn, False
        self.selector.register(conn, selectors.EVENT_READ, self._on_wrapper)
        report({"standby": "taken"})

    def _agree(self, conn: socket.socket, spare: Spare, wanted: bytes) -> None:
        """Pass on what the wrapper wants, and its `go`, which brings its files.  Raises as `_hand_over`."""
        spare.channel.sendall(wanted)
        answer = json.loads(read_line(spare.channel))
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        conn.sendall(line({"pid": spare.pid}))
        files = read_go(conn)
        try:
            socket.send_fds(spare.channel, [GO], files)
        finally:
            for file in files:
                os.close(file)

    def _fit(self, wanted: dict[str, Any]) -> Spare:
        """Return the spare, where it can become what is wanted.  Raises `RefusedError`."""
        if self.rank or self.leaving:
            raise RefusedError("the rank before has not ended" if self.rank else "the standby is about to leave")
        if self._drop_gone() is not None:
            raise RefusedError("another rank waits for it")
        # a rank's own Python says which one it is, whatever name it was started by
        own = [sys.executable, *self.prefix[1:]] if wanted["executable"] else self.prefix
        prefix = [wanted["executable"] or wanted["prefix"][0], *wanted["prefix"][1:]]
        if prefix != own:
            raise RefusedError(f"it runs {' '.join(own)}, not {' '.join(prefix)}")
        changed = differs(self.born, wanted["environment"])
        if changed:
            raise RefusedError(f"{changed} has changed, and is read when a program starts")
        if self.spare is None:
            raise RefusedError("none waits")
        return self.spare

    def _on_wrapper(self) -> None:
        """It passes a signal on; or it is gone: killed by a watcher, or by Slurm, or it knows how the rank ended."""
        assert self.wrapper is not None, "it is watched while there is one"
        with contextlib.suppress(OSError):  # reset: gone as well
            if number := self.wrapper.recv(1):
                if not self.rank_ended:
                    os.kill(self.rank, number[0])
                return
        self.selector.unregister(self.wrapper)
        self.wrapper.close()
        self.wrapper = None
        self._sweep()
        self.rank = 0

    # --- processes --------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self.woken, 64)
            self.leaving = self.leaving or any(number != signal.SIGCHLD for number in numbers)

    def _collect(self) -> None:
        """Take note of who has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.rank and self.wrapper is not None:
                self.rank_ended = True
                with contextlib.suppress(OSError):  # it was killed: that ends the rank too, and it has ended
                    self.wrapper.sendall(line({"status": status}))

    def _sweep(self) -> None:
        """End the rank, and what it has left behind, such as data loaders: Slurm would, at the end of its own step."""
        give_up_at = time.monotonic() + SWEEP_WITHIN_S
        while time.monotonic() < give_up_at:
            left = [pid for pid in children() if self.spare is None or pid != self.spare.pid]
            if not left:
                return
            for pid in left:
                kill(pid)
                with contextlib.suppress(ChildProcessError):  # collected already
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)


# --- the spare --------------------------------------------------------------------------------------


def wait(channel: socket.socket, modules: list[str]) -> dict[str, Any]:
    """Import, and return what to become once the wrapper has said `go`; end where nobody needs us."""
    for number in ABSORBED:
        signal.signal(number, signal.SIG_IGN)  # until we are a rank
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    oom_score(OOM_SCORE_WAITING)
    born = dict(os.environ)
    try:
        prepare(modules, channel)
    except Exception as error:  # noqa: BLE001 - whatever a module raises: reported, and the launch starts without us
        say_and_end(channel, {"why": f"{type(error).__name__}: {error}"[:300]})
    try:
        channel.sendall(line({"ready": True, "rss_mib": rss_mib()}))
        while (words := read_line(channel)) == HURRY:
            pass
        task: dict[str, Any] = json.loads(words)
        try:
            take_over(task, born)
        except (OSError, RefusedError) as error:
            say_and_end(channel, {"refused": str(error)})
        task["held"] = hold_signals()
        channel.sendall(line({"taken": True}))
        for place, file in enumerate(read_go(channel)):
            os.dup2(file, place)
            os.close(file)
    except (OSError, RefusedError):
        os._exit(0)  # the keeper is gone, or the wrapper
    channel.close()
    return task


def prepare(modules: list[str], channel: socket.socket) -> None:
    """Import what every training needs, and as long as no wrapper waits for us, what many need later.

    Raises:
        ImportError: there is no torch.
        RefusedError: a module has started CUDA, which must see the GPUs of the launch.
    """
    for name in (*IMPORTS, *modules, *WITH_TIME):
        if name in WITH_TIME and select.select([channel], [], [], 0)[0]:
            break
        try:
            importlib.import_module(name)
        except ImportError:
            if name == IMPORTS[0]:
                raise
    torch = sys.modules[IMPORTS[0]]
    if torch.cuda.is_initialized():
        raise RefusedError(f"one of {', '.join(modules)} starts CUDA when it is imported")


def take_over(task: dict[str, Any], born: Mapping[str, str]) -> None:
    """Take the place of the process that the wrapper would have started; its files come with `go`.

    Args:
        task: what the wrapper wants.
        born: our environment before the imports; what they have set they would have set there too.

    Raises:
        OSError: it cannot be done.
        RefusedError: it would not see the GPUs of the launch.
    """
    with open("/proc/self/comm", "w") as file:
        file.write(os.path.basename(sys.executable)[:15])  # from now on watchers end us like any rank
    os.setpgid(0, 0)
    wanted: dict[str, str] = task["environment"]
    changed = differs(born, wanted, _GPU_VARIABLES)
    if changed and has_counted_gpus():
        raise RefusedError(f"{changed} has changed, and a module has looked for GPUs when it was imported")
    by_imports = {
        name: value
        for name, value in os.environ.items()
        if value != born.get(name) and wanted.get(name) == born.get(name)
    }
    os.environ.clear()
    os.environ.update({**wanted, **by_imports})
    os.umask(task["umask"])
    if set(task["cpus"]) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, task["cpus"])  # the kernel leaves out CPUs that the standbys' Slurm step does not have
        if missing := set(task["cpus"]) - os.sched_getaffinity(0):
            raise RefusedError(f"its Slurm step has {len(missing)} CPUs less than the rank's")
    os.chdir(task["directory"])
    if task["words"][0] != "-m":
        os.stat(task["words"][0])  # what is not there is best reported by Python itself


def hold_signals() -> list[int]:
    """Note the signals that come from now on in the list that is returned: the rank gets them once it begins."""
    held: list[int] = []
    for number in ABSORBED:
        signal.signal(number, lambda number, _: held.append(number))
    return held


def become(task: dict[str, Any]) -> None:
    """Run the training as if its Python had just been started."""
    oom_score(OOM_SCORE_RANK)
    for number in ABSORBED:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in task["ignored"] else usual)
    for number in task["held"]:
        os.kill(os.getpid(), number)
    prefix, words = task["prefix"], task["words"]
    sys.orig_argv[:] = [*prefix, *words]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        if not safe:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` calls
        return
    sys.argv[:] = words
    path = words[0]
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(code, main.__dict__)  # noqa: S102 - the user's own script


def run(task: dict[str, Any]) -> None:
    """Run the training, and have its own errors look as ever: without our frames."""
    try:
        become(task)
    except Exception as error:  # noqa: BLE001 - what the interpreter does with an error that nobody has caught
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _HIDDEN:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


_HIDDEN = frozenset((__file__, runpy.__file__, "<frozen runpy>"))


# --- small things -----------------------------------------------------------------------------------


def line(words: Mapping[str, object]) -> bytes:
    """Return one line."""
    return json.dumps(words).encode() + b"\n"


def read_line(sock: socket.socket) -> bytes:
    """Read up to the end of a line, and not beyond.  Raises OSError, `RefusedError` where it ends before."""
    data = b""
    while not data.endswith(b"\n"):
        waiting = sock.recv(65536, socket.MSG_PEEK)
        more = sock.recv(waiting.find(b"\n") + 1 or len(waiting) or 1)
        if not more or len(data) > LINE_BYTES_MAX:
            raise RefusedError("the other side has gone")
        data += more
    return data


def read_go(sock: socket.socket) -> list[int]:
    """Read `go`, and the three files that come with it.  Raises as `read_line`."""
    data, files, _, _ = socket.recv_fds(sock, len(GO), FILES)
    if data != GO or len(files) != FILES:
        for file in files:
            os.close(file)
        raise RefusedError("nobody said go")
    return list(files)


def is_gone(sock: socket.socket) -> bool:
    """Tell whether the other side has ended."""
    if not select.select([sock], [], [], 0)[0]:
        return False
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def peer(sock: socket.socket) -> int:
    """Return the uid of the other side."""
    return int(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


def differs(born: Mapping[str, str], wanted: Mapping[str, str], names: tuple[str, ...] = _READ_AT_START) -> str:
    """Return a variable that has another value now, of those whose names begin so; else nothing.

    >>> differs({"OMP_NUM_THREADS": "1", "RANK": "0"}, {"OMP_NUM_THREADS": "1", "RANK": "3"})
    ''
    >>> differs({}, {"PYTHONPATH": "/work"})
    'PYTHONPATH'
    """
    found = sorted(name for name in {*born, *wanted} if name.startswith(names))
    return next((name for name in found if born.get(name) != wanted.get(name)), "")


def has_counted_gpus() -> bool:
    """Tell whether a driver for GPUs is open in this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith(GPU_FILES):
                return True
    return False


def report(words: Mapping[str, object]) -> None:
    """Tell the supervisor."""
    node = os.environ.get("SLURMD_NODENAME", "")
    with contextlib.suppress(OSError):  # srun is gone: the lease decides what that means
        os.write(1, line({**words, "node": node, "slot": os.environ.get("SLURM_LOCALID", "0")}))


def say_and_end(channel: socket.socket, words: Mapping[str, object]) -> NoReturn:
    """Say why this spare is none."""
    with contextlib.suppress(OSError):  # nobody listens any more
        channel.sendall(line(words))
    os._exit(0)


def kill(pid: int) -> None:
    """SIGKILL a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):  # gone is what we wanted
        os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """Return the pids of our children, orphans of ranks included."""
    own, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == own:
                    found.append(int(name))
    return found


def rss_mib() -> int:
    """Return how much memory this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def oom_score(score: int) -> None:
    """Say who goes first when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))  # refused in some containers: all works, but for that


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def address(environment: Mapping[str, str]) -> str:
    """Return where the wrapper of this rank finds its standby."""
    place = environment["STEPKEEPER_STANDBY"].replace("%N", environment.get("SLURMD_NODENAME", ""))
    return f"{place}/{environment.get('SLURM_LOCALID', '0')}"


def main(argv: list[str]) -> dict[str, Any] | None:
    """Keep spares; return what to run in a process that has become a rank, and nothing in the keeper itself."""
    split = argv.index("--")
    with open("/proc/self/comm", "w") as file:
        file.write(NAME)
    try:
        Keeper(address(os.environ), argv[split + 1 :]).run()
    except Born as born:
        channel = born.channel
    else:
        return None
    return wait(channel, argv[:split])


if __name__ == "__main__":
    _task = main(sys.argv[1:])
    if _task is not None:
        run(_task)

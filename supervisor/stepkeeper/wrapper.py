"""The direct child of a training step: one around each rank.  Standard library only, no packages.

With proctrack/cgroup a signal to a Slurm step reaches only the direct child of slurmstepd.  At a
preemption Slurm sends the steps SIGTERM at the very start of the grace time, and a rank without a
handler would die of it at once.  So the direct child is this program: it ignores SIGTERM, starts the
rank, waits, reports to the node's watcher how the rank ended, and ends in the same way.  Where a standby waits that has
imported torch already (`standby.py`), the rank is that process.

Usage: python -I -S wrapper.py [--agent] -- CMD ARGS...
    --agent  CMD starts ranks of its own (torchrun): do not give it a rank.

Where it is not us who start the rank (torchrun, a user's own srun line), its Python does the same when it starts:
`standby_site/sitecustomize.py` calls `hand_over`.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence

OOM_SCORE_ADJ = 500  # when memory runs out, the kernel shall take a rank, not a watcher or slurmstepd
EXIT_STOPPED = 75
FAILURE_REPORTED_WITHIN_S = 30.0  # the others hang until somebody knows
HAND_OVER_WITHIN_S = 5.0  # for each answer of a standby: then the rank is started as ever
LEAVING_REPORTED_WITHIN_S = 1.0  # the start as well: it is sent once
ABSORBED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
# what a rank's own process must pass on once a standby is the rank
PASSED_ON = (*ABSORBED, signal.SIGALRM, signal.SIGCONT, signal.SIGTSTP, signal.SIGURG)
STAND_IN = "sk-stand-in"  # the name of such a process: watchers signal the rank itself
HOOK, SLOT = "STEPKEEPER_STANDBY_HOOK", "STEPKEEPER_STANDBY_SLOT"


def main(argv: list[str]) -> int:
    """Run CMD and end as it ended."""
    split = argv.index("--")
    agent, command = "--agent" in argv[:split], argv[split + 1 :]
    environment = rank_environment(dict(os.environ), agent=agent)
    for number in ABSORBED:
        signal.signal(number, signal.SIG_IGN)
    words = int(environment.pop("STEPKEEPER_STANDBY_WORDS", "0"))
    prefix, rest = command[:words], command[words:]
    if python := environment.pop("STEPKEEPER_STANDBY_PYTHON", ""):  # CMD is a script of it, such as torchrun
        prefix, rest = [python], [found(command[0], environment), *command[1:]]
    standby = Standby(environment.pop("STEPKEEPER_STANDBY", ""), "SLURM_LOCALID", environment)
    pid = standby.take(prefix, rest, environment)
    if not pid:
        pid = os.fork()
    if pid == 0:
        become_rank(command, environment)
    rank = int(environment.get("SLURM_PROCID", "0"))
    launch = f"{environment.get('STEPKEEPER_ATTEMPT', '')}.{environment.get('STEPKEEPER_LAUNCH', '')}"
    address = environment.get("STEPKEEPER_SOCKET", "")
    local_rank = int(environment.get("SLURM_LOCALID", "0"))
    tell(
        address,
        {"type": "task_started", "launch": launch, "rank": rank, "local_rank": local_rank, "pid": pid}
        | standby.reported,
        LEAVING_REPORTED_WITHIN_S,
    )
    status = standby.wait(pid) if standby.used else os.waitpid(pid, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    how = {"signal": -code} if code < 0 else {"code": code}
    patience_s = FAILURE_REPORTED_WITHIN_S if code not in (0, EXIT_STOPPED) else LEAVING_REPORTED_WITHIN_S
    tell(address, {"type": "task_exited", "launch": launch, "rank": rank, "at": time.time(), **how}, patience_s)
    return end_as(code)


def end_as(code: int) -> int:
    """End by the signal by which the rank ended, or return its exit code."""
    if code < 0:
        # a script's own module may have this name, and do anything: we end by the signal all the same
        with contextlib.suppress(Exception):
            import resource  # noqa: PLC0415 - a rank's Python loads us first

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank left its core already
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
        time.sleep(1)  # a signal whose default is to be ignored does not end us
        return 128 - code
    return code


def rank_environment(environment: dict[str, str], *, agent: bool) -> dict[str, str]:
    """Add what torch expects of a launcher, from what Slurm says, and this node's socket."""
    node = environment.get("SLURMD_NODENAME", "")
    environment["STEPKEEPER_SOCKET"] = environment.get("STEPKEEPER_SOCKET", "").replace("%N", node)
    directory = environment.get("STEPKEEPER_ERROR_DIR", "")
    if directory:  # what torch's `record` writes there says more than a log; a torchrun passes its workers' on
        name = f"agent-of-{node}" if agent else f"rank-{environment['SLURM_PROCID']}"
        environment.setdefault("TORCHELASTIC_ERROR_FILE", os.path.join(directory, f"{name}.json"))
    if environment.get("SLURM_DISTRIBUTION") == "arbitrary":  # Slurm numbers the nodes otherwise than their ranks
        tasks = int(environment["SLURM_NTASKS"]) // int(environment["SLURM_STEP_NUM_NODES"])
        environment["SLURM_NODEID"] = str(int(environment["SLURM_PROCID"]) // tasks)
    if agent:
        environment.setdefault("PET_LOCAL_ADDR", own_address(environment))  # torchrun's --local-addr
        environment.setdefault("PET_NODE_RANK", environment.get("SLURM_PROCID", "0"))  # and its --node-rank
    else:
        environment["RANK"] = environment["SLURM_PROCID"]
        environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
        environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
        environment["LOCAL_WORLD_SIZE"] = environment["STEPKEEPER_TASKS_PER_NODE"]
    return environment


class Standby:
    """A process that waits to become this rank; where there is none, or it cannot, a rank is started as ever."""

    def __init__(self, place: str, slot: str, environment: Mapping[str, str]) -> None:
        """Note where it is; without a place there is none.

        Args:
            place: of the standbys of this launch, with %N for the node.
            slot: the variable that says which of this node's ranks we are.
            environment: the rank's.
        """
        node = environment.get("SLURMD_NODENAME", "")
        self._address = f"{place.replace('%N', node)}/{environment.get(slot, '0')}" if place else ""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unread = b""
        self.used = False
        self.reported: dict[str, object] = {}
        """What the watcher gets of it."""

    def take(
        self,
        prefix: list[str],
        words: list[str],
        environment: Mapping[str, str],
        executable: str = "",
        ignored: Sequence[int] = (),
    ) -> int:
        """Return the pid of the rank, which has taken all that we were given; 0: start one.

        Args:
            prefix: Python and its options, as they stand in the command.
            words: of the command, from the script or `-m` on.
            environment: for the rank.
            executable: `sys.executable`, where we are that Python.
            ignored: signals that the rank ignores from its start, as behind `nohup`.
        """
        if not self._address:
            return 0
        request = {
            "prefix": prefix,
            "words": words,
            "executable": executable,
            "environment": dict(environment),
            "directory": os.getcwd(),
            "umask": os.umask(0),
            "ignored": list(ignored),
            "cpus": sorted(os.sched_getaffinity(0)),
        }
        os.umask(int(str(request["umask"])))
        try:
            pid = self._hand_over(json.dumps(request).encode() + b"\n", stands_in=bool(executable))
        except (OSError, ValueError, KeyError) as error:
            self._connection.close()  # it runs nothing for us any more
            why = str(error) or type(error).__name__
            self.reported = {"cold": why[:200]}
            sys.stderr.write(f"stepkeeper: no warm standby for this rank: {why}; it starts without one\n")
            sys.stderr.flush()
            return 0
        self.used, self.reported = True, {"warm": True}
        return pid

    def _hand_over(self, request: bytes, *, stands_in: bool) -> int:
        """Give all to the standby's keeper, which runs nothing before we have said `go`.

        Args:
            request: all of it, as a line.
            stands_in: from the rank's first moment on, this process has the name by which watchers pass it over.

        Raises:
            OSError: it does not answer, or is another user's.
            ValueError: it refuses, and why.
        """
        if "PMI_FD" in os.environ:
            raise ValueError("the rank has a connection to Slurm's PMI, which cannot be handed over")
        sock = self._connection
        sock.settimeout(HAND_OVER_WITHIN_S)
        sock.connect("\0" + self._address[1:] if self._address.startswith("@") else self._address)
        credentials = struct.Struct("3i")
        owner = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]
        if owner != os.getuid():
            raise ValueError(f"its address belongs to user {owner}")
        sock.sendall(request)
        answer = json.loads(self._line())
        if "importing" in answer:  # it has begun before us, so a rank that starts now would not be quicker
            self._wait_for_import(float(answer["importing"]) + HAND_OVER_WITHIN_S)
            answer = json.loads(self._line())
        if "pid" not in answer:
            raise ValueError(answer.get("refused", "it cannot"))
        own_name = _rename(STAND_IN) if stands_in else ""
        try:
            socket.send_fds(sock, [b"go\n"], [0, 1, 2])
        except OSError:
            if stands_in:
                _rename(own_name)
            raise
        sock.settimeout(None)
        return int(answer["pid"])

    def _wait_for_import(self, within_s: float) -> None:
        """Wait for the next answer, as long as no signal is held back for the rank.  Raises ValueError."""
        until = time.monotonic() + within_s
        while b"\n" not in self._unread and not select.select([self._connection], [], [], 0.2)[0]:
            if signal.sigpending() & set(PASSED_ON):
                raise ValueError("a signal came while it imported")
            if time.monotonic() > until:
                raise ValueError("it does not answer")

    def _line(self) -> bytes:
        while b"\n" not in self._unread:
            more = self._connection.recv(4096)
            if not more:
                raise ConnectionResetError("it has ended")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def wait(self, pid: int) -> int:
        """Return the status with which the rank ended, as `waitpid` would."""
        try:
            return int(json.loads(self._line())["status"])
        except (OSError, ValueError, KeyError):  # the keeper is gone, and takes its rank along
            with contextlib.suppress(ProcessLookupError):  # gone is what we wanted
                os.kill(pid, signal.SIGKILL)
            return int(signal.SIGKILL)

    def pass_on(self, number: int) -> None:
        """Have the rank get a signal that we got; its keeper knows whether it has ended."""
        with contextlib.suppress(OSError):  # the keeper is gone, and takes its rank along
            self._connection.send(bytes((number,)))


def hand_over(environment: MutableMapping[str, str], own_directory: str) -> None:
    """In the Python of a rank, at its start: have a standby be the rank, and end as it ends; else return.

    torchrun's own Python is no rank: it has no LOCAL_RANK.

    Args:
        environment: of this process.
        own_directory: the one by which Python has found us; the rank sees nothing of it.
    """
    slot = environment.get(SLOT, "")
    if slot not in environment:
        return
    place = environment.pop(HOOK, "")  # once: what this process starts is no rank
    del environment[SLOT]
    paths = environment.get("PYTHONPATH", "").split(":")
    if own_directory in paths:
        paths.remove(own_directory)
        environment["PYTHONPATH"] = ":".join(paths)
        if not paths:
            del environment["PYTHONPATH"]
    is_module = sys.argv[:1] == ["-m"]  # its name is only among the original words
    split = len(sys.orig_argv) - len(sys.argv) - is_module
    words = sys.orig_argv[split:]
    if split < 1 or not (words[0] == "-m" if is_module else words[0].endswith(".py")):
        return
    standby = Standby(place, slot, environment)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # none is lost between us and the rank
    try:
        ignored = [number for number in ABSORBED if signal.getsignal(number) is signal.SIG_IGN]
        pid = standby.take(sys.orig_argv[:split], words, environment, sys.executable, ignored)
        if pid:
            _stand_in(standby, pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stand_in(standby: Standby, pid: int) -> None:
    """Stand between the rank and whoever has started us."""
    try:
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: standby.pass_on(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os._exit(end_as(os.waitstatus_to_exitcode(standby.wait(pid))))
    finally:
        os._exit(1)  # never the rank a second time: its keeper ends the other one with us


def _rename(name: str) -> str:
    """Give this process another name; return the one that it had."""
    with open("/proc/self/comm", "r+") as file:
        before = file.read().rstrip("\n")
        file.write(name)
    return before


def own_address(environment: Mapping[str, str], *names: str) -> str:
    """Return how other nodes reach this one: the first of its names that resolves, else its address."""
    for name in (*names, socket.gethostname()):
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name, None)
            return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # no packet is sent: the kernel says which of our addresses the batch host would see
        sock.connect((environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"), 9))
        return str(sock.getsockname()[0])


def found(name: str, environment: Mapping[str, str]) -> str:
    """Return the path by which `exec` would start a program."""
    if "/" in name:
        return name
    paths = (os.path.join(directory, name) for directory in os.get_exec_path(environment))
    return next((path for path in paths if os.access(path, os.X_OK)), name)


def become_rank(command: list[str], environment: dict[str, str]) -> None:
    """In the child: default signals, first to go when memory runs out, then the command."""
    for number in (*ABSORBED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two for itself
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # refused in some containers: training goes on all the same
        descriptor = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        inherited = int(os.read(descriptor, 16))  # a container may have given us more: its watcher has as much
        os.pwrite(descriptor, str(max(inherited, OOM_SCORE_ADJ)).encode(), 0)
        os.close(descriptor)
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 - the user's own command
    except OSError as error:
        sys.stderr.write(f"stepkeeper: cannot start {command[0]!r}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def tell(address: str, message: dict[str, object], patience_s: float = 0.0) -> None:
    """Send one datagram to the watcher; try again for a while when it is being restarted or its queue is full."""
    if not address:
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    give_up_at = time.monotonic() + patience_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)  # noqa: FBT003 - the method takes no keyword
        while True:
            with contextlib.suppress(OSError):
                sock.sendto(json.dumps(message).encode(), name)
                return
            if time.monotonic() >= give_up_at:
                return  # srun's own words are left as evidence
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

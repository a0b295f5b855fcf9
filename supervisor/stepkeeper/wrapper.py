"""The direct child of a training step: one around each rank.  Standard library only, no packages.

With proctrack/cgroup a signal to a Slurm step reaches only the direct child of slurmstepd.  At a
preemption Slurm sends the steps SIGTERM at the very start of the grace time, and a rank without a
handler would die of it at once.  So the direct child is this program: it ignores SIGTERM, starts the
rank, waits, tells the node's watcher how the rank ended, and ends in the same way.

Usage: python -I -S wrapper.py [--agent] -- CMD ARGS...
    --agent  CMD starts ranks of its own (torchrun): do not give it a rank.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping

OOM_SCORE_ADJ = 500  # when memory runs out, the kernel shall take a rank, not a watcher or slurmstepd
EXIT_STOPPED = 75
FAILURE_TOLD_WITHIN_S = 30.0  # the others hang until somebody knows
LEAVING_TOLD_WITHIN_S = 1.0  # the start as well: it is told once
ABSORBED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run CMD and end as it ended."""
    split = argv.index("--")
    agent, command = "--agent" in argv[:split], argv[split + 1 :]
    environment = rank_environment(dict(os.environ), agent=agent)
    for number in ABSORBED:
        signal.signal(number, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        become_rank(command, environment)
    rank = int(environment.get("SLURM_PROCID", "0"))
    launch = f"{environment.get('STEPKEEPER_ATTEMPT', '')}.{environment.get('STEPKEEPER_LAUNCH', '')}"
    address = environment.get("STEPKEEPER_SOCKET", "")
    local_rank = int(environment.get("SLURM_LOCALID", "0"))
    tell(
        address,
        {"type": "task_started", "launch": launch, "rank": rank, "local_rank": local_rank, "pid": pid},
        LEAVING_TOLD_WITHIN_S,
    )
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    how = {"signal": -code} if code < 0 else {"code": code}
    patience_s = FAILURE_TOLD_WITHIN_S if code not in (0, EXIT_STOPPED) else LEAVING_TOLD_WITHIN_S
    tell(address, {"type": "task_exited", "launch": launch, "rank": rank, "at": time.time(), **how}, patience_s)
    if code < 0:
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
    if directory:  # what torch's `record` writes there tells more than a log; a torchrun passes its workers' on
        name = f"agent-of-{node}" if agent else f"rank-{environment['SLURM_PROCID']}"
        environment.setdefault("TORCHELASTIC_ERROR_FILE", os.path.join(directory, f"{name}.json"))
    if agent:
        environment.setdefault("PET_LOCAL_ADDR", own_address(environment))  # torchrun's --local-addr
        environment.setdefault("PET_NODE_RANK", environment.get("SLURM_NODEID", "0"))  # and its --node-rank
    else:
        environment["RANK"] = environment["SLURM_PROCID"]
        environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
        environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
        environment["LOCAL_WORLD_SIZE"] = environment["STEPKEEPER_TASKS_PER_NODE"]
    return environment


def own_address(environment: Mapping[str, str], *names: str) -> str:
    """Return how other nodes reach this one: the first of its names that resolves, else its address."""
    for name in (*names, socket.gethostname()):
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name, None)
            return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # no packet is sent: the kernel tells which of our addresses the batch host would see
        sock.connect((environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"), 9))
        return str(sock.getsockname()[0])


def become_rank(command: list[str], environment: dict[str, str]) -> None:
    """In the child: default signals, first to go when memory runs out, then the command."""
    for number in (*ABSORBED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two for itself
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # refused in some containers: training goes on all the same
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, str(OOM_SCORE_ADJ).encode())
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

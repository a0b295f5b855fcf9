"""What a test can do to nodes and to slurmctld: kill them, as a loss of power or in part, and bring them back."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.lab import facts, processes
from tests.lab.facts import NodeFacts
from tests.lab.faults import LabError

if TYPE_CHECKING:
    from tests.lab.cluster import Lab

NODE_S = 120.0
CONTROLLER_S = 120.0


class Nodes:
    """Abilities of a lab; mixed into `Lab`."""

    def nodes(self: "Lab") -> dict[str, NodeFacts]:
        """Return every node as slurmctld sees it; empty while slurmctld does not answer."""
        done = self.run("scontrol", "-o", "show", "nodes", check=False)
        found = [facts.node(line) for line in done.stdout.splitlines() if line.startswith("NodeName=")]
        return {node.name: node for node in found}

    def wait_node(self: "Lab", node: str, *flags: str, timeout_s: float = NODE_S) -> NodeFacts:
        """Wait until the state of a node holds all of some words, as in `wait_node("k1n1", "IDLE", "DRAIN")`."""
        seen: list[NodeFacts] = []

        def holds() -> bool:
            found = self.nodes().get(node)  # none while slurmctld does not answer
            seen[:] = [] if found is None else [found]
            return found is not None and set(flags) <= set(found.state.rstrip("*").split("+"))

        self.until(holds, f"{node} {flags}", timeout_s)
        return seen[0]

    def pids_on(self: "Lab", node: str) -> set[int]:
        """Return all processes of one node: slurmd, each slurmstepd, and all that runs below them.

        By the node's cgroup and by the environment that slurmd hands down to slurmstepd, and from both by
        ancestry: a task that scrubbed its environment and was orphaned is still in the cgroup.
        """
        heads = processes.by_environment(processes.NODE_VARIABLE, node)
        heads |= processes.pids_in(processes.cgroups_of(self.place.cgroup_mountpoint, node))
        heads = {pid for pid in heads if pid not in (1, self._guardian_pid())}
        return heads | processes.descendants_of_all(heads)

    def kill_node(self: "Lab", node: str) -> None:
        """Power loss: SIGKILL to slurmd and to every slurmstepd, task and batch process on that node.

        All is stopped first and then killed, children before parents, so that nobody lives to report the death of
        another.  The order matters: srun runs as a pair, of which one cancels the whole Slurm step when the other
        dies, and the death of the batch script before them wakes both (the kernel sends SIGHUP and SIGCONT to a
        stopped group that it orphans).  Then ranks on healthy nodes are lost, and Stepkeeper seems to be at fault.

        One thing differs from a real loss of power: the kernel closes their connections, so that srun sees an end
        where it would see silence.  `freeze_node` is silent.
        """
        stopped: set[int] = set()
        while new := self.pids_on(node) - stopped:  # what was forked while we looked
            processes.send(new, signal.SIGSTOP)
            stopped |= new
        processes.send(processes.children_first(stopped), signal.SIGKILL)
        if left := processes.kill_all(lambda: self.pids_on(node)):
            raise LabError(f"{node}: processes {sorted(left)} survived SIGKILL")
        processes.remove_cgroups(processes.cgroups_of(self.place.cgroup_mountpoint, node))

    def freeze_node(self: "Lab", node: str) -> None:
        """Loss of the network: everything on the node stops, all connections stay open and silent.

        `thaw_node` lets it go on, `kill_node` ends it.
        """
        processes.send(self.pids_on(node), signal.SIGSTOP)

    def thaw_node(self: "Lab", node: str) -> None:
        """End `freeze_node`: all goes on as after a partition of the network."""
        processes.send(self.pids_on(node), signal.SIGCONT)

    def kill_slurmd_only(self: "Lab", node: str) -> None:
        """SIGKILL slurmd; the steps on the node run on, as after a crash of slurmd."""
        if pid := self._daemon_pid(f"slurmd-{node}"):
            processes.send([pid], signal.SIGKILL)
            self.until(lambda: not processes.alive(pid), f"the end of slurmd on {node}", NODE_S)

    def start_node(self: "Lab", node: str, timeout_s: float = NODE_S) -> None:
        """Bring a node back, as an administrator would: slurmd, then RESUME where Slurm had given it up.

        Slurm drains a node itself where something of a job does not die in time ("Kill task failed").
        """
        if self._daemon_pid(f"slurmd-{node}") is None:
            self._start_slurmd(node)

        def resumed() -> bool:
            found = self.nodes().get(node)
            given_up = found is not None and ("DOWN" in found.state or "DRAIN" in found.state)
            if found is not None and given_up and not found.state.endswith("*"):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
            return found is not None and found.is_up

        self.until(resumed, f"{node} to come back", timeout_s)

    def drain(self: "Lab", node: str, reason: str) -> None:
        """Drain a node as the administrator."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def undrain(self: "Lab", node: str) -> None:
        """Return a drained node to service as the administrator."""
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def stop_slurmctld(self: "Lab", number: signal.Signals = signal.SIGTERM) -> None:
        """Stop slurmctld and wait for it; with SIGKILL, what it had not saved is lost."""
        if pid := self._daemon_pid("slurmctld"):
            processes.send([pid], number)
            self.until(lambda: not processes.alive(pid), "the end of slurmctld", CONTROLLER_S)

    def start_slurmctld(self: "Lab") -> None:
        """Start slurmctld again and wait until it answers."""
        self._spawn("slurmctld", self._slurmctld())
        self.until(
            lambda: " is UP" in self.run("scontrol", "ping", check=False).stdout,
            "slurmctld to answer",
            CONTROLLER_S,
        )

    @contextmanager
    def hung_slurmctld(self: "Lab") -> Iterator[None]:
        """Have slurmctld stand still for a while: connections are taken, and nothing is answered."""
        pid = self._daemon_pid("slurmctld")
        if pid is None:
            raise LabError("no slurmctld runs here")
        processes.send([pid], signal.SIGSTOP)
        try:
            yield
        finally:
            processes.send([pid], signal.SIGCONT)

    def restart_slurmctld(self: "Lab") -> None:
        """Stop and start slurmctld: jobs go on, and it reads its state again."""
        self.stop_slurmctld()
        self.start_slurmctld()

    def _start_slurmd(self: "Lab", node: str) -> None:
        # a host name of its own, as on a real node: `srun --output=%N` and gethostname() tell the nodes apart
        start = 'hostname "$0" && exec slurmd -D -N "$0" -f "$@"'
        more = self.place.newest.slurmd_options if self.place.newest else ()
        argv = ["unshare", "--uts", "sh", "-c", start, node, str(self.place.conf), *more]
        self._spawn(f"slurmd-{node}", argv, **{processes.NODE_VARIABLE: node})

    def _guardian_pid(self: "Lab") -> int:
        return self._guardian.pid if self._guardian is not None else 0

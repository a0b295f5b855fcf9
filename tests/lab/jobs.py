"""What a test can do to jobs: submit, watch, preempt, cancel, requeue, and find their processes."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import facts, processes
from tests.lab.facts import JobFacts
from tests.lab.faults import LabTimeoutError
from tests.lab.looking import holds_within

if TYPE_CHECKING:
    from tests.lab.cluster import Lab

WAIT_S = 120.0
ENDED = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    )
)
Wanted = str | frozenset[str] | Callable[[JobFacts], object]


class Jobs:
    """Abilities of a lab; mixed into `Lab`."""

    def submit(
        self: "Lab",
        script: str | Sequence[str] | Path,
        *,
        sbatch_args: Sequence[str] = (),
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> int:
        """Submit a batch job and return its id.

        Args:
            script: Text of the script (without `#!` it is run by bash), or a file with its arguments: a path, or
                a list of file and arguments.
            sbatch_args: Options of sbatch.  Without `--output`, the log is `slurm-%j.out` in the work directory.
            user: An ordinary account, see `USERS`; None is root.
            env: More environment for sbatch, which Slurm passes on to the job.
            cwd: The submit directory; the user's work directory by default.
        """
        stdin = None
        if isinstance(script, str):
            stdin, argv = (script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"), []
        else:
            argv = [str(part) for part in ([script] if isinstance(script, Path) else script)]
        done = self.run("sbatch", "--parsable", *sbatch_args, *argv, user=user, env=env, cwd=cwd, stdin=stdin)
        return int(done.stdout.strip().partition(";")[0])

    def job(self: "Lab", job_id: int) -> JobFacts:
        """Return what slurmctld says about a job."""
        return facts.job(self.run("scontrol", "-o", "show", "job", str(job_id)).stdout.splitlines()[0])

    def wait_job(
        self: "Lab", job_id: int, wanted: Wanted, timeout_s: float = WAIT_S, *, closely: bool = False
    ) -> JobFacts:
        """Wait until a job is in a state (or one of several, or a predicate holds) and return its facts."""
        found: list[JobFacts] = []

        def is_there() -> object:
            found[:] = [self.job(job_id)]
            return wanted(*found) if callable(wanted) else found[0].state in _words(wanted)

        if not holds_within(is_there, timeout_s, closely=closely):
            what = "a condition" if callable(wanted) else wanted
            raise LabTimeoutError(
                f"waited {timeout_s} s for {what}; last seen {found[0]}; {self.queue()}\n{self.log_tail()}"
            )
        return found[0]

    def wait_ended(self: "Lab", job_id: int, timeout_s: float = WAIT_S) -> JobFacts:
        """Wait until a job is over, however it ended."""
        return self.wait_job(job_id, ENDED, timeout_s)

    def output(self: "Lab", job_id: int) -> str:
        """Return what a job has written to its log so far."""
        path = Path(self.job(job_id).raw["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def preempt(self: "Lab", job_id: int, nodes: Sequence[str] | None = None) -> int:
        """Submit an urgent job that takes the nodes of another; return its id, which `release` ends."""
        taken = tuple(nodes or self.job(job_id).nodes)
        assert taken, f"job {job_id} has no nodes to take"
        return self.submit(
            "exec sleep infinity",
            sbatch_args=[
                "--partition=urgent",
                f"--nodes={len(taken)}",
                f"--nodelist={','.join(taken)}",
                f"--ntasks-per-node={self.options.cpus}",  # all CPUs; not `--exclusive`, which wants all GPUs too
                "--no-requeue",
                "--job-name=urgent",
                "--output=/dev/null",
            ],
        )

    def release(self: "Lab", urgent_id: int) -> None:
        """End an urgent job and wait until its nodes are free."""
        self.run("scancel", str(urgent_id))
        self.wait_ended(urgent_id)

    def cancel(self: "Lab", job_id: int, *args: str, user: str | None = None) -> None:
        """`scancel`, by root or by the owner."""
        self.run("scancel", *args, str(job_id), user=user)

    def requeue(self: "Lab", job_id: int, user: str | None = None) -> None:
        """`scontrol requeue`, by the administrator or by the owner."""
        self.run("scontrol", "requeue", str(job_id), user=user)

    def step_pids(self: "Lab", job_id: int, step: str | int = "batch") -> dict[str, list[int]]:
        """Return the processes of one Slurm step by node, without slurmstepd: `batch`, or the number of the step."""
        result = {}
        for node in self.node_names:
            if self.place.cgroup_mountpoint is not None and not self.options.linuxproc:
                pids = processes.pids_in(
                    self.place.cgroup_mountpoint.glob(f"freezer/slurm_{node}/uid_*/job_{job_id}/step_{step}")
                )
            else:
                pids = self._step_pids_by_ancestry(node, job_id, step)
            pids = {pid for pid in pids if processes.name(pid) != "slurmstepd"}
            if pids:
                result[node] = sorted(pids)
        return result

    def task_pids(self: "Lab", job_id: int, step: str | int = "batch") -> dict[str, list[int]]:
        """Return only the direct children of slurmstepd: the tasks that srun started, or the batch process."""
        found = self.step_pids(job_id, step)
        return {
            node: tasks
            for node, pids in found.items()
            if (tasks := [pid for pid in pids if processes.name(processes.parent(pid)) == "slurmstepd"])
        }

    def batch_pid(self: "Lab", job_id: int, timeout_s: float = WAIT_S) -> int:
        """Return the batch process of a running job: the direct child of its slurmstepd, also after `exec`."""
        found: dict[str, list[int]] = {}

        def runs() -> bool:
            found.clear()
            found.update(self.task_pids(job_id))
            return bool(found)

        self.until(runs, f"the batch process of job {job_id}", timeout_s)
        (pids,) = found.values()
        (pid,) = pids
        return pid

    def _step_pids_by_ancestry(self: "Lab", node: str, job_id: int, step: str | int) -> set[int]:
        """Find slurmstepd by its title `slurmstepd: [JOB.STEP]` among the node's processes, and what is below it."""
        title = f"slurmstepd: [{job_id}.{step}]"
        heads = [pid for pid in self.pids_on(node) if processes.title(pid).startswith(title)]
        return {pid for head in heads for pid in processes.descendants(head)}


def _words(wanted: str | frozenset[str]) -> Collection[str]:
    return {wanted} if isinstance(wanted, str) else wanted


def wrap(*argv: str | Path) -> str:
    """Return a batch script that becomes one command by `exec`."""
    return f"#!/bin/bash\nexec {shlex.join(str(part) for part in argv)}\n"

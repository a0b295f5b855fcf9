"""The command lines of our Slurm steps.  Geometry is always explicit.  Pure: golden tests hold them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepkeeper.slurm.cmd import is_own_srun


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a training step on each of its nodes."""

    tasks_per_node: int
    cpus_per_task: int | None = None
    overcommit: bool = False  # fewer CPUs on a node than ranks


def watcher_argv(nodes: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return the srun line of the watchers: one task a node, beside the training, taking nothing from it.

    `--overlap --mem=0` share what the job has; no `--gres=none`, which would hide the GPUs from NVML; no
    `--unbuffered`, which tears lines; `--no-kill` and `--kill-on-bad-exit=0` keep the other watchers when
    one dies; `--input=all` sends each command to all of them.
    """
    return [*_shape(nodes, 1), "--cpus-per-task=1", *_beside("stepkeeper-watcher"), *program]


def standby_argv(nodes: Sequence[str], geometry: Geometry, program: Sequence[str]) -> list[str]:
    """Return the srun line of the standbys: the shape of the training step, for each becomes one of its ranks.

    Its cgroup must be that of a training step: CPUs, memory and GPUs.  The rest is as for the watchers.
    """
    shape = [*_shape(nodes, geometry.tasks_per_node), *_cpus(geometry)]
    return [*shape, *_beside("stepkeeper-standby"), *program]


def training_argv(nodes: Sequence[str], geometry: Geometry, log_pattern: str, program: Sequence[str]) -> list[str]:
    """Return the srun line of a training step: ranks are contiguous on the nodes in Slurm's order."""
    shape = [*_shape(nodes, geometry.tasks_per_node), *_cpus(geometry)]
    return [*shape, *_step_options(log_pattern), "--cpu-bind=none", *program]


def _shape(nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--nodelist={','.join(nodes)}",
    ]


def _cpus(geometry: Geometry) -> list[str]:
    if geometry.overcommit:
        return ["--overcommit"]
    return [f"--cpus-per-task={geometry.cpus_per_task}"] if geometry.cpus_per_task else []


def _beside(name: str) -> list[str]:
    """What a step of ours beside the training needs; see `watcher_argv`."""
    return [
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=all",
        f"--job-name={name}",
    ]


def own_srun_argv(line: Sequence[str], log_pattern: str) -> list[str]:
    """Return the user's own srun line with our step options, which yield to the user's."""
    assert is_own_srun(line), "the CMD rule tells an own srun line by its first word"
    return [line[0], *_step_options(log_pattern), *line[1:]]


def _step_options(log_pattern: str) -> list[str]:
    """What every training step needs: beside the watchers, and stopped by us alone.

    `--kill-on-bad-exit=0`: when a rank dies, the others may still finish the commit in flight.
    """
    return [
        "--overlap",
        "--mem=0",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        "--label",
        f"--output={log_pattern}",
        "--open-mode=append",
    ]

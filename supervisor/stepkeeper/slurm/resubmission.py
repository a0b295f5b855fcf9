"""Submitting a job again where Slurm may not requeue it: what sbatch gets, as far as that can be known.  Pure.

The batch script brings its own `#SBATCH` lines along; what stood on sbatch's command line is read off the job.
"""

from __future__ import annotations

import datetime as dt
import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from stepkeeper.slurm import submitted
from stepkeeper.slurm.client import field_of, shown_job
from stepkeeper.slurm.launch import WATCHER_VARIABLE, as_submitted
from stepkeeper.slurm.submitted import Words

CONTINUES = "STEPKEEPER_CONTINUES"  # `JOB:DIR`, for the new job: whose run it goes on with, and where that is
_AS_THEY_ARE = {  # field of `scontrol show job` -> option
    "Account": "account",
    "TimeMin": "time-min",
    "BatchFeatures": "batch",
    "Reservation": "reservation",
    "Licenses": "licenses",
    "Network": "network",
    "WCKey": "wckey",
    "Switches": "switches",
    "ReqNodeList": "nodelist",
    "NtasksPerTRES": "ntasks-per-gpu",
    "MailUser": "mail-user",
    "MailType": "mail-type",
    "ThreadSpec": "thread-spec",
    "Container": "container",
    "ContainerID": "container-id",
    "SegmentSize": "segment",
    "OOMKillStep": "oom-kill-step",
    "ResvPorts": "resv-ports",
}
_SWITCHES = {  # field that says `Yes` -> option
    "SpreadJob": "spread-job",
    "SpreadSegments": "spread-segments",
    "ConsolidateSegments": "consolidate-segments",
    "StepMgrEnabled": "stepmgr",
}
_GRES_FLAGS = (
    ("GresEnforceBind", "Yes", "enforce-binding"),
    ("GresEnforceBind", "No", "disable-binding"),
    ("GresAllowTaskSharing", "Yes", "allow-task-sharing"),
    ("GresOneTaskPerSharing", "Yes", "one-task-per-sharing"),
    ("GresOneTaskPerSharing", "No", "multiple-tasks-per-sharing"),
)
_NOT_CARRIED = {"TresBind": "gpu-bind", "TresFreq": "gpu-freq", "Power": "power", "BurstBuffer": "bb"}
# that sbatch would take for options or pass on as if they were of the new job; and what Slurm sets for each job anew
_OF_THE_JOB = ("SLURM_", "SLURMD_", "SBATCH_", WATCHER_VARIABLE, CONTINUES)
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL", "ENVIRONMENT")


class Resubmission(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is submitted again, in place of itself; `run_store.submission` is how one was."""

    options: tuple[str, ...]  # of sbatch
    arguments: tuple[str, ...]  # of the batch script
    script: str | None  # where the batch script was; None where it came from sbatch's standard input
    directory: str  # in which it was submitted
    unknown: tuple[str, ...]  # what may differ from the job before, in words

    def command(self, job: str, run_directory: str) -> str:
        """Return a shell line for a person who submits it by hand."""
        script, get = self.script, ""
        if script is None:
            script, get = "batch.sh", f"scontrol write batch_script {shlex.quote(job)} batch.sh && "
        variable = shlex.quote(f"{CONTINUES}={job_number(job)}:{run_directory}")
        words = shlex.join(["sbatch", *self.options, script, *self.arguments])
        return f"cd {shlex.quote(self.directory)} && {get}env {variable} {words}"


def job_number(job: str) -> str:
    """Return a job's id without the task of an array."""
    return job.partition("_")[0]


def marker(shown: str) -> str:
    """Return what the comment of the job that follows on this one says, so that no second one is submitted."""
    return f"stepkeeper:after={field_of(shown, 'JobId')}.{shown_job(shown).fields.get('Restarts', '0')}"


def plan(
    shown: str,
    script: str,
    environment: Mapping[str, str],
    words: Sequence[str],
    *,
    nodes: int,
    exclude: str,
    comment: str,
) -> Resubmission:
    """Return how the job is submitted again.

    Args:
        shown: `scontrol -o show job`.
        script: its batch script.
        environment: of the batch process (`as_submitted`).
        words: the supervisor's own command line: where it ends as the script's arguments do, those are known exactly.
        nodes: of the job as it was submitted; some may have been given back since.
        exclude: a node list.
        comment: of the new job.

    Raises:
        SlurmError: Slurm's answer is none that this version can read.
    """
    number, job = field_of(shown, "JobId"), shown_job(shown)
    rest = job.fields
    said = submitted.words(rest.get("SubmitLine", ""), rest.get("Command"), script, environment)
    wanted = submitted.nodes(said, nodes)
    options = [
        f"--dependency=afterany:{number}",
        f"--job-name={job.name}",
        f"--comment={comment}",
        "--begin=now",
        "--open-mode=append",  # the same log: never truncated
        _requeue(rest),
        f"--export={export(environment.get('SLURM_EXPORT_ENV', 'ALL'))}",
        f"--nodes={wanted}",
        *submitted.choices(rest, said),
        *_tasks(rest, nodes, said, chosen=wanted != str(nodes)),
        *_layout(rest, said),
        *(f"--{option}={value}" for field, option in _AS_THEY_ARE.items() if (value := rest.get(field))),
        *_memory(rest),
        *_devices(rest, script),
        *_sharing(rest),
        *([f"--deadline={_local(deadline)}"] if (deadline := rest.get("Deadline")) else []),
        *_streams(rest),
        *submitted.hidden(said),
    ]
    if exclude:
        options.append(f"--exclude={exclude}")
    if task := environment.get("SLURM_ARRAY_TASK_ID") or field_of(shown, "ArrayTaskId"):
        options.append(f"--array={task}")
    path, arguments, exact = _arguments(rest, words)
    return Resubmission(
        options=tuple(options),
        arguments=arguments,
        script=path,
        directory=rest.get("WorkDir") or "/",
        unknown=tuple(_unknown(rest, said, exact=exact)),
    )


def environment_of(environment: Mapping[str, str], run_directory: str, job_id: str) -> dict[str, str]:
    """Return the environment in which the new job is submitted: ours, without what belongs to this job.

    SLURM_CONF stays: it says which cluster.
    """
    kept = {
        name: value
        for name, value in as_submitted(environment).items()
        if name == "SLURM_CONF"
        or name in submitted.KEPT_VARIABLES
        or (not name.startswith(_OF_THE_JOB) and name not in _DEVICES)
    }
    return {**kept, CONTINUES: f"{job_id}:{run_directory}"}


def followed_by(listing: str, wanted: str) -> int | None:
    """Return the job whose comment says that it follows, from lines of `ID|COMMENT`; the newest, if there are more."""
    found = [
        int(number)
        for number, _, comment in (line.strip().partition("|") for line in listing.splitlines())
        if number.isdigit() and wanted in comment.split()
    ]
    return max(found, default=None)


def comment_of(listing: str, number: int, ours: str) -> str:
    """Return the comment for the new job: that of the one before, with our word in it renewed."""
    for line in listing.splitlines():
        found, _, comment = line.strip().partition("|")
        if found == str(number) and comment != "(null)":
            kept = [word for word in comment.split() if not word.startswith("stepkeeper:")]
            return " ".join([*kept, ours])
    return ours


def export(before: str) -> str:
    """Return what is exported: as the job was submitted, and always what says whose run it goes on with."""
    names = [name for name in before.split(",") if name not in ("NONE", "NIL")]
    return ",".join([*names, *(() if "ALL" in names else (CONTINUES,))])


def _requeue(rest: Mapping[str, str]) -> str:
    if rest.get("ExpeditedRequeue") == "Yes":
        return "--requeue=expedite"
    return "--requeue" if rest.get("Requeue") == "1" else "--no-requeue"


def _tasks(rest: Mapping[str, str], nodes: int, said: Words, *, chosen: bool) -> list[str]:
    """Return how many tasks; `chosen`: Slurm has chosen the number of nodes, and with it that of tasks."""
    options = []
    environment = said.environment
    per_node = (rest.get("NtasksPerN:B:S:C") or "0").partition(":")[0]
    if per_node.isdigit() and int(per_node):
        options.append(f"--ntasks-per-node={per_node}")
    tasks = rest.get("NumTasks") if not chosen or said.option("ntasks") else None
    if tasks is not None and rest.get("NumNodes") == str(nodes):  # else it is of a job that has shrunk
        options.append(f"--ntasks={tasks}")
    per_task = environment.get("SLURM_CPUS_PER_TASK") or rest.get("CPUs/Task") or ""
    if per_task.isdigit() and ("SLURM_CPUS_PER_TASK" in environment or int(per_task) > 1):
        options.append(f"--cpus-per-task={per_task}")
    least, ours = rest.get("MinCPUsNode") or "", max(1, _number(per_node)) * max(1, _number(per_task))
    if _number(least) > ours:
        options.append(f"--mincpus={least}")
    return options


def _layout(rest: Mapping[str, str], said: Words) -> list[str]:
    """Return how a node must be made, and how many tasks each part of it gets."""
    _, sockets, cores, threads = _parts(rest, "ReqB:S:C:T")
    _, _, per_socket, per_core = _parts(rest, "NtasksPerN:B:S:C")
    sockets = rest.get("Socks/Node", "") if not _number(sockets) else sockets
    options = {"sockets-per-node": sockets, "cores-per-socket": cores, "ntasks-per-socket": per_socket}
    if not (said.option("hint") or said.environment.get("SLURM_HINT")):  # which says the same, and excludes these
        options |= {"threads-per-core": threads, "ntasks-per-core": per_core}
    found = [f"--{option}={value}" for option, value in options.items() if _number(value)]
    found += [f"--{option}" for field, option in _SWITCHES.items() if rest.get(field) == "Yes"]
    if flags := [flag for field, value, flag in _GRES_FLAGS if rest.get(field) == value]:
        found.append(f"--gres-flags={','.join(flags)}")
    if (delay := rest.get("DelayBoot", "00:00:00")) != "00:00:00":
        found.append(f"--delay-boot={delay}")
    return found


def _parts(rest: Mapping[str, str], field: str) -> tuple[str, str, str, str]:
    first, second, third, fourth, *_ = [*rest.get(field, "").split(":"), "", "", "", ""]
    return first, second, third, fourth


def _number(value: str) -> int:
    """Return a count; 0 where there is none, as in `*`."""
    return int(value) if value.isdigit() else 0


def _devices(rest: Mapping[str, str], script: str) -> list[str]:
    """Return GPUs and other generic resources: `gres:gpu:a100:4` of older Slurms, `gres/gpu:a100:4` of newer ones."""
    options = []
    per_node = _resources(rest, "TresPerNode")
    if per_node:
        directive = re.search(r"^#SBATCH\s.*--gpus-per-node", script, re.MULTILINE)
        only_gpus = all(name.startswith("gpu:") for name in per_node)
        if directive and only_gpus:  # the same option, which replaces the directive's: the two would add up
            options.append(f"--gpus-per-node={','.join(name.removeprefix('gpu:') for name in per_node)}")
        else:
            options.append(f"--gres={','.join(per_node)}")
    for field, option in (
        ("TresPerJob", "gpus"),
        ("TresPerSocket", "gpus-per-socket"),
        ("TresPerTask", "gpus-per-task"),
        ("CpusPerTres", "cpus-per-gpu"),
    ):
        if found := [name.removeprefix("gpu:") for name in _resources(rest, field) if name.startswith("gpu:")]:
            options.append(f"--{option}={','.join(found)}")
    if tmp := rest.get("MinTmpDiskNode"):
        options += [f"--tmp={tmp}"] if tmp != "0" else []
    return options


def _resources(rest: Mapping[str, str], field: str) -> list[str]:
    return [name[len("gres:") :] for name in (rest.get(field) or "").split(",") if name.startswith(("gres:", "gres/"))]


def _memory(rest: Mapping[str, str]) -> list[str]:
    """Return how much memory, which sbatch accepts in one form only."""
    if per_gpu := [name.removeprefix("gpu:") for name in _resources(rest, "MemPerTres") if name.startswith("gpu:")]:
        return [f"--mem-per-gpu={','.join(per_gpu)}"]
    either = (("MinMemoryNode", "mem"), ("MinMemoryCPU", "mem-per-cpu"))
    return [f"--{option}={rest[field]}" for field, option in either if field in rest]


def _sharing(rest: Mapping[str, str]) -> list[str]:
    exclusive = rest.get("Exclusive")  # newer Slurms; in older ones OverSubscribe says it
    shared = rest.get("OverSubscribe")
    options = []
    if exclusive not in (None, "NO"):
        how = str(exclusive).lower()
        options.append(f"--exclusive={how}" if how in ("user", "mcs", "topo") else "--exclusive")
    elif exclusive is None and shared in ("NO", "USER", "MCS"):
        options.append("--exclusive" if shared == "NO" else f"--exclusive={shared.lower()}")
    elif shared == "YES":
        options.append("--oversubscribe")
    if (nice := rest.get("Nice")) not in (None, "0"):
        options.append(f"--nice={nice}")
    if rest.get("Contiguous") == "1":
        options.append("--contiguous")
    if (cores := rest.get("CoreSpec")) not in (None, "*"):
        options.append(f"--core-spec={cores}")
    return options


def _streams(rest: Mapping[str, str]) -> list[str]:
    out, error, given = rest.get("StdOut"), rest.get("StdErr"), rest.get("StdIn")
    options = [f"--chdir={directory}"] if (directory := rest.get("WorkDir")) else []
    if out:
        options.append(f"--output={_plain(out)}")
    if error and error != out:
        options.append(f"--error={_plain(error)}")
    if given and given != "/dev/null":
        options.append(f"--input={_plain(given)}")
    return options


def _local(instant: str) -> str:
    """Return an instant as sbatch reads it."""
    return dt.datetime.fromtimestamp(int(instant)).isoformat() if instant.isdigit() else instant  # noqa: DTZ006


def _plain(path: str) -> str:
    """Return a path in which nothing is replaced again."""
    return path.replace("%", "%%")


def _arguments(rest: Mapping[str, str], words: Sequence[str]) -> tuple[str | None, tuple[str, ...], bool]:
    """Return the script's path and arguments, and whether they are known exactly: Slurm shows them without quotes."""
    command = rest.get("Command")
    if command is None:
        return None, (), True
    path, _, tail = command.partition(" ")
    if not tail:  # newer Slurms show the arguments only where they show sbatch's own command line
        name = re.escape(path.rpartition("/")[2])
        found = re.search(rf"\s(?:\S*/)?{name}\s(.*)", rest.get("SubmitLine", ""))
        tail = found.group(1) if found else ""
    if not tail:
        return path, (), True
    for start in range(len(words)):
        if " ".join(words[start:]) == tail:
            return path, tuple(words[start:]), True
    return path, tuple(tail.split(" ")), False


def _unknown(rest: Mapping[str, str], said: Words, *, exact: bool) -> list[str]:
    unknown = []
    if not said.line:
        unknown += [
            f"{option} (Slurm does not show it; give it in the batch script)"
            for option, given in (
                ("--signal", said.option("signal", "SBATCH_SIGNAL")),
                ("--no-kill", said.flag("no-kill") or "SBATCH_NO_KILL" in said.environment),
            )
            if not given
        ]
    carried = " ".join((*submitted.hidden(said), *said.directives))
    unknown += [
        f"--{option} ({field}={value})"
        for field, option in _NOT_CARRIED.items()
        if (value := rest.get(field)) and f"--{option}" not in carried
    ]
    if not exact:
        unknown.append("quotes in the batch script's arguments")
    return unknown

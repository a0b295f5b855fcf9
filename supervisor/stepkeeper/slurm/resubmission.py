"""Submitting a job again where Slurm may not requeue it: what sbatch gets, as far as that can be known.  Pure.

The batch script brings its own `#SBATCH` lines along; what stood on sbatch's command line is read off the job.
"""

from __future__ import annotations

import datetime as dt
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from stepkeeper.slurm.client import field_of, shown_job
from stepkeeper.slurm.launch import WATCHER_VARIABLE, as_submitted

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
    said = _words(rest.get("SubmitLine", ""), rest.get("Command"), script, environment)
    wanted = _nodes_wanted(said, nodes)
    options = [
        f"--dependency=afterany:{number}",
        f"--job-name={job.name}",
        f"--comment={comment}",
        "--begin=now",
        "--open-mode=append",  # the same log: never truncated
        _requeue(rest),
        f"--export={export(environment.get('SLURM_EXPORT_ENV', 'ALL'))}",
        f"--nodes={wanted}",
        *_choices(rest, said),
        *_tasks(rest, nodes, said, chosen=wanted != str(nodes)),
        *_layout(rest, said),
        *(f"--{option}={value}" for field, option in _AS_THEY_ARE.items() if (value := rest.get(field))),
        *_memory(rest),
        *_devices(rest, script),
        *_sharing(rest),
        *([f"--deadline={_local(deadline)}"] if (deadline := rest.get("Deadline")) else []),
        *_streams(rest),
        *_hidden(said),
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
        or name in _KEPT_VARIABLES
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


def _tasks(rest: Mapping[str, str], nodes: int, said: _Words, *, chosen: bool) -> list[str]:
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


def _layout(rest: Mapping[str, str], said: _Words) -> list[str]:
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


def _unknown(rest: Mapping[str, str], said: _Words, *, exact: bool) -> list[str]:
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
    carried = " ".join((*_hidden(said), *said.directives))
    unknown += [
        f"--{option} ({field}={value})"
        for field, option in _NOT_CARRIED.items()
        if (value := rest.get(field)) and f"--{option}" not in carried
    ]
    if not exact:
        unknown.append("quotes in the batch script's arguments")
    return unknown


# What sbatch got that `scontrol show job` does not show of a job that runs.
#
# It stands on sbatch's own command line, which newer Slurms show, in the script's `#SBATCH` lines, and in variables
# that sbatch reads or sets.  The first of these that says so counts, as it does for sbatch.

# with a value; of sbatch's command line, where nothing else shows them
_OF_THE_LINE = (
    "acctg-freq",
    "bb",
    "bbf",
    "cluster-constraint",
    "context",
    "cpu-freq",
    "distribution",
    "extra",
    "gpu-bind",
    "gpu-freq",
    "hint",
    "mcs-label",
    "mem-bind",
    "profile",
    "signal",
    "tres-bind",
    "tres-per-task",
    "wait-all-nodes",
)
_FLAGS = {"no-kill": "k", "overcommit": "O", "use-min-nodes": ""}  # and its short form
_SHORT = {
    "constraint": "C",
    "distribution": "m",
    "nodes": "N",
    "ntasks": "n",
    "partition": "p",
    "qos": "q",
    "time": "t",
}
_SET_FOR_THE_JOB = {  # variable that sbatch sets for a job -> option
    "SLURM_CPU_FREQ_REQ": "cpu-freq",
    "SLURM_GPU_BIND": "gpu-bind",
    "SLURM_GPU_FREQ": "gpu-freq",
    "SLURM_HINT": "hint",
    "SLURM_PROFILE": "profile",
}
# that sbatch reads, for what Slurm does not show: they say to the new job what they said to this one
_KEPT_VARIABLES = frozenset(
    f"SBATCH_{name}"
    for name in (
        "ACCTG_FREQ", "BURST_BUFFER", "CLUSTER_CONSTRAINT", "CPU_FREQ_REQ", "DISTRIBUTION", "GPU_BIND", "GPU_FREQ",
        "HINT", "MEM_BIND", "NO_KILL", "OVERCOMMIT", "PROFILE", "SIGNAL", "TRES_BIND", "USE_MIN_NODES",
        "WAIT_ALL_NODES",
    )
)  # fmt: skip
_NO_LIMIT = "365-00:00:00"  # what Slurm makes of none when a job starts
_SIZES = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


class _Words(msgspec.Struct, frozen=True):
    """What sbatch got, word by word."""

    line: tuple[str, ...]  # its options on the command line; empty where Slurm does not show them
    directives: tuple[str, ...]  # those of the script
    environment: Mapping[str, str]  # of the job

    def option(self, name: str, variable: str = "") -> str | None:
        """Return the value of an option, of whichever of the three counts."""
        return _value(self.line, name) or self.environment.get(variable) or _value(self.directives, name)

    def flag(self, name: str) -> bool:
        """Tell whether an option without a value was given, on the command line or in the script."""
        forms = {f"--{name}", f"-{_FLAGS[name]}"} - {"-"}
        return not forms.isdisjoint((*self.line, *self.directives))


def _words(submit_line: str, script_path: str | None, script: str, environment: Mapping[str, str]) -> _Words:
    """Take apart what is known of a submission.

    Args:
        submit_line: sbatch's command line as Slurm shows it, without quotes; empty where it does not.
        script_path: where the batch script was; None where it came from standard input.
        script: the batch script.
        environment: of a process of the job.
    """
    return _Words(tuple(_before_the_script(submit_line, script_path)), tuple(_directives(script)), environment)


def _nodes_wanted(said: _Words, held: int) -> str:
    """Return how many nodes to ask for: as many as were held, or the same choice where the job left one.

    Of a job that runs, Slurm shows only how many it has.
    """
    wanted = said.option("nodes")
    return wanted if wanted is not None and _allows(wanted, held) else str(held)


def _one_of(said: _Words, name: str, variable: str, held: str | None) -> str | None:
    """Return the list of partitions (or of QOS) among which Slurm chose the one that it shows, if there was one."""
    wanted = said.option(name, variable)
    return wanted if wanted is not None and held in wanted.split(",") else held


def _choices(shown: Mapping[str, str], said: _Words) -> list[str]:
    """Return the limits and places among which Slurm may choose: of a job that runs, it shows its choice alone."""
    options = []
    for field, option in (("Partition", "partition"), ("QOS", "qos")):
        if value := _one_of(said, option, f"SBATCH_{field.upper()}", shown.get(field)):
            options.append(f"--{option}={value}")
    limit = shown.get("TimeLimit")
    if "TimeMin" in shown:  # Slurm may have shortened the limit, to start the job earlier
        limit = said.option("time", "SBATCH_TIMELIMIT") or limit
    if limit:
        options.append(f"--time={'UNLIMITED' if limit == _NO_LIMIT else limit}")
    features, preferred = shown.get("Features"), said.option("prefer") or shown.get("Prefer")
    if preferred:  # where these were free, they took the place of what was demanded
        features = said.option("constraint", "SBATCH_CONSTRAINT") or (features if features != preferred else None)
        options.append(f"--prefer={preferred}")
    return [*options, *([f"--constraint={features}"] if features else [])]


def _hidden(said: _Words) -> list[str]:
    """Return the options that Slurm does not show, for a command line."""
    found: dict[str, str] = {}
    for variable, option in _SET_FOR_THE_JOB.items():
        if value := said.environment.get(variable):
            found[option] = value
    if spread := said.environment.get("SLURM_DISTRIBUTION"):
        plane = said.environment.get("SLURM_DIST_PLANESIZE")
        found["distribution"] = f"plane={plane}" if spread == "plane" and plane else spread
    found |= {option: value for option in _OF_THE_LINE if (value := _value(said.line, option))}
    flags = [f"--{name}" for name in _FLAGS if said.flag(name)]
    if "--overcommit" not in flags and said.environment.get("SLURM_OVERCOMMIT") == "1":
        flags.append("--overcommit")
    return [*(f"--{option}={value}" for option, value in found.items()), *flags]


def _before_the_script(line: str, path: str | None) -> Iterator[str]:
    """Yield the options of a command line: behind the script's name, its own arguments begin."""
    name = path.rpartition("/")[2] if path is not None else None
    for word in line.split(" ")[1:]:
        if word.startswith("--wrap") or word.rpartition("/")[2] == name:
            return
        yield word


def _directives(script: str) -> Iterator[str]:
    """Yield the words of `#SBATCH` lines, which end where the script's first command begins."""
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            try:
                yield from shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                yield from line.removeprefix("#SBATCH").split()  # sbatch takes an open quote as it is
        elif line.strip() and not line.startswith("#"):
            return


def _value(given: Sequence[str], name: str) -> str | None:
    """Return the value of an option; of several, the last one counts."""
    long, short = f"--{name}", f"-{_SHORT[name]}" if name in _SHORT else None
    found = None
    for index, word in enumerate(given):
        if word.startswith(f"{long}="):
            found = word.removeprefix(f"{long}=")
        elif word in (long, short) and index + 1 < len(given):
            found = given[index + 1]
        elif short is not None and word.startswith(short) and not word.startswith("--") and word != short:
            found = word.removeprefix(short)
    return found or None


def _allows(wanted: str, held: int) -> bool:
    """Tell whether a job that wants `2-4`, `1-15:2` or `4,8,16` nodes can have so many.  Other words: no."""
    for part in wanted.split(","):
        match = _SIZES.fullmatch(part)
        if match is None:
            return False
        least, most, step = (int(group) if group else None for group in match.groups())
        assert least is not None, "the pattern has it"
        if held in range(least, (most or least) + 1, step or 1):
            return True
    return False

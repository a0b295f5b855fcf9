"""What each setting of a cluster means for a run.  Pure: a site in, findings out; one function a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stepkeeper.core.exits import ExitCode
from stepkeeper.doctor.site import Finding, Level, Partition, Site, users_log
from stepkeeper.frameworks import converting
from stepkeeper.frameworks.following import Following, notice, without_argument
from stepkeeper.frameworks.framework import WorldChange
from stepkeeper.printing import duration
from stepkeeper.slurm import cmd
from stepkeeper.slurm.launch import EXPEDITED_PARAMETER as EXPEDITED

MARGIN_S = 5.0  # between the end of a save and the kill
CREDENTIAL_S = 120.0  # Slurm's own, where AuthInfo does not say
LOST_NODE_SLOW_S = 600.0
UNKILLABLE_S = 120.0
OLDEST = (22, 5)
REQUEUE_DELAY_SINCE = (25, 11)
NETWORKED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "vast", "panfs", "orangefs", "9p", "afs")
SEALED = ("apptainer", "enroot")  # a user's container around the supervisor; docker may be what a node consists of
CODES = {int(code): code.meaning for code in ExitCode}
OURS = (
    "#SBATCH --requeue",
    "#SBATCH --open-mode=append",
    "#SBATCH --signal=B:USR1@",
)  # directives of the shipped batch script that remedies name

Rule = Callable[[Site], Iterator[Finding]]


def examine(site: Site) -> list[Finding]:
    """Return all findings, the gravest first."""
    found = [finding for rule in RULES for finding in rule(site)]
    return sorted(found, key=lambda finding: -finding.level.weight)


def _here(site: Site) -> Iterator[Finding]:
    if site.missing_commands:
        yield Finding(
            level=Level.PROBLEM,
            subject="Slurm's commands",
            found=f"not on PATH: {', '.join(site.missing_commands)}",
            means="the supervisor cannot start the training, ask why it is stopped, or requeue the job",
            remedy="put Slurm's bin directory on PATH in the batch script, or load the site's slurm module",
        )
    if site.container in SEALED:
        yield Finding(
            level=Level.WARNING,
            subject="container",
            found=site.container,
            means="a supervisor in a container is not the batch process, and may have another Slurm than the host",
            remedy="run `stepkeeper run` outside, and start the container in its CMD: "
            "exec stepkeeper run -- apptainer exec IMAGE python train.py",
        )
    if site.users_log:
        yield users_log()
    local = site.python_file_system and not site.python_file_system.startswith(NETWORKED)
    yield Finding(
        level=Level.NOTE if local else Level.OK,
        subject="stepkeeper's Python",
        found=f"{site.python} ({site.python_file_system or 'file system unknown'})",
        means="a local file system: the watchers need the same path on every node"
        if local
        else "on shared storage: every node sees it",
        remedy="install it at the same path on every node, or in an environment on shared storage" if local else "",
    )


def _version(site: Site) -> Iterator[Finding]:
    version = site.text("SLURM_VERSION") or "not known"
    if site.version < OLDEST:
        yield Finding(
            level=Level.WARNING,
            subject="SLURM_VERSION",
            found=version,
            means=f"older than {OLDEST[0]}.{OLDEST[1]:02d}, the oldest that is tested",
            remedy="try `stepkeeper selftest` before you trust a week of training to it",
        )
    else:
        yield Finding(level=Level.OK, subject="SLURM_VERSION", found=version, means="tested from 22.05 to 26.05")


def _requeue(site: Site) -> Iterator[Finding]:
    if site.text("JobRequeue") == "0":
        yield Finding(
            level=Level.WARNING,
            subject="JobRequeue",
            found="0",
            means="Slurm requeues no job, and allows no requeue, unless the job was submitted with --requeue",
            remedy=f"keep `{OURS[0]}` in the batch script",
        )
    else:
        yield Finding(level=Level.OK, subject="JobRequeue", found="1", means="jobs may be requeued")
    if plugins := site.text("JobSubmitPlugins"):
        yield Finding(
            level=Level.NOTE,
            subject="JobSubmitPlugins",
            found=plugins,
            means="the site's own rules may change what a job asks for, such as --requeue or --no-kill",
            remedy="look at a submitted job: scontrol show job JOB | grep -E 'Requeue|KillO'",
        )
    for key, does in (("RequeueExit", "requeues"), ("RequeueExitHold", "requeues and holds")):
        clash = sorted(set(_codes(site.text(key))) & CODES.keys())
        if clash:
            meanings = "; ".join(f"{code}: {CODES[code]}" for code in clash)
            yield Finding(
                level=Level.PROBLEM,
                subject=key,
                found=site.text(key),
                means=f"Slurm {does} a job that ends with {', '.join(map(str, clash))}, which are exit codes of the "
                f"supervisor ({meanings}): a run that is over would start again",
                remedy=f"admin: take {', '.join(map(str, clash))} out of {key} in slurm.conf",
            )
    if batch := site.seconds("MaxBatchRequeue"):
        yield Finding(
            level=Level.NOTE,
            subject="MaxBatchRequeue",
            found=f"{batch:g}",
            means=f"a job whose script fails to start {batch:g} times is held; Stepkeeper's requeues do not count",
        )


def _expedited(site: Site) -> Iterator[Finding]:
    if site.option("SlurmctldParameters", EXPEDITED) is None:
        return
    yield Finding(
        level=Level.NOTE,
        subject=EXPEDITED,
        found="set",
        means="a job with --requeue=expedite is put back by Slurm itself when its script fails, and held if its nodes "
        "are sound.  Under Stepkeeper no other requeues happen: a job whose run is over sets Requeue=0",
        remedy=f"`{OURS[0]}` without =expedite is enough.  A job that is held all the same (exit codes "
        f"{int(ExitCode.REQUEUE_FAILED)}, {int(ExitCode.UNDECIDED)}) continues after: scontrol release JOB",
    )


def _codes(text: str) -> Iterator[int]:
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            yield from range(int(first), min(int(last or first), 255) + 1)


def _requeue_delay(site: Site) -> Iterator[Finding]:
    credential = site.option("AuthInfo", "cred_expire")
    seconds = float(credential) if credential and credential.isdigit() else CREDENTIAL_S
    delay = site.option("SchedulerParameters", "requeue_delay")
    if site.version >= REQUEUE_DELAY_SINCE and delay and delay.isdigit():
        seconds = float(delay)
    if seconds <= 10:  # noqa: PLR2004 - nobody notices that
        yield Finding(level=Level.OK, subject="requeue delay", found=f"{seconds:g} s", means="a requeue costs little")
        return
    where = (
        "SchedulerParameters=requeue_delay=5"
        if site.version >= REQUEUE_DELAY_SINCE
        else "AuthInfo=cred_expire=30 (not below the clock differences between nodes)"
    )
    yield Finding(
        level=Level.NOTE,
        subject="requeue delay",
        found=f"{seconds:g} s",
        means=f"a requeued job cannot start for {seconds:g} s, even on free nodes",
        remedy=f"admin: run the node agent, which shortens it to seconds, or set {where}",
    )


def _log(site: Site) -> Iterator[Finding]:
    appends = site.text("JobFileAppend") == "1"
    yield Finding(
        level=Level.OK if appends else Level.NOTE,
        subject="JobFileAppend",
        found=site.text("JobFileAppend") or "0",
        means="logs of earlier attempts are kept"
        if appends
        else "a requeued job empties its log; what the supervisor said stays in the run directory, below logs/",
        remedy="" if appends else f"keep `{OURS[1]}` in the batch script",
    )


def _kill_wait(site: Site) -> Iterator[Finding]:
    wait = site.seconds("KillWait")
    if wait is None:
        return
    sudden = [each.name for each in site.partitions if each.preemptible and each.grace_s == 0]
    need = None if site.save_s is None else site.save_s + MARGIN_S
    if not sudden:
        means = "from SIGTERM to SIGKILL; preemption and time limit are announced earlier here"
        yield Finding(level=Level.OK, subject="KillWait", found=f"{wait:g} s", means=means)
    elif need is None:
        yield Finding(
            level=Level.NOTE,
            subject="KillWait",
            found=f"{wait:g} s",
            means=f"a preempted job in {', '.join(sudden)} has only this time, its save included (GraceTime 0)",
            remedy="run `stepkeeper doctor RUN` with an earlier run: it compares this with its save times",
        )
    else:
        short = need > wait
        yield Finding(
            level=Level.PROBLEM if short else Level.OK,
            subject="KillWait",
            found=f"{wait:g} s",
            means=f"a preempted job in {', '.join(sudden)} is killed after it; a save takes {site.save_s:.3g} s"
            + (": preemptions fall back to the last periodic save" if short else ""),
            remedy=f"admin: KillWait={round(need + 1)} in slurm.conf, or GraceTime={round(need + 1)} for the "
            "partition; else save more often"
            if short
            else "",
        )


def _preemption(site: Site) -> Iterator[Finding]:
    user_signal = site.option("SlurmctldParameters", "preempt_send_user_signal") is not None or (
        site.option("PreemptParameters", "send_user_signal") is not None
    )
    for partition in site.partitions:
        if partition.preemptible:
            yield from _preempted(site, partition, user_signal=user_signal)


def _preempted(site: Site, partition: Partition, *, user_signal: bool) -> Iterator[Finding]:
    mode = partition.preempt_mode
    name = f"partition {partition.name}"
    if "SUSPEND" in mode or "GANG" in mode:
        yield Finding(
            level=Level.WARNING,
            subject="PreemptMode",
            found=f"{name}: {mode}",
            means="jobs are stopped in place: no save is made, GPUs keep their memory, and collectives may time out "
            "when the job continues",
            remedy="submit to a partition with PreemptMode=REQUEUE, or ask the admin for one",
        )
        return
    if "CANCEL" in mode:
        yield Finding(
            level=Level.NOTE if partition.grace_s else Level.WARNING,
            subject="PreemptMode",
            found=f"{name}: {mode}",
            means="Slurm does not put a preempted job back into the queue; the supervisor does, within "
            + (f"GraceTime ({partition.grace_s:g} s)" if partition.grace_s else "KillWait, if it is quick enough"),
            remedy="" if partition.grace_s else f"admin: GraceTime=60 and PreemptMode=REQUEUE for {name}",
        )
    gets = "the batch process gets SIGUSR1" if user_signal else "the watchers get SIGTERM"
    need = None if site.save_s is None else site.save_s + MARGIN_S
    if partition.grace_s == 0:
        yield Finding(
            level=Level.NOTE if need is None or need <= (site.seconds("KillWait") or 0) else Level.WARNING,
            subject="GraceTime",
            found=f"{name}: 0 s",
            means="the signal of a preemption comes together with the end: only KillWait is left",
            remedy=f"admin: GraceTime={round((need or 55) + 5)} for {name}",
        )
    else:
        short = need is not None and need > partition.grace_s + (site.seconds("KillWait") or 0)
        yield Finding(
            level=Level.PROBLEM if short else Level.OK,
            subject="GraceTime",
            found=f"{name}: {partition.grace_s:g} s",
            means=f"at a preemption, {gets} {partition.grace_s:g} s before the end"
            + (f", and a save takes {site.save_s:.3g} s: it would not be finished" if short else ""),
            remedy=f"admin: GraceTime={round((need or 0) + 5)} for {name}; else save more often" if short else "",
        )
    if user_signal:
        yield Finding(
            level=Level.NOTE,
            subject="send_user_signal",
            found="set",
            means="at a preemption, only a job that asked for a signal gets one",
            remedy=f"keep `{OURS[2]}120` in the batch script",
        )


def _limits(site: Site) -> Iterator[Finding]:
    for partition in site.partitions:
        name = f"partition {partition.name}"
        if not partition.up or partition.root_only:
            yield Finding(
                level=Level.PROBLEM if len(site.partitions) == 1 else Level.NOTE,
                subject="partition",
                found=f"{partition.name}: {'only root may submit' if partition.root_only else 'not UP'}",
                means="jobs do not start there",
                remedy="choose another partition: sbatch -p",
            )
        if partition.max_time_s is not None:
            yield Finding(
                level=Level.OK,
                subject="MaxTime",
                found=f"{name}: {duration(partition.max_time_s)}",
                means="a longer training becomes a chain of attempts, each saved and requeued before its limit",
            )
        if partition.forced_sharing:
            yield Finding(
                level=Level.WARNING,
                subject="OverSubscribe",
                found=f"{name}: FORCE",
                means="other jobs may run on the same CPUs, or take turns with this one",
                remedy="#SBATCH --exclusive, or another partition",
            )


def _processes(site: Site) -> Iterator[Finding]:
    kind = site.text("ProctrackType")
    if kind == "proctrack/cgroup":
        yield Finding(level=Level.OK, subject="ProctrackType", found=kind, means="no process outlives its Slurm step")
    else:
        yield Finding(
            level=Level.WARNING,
            subject="ProctrackType",
            found=kind or "not set",
            means="processes can outlive their Slurm step and keep a GPU busy, and signals reach every child: a rank "
            "may die at a notice instead of saving",
            remedy="admin: ProctrackType=proctrack/cgroup in slurm.conf (slurmd must be restarted)",
        )
    if site.text("SignalChildrenProcesses").lower() == "yes":
        yield Finding(
            level=Level.WARNING,
            subject="SignalChildrenProcesses",
            found="yes",
            means="Slurm's SIGTERM reaches every process of a rank: data loaders without a handler die at a notice, "
            "and the rank with them",
            remedy="admin: SignalChildrenProcesses=no in cgroup.conf; else ignore SIGTERM in worker processes "
            "(DataLoader worker_init_fn)",
        )
    unkillable = site.seconds("UnkillableStepTimeout")
    if unkillable is not None and unkillable < UNKILLABLE_S:
        yield Finding(
            level=Level.NOTE,
            subject="UnkillableStepTimeout",
            found=f"{unkillable:g} s",
            means="a process that takes longer to die (a large host memory, a hung file system) gets its node drained "
            'by Slurm ("Kill task failed")',
            remedy=f"admin: UnkillableStepTimeout={UNKILLABLE_S:g} or more in slurm.conf",
        )


def _nodes(site: Site) -> Iterator[Finding]:
    timeout = site.seconds("SlurmdTimeout")
    if timeout == 0:
        yield Finding(
            level=Level.WARNING,
            subject="SlurmdTimeout",
            found="0",
            means="Slurm never marks a silent node DOWN: a requeued job may be given the same dead node",
            remedy="admin: SlurmdTimeout=300 in slurm.conf",
        )
    elif timeout is not None and timeout > LOST_NODE_SLOW_S:
        yield Finding(
            level=Level.NOTE,
            subject="SlurmdTimeout",
            found=f"{timeout:g} s",
            means="for this time Slurm may give a lost node to other jobs; a run excludes it for `exclude_lost_for_s`",
        )
    inactive = site.seconds("InactiveLimit")
    if inactive:
        yield Finding(
            level=Level.NOTE,
            subject="InactiveLimit",
            found=f"{inactive:g} s",
            means="Slurm ends a job whose srun does not answer for this time",
        )
    ports = site.text("SrunPortRange")
    if ports and ports not in ("0", "0-0"):
        yield Finding(
            level=Level.NOTE,
            subject="SrunPortRange",
            found=ports,
            means="each job runs two sruns at a time, each with a few ports of this range",
        )


RULES: tuple[Rule, ...] = (
    _here,
    _version,
    _requeue,
    _expedited,
    _requeue_delay,
    _log,
    _kill_wait,
    _preemption,
    _limits,
    _processes,
    _nodes,
)


# What a run would know of a command: its framework, its answer to a notice, and how it is resumed.


def examine_command(
    found: Following | None,
    command: Sequence[str],
    *,
    attach: str,
    resume_argument: bool | None,
    ours: bool,
    repair_pointers: bool = False,
) -> list[Finding]:
    """Return what there is to say of a command.

    Args:
        found: the framework of its script.
        command: as behind `stepkeeper run --`.
        attach: the setting.
        resume_argument: the setting.
        ours: the script uses our own trainer library.
        repair_pointers: the setting.
    """
    if ours:
        means = "it saves on a notice, and resumes from what it has saved"
        return [Finding(level=Level.OK, subject="framework", found="the script uses stepkeeper_trainer", means=means)]
    if found is None:
        return [
            Finding(
                level=Level.WARNING,
                subject="framework",
                found="none is recognized in the command, and no import of stepkeeper_trainer",
                means="a run relaunches the script; it chooses no checkpoint, and passes no resume argument",
                remedy="name it with --framework, or with --checkpoint-dir where its checkpoints are there already",
            )
        ]
    return [
        _directory(found),
        _notice(found, command, attach),
        _resume(
            found,
            command,
            setting=resume_argument,
            other=without_argument(found, attach=attach, repair_pointers=repair_pointers),
        ),
        _world(found, attach),
    ]


def _directory(found: Following) -> Finding:
    recognized = f"{found.title}: {found.why}"
    if found.directory is None:
        return Finding(
            level=Level.WARNING,
            subject="framework",
            found=recognized,
            means=f"where its checkpoints are is not known: {found.where}",
            remedy="set --checkpoint-dir",
        )
    means = f"its checkpoints are in {found.directory} ({found.where})"
    return Finding(level=Level.OK, subject="framework", found=recognized, means=means)


def _notice(found: Following, command: Sequence[str], attach: str) -> Finding:
    said = notice(found, command, attach=attach)
    level = Level.OK if said.answered else Level.WARNING
    return Finding(level=level, subject="save on notice", found=said.shown, means=said.means, remedy=said.remedy)


def _resume(found: Following, command: Sequence[str], *, setting: bool | None, other: str) -> Finding:
    subject, means = "resume argument", "the newest verified checkpoint is passed to the script at each launch"
    if found.has_arguments and cmd.has_place(command):
        place = "in place of {resume}"
    elif setting or (setting is None and found.appended and found.resume):
        place = f"at the end of the command ({found.resume or '--resume-argument'})"
    elif found.resume:
        place, means = found.resume, "the script itself takes the newest verified checkpoint"
    elif other:
        place, means = other, "the newest verified checkpoint is taken at each launch"
    else:
        return Finding(
            level=Level.WARNING,
            subject=subject,
            found="nothing shows that the script takes one",
            means="STEPKEEPER_RESUME_FROM names the newest verified checkpoint, and the script does not read it",
            remedy="write {resume} where it goes, set --resume-argument, or have the script read that variable"
            if found.has_arguments
            else "have the script read that variable"
            + (", or set --repair-pointers" if found.points else "")
            + ": this framework has no resume argument",
        )
    return Finding(level=Level.OK, subject=subject, found=place, means=means)


def _world(found: Following, attach: str) -> Finding:
    converts = found.framework == converting.FRAMEWORK
    if converts and (found.converted or attach in ("auto", found.framework)):
        return Finding(
            level=Level.OK,
            subject="ranks of a resume",
            found="any number of ranks: ZeRO is converted before a launch that needs it",
            means="a launch may shrink to --min-nodes; pipelines, tensor parallel ranks and experts are not converted",
        )
    means = {
        WorldChange.YES: "a launch may shrink to --min-nodes",
        WorldChange.NO: "a launch keeps its number of nodes, whatever --min-nodes says",
        WorldChange.SCRIPT: "whether a launch may shrink to --min-nodes is for the script to say",
    }[found.world_change]
    return Finding(
        level=Level.NOTE if found.world_change is WorldChange.NO else Level.OK,
        subject="ranks of a resume",
        found=found.world_change.value,
        means=means,
        remedy="set --attach auto: ZeRO is converted for another number of ranks" if converts else "",
    )

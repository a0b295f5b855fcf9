"""Render slurm.conf, gres.conf and cgroup.conf of a lab.  Pure: text from options."""

from dataclasses import dataclass
from pathlib import Path

from tests.lab.newest import Newest
from tests.lab.options import LabOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one lab lives: its directory, names and ports, chosen once at `up`."""

    directory: Path
    lab_id: str
    hostname: str
    port: int
    """slurmctld's; the nodes have those that follow."""
    cgroup_mountpoint: Path | None
    """Where the controllers of cgroup v1 are mounted, the freezer among them; None: not on this machine."""

    newest: Newest | None = None
    """Where the Slurm lies that is not this machine's own."""

    @property
    def conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def backup_name(self) -> str:
        """The host name that the backup controller believes in."""
        return f"{self.lab_id}b"

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    @property
    def munge_key(self) -> Path:
        return self.directory / "munge" / "key"

    def node_names(self, options: LabOptions) -> list[str]:
        return [f"{self.lab_id}n{index}" for index in range(1, options.nodes + 1)]


def files(place: Place, options: LabOptions) -> dict[str, str]:
    """Return name and text of every file in the lab's etc directory."""
    nodes = f"{place.lab_id}n[1-{options.nodes}]"
    gpus = f"{place.directory}/dev/nvidia" + (f"[0-{options.gpus - 1}]" if options.gpus > 1 else "0")
    gres = f"NodeName={nodes} Name=gpu File={gpus}\n" if options.gpus else ""
    conf = _slurm_conf(place, options, nodes)
    backup = conf.replace("/run/slurmctld.", "/run/backup.").replace("/log/slurmctld.", "/log/backup.")
    return {
        **({"backup.conf": backup} if options.backup_controller else {}),
        **({"topology.conf": _topology(place, options)} if options.switches else {}),
        "slurm.conf": conf,
        "gres.conf": gres,
        "cgroup.conf": _cgroup_conf(place),
    }


def _backup(place: Place, options: LabOptions) -> list[str]:
    """Each controller has an address of its own: they share a machine and a port."""
    if not options.backup_controller:
        return []
    return [
        f"SlurmctldHost={place.backup_name}(127.0.0.2)",
        "CommunicationParameters=NoCtldInAddrAny",
        "SlurmctldTimeout=6",
    ]


def _topology(place: Place, options: LabOptions) -> str:
    """Each leaf switch has the nodes that follow those of the one before it."""
    names = iter(place.node_names(options))
    leaves = [
        f"SwitchName=leaf{index} Nodes={','.join(next(names) for _ in range(count))}"
        for index, count in enumerate(options.switches, 1)
    ]
    return "\n".join([*leaves, f"SwitchName=top Switches=leaf[1-{len(leaves)}]"]) + "\n"


def _cgroup_conf(place: Place) -> str:
    if place.cgroup_mountpoint:
        return f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={place.cgroup_mountpoint}\n"
    if place.newest:
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def _slurm_conf(place: Place, options: LabOptions, nodes: str) -> str:
    directory = place.directory
    auth = f"socket={place.munge_socket}"
    if options.cred_expire_s is not None:
        auth += f",cred_expire={options.cred_expire_s}"
    by_cgroup = place.cgroup_mountpoint is not None and not options.linuxproc
    requeue = int(options.job_requeue)
    lines = [
        f"ClusterName={place.lab_id}",
        f"SlurmctldHost={place.hostname}(127.0.0.1)",
        *_backup(place, options),
        f"SlurmctldPort={place.port}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo={auth}",
        "CredType=cred/munge",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"SlurmctldPidFile={directory}/run/slurmctld.pid",
        f"SlurmdPidFile={directory}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/slurmd-%n.log",
        "MailProg=/bin/true",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "TaskPlugin=task/none",
        f"ProctrackType=proctrack/{'cgroup' if by_cgroup else 'linuxproc'}",
        "JobAcctGatherType=jobacct_gather/none",
        # A node may claim more CPUs and memory than the machine has.
        "SlurmdParameters=config_overrides",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"JobRequeue={requeue}",
        # Decide at once: a test should not wait for a scheduler that is sparing a busy controller.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,bf_continue",
        f"KillWait={options.kill_wait_s}",
        f"InactiveLimit={options.inactive_limit_s}",
        f"SlurmdTimeout={options.slurmd_timeout_s}",
        "ReturnToService=0",
        # on a busy machine a batch script may start late, and what was killed may take its time to die
        "BatchStartTimeout=60",
        "UnkillableStepTimeout=180",
        "GresTypes=gpu",
    ]
    if options.switches:
        lines.append("TopologyPlugin=topology/tree")
    if options.send_user_signal:
        newer = "PreemptParameters=send_user_signal"
        lines.append(newer if place.newest else "SlurmctldParameters=preempt_send_user_signal")
    if place.newest:
        lines.append(f"PluginDir={place.newest.plugins}")
    gres = f" Gres=gpu:{options.gpus}" if options.gpus else ""
    ports = f"{place.port + 1}" + (f"-{place.port + options.nodes}" if options.nodes > 1 else "")
    lines += [
        (
            f"NodeName={nodes} NodeHostname={place.hostname} NodeAddr=127.0.0.1 Port=[{ports}]"
            f" CPUs={options.cpus} RealMemory={options.memory_mib}{gres} State=UNKNOWN"
        ),
        (
            f"PartitionName=train Nodes={nodes} Default=YES PriorityTier=1 PreemptMode=REQUEUE"
            f" GraceTime={options.grace_time_s} MaxTime=INFINITE State=UP"
        ),
        f"PartitionName=urgent Nodes={nodes} Default=NO PriorityTier=100 PreemptMode=OFF MaxTime=INFINITE State=UP",
        *options.slurm_conf,
    ]
    return "\n".join(lines) + "\n"

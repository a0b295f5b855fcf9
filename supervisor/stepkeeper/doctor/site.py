"""The facts that the rules judge: what Slurm says of itself, and what this place is like."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from stepkeeper.errors import UsageError
from stepkeeper.node_agent.kernel import users_may_write
from stepkeeper.node_agent.xid.parse import SYSCTL
from stepkeeper.printing import size
from stepkeeper.slurm.client import SlurmError, is_unconfigured, parse_config
from stepkeeper.slurm.jobs import call
from stepkeeper_trainer.store import space

CALL_WITHIN_S = 10.0
COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
_UNITS = {"sec": 1.0, "secs": 1.0, "usec": 1e-6, "min": 60.0, "mins": 60.0, "hour": 3600.0, "day": 86400.0}
_UNSET = ("", "(null)", "N/A", "NONE", "None", "none")


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a partition's settings that a run depends on."""

    name: str
    default: bool
    up: bool
    root_only: bool
    grace_s: float
    max_time_s: float | None  # None: no limit
    default_time_s: float | None = None  # of a job that asks for none; None: `max_time_s`
    preempt_mode: str  # words joined by a comma, upper case
    preemptible: bool  # another partition has a higher priority tier, or a quality of service decides
    nodes: int
    forced_sharing: bool


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as seen from here."""

    settings: Mapping[str, str]  # `scontrol show config`, cgroup.conf where it can be read
    partitions: tuple[Partition, ...]
    missing_commands: tuple[str, ...] = ()
    container: str = ""  # the kind of container that we are in
    python: str = ""
    python_file_system: str = ""
    save_s: float | None = None  # from the request of a save to durable, if it is known
    users_log: bool = False  # netfilter writes records of any user's choice into this machine's kernel log

    def text(self, key: str) -> str:
        """Return a setting; empty where it is not set."""
        value = self.settings.get(key, "")
        return "" if value in _UNSET else value

    def words(self, key: str) -> list[str]:
        """Return a list of words, such as `SlurmctldParameters`."""
        return [word.strip() for word in self.text(key).split(",") if word.strip()]

    def seconds(self, key: str) -> float | None:
        """Return a span such as `30 sec`; None where it is not set or has no end."""
        return parse_span(self.text(key))

    def option(self, key: str, name: str) -> str | None:
        """Return the value of `name=value` in a list of words; empty for the word alone, None where it is not there."""
        for word in self.words(key):
            head, _, tail = word.partition("=")
            if head.lower() == name.lower():
                return tail
        return None

    @property
    def version(self) -> tuple[int, int]:
        """Year and month of Slurm's release; (0, 0) where it does not say."""
        match = re.match(r"(\d+)\.(\d+)", self.text("SLURM_VERSION"))
        return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def gather(*, partition: str | None = None, save_s: float | None = None) -> Site:
    """Ask Slurm, and look around.

    Args:
        partition: the only one that matters, or several with commas between; all by default.
        save_s: from the request of a save to durable.

    Raises:
        SlurmError: Slurm does not answer.
        StepkeeperError: it knows no such partition.
    """
    missing = tuple(name for name in COMMANDS if shutil.which(name) is None)
    settings = parse_config(_ask("scontrol", "show", "config"))
    shown = _ask("scontrol", "-o", "show", "partition")
    partitions = tuple(parse_partitions(shown, settings))
    if partition is not None:
        partitions = _named(partition, partitions)
    return Site(
        settings={**read_cgroup_conf(settings.get("SLURM_CONF", "")), **settings},
        partitions=partitions,
        missing_commands=missing,
        container=container(os.environ),
        python=f"{platform.python_version()} in {sys.prefix}",
        python_file_system=file_system(Path(sys.prefix)),
        save_s=save_s,
        users_log=users_may_write(),
    )


def _named(wanted: str, partitions: tuple[Partition, ...]) -> tuple[Partition, ...]:
    """Return the partitions of a list such as sbatch takes, `gpu,long`.

    Raises:
        StepkeeperError: there is no such partition.
    """
    known = {each.name: each for each in partitions}
    names = wanted.split(",")
    if missing := [name for name in names if name not in known]:
        raise UsageError(f"no partition {missing[0]!r} here; there are: {', '.join(known)}")
    return tuple(known[name] for name in names)


def only_default(here: Site) -> Site:
    """Return a site as a job sees it that names no partition."""
    chosen = tuple(each for each in here.partitions if each.default)
    return msgspec.structs.replace(here, partitions=chosen or here.partitions)


def _ask(*argv: str) -> str:
    what = " ".join(argv)
    try:
        return call(argv, CALL_WITHIN_S, what=what)
    except SlurmError as error:
        if not is_unconfigured(str(error)):
            raise
        raise SlurmError(
            f"{what}: no cluster is configured on this machine: Slurm's commands find neither a slurm.conf nor a "
            "server that has one; go to a login node, or set SLURM_CONF"
        ) from error


def parse_partitions(text: str, settings: Mapping[str, str]) -> list[Partition]:
    """Parse `scontrol -o show partition`."""
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines() if line.startswith("PartitionName=")]
    tiers = [int(row.get("PriorityTier", "1")) for row in rows]
    kind = settings.get("PreemptType", "")
    found = []
    for row, tier in zip(rows, tiers, strict=True):
        mode = row.get("PreemptMode", "") or settings.get("PreemptMode", "OFF")
        above = "partition_prio" in kind and tier < max(tiers)
        found.append(
            Partition(
                name=row["PartitionName"],
                default=row.get("Default") == "YES",
                up=row.get("State") == "UP",
                root_only=row.get("RootOnly") == "YES",
                grace_s=float(row.get("GraceTime", "0")),
                max_time_s=parse_limit(row.get("MaxTime", "UNLIMITED")),
                default_time_s=parse_limit(row.get("DefaultTime", "NONE")),
                preempt_mode=mode.upper(),
                preemptible=mode.upper() != "OFF" and (above or "qos" in kind),
                nodes=int(row.get("TotalNodes", "0")),
                forced_sharing=row.get("OverSubscribe", "NO").startswith("FORCE"),
            )
        )
    return found


def parse_span(text: str) -> float | None:
    """Return seconds.

    >>> parse_span("30 sec"), parse_span("2 min"), parse_span("INFINITE"), parse_span("65534")
    (30.0, 120.0, None, 65534.0)
    """
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip())
    return float(match.group(1)) * _UNITS.get(match.group(2), 1.0) if match else None


def parse_limit(text: str) -> float | None:
    """Return seconds of a limit such as `7-00:00:00`; None without a limit.

    >>> parse_limit("1-02:00:00"), parse_limit("00:30:00"), parse_limit("UNLIMITED")
    (93600.0, 1800.0, None)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_cgroup_conf(slurm_conf: str) -> dict[str, str]:
    """Return what stands in cgroup.conf beside slurm.conf; nothing where it cannot be read."""
    try:
        text = Path(slurm_conf).with_name("cgroup.conf").read_text(errors="replace") if slurm_conf else ""
    except OSError:
        return {}  # not every site lets its users read it, and a cluster without cgroups has none
    lines = (line.partition("#")[0].partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, sign, value in lines if sign}


def container(environment: Mapping[str, str]) -> str:
    """Return the kind of container that this process is in; empty outside."""
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if environment.get(name):
            return "apptainer"
    if any(name.startswith("ENROOT_") for name in environment):
        return "enroot"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if Path("/.dockerenv").exists() else ""


def file_system(path: Path) -> str:
    """Return the type of the file system that holds a path, as the kernel names it; empty where it does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
        real = str(path.resolve())
    except OSError:
        return ""  # a kernel without /proc: nothing depends on it
    best, kind = "", ""
    for line in lines:
        fields = line.split()
        point = fields[1].encode().decode("unicode_escape") if len(fields) > 2 else ""  # noqa: PLR2004
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


# What the doctor has to say of one thing.


class Level(StrEnum):
    """How much it matters, mildest first."""

    OK = "ok"
    NOTE = "note"  # good to know; nothing to do
    WARNING = "warning"  # works, but costs something or fails in some cases
    PROBLEM = "problem"  # a run would lose work or not come back

    @property
    def weight(self) -> int:
        """The graver, the larger."""
        return list(Level).index(self)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One setting or fact, what it means for a run, and what to do about it."""

    level: Level
    subject: str  # the setting's own name, or what was looked at
    found: str  # its value
    means: str
    remedy: str = ""  # what to write, and where


def users_log() -> Finding:
    """Return what the doctor and the node agent both say of a machine where `users_may_write()`."""
    return Finding(
        level=Level.WARNING,
        subject=SYSCTL,
        found="1, on this machine",
        means="any user can write records into the kernel log that begin like a GPU's fault; the node agent passes "
        "over those of netfilter, other programs that read the log may not",
        remedy=f"admin: sysctl -w {SYSCTL}=0 on the nodes, and in /etc/sysctl.d",
    )


# Whether a file system does what checkpoints and the lease stand on.  It writes a little, and cleans up.

LOCAL = ("tmpfs", "overlay", "ramfs")
TEST_BYTES = 16 * 2**20


def examine_storage(directory: Path) -> Iterator[Finding]:
    """Try on a directory what a save does, and what the lease does."""
    kind = file_system(directory) or "unknown"
    subject = f"storage {directory}"
    if kind in LOCAL:
        yield Finding(
            level=Level.WARNING,
            subject=subject,
            found=kind,
            means="a file system of this node alone, or of its memory: other nodes do not see it, or it is gone with "
            "the node",
            remedy="set --run-dir (or STEPKEEPER_RUN_DIR) to shared storage",
        )
    test = space.storage_test(directory, size=TEST_BYTES)
    if test.problem is not None:
        yield Finding(
            level=Level.PROBLEM,
            subject=subject,
            found=test.problem,
            means="what a save needs does not work here: write, fsync, rename, read back",
            remedy="choose another --run-dir, or show the admin this line",
        )
        return
    speed = f"{size(int(test.bytes / test.write_s))}/s" if test.write_s else "not measured"
    yield Finding(
        level=Level.OK,
        subject=subject,
        found=f"{kind}, {speed} for {size(test.bytes)}",
        means="write, fsync, rename and read back work",
    )
    yield from _links(directory, subject)


def _links(directory: Path, subject: str) -> Iterator[Finding]:
    """Hard links are what unchanged files of a save cost nothing with, and what locks the run directory."""
    with tempfile.TemporaryDirectory(prefix=".stepkeeper-doctor-", dir=directory) as place:
        one, other = Path(place, "one"), Path(place, "other")
        one.write_bytes(b"1")
        try:
            os.link(one, other)
        except OSError as error:
            yield Finding(
                level=Level.NOTE,
                subject=subject,
                found=f"no hard links ({error.strerror})",
                means="files that did not change since the last save are written again",
            )
            return
        with contextlib.suppress(FileNotFoundError):  # some file systems remove both names
            other.unlink()

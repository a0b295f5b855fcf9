"""`/etc/stepkeeper/node.toml`: what the administrator decides about one node's agent.

The file decides about drains and reboots: only root may be able to change it.  A key that is not known is refused.  A
key of 0.1 that is a constant now is passed over where it has the constant's value: the file
that 0.1 installed said all of them.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper.errors import UsageError
from stepkeeper.node_agent import protocol
from stepkeeper.node_agent.core.state import Limits, Mode, Policy
from stepkeeper.node_agent.kernel import DEVICE
from stepkeeper.node_agent.xid.catalogue import SITE_FILE
from stepkeeper.slurm.launch import node_name
from stepkeeper_trainer.formats.plain import read_plain

DEFAULT_PATH = Path("/etc/stepkeeper/node.toml")
_POLICY = Policy()


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Breaker(_Table, frozen=True, kw_only=True):
    """How many nodes Stepkeeper may hold drained; counted in Slurm, over all agents."""

    nodes_min: int = _POLICY.nodes_min
    nodes_share: float = _POLICY.nodes_share
    drains_per_hour: int = _POLICY.drains_per_hour


class Remedies(_Table, frozen=True, kw_only=True):
    """What may be done about a node that we drained.  Nothing, unless it is switched on."""

    undrain: bool = False
    reset_gpus: bool = False
    reboot: bool = False


class AllLimits(Limits, frozen=True, kw_only=True):
    """Constants that a test may shorten, in seconds and counts: those of `decide`, and these."""

    call_within_s: float = 10.0
    """Of one scontrol: a busy controller answers within seconds, and the call is tried again."""

    health_every_s: float = 10.0
    """NVML is asked for the health of each GPU so often; what cannot wait comes as an event."""

    setup_spread_s: float = 60.0
    """All nodes may boot at once: within so long after their start, agents ask Slurm about their nodes."""


class Test(_Table, frozen=True, kw_only=True):
    """For acceptance tests and for labs with many nodes on one machine.  Never in production: setup warns of it."""

    __test__ = False  # pytest: not one of yours

    allow_injected: bool = False
    boot_id_file: str = "/proc/sys/kernel/random/boot_id"
    only_pci_prefix: str = ""
    kernel_log: str = DEVICE
    nvml: bool = True
    limits: AllLimits = AllLimits()


class NodeConfig(_Table, frozen=True, kw_only=True):
    """The whole file."""

    mode: Mode = Mode.OBSERVE
    node_name: str = ""  # as Slurm knows it; empty: SLURMD_NODENAME, or the host's name
    expected_gpus: int = 0  # 0: not compared
    state_dir: str = "/var/lib/stepkeeper"
    run_dir: str = os.path.dirname(protocol.DEFAULT_SOCKET)
    slurm_conf: str = ""  # where it is not Slurm's default
    slurm_bin: str = ""  # the directory of scontrol, where it is not on PATH
    breaker: Breaker = Breaker()
    remedies: Remedies = Remedies()
    test: Test = Test()

    @property
    def name(self) -> str:
        """Return the name of the node."""
        return self.node_name or node_name()

    @property
    def socket_path(self) -> Path:
        """Return the socket's path."""
        return self.run_path / os.path.basename(protocol.DEFAULT_SOCKET)

    @property
    def run_path(self) -> Path:
        """Return the directory for what a reboot may forget, with the node's name in it where the file says so."""
        return Path(self.run_dir.replace("%N", self.name))

    @property
    def state_path(self) -> Path:
        """Return the directory for what it may not."""
        return Path(self.state_dir.replace("%N", self.name))

    @property
    def slurm_environment(self) -> dict[str, str]:
        """Return what Slurm's commands need on top of the agent's own environment."""
        found = {"SLURM_CONF": self.slurm_conf} if self.slurm_conf else {}
        if self.slurm_bin:
            found["PATH"] = f"{self.slurm_bin}:{os.environ.get('PATH', '/usr/bin:/bin')}"
        return found

    @property
    def policy(self) -> Policy:
        """Return what `decide` goes by."""
        limits = self.test.limits
        values = {name: getattr(limits, name) for name in Limits.__struct_fields__}
        values["answer_within_s"] = max(limits.answer_within_s, 2 * limits.call_within_s)
        return Policy(
            mode=self.mode,
            agreement=self.test.nvml and not self.test.allow_injected,  # NVML cannot see what is injected
            **values,
            **msgspec.structs.asdict(self.remedies),
            **msgspec.structs.asdict(self.breaker),
        )

    def boot_id(self) -> str:
        """Return the id of this boot.  Raises `StepkeeperError`."""
        path = Path(self.test.boot_id_file)
        try:
            return path.read_text().strip()
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}: no boot id") from error


def load(path: Path | None) -> NodeConfig:
    """Read the configuration; without a path the usual file, and the defaults where that is missing.

    Raises:
        StepkeeperError: it cannot be read, a key or value in it is wrong, or others may change it or what it names.
    """
    chosen = path or DEFAULT_PATH
    try:
        _refuse_changeable(chosen.parent, chosen, follow=False)
        config = parse(read_plain(chosen), str(chosen))
    except FileNotFoundError as error:
        if path is not None:
            raise UsageError(f"{path}: no such file") from error
        config = NodeConfig()
    except OSError as error:
        raise UsageError(f"{chosen}: {error.strerror}") from error
    own_rows = str(SITE_FILE) if os.path.lexists(SITE_FILE) else ""
    for name, used in (("catalogue", own_rows), ("slurm_bin", config.slurm_bin), ("slurm_conf", config.slurm_conf)):
        if used:
            _trust(name, Path(used))
    return config


def _trust(name: str, path: Path) -> None:
    """Refuse a file that decides about drains, or a directory whose programs run as root, where others may change it.

    Raises:
        StepkeeperError: it is missing, or not only root or we ourselves can change it.
    """
    try:
        _refuse_changeable(path.parent, path)
        if path.is_dir():
            _refuse_changeable(*(each for each in (path / "scontrol", path / "sinfo") if each.exists()))
    except OSError as error:
        raise UsageError(f"{name}: {path}: {error.strerror}") from error


def _refuse_changeable(*paths: Path, follow: bool = True) -> None:
    """Raises OSError, StepkeeperError.  Not to `follow`: the last one may be no link."""
    for checked in paths:
        status = os.stat(checked) if follow or checked != paths[-1] else os.lstat(checked)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(f"{checked}: others may change it, and it decides about drains: chown root, chmod go-w")


def parse(data: bytes, name: str) -> NodeConfig:
    """Parse the text of a configuration.  Raises `StepkeeperError`."""
    try:
        document = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{name}: {error}") from error
    _pass_over_constants(name, document)
    try:
        config = msgspec.convert(document, NodeConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {error}") from error
    if config.remedies.reboot and not config.remedies.undrain:
        raise UsageError(
            f"{name}: remedies.reboot needs remedies.undrain: Slurm itself returns a node that it rebooted"
        )
    return config


def _pass_over_constants(name: str, document: dict[str, Any]) -> None:
    """Take keys of 0.1 out that have the value which is a constant now.  Raises StepkeeperError for another value."""
    constants: dict[tuple[str, ...], Any] = {
        ("socket",): f"{document.get('run_dir', NodeConfig().run_dir)}/{os.path.basename(protocol.DEFAULT_SOCKET)}",
        ("catalogue",): str(SITE_FILE),
        ("health_every_s",): AllLimits().health_every_s,
        ("remedies", "reset_within_s"): _POLICY.reset_within_s,
        ("kernel_log",): DEVICE,
        ("previous_journal",): True,  # what the agent had seen before a reboot is in its ledger
        ("nvml",): True,
        ("test", "previous_journal"): True,
        **{("limits", key): value for key, value in msgspec.structs.asdict(AllLimits()).items()},
    }
    for (*tables, key), constant in constants.items():
        table = document.get(tables[0], {}) if tables else document
        if isinstance(table, dict) and key in table and table.pop(key) != constant:
            raise UsageError(
                f"{name}: `{'.'.join((*tables, key))}` is a constant since 1.0: {json.dumps(constant)}; leave it out"
            )
    if document.get("limits") == {}:
        del document["limits"]

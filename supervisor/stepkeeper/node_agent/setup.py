"""What an agent finds out about its own setup: a misconfigured or half-blind one must not look healthy.

Compared are the configuration, the node as Slurm knows it, the PCI bus, NVML and the kernel log.  `gather` looks,
`examine` judges and is pure; the agent does both when it starts, and `stepkeeper node agent --check` on request.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from stepkeeper.doctor.site import Finding, Level, users_log
from stepkeeper.log import Log
from stepkeeper.node_agent import nvml
from stepkeeper.node_agent.config import NodeConfig, Test
from stepkeeper.node_agent.core.plan import fraction
from stepkeeper.node_agent.core.state import Mode
from stepkeeper.node_agent.kernel import Roots, gpu_addresses, users_may_write
from stepkeeper.node_agent.readings import NvmlState, NvmlStatus
from stepkeeper.node_agent.runtime import Do, Inbox
from stepkeeper.slurm.client import NodeFacts, SlurmError, is_unconfigured
from stepkeeper.slurm.nodes import NodeCommands

# Whether a node of Slurm's is this machine: a `node_name` that was copied from another node would drain that one.


def mistaken(node: NodeFacts) -> str:
    """Return why the node is another machine; "" where it is this one, or where that is not known."""
    return judge_identity(node, socket.gethostname(), is_local)


def judge_identity(node: NodeFacts, hostname: str, is_local: Callable[[str], bool]) -> str:
    r"""Compare names and address.  One that fits is enough: a slurmd may be started with any name (`-N`).

    >>> judge(NodeFacts(name="gpu17", states=frozenset(), host="gpu17", address="10.0.0.17"), "gpu18", lambda _: False)
    'Slurm\'s node gpu17 is the host gpu17 at 10.0.0.17, and this is gpu18: correct `node_name`'
    """
    names = {_short(name) for name in (node.name, node.host) if name}
    if _short(hostname) in names or (not node.host and not node.address) or is_local(node.address):
        return ""
    where = f" at {node.address}" if node.address else ""
    host = f"the host {node.host or 'unknown'}{where}"
    return f"Slurm's node {node.name} is {host}, and this is {hostname}: correct `node_name`"


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


def is_local(address: str) -> bool:
    """Return whether an address is one of this machine's: only such a one can be bound.  True where unknown."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.bind(place)
        except OSError:
            continue
        return True
    return not found


LOOK_WITHIN_S = 20.0
FILE = "/etc/stepkeeper/node.toml"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    node: NodeFacts | None = None  # as Slurm knows it
    slurm_error: str = ""
    slurm_away: bool = False  # it may answer later
    mistaken: str = ""  # why the node of that name is another machine
    pci: tuple[str, ...] = ()  # addresses of NVIDIA's GPUs that a driver of this machine may use
    nvml: NvmlStatus | None = None  # None: switched off
    kernel_log_error: str = ""
    users_log: bool = False  # netfilter writes records of any user's choice into the kernel log
    root: bool = True

    @property
    def may_come_later(self) -> bool:
        """Whether slurmctld or the driver does not answer yet."""
        driver_away = self.nvml is not None and self.nvml.state is not NvmlState.READY and bool(self.pci)
        return self.slurm_away or driver_away


def gather(config: NodeConfig, client: NodeCommands) -> Facts:
    """Look at everything once.  Never raises; returns in time, whatever hangs."""
    node, error, away = None, "", False
    try:
        node = client.node(config.name)
    except (SlurmError, ValueError) as failure:
        error, away = str(failure), isinstance(failure, SlurmError) and failure.unreachable
    return Facts(
        node=node,
        slurm_error=error,
        slurm_away=away,
        mistaken=mistaken(node) if node is not None else "",
        pci=gpus_on_the_bus(),
        nvml=nvml.once(LOOK_WITHIN_S).status if config.test.nvml else None,
        kernel_log_error=_unreadable(Path(config.test.kernel_log)),
        users_log=users_may_write(),
        root=os.geteuid() == 0,
    )


def gpus_on_the_bus(roots: Roots | None = None) -> tuple[str, ...]:
    """Return NVIDIA's GPUs on the PCI bus, without those that were handed to a virtual machine."""
    roots = roots or Roots()
    devices = roots.sys / "bus/pci/devices"
    return tuple(
        address for address in gpu_addresses(roots) if (devices / address / "driver").resolve().name != "vfio-pci"
    )


def _unreadable(path: Path) -> str:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def examine(config: NodeConfig, facts: Facts) -> list[Finding]:
    """Return what there is to say, the gravest first.  Pure."""
    found = [*_mode(config), *_rights(facts), *_node(config, facts), *_gpus(config, facts)]
    return sorted(found, key=lambda finding: -finding.level.weight)


def _mode(config: NodeConfig) -> Iterator[Finding]:
    acts = config.mode is Mode.ACT
    means = "the agent drains its node when a GPU fails" if acts else "the agent reports, and changes nothing"
    yield Finding(level=Level.OK, subject="mode", found=config.mode.value, means=means)
    if config.test.allow_injected:
        yield Finding(
            level=Level.WARNING,
            subject="test.allow_injected",
            found="true",
            means="any process that may write to /dev/kmsg can have this node drained",
            remedy=f"remove the [test] table from {FILE} after the test",
        )
    elif config.test != Test():
        yield Finding(
            level=Level.WARNING,
            subject="[test]",
            found="the table is there",
            means="the agent senses or waits otherwise than it does in production",
            remedy=f"remove the [test] table from {FILE} after the test",
        )


def _rights(facts: Facts) -> Iterator[Finding]:
    if not facts.root:
        yield Finding(
            level=Level.PROBLEM,
            subject="user",
            found="not root",
            means="Slurm lets only root and SlurmUser drain a node, and jobs trust an agent of root only",
            remedy="start the agent from its systemd unit: `systemctl start stepkeeper-node-agent`",
        )
    if facts.kernel_log_error:
        yield Finding(
            level=Level.PROBLEM,
            subject="kernel_log",
            found=facts.kernel_log_error,
            means="XIDs in the kernel log are not seen",
            remedy="the unit needs CAP_SYSLOG and `DeviceAllow=/dev/kmsg r`",
        )
    else:
        yield Finding(level=Level.OK, subject="kernel_log", found="readable", means="XIDs are seen")
    if facts.users_log:
        yield users_log()


def _node(config: NodeConfig, facts: Facts) -> Iterator[Finding]:
    name = f"node_name = {config.name}"
    if facts.mistaken:
        yield Finding(
            level=Level.PROBLEM,
            subject=name,
            found=facts.mistaken,
            means="the agent refuses to drain: it would drain another machine",
            remedy=f"set `node_name` in {FILE} to what `scontrol show hostnames` lists for this machine",
        )
    elif facts.node is not None:
        states = "+".join(sorted(facts.node.states))
        yield Finding(level=Level.OK, subject=name, found=f"known to Slurm: {states}", means="it can be drained")
    elif facts.slurm_away and not is_unconfigured(facts.slurm_error):
        yield Finding(
            level=Level.WARNING,
            subject="Slurm",
            found=facts.slurm_error,
            means="nothing can be drained until slurmctld answers; the agent keeps trying",
            remedy="`scontrol ping` shows whether slurmctld is up",
        )
    else:
        yield Finding(
            level=Level.PROBLEM,
            subject=name,
            found=facts.slurm_error,
            means="this node cannot be drained, whatever happens to its GPUs",
            remedy=_remedy(config, facts.slurm_error),
        )


def _remedy(config: NodeConfig, error: str) -> str:
    if is_unconfigured(error):
        return f"set `slurm_conf` in {FILE}, now {config.slurm_conf or 'not set'}; with configless Slurm start slurmd"
    if "on PATH" in error:
        return f"set `slurm_bin` in {FILE} to the directory of sinfo and scontrol"
    return f"set `node_name` in {FILE} to this node's NodeName in slurm.conf"


def _gpus(config: NodeConfig, facts: Facts) -> Iterator[Finding]:
    gres = facts.node.gpus if facts.node is not None else 0
    status = facts.nvml
    listed = tuple(gpu.pci for gpu in status.gpus) if status is not None and status.state is NvmlState.READY else ()
    if facts.pci and status is None:
        yield _half_blind(facts, "test.nvml = false", f"remove the [test] table from {FILE}")
    elif status is not None and status.state is not NvmlState.READY and (facts.pci or gres or config.expected_gpus):
        where = "the driver's libnvidia-ml.so.1, and nvidia-ml-py beside stepkeeper"
        remedy = f"install {where}" if status.state is NvmlState.ABSENT else "`nvidia-smi` should show the same"
        yield _half_blind(facts, f"NVML is {status.state.value}: {status.detail}", remedy)
    elif listed:
        yield Finding(
            level=Level.OK, subject="NVML", found=f"driver {status.driver if status else ''}", means="GPUs are seen"
        )
    yield from _counts(config, facts, listed, gres)


def _half_blind(facts: Facts, found: str, remedy: str) -> Finding:
    return Finding(
        level=Level.PROBLEM,
        subject="NVML",
        found=f"{found}; {len(facts.pci)} GPUs of NVIDIA are on the PCI bus",
        means="lost GPUs, recovery actions and memory errors are not seen: only the kernel log is",
        remedy=remedy,
    )


def _counts(config: NodeConfig, facts: Facts, listed: tuple[str, ...], gres: int) -> Iterator[Finding]:
    if gone := [address for address in facts.pci if listed and address not in listed]:
        yield Finding(
            level=Level.PROBLEM,
            subject="GPUs",
            found=f"{', '.join(gone)} on the PCI bus, not in NVML's list of {len(listed)}",
            means="a GPU did not come up",
            remedy="`dmesg | grep -i nvrm` and `nvidia-smi`; drain the node by hand if it is broken",
        )
    here = max(len(facts.pci), len(listed))
    expected = config.expected_gpus
    if expected == 0 and (here or gres):
        yield Finding(
            level=Level.WARNING,
            subject="expected_gpus",
            found=f"0; {here} GPUs are here, and Gres of Slurm says {gres}",
            means="a GPU that does not come up after a reboot is not noticed",
            remedy=f"set `expected_gpus = {max(here, gres)}` in {FILE}, the number that the node was bought with",
        )
    elif expected > here and (facts.nvml is not None or facts.pci):
        yield Finding(
            level=Level.PROBLEM,
            subject="expected_gpus",
            found=f"{expected}; {here} GPUs are here",
            means="in mode act the node is drained for a missing GPU",
            remedy="look for the missing GPU, or correct `expected_gpus`",
        )
    elif expected and here > expected:
        yield Finding(
            level=Level.WARNING,
            subject="expected_gpus",
            found=f"{expected}; {here} GPUs are here",
            means=f"{here - expected} GPUs may be lost before the agent notices",
            remedy=f"set `expected_gpus = {here}` in {FILE}",
        )
    elif expected:
        yield Finding(level=Level.OK, subject="expected_gpus", found=str(expected), means="all are here")
    if here and gres and here < gres:
        yield Finding(
            level=Level.PROBLEM,
            subject="Gres",
            found=f"Slurm says {gres} GPUs, and {here} are here",
            means="jobs are given GPUs that are not there",
            remedy="look for the missing GPU, or correct Gres in slurm.conf and gres.conf",
        )


# The agent looks at its own setup when it starts, and again as long as something is wrong with it.

AGAIN_S = 15.0
AGAIN_MAX_S = 3600.0


def first_look_after_s(config: NodeConfig) -> float:
    """Return how long after its start a node's agent looks, in seconds: it differs from node to node."""
    return config.test.limits.setup_spread_s * fraction(config.name)


class SetupWatch:
    """Looks on a thread of its own, and logs on the agent's loop."""

    def __init__(
        self,
        config: NodeConfig,
        client: NodeCommands,
        *,
        inbox: Inbox,
        log: Log,
        stopped: threading.Event,
        on_change: Callable[[], None],
        on_answer: Callable[[], None],
    ) -> None:
        """`on_answer` is called on the thread whenever Slurm has answered an agent that acts."""
        self.wrong: tuple[str, ...] = ()  # the subjects that have a problem
        self._config = config
        self._client = client
        self._inbox = inbox
        self._log = log
        self._stopped = stopped
        self._on_change = on_change
        self._on_answer = on_answer

    def start(self) -> None:
        """Begin to look."""
        self._inbox.run_optional("setup", self._look)

    def _look(self) -> None:
        self._stopped.wait(first_look_after_s(self._config))
        pause_s, patient = AGAIN_S, True
        while not self._stopped.is_set():
            facts = gather(self._config, self._client)
            if facts.node is not None and self._config.mode is Mode.ACT:
                self._on_answer()
            found = examine(self._config, facts)
            if not (facts.may_come_later and patient):  # at boot driver and Slurm come after us
                self._inbox.put(Do(functools.partial(self._note, found)))
            if not facts.may_come_later and all(each.level is not Level.PROBLEM for each in found):
                return
            self._stopped.wait(pause_s * (0.75 + 0.5 * fraction(f"{self._config.name} {pause_s}")))
            pause_s, patient = min(2 * pause_s, AGAIN_MAX_S), False

    def _note(self, found: Sequence[Finding]) -> None:
        wrong = tuple(each.subject for each in found if each.level is Level.PROBLEM)
        if wrong != self.wrong or not wrong:
            for each in found:
                said = {"subject": each.subject, "found": each.found, "means": each.means, "remedy": each.remedy}
                if each.level is Level.PROBLEM:
                    self._log.error("setup_problem", **said)
                elif each.level is Level.WARNING:
                    self._log.warning("setup_warning", **said)
        self.wrong = wrong
        self._on_change()

"""`stepkeeper dev`: replay, simulate, and `inject xid 79 --gpu 0`, a fault that is none, for tests at a site.

Only root can do it, and only where the agent's own configuration says that injected lines are believed.  Never through
the socket.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from stepkeeper.cli import dev_replay, dev_simulate, printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.node_agent import config as node_config
from stepkeeper.node_agent import ledger, nvml
from stepkeeper.node_agent.config import NodeConfig
from stepkeeper.node_agent.xid.parse import canonical, parse

LOOK_WITHIN_S = 20.0
CODE_MAX = 9999
TEXT_MAX = 300
DEFAULT_TEXTS = {
    13: "Graphics Exception: ESR 0x504730=0x1000e 0x504734=0x20 0x504728=0x4c1eb72 0x50472c=0x174",
    31: "Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f12_00000000. "
    "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: "Ch 00000018",
    45: "Ch 00000018",
    48: "DBE (double bit error) ECC Error encountered",
    79: "GPU has fallen off the bus.",
}


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    dev = subcommands.add_parser(
        "dev", help="replay, simulate and test", description="Tools to test rules and sites.", allow_abbrev=False
    )
    actions = dev.add_subparsers(dest="action", metavar="ACTION", required=True)
    inject = actions.add_parser(
        "inject",
        help="write a fault into the kernel log",
        description="Write a fault into the kernel log, as the NVIDIA driver would.  Root only, and only where the "
        "agent's configuration has `allow_injected = true` in its [test] table: the agent drains the node on it.",
        allow_abbrev=False,
    )
    inject.add_argument("kind", choices=("xid",), help="what kind of fault")
    inject.add_argument("code", type=int, help="its number, as in `stepkeeper xid`")
    inject.add_argument("--gpu", required=True, metavar="INDEX|PCI", help="NVML's index, or a PCI address")
    inject.add_argument("--text", default="", help="what the driver says about it")
    inject.add_argument("--config", type=Path, metavar="FILE", help=f"(default: {node_config.DEFAULT_PATH})")
    inject.set_defaults(execute=inject_fault)
    dev_replay.add(actions)
    dev_simulate.add(actions)


@printing.reading
def inject_fault(arguments: argparse.Namespace) -> int:
    """Write one record."""
    config = node_config.load(arguments.config)
    if not config.test.allow_injected:
        where = arguments.config or node_config.DEFAULT_PATH
        raise StepkeeperError(
            f"{where}: injected faults are not allowed here; a test node says `allow_injected = true` in [test]",
            ExitCode.USAGE,
        )
    pci = _pci(config, arguments.gpu)
    line = record(arguments.code, pci, arguments.text)
    write(Path(config.test.kernel_log), line)
    printing.say(f"written to {config.test.kernel_log}: {line}")
    return ExitCode.FINISHED


def record(code: int, pci: str, text: str = "") -> str:
    """Return the driver's line.

    >>> record(79, "0000:3b:00.0")
    'NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.'
    """
    if not 0 < code <= CODE_MAX:
        raise StepkeeperError(f"{code}: no XID; see `stepkeeper xid`", ExitCode.USAGE)
    said = text or DEFAULT_TEXTS.get(code, "injected for a test")
    line = f"NVRM: Xid (PCI:{pci.removesuffix('.0')}): {code}, {said}"
    if len(said) > TEXT_MAX or not said.isprintable() or parse(line) is None:
        raise StepkeeperError(f"--text: one printable line of at most {TEXT_MAX} characters", ExitCode.USAGE)
    return line


def write(path: Path, line: str) -> None:
    """Write one record.  Each needs a descriptor of its own, or the kernel drops most of a burst.  Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"<4>{line}\n".encode())
    finally:
        os.close(descriptor)


def _pci(config: NodeConfig, gpu: str) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(\.[0-7])?", gpu):
        return canonical(gpu)
    if not gpu.isdigit():
        raise StepkeeperError(f"--gpu {gpu}: neither an index nor a PCI address", ExitCode.USAGE)
    listed = {each.index: each.pci for each in nvml.once(LOOK_WITHIN_S).status.gpus} if config.test.nvml else {}
    if int(gpu) not in listed:
        known = ", ".join(f"{index} ({pci})" for index, pci in sorted(listed.items())) or "none"
        book = ledger.read(config.state_path / ledger.NAME)
        remembered = ", ".join(pci for pci, _ in book.gpus.gpus) if book.gpus is not None else ""
        hint = f"; the agent remembers {remembered}" if remembered else ""
        raise StepkeeperError(f"--gpu {gpu}: NVML lists {known}{hint}; give a PCI address", ExitCode.NOTHING_FOUND)
    return listed[int(gpu)]

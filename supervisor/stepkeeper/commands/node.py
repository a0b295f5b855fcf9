"""`stepkeeper node agent|check|incidents|install|uninstall`: what an administrator runs on a compute node."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TextIO, cast

import msgspec

from stepkeeper import __version__, printing
from stepkeeper.commands import node_check, node_install
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.log import PatientStream
from stepkeeper.node import config as node_config
from stepkeeper.node import ledger
from stepkeeper.node.core.incidents import is_unfinished
from stepkeeper.node.core.state import Incident, Outcome
from stepkeeper.printing import instant

LOG_WITHIN_S = 2.0
RECENT_S = 7 * 86400.0


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    node = subcommands.add_parser(
        "node", help="the agent of a compute node", description="The agent of a compute node.", allow_abbrev=False
    )
    actions = node.add_subparsers(dest="action", metavar="ACTION", required=True)
    node_check.add(actions)
    node_install.add(actions)

    agent = actions.add_parser(
        "agent",
        help="watch this node's GPUs, and drain it where they fail (root, from systemd)",
        description="Watch this node's GPUs, and drain it where they fail.  Mode `observe` only says what it would do.",
        allow_abbrev=False,
    )
    _add_config(agent)
    agent.add_argument(
        "--check",
        action="store_true",
        help="say whether configuration, Slurm, PCI bus, NVML and kernel log fit together, and end",
    )
    agent.add_argument("--json", action="store_true", help="with --check: one JSON document")
    agent.set_defaults(execute=run_agent)

    incidents = actions.add_parser(
        "incidents",
        help="show what the agent saw and did",
        description="Show what the agent saw and did: unfinished incidents, and those of the last week.",
        allow_abbrev=False,
    )
    _add_config(incidents)
    incidents.add_argument("--all", action="store_true", help="older ones and harmless ones as well")
    incidents.add_argument("--json", action="store_true", help="one JSON document an incident, oldest first")
    incidents.set_defaults(execute=show_incidents)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", type=Path, metavar="FILE", help=f"configuration (default: {node_config.DEFAULT_PATH})"
    )


def run_agent(arguments: argparse.Namespace) -> int:
    """Run the agent until it is told to stop; or check its setup."""
    if arguments.check:
        return check_setup(arguments)
    if arguments.json:
        raise StepkeeperError("--json goes with --check: the agent's log is JSON in any case", ExitCode.USAGE)
    # the sensors and the socket are wanted by the agent alone: `node incidents` starts without them
    from stepkeeper.node import journald, signals  # noqa: PLC0415
    from stepkeeper.node.agent import Agent  # noqa: PLC0415
    from stepkeeper.node.notify import Systemd  # noqa: PLC0415
    from stepkeeper.node.xid import catalogue  # noqa: PLC0415
    from stepkeeper.slurm.node_commands import NodeCommands  # noqa: PLC0415

    config = node_config.load(arguments.config)
    systemd = Systemd()
    ledger.own_directory(config.state_path)
    ledger.own_directory(config.run_path)
    path = config.state_path / ledger.NAME
    book = _read(path)
    stream = PatientStream(lambda: cast("TextIO", sys.stdout))
    log = journald.configure(stream, journal=journald.stdout_is_journal(), node=config.name)
    state = book.state(config.name, config.boot_id())
    agent = Agent(
        config=config,
        state=state,
        book=ledger.Ledger(path, book, config.policy),
        catalogue=catalogue.load(),
        client=NodeCommands(config.slurm_environment, config.test.limits.call_within_s),
        systemd=systemd,
        log=log,
    )

    signals.listen(agent.inbox)
    log.info("agent_started", version=__version__, config=msgspec.to_builtins(config), unreadable=book.unreadable)
    try:
        agent.run()
    finally:
        stream.drain(LOG_WITHIN_S)
    return ExitCode.FINISHED


@printing.reading
def check_setup(arguments: argparse.Namespace) -> int:
    """Say all that an agent would find wrong with its setup.  The agent may run meanwhile; nothing is changed."""
    from stepkeeper.commands.doctor import show  # noqa: PLC0415 - as above
    from stepkeeper.doctor.finding import Level  # noqa: PLC0415
    from stepkeeper.node import setup  # noqa: PLC0415
    from stepkeeper.node.xid import catalogue  # noqa: PLC0415
    from stepkeeper.slurm.node_commands import NodeCommands  # noqa: PLC0415

    config = node_config.load(arguments.config)
    catalogue.load()
    client = NodeCommands(config.slurm_environment, config.test.limits.call_within_s)
    found = setup.examine(config, setup.gather(config, client))
    if arguments.json:
        findings = [msgspec.to_builtins(finding) for finding in found]
        printing.say_json({"node": config.name, "mode": config.mode.value, "findings": findings}, indent=2)
    else:
        show(found, show_all=True)
    wrong = any(finding.level is Level.PROBLEM for finding in found)
    return int(ExitCode.SITE_UNFIT if wrong else ExitCode.FINISHED)


@printing.reading
def show_incidents(arguments: argparse.Namespace) -> int:
    """Print the ledger; the agent need not run."""
    config = node_config.load(arguments.config)
    path = config.state_path / ledger.NAME
    if not os.path.lexists(path):
        raise StepkeeperError(f"{path}: not there: no agent has seen anything on this node", ExitCode.NOTHING_FOUND)
    book = _read(path)
    found = sorted(book.incidents.values(), key=lambda each: each.first_at)
    if not arguments.all:
        since = time.time() - RECENT_S
        found = [each for each in found if is_unfinished(each) or (each.last_at >= since and _matters(each))]
    if arguments.json:
        for incident in found:
            printing.say_json(msgspec.to_builtins(msgspec.structs.asdict(incident)))
        return ExitCode.FINISHED
    _show(found)
    if book.drain is not None:
        printing.say()
        printing.say(f"drained since {instant(book.drain.at)}: {book.drain.reason}")
    return ExitCode.FINISHED


def _matters(incident: Incident) -> bool:
    return incident.outcome is not Outcome.NOTED or bool(incident.jobs)


def _show(found: list[Incident]) -> None:
    if not found:
        printing.say("no incidents")
        return
    rows = [("FIRST SEEN", "FAULT", "GPU", "ACTION", "OUTCOME", "SEEN", "WHY", "ID")]
    rows += [
        (
            instant(each.first_at),
            each.name,
            each.pci or each.gpu or "-",
            each.action.value,
            each.outcome.value,
            f"{each.count}x",
            each.escalated or each.why,
            each.id,
        )
        for each in found
    ]
    printing.say_table(rows)


def _read(path: Path) -> ledger.Book:
    try:
        return ledger.read(path)
    except OSError as error:
        raise StepkeeperError(f"{path}: {error.strerror}; the ledger is root's", ExitCode.USAGE) from error

"""`stepkeeper node agent|check|incidents`: what an administrator runs on a compute node."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

import msgspec

from stepkeeper import __version__, printing
from stepkeeper.cli.arguments import above_zero
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import NotFoundError, UsageError
from stepkeeper.log import Form, PatientStream, configure
from stepkeeper.node_agent import config as node_config
from stepkeeper.node_agent import ledger
from stepkeeper.node_agent.core.state import Incident, Outcome, is_unfinished
from stepkeeper.printing import instant

if TYPE_CHECKING:
    from stepkeeper.node_agent.checks import Report


LOG_WITHIN_S = 2.0
RECENT_S = 7 * 86400.0


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    node = subcommands.add_parser(
        "node", help="check a compute node, and run its agent", description="Check a compute node, and run its agent."
    )
    actions = node.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_check(actions)

    agent = actions.add_parser(
        "agent",
        help="watch this node's GPUs, and drain it where they fail (root, from systemd)",
        description="Watch this node's GPUs, and drain it where they fail.  Mode `observe` only says what it would do.",
    )
    _add_config(agent)
    agent.add_argument(
        "--check",
        action="store_true",
        help="say whether configuration, Slurm, PCI bus, NVML and kernel log fit together, and end",
    )
    agent.add_argument("--json", action="store_true", help="with --check: one JSON document")
    agent.set_defaults(execute=run_agent, is_service=True)

    incidents = actions.add_parser(
        "incidents",
        help="show what the agent saw and did",
        description="Show what the agent saw and did: unfinished incidents, and those of the last week.",
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
    """Run the agent until it gets a signal to stop; or check its setup."""
    if arguments.check:
        return printing.safely(check_setup, arguments)
    if arguments.json:
        raise UsageError("--json goes with --check: the agent's log is JSON in any case")
    # the sensors and the socket are wanted by the agent alone: `node incidents` starts without them
    from stepkeeper.node_agent import runtime  # noqa: PLC0415
    from stepkeeper.node_agent.agent import Agent  # noqa: PLC0415
    from stepkeeper.node_agent.runtime import Systemd  # noqa: PLC0415
    from stepkeeper.node_agent.xid import catalogue  # noqa: PLC0415
    from stepkeeper.slurm.nodes import NodeCommands  # noqa: PLC0415

    config = node_config.load(arguments.config)
    systemd = Systemd()
    ledger.own_directory(config.state_path)
    ledger.own_directory(config.run_path)
    path = config.state_path / ledger.NAME
    book = _read(path)
    stream = PatientStream(lambda: cast("TextIO", sys.stdout))
    form = Form.JOURNAL if runtime.stdout_is_journal() else Form.JSON
    log = configure(stream, form=form, node=config.name)
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

    runtime.listen_for_signals(agent.inbox)
    log.info("agent_started", version=__version__, config=msgspec.to_builtins(config), unreadable=book.unreadable)
    try:
        agent.run()
    finally:
        stream.drain(LOG_WITHIN_S)
    return ExitCode.FINISHED


def check_setup(arguments: argparse.Namespace) -> int:
    """Say all that an agent would find wrong with its setup.  The agent may run meanwhile; nothing is changed."""
    from stepkeeper.cli.doctor import show  # noqa: PLC0415 - as above
    from stepkeeper.doctor.site import Level  # noqa: PLC0415
    from stepkeeper.node_agent import setup  # noqa: PLC0415
    from stepkeeper.node_agent.xid import catalogue  # noqa: PLC0415
    from stepkeeper.slurm.nodes import NodeCommands  # noqa: PLC0415

    config = node_config.load(arguments.config)
    catalogue.load()
    client = NodeCommands(config.slurm_environment, config.test.limits.call_within_s)
    found = setup.examine(config, setup.gather(config, client))
    if arguments.json:
        findings = [msgspec.to_builtins(finding) for finding in found]
        printing.say_json({"node": config.name, "mode": config.mode.value, "findings": findings})
    else:
        show(found, show_all=True)
    wrong = any(finding.level is Level.PROBLEM for finding in found)
    return int(ExitCode.SITE_UNFIT if wrong else ExitCode.FINISHED)


def show_incidents(arguments: argparse.Namespace) -> None:
    """Print the ledger; the agent need not run."""
    config = node_config.load(arguments.config)
    path = config.state_path / ledger.NAME
    if not os.path.lexists(path):
        raise NotFoundError(f"{path}: not there: no agent has seen anything on this node")
    book = _read(path)
    found = sorted(book.incidents.values(), key=lambda each: each.first_at)
    if not arguments.all:
        since = time.time() - RECENT_S
        found = [each for each in found if is_unfinished(each) or (each.last_at >= since and _matters(each))]
    if arguments.json:
        for incident in found:
            fields = msgspec.structs.fields(incident)  # by their names in the ledger
            printing.say_json_line({field.encode_name: getattr(incident, field.name) for field in fields})
        return
    _show(found)
    if book.drain is not None:
        printing.say()
        printing.say(f"drained since {instant(book.drain.at)}: {book.drain.reason}")


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
        raise UsageError(f"{path}: {error.strerror}; the ledger is root's") from error


# `stepkeeper node check`: is this node fit?  Speaks the language of Nagios plugins.
#
# Exit codes: 0 fit, 1 fit with a warning, 2 not fit (a check that hangs counts as that), 3 not known: a mistake in the
# call, or the command itself did not end in time.

OK, WARNING, CRITICAL, UNKNOWN = range(4)
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
TIMEOUT_S = 20.0
OWN_S = 5.0  # beyond the checks' limit: start, and children that do not die
GIB = 1024**3
UNITS = {"clock_offset_s": "s", "free_bytes": "B", "write_s": "s"}
NAMES_MAX = 5  # of problems, in the line that a pager shows


class _NagiosParser(argparse.ArgumentParser):
    """A mistake in the call says nothing about the node."""

    def error(self, message: str) -> NoReturn:
        """Exit with "not known"."""
        self.exit(UNKNOWN, f"STEPKEEPER UNKNOWN: {message}; see `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is not known here: the parser above would exit with another code."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _add_check(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command below `stepkeeper node`."""
    # the group's own parser class would exit with 2, which Nagios takes for "critical"
    usual, subcommands._parser_class = subcommands._parser_class, _NagiosParser  # noqa: SLF001
    try:
        check = subcommands.add_parser(
            "check",
            help="check once whether this node is fit; exit codes of Nagios",
            description="Check once whether this node is fit: GPUs, storage.  Needs neither root nor the agent, "
            "changes nothing, and ends in time whatever hangs.  Exit codes as Nagios has them: 0 fit, 1 fit with a "
            "warning, 2 not fit, 3 not known.  A check that hangs is 2.  Slurm's HealthCheckProgram ignores the exit "
            "code.  The site's script or the node agent decides what follows from it.",
            allow_abbrev=False,
        )
    finally:
        subcommands._parser_class = usual  # noqa: SLF001
    check.add_argument("--gpus", type=_count, metavar="N", help="so many GPUs must answer; implies that NVML is there")
    check.add_argument("--no-gpus", action="store_true", help="do not check GPUs")
    check.add_argument(
        "--path", action="append", default=[], type=Path, metavar="DIR", help="must be writable; may be repeated"
    )
    check.add_argument(
        "--free-gib",
        type=above_zero,
        default=0.0,
        metavar="GIB",
        help="at least so much space on the file system of each",
    )
    check.add_argument(
        "--pending-is-critical", action="store_true", help="a remapped row that waits for a reset makes the node unfit"
    )
    check.add_argument(
        "--timeout-s",
        type=above_zero,
        default=TIMEOUT_S,
        metavar="S",
        help=f"limit of the checks (default {TIMEOUT_S:g})",
    )
    check.add_argument("--json", action="store_true", help="one JSON document")
    check.set_defaults(execute=run_check)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a number of GPUs: {text}")
    return int(text)


def run_check(arguments: argparse.Namespace) -> int:
    """Check, print, and return the exit code."""
    limit_s = arguments.timeout_s + OWN_S
    watchdog = threading.Timer(limit_s, _give_up, [limit_s])
    watchdog.daemon = True
    watchdog.start()
    try:
        report = _checked(arguments)
    except Exception as error:  # noqa: BLE001 - a mistake of ours: with a traceback, and without a word on the node
        traceback.print_exc()
        printing.say(f"STEPKEEPER UNKNOWN: the check itself failed: {type(error).__name__}: {error}")
        return UNKNOWN
    code = CRITICAL if report.problems else WARNING if report.warnings else OK
    if arguments.json:
        printing.say_json({"status": WORDS[code], "fit": report.fit, **msgspec.structs.asdict(report)})
    else:
        _show_check(code, report)
    watchdog.cancel()
    return code


def _checked(arguments: argparse.Namespace) -> Report:
    from stepkeeper.node_agent.checks import Wanted, run_checks  # noqa: PLC0415 - under the watchdog

    return run_checks(
        Wanted(
            gpus=arguments.gpus,
            nvml=not arguments.no_gpus,
            nvml_required=bool(arguments.gpus),
            pending_is_problem=arguments.pending_is_critical,
            writable=tuple(path.absolute() for path in arguments.path),
            free_bytes=round(arguments.free_gib * GIB),
        ),
        arguments.timeout_s,
    )


def _give_up(limit_s: float) -> None:
    """End the process though the main thread hangs."""
    os.write(sys.stdout.fileno(), f"STEPKEEPER UNKNOWN: the check did not end within {limit_s:g} s\n".encode())
    os._exit(UNKNOWN)


def _show_check(code: int, report: Report) -> None:
    """Print the status line with its figures, then the findings that it had no room for."""
    findings = [*report.problems, *report.warnings]
    words = "; ".join(findings[:NAMES_MAX]) or _summary(report)
    if len(findings) > NAMES_MAX:
        words += f"; and {len(findings) - NAMES_MAX} more"
    figures = " ".join(_figure(name, value) for name, value in sorted(report.figures.items()))
    printing.say(f"STEPKEEPER {WORDS[code]}: {words.replace('|', '/')}{' | ' + figures if figures else ''}")
    for finding in findings[NAMES_MAX:]:
        printing.say(finding.replace("|", "/"))


def _summary(report: Report) -> str:
    parts = []
    if "gpus" in report.figures:
        parts.append(f"{report.figures['gpus']:.0f} GPUs answer")
    elif report.nvml:
        parts.append(f"NVML {report.nvml}")
    paths = sum(name.startswith("write_s:") for name in report.figures)
    if paths:
        parts.append(f"{paths} {'directory is' if paths == 1 else 'directories are'} writable")
    return ", ".join(parts) or "nothing was checked"


def _figure(name: str, value: float) -> str:
    """Return one figure as Nagios reads it: quoted label, number, unit."""
    label = name.replace("'", "").replace("=", "_").replace("|", "_")
    number = f"{value:.3f}".rstrip("0").rstrip(".")  # no exponent: Nagios does not read one
    return f"'{label}'={number}{UNITS.get(name.partition(':')[0], '')}"

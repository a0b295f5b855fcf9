"""`stepkeeper node check`: is this node fit?  Speaks the language of Nagios plugins.

Exit codes: 0 fit, 1 fit but look at it, 2 not fit (a check that hangs counts as that), 3 not known: a mistake in the
call, or the command itself did not end in time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stepkeeper.cli import printing

if TYPE_CHECKING:
    from stepkeeper.node_agent.checks import Report

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


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command below `stepkeeper node`."""
    # the group's own parser class would exit with 2, which Nagios takes for "critical"
    usual, subcommands._parser_class = subcommands._parser_class, _NagiosParser  # noqa: SLF001
    try:
        check = subcommands.add_parser(
            "check",
            help="look once whether this node is fit; exit codes of Nagios",
            description="Look once whether this node is fit: GPUs, storage.  Needs neither root nor the agent, changes "
            "nothing, and ends in time whatever hangs.  Exit codes as Nagios has them: 0 fit, 1 fit but look at it, "
            "2 not fit (a check that hangs is that), 3 not known.  Slurm's HealthCheckProgram ignores the exit code: "
            "what shall follow from it is the site's script to say, or the node agent's.",
            allow_abbrev=False,
        )
    finally:
        subcommands._parser_class = usual  # noqa: SLF001
    check.add_argument("--gpus", type=_count, metavar="N", help="so many GPUs must answer; implies that NVML is there")
    check.add_argument("--no-gpus", action="store_true", help="do not look at GPUs")
    check.add_argument(
        "--path", action="append", default=[], type=Path, metavar="DIR", help="must be writable; may be repeated"
    )
    check.add_argument(
        "--free-gib",
        type=_positive,
        default=0.0,
        metavar="GIB",
        help="at least so much space on the file system of each",
    )
    check.add_argument(
        "--pending-is-critical", action="store_true", help="a remapped row that waits for a reset makes the node unfit"
    )
    check.add_argument(
        "--timeout-s",
        type=_positive,
        default=TIMEOUT_S,
        metavar="S",
        help=f"limit of the checks (default {TIMEOUT_S:g})",
    )
    check.add_argument("--json", action="store_true", help="one JSON document")
    check.set_defaults(execute=execute)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a number of GPUs: {text}")
    return int(text)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):  # then it is no number: refused below
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"not a positive number: {text}")


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Check, print, and return the exit code."""
    limit_s = arguments.timeout_s + OWN_S
    watchdog = threading.Timer(limit_s, _give_up, [limit_s])
    watchdog.daemon = True
    watchdog.start()
    try:
        report = _report(arguments)
    except Exception as error:  # noqa: BLE001 - a mistake of ours: with a traceback, and without a word on the node
        traceback.print_exc()
        printing.say(f"STEPKEEPER UNKNOWN: the check itself failed: {type(error).__name__}: {error}")
        return UNKNOWN
    code = CRITICAL if report.problems else WARNING if report.warnings else OK
    if arguments.json:
        printing.say_json(
            {
                "status": WORDS[code],
                "fit": report.fit,
                "problems": report.problems,
                "warnings": report.warnings,
                "figures": report.figures,
                "nvml": report.nvml,
                "took_s": report.took_s,
            },
            indent=2,
        )
    else:
        _show(code, report)
    watchdog.cancel()
    return code


def _report(arguments: argparse.Namespace) -> Report:
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


def _show(code: int, report: Report) -> None:
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

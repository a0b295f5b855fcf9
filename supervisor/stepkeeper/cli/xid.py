"""`stepkeeper xid`: what a GPU's fault code means, and which faults a kernel log holds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.cli.arguments import opened
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import NotFoundError, UsageError
from stepkeeper.node_agent.xid import catalogue as catalogues
from stepkeeper.node_agent.xid.catalogue import Catalogue, Fault, Row, Severity, Source, SwitchRow
from stepkeeper.node_agent.xid.judge import judge
from stepkeeper.node_agent.xid.parse import Sighting, scan

_NAME_WIDTH, _PCI_WIDTH, _ACTION_WIDTH, _DOMAIN_WIDTH = 11, 13, 12, 15  # the log may be endless: no second look
_SWITCH_WORDS = {
    Severity.ALWAYS_FATAL: "always fatal: the whole fabric",
    Severity.FATAL: "fatal: the GPUs on its link",
    Severity.NON_FATAL: "not fatal, unless the line says Fatal",
}
_CODES = f"""
exit codes:
  {ExitCode.FINISHED:<3} explained, or the whole log was read, with faults in it or without
  {ExitCode.USAGE:<3} an argument or the site's catalogue is wrong
  {ExitCode.NOTHING_FOUND:<3} nobody knows this code, or FILE cannot be read
"""


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "xid",
        help="explain a fault code (XID) of a GPU, or find faults in a kernel log",
        description="Explain an XID (of a GPU) or SXID (of an NVSwitch).  Or list all, or find faults in a kernel log.",
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("code", metavar="CODE", nargs="?", type=int, help="the code to explain (default: list all)")
    command.add_argument("--parse", metavar="FILE", help="find the faults in these lines of a kernel log (-: stdin)")
    command.add_argument("--json", action="store_true", help="one JSON document; with --parse one line a fault")
    command.add_argument(
        "--allow-injected",
        action="store_true",
        help="with --parse: also lines that a program wrote into the kernel log (for tests)",
    )
    command.add_argument(
        "--catalogue",
        metavar="FILE",
        type=Path,
        help=f"rows that override ours (CSV; default: {catalogues.SITE_FILE}, if there)",
    )
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> None:
    """Explain, list or parse."""
    if arguments.parse is not None and arguments.code is not None:
        raise UsageError("CODE and --parse: use one of them")
    if arguments.allow_injected and arguments.parse is None:
        raise UsageError("--allow-injected is about a log: use it with --parse")
    known = catalogues.load(arguments.catalogue)
    if arguments.parse is not None:
        _parse(arguments.parse, known, as_json=arguments.json, allow_injected=arguments.allow_injected)
    elif arguments.code is not None:
        _explain(arguments.code, known, as_json=arguments.json)
    else:
        _list(known, as_json=arguments.json)


def _explain(code: int, known: Catalogue, *, as_json: bool) -> None:
    row = known.rows.get(code) or known.switch_rows.get(code)
    if row is None:
        raise NotFoundError(
            f"{code}: not in the catalogue: such a code is logged, and no node is drained for it; "
            "`stepkeeper xid` lists the known ones"
        )
    if as_json:
        printing.say_json(_document(row))
    elif isinstance(row, SwitchRow):
        printing.say(f"SXID {code} (NVSwitch): {row.meaning}")
        printing.say(f"  severity  {_SWITCH_WORDS[row.severity]}")
    else:
        printing.say(f"XID {code}: {row.meaning}")
        whose = " (set by this site)" if row.site else ""
        for name, value in (
            ("driver", row.mnemonic),
            ("fault of", row.domain.value),
            ("action", row.action.value + whose),
            ("note", row.note),
            ("sources", f"{row.sources} ({row.date})" if row.sources else row.date),
        ):
            if value:
                printing.say(f"  {name:<8}  {value}")


def _list(known: Catalogue, *, as_json: bool) -> None:
    rows = [known.rows[code] for code in sorted(known.rows)]
    switch_rows = [known.switch_rows[code] for code in sorted(known.switch_rows)]
    if as_json:
        document = {"xids": [_document(row) for row in rows], "sxids": [_document(row) for row in switch_rows]}
        printing.say_json(document)
        return
    table = [("CODE", "ACTION", "FAULT OF", "MEANING")]
    table += [(str(row.code), row.action.value, row.domain.value, row.meaning) for row in rows]
    table += [(str(row.code), row.severity.value, "nvswitch", row.meaning) for row in switch_rows]
    printing.say_table(table, right=frozenset({0}))


def _document(row: Row | SwitchRow) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(row)
    code = document.pop("code")
    return {"sxid" if isinstance(row, SwitchRow) else "xid": code, **document}


def _parse(name: str, known: Catalogue, *, as_json: bool, allow_injected: bool) -> None:
    if not as_json:
        _say_columns("FAULT", "PCI", "ACTION", "FAULT OF", "WHY")
    with opened(name, "a file with lines of a kernel log") as file:
        for sighting in scan(file, allow_injected=allow_injected):
            fault = judge(sighting.report, at=0.0, source=Source.KERNEL, catalogue=known, gpu=sighting.gpu)
            if as_json:
                printing.say_json_line(_found(sighting, fault, known))
            else:
                why = f"{fault.instance}: {fault.why}" if fault.instance else fault.why
                _say_columns(fault.name, fault.pci or "-", fault.action.value, fault.domain.value, why)
            sys.stdout.flush()  # the log may still grow


def _found(sighting: Sighting, fault: Fault, known: Catalogue) -> dict[str, Any]:
    row = known.rows.get(fault.code) if fault.code is not None else None
    document: dict[str, Any] = {
        "kind": fault.kind.value,
        "sxid" if fault.kind.value == "sxid" else "xid": fault.code,
        "pci": fault.pci,
        "action": fault.action.value,
        "domain": fault.domain.value,
        "certain": fault.certain,
        "why": fault.why,
    }
    if row is not None and row.mnemonic and fault.kind.value == "xid":
        document["mnemonic"] = row.mnemonic
    where_known = {"instance": fault.instance, "cause": fault.cause, "gpu": fault.gpu}
    document.update({key: value for key, value in where_known.items() if value})
    return {**document, "line": sighting.line}


def _say_columns(name: str, pci: str, action: str, domain: str, why: str) -> None:
    printing.say(f"{name:<{_NAME_WIDTH}} {pci:<{_PCI_WIDTH}} {action:<{_ACTION_WIDTH}} {domain:<{_DOMAIN_WIDTH}} {why}")

"""`stepkeeper checkpoints repair`: pointer files of other frameworks, and torn checkpoints put aside, on request."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepkeeper.cli import checkpoints_foreign, printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.frameworks import repair
from stepkeeper.frameworks.framework import Framework
from stepkeeper.frameworks.repair import Findings, Pointer, Pointing, RefusedError, Torn

_NOTHING_WHOLE = "no checkpoint that it can name is verified and resumable"


def add(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    command: argparse.ArgumentParser = below.add_parser(
        "repair",
        help="have the pointer file of another framework name the newest verified checkpoint",
        description="Say which pointer file of another framework (`latest`, `latest_checkpointed_iteration.txt`, ...) "
        "names another checkpoint than the newest verified and resumable one.  With --apply, rewrite it by atomic "
        "replace.  Exit code 0: all is right, or was put right; 41: something is to be done, or was refused; 1: no "
        "checkpoint is verified and resumable, and nothing was changed.",
        allow_abbrev=False,
    )
    command.add_argument("where", metavar="DIR", help="directory of the checkpoints")
    command.add_argument("--apply", action="store_true", help="do it; without this, only say what would be done")
    command.add_argument(
        "--quarantine",
        action="store_true",
        help="also rename torn checkpoints to `.corrupt-REASON-NAME`, in the same directory",
    )
    command.add_argument(
        "--allow-recent", action="store_true", help="also where files here were changed in the last 2 minutes"
    )
    command.set_defaults(execute=repair_directory)
    return command


@printing.reading
def repair_directory(arguments: argparse.Namespace) -> int:
    """Say what is wrong with pointer files and torn checkpoints, and put it right where that was asked for."""
    finding = checkpoints_foreign.found(arguments)
    if finding is None:
        raise StepkeeperError(
            f"{arguments.where}: no directory of checkpoints of another framework, which alone have pointer files "
            "(name the framework with --framework)",
            ExitCode.USAGE,
        )
    root = checkpoints_foreign.root_of(arguments, finding)
    how = checkpoints_foreign.how_of(arguments, deep=True, cached=not arguments.no_cache)
    framework = finding.framework
    findings = repair.look(framework, root, how)
    work = _Work(arguments, framework, root, findings)
    pointers = [work.point(pointer) for pointer in findings.pointers]
    torn = [work.put_aside(each, pointers) for each in findings.torn]
    newest = findings.newest
    if arguments.json:
        document = {
            **checkpoints_foreign.header_of(root, finding),
            "applied": arguments.apply,
            "newest": None if newest is None else str(newest.step.path),
            "pointers": pointers,
            "torn": torn,
        }
        printing.say_json(document, indent=2)
    else:
        printing.say(f"{framework.title}: {finding.why}")
        shown = "none" if newest is None else checkpoints_foreign.name_of(newest, root)
        printing.say(f"newest verified and resumable checkpoint: {shown}")
        if not pointers:
            printing.say(f"{framework.title} reads no pointer file that this command knows")
        for row in (*pointers, *torn):
            printing.say(f"{row['path']}: {row['words']}")
    if newest is None:
        return checkpoints_foreign.NONE_FOUND
    open_ends = [row for row in (*pointers, *torn) if row["action"] in ("would", "refused")]
    return ExitCode.NOT_VERIFIED if open_ends else ExitCode.FINISHED


class _Work:
    """One call of the command."""

    def __init__(self, arguments: argparse.Namespace, framework: Framework, root: Path, findings: Findings) -> None:
        self._apply, self._quarantine = arguments.apply, arguments.quarantine
        self._framework, self._root, self._findings = framework, root, findings
        self._recent = "" if arguments.allow_recent else repair.changed_just_now(root, findings)

    def point(self, pointer: Pointer) -> dict[str, Any]:
        """Rewrite a pointer file, or say what would be done."""
        state = pointer.state
        row = {
            "path": self._shown(pointer.path),
            "state": state.name.lower(),
            "says": pointer.shown,
            "names": None if pointer.target is None else self._shown(pointer.target.step.path),
        }
        said = f"{state.value} ({pointer.shown})" if pointer.shown and not pointer.was.problem else state.value
        if state is Pointing.RIGHT:
            return {**row, "action": "none", "words": said}
        to = "" if pointer.target is None else f" to name {pointer.target.step.path.name}"

        def change() -> str:
            repair.rewrite(pointer, self._root)
            return f"{said}: rewritten{to}"

        blocked = pointer.was.problem or ("" if pointer.target is not None else _NOTHING_WHOLE)
        return {**row, **self._act(f"{said}: would be rewritten{to}", said, change, blocked)}

    def put_aside(self, torn: Torn, pointers: list[dict[str, Any]]) -> dict[str, Any]:
        """Rename a torn checkpoint, or say what would be done."""
        judged = torn.judged
        row = {"path": self._shown(judged.step.path), "state": torn.reason.value, "problems": list(judged.problems)}
        said = f"{torn.reason.value}: {'; '.join(judged.problems[:3])}"
        if not self._quarantine:
            return {**row, "action": "none", "words": f"{said} (--quarantine renames it)"}
        row["to"] = torn.to.name

        def change() -> str:
            if any(each["action"] == "refused" for each in pointers):
                raise RefusedError("a pointer file could not be rewritten, and perhaps names it")
            to = repair.put_aside(torn, self._framework, self._root)
            row["to"] = to.name
            return f"{said}: renamed to {to.name}"

        blocked = "" if self._findings.newest is not None else "no checkpoint is verified and resumable"
        return {**row, **self._act(f"{said}: would be renamed to {torn.to.name}", said, change, blocked)}

    def _act(self, would: str, said: str, change: Callable[[], str], blocked: str) -> dict[str, str]:
        if blocked:
            return {"action": "refused", "words": f"{said}: not changed: {blocked}"}
        if not self._apply:
            return {"action": "would", "words": would}
        if self._recent:
            why = f"{self._recent}: perhaps a run still writes here (--allow-recent does it anyway)"
            return {"action": "refused", "words": f"{said}: not changed: {why}"}
        try:
            return {"action": "done", "words": change()}
        except RefusedError as refused:
            return {"action": "refused", "words": f"{said}: not changed: {refused}"}

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self._root)) if path.is_relative_to(self._root) else str(path)

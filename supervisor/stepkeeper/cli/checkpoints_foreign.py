"""`stepkeeper checkpoints ls|verify|latest|repair` on checkpoints that another framework wrote."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepkeeper import printing
from stepkeeper.cli.arguments import whole
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import NotFoundError, UsageError
from stepkeeper.frameworks import choosing, repair, selection
from stepkeeper.frameworks.choosing import How, Judged, State
from stepkeeper.frameworks.framework import Framework, Step
from stepkeeper.frameworks.recognise import AUTO, Finding
from stepkeeper.frameworks.repair import Findings, Pointer, Pointing, RefusedError, Torn
from stepkeeper.run_store import find
from stepkeeper_trainer.formats.lineage import LINEAGE_NAME
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, parse_step_name
from stepkeeper_trainer.formats.reading import Reading

NONE_FOUND = 1  # of `latest`, as on a run


def add_options(command: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command.add_argument(
        "--framework",
        metavar="NAME",
        help="which framework wrote it, where it is not ours: a name of docs/frameworks.md, or `auto` (default)",
    )
    command.add_argument(
        "--world-size",
        type=whole,
        metavar="N",
        help="number of ranks that saved it, for frameworks whose checkpoints do not say it",
    )


def found(arguments: argparse.Namespace) -> Finding | None:
    """Return the framework of the directory that is meant; None where it is ours, a run, or of no known framework.

    Raises:
        StepkeeperError: what was wanted is not there, or a setting is wrong.
        OSError: it cannot be listed.
    """
    path = Path(arguments.where)
    wanted: str | None = arguments.framework
    if not path.is_dir() and not path.is_file():
        if wanted is None:
            return None  # a job id, or nothing: the usual way decides
        raise NotFoundError(f"{arguments.where}: no such file or directory")
    if wanted is None and _ours(path):
        return None
    finding = selection.select(_plain(path), wanted, os.environ)
    if finding is None and wanted == AUTO:
        raise NotFoundError(
            f"{arguments.where}: no checkpoint of a framework that is known is in it; name one with --framework"
        )
    return finding


def _ours(path: Path) -> bool:
    """Tell whether a directory is a run, its checkpoints/, or one of our step directories."""
    if not path.is_dir():
        return False
    names = os.listdir(path)
    ours = {LINEAGE_NAME, MANIFEST_NAME, "journal.jsonl", "status.json"}
    if not ours.isdisjoint(names):
        return True
    if parse_step_name(path.name) is not None and path.parent.name == "checkpoints":
        return True
    manifests = (path / name / MANIFEST_NAME for name in names if parse_step_name(name) is not None)
    return any(map(os.path.lexists, manifests)) or find.is_run(path)


def _plain(path: Path) -> Path:
    return Path(os.path.abspath(path))


def list_steps(arguments: argparse.Namespace, finding: Finding) -> None:
    """Print a table of checkpoints."""
    root = root_of(arguments, finding)
    judged = choosing.judge_all(finding.framework, root, how_of(arguments, deep=False, cached=False))
    if arguments.json:
        document = {**header_of(root, finding), "steps": [row_of(each, root) for each in judged]}
        printing.say_json(document)
        return
    printing.say(f"{finding.framework.title}: {finding.why}")
    if not judged:
        printing.say(f"{root}: no checkpoint of it")
        return
    table = [("CHECKPOINT", "STEP", "SIZE", "WORLD", *(("RESUMES ON",) if arguments.verbose else ()), "STATE")]
    for each in judged:
        row = row_of(each, root)
        more = f" (and {len(each.problems) - 1} more)" if len(each.problems) > 1 else ""
        problem = f": {each.problems[0]}{more}" if each.problems else ""
        world, size = row["world_size"], row["bytes"]
        table.append(
            (
                row["checkpoint"],
                printing.or_dash(each.number),
                "-" if size is None else printing.size(size),
                printing.or_dash(world),
                *((printing.or_dash(each.world_change and each.world_change.value),) if arguments.verbose else ()),
                f"{each.state.value}{problem}",
            )
        )
    printing.say_table(table, right=frozenset({1, 2, 3}))


def verify_step(arguments: argparse.Namespace, finding: Finding) -> int:
    """Verify one checkpoint."""
    path = _plain(Path(arguments.where))
    framework = finding.framework
    step = next((each for each in framework.list_steps(path.parent) if each.path == path), None)
    if step is None and not framework.is_step(path):
        raise UsageError(
            f"{arguments.where}: no checkpoint of {framework.title}: name one of those that `stepkeeper checkpoints ls "
            f"{arguments.where}` lists"
        )
    how = how_of(arguments, deep=not arguments.shallow, cached=arguments.cached)
    judged = choosing.judge(framework, step or Step(path, None), how)
    whole = judged.state.chosen_from or judged.state is State.NOT_RESUMABLE
    if arguments.json:
        document = {**header_of(path, finding), "ok": whole, "deep": how.deep, **row_of(judged, path.parent)}
        printing.say_json(document)
    else:
        printing.say(f"{finding.framework.title}: {finding.why}")
        printing.say(f"{path}: {judged.state.value}{_read(judged)}")
        for problem in judged.problems:
            printing.say(problem)
        for note in judged.notes:
            printing.say(f"note: {note}")
    return ExitCode.FINISHED if whole else ExitCode.NOT_VERIFIED


def print_latest(arguments: argparse.Namespace, finding: Finding) -> int:
    """Print the newest checkpoint that is whole and resumable."""
    root = root_of(arguments, finding)
    how = how_of(arguments, deep=not arguments.shallow, cached=not arguments.no_cache)
    chosen, skipped = choosing.newest(finding.framework, root, how)
    if arguments.json:
        document = {
            **header_of(root, finding),
            "deep": how.deep,
            "directory": None if chosen is None else str(chosen.step.path),
            "chosen": None if chosen is None else row_of(chosen, root),
            "skipped": [row_of(each, root) for each in skipped],
        }
        printing.say_json(document)
    elif chosen is not None:
        printing.say_path(str(chosen.step.path))
        if chosen.resume is not None:
            words = (
                f"{shlex.join(chosen.resume.arguments)}  ({chosen.resume.how})"
                if chosen.resume.arguments
                else chosen.resume.how
            )
            printing.warn(f"resume with: {words}")
    for each in skipped:
        printing.warn(f"passed over {below(each.step.path, root)}: {each.state.value}: {'; '.join(each.problems)}")
    if chosen is None:
        printing.warn(f"{root}: no checkpoint of {finding.framework.title} that is whole and resumable")
        return NONE_FOUND
    return ExitCode.FINISHED


def root_of(arguments: argparse.Namespace, finding: Finding) -> Path:
    """Return the directory that holds checkpoints.  Raises StepkeeperError where it is one itself."""
    path = _plain(Path(arguments.where))
    if not path.is_dir():
        raise UsageError(f"{arguments.where}: is one checkpoint: name the directory that holds it")
    if not finding.framework.list_steps(path) and finding.framework.is_step(path):
        raise UsageError(
            f"{arguments.where}: is one checkpoint of {finding.framework.title}: name the directory that holds it"
        )
    return path


def how_of(arguments: argparse.Namespace, *, deep: bool, cached: bool) -> How:
    """Return how checkpoints are judged."""
    reading = Reading(
        threads=getattr(arguments, "threads", None),
        bytes_per_s=getattr(arguments, "max_rate", None),
        from_disk=getattr(arguments, "from_disk", False),
    )
    return How(environment=os.environ, deep=deep, cached=cached, world_size=arguments.world_size, reading=reading)


def header_of(path: Path, finding: Finding) -> dict[str, Any]:
    """Return what each JSON document begins with."""
    return {"path": str(path), "framework": finding.framework.name, "why": finding.why}


def row_of(judged: Judged, root: Path) -> dict[str, Any]:
    """Return a checkpoint for programs."""
    deep, resume = judged.deep, judged.resume
    return {
        "checkpoint": below(judged.step.path, root),
        "directory": str(judged.step.path),
        "step": judged.number,
        "world_size": judged.contents.world_size if judged.contents is not None else None,
        "bytes": judged.bytes,
        "state": judged.state.name.lower(),
        "problems": list(judged.problems),
        "notes": list(judged.notes),
        "finished": judged.finished,
        "may_change_world": None if judged.world_change is None else judged.world_change.name.lower(),
        "bytes_read": deep.bytes_read if deep is not None else 0,
        "bytes_known": deep.bytes_known if deep is not None else 0,
        "resume": {"arguments": list(resume.arguments), "how": resume.how} if resume is not None else None,
    }


def below(path: Path, root: Path) -> str:
    """Return the path of a checkpoint, below the directory that it is in."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _read(judged: Judged) -> str:
    if judged.deep is None:
        return " (no data were read)"
    known = f", {printing.size(judged.deep.bytes_known)} unchanged since" if judged.deep.bytes_known else ""
    return f" ({printing.size(judged.deep.bytes_read)} read{known})"


# `repair`: pointer files, and torn checkpoints put aside, on request.

_NOTHING_WHOLE = "no checkpoint that it can name is verified and resumable"


def add_repair(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "repair",
        help="have the pointer file of another framework name the newest verified checkpoint",
        description="Say which pointer file of another framework (`latest`, `latest_checkpointed_iteration.txt`, ...) "
        "names another checkpoint than the newest verified and resumable one.  With --apply, rewrite it by atomic "
        "replace.  Exit code 0: all is right, or was put right.  41: something is to be done, or was refused.  1: no "
        "checkpoint is verified and resumable, and nothing was changed.",
    )
    command.add_argument("where", metavar="DIR", help="directory of the checkpoints")
    command.add_argument("--apply", action="store_true", help="do it; without this option, only say what would be done")
    command.add_argument(
        "--quarantine",
        action="store_true",
        help="also rename torn checkpoints to `.corrupt-REASON-NAME`, in the same directory",
    )
    command.add_argument(
        "--allow-recent", action="store_true", help="also if files here were changed in the last 2 minutes"
    )
    command.set_defaults(execute=repair_directory)
    return command


def repair_directory(arguments: argparse.Namespace) -> int:
    """Say what is wrong with pointer files and torn checkpoints, and put it right where that was asked for."""
    finding = found(arguments)
    if finding is None:
        raise UsageError(
            f"{arguments.where}: no directory of checkpoints of another framework, which alone have pointer files "
            "(name the framework with --framework)"
        )
    root = root_of(arguments, finding)
    how = how_of(arguments, deep=True, cached=not arguments.no_cache)
    framework = finding.framework
    findings = repair.look(framework, root, how)
    work = _Work(arguments, framework, root, findings)
    pointers = [work.point(pointer) for pointer in findings.pointers]
    torn = [work.put_aside(each, pointers) for each in findings.torn]
    newest = findings.newest
    if arguments.json:
        document = {
            **header_of(root, finding),
            "applied": arguments.apply,
            "newest": None if newest is None else str(newest.step.path),
            "pointers": pointers,
            "torn": torn,
        }
        printing.say_json(document)
    else:
        printing.say(f"{framework.title}: {finding.why}")
        shown = "none" if newest is None else below(newest.step.path, root)
        printing.say(f"newest verified and resumable checkpoint: {shown}")
        if not pointers:
            printing.say(f"{framework.title} reads no pointer file that this command knows")
        for row in (*pointers, *torn):
            printing.say(f"{row['path']}: {row['words']}")
    if newest is None:
        return NONE_FOUND
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
            "path": below(pointer.path, self._root),
            "state": state.name.lower(),
            "says": pointer.shown,
            "names": None if pointer.target is None else below(pointer.target.step.path, self._root),
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
        row = {
            "path": below(judged.step.path, self._root),
            "state": torn.reason.value,
            "problems": list(judged.problems),
        }
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

"""`stepkeeper checkpoints ls|verify|latest` on checkpoints that another framework wrote."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from stepkeeper.cli import checkpoints_upkeep, printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.frameworks import choosing, selection
from stepkeeper.frameworks.choosing import How, Judged, State
from stepkeeper.frameworks.framework import Step, WorldChange, quoted
from stepkeeper.frameworks.recognise import AUTO, Finding
from stepkeeper.run_store import find
from stepkeeper_trainer.formats.lineage import LINEAGE_NAME
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, parse_step_name
from stepkeeper_trainer.formats.reading import Reading

NONE_FOUND = 1  # of `latest`, as on a run


def add(command: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command.add_argument(
        "--framework",
        metavar="NAME",
        help="which framework wrote it, where it is not ours: a name of docs/frameworks.md, or `auto` (default)",
    )
    command.add_argument(
        "--world-size",
        type=checkpoints_upkeep.positive,
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
        raise StepkeeperError(f"{arguments.where}: no such file or directory", ExitCode.NOTHING_FOUND)
    if wanted is None and _ours(path):
        return None
    finding = selection.select(_plain(path), wanted, os.environ)
    if finding is None and wanted == AUTO:
        raise StepkeeperError(
            f"{arguments.where}: no checkpoint of a framework that is known is in it; name one with --framework",
            ExitCode.NOTHING_FOUND,
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
    return any(map(os.path.lexists, manifests)) or find.looks_like_run(path)


def _plain(path: Path) -> Path:
    return Path(os.path.abspath(path))


def list_steps(arguments: argparse.Namespace, finding: Finding) -> int:
    """Print a table of checkpoints."""
    root = root_of(arguments, finding)
    judged = choosing.judge_all(finding.framework, root, how_of(arguments, deep=False, cached=False))
    if arguments.json:
        document = {**header_of(root, finding), "steps": [row_of(each, root) for each in judged]}
        printing.say_json(document, indent=2)
        return ExitCode.FINISHED
    printing.say(f"{finding.framework.title}: {finding.why}")
    if not judged:
        printing.say(f"{root}: no checkpoint of it")
        return ExitCode.FINISHED
    table = [("CHECKPOINT", "STEP", "SIZE", "WORLD", *(("RESUMES ON",) if arguments.verbose else ()), "STATE")]
    for each in judged:
        row = row_of(each, root)
        problem = f": {_first(each.problems)}" if each.problems else ""
        world, size = row["world_size"], row["bytes"]
        table.append(
            (
                row["checkpoint"],
                "-" if each.number is None else str(each.number),
                "-" if size is None else printing.size(size),
                "-" if world is None else str(world),
                *((_or_dash(each.world_change),) if arguments.verbose else ()),
                f"{each.state.value}{problem}",
            )
        )
    printing.say_table(table, right=frozenset({1, 2, 3}))
    return ExitCode.FINISHED


def verify_step(arguments: argparse.Namespace, finding: Finding) -> int:
    """Verify one checkpoint."""
    path = _plain(Path(arguments.where))
    framework = finding.framework
    step = next((each for each in framework.list_steps(path.parent) if each.path == path), None)
    if step is None and not framework.is_step(path):
        raise StepkeeperError(
            f"{arguments.where}: no checkpoint of {framework.title}: name one of those that `stepkeeper checkpoints ls "
            f"{arguments.where}` lists",
            ExitCode.USAGE,
        )
    how = how_of(arguments, deep=not arguments.shallow, cached=arguments.cached)
    judged = choosing.judge(framework, step or Step(path, None), how)
    whole = judged.state.chosen_from or judged.state is State.NOT_RESUMABLE
    if arguments.json:
        document = {**header_of(path, finding), "ok": whole, "deep": how.deep, **row_of(judged, path.parent)}
        printing.say_json(document, indent=2)
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
        printing.say_json(document, indent=2)
    elif chosen is not None:
        printing.say_path(str(chosen.step.path))
        if chosen.resume is not None:
            words = (
                f"{quoted(chosen.resume.arguments)}  ({chosen.resume.how})"
                if chosen.resume.arguments
                else chosen.resume.how
            )
            printing.warn(f"resume with: {words}")
    for each in skipped:
        printing.warn(f"passed over {name_of(each, root)}: {each.state.value}: {'; '.join(each.problems)}")
    if chosen is None:
        printing.warn(f"{root}: no checkpoint of {finding.framework.title} that is whole and resumable")
        return NONE_FOUND
    return ExitCode.FINISHED


def root_of(arguments: argparse.Namespace, finding: Finding) -> Path:
    """Return the directory that holds checkpoints.  Raises StepkeeperError where it is one itself."""
    path = _plain(Path(arguments.where))
    if not path.is_dir():
        raise StepkeeperError(f"{arguments.where}: is one checkpoint: name the directory that holds it", ExitCode.USAGE)
    if not finding.framework.list_steps(path) and finding.framework.is_step(path):
        raise StepkeeperError(
            f"{arguments.where}: is one checkpoint of {finding.framework.title}: name the directory that holds it",
            ExitCode.USAGE,
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
        "checkpoint": name_of(judged, root),
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


def name_of(judged: Judged, root: Path) -> str:
    """Return a checkpoint's path below the directory."""
    path = judged.step.path
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _read(judged: Judged) -> str:
    if judged.deep is None:
        return " (no data were read)"
    known = f", {printing.size(judged.deep.bytes_known)} unchanged since" if judged.deep.bytes_known else ""
    return f" ({printing.size(judged.deep.bytes_read)} read{known})"


def _or_dash(change: WorldChange | None) -> str:
    return "-" if change is None else change.value


def _first(problems: tuple[str, ...]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more

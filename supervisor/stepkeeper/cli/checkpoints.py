"""`stepkeeper checkpoints ls|verify|latest|repair|prune|pin|unpin`: the step directories of a run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from stepkeeper import printing
from stepkeeper.cli import checkpoints_export, checkpoints_foreign, checkpoints_tiers
from stepkeeper.cli.arguments import above_zero, size, whole
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError
from stepkeeper.run_analytics import history, reading
from stepkeeper.run_analytics.model import left_out_in_words
from stepkeeper.run_analytics.timeline import condition, judged
from stepkeeper.run_store import find, journal
from stepkeeper.run_store import status as run_status
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats import records, steps
from stepkeeper_trainer.formats import verify as verifying
from stepkeeper_trainer.formats.manifest import LEFT_OUT
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import Cache
from stepkeeper_trainer.store import retention, space

_OF_RUNS = ("checkpoints", lineages.LINEAGE_NAME)  # what a run directory holds, or its checkpoints/


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    group = subcommands.add_parser(
        "checkpoints",
        help="list, verify, choose, repair, keep and prune step directories",
        description="List, verify, choose, repair, keep and prune step directories.  Their bytes are never changed.",
    )
    below = group.add_subparsers(
        dest="checkpoints_command",
        metavar="COMMAND",
        required=True,
        parser_class=type(group),
        title="commands",
    )
    listing = below.add_parser("ls", help="list the step directories, newest first")
    listing.add_argument("where", metavar="DIR|RUN", help="checkpoints/ directory, run directory or job id")
    listing.add_argument(
        "-v", "--verbose", action="store_true", help="also say which numbers of ranks can resume from each"
    )
    listing.set_defaults(execute=list_steps)
    verify = below.add_parser("verify", help="compare every byte of a step directory with its manifest")
    verify.add_argument("where", metavar="STEPDIR", help="a step directory")
    verify.set_defaults(execute=verify_step)
    latest = below.add_parser("latest", help="print the newest verified step directory; exit code 1 if there is none")
    latest.add_argument("where", metavar="DIR", help="run directory, its checkpoints/, or a job id")
    latest.set_defaults(execute=print_latest)
    verify.add_argument("--cached", action="store_true", help="do not read again what was right and is unchanged since")
    repair = checkpoints_foreign.add_repair(below)
    for command in (verify, latest):
        command.add_argument(
            "--shallow", action="store_true", help="compare names and sizes, and that every tensor is there, only"
        )
    for command in (latest, repair):
        command.add_argument("--no-cache", action="store_true", help="read also what was right and is unchanged since")
    for command in (verify, latest, repair):
        command.add_argument("--threads", type=whole, metavar="N", help="readers (default: by the cores)")
        command.add_argument(
            "--max-rate",
            type=size,
            metavar="BYTES/S",
            help="read no faster than this; k, M, G and T are units",
        )
        command.add_argument(
            "--from-disk", action="store_true", help="read past the page cache: what the disk has, not the memory"
        )
    for command in (listing, verify, latest, repair):
        checkpoints_foreign.add_options(command)
        command.add_argument("--json", action="store_true", help="one JSON document")
    _add_keeping(below)
    checkpoints_export.add(below)
    checkpoints_tiers.add(below)


def _add_keeping(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_prune(below)
    for name, value, words in (("pin", True, "never prune a step directory"), ("unpin", False, "take back a pin")):
        pin = below.add_parser(name, help=words)
        pin.add_argument("where", metavar="STEPDIR", help="a step directory")
        pin.set_defaults(execute=pin_step, pinned=value)
    test = below.add_parser(
        "test-storage",
        help="write, sync, rename and read back bytes that nobody needs",
        description="Save synthetic bytes as a checkpoint is saved, read them back from the disk, and compare.",
    )
    test.add_argument("where", metavar="DIR|RUN", help="any directory, or a run")
    test.add_argument("--bytes", type=size, default=space.TEST_BYTES, metavar="N", help="k, M, G and T are units")
    test.add_argument(
        "--within", type=above_zero, default=space.TEST_WITHIN_S, metavar="S", help="time limit in seconds"
    )
    test.add_argument("--json", action="store_true", help="one JSON document")
    test.set_defaults(execute=try_storage)


def _reading(arguments: argparse.Namespace) -> Reading:
    return Reading(threads=arguments.threads, bytes_per_s=arguments.max_rate, from_disk=arguments.from_disk)


def list_steps(arguments: argparse.Namespace) -> None:
    """Print a table of step directories."""
    if (finding := checkpoints_foreign.found(arguments)) is not None:
        checkpoints_foreign.list_steps(arguments, finding)
        return
    checkpoints = find.checkpoints(arguments.where, os.environ)
    found, lineage = steps.list_steps(checkpoints), lineages.read(checkpoints)
    rows = _rows(checkpoints, found, lineage)
    left_out = lineage.left_out if lineage is not None else ()
    if arguments.json:
        printing.say_json({"checkpoints": str(checkpoints), "steps": rows, "left_out": left_out})
    elif rows:
        _show(rows)
        for each in left_out:
            printing.say(f"left out: {left_out_in_words(each.step, each.steps)}")
    else:
        printing.say(f"{checkpoints}: no step directories yet")


def _rows(
    checkpoints: Path, found: list[steps.StepDirectory], lineage: lineages.Lineage | None
) -> list[dict[str, Any]]:
    current = {step.path for step in steps.current_lineage(found, lineage)}
    rows = []
    cache = Cache(checkpoints)
    said = history.read_history(journal.read(RunDirectory(checkpoints.parent).journal))
    for step in found:
        manifest = step.manifest
        there, seen = reading.look(step, cache)
        known, verified = judged(step.path.name, said, there)
        problems = list(seen) or ([known] if known else [])
        marks = lineage.marks.get(manifest.save_id, frozenset()) if lineage and manifest else frozenset()
        rows.append(
            {
                "directory": step.path.name,
                "step": step.step,
                "tokens": manifest.tokens if manifest else None,
                "bytes": sum(entry.bytes for entry in manifest.files.values()) if manifest else None,
                "created_at": manifest.created_at if manifest else None,
                "world_size": manifest.world_size if manifest else None,
                "loss": manifest.loss if manifest else None,
                "save_id": manifest.save_id if manifest else None,
                "parent": manifest.parent if manifest else None,
                "complete": not problems,
                "state": condition(known, verified=verified),
                "current": step.path in current,
                "marks": sorted(marks),
                "left_out": _never_seen(step),
                "problems": problems,
            }
        )
    return rows


def _never_seen(step: steps.StepDirectory) -> list[Any]:
    """Return what its manifest says of data that was left out on the way to a step, for programs."""
    windows = step.manifest.state.get(LEFT_OUT) if step.manifest is not None else None
    return windows if isinstance(windows, list) else []


def _show(rows: list[dict[str, Any]]) -> None:
    table = [("DIRECTORY", "STEP", "TOKENS", "SIZE", "CREATED", "WORLD", "LOSS", "STATE")]
    for row in rows:
        loss = f"{row['loss']:.6g}" if row["loss"] is not None else "-"
        table.append(
            (
                row["directory"],
                str(row["step"]),
                printing.or_dash(row["tokens"]),
                printing.size(row["bytes"]) if row["bytes"] is not None else "-",
                printing.or_dash(row["created_at"])[:40],
                printing.or_dash(row["world_size"]),
                loss,
                _state(row),
            )
        )
    printing.say_table(table, right=frozenset({1, 2, 3, 5, 6}))


def _state(row: dict[str, Any]) -> str:
    """Say in words what a row's fields mean; paths are shortened to what is below `checkpoints/`."""
    words = [row["state"]]
    if row["problems"]:
        first, *others = row["problems"]
        more = f" (and {len(others)} more)" if others else ""
        words = [f"{row['state']}: {_shorten(first, row['directory'])}{more}"]
    if not row["current"]:
        words.append("not on the current lineage")
    return "; ".join([*words, *row["marks"]])


def _shorten(problem: str, directory: str) -> str:
    _, found, rest = problem.partition(f"/{directory}/")
    return rest if found else problem


def verify_step(arguments: argparse.Namespace) -> int:
    """Compare a step directory with its manifest."""
    if (finding := checkpoints_foreign.found(arguments)) is not None:
        return checkpoints_foreign.verify_step(arguments, finding)
    directory = find.step_directory(arguments.where)
    if any(os.path.lexists(directory / name) for name in _OF_RUNS):
        raise UsageError(
            f"{arguments.where}: no step directory, but a run's: name one of those that `stepkeeper checkpoints ls "
            f"{arguments.where}` lists, or `stepkeeper checkpoints latest {arguments.where}` reads the newest"
        )
    cache = Cache(directory.parent, knows=arguments.cached)
    verdict = verifying.verify(directory, deep=not arguments.shallow, reading=_reading(arguments), cache=cache)
    problems = list(verdict.problems)
    opened = steps.open_step(directory)
    if not problems and opened.problem:
        problems.append(opened.problem)
    if arguments.json:
        document = {
            "directory": str(directory),
            "ok": not problems,
            "state": condition(problems[0] if problems else "", verified=not arguments.shallow),
            "deep": not arguments.shallow,
            "bytes_read": verdict.bytes_read,
            "bytes_known": verdict.bytes_known,
            "problems": problems,
            "left_out": _never_seen(opened),
        }
        printing.say_json(document)
    elif problems:
        printing.say(f"{directory}: {steps.DAMAGED}")
        for problem in problems:
            printing.say(problem)
    elif arguments.shallow:
        printing.say(f"{directory}: {steps.COMMITTED}: names, sizes and coverage are right (--shallow reads no data)")
    else:
        known = ""
        if verdict.bytes_known:
            unchanged = printing.size(verdict.bytes_known)
            known = f", {unchanged} unchanged since they were read before: leave out --cached to read them"
        read = f"{printing.size(verdict.bytes_read)} read{known}"
        printing.say(f"{directory}: {steps.VERIFIED}: every byte is right ({read})")
    return ExitCode.NOT_VERIFIED if problems else ExitCode.FINISHED


def print_latest(arguments: argparse.Namespace) -> int:
    """Print the newest verified step directory of the current lineage."""
    if (finding := checkpoints_foreign.found(arguments)) is not None:
        return checkpoints_foreign.print_latest(arguments, finding)
    checkpoints = find.checkpoints(arguments.where, os.environ)
    choice = steps.newest_verified(
        checkpoints, deep=not arguments.shallow, reading=_reading(arguments), cached=not arguments.no_cache
    )
    if arguments.json:
        document = {
            "directory": str(choice.chosen.path) if choice.chosen else None,
            "step": choice.chosen.step if choice.chosen else None,
            "deep": not arguments.shallow,
            "suspicion": space.suspicion(choice),
            "skipped": [{"directory": str(step.path), "problems": list(problems)} for step, problems in choice.skipped],
        }
        printing.say_json(document)
    elif choice.chosen is not None:
        printing.say_path(str(choice.chosen.path))
    for step, problems in choice.skipped:
        printing.warn(f"passed over {step.path.name}: {'; '.join(problems)}")
    lineage = lineages.read(checkpoints)
    if lineage is not None and lineage.damaged:
        printing.warn(f"{checkpoints / lineages.LINEAGE_NAME}: {lineage.damaged} damaged lines were passed over")
    if suspicion := space.suspicion(choice):
        printing.warn(suspicion)
    if choice.chosen is None:
        printing.warn(f"{checkpoints}: no verified step directory")
        return checkpoints_foreign.NONE_FOUND
    return ExitCode.FINISHED


def pin_step(arguments: argparse.Namespace) -> None:
    """Record in the lineage that a step directory is kept whatever the policy says, or no longer."""
    directory = find.step_directory(arguments.where)
    step = steps.open_step(directory)
    if step.manifest is None:
        raise StepkeeperError(step.problem or f"{directory}: no step directory", ExitCode.NOT_VERIFIED)
    mark = lineages.Mark(at=time.time(), save_id=step.manifest.save_id, mark=lineages.PINNED, value=arguments.pinned)
    lineages.append(directory.parent, mark)
    printing.say(f"{directory}: {'pinned' if arguments.pinned else 'no longer pinned'}")


def try_storage(arguments: argparse.Namespace) -> int:
    """Make a dummy save in a directory, and say what came of it."""
    directory = Path(arguments.where)
    if not directory.is_dir():
        directory = find.checkpoints(arguments.where, os.environ)
    directory = find.resolved(directory)
    found = space.storage_test(directory, size=int(arguments.bytes), limit_s=arguments.within)
    if arguments.json:
        document = {"directory": str(directory), "ok": found.problem is None, **dataclasses.asdict(found)}
        printing.say_json(document)
    elif found.problem is not None:
        printing.say(found.problem)
    else:
        where = "from the disk" if found.from_disk else "perhaps from memory: this file system has no other way"
        printing.say(
            f"{directory}: {printing.size(found.bytes)} durable in {printing.duration(found.write_s or 0)}, "
            f"read back in {printing.duration(found.read_s or 0)} ({where}), and equal"
        )
    return ExitCode.FINISHED if found.problem is None else ExitCode.STORAGE


# `prune`: the rules, and what they remove.

EXAMPLE = '--retention "newest 3, every 1000 steps"'


def add_prune(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    prune = below.add_parser(
        "prune",
        help="remove step directories that no retention rule keeps",
        description="Remove step directories that no retention rule keeps.  Only verified ones count, and only they "
        "are removed; nothing is removed while the newest one is not verified.  If no rule is given, those of the "
        "run's newest launch apply.",
    )
    prune.add_argument("where", metavar="DIR|RUN", help="checkpoints/ directory, run directory or job id")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and why the rest is kept")
    prune.add_argument(
        "--retention",
        metavar="POLICY",
        help="rules, in the words of the setting `retention`: `newest 3, every 1000 steps, best loss 2` "
        "(docs/retention.md)",
    )
    prune.add_argument("--json", action="store_true", help="one JSON document")
    prune.set_defaults(execute=prune_steps)


def prune_steps(arguments: argparse.Namespace) -> None:
    """Apply a retention policy to the step directories of a run."""
    checkpoints = find.checkpoints(arguments.where, os.environ)
    policy, origin = _policy(arguments, checkpoints)
    outcome = retention.prune(checkpoints, policy, dry_run=arguments.dry_run)
    freed = 0 if arguments.dry_run else retention.empty_trash(checkpoints)
    plan = outcome.plan
    gone = plan.removed if arguments.dry_run else outcome.removed
    if arguments.json:
        document = {
            "checkpoints": str(checkpoints),
            "rules": rules_in_words(policy),
            "rules_of": origin,
            "dry_run": arguments.dry_run,
            "kept": {name: list(why) for name, why in sorted(plan.kept.items())},
            "removed": list(gone),
            "spared": dict(outcome.spared),
            "blocked": plan.blocked,
            "directories_freed": freed,
        }
        printing.say_json(document)
        return
    fate = "would be removed" if arguments.dry_run else "removed"
    printing.say(f"{rules_in_words(policy)} ({origin})")
    rows = [(name, "kept", "; ".join(why)) for name, why in plan.kept.items()]
    rows += [(name, "kept", why) for name, why in outcome.spared]
    rows += [(name, fate, "no rule keeps it") for name in gone]
    if rows:
        printing.say_table(sorted(rows, reverse=True))
    else:
        printing.say(f"{checkpoints}: no step directories yet")
    if plan.blocked:
        printing.warn(f"nothing was removed: {plan.blocked}")


def _policy(arguments: argparse.Namespace, checkpoints: Path) -> tuple[retention.Policy, str]:
    """Return the rules that count, and whose they are: those that are named here, else those of the run's script."""
    run = checkpoints.parent
    if arguments.retention is not None:
        return _named(arguments.retention, run), "named here"
    known = _recorded(run)
    if known is not None:
        return known
    if arguments.dry_run:
        return retention.Policy(), "the default"
    raise UsageError(
        f"say what to keep, such as {EXAMPLE}: no launch of this run has recorded its rules "
        f"({run / records.KEEPING_NAME}); --dry-run shows what would go"
    )


def _named(text: str, run: Path) -> retention.Policy:
    """Return the rules of the option."""
    status = run_status.known(RunDirectory(run).status)
    try:
        policy = retention.parse_policy(text, total_steps=status.total_steps if status is not None else None)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if policy is None:
        raise UsageError(f"--retention {text}: it keeps every step, so nothing is to be removed")
    return policy


def _recorded(run: Path) -> tuple[retention.Policy, str] | None:
    """Return the rules of the run's newest launch."""
    path = run / records.KEEPING_NAME
    try:
        kept = records.read_keeping(run)
        if kept is None:
            return None
        if kept.retention is None:
            raise UsageError(f"the run's script keeps all steps (launch {kept.launch}): name rules, such as {EXAMPLE}")
        return retention.Policy(**kept.retention), f"of the run's script, launch {kept.launch}"  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: the rules of the run's script cannot be read: {error}; name rules, such as {EXAMPLE}"
        ) from error


def rules_in_words(policy: retention.Policy) -> str:
    """Say rules as a script would.

    >>> rules_in_words(retention.Policy(every_steps=1000, best=2))
    'newest 3, every 1000 steps, epoch ends, best loss 2'
    """
    parts = [f"newest {policy.keep_last}"]
    parts += [f"every {policy.every_steps} steps"] if policy.every_steps is not None else []
    parts += [f"every {policy.every_percent:g} percent"] if policy.every_percent is not None else []
    parts += ["epoch ends"] if policy.epochs else []
    highest = " highest" if policy.best_is_highest else ""
    parts += [f"best {policy.best_by} {policy.best}{highest}"] if policy.best else []
    return ", ".join(parts)

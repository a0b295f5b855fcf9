"""`stepkeeper checkpoints prune`: remove step directories that no rule wants to keep."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from stepkeeper.cli import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import find
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.store import retention


def add_prune(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    prune = below.add_parser(
        "prune",
        help="remove step directories that no rule wants to keep",
        description="Remove step directories that no rule wants to keep.  Only verified ones count, and only they are "
        "removed; nothing is removed while the newest one is not verified.  Without a rule here, those count that the "
        "run's newest launch goes by.",
        allow_abbrev=False,
    )
    prune.add_argument("where", metavar="DIR|RUN", help="checkpoints/ directory, run directory or job id")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and why the rest is kept")
    prune.add_argument(
        "--keep-last",
        type=positive,
        metavar="K",
        help=f"keep the newest K (default where another rule is named: {retention.KEEP_LAST})",
    )
    prune.add_argument("--every", type=positive, metavar="M", help="keep a milestone of every M steps")
    prune.add_argument("--every-percent", type=float, metavar="P", help="keep a milestone of every P %% of the work")
    prune.add_argument("--total-steps", type=positive, metavar="N", help="of the whole work, for --every-percent")
    prune.add_argument("--best", type=positive, default=0, metavar="N", help="keep the N best")
    prune.add_argument("--best-by", default="loss", metavar="NAME", help="what the best are chosen by (default: loss)")
    prune.add_argument("--best-is-highest", action="store_true", help="a higher value is better")
    prune.add_argument("--json", action="store_true", help="one JSON document")
    prune.set_defaults(execute=prune_steps)


def positive(text: str) -> int:
    """Read a whole number above 0, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


@printing.reading
def prune_steps(arguments: argparse.Namespace) -> int:
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
            "rules": words(policy),
            "rules_of": origin,
            "dry_run": arguments.dry_run,
            "kept": {name: list(why) for name, why in sorted(plan.kept.items())},
            "removed": list(gone),
            "spared": dict(outcome.spared),
            "blocked": plan.blocked,
            "directories_freed": freed,
        }
        printing.say_json(document, indent=2)
        return ExitCode.FINISHED
    fate = "would be removed" if arguments.dry_run else "removed"
    printing.say(f"{words(policy)} ({origin})")
    rows = [(name, "kept", "; ".join(why)) for name, why in plan.kept.items()]
    rows += [(name, "kept", why) for name, why in outcome.spared]
    rows += [(name, fate, "no rule wants it") for name in gone]
    if rows:
        printing.say_table(sorted(rows, reverse=True))
    else:
        printing.say(f"{checkpoints}: no step directories yet")
    if plan.blocked:
        printing.warn(f"nothing was removed: {plan.blocked}")
    return ExitCode.FINISHED


def _policy(arguments: argparse.Namespace, checkpoints: Path) -> tuple[retention.Policy, str]:
    """Return the rules that count, and whose they are: those that are named here, else those of the run's script."""
    named = (arguments.keep_last, arguments.every, arguments.every_percent, arguments.best or None)
    if named == (None,) * len(named):
        known = _recorded(checkpoints.parent)
        if known is not None:
            return known
        if not arguments.dry_run:
            raise StepkeeperError(
                "say what to keep, such as --keep-last 3 --every 1000: no launch of this run has recorded its rules "
                f"({checkpoints.parent / records.KEEPING_NAME}); --dry-run shows what would go",
                ExitCode.USAGE,
            )
    try:
        policy = retention.Policy(
            keep_last=arguments.keep_last or retention.KEEP_LAST,
            every_steps=arguments.every,
            every_percent=arguments.every_percent,
            total_steps=arguments.total_steps,
            best=arguments.best,
            best_by=arguments.best_by,
            best_is_highest=arguments.best_is_highest,
        )
    except ValueError as error:
        raise StepkeeperError(str(error), ExitCode.USAGE) from error
    return policy, "named here"


def _recorded(run: Path) -> tuple[retention.Policy, str] | None:
    """Return the rules of the run's newest launch."""
    path = run / records.KEEPING_NAME
    try:
        kept = records.read_keeping(run)
        if kept is None:
            return None
        if kept.retention is None:
            raise StepkeeperError(
                f"the run's script keeps all steps (launch {kept.launch}): name rules, such as --keep-last 3",
                ExitCode.USAGE,
            )
        return retention.Policy(**kept.retention), f"of the run's script, launch {kept.launch}"  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError) as error:
        raise StepkeeperError(
            f"{path}: the rules of the run's script cannot be read: {error}; name rules, such as --keep-last 3",
            ExitCode.USAGE,
        ) from error


def words(policy: retention.Policy) -> str:
    """Say rules as a script would.

    >>> words(retention.Policy(every_steps=1000, best=2))
    'newest 3, every 1000 steps, epoch ends, best loss 2'
    """
    parts = [f"newest {policy.keep_last}"]
    parts += [f"every {policy.every_steps} steps"] if policy.every_steps is not None else []
    parts += [f"every {policy.every_percent:g} percent"] if policy.every_percent is not None else []
    parts += ["epoch ends"] if policy.epochs else []
    highest = " highest" if policy.best_is_highest else ""
    parts += [f"best {policy.best_by} {policy.best}{highest}"] if policy.best else []
    return ", ".join(parts)

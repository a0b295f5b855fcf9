"""`stepkeeper doctor`: what works on this cluster and what does not, with the exact remedy."""

from __future__ import annotations

import argparse
import os
import textwrap
from pathlib import Path

import msgspec

from stepkeeper.cli import attempt, printing
from stepkeeper.config import resolve
from stepkeeper.core.exits import ExitCode
from stepkeeper.doctor import rules, site, visible
from stepkeeper.doctor.site import Finding, Level
from stepkeeper.errors import StepkeeperError
from stepkeeper.frameworks import following
from stepkeeper.run_store import find
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.submit import own_script
from stepkeeper.submit.plan import METRICS_NAME, measure

WIDTH = 110
INDENT = " " * 9


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "doctor",
        help="what works on this cluster and what does not, with the exact remedy",
        description="Read the cluster's settings and say what they mean for a run.  Nothing is changed; with "
        "--run-dir a few bytes are written there and removed.  Inside a job it also tries whether all its nodes see "
        "that directory.  Exit code 0: no problem.",
        allow_abbrev=False,
    )
    command.add_argument("run", metavar="RUN", nargs="?", help="a run that has saved: its save time is compared")
    command.add_argument("-p", "--partition", metavar="NAME", help="look at this partition only")
    command.add_argument("--save-s", metavar="S", type=float, help="seconds from the request of a save to durable")
    command.add_argument("--run-dir", metavar="DIR", type=Path, help="try what saves need on this directory's storage")
    command.add_argument("--all", action="store_true", help="show what is in order too")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.add_argument(
        "--command",
        nargs=argparse.REMAINDER,
        metavar="CMD ARGS...",
        help="also say what a run would know of this command, which goes last: framework, notices, resume argument",
    )
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Look, and print what there is to say."""
    save_s = arguments.save_s if arguments.save_s is not None else _measured(arguments.run)
    try:
        here = site.gather(partition=arguments.partition, save_s=save_s)
    except SlurmError as error:
        inside = site.container(os.environ)
        hint = f"; this is a container ({inside}): look from the host" if inside in rules.SEALED else ""
        raise StepkeeperError(f"{error}{hint}", ExitCode.NO_SLURM) from error
    found = rules.examine(here)
    found += _script(tuple(arguments.command or ()))
    if arguments.run_dir is not None:
        found = sorted([*found, *_storage(arguments.run_dir)], key=lambda finding: -finding.level.weight)
    if arguments.json:
        printing.say_json(
            {
                "slurm": here.text("SLURM_VERSION"),
                "save_s": save_s,
                "findings": [msgspec.to_builtins(finding) for finding in found],
            },
            indent=2,
        )
    else:
        show(found, show_all=arguments.all)
    worst = max((finding.level.weight for finding in found), default=0)
    return int(ExitCode.SITE_UNFIT) if worst == Level.PROBLEM.weight else int(ExitCode.FINISHED)


def _measured(run: str | None) -> float | None:
    """Return what a run's saves take; None where there is no run, or it has not saved."""
    if run is None:
        return None
    directory = find.find(run, os.environ)
    return measure(directory.journal, directory.path / METRICS_NAME).persist_s


def _script(command: tuple[str, ...]) -> list[Finding]:
    if not command:
        return []
    config = resolve.gather({}, os.environ).resolve()
    settings = config.settings
    return rules.examine_command(
        attempt.following(command, config),
        command,
        attach=settings.attach,
        resume_argument=settings.resume_argument,
        repair_pointers=settings.repair_pointers,
        ours=following.uses_ours(own_script.training(command, Path.cwd())),
    )


def _storage(directory: Path) -> list[Finding]:
    if not directory.is_dir():
        raise StepkeeperError(f"--run-dir {directory}: no such directory; make it first", ExitCode.RUN_DIRECTORY)
    found = list(site.examine_storage(directory))
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes and not any(finding.level is Level.PROBLEM for finding in found):
        found += visible.examine(directory.resolve(), SlurmCommands().hostnames(nodes))
    return found


def show(found: list[Finding], *, show_all: bool) -> None:
    """Print findings for people."""
    shown = [finding for finding in found if show_all or finding.level is not Level.OK]
    for finding in shown:
        printing.say(f"{finding.level.value.upper():8} {finding.subject}: {finding.found}")
        for text, head in ((finding.means, ""), (finding.remedy, "-> ")):
            for line in textwrap.wrap(
                text, WIDTH, initial_indent=INDENT + head, subsequent_indent=INDENT + " " * len(head)
            ):
                printing.say(line)
    counts = {level: sum(finding.level is level for finding in found) for level in Level}
    counted = ", ".join(f"{counts[level]} {level.value}" for level in reversed(Level) if counts[level])
    printing.say(f"{counted}{'' if show_all else ' (--all shows what is in order)'}")

"""`stepkeeper doctor`, `stepkeeper selftest`: what works on this cluster and what does not, and the proof of it."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import msgspec

from stepkeeper import printing
from stepkeeper.cli import attempt
from stepkeeper.config import resolve
from stepkeeper.core.exits import ExitCode
from stepkeeper.doctor import rules, site, visible
from stepkeeper.doctor.site import Finding, Level
from stepkeeper.errors import StepkeeperError, UsageError
from stepkeeper.frameworks import following
from stepkeeper.run_store import find
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.submit import own_script
from stepkeeper.submit.plan import measure
from stepkeeper.submit.selftest import Play, Proof, Shape

# `stepkeeper doctor`: what the cluster's settings mean, with the exact remedy.

WIDTH = 110
INDENT = " " * 9


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare both commands."""
    command = subcommands.add_parser(
        "doctor",
        help="show what works on this cluster and what does not, with the exact remedy",
        description="Read the cluster's settings and say what they mean for a run.  Nothing is changed; with "
        "--run-dir a few bytes are written there and removed.  Inside a job it also tries whether all its nodes see "
        "that directory.  Exit code 0: no problem.",
    )
    command.add_argument("run", metavar="RUN", nargs="?", help="an earlier run: its save times are compared")
    command.add_argument("-p", "--partition", metavar="NAME", help="check this partition only")
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
    _add_selftest(subcommands)


def execute(arguments: argparse.Namespace) -> int:
    """Look, and print what there is to say."""
    save_s = arguments.save_s
    if save_s is None and arguments.run is not None:
        save_s = measure(find.find(arguments.run, os.environ)).persist_s
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
            }
        )
    else:
        show(found, show_all=arguments.all)
    worst = max((finding.level.weight for finding in found), default=0)
    return int(ExitCode.SITE_UNFIT) if worst == Level.PROBLEM.weight else int(ExitCode.FINISHED)


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
    counted = ", ".join(
        f"{count} {level.value}{'s' if count > 1 and level is not Level.OK else ''}"
        for level in reversed(Level)
        if (count := counts[level])
    )
    printing.say(f"{counted}{'' if show_all else ' (--all shows what is in order)'}")


# `stepkeeper selftest -p PARTITION -N 2`: prove that a killed and requeued training loses nothing.

WITHIN_S = 900.0


def _add_selftest(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "selftest",
        help="test on this cluster that a killed and requeued training loses nothing",
        description="Submit two short jobs of the same small training.  One is left alone.  The command kills all "
        "ranks of the other.  That job then gets the notice of its time limit, saves and requeues itself.  Their "
        "losses must be equal.  About three minutes, plus the queue.  Exit code 0: passed.",
    )
    command.add_argument("-p", "--partition", metavar="NAME", help="default: the cluster's")
    command.add_argument("-A", "--account", metavar="NAME", help="account that pays")
    command.add_argument("-N", "--nodes", metavar="N", type=int, default=2, help="of each job (default: 2)")
    command.add_argument("--gpus-per-node", metavar="N", help="as for sbatch; if not given, CPUs train")
    command.add_argument("--python", default=sys.executable, help="with torch and stepkeeper (default: this one)")
    command.add_argument("--sbatch", metavar="OPTION", action="append", default=[], help="any other option; repeat it")
    command.add_argument("--setup", metavar="LINE", action="append", default=[], help="shell line before the training")
    command.add_argument(
        "--dir", metavar="DIR", type=Path, default=Path(), help="shared storage to try (default: here); cleaned up"
    )
    command.add_argument("--keep", action="store_true", help="keep the run directories")
    command.add_argument("--within", metavar="S", type=float, default=WITHIN_S, help="give up after so many seconds")
    command.add_argument("--json", action="store_true", help="one JSON document at the end")
    command.set_defaults(execute=selftest)


def selftest(arguments: argparse.Namespace) -> int:
    """Play, and say what it proves."""
    if arguments.nodes < 1:
        raise UsageError("--nodes is at least 1")
    if not arguments.dir.is_dir():
        raise UsageError(f"--dir {arguments.dir}: no such directory; name one on storage that all nodes see")
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="stepkeeper-selftest-", dir=arguments.dir.resolve()))
    shape = Shape(
        partition=arguments.partition,
        account=arguments.account,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        sbatch=tuple(arguments.sbatch),
        setup=tuple(arguments.setup),
        python=arguments.python,
    )

    def say(text: str) -> None:
        if not arguments.json:
            printing.say(f"{time.monotonic() - began:6.1f} s  {text}")

    play = Play(shape, directory, client=SlurmCommands(), within_s=arguments.within, say=say)
    try:
        found = play.play()
    except SlurmError as error:
        see = f"; see {directory}" if play.jobs else ""
        raise StepkeeperError(f"{error}{see}", ExitCode.SITE_UNFIT) from error
    finally:
        play.stop()
        if not play.jobs:  # it has not begun: there is nothing to look at
            shutil.rmtree(directory)
    passed = found.holds(exactly=shape.gpus_per_node is None) and len(found.interruptions) > 1
    if passed and not arguments.keep:
        shutil.rmtree(directory)
    if arguments.json:
        printing.say_json({"passed": passed, "jobs": play.jobs, **msgspec.to_builtins(found)})
    else:
        _tell(found, passed=passed, kept=None if passed and not arguments.keep else directory)
    return int(ExitCode.FINISHED if passed else ExitCode.SITE_UNFIT)


def _tell(found: Proof, *, passed: bool, kept: Path | None) -> None:
    printing.say()
    for each in found.interruptions:
        how = "requeued" if each.requeued else "killed, relaunched in the allocation"
        printing.say(
            f"after step {each.after_step}: {how}; {printing.duration(each.seconds)} to the next new step, "
            f"{each.redone} steps done again"
        )
    same = "to the last bit" if found.equal == found.steps else f"the others within {found.largest_difference:.1e}"
    printing.say(f"{found.equal} of {found.steps} losses are equal, {same}; {found.missing} steps are missing")
    printing.say("passed: on this cluster an interrupted training loses nothing" if passed else "NOT passed")
    if kept is not None:
        printing.say(f"the runs are in {kept}")

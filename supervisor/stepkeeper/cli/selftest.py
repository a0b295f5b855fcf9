"""`stepkeeper selftest -p PARTITION -N 2`: prove on this cluster that a killed and requeued training loses nothing."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from stepkeeper.cli import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.submit.selftest import Play, Proof, Shape

WITHIN_S = 900.0


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "selftest",
        help="prove on this cluster that a killed and requeued training loses nothing",
        description="Submit two short jobs of the same small training.  One is left alone; of the other all ranks are "
        "killed, and then gets the notice of its time limit, so that it saves and requeues itself.  Their losses "
        "must be equal.  About three minutes, plus the queue.  Exit code 0: passed.",
        allow_abbrev=False,
    )
    command.add_argument("-p", "--partition", metavar="NAME", help="default: the cluster's")
    command.add_argument("-A", "--account", metavar="NAME", help="who pays")
    command.add_argument("-N", "--nodes", metavar="N", type=int, default=2, help="of each job (default: 2)")
    command.add_argument("--gpus-per-node", metavar="N", help="as sbatch reads them; without, it trains on CPUs")
    command.add_argument("--python", default=sys.executable, help="with torch and stepkeeper (default: this one)")
    command.add_argument("--sbatch", metavar="OPTION", action="append", default=[], help="any other option; repeat it")
    command.add_argument("--setup", metavar="LINE", action="append", default=[], help="shell before the training")
    command.add_argument(
        "--dir", metavar="DIR", type=Path, default=Path(), help="shared storage to try (default: here); cleaned up"
    )
    command.add_argument("--keep", action="store_true", help="keep the run directories")
    command.add_argument("--within", metavar="S", type=float, default=WITHIN_S, help="give up after so many seconds")
    command.add_argument("--json", action="store_true", help="one JSON document at the end")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Play, and say what it proves."""
    if arguments.nodes < 1:
        raise StepkeeperError("--nodes is at least 1", ExitCode.USAGE)
    if not arguments.dir.is_dir():
        raise StepkeeperError(
            f"--dir {arguments.dir}: no such directory; name one on storage that all nodes see", ExitCode.USAGE
        )
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
        printing.say_json({"passed": passed, "jobs": play.jobs, **msgspec.to_builtins(found)}, indent=2)
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

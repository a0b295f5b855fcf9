"""`stepkeeper dev simulate`: scenarios from files, or months of a large run, decided by the real rules."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepkeeper.cli import printing
from stepkeeper.cli.dev_replay import changed, policy_changes
from stepkeeper.cli.plan import duration
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.core.scale_up import GROW_BACK
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_analytics.model import Use
from stepkeeper.simulate.world import PRESETS, World
from stepkeeper.submit.plan import short
from stepkeeper_trainer.formats.plain import read_plain

if TYPE_CHECKING:  # a supervisor, which knows all commands, stays small
    from stepkeeper.simulate.simulator import Summary

RUNS = 5
CHOICES_MAX = 200
COUNT_MAX = 1_000_000
TIMES = {
    "blocked-s": "that a save takes from training",
    "save-s": "from the request of a save to durable",
    "load-s": "from the start of the processes to the first step",
    "verify-s": "choosing and reading back a checkpoint",
    "repair-s": "mean, until a node that was given back, or another one like it, is idle",
    "queue-s": "mean wait in the queue after a requeue",
    "grace-s": "of a preemption",
    "person-s": "until somebody submits again what has stopped",
}


def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = actions.add_parser(
        "simulate",
        help="play a scenario, or months of a large run",
        description="With FILE: play scenarios through the rules and print what they decide after each event "
        "(docs/simulate.md has the format).  Without: simulate months of a run whose nodes fail at a published rate, "
        "and print which share of the time becomes progress (ETTR), and where the rest goes, for each choice of "
        "interval and spares.  The world is simulated; what is done is decided by the real rules.",
        allow_abbrev=False,
    )
    defaults = World()
    command.add_argument("files", nargs="*", metavar="FILE", type=Path, help="scenarios to play instead")
    command.add_argument("--nodes", type=int, default=defaults.nodes, metavar="N", help="of a launch (%(default)s)")
    command.add_argument("--days", type=float, default=defaults.days, metavar="D", help="to simulate (%(default)g)")
    command.add_argument(
        "--failures",
        default="llama3",
        metavar="RATE",
        help=f"in 1,000 node-days, or {', '.join(f'{name} ({rate:.1f})' for name, rate in PRESETS.items())}; "
        "default: llama3",
    )
    command.add_argument("--save-every", default="30min", metavar="T[,T...]", help="intervals to try (%(default)s)")
    command.add_argument("--spares", default="0,16", metavar="N[,N...]", help="spare nodes to try (%(default)s)")
    command.add_argument(
        "--min-nodes",
        type=int,
        default=0,
        metavar="N",
        help="a launch may shrink to where no spare is left (default: never); --nodes is the most it has",
    )
    command.add_argument(
        "--grow-back", choices=GROW_BACK, default=Policy().grow_back, help="of smaller launches (%(default)s)"
    )
    for name, what in TIMES.items():
        field = "persist_s" if name == "save-s" else name.replace("-", "_")
        default = getattr(defaults, field)
        command.add_argument(
            f"--{name}", dest=field, type=duration, default=default, metavar="T", help=f"{what} ({default:g} s)"
        )
    command.add_argument("--preemptions-per-day", type=float, default=0.0, metavar="N", help="(default: none)")
    command.add_argument("--time-limit", type=duration, default=math.inf, metavar="T", help="(default: none)")
    command.add_argument("--policy", metavar="KEY=VALUE", action="append", default=[], help="such as failures_max=5")
    command.add_argument("--runs", type=int, default=RUNS, metavar="N", help="simulated runs a choice (%(default)s)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed, the same runs (%(default)s)")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Play, or simulate."""
    from stepkeeper.simulate.simulator import simulate  # noqa: PLC0415 - only where it is asked for

    if arguments.files:
        for index, path in enumerate(arguments.files):
            _play(path, titled=len(arguments.files) > 1, first=index == 0)
        return ExitCode.FINISHED
    policy = changed(Policy(grow_back=arguments.grow_back), policy_changes(arguments.policy))
    if not 1 <= arguments.runs <= COUNT_MAX:
        raise StepkeeperError("--runs is at least 1", ExitCode.USAGE)
    began = time.monotonic()
    found = [simulate(world, policy, runs=arguments.runs, seed=arguments.seed) for world in _worlds(arguments)]
    if arguments.json:
        printing.say_json([msgspec.to_builtins(each) for each in found], indent=2)
        return ExitCode.FINISHED
    _show(found, arguments, time.monotonic() - began)
    return ExitCode.FINISHED


def _play(path: Path, *, titled: bool, first: bool) -> None:
    from stepkeeper.simulate import scenario  # noqa: PLC0415 - only where it is asked for

    text = read_plain(path).decode(errors="replace")
    if titled:
        printing.say(f"{'' if first else chr(10)}== {path}")
    try:
        played = scenario.play(text)
    except scenario.ScenarioError as error:
        raise StepkeeperError(f"{path}: {error}", ExitCode.USAGE) from error
    for line in played.splitlines():
        printing.say(line)


def _worlds(arguments: argparse.Namespace) -> list[World]:
    try:
        rate = PRESETS[arguments.failures] if arguments.failures in PRESETS else float(arguments.failures)
    except ValueError:
        names = ", ".join(PRESETS)
        raise StepkeeperError(f"--failures {arguments.failures}: a number or one of {names}", ExitCode.USAGE) from None
    try:
        intervals = [duration(word) for word in arguments.save_every.split(",")]
        spares = [int(word) for word in arguments.spares.split(",")]
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise StepkeeperError(f"--save-every, --spares: {error}", ExitCode.USAGE) from error
    if len(intervals) * len(spares) > CHOICES_MAX or max(spares) > COUNT_MAX:
        raise StepkeeperError(f"--save-every, --spares: at most {CHOICES_MAX} choices at a time", ExitCode.USAGE)
    fields = ("blocked_s", "persist_s", "load_s", "verify_s", "repair_s", "queue_s", "grace_s", "person_s")
    worlds = [
        World(
            nodes=arguments.nodes,
            days=arguments.days,
            failures=rate,
            spares=count,
            nodes_min=arguments.min_nodes,
            interval_s=interval,
            preemptions_per_day=arguments.preemptions_per_day,
            time_limit_s=arguments.time_limit,
            **{name: getattr(arguments, name) for name in fields},
        )
        for interval, count in itertools.product(intervals, spares)
    ]
    for world in worlds:
        if problem := world.problem():
            raise StepkeeperError(problem, ExitCode.USAGE)
    return worlds


def _show(found: list[Summary], arguments: argparse.Namespace, seconds: float) -> None:
    head = ("SAVE EVERY", "SPARES", "ETTR", "FROM", "TO", "STEPS", "PLAN", "LOST", "SAVING", "STARTING", "AWAY",
            "QUEUE", "FAILURES", "RESTART", "REQUEUES", "PERSON", "OF NODES")  # fmt: skip
    rows = [
        (
            short(each.interval_s),
            str(each.spares),
            f"{each.ettr:.1%}",
            f"{each.ettr_low:.1%}",
            f"{each.ettr_high:.1%}",
            f"{each.speed:.1%}",
            "-" if each.formula is None else f"{each.formula:.1%}",
            f"{each.shares[Use.LOST]:.1%}",
            f"{each.shares[Use.SAVING]:.1%}",
            f"{each.shares[Use.STARTING]:.1%}",
            f"{each.shares[Use.HUNG] + each.shares[Use.STOPPING]:.1%}",
            f"{each.shares[Use.QUEUE]:.1%}",
            f"{each.failures:.0f}",
            printing.duration(each.restart_s),
            f"{each.requeues:.0f}",
            f"{each.persons:.1f}",
            f"{each.node_share:.1%}",
        )
        for each in found
    ]
    printing.say_table([head, *rows], right=frozenset(range(len(head))))
    printing.say()
    printing.say(
        f"{arguments.runs} runs each of {arguments.nodes:,} nodes over {arguments.days:g} days, in {seconds:.1f} s. "
        "ETTR: share of the time that became progress, mean and range; STEPS: of those that all nodes would do in all "
        "the time, less than the ETTR where launches were smaller; PLAN: by the formula of `stepkeeper plan`, with "
        "the restart time found here; AWAY: hung, stopping, requeueing; OF NODES: of the node-hours, spares included."
    )
    for reason in dict.fromkeys(reason for each in found for reason in each.stopped_for):
        printing.say(f"a person was needed: {reason}")

"""`stepkeeper plan`: how often to save, and the share of the time that becomes progress."""

from __future__ import annotations

import argparse
import os

import msgspec

from stepkeeper import printing
from stepkeeper.cli.arguments import above_zero, duration, share
from stepkeeper.errors import UsageError
from stepkeeper.run_store import find
from stepkeeper.submit import plan as submit_plan
from stepkeeper.submit.plan import FIXED_S, Measured, Plan, measure, plan
from stepkeeper_trainer.coordinate.cadence import Costs, FailureRate

OVERHEAD_MAX = 0.05
RESTART_S = 300.0  # where nobody says it
NODES_MAX = 10_000_000


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "plan",
        help="compute how often to save, and the share of the time that becomes progress",
        description="How often to save, and the expected share of wall time that becomes durable progress "
        "(ETTR).  Times are seconds, or written as 90s, 5min, 3h, 2d.  Nothing is changed.",
        epilog="docs/cadence.md explains the model, and where the assumed failure rate comes from.",
    )
    command.add_argument("run", metavar="RUN", nargs="?", help="take what this run has measured (directory or job id)")
    command.add_argument("--nodes", metavar="N[,N...]", type=_nodes, help="sizes of the job; default: the run's, or 1")
    rates = command.add_mutually_exclusive_group()
    rates.add_argument(
        "--mtbf-node-hours",
        metavar="H",
        type=above_zero,
        help="mean hours between infrastructure failures of one node; default 4800, or the run's own experience",
    )
    rates.add_argument("--mtbf", metavar="TIME", type=duration, help="the same, of the whole job")
    command.add_argument("--save-s", metavar="TIME", type=duration, help="from the request of a save to durable")
    command.add_argument(
        "--blocked-s", metavar="TIME", type=duration, help="what a save takes from training; default: as --save-s"
    )
    command.add_argument(
        "--restart-s",
        metavar="TIME",
        type=duration,
        help=f"from a failure to the first new step; default {RESTART_S:g}",
    )
    command.add_argument(
        "--overhead-max",
        metavar="SHARE",
        type=share,
        default=OVERHEAD_MAX,
        help=f"of training time that saves may block; default {OVERHEAD_MAX:g}",
    )
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


def _nodes(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= NODES_MAX for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of nodes: write 64, or 8,64,512")
    return sorted({int(word) for word in words})


def execute(arguments: argparse.Namespace) -> None:
    """Print the plan."""
    measured = None
    if arguments.run is not None:
        measured = measure(find.find(arguments.run, os.environ))
    plans, assumed = _plan(arguments, measured or Measured())
    if arguments.json:
        documents = [{**msgspec.structs.asdict(each), "use": each.use} for each in plans]
        printing.say_json({"from": assumed, "measured": measured, "plans": documents})
    else:
        _show(plans, assumed)


def _plan(arguments: argparse.Namespace, measured: Measured) -> tuple[list[Plan], dict[str, str]]:
    """Return the plans, and where each figure comes from."""
    assumed = {}

    def choose(name: str, given: float | None, known: float | None, default: tuple[float, str] | None) -> float:
        if given is not None:
            assumed[name] = "given"
            return given
        if known is not None:
            assumed[name] = "measured by the run"
            return known
        if default is None:
            raise UsageError(
                f"--{name} is missing: say how long a save takes to be durable, "
                "or name a RUN that has committed a checkpoint"
            )
        assumed[name] = default[1]
        return default[0]

    save_s = choose("save-s", arguments.save_s, measured.persist_s, None)
    blocked_s = choose("blocked-s", arguments.blocked_s, measured.blocked_s, (save_s, "as save-s: a save that blocks"))
    restart_s = choose("restart-s", arguments.restart_s, measured.restart_s, (RESTART_S, "assumed"))
    sizes: list[int] = arguments.nodes or [measured.nodes or 1]
    if arguments.mtbf is not None and len(sizes) > 1:
        raise UsageError("--mtbf is of one size of the job: give --mtbf-node-hours for several")
    plans = []
    for nodes in sizes:
        mtbf_s = _mtbf_s(arguments, nodes, measured.rate, assumed)
        costs = Costs(blocked_s=blocked_s, persist_s=max(save_s, blocked_s), restart_s=restart_s, mtbf_s=mtbf_s)
        if problem := costs.problem():
            raise UsageError(problem)
        plans.append(plan(nodes, costs, overhead_max=arguments.overhead_max))
    return plans, assumed


def _mtbf_s(arguments: argparse.Namespace, nodes: int, rate: FailureRate, assumed: dict[str, str]) -> float:
    if arguments.mtbf is not None:
        assumed["mtbf"] = "given"
        return float(arguments.mtbf)
    if arguments.mtbf_node_hours is not None:
        assumed["mtbf"] = "given"
        return float(arguments.mtbf_node_hours) * 3600.0 / nodes
    seen = rate.node_hours or rate.failures
    assumed["mtbf"] = (
        f"the literature's rate, and {rate.failures:.3g} failures in {rate.node_hours:.3g} node-hours of the run"
        if seen
        else "the literature's rate: 5 failures in 1,000 node-days"
    )
    return rate.mtbf_s(nodes)


def _show(plans: list[Plan], assumed: dict[str, str]) -> None:
    costs = plans[0].costs
    values = {
        "save-s": printing.duration(costs.persist_s),
        "blocked-s": printing.duration(costs.blocked_s),
        "restart-s": printing.duration(costs.restart_s),
        "mtbf": f"{costs.mtbf_s * plans[0].nodes / 3600:.0f} node-hours",
    }
    printing.say_table([(name, values[name], assumed[name]) for name in values])
    printing.say()
    fixed = [f"AT {submit_plan.short(seconds)}" for seconds in FIXED_S]
    rows = [
        (
            str(each.nodes),
            submit_plan.short(each.costs.mtbf_s),
            submit_plan.short(each.use.interval_s),
            f"{each.blocked_share:.2%}",
            f"{each.use.share:.2%}",
            *(f"{point.share:.2%}" for point in each.fixed),
        )
        for each in plans
    ]
    head = ("NODES", "MTBF", "SAVE EVERY", "BLOCKED", "PRODUCTIVE", *fixed)
    printing.say_table([head, *rows], right=frozenset(range(len(head))))
    for each in plans:
        if each.bound is not None:
            printing.say(
                f"{each.nodes} nodes: the allowed overhead makes the interval longer than the best one, "
                f"{printing.duration(each.best.interval_s)} ({each.best.share:.2%})"
            )

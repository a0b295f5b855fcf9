"""`stepkeeper dev`: decide a real run again, simulate, and write a fault that is none, for tests at a site."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stepkeeper import printing
from stepkeeper.cli.arguments import duration
from stepkeeper.config import resolve as config_record
from stepkeeper.config.settings import GROUP
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.errors import NotFoundError, UsageError
from stepkeeper.node_agent import config as node_config
from stepkeeper.node_agent import ledger, nvml
from stepkeeper.node_agent.config import NodeConfig
from stepkeeper.node_agent.xid.parse import canonical, parse
from stepkeeper.printing import instant
from stepkeeper.run_analytics.model import Use
from stepkeeper.run_store import find, journal
from stepkeeper.simulate.world import PRESETS, World
from stepkeeper.submit.plan import short
from stepkeeper_trainer.formats.plain import read_plain

if TYPE_CHECKING:  # a supervisor, which knows all commands, stays small
    from stepkeeper.simulate.replay import Difference, Replayed
    from stepkeeper.simulate.simulator import Summary


# `dev replay RUN|journal.jsonl`: what today's rules would decide differently in a run that was.

Given = TypeVar("Given", Policy, World)
DIFFERENT = 1  # exit code: something would be decided otherwise
ATTEMPTS_MAX = 10_000
SHOWN_CHARACTERS = 300


def _add_replay(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = actions.add_parser(
        "replay",
        help="decide a real run again",
        description="Feed the events of a journal to the rules of this version.  Show the first decision that "
        "differs from what was decided then.  Each attempt goes by its own recorded policy.  Ends with 1 where "
        "something differs.",
    )
    command.add_argument("run", metavar="RUN", help="run directory, job id, or a journal file")
    command.add_argument("--all", action="store_true", help="every difference, not only the first")
    command.add_argument("--words", action="store_true", help="a reason that is worded otherwise is a difference too")
    command.add_argument(
        "--policy",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="under another policy, such as failures_max=5",
    )
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=replay_run)


def replay_run(arguments: argparse.Namespace) -> int:
    """Decide again, and say what differs."""
    from stepkeeper.simulate.replay import replay  # noqa: PLC0415 - only where it is asked for

    path = Path(arguments.run)
    file = path if path.is_file() else find.find(arguments.run, os.environ).journal
    if not file.exists():
        raise NotFoundError(f"{file}: not there: no supervisor has worked on this run yet")
    recorded = recorded_policies(file.parent)
    attempts = range(max(recorded, default=-1) + 1)
    if arguments.policy and not recorded:
        attempts = range(ATTEMPTS_MAX)
    policies = {number: changed(recorded.get(number, Policy()), arguments.policy, "--policy") for number in attempts}
    stop_after = ATTEMPTS_MAX if arguments.all else 1
    found = replay(journal.read_lines(file), policies, words=arguments.words, stop_after=stop_after)
    if not found.records:
        raise NotFoundError(f"{file}: no record of the beginning of an attempt")
    if arguments.json:
        printing.say_json(found)
    else:
        _show_replay(found, len(recorded))
    return DIFFERENT if found.differences else ExitCode.FINISHED


def recorded_policies(run_directory: Path) -> dict[int, Policy]:
    """Return by which policy each attempt went, where that is recorded and can be read."""
    found: dict[int, Policy] = {}
    for number in range(ATTEMPTS_MAX):
        if not config_record.record_path(run_directory, number).exists():
            break
        recorded = config_record.read_record(run_directory, number)
        if recorded.settings:  # else it is damaged: this attempt goes by the defaults
            found[number] = recorded.policy()
    return found


def changed(given: Given, words: list[str], option: str) -> Given:
    """Return a policy or a world with other values: KEY=VALUE, as an option has them.

    Raises:
        StepkeeperError: a word is no KEY=VALUE, there is no such key, or a value does not fit.
    """
    changes: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.removeprefix(f"{GROUP}.")
        if not equals or key not in given.__struct_fields__:
            raise UsageError(f"{option} {word}: KEY=VALUE with one of {', '.join(given.__struct_fields__)}")
        changes[key] = value
    try:
        return msgspec.convert({**msgspec.structs.asdict(given), **changes}, type(given), strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{option}: {error}") from error


def _show_replay(found: Replayed, recorded: int) -> None:
    for difference in found.differences:
        _show_difference(difference)
    by = f"the recorded policies of {recorded} attempts" if recorded else "the default policy"
    printing.say(f"{found.records} records of {found.attempts} attempts were decided again, by {by}.")
    if not found.differences:
        printing.say("No difference: today's rules decide the same.")
    passed = (
        (found.unreadable, "lines could not be read (torn, or of a newer version)"),
        (found.repeated, "records stood there twice"),
        (found.without_start, "records belong to attempts whose beginning is missing"),
        (found.unknown, "records lead to a state that this version does not know"),
    )
    for count, what in passed:
        if count:
            printing.say(f"{count} {what}.")


def _show_difference(difference: Difference) -> None:
    record = difference.record
    event: dict[str, Any] = msgspec.to_builtins(record.event)
    facts = {key: value for key, value in event.items() if key not in ("event", "at")}
    printing.say(
        f"line {difference.line}: {instant(record.event.at)}  attempt {record.attempt}, launch {record.launch}"
    )
    printing.say(f"  event  {event['event']} {_short(facts)}")
    printing.say(f"  then   {_short(difference.then)}   # {record.why}")
    now = {key: value for key, value in difference.now.items() if key != "why" or "why" in difference.then}
    printing.say(f"  now    {_short(now)}   # {difference.now['why']}")
    printing.say()


def _short(value: Any) -> str:
    said = " ".join(f"{key}={msgspec.json.encode(each).decode()}" for key, each in value.items())
    return said if len(said) <= SHOWN_CHARACTERS else said[:SHOWN_CHARACTERS] + "..."


# `dev simulate`: scenarios from files, or months of a large run, decided by the real rules.

RUNS = 5
CHOICES_MAX = 200
COUNT_MAX = 1_000_000
OF_CHOICES = ("nodes", "days", "failures", "spares", "interval_s")  # of a world: they have options of their own


def _add_simulate(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    defaults = World()
    known = ", ".join(f"{key}={getattr(defaults, key):g}" for key in World.__struct_fields__ if key not in OF_CHOICES)
    command = actions.add_parser(
        "simulate",
        help="play a scenario, or months of a large run",
        description="With FILE: play scenarios through the rules and print what they decide after each event "
        "(docs/simulate.md has the format).  Without: simulate months of a run whose nodes fail at a published "
        "rate.  For each choice of interval and spares, print which share of the time becomes progress (ETTR).  Also "
        "print where the rest goes.  The world is simulated.  The real rules decide what is done.",
        epilog=f"Keys of --world with their defaults, in seconds: `{known}`.",
    )
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
        "--world", metavar="KEY=VALUE", action="append", default=[], help="another world; the keys stand below"
    )
    command.add_argument("--policy", metavar="KEY=VALUE", action="append", default=[], help="such as failures_max=5")
    command.add_argument("--runs", type=int, default=RUNS, metavar="N", help="simulated runs a choice (%(default)s)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed, the same runs (%(default)s)")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=simulate_runs)


def simulate_runs(arguments: argparse.Namespace) -> None:
    """Play, or simulate."""
    from stepkeeper.simulate.simulator import simulate  # noqa: PLC0415 - only where it is asked for

    if arguments.files:
        for index, path in enumerate(arguments.files):
            _play(path, titled=len(arguments.files) > 1, first=index == 0)
        return
    policy = changed(Policy(), arguments.policy, "--policy")
    if not 1 <= arguments.runs <= COUNT_MAX:
        raise UsageError("--runs is at least 1")
    began = time.monotonic()
    found = [simulate(world, policy, runs=arguments.runs, seed=arguments.seed) for world in _worlds(arguments)]
    if arguments.json:
        printing.say_json(found)
    else:
        _show_simulated(found, arguments, time.monotonic() - began)


def _play(path: Path, *, titled: bool, first: bool) -> None:
    from stepkeeper.simulate import scenario  # noqa: PLC0415 - only where it is asked for

    text = read_plain(path).decode(errors="replace")
    if titled:
        printing.say(f"{'' if first else chr(10)}== {path}")
    try:
        played = scenario.play(text)
    except scenario.ScenarioError as error:
        raise UsageError(f"{path}: {error}") from error
    for line in played.splitlines():
        printing.say(line)


def _worlds(arguments: argparse.Namespace) -> list[World]:
    try:
        rate = PRESETS[arguments.failures] if arguments.failures in PRESETS else float(arguments.failures)
    except ValueError:
        names = ", ".join(PRESETS)
        raise UsageError(f"--failures {arguments.failures}: a number or one of {names}") from None
    try:
        intervals = [duration(word) for word in arguments.save_every.split(",")]
        spares = [int(word) for word in arguments.spares.split(",")]
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(f"--save-every, --spares: {error}") from error
    if len(intervals) * len(spares) > CHOICES_MAX or max(spares) > COUNT_MAX:
        raise UsageError(f"--save-every, --spares: at most {CHOICES_MAX} choices at a time")
    world = World(nodes=arguments.nodes, days=arguments.days, failures=rate)
    world = changed(world, arguments.world, "--world")
    worlds = [
        msgspec.structs.replace(world, interval_s=interval, spares=count)
        for interval, count in itertools.product(intervals, spares)
    ]
    for world in worlds:
        if problem := world.problem():
            raise UsageError(problem)
    return worlds


def _show_simulated(found: list[Summary], arguments: argparse.Namespace, seconds: float) -> None:
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


# `dev inject xid 79 --gpu 0`: by root only, and only where the agent's configuration believes injected lines.  Never
# through the socket.

LOOK_WITHIN_S = 20.0
CODE_MAX = 9999
TEXT_MAX = 300
DEFAULT_TEXTS = {
    13: "Graphics Exception: ESR 0x504730=0x1000e 0x504734=0x20 0x504728=0x4c1eb72 0x50472c=0x174",
    31: "Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f12_00000000. "
    "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: "Ch 00000018",
    45: "Ch 00000018",
    48: "DBE (double bit error) ECC Error encountered",
    79: "GPU has fallen off the bus.",
}


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    dev = subcommands.add_parser(
        "dev", help="replay, simulate and inject faults, for tests", description="Tools to test rules and sites."
    )
    actions = dev.add_subparsers(dest="action", metavar="ACTION", required=True)
    inject = actions.add_parser(
        "inject",
        help="write a fault into the kernel log",
        description="Write a fault into the kernel log, as the NVIDIA driver would.  Root only.  The agent drains "
        "the node on it, so its configuration must have `allow_injected = true` in its [test] table.",
    )
    inject.add_argument("kind", choices=("xid",), help="what kind of fault")
    inject.add_argument("code", type=int, help="its number, as in `stepkeeper xid`")
    inject.add_argument("--gpu", required=True, metavar="INDEX|PCI", help="NVML's index, or a PCI address")
    inject.add_argument("--text", default="", help="what the driver says about it")
    inject.add_argument("--config", type=Path, metavar="FILE", help=f"(default: {node_config.DEFAULT_PATH})")
    inject.set_defaults(execute=inject_fault)
    _add_replay(actions)
    _add_simulate(actions)


def inject_fault(arguments: argparse.Namespace) -> None:
    """Write one record."""
    config = node_config.load(arguments.config)
    if not config.test.allow_injected:
        where = arguments.config or node_config.DEFAULT_PATH
        raise UsageError(
            f"{where}: injected faults are not allowed here; a test node says `allow_injected = true` in [test]"
        )
    pci = _pci(config, arguments.gpu)
    line = record(arguments.code, pci, arguments.text)
    write(Path(config.test.kernel_log), line)
    printing.say(f"written to {config.test.kernel_log}: {line}")


def record(code: int, pci: str, text: str = "") -> str:
    """Return the driver's line.

    >>> record(79, "0000:3b:00.0")
    'NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.'
    """
    if not 0 < code <= CODE_MAX:
        raise UsageError(f"{code}: no XID; see `stepkeeper xid`")
    said = text or DEFAULT_TEXTS.get(code, "injected for a test")
    line = f"NVRM: Xid (PCI:{pci.removesuffix('.0')}): {code}, {said}"
    if len(said) > TEXT_MAX or not said.isprintable() or parse(line) is None:
        raise UsageError(f"--text: one printable line of at most {TEXT_MAX} characters")
    return line


def write(path: Path, line: str) -> None:
    """Write one record.  Each needs a descriptor of its own, or the kernel drops most of a burst.  Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"<4>{line}\n".encode())
    finally:
        os.close(descriptor)


def _pci(config: NodeConfig, gpu: str) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(\.[0-7])?", gpu):
        return canonical(gpu)
    if not gpu.isdigit():
        raise UsageError(f"--gpu {gpu}: neither an index nor a PCI address")
    listed = {each.index: each.pci for each in nvml.once(LOOK_WITHIN_S).status.gpus} if config.test.nvml else {}
    if int(gpu) not in listed:
        known = ", ".join(f"{index} ({pci})" for index, pci in sorted(listed.items())) or "none"
        book = ledger.read(config.state_path / ledger.NAME)
        remembered = ", ".join(pci for pci, _ in book.gpus.gpus) if book.gpus is not None else ""
        hint = f"; the agent remembers {remembered}" if remembered else ""
        raise NotFoundError(f"--gpu {gpu}: NVML lists {known}{hint}; give a PCI address")
    return listed[int(gpu)]

"""`stepkeeper dev replay RUN|journal.jsonl`: what today's rules would decide differently in a run that was."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepkeeper.cli import printing
from stepkeeper.cli.printing import instant
from stepkeeper.config import resolve as config_record
from stepkeeper.config.settings import GROUP
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import find, journal

if TYPE_CHECKING:  # a supervisor, which knows all commands, stays small
    from stepkeeper.simulate.replay import Difference, Replayed

DIFFERENT = 1  # exit code: something would be decided otherwise
ATTEMPTS_MAX = 10_000
SHOWN_CHARACTERS = 300


def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = actions.add_parser(
        "replay",
        help="decide a real run again",
        description="Feed the events of a journal to the rules of this version, and show the first decision that "
        "differs from what was decided then.  Each attempt goes by its own recorded policy.  Ends with 1 where "
        "something differs.",
        allow_abbrev=False,
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
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Decide again, and say what differs."""
    from stepkeeper.simulate.replay import replay  # noqa: PLC0415 - only where it is asked for

    path = Path(arguments.run)
    file = path if path.is_file() else find.find(arguments.run, os.environ).journal
    if not file.exists():
        raise StepkeeperError(f"{file}: not there: no supervisor has worked on this run yet", ExitCode.NOTHING_FOUND)
    recorded = recorded_policies(file.parent)
    changes = policy_changes(arguments.policy)
    attempts = range(max(recorded, default=-1) + 1) if recorded else range(0)
    policies = {number: changed(recorded.get(number, Policy()), changes) for number in attempts}
    if changes and not recorded:
        policies = dict.fromkeys(range(ATTEMPTS_MAX), changed(Policy(), changes))
    stop_after = ATTEMPTS_MAX if arguments.all else 1
    found = replay(journal.read_lines(file), policies, words=arguments.words, stop_after=stop_after)
    if not found.records:
        raise StepkeeperError(f"{file}: no record of the beginning of an attempt", ExitCode.NOTHING_FOUND)
    if arguments.json:
        printing.say_json(msgspec.to_builtins(found), indent=2)
    else:
        _show(found, len(recorded))
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


def policy_changes(words: list[str]) -> dict[str, str]:
    """Return what `--policy` says.

    Raises:
        StepkeeperError: a word is no KEY=VALUE, or no such key.
    """
    changes: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.removeprefix(f"{GROUP}.")
        if not equals or key not in Policy.__struct_fields__:
            raise StepkeeperError(
                f"--policy {word}: KEY=VALUE with a key of the policy; docs/configuration.md lists them", ExitCode.USAGE
            )
        changes[key] = value
    return changes


def changed(policy: Policy, changes: dict[str, str]) -> Policy:
    """Return the policy with other values.

    Raises:
        StepkeeperError: a value does not fit its key.
    """
    try:
        return msgspec.convert({**msgspec.structs.asdict(policy), **changes}, Policy, strict=False)
    except msgspec.ValidationError as error:
        raise StepkeeperError(f"--policy: {error}", ExitCode.USAGE) from error


def _show(found: Replayed, recorded: int) -> None:
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

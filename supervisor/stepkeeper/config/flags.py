"""The options of `stepkeeper run` that are settings."""

from __future__ import annotations

import argparse

from stepkeeper.config.files import Entry
from stepkeeper.config.settings import SETTINGS
from stepkeeper.config.values import from_text, known, refuse_removed, shown
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError

_REMOVED = {"max_nodes": "--max-nodes"}  # options of 0.1: refused with what replaces them
_DEST = "setting "  # and the key: no option of another kind can have such a name


def declare(command: argparse.ArgumentParser) -> None:
    """Add an option for every setting that has one, and `--set` for the others."""
    group = command.add_argument_group(
        "settings",
        "also in the environment (STEPKEEPER_SPARES=1) and in config.toml of the run directory, of "
        "~/.config/stepkeeper and of /etc/stepkeeper; --print-config shows them all",
    )
    for setting in SETTINGS.values():
        if not setting.flag:
            continue
        default = "" if setting.default is None or setting.kind is bool else f" (default: {shown(setting.default)})"
        text = (setting.help.rstrip(".") + default).replace("%", "%%")
        text = text[:1].lower() + text[1:]
        if setting.kind is bool:
            group.add_argument(
                setting.flag, action=argparse.BooleanOptionalAction, dest=_DEST + setting.key, default=None, help=text
            )
        else:
            group.add_argument(setting.flag, dest=_DEST + setting.key, metavar=setting.about.metavar, help=text)
    for key, flag in _REMOVED.items():
        group.add_argument(flag, dest=_DEST + key, help=argparse.SUPPRESS)
    group.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="any setting by its key, such as policy.leave_within_s=30; may be repeated",
    )


def read(arguments: argparse.Namespace) -> dict[str, Entry]:
    """Return what the command line sets, by key.

    Raises:
        StepkeeperError: a key is not known or set twice, or a value is wrong.
    """
    entries: dict[str, Entry] = {}
    given = vars(arguments)
    for setting in SETTINGS.values():
        value = given.get(_DEST + setting.key)
        if isinstance(value, bool):
            entries[setting.key] = Entry(value, setting.flag if value else "--no-" + setting.flag[2:])
        elif value is not None:
            entries[setting.key] = Entry(from_text(setting, value, setting.flag), setting.flag)
    for key, flag in _REMOVED.items():
        if given.get(_DEST + key) is not None:
            refuse_removed(key, flag)
    for assignment in arguments.assignments:
        key, found, text = assignment.partition("=")
        where = f"--set {shown(assignment)}"
        if not found:
            raise StepkeeperError(f"{where}: write --set KEY=VALUE", ExitCode.USAGE)
        setting = known(key.strip(), where)
        if setting.key in entries:
            raise StepkeeperError(f"{where}: {setting.key} is set twice on the command line", ExitCode.USAGE)
        entries[setting.key] = Entry(from_text(setting, text.strip(), "--set"), "--set")
    return entries

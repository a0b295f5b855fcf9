"""One value for each key, and where it came from."""

from __future__ import annotations

import argparse
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import __version__
from stepkeeper.config import files
from stepkeeper.config.files import ConfigFile, Entry, Role
from stepkeeper.config.settings import SETTINGS, VARIABLE_PREFIX, RunSettings, Value, build, variable
from stepkeeper.config.values import REMOVED, Outdated, from_text, known, nearest, passed_over, shown, value_now
from stepkeeper.core.policy import Policy
from stepkeeper.errors import UsageError
from stepkeeper.frameworks.adapters.generic import Patterns
from stepkeeper.redaction import redact
from stepkeeper.slurm.launch import KEPT
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import DecodeError, decode, read_plain

# The `STEPKEEPER_*` variables: settings, what ranks get, and nothing else.

# What Stepkeeper passes to ranks and watchers: a run that is started inside another one inherits it.
PASSED_ON = frozenset(
    VARIABLE_PREFIX + name
    for name in (
        "SOCKET", "RUN_ID", "ATTEMPT", "LAUNCH", "RESUME_FROM", "TASKS_PER_NODE", "AGENT_SOCKET", "WATCHER",
        "STANDBY", "STANDBY_WORDS", "STANDBY_PYTHON", "STANDBY_HOOK", "STANDBY_SLOT",
        "ERROR_DIR", "REASON", "EXIT_CODE", "CAUSE", "JOB_ID",  # the last four the notify command
        "RESUME_NEWEST", "RELIABILITY", "SKIP_DATA", "ATTACHED", "ATTACH_PACKAGES", "ATTACH_CHECKPOINT", "RELEASE",
        "CONTINUES",  # what a job that was submitted in place of another gets
    )
)  # fmt: skip
# What a site's environment module sets for any software; the training may want it, we do not.
MODULES = frozenset(VARIABLE_PREFIX + name for name in ("BASE", "DIR", "HOME", "PREFIX", "ROOT", "VERSION"))


def read_environment(environment: Mapping[str, str], outdated: list[Outdated] | None = None) -> dict[str, Entry]:
    """Return what the environment sets, by key.  An empty variable sets nothing.

    Args:
        environment: of the process.
        outdated: where the run continues; takes what an earlier release took.  None: that is refused.

    Raises:
        StepkeeperError: a variable is not known, or its value is wrong.
    """
    removed = {variable(key): key for key in REMOVED}
    by_variable = {setting.variable: setting for setting in SETTINGS.values() if setting.variable}
    entries = {}
    for name, text in sorted(environment.items()):
        if not name.startswith(VARIABLE_PREFIX) or name in PASSED_ON or name in MODULES or name.startswith(KEPT):
            continue
        if name in removed and (not text or passed_over(removed[name], text, name, outdated)):
            continue
        if name not in by_variable:
            raise UsageError(
                f"{shown(name)}: no such setting{nearest(name, by_variable)}; unset it: a setting that is not known is "
                "never ignored"
            )
        if text:
            setting = by_variable[name]
            entries[setting.key] = Entry(from_text(setting, text, name, outdated), name)
    return entries


class Origin(Enum):
    """Where a value came from; the first that sets a key wins."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    RUN = Role.RUN.value
    USER = Role.USER.value
    SITE = Role.SITE.value
    DEFAULT = "default"


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """The value of one key."""

    value: Value
    origin: Origin
    where: str = ""  # flag, variable, or file and line
    locked: str = ""  # where the site locks the key


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every key with its value: for programs in `settings`, for people in `values`."""

    settings: RunSettings
    values: dict[str, Resolved]
    files: tuple[ConfigFile, ...]  # that were looked for
    generic: Patterns | None = None  # `[framework.generic]`
    outdated: tuple[Outdated, ...] = ()  # what a run that continues goes on without

    def described(self, key: str) -> str:
        """Return how a value was set, for an error."""
        found = self.values[key]
        if found.origin is Origin.FLAG and found.where != "--set":
            return f"{found.where} {shown(found.value)}"
        return f"{key} = {shown(found.value)} ({found.where or found.origin.value})"


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """What flags, environment and files say, before the run directory is known."""

    flags: dict[str, Entry]
    environment: dict[str, Entry]
    user: ConfigFile
    site: ConfigFile
    outdated: tuple[Outdated, ...] | None = None  # None: the run does not continue

    @property
    def generic(self) -> Patterns | None:
        """Return `[framework.generic]`, the user's own before the site's."""
        return self.user.generic or self.site.generic

    def resolve(self, directory: Path | None = None) -> Config:
        """Return the configuration, with what the run directory's own file says where there is one.

        Raises:
            StepkeeperError: a file is wrong, a locked key is set, or values do not fit together.
        """
        outdated = None if self.outdated is None else list(self.outdated)
        run = [files.read(directory / files.NAME, Role.RUN, outdated)] if directory is not None else []
        layers = [
            (Origin.FLAG, self.flags),
            (Origin.ENVIRONMENT, self.environment),
            *((Origin.RUN, each.entries) for each in run),
            (Origin.USER, self.user.entries),
            (Origin.SITE, self.site.entries),
        ]
        values = {key: _first(key, layers, self.site) for key in SETTINGS}
        _refuse_misfits(values)
        settings = build({key: found.value for key, found in values.items()})
        return Config(
            settings=settings,
            values=values,
            files=(*run, self.user, self.site),
            generic=self.generic,
            outdated=tuple(outdated or ()),
        )


def gather(
    flags: dict[str, Entry],
    environment: Mapping[str, str],
    *,
    site: Path = files.SITE,
    user: Path | None = None,
    outdated: list[Outdated] | None = None,
) -> Sources:
    """Read everything but the run directory's file.

    Args:
        flags: of the command line.
        environment: of the process.
        site: the administrator's file.
        user: the user's own file; by default that of the environment.
        outdated: where the run continues, what the flags held that an earlier release took.  None: that is refused.

    Raises:
        StepkeeperError: a variable or a file is wrong.
    """
    found = None if outdated is None else list(outdated)
    sources = Sources(
        flags=flags,
        environment=read_environment(environment, found),
        user=files.read(user or files.user_path(environment), Role.USER, found),
        site=files.read(site, Role.SITE, found),
    )
    return msgspec.structs.replace(sources, outdated=None if found is None else tuple(found))


def _first(key: str, layers: list[tuple[Origin, dict[str, Entry]]], site: ConfigFile) -> Resolved:
    setting = SETTINGS[key]
    lock = site.locked.get(key, "")
    for origin, entries in layers:
        entry = entries.get(key)
        if entry is None:
            continue
        if lock and origin is not Origin.SITE:
            admins = site.entries[key].value if key in site.entries else setting.default
            raise UsageError(
                f"{entry.where}: `{key}` is locked by the administrator in {lock}, at {shown(admins)}; "
                "leave it out here"
            )
        return Resolved(value=entry.value, origin=origin, where=entry.where, locked=lock)
    return Resolved(value=setting.default, origin=Origin.DEFAULT, locked=lock)


def _refuse_misfits(values: dict[str, Resolved]) -> None:
    copies, interface = values["peer_copies"], values["peer_interface"]
    if copies.value and values["local_tier"].value is None and values["snapshot_every"].value is None:
        raise UsageError(
            f"{copies.where}: peer_copies: peer copies are of the local tier and of snapshots in memory, "
            "and there are none: set local_tier too, or snapshot_every"
        )
    if interface.value is not None and not copies.value:
        raise UsageError(
            f"{interface.where}: peer_interface: it is for peer copies, and there are none: set peer_copies too"
        )


# The options of `stepkeeper run` that are settings.

_REMOVED = {  # options of 0.1
    "max_nodes": "--max-nodes",
    "load_memory_gib": "--load-memory-gib",
    "progress_log_every_s": "--progress-log-every-s",
    "cold_zstd": "--cold-zstd",
    "policy.resubmit": "--resubmit",
}
_DEST = "setting "  # and the key: no option of another kind can have such a name


def declare_flags(command: argparse.ArgumentParser) -> None:
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


def read_flags(arguments: argparse.Namespace, outdated: list[Outdated] | None = None) -> dict[str, Entry]:
    """Return what the command line sets, by key.

    Args:
        arguments: as parsed.
        outdated: where the run continues; takes what an earlier release took.  None: that is refused.

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
            entries[setting.key] = Entry(from_text(setting, value, setting.flag, outdated), setting.flag)
    for key, flag in _REMOVED.items():
        if given.get(_DEST + key) is not None:
            passed_over(key, given[_DEST + key], flag, outdated)
    for assignment in arguments.assignments:
        key, found, text = assignment.partition("=")
        where = f"--set {shown(assignment)}"
        if not found:
            raise UsageError(f"{where}: write --set KEY=VALUE")
        if passed_over(key.strip(), text, where, outdated):
            continue
        setting = known(key.strip(), where)
        if setting.key in entries:
            raise UsageError(f"{where}: {setting.key} is set twice on the command line")
        entries[setting.key] = Entry(from_text(setting, text.strip(), "--set", outdated), "--set")
    return entries


# `attempts/attempt-000/config.json` of the run directory: by what an attempt went, and where it came from.

FORMAT = 1
RECORD_NAME = "config.json"
_POLICY = "policy."


def record_path(run_directory: Path, attempt: int) -> Path:
    """Return where the configuration of an attempt stands."""
    return run_directory / "attempts" / f"attempt-{attempt:03d}" / RECORD_NAME


def record_document(config: Config) -> dict[str, Any]:
    """Return the configuration as a JSON document: each value, its unit and its origin.  No secret."""
    return {
        "format": FORMAT,
        "stepkeeper": __version__,
        "files": [{"origin": file.role.value, "path": str(file.path)} for file in config.files],
        "settings": {
            key: {
                "value": redact(found.value) if isinstance(found.value, str) else found.value,
                "unit": SETTINGS[key].about.unit,
                "origin": found.origin.value,
                "where": redact(found.where),
                "locked": found.locked,
            }
            for key, found in config.values.items()
        },
    }


def write_record(run_directory: Path, attempt: int, config: Config) -> Path:
    """Write the configuration of an attempt; the group may read it where it may read the run directory.

    Raises:
        OSError: it was not written.
    """
    path = record_path(run_directory, attempt)
    group = run_directory.stat().st_mode & (stat.S_IRGRP | stat.S_IXGRP)
    for directory in (path.parent.parent, path.parent):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            continue
        directory.chmod(0o700 | group)
    data = msgspec.json.format(msgspec.json.encode(record_document(config)), indent=1) + b"\n"
    write_atomically(path, data, mode=0o600 | (group & stat.S_IRGRP))
    return path


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader wants to know of such a record."""

    stepkeeper: str = ""  # its version
    settings: dict[str, dict[str, Any]] = {}

    def chosen(self) -> dict[str, str]:
        """Return the settings that are not the defaults, each with where it came from."""
        found = ((key, each) for key, each in self.settings.items() if each.get("origin") != Origin.DEFAULT.value)
        return {key: f"{each.get('value')} ({each.get('where', '')})" for key, each in found}

    def policy(self) -> Policy:
        """Return the policy of the attempt; the default one where the record has none.

        What was a setting then and is a constant now has the value that it had.  A value of 0.1 has its name of today.
        """
        values = {
            key.removeprefix(_POLICY): value_now(key, found.get("value"))
            for key, found in self.settings.items()
            if key.startswith(_POLICY) and key.removeprefix(_POLICY) in Policy.__struct_fields__
        }
        try:
            return msgspec.convert(values, Policy)
        except msgspec.ValidationError:
            return Policy()


_recorded = msgspec.json.Decoder(Recorded)


def read_record(run_directory: Path, attempt: int) -> Recorded:
    """Return what an attempt went by; nothing where it never got so far, or the record cannot be read."""
    try:
        return decode(_recorded, read_plain(record_path(run_directory, attempt), within=run_directory))
    except (OSError, DecodeError):
        return Recorded()


def changed_settings(config: Config) -> dict[str, str]:
    """Return what is not the default, in words: for the log."""
    found = ((key, each) for key, each in config.values.items() if each.origin is not Origin.DEFAULT)
    return {key: redact(f"{shown(each.value)} ({each.where})") for key, each in found}

"""Configuration files: `config.toml` of the run directory, of the user, of the site."""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper.config.settings import GROUP, Value
from stepkeeper.config.values import Outdated, checked, known, passed_over
from stepkeeper.errors import UsageError
from stepkeeper.frameworks.adapters.generic import Patterns, parse_patterns
from stepkeeper.run_store import lines
from stepkeeper_trainer.formats.plain import open_plain

NAME = "config.toml"
SITE = Path("/etc/stepkeeper") / NAME
LOCKED = "locked"
FRAMEWORK = "framework"
_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR))


class Role(Enum):
    """Whose file it is; the value is shown as the origin of what it sets."""

    RUN = "run directory"
    USER = "user"
    SITE = "site"


class Entry(msgspec.Struct, frozen=True):
    """A value, and where it stands."""

    value: Value
    where: str


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a file sets; `locked` is where the site locks a key."""

    role: Role
    path: Path
    entries: dict[str, Entry] = {}
    locked: dict[str, str] = {}
    generic: Patterns | None = None  # `[framework.generic]`


def user_path(environment: Mapping[str, str]) -> Path:
    """Return where the user's own file is."""
    home = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(home):  # the XDG rule: a relative one does not count
        home = os.path.join(environment.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(home) / "stepkeeper" / NAME


def read(path: Path, role: Role, outdated: list[Outdated] | None = None) -> ConfigFile:
    """Read a file; one that is not there sets nothing.  `outdated`: as for `parse`.

    Raises:
        StepkeeperError: it cannot be read or trusted, or a key or value in it is wrong.
    """
    try:
        data = _trusted(path, role)
    except OSError as error:
        if error.errno in _ABSENT:
            return ConfigFile(role=role, path=path)
        raise UsageError(f"{path}: cannot be read: {error.strerror}; repair it or remove it") from error
    return parse(data, path, role, outdated)


def _trusted(path: Path, role: Role) -> bytes:
    """Return what stands in a file that nobody but root and us can change.

    The user's and the site's may be links: dotfiles often are.  Nothing in a run directory is.

    Raises:
        OSError: it cannot be read, or is no plain file.
        StepkeeperError: others may have written it.
    """
    with open_plain(path if role is Role.RUN else Path(os.path.realpath(path))) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"{path}: belongs to user id {status.st_uid}, who could make your job do what you did not ask for; "
                "it must be yours or root's"
            )
        # a user's own group is often theirs alone (umask 002); what the site locks is for root to change
        forbidden = stat.S_IWOTH | (stat.S_IWGRP if role is Role.SITE else 0)
        if status.st_mode & forbidden:
            who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
            raise UsageError(f"{path}: {who} may write it; chmod go-w it")
        data = file.read(lines.LINE_BYTES_MAX + 1)
    if len(data) > lines.LINE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"more than {lines.LINE_BYTES_MAX} bytes", str(path))
    return data


def parse(data: bytes, path: Path, role: Role, outdated: list[Outdated] | None = None) -> ConfigFile:
    """Return what the text of a file sets.

    Args:
        data: the text.
        path: named in errors.
        role: whose file it is.
        outdated: where the run continues; takes what an earlier release took.  None: that is refused.

    Raises:
        StepkeeperError: it is not TOML, or a key or value in it is wrong.
    """
    try:
        text = data.decode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is the usual one; a huge number is another
        raise UsageError(f"{path}: not TOML: {error}") from error
    places = _Places(path, text)
    lock = document.pop(LOCKED, None)
    entries = {}
    generic = _framework(document, places)
    for key, value in _flat(document):
        if key == GROUP:
            raise UsageError(f"{places.of(key)}: {GROUP} is a table: write [{GROUP}]")
        if passed_over(key, value, places.of(key), outdated):
            continue
        setting = known(key, places.of(key))
        if role is Role.RUN and not setting.about.in_run_directory:
            raise UsageError(f"{places.of(key)}: `{key}` says where this very file is; set it elsewhere")
        entries[key] = Entry(checked(setting, value, places.of(key), outdated), places.of(key))
    locked: dict[str, str] = {}
    if lock is not None:
        if role is not Role.SITE:
            raise UsageError(f"{places.of(LOCKED)}: only the administrator's {SITE} may lock keys")
        locked = _locks(lock, places, entries, outdated)
    return ConfigFile(role=role, path=path, entries=entries, locked=locked, generic=generic)


def _framework(document: dict[str, Any], places: _Places) -> Patterns | None:
    """Take the table `[framework]` apart: its `name` is the setting `framework`, `generic` is a table of its own."""
    table = document.get(FRAMEWORK)
    if not isinstance(table, dict):
        return None
    if unknown := sorted(table.keys() - {"name", "generic"}):
        raise UsageError(
            f"{places.of(f'{FRAMEWORK}.{unknown[0]}')}: [{FRAMEWORK}] has `name` and `generic`, and no `{unknown[0]}`"
        )
    if "name" in table:
        document[FRAMEWORK] = table["name"]
    else:
        del document[FRAMEWORK]
    return parse_patterns(table["generic"], places.of(f"{FRAMEWORK}.generic")) if "generic" in table else None


def _locks(lock: Any, places: _Places, entries: dict[str, Entry], outdated: list[Outdated] | None) -> dict[str, str]:
    """Return where each locked key is locked; those with a value in `[locked]` are added to the entries.

    `locked = ["spares"]` locks what the file says of the key elsewhere, else its default.
    """
    if isinstance(lock, list):
        where = places.of(LOCKED)
        for key in lock:
            if not isinstance(key, str):
                raise UsageError(f"{where}: {LOCKED} is a list of keys")
        return {known(key, where).key: where for key in lock if not passed_over(key, None, where, outdated)}
    if not isinstance(lock, dict):
        raise UsageError(f"{places.of(LOCKED)}: {LOCKED} is a list of keys, or a table of keys and values")
    locked = {}
    for key, value in _flat(lock):
        where = places.of(f"{LOCKED}.{key}")
        if passed_over(key, value, where, outdated):
            continue
        setting = known(key, where)
        if key in entries:
            raise UsageError(f"{where}: `{key}` stands twice, in [{LOCKED}] and outside")
        entries[key] = Entry(checked(setting, value, where, outdated), where)
        locked[key] = where
    return locked


def _flat(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if key == GROUP and isinstance(value, dict):
            yield from ((f"{GROUP}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value


class _Places:
    """Where a key stands in a text.  tomllib does not say; this finds it, and is used in messages only."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines: dict[str, int] = {}
        table = ""
        for number, line in enumerate(text.splitlines(), start=1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                table = _plain(header[1])
                self._lines.setdefault(table, number)
            elif "=" in line and not line.lstrip().startswith("#"):
                key = _plain(line.partition("=")[0])
                self._lines.setdefault(f"{table}.{key}" if table else key, number)

    def of(self, key: str) -> str:
        """Return `FILE, line N`, without the line where it was not found."""
        return f"{self._path}, line {self._lines[key]}" if key in self._lines else str(self._path)


def _plain(key: str) -> str:
    """Return a dotted key without blanks and quotes."""
    return ".".join(part.strip().strip("\"'") for part in key.split("."))

"""One value for each key, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import msgspec

from stepkeeper.config import environment as variables
from stepkeeper.config import files
from stepkeeper.config.files import ConfigFile, Entry, Role
from stepkeeper.config.patterns import Patterns
from stepkeeper.config.settings import SETTINGS, RunSettings, Value, build
from stepkeeper.config.values import shown
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError


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

    def told(self, key: str) -> str:
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

    @property
    def generic(self) -> Patterns | None:
        """Return `[framework.generic]`, the user's own before the site's."""
        return self.user.generic or self.site.generic

    def resolve(self, directory: Path | None = None) -> Config:
        """Return the configuration, with what the run directory's own file says where there is one.

        Raises:
            StepkeeperError: a file is wrong, a locked key is set, or values do not fit together.
        """
        run = [files.read(directory / files.NAME, Role.RUN)] if directory is not None else []
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
        return Config(settings=settings, values=values, files=(*run, self.user, self.site))


def gather(
    flags: dict[str, Entry], environment: Mapping[str, str], *, site: Path = files.SITE, user: Path | None = None
) -> Sources:
    """Read everything but the run directory's file.

    Raises:
        StepkeeperError: a variable or a file is wrong.
    """
    return Sources(
        flags=flags,
        environment=variables.read(environment),
        user=files.read(user or files.user_path(environment), Role.USER),
        site=files.read(site, Role.SITE),
    )


def _first(key: str, layers: list[tuple[Origin, dict[str, Entry]]], site: ConfigFile) -> Resolved:
    setting = SETTINGS[key]
    lock = site.locked.get(key, "")
    for origin, entries in layers:
        entry = entries.get(key)
        if entry is None:
            continue
        if lock and origin is not Origin.SITE:
            admins = site.entries[key].value if key in site.entries else setting.default
            raise StepkeeperError(
                f"{entry.where}: `{key}` is locked by the administrator in {lock}, at {shown(admins)}; "
                "leave it out here",
                ExitCode.USAGE,
            )
        return Resolved(value=entry.value, origin=origin, where=entry.where, locked=lock)
    return Resolved(value=setting.default, origin=Origin.DEFAULT, locked=lock)


def _refuse_misfits(values: dict[str, Resolved]) -> None:
    copies = values["peer_copies"]
    if copies.value and values["local_tier"].value is None:
        raise StepkeeperError(
            f"{copies.where}: peer_copies: peer copies are of the local tier, and there is none: set local_tier too",
            ExitCode.USAGE,
        )

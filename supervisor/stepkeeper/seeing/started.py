"""With what each attempt was started: its command line, code and settings, from the records in `attempts/`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import msgspec

from stepkeeper.config import record
from stepkeeper.store import code
from stepkeeper.store.rundir import RunDirectory

COMMIT_CHARACTERS = 12


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What was the same for one or more attempts in a row."""

    first: int  # attempt
    last: int
    command: tuple[str, ...] = ()
    commit: str = ""
    changed: bool = False  # besides the commit, what is not committed ran too
    directory: str = ""  # of the git working tree
    unknown: str = ""  # why git did not tell
    scripts: dict[str, str] = {}  # files of the command line, with their digests
    stepkeeper: str = ""  # its version
    settings: dict[str, str] = {}  # those that are not the defaults

    @property
    def command_line(self) -> str:
        """The command as one types it."""
        return shlex.join(self.command)

    @property
    def code(self) -> str:
        """Say in words which code ran."""
        if self.commit:
            changed = ", with changes that are not committed" if self.changed else ""
            return f"commit {self.commit[:COMMIT_CHARACTERS]}{changed}, in {self.directory}"
        named = ", ".join(f"{path} (xxh3 {digest[:COMMIT_CHARACTERS]})" for path, digest in self.scripts.items())
        return named or "not known" + (f": {self.unknown}" if self.unknown else "")


def read(run: RunDirectory, attempts: Iterable[int]) -> list[Started]:
    """Return what is recorded, oldest first; attempts that were started alike stand together."""
    found: list[Started] = []
    digest = ""
    for attempt in sorted(set(attempts)):
        ran, by = code.read(run.path, attempt), record.read(run.path, attempt)
        if ran is None and not by.stepkeeper:
            continue
        ran = ran or code.Code()
        one = Started(
            first=attempt,
            last=attempt,
            command=ran.command,
            commit=ran.commit,
            changed=bool(ran.changes_xxh3),
            directory=ran.directory,
            unknown=ran.unknown,
            scripts=ran.scripts,
            stepkeeper=by.stepkeeper,
            settings=by.chosen(),
        )
        if (
            found
            and digest == ran.changes_xxh3
            and msgspec.structs.replace(found[-1], first=attempt, last=attempt) == one
        ):
            found[-1] = msgspec.structs.replace(found[-1], last=attempt)
        else:
            found.append(one)
        digest = ran.changes_xxh3
    return found

"""Whether a directory is this user's alone: nobody else can have put what is in it there, nor put another in its place.

Asked of the run directory, of the journal's spool and of snapshots in memory, before what is found there is trusted.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path


class Shared(Enum):
    """What makes a directory one of others too."""

    NO_DIRECTORY = auto()  # or a link, which is not followed
    OWNER = auto()
    EVERYBODY = auto()
    GROUP = auto()


@dataclass(frozen=True, slots=True)
class NotAlone:
    """Why a directory is not this user's alone."""

    kind: Shared
    text: str  # what follows the directory's name


def why_not_alone(path: Path, *, readers: bool = False) -> NotAlone | None:
    """Say why a directory is not this user's alone; None where it is.

    A group that has nobody else in it is the user: many systems make one for each user, and files open to it.

    Args:
        path: of the directory.
        readers: others may look into it, and not more.

    Raises:
        OSError: it cannot be looked at.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        what = "is a symbolic link, which is not followed" if stat.S_ISLNK(found.st_mode) else "is not a directory"
        return NotAlone(Shared.NO_DIRECTORY, what)
    if found.st_uid != os.geteuid():
        who = f"belongs to user id {found.st_uid}, who could put anything there"
        return NotAlone(Shared.OWNER, who)
    may, mode = "write" if readers else "use", stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWOTH if readers else stat.S_IRWXO):
        return NotAlone(Shared.EVERYBODY, f"everybody may {may} it (mode {mode:o})")
    if mode & (stat.S_IWGRP if readers else stat.S_IRWXG) and not _is_own_group(found.st_gid):
        return NotAlone(Shared.GROUP, f"its group may {may} it (mode {mode:o})")
    return None


def is_replaceable(directory: Path, *, of_project: bool = False) -> bool:
    """Tell whether others could put something of theirs in the place of what is in a directory.

    Args:
        directory: a link is followed.
        of_project: its owner and its group are trusted: on shared storage they are those of a project.

    Raises:
        OSError: it cannot be looked at.
    """
    found = directory.stat()
    writers = found.st_mode & (stat.S_IWOTH if of_project else stat.S_IWOTH | stat.S_IWGRP)
    owned = of_project or found.st_uid in {0, os.geteuid()}
    return not owned or bool(writers and not found.st_mode & stat.S_ISVTX)


def _is_own_group(gid: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False  # not known on this node
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}

"""Files by which a framework finds the checkpoint to resume from, and torn checkpoints: what is wrong, and its repair.

Looking changes nothing.  `rewrite` and `put_aside` change one name each, by one rename, and refuse where anything is
not as it was when it was judged.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stepkeeper.frameworks import choosing
from stepkeeper.frameworks.choosing import QUARANTINED, How, Judged, State
from stepkeeper.frameworks.framework import POINTER_BYTES_MAX, Framework
from stepkeeper.frameworks.tree import QUIET_S, ReadError, Tree
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import open_directory, read_plain

_SHOWN_MAX = 80
_NEW_MODE = 0o644


class RefusedError(Exception):
    """Something is not changed, and why."""


class Pointing(Enum):
    """What a pointer file names."""

    RIGHT = "names the newest verified checkpoint"
    MISSING = "is missing"
    OLDER = "names an older checkpoint"
    TORN = "names a checkpoint that is damaged or incomplete"
    UNSETTLED = "names a checkpoint that is perhaps still being written"
    NOT_RESUMABLE = "names a checkpoint that is not resumable"
    UNKNOWN = "names no checkpoint that is here"
    UNREADABLE = "cannot be read"


_OF_STATE = {
    State.VERIFIED: Pointing.OLDER,
    State.COMPLETE: Pointing.OLDER,
    State.NOT_RESUMABLE: Pointing.NOT_RESUMABLE,
    State.UNSETTLED: Pointing.UNSETTLED,
    State.TORN: Pointing.TORN,
}


@dataclass(frozen=True, slots=True)
class _Was:
    """A pointer file as it was read before the checkpoints were."""

    status: os.stat_result | None  # None: there was none, or it could not be looked at
    data: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Pointer:
    """A file that a framework reads on resume, and what it should hold."""

    path: Path
    state: Pointing
    shown: str  # what it says, or why it cannot be read
    target: Judged | None  # the newest verified and resumable checkpoint that it can name
    data: bytes  # which names the target
    was: _Was


class Reason(Enum):
    """Why a checkpoint is put aside; it becomes a part of its name."""

    INCOMPLETE = "incomplete"  # by names, sizes and metadata
    DAMAGED = "damaged"  # by its bytes


@dataclass(frozen=True, slots=True)
class Torn:
    """A checkpoint that no framework can resume from."""

    judged: Judged
    reason: Reason

    @property
    def to(self) -> Path:
        """Return the name under which it is put aside."""
        path = self.judged.step.path
        return path.with_name(f"{QUARANTINED}{self.reason.value}-{path.name}")


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found in a directory."""

    pointers: tuple[Pointer, ...]
    torn: tuple[Torn, ...]
    newest: Judged | None  # verified and resumable
    judged: tuple[Judged, ...]


def look(
    framework: Framework, root: Path, how: How, *, left_out: Callable[[Judged], bool] = lambda _: False
) -> Findings:
    """Judge the checkpoints of a directory and the pointer files beside them; none names what is left out.

    Raises:
        OSError: the directory cannot be listed.
    """
    shallow = choosing.judge_all(framework, root, how.shallow())
    names = {each.step.path: framework.pointers(each.step) for each in shallow}
    before = {pointer: _read(pointer, root) for pointer in sorted({path for each in names.values() for path in each})}
    targets: dict[Path, Judged] = {}
    seen = {each.step.path: each for each in shallow}
    newest: Judged | None = None
    while newest is None or before.keys() - targets:
        wanted = before.keys() - targets.keys()

        def cannot_be_named(each: Judged, wanted: frozenset[Path] = frozenset(wanted)) -> bool:
            return left_out(each) or (bool(wanted) and wanted.isdisjoint(names.get(each.step.path, ())))

        found, passed = choosing.newest(framework, root, how, left_out=cannot_be_named)
        seen.update((each.step.path, each) for each in passed)
        if found is None:
            break
        seen[found.step.path] = found
        newest = newest or found
        new = {path: found for path in framework.pointers(found.step) if path in wanted}
        if not new:
            break
        targets |= new
    pointers = tuple(
        _pointer(framework, path, was, targets.get(path), list(seen.values())) for path, was in before.items()
    )
    torn = tuple(
        Torn(each, Reason.INCOMPLETE if each.deep is None else Reason.DAMAGED)
        for each in seen.values()
        if each.state is State.TORN
    )
    return Findings(pointers, torn, newest, tuple(seen.values()))


def _read(path: Path, root: Path) -> _Was:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return _Was(None)
    except OSError as error:
        return _Was(None, problem=error.strerror or str(error))
    if stat.S_ISLNK(status.st_mode):
        return _Was(status, problem="is a symbolic link, which is neither followed nor replaced")
    if not stat.S_ISREG(status.st_mode):
        return _Was(status, problem="is no plain file")
    if status.st_nlink > 1:
        return _Was(status, problem="has another name (a hard link), which would keep the old text")
    try:
        return _Was(status, read_plain(path, POINTER_BYTES_MAX, within=root))
    except OSError as error:
        return _Was(status, problem=error.strerror or str(error))


def _pointer(framework: Framework, path: Path, was: _Was, target: Judged | None, judged: list[Judged]) -> Pointer:
    data = framework.pointers(target.step).get(path, b"") if target is not None else b""
    if was.problem:
        return Pointer(path, Pointing.UNREADABLE, was.problem, target, data, was)
    if was.status is None:
        return Pointer(path, Pointing.MISSING, "", target, data, was)
    text = was.data.strip()
    named = next(
        (each for each in judged if text and framework.pointers(each.step).get(path, b"").strip() == text), None
    )
    shown = named.step.path.name if named is not None else _shown(text)
    if named is None:
        state = Pointing.UNKNOWN
    elif target is not None and named.step == target.step:
        state = Pointing.RIGHT
    else:
        state = _OF_STATE[named.state]
    return Pointer(path, state, shown, target, data, was)


def _shown(text: bytes) -> str:
    if not text:
        return "it is empty"
    said = text.decode("ascii", "backslashreplace")
    return repr(said) if len(said) <= _SHOWN_MAX and said.isprintable() else f"{len(text)} bytes"


def changed_just_now(root: Path, findings: Findings) -> str:
    """Say which file was changed so lately that a run perhaps still writes; empty: none.  Raises OSError."""
    pointers = {pointer.path for pointer in findings.pointers}
    changed = [
        (each.contents.tree.changed_at(), each.step.path) for each in findings.judged if each.contents is not None
    ]
    for directory in {root, *(each.step.path.parent for each in findings.judged)}:
        with os.scandir(directory) as entries:
            for entry in entries:
                if Path(entry.path) in pointers or entry.name.startswith(QUARANTINED):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    changed.append((max(status.st_mtime, status.st_ctime), Path(entry.path)))
    at, path = max(changed, key=lambda each: each[0], default=(0.0, root))
    age_s = time.time() - at
    return f"{path} was changed {max(0.0, age_s):.0f} s ago" if abs(age_s) < QUIET_S else ""


def rewrite(pointer: Pointer, root: Path) -> None:
    """Have a pointer file name its target, by atomic replace with owner and mode as they were.

    Raises:
        RefusedError: nothing was changed; or only the new name may not be durable.
    """
    if pointer.was.problem:
        raise RefusedError(pointer.was.problem)
    assert pointer.target is not None, "the caller looks"
    _require_unchanged(pointer.target)
    try:
        _require_as_read(pointer)
        directory, was = os.stat(pointer.path.parent), pointer.was.status
        mode, owner = _NEW_MODE, None
        if was is not None:
            _require_owner(was, directory)
            mode, owner = stat.S_IMODE(was.st_mode), (was.st_uid, was.st_gid)
        elif os.geteuid() == 0:
            owner = (directory.st_uid, directory.st_gid)
        write_atomically(pointer.path, pointer.data, mode=mode, within=root, owner=owner)
    except OSError as error:
        raise RefusedError(f"{error.filename or pointer.path}: {error.strerror or error}") from error


def _require_as_read(pointer: Pointer) -> None:
    was = pointer.was.status
    try:
        now = os.stat(pointer.path, follow_symlinks=False)
    except FileNotFoundError:
        now = None
    if (now and _fact(now)) != (was and _fact(was)):
        raise RefusedError("it was changed since it was read")


def put_aside(torn: Torn, framework: Framework, root: Path) -> Path:
    """Rename a torn checkpoint within its directory; return its new path.

    Raises:
        RefusedError: nothing was changed; or only the new name may not be durable.
    """
    path = torn.judged.step.path
    if framework.finds is not None and framework.finds.search(torn.to.name):
        raise RefusedError(f"{framework.title} finds checkpoints by a part of the name, also as {torn.to.name}")
    _require_damage(torn.judged)
    _require_unchanged(torn.judged)
    try:
        _require_owner(os.stat(path, follow_symlinks=False), os.stat(path.parent))
        return _rename(torn, root)
    except OSError as error:
        raise RefusedError(f"{error.filename or path}: {error.strerror or error}") from error


def _require_damage(judged: Judged) -> None:
    """Refuse what is perhaps whole: it could not be read, holds links, or is perhaps still being written."""
    contents = judged.contents
    if contents is None or (judged.deep is not None and judged.deep.unread):
        raise RefusedError("it could not be read as a whole, which says nothing about its bytes")
    if contents.tree.odd:
        raise RefusedError(f"{min(contents.tree.odd)} in it is no plain file: perhaps the framework can read it")
    if not contents.tree.quiet():
        raise RefusedError("it was changed just now: perhaps it is still being written")
    for name in contents.tree.files:
        try:
            os.close(contents.tree.descriptor(name))
        except ReadError as error:
            raise RefusedError(f"it could not be read as a whole: {error}") from error


def _rename(torn: Torn, root: Path) -> Path:
    path, to = torn.judged.step.path, torn.to
    directory = open_directory(path.parent, within=root)
    try:
        count = 1
        while os.path.lexists(to):
            count += 1
            to = torn.to.with_name(f"{torn.to.name}.{count}")
        os.rename(path.name, to.name, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    finally:
        os.close(directory)
    return to


def _require_unchanged(judged: Judged) -> None:
    path = judged.step.path
    try:
        now = Tree(path)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or error}") from error
    before = judged.contents.tree if judged.contents is not None else None
    if before is None or _facts(now) != _facts(before):
        raise RefusedError(f"{path.name} was changed since it was judged")


def _require_owner(status: os.stat_result, directory: os.stat_result) -> None:
    """Refuse what is another user's; root may change what belongs to the owner of the directory."""
    us = os.geteuid()
    if status.st_uid != us and not (us == 0 and status.st_uid == directory.st_uid):
        raise RefusedError(f"it belongs to user id {status.st_uid}")


def _facts(tree: Tree) -> object:
    return {name: _fact(status) for name, status in tree.files.items()}, tree.odd, tree.directories


def _fact(status: os.stat_result) -> tuple[int, int, int, int, int]:
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns

"""Files that a stranger may have written are opened and read so that they can neither mislead nor stop the reader.

Only plain files are opened, without waiting for a pipe's other end, and no symbolic link is followed.  With `within`
that holds for each directory below it too, one after the other from its descriptor, so that nobody can swap one; and
each of them, and the file, belongs to the owner of `within`, to root or to us.  Links may lead to `within` itself.

A file that another node has replaced a moment ago may be stale here (ESTALE): a network file system takes the name for
the file of before, which is gone, until its cache is a few seconds older.

What may take for ever, or all memory, is tried in a child process first: a pickle of 300 bytes can do that without
running anything, by tuples that hold each one before them twice.

Parsing bytes that anybody may have written: whatever is wrong with them is one kind of error.

Millions of records are made without Python looking for cycles among them, which takes most of the time otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator


T = TypeVar("T")
STALE_PAUSES_S = (0.0, 0.1, 0.4, 1.0, 2.0, 3.0)  # longer than attributes of a new file are kept, by default
RECORD_BYTES_MAX = 1024 * 1024  # of a small file that holds one record
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # may be entered, and need not be readable


def open_descriptor(path: Path, *, within: Path | None = None, flags: int = 0) -> int:
    """Open a plain file for reading and return its descriptor; `flags` are more than those for reading.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened, is a link, a directory, a pipe or the like, or belongs to a stranger.
    """
    with naming(path):
        if within is None:
            return _plain(path, None, flags)
        with _parent(path, within) as (parent, owner):
            descriptor = _plain(path.name, parent, flags)
            try:
                _require_trusted(descriptor, owner)
            except OSError:
                os.close(descriptor)
                raise
            return descriptor


def open_plain(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a plain file for reading.  Raises OSError, as `open_descriptor`."""
    return os.fdopen(open_descriptor(path, within=within), "rb")


def open_directory(path: Path, *, within: Path) -> int:
    """Open a directory below `within` and return its descriptor.

    Raises:
        OSError: there is none, it is a link, or it belongs to a stranger.
    """
    with naming(path), _parent(path / "_", within) as (parent, _):
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)


def read_plain(path: Path, bytes_max: int = RECORD_BYTES_MAX, *, within: Path | None = None) -> bytes:
    """Return the content of a file.

    Raises:
        FileNotFoundError: there is none.
        OSError: as `open_descriptor`, it cannot be read, or it is larger than `bytes_max`.
    """

    def read() -> bytes:
        with open_plain(path, within=within) as file, naming(path):
            size = os.fstat(file.fileno()).st_size
            if size <= bytes_max:
                data = file.read(size + 1)  # a read makes room for what it is asked for
                if len(data) > size:  # it has grown meanwhile
                    data += file.read(bytes_max + 1 - len(data))
                if len(data) <= bytes_max:
                    return data
            raise OSError(errno.EFBIG, f"more than {bytes_max} bytes, which no such file has", str(path))

    return fresh(read)


def fresh(read: Callable[[], T]) -> T:
    """Return what opens and reads a file; it is called again, for some seconds, as long as the file is stale here.

    Raises:
        OSError: it cannot be read, or stays stale.
    """
    for pause_s in STALE_PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(pause_s)
    return read()


def trusts(owner: int, found: int) -> bool:
    """Tell whether a file of one user may stand in a directory of another: of root, of us, or of that one."""
    return found in (owner, 0, os.geteuid())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error name the whole path: relative to a descriptor, the system knows the end of it only."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
    except ValueError as error:  # a NUL in it
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def _plain(name: str | Path, directory: int | None, flags: int) -> int:
    descriptor = os.open(name, _FLAGS | flags, dir_fd=directory)
    plain = False
    try:
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
    finally:
        if not plain:
            os.close(descriptor)
    if not plain:
        raise OSError(errno.EINVAL, "not a plain file")
    return descriptor


@contextlib.contextmanager
def _parent(path: Path, within: Path) -> Iterator[tuple[int, int]]:
    """Go from `within` to the directory of `path`; give its descriptor, and the owner of `within`."""
    way = path.parent.relative_to(within).parts
    at = os.open(within, _WAY)
    try:
        owner = os.fstat(at).st_uid
        for part in way:
            if part == os.pardir:
                raise OSError(errno.EINVAL, f"leads out of {within}")
            below = os.open(part, _WAY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
            _require_trusted(at, owner)
        yield at, owner
    finally:
        os.close(at)


def _require_trusted(descriptor: int, owner: int) -> None:
    found = os.fstat(descriptor).st_uid
    if not trusts(owner, found):
        raise OSError(errno.EPERM, f"belongs to user id {found}, and the directory to {owner}: not read")


_STATM = Path("/proc/self/statm")


def comes_to_an_end(work: Callable[[], object], *, seconds: int, bytes_more: int) -> bool:
    """Tell whether `work` ends, with whatever result or error, within so much of processor time and more memory.

    Raises:
        OSError: no process can be made.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _limit(seconds, bytes_more)
            work()
            code = 0
        except MemoryError:
            pass
        except Exception:  # noqa: BLE001 - it is an end too, and who does it again meets it
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _limit(seconds: int, bytes_more: int) -> None:
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    size = int(_STATM.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    for which, wanted in ((resource.RLIMIT_CPU, used + seconds), (resource.RLIMIT_AS, size + bytes_more)):
        hard = resource.getrlimit(which)[1]
        resource.setrlimit(which, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class DecodeError(msgspec.MsgspecError):
    """The bytes are not what they should be: not JSON, not UTF-8, nested too deep, or of another shape."""


class MismatchError(DecodeError):
    """They are JSON, of another shape or type."""


class NewerFormatError(DecodeError):
    """A newer Stepkeeper wrote them."""


def decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Parse JSON.

    Raises:
        MismatchError: it is JSON of another shape.
        DecodeError: it is not JSON at all.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise MismatchError(str(error)) from error
    except UnicodeDecodeError as error:  # msgspec's own errors do not include it
        raise DecodeError(f"not UTF-8: {error.reason} (byte {error.start} of a text)") from error
    except RecursionError as error:
        raise DecodeError("nested too deep") from error
    except msgspec.MsgspecError as error:
        raise DecodeError(str(error)) from error


class _Format(msgspec.Struct, frozen=True):
    format: int = 1


_format: msgspec.json.Decoder[_Format] = msgspec.json.Decoder(_Format)


def decode_format(decoder: msgspec.json.Decoder[T], data: bytes, *, newest: int) -> T:
    """Parse JSON that has a `format`, which is looked at first: the other fields may mean something else there.

    Raises:
        NewerFormatError: its format is newer than `newest`.
        DecodeError: it is damaged.
    """
    check_format(data, newest=newest)
    return decode(decoder, data)


def check_format(data: bytes, *, newest: int) -> None:
    """Look at the `format` of JSON, and at nothing else.

    Raises:
        NewerFormatError: it is newer than `newest`.
        DecodeError: it is damaged.
    """
    found = decode(_format, data).format
    if found > newest:
        raise NewerFormatError(f"format {found} is newer than this Stepkeeper reads ({newest}): upgrade Stepkeeper")
    if found < 1:
        raise MismatchError(f"format {found}: there is none")


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collection of cycles; what has no cycle is freed as ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

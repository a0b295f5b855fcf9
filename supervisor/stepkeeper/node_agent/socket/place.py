"""Where the agent's socket lies.

Only root (or the agent's own user) may write to its directory or to any above it, so nobody else can put a socket, a
link or a file in its place.  What is there already and is not a socket of ours is never followed, moved or removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat

PATH_BYTES_MAX = 100  # of 107 that the kernel takes: the name is longer while the socket is made
MODE = 0o666  # anybody may connect: the kernel says who it is


class PlaceError(Exception):
    """The socket cannot be put there safely."""


class Place:
    """A listening socket at a path, and the lock that keeps a second agent away."""

    def __init__(self, path: str, *, backlog: int) -> None:
        """Listen at `path`.  A stale socket of an agent before is replaced in one rename.

        Raises:
            PlaceError: the directory is not safe, or something else is in the way.
        """
        self.path = _checked(path)
        self._name = os.path.basename(self.path)
        self._directory = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._lock = -1
        self._inode: tuple[int, int] | None = None
        try:
            self._lock = self._locked()
            self.socket = self._listen(backlog)
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        """Stop listening, and remove the socket if it is still ours."""
        self.socket.close()
        with contextlib.suppress(FileNotFoundError):  # somebody tidied up before us
            found = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self._name, dir_fd=self._directory)
        self._release()

    def _release(self) -> None:
        for descriptor in (self._lock, self._directory):
            if descriptor >= 0:
                os.close(descriptor)

    def _locked(self) -> int:
        name = f"{self._name}.lock"
        where = f"{os.path.dirname(self.path)}/{name}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=self._directory)
        except OSError as error:
            raise PlaceError(f"{where}: {error.strerror}; remove what is there if it is not yours") from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            os.close(descriptor)
            raise PlaceError(f"{where}: it is not a lock file of ours; remove it if you know what it is")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise PlaceError(f"{self.path}: another agent serves it; stop that one first") from None
        return descriptor

    def _listen(self, backlog: int) -> socket.socket:
        new = f".{self._name}.new"
        self._make_room(new, remove=True)
        self._make_room(self._name, remove=False)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.bind(f"{os.path.dirname(self.path)}/{new}")  # never follows a link in the last place
            os.chmod(new, MODE, dir_fd=self._directory)
            sock.listen(backlog)
            found = os.stat(new, dir_fd=self._directory, follow_symlinks=False)
            os.rename(new, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError as error:
            sock.close()
            raise PlaceError(f"{self.path}: cannot listen there: {error.strerror}") from error
        self._inode = (found.st_dev, found.st_ino)
        return sock

    def _make_room(self, name: str, *, remove: bool) -> None:
        """See that nothing, or a stale socket of ours, has the name: the lock says that no agent lives."""
        try:
            found = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            kind = stat.filemode(found.st_mode)
            raise PlaceError(
                f"{os.path.dirname(self.path)}/{name}: something else is there ({kind}, uid {found.st_uid}); "
                "the agent removes nothing that it did not make: remove it, or choose another path"
            )
        if remove:
            os.unlink(name, dir_fd=self._directory)


def _checked(path: str) -> str:
    """Return the path with its directory resolved; make that directory if only it is missing."""
    directory, name = os.path.split(path)
    if not os.path.isabs(path) or not name or len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise PlaceError(f"{path}: the socket's path must be absolute and at most {PATH_BYTES_MAX} bytes long")
    try:
        above = os.path.realpath(os.path.dirname(directory), strict=True)
        _check_owned(above)
        whole = os.path.join(above, os.path.basename(directory))
        with contextlib.suppress(FileExistsError):
            os.mkdir(whole, 0o755)
        resolved = os.path.realpath(whole, strict=True)
        _check_owned(resolved)
        _check_private(resolved)
    except OSError as error:
        raise PlaceError(f"{directory}: {error.strerror}; make the directory, owned by root, mode 0755") from error
    whole = os.path.join(resolved, name)
    if len(os.fsencode(whole)) > PATH_BYTES_MAX:
        raise PlaceError(f"{whole}: the socket's path must be at most {PATH_BYTES_MAX} bytes long")
    return whole


def _check_owned(directory: str) -> None:
    """See that no other user can replace the directory or one above it."""
    while True:
        found = os.stat(directory, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            raise PlaceError(f"{directory}: not a directory; choose another path for the socket")
        if found.st_uid not in (0, os.geteuid()):
            raise PlaceError(
                f"{directory}: it belongs to uid {found.st_uid}; the socket's path must be root's all along"
            )
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise PlaceError(f"{directory}: others may write to it; `chmod go-w` it, or choose another path")
        if directory == "/":
            return
        directory = os.path.dirname(directory)


def _check_private(directory: str) -> None:
    """See that others cannot even add to the directory, as they may in /tmp."""
    if os.stat(directory, follow_symlinks=False).st_mode & 0o022:
        raise PlaceError(f"{directory}: others may write to it; give the socket a directory of its own, mode 0755")

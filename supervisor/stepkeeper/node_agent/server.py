"""The agent's socket: one thread serves every connection, and nothing in it waits for anybody.

Not here: what a message gets (`requests.py`), and anything that asks Slurm.  `Place` is where the socket lies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable

from stepkeeper.errors import UsageError
from stepkeeper.log import Log
from stepkeeper.loop_tools import reraise, thread
from stepkeeper.node_agent import expedite_requeue
from stepkeeper.node_agent.connections import ROOT, BoundedLog, Connection, Door, EndedError, Limits
from stepkeeper.node_agent.protocol import FromAgent, Refused, Seen, credentials, decode_to_agent, encode
from stepkeeper.node_agent.requests import Requests
from stepkeeper.slurm.nodes import NodeCommands
from stepkeeper_trainer.formats.plain import DecodeError

ACCEPTS_PER_TURN = 64
PAUSE_S = 0.05  # of accepting, when there are too many or no descriptors are left
SWEEP_S = 0.5
CLOSE_WITHIN_S = 5.0


class AgentSocket:
    """Serves the jobs of this node.

    `on_look` and `open_incidents` are called on the serving thread and must return at once.  `publish` may be called
    on any thread.  What fails by our own mistake goes to `on_failure`, and ends the thread.
    """

    def __init__(
        self,
        path: str,
        *,
        node: str,
        acts: bool,
        client: NodeCommands,
        on_look: Callable[[], None],
        open_incidents: Callable[[], list[Seen]],
        log: Log,
        limits: Limits | None = None,
        version: str = "",
        on_failure: Callable[[BaseException], object] = reraise,
    ) -> None:
        self._path = path
        self._log = log
        self._limits = limits = limits or Limits()
        self._on_failure = on_failure
        self._refusals = BoundedLog(log, limits)
        self._expediter = expedite_requeue.RequeueExpediter(client, log, on_failure=self._failed)
        self._requests = Requests(
            self,
            node=node,
            acts=acts,
            version=version,
            client=client,
            expediter=self._expediter,
            on_look=on_look,
            open_incidents=open_incidents,
            log=log,
            refusals=self._refusals,
            limits=limits,
            on_failure=self._failed,
        )
        self._place: Place | None = None
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[float], None]] = deque()
        self._connections: dict[int, Connection] = {}
        self._number = 0
        self._door = Door(limits)
        self._paused_until: float | None = None
        self._sweep_at: float | None = None
        self._closing = False
        self._closing_lock = threading.Lock()  # nobody writes to the descriptor once it is closed
        self._thread = thread("socket", self._serve, self._failed)

    # -- for the agent ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen and serve.

        Raises:
            PlaceError: the socket cannot be put there safely.
        """
        self._place = Place(self._path, backlog=self._limits.backlog)
        self._selector.register(self._place.socket, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._requests.questions.start()
        self._expediter.start()
        self._thread.start()
        self._log.info("socket_listening", path=self._place.path)

    def publish(self, seen: Seen) -> None:
        """Tell every job on this node about an incident."""
        packet = encode(seen)

        def broadcast(now: float) -> None:
            for connection in list(self._connections.values()):
                if connection.job_id is not None:
                    self._send(connection, packet, now)

        self.post(broadcast)

    @property
    def alive(self) -> bool:
        """Whether every thread of it works: the watchdog asks."""
        return self._thread.is_alive() and self._expediter.alive

    def close(self) -> None:
        """Close every connection and remove the socket; jobs that wait to be expedited are given up."""
        with self._closing_lock:
            if self._closing and self._wake < 0:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_WITHIN_S)
            self._requests.questions.close(CLOSE_WITHIN_S)
        else:
            self._selector.close()
        self._expediter.close(CLOSE_WITHIN_S)
        if self._place is not None:
            self._place.close()
            self._place = None
        with self._closing_lock:
            os.close(self._wake)
            self._wake = -1

    # -- for the requests --------------------------------------------------------------------

    def post(self, call: Callable[[float], None]) -> None:
        """Have something done on the serving thread."""
        with self._closing_lock:
            if self._closing:
                return  # nobody is there to hear it
            self._calls.append(call)
            os.eventfd_write(self._wake, 1)

    def newest_attempt(self, job_id: int) -> int:
        """Return the highest restart count that has joined for a job and is still connected."""
        return max((each.restart_count for each in self._connections.values() if each.job_id == job_id), default=0)

    def connection(self, number: int) -> Connection | None:
        """Return a connection that is still there."""
        return self._connections.get(number)

    def send(self, number: int, message: FromAgent) -> None:
        """Send to a connection that is still there."""
        connection = self._connections.get(number)
        if connection is not None:
            self._send(connection, encode(message), time.monotonic())

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            with self._closing_lock:
                self._closing = True
            for connection in list(self._connections.values()):
                self._end(connection)
            self._selector.close()

    def _turn(self) -> None:
        wake_at = [at for at in (self._sweep_at, self._paused_until) if at is not None]
        limit = max(0.0, min(wake_at) - time.monotonic()) if wake_at else None
        events = self._selector.select(limit)
        now = time.monotonic()
        for key, _ in events:
            if isinstance(key.data, Connection):
                self._converse(key.data, now)
        self._run_calls(now)
        if self._place is not None and any(key.fileobj is self._place.socket for key, _ in events):
            self._accept(self._place.socket, now)
        if self._paused_until is not None and now >= self._paused_until and self._place is not None:
            self._paused_until = None
            self._selector.register(self._place.socket, selectors.EVENT_READ)
        if self._sweep_at is not None and now >= self._sweep_at:
            self._sweep(now)

    def _run_calls(self, now: float) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return  # nobody called
        for _ in range(len(self._calls)):
            self._calls.popleft()(now)

    def _accept(self, listener: socket.socket, now: float) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if not self._door.accepts.take(now):
                self._pause(listener, now)
                return
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it left before we came to it
            except OSError as error:
                self._refusals.refused(now, uid=ROOT, what="connect", why=f"cannot accept: {error.strerror}")
                self._pause(listener, now)
                return
            self._admit(sock, now)

    def _pause(self, listener: socket.socket, now: float) -> None:
        self._selector.unregister(listener)
        self._paused_until = now + PAUSE_S

    def _admit(self, sock: socket.socket, now: float) -> None:
        sock.setblocking(False)  # noqa: FBT003 - the method takes no keyword
        try:
            peer = credentials(sock)
        except OSError:
            sock.close()  # it left already
            return
        if why := self._door.refusal(peer.uid, now, self._connections.values()):
            self._refusals.refused(now, uid=peer.uid, what="connect", why=why, pid=peer.pid)
            with contextlib.suppress(OSError):  # it left before it was refused: that is fine too
                sock.send(encode(Refused(what="connect", why=why)), socket.MSG_NOSIGNAL)
            sock.close()
            return
        self._number += 1
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._limits.send_buffer_bytes)
        connection = Connection(self._number, sock, peer, self._limits, now)
        if (leaves := self._door.makes_room(peer.uid, self._connections.values())) is not None:
            self._end(leaves)
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._watch(now)

    def _converse(self, connection: Connection, now: float) -> None:
        if connection.number not in self._connections:
            return  # ended earlier in this turn
        try:
            self._hear(connection, now)
        except EndedError as error:
            self._end(connection, error, now)

    def _hear(self, connection: Connection, now: float) -> None:
        """Take one packet: the others wait for the next turn, so that nobody is starved."""
        packet = connection.receive()
        if packet is None:
            return
        if not self._door.hears(connection, now):
            raise EndedError("too many messages")
        try:
            message = decode_to_agent(packet)
        except DecodeError as error:
            raise EndedError("a message that cannot be read") from error
        if message is not None:
            self._requests.handle(connection, message, now)

    def _send(self, connection: Connection, packet: bytes, now: float) -> None:
        try:
            connection.send(packet)
        except EndedError as error:
            self._end(connection, error, now)

    def _end(self, connection: Connection, error: EndedError | None = None, now: float = 0.0) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if error is not None and error.blame:
            peer = connection.peer
            self._refusals.refused(now, uid=peer.uid, what="connection", why=str(error), pid=peer.pid)

    # -- time -----------------------------------------------------------------------------------------------------

    def _watch(self, now: float) -> None:
        """See that the connections are swept soon; with nothing to watch the thread sleeps."""
        if self._sweep_at is None:
            self._sweep_at = now + SWEEP_S

    def _sweep(self, now: float) -> None:
        self._sweep_at = None
        for connection in list(self._connections.values()):
            if connection.overdue(now):
                self._end(connection, EndedError(f"it did not join in {self._limits.unjoined_s:g} s"), now)
        if any(each.job_id is None for each in self._connections.values()):
            self._watch(now)

    def _failed(self, error: BaseException) -> None:
        self._log.error("socket_failed", error=repr(error))
        self._on_failure(error)


# Where the agent's socket lies.
#
# Only root (or the agent's own user) may write to its directory or to any above it, so nobody else can put a socket, a
# link or a file in its place.  What is there already and is not a socket of ours is never followed, moved or removed.

PATH_BYTES_MAX = 100  # of 107 that the kernel takes: the name is longer while the socket is made
MODE = 0o666  # anybody may connect: the kernel says who it is


class PlaceError(UsageError):
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

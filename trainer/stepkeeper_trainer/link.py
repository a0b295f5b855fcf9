"""The rank's end of the watcher's Unix datagram socket, and what the rank says there of its progress.

The socket never blocks: a full, dead or missing one costs a message, never a step.  Words that must arrive
wait in a small outbox and go out at a later boundary, before anything that was said after them.  Rank 0 says its
progress each step, the others at most once a second.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer import __version__
from stepkeeper_trainer.formats.messages import (
    MESSAGE_BYTES_MAX,
    FromRank,
    Hello,
    Progress,
    SaveRequest,
    decode_to_rank,
    encode,
    shorten,
)
from stepkeeper_trainer.formats.plain import DecodeError
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from stepkeeper_trainer.observe.straggler_probe import StragglerProbe


HELLO_AGAIN_S = 5.0  # a watcher that was restarted between two of our words is met anew
HELLO_RETRY_S = 1.0  # while the socket is dead
OUTBOX_MAX = 64
READS_MAX = 32  # of datagrams at one boundary
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Link:
    """Says how training goes, and hears what the supervisor asks for."""

    def __init__(self, address: str | None, launch: str) -> None:
        """Make the socket; `address` None means that there is no supervisor.  Never raises for a dead one."""
        self._launch = launch
        self._address = f"\0{address[1:]}" if address and address.startswith("@") else address or ""
        self._socket: socket.socket | None = None
        self._outbox: deque[FromRank] = deque(maxlen=OUTBOX_MAX)
        self._lock = threading.Lock()  # the saves' thread speaks too; nothing below it waits
        self._hello: Hello | None = None
        self._hello_at = 0.0
        self._try_at = 0.0
        self.dead = False  # the last word was refused: no watcher listens
        self.dead_since = -math.inf  # of the monotonic clock; where no watcher was ever there, always
        self.back_at = -math.inf  # when a watcher listened again; where one was there all the time, never
        self._met = False
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)  # noqa: FBT003
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind("")  # Linux picks a free abstract name

    @property
    def attached(self) -> bool:
        """Whether a supervisor was announced, alive or not."""
        return self._socket is not None

    def greet(self, hello: Hello, *, keep: bool = False) -> None:
        """Introduce this rank, now and again whenever a watcher may have been restarted; `keep` as in `send`."""
        with self._lock:
            self._hello = hello
            if not keep:
                self._send_hello(time.monotonic())
        if keep:
            self.send(hello, keep=True)

    def send(self, message: FromRank, *, keep: bool = False) -> bool:
        """Send one word, after those that wait; with `keep` it is tried again later if it cannot go now."""
        if self._socket is None:
            return False
        with self._lock:
            now = time.monotonic()
            if self.dead and now < self._try_at:
                sent = False
            else:
                if self.dead or now - self._hello_at > HELLO_AGAIN_S:
                    self._send_hello(now)
                sent = self._send_kept() and self._put(message)
            if not sent and keep:
                self._outbox.append(message)
        return sent

    def flush(self, within_s: float = 0.0) -> bool:
        """Send what waits in the outbox, trying for `within_s`; true when nothing is left."""
        limit_at = time.monotonic() + within_s
        while True:
            with self._lock:
                if self._send_kept():
                    return True
            if self.dead or time.monotonic() >= limit_at:
                return False
            time.sleep(0.01)

    def receive(self) -> list[SaveRequest]:
        """Return the requests that have arrived, from our own user or root only."""
        requests: list[SaveRequest] = []
        if self._socket is None:
            return requests
        for _ in range(READS_MAX):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    MESSAGE_BYTES_MAX * 2, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT
                )
            except OSError:
                break  # nothing more, or an error of an earlier send: both mean "not now"
            uid = _sender_uid(ancillary)
            if uid is None or uid not in (os.getuid(), 0):
                warn("request_refused", why="sent by another user", uid=uid)
                continue
            try:
                request = decode_to_rank(data)
            except DecodeError:
                warn("request_refused", why="not JSON")
                continue
            if request is not None and request.launch in ("", self._launch):
                requests.append(request)
        return requests

    def _send_hello(self, now: float) -> None:
        self._hello_at = now
        if self._hello is not None and self._socket is not None:
            self._put(self._hello)

    def _send_kept(self) -> bool:
        """Send what waits, in order; true when nothing is left."""
        while self._outbox:
            if not self._put(self._outbox[0]):
                return False
            self._outbox.popleft()
        return True

    def _put(self, message: FromRank) -> bool:
        assert self._socket is not None
        data = encode(msgspec.structs.replace(message, launch=self._launch))
        try:
            self._socket.sendto(data, socket.MSG_DONTWAIT, self._address)
        except (BlockingIOError, InterruptedError):
            return False  # the watcher is slow: it is there, and this word may be lost
        except OSError as error:  # ECONNREFUSED, ENOENT: no watcher listens
            if not self.dead:
                warn("watcher_lost", why=error.strerror)
                if self._met:
                    self.dead_since = time.monotonic()
            self.dead = True
            self._try_at = time.monotonic() + HELLO_RETRY_S
            return False
        self._met = True
        if self.dead:
            say("watcher_back")
            self.dead = False
            self.back_at = time.monotonic()
        return True


def _sender_uid(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack_from(data)[1])
    return None


PROGRESS_EVERY_S = 1.0


class Reporter:
    """Turns steps into messages."""

    def __init__(
        self,
        link: Link,
        rank: int,
        world_size: int,
        straggler_probe: StragglerProbe | None,
        *,
        total_steps: int | None = None,
        framework: str = "",
    ) -> None:
        self._link, self._rank, self._world_size, self._straggler_probe = link, rank, world_size, straggler_probe
        self._total_steps, self._framework = total_steps, framework
        self.held_step: int | None = None  # the newest of them
        self._said_at = self._stepped_at = time.monotonic()
        self.resumed(None)

    def resumed(self, step: int | None, *, saved: bool = True, memory: str = "") -> None:
        """Say where training goes on, and where this node holds snapshots; the first step counts from here.

        `saved`: a step directory has that step.
        """
        self._memory, self._in_memory = memory, not saved
        self._stepped_at = time.monotonic()
        if self._straggler_probe is not None:
            self._straggler_probe.restart()
        self._link.greet(self._hello(step))

    def unable(self, why: str) -> None:
        """Say that this rank saves nothing on request any more; `Link.flush` says it where it cannot be said now."""
        self._link.greet(msgspec.structs.replace(self._hello(None), unable=shorten(why)), keep=True)

    def _hello(self, step: int | None) -> Hello:
        return Hello(
            rank=self._rank,
            world_size=self._world_size,
            pid=os.getpid(),
            version=__version__,
            resumed_step=step,
            in_memory=self._in_memory,
            total_steps=self._total_steps,
            framework=self._framework,
            memory=self._memory,
        )

    def step(self, step: int, tokens: int, loss: float | None) -> None:
        """Say that a step was completed."""
        now = time.monotonic()
        step_seconds, self._stepped_at = now - self._stepped_at, now
        if self._straggler_probe is not None:
            self._straggler_probe.step(now)
        if self._rank == 0 or now - self._said_at >= PROGRESS_EVERY_S:
            self._say(step, tokens, loss, step_seconds)

    def alive(self, step: int, tokens: int, loss: float | None) -> None:
        """Say that the rank is alive between steps."""
        if self._straggler_probe is not None:
            self._straggler_probe.disturb()
        if time.monotonic() - self._said_at >= PROGRESS_EVERY_S:
            self._say(step, tokens, loss, None)

    def _say(self, step: int, tokens: int, loss: float | None, step_seconds: float | None) -> None:
        self._said_at = time.monotonic()
        rounded = None if step_seconds is None else round(step_seconds, 6)
        not_finite = loss is not None and not math.isfinite(loss)
        own = self._straggler_probe.take() if self._straggler_probe is not None else None
        self._link.send(
            Progress(
                rank=self._rank,
                step=step,
                tokens=tokens,
                loss=None if not_finite else loss,
                step_seconds=rounded,
                not_finite=not_finite,
                own_seconds=None if own is None else round(own.seconds, 6),
                loading_seconds=None if own is None else round(own.loading, 6),
                held_step=self.held_step,
            )
        )

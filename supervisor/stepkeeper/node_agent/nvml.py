"""NVML seen from a distance: a child process calls it (`nvml_child`), this side keeps the time.

Whatever the driver does, nothing here waits for it: a call that does not come back is reported again and again, a
child that dies is started again, and one that cannot even be killed is left behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from stepkeeper.isolation import flags
from stepkeeper.node_agent import readings
from stepkeeper.node_agent.readings import Begins, FromChild, GpuHealth, NvmlState, NvmlStatus, Reading, Stoppable
from stepkeeper.run_store.lines import parsed

COMMAND = ("-m", "stepkeeper.node_agent.nvml_child")
STARTING = "start of the NVML process"
STDERR_BYTES = 1000  # the last of them are reported when it dies
DIES_WITHIN_S = 1.0  # after SIGKILL; longer means uninterruptible sleep in the driver


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for what, in seconds."""

    start_takes_s: float = 20.0  # to read Python's files, on a busy node or a slow file system
    stuck_after_s: float = 10.0  # a call that lasts longer is reported, with XID 119 they last 6 to 45 s
    stuck_again_s: float = 30.0  # then again after this long
    abandon_after_s: float = 300.0  # a child stuck for this long is killed: a new one may fare better
    restart_after_s: float = 1.0  # a child that ended, also for want of a driver; twice as long after each end
    restart_after_max_s: float = 240.0
    absent_again_s: float = 0.0  # at least, where there is no driver
    lasted_s: float = 60.0  # a child that lived this long starts the count anew
    absent_lasts_s: float = 120.0  # an absence is reported once more then, with its length: at boot the driver is late


class Calls:
    """Which calls are under way, and whether one of them is stuck.  Pure: the caller brings the clock."""

    def __init__(self, now: float, patience: Patience, *, hung_since: float | None = None) -> None:
        """`hung_since`: since when the process before did not come back, where it was given up for that."""
        self._patience = patience
        self.hung_since = hung_since
        self._lanes: dict[str, tuple[Begins, float]] = {}
        self._report_at = 0.0
        self.is_stuck = False
        self.begin(Begins(lane="", call=STARTING, takes_s=patience.start_takes_s), now)

    def begin(self, begins: Begins, now: float) -> None:
        """Note that a thread begins its next call, so that the one before is over."""
        self._lanes.pop("", None)
        self._lanes[begins.lane] = (begins, now)
        if begins.call == readings.REST and begins.lane == readings.HEALTH:
            self.hung_since = None  # every GPU was asked

    def worst(self, now: float) -> tuple[str, float]:
        """Return the call that is longest overdue, and by how many seconds; negative where it is not yet due."""
        begins, since = min(self._lanes.values(), key=lambda lane: lane[1] + lane[0].takes_s)
        return begins.call, now - since - begins.takes_s

    def report(self, now: float) -> NvmlStatus | None:
        """Return what is stuck, when it is time to say so (again)."""
        call, overdue_s = self.worst(now)
        if overdue_s < self._patience.stuck_after_s:
            return None
        if not self.is_stuck:
            self.is_stuck, self._report_at = True, now
        if now < self._report_at:
            return None
        self._report_at = now + self._patience.stuck_again_s
        stuck_s = overdue_s if self.hung_since is None else now - self.hung_since
        return _status(NvmlState.STUCK, f"{call} does not come back", call=call, stuck_s=stuck_s)

    def is_back(self, now: float) -> bool:
        """Tell, once, that what was stuck is not any more."""
        if not self.is_stuck or self.worst(now)[1] >= self._patience.stuck_after_s:
            return False
        self.is_stuck = False
        return True

    def wait_s(self, now: float) -> float:
        """Return after how many seconds there is something to report, or the child is to be abandoned."""
        overdue_s = self.worst(now)[1]
        report_s = self._report_at - now if self.is_stuck else self._patience.stuck_after_s - overdue_s
        return max(0.0, min(report_s, self._patience.abandon_after_s - overdue_s))


class _Child:
    """The process and its pipes."""

    def __init__(self, arguments: list[str]) -> None:
        """Start it.  Raises OSError."""
        self.process = subprocess.Popen(
            [sys.executable, *flags(), *COMMAND, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C at a terminal is for us
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._out = self.process.stdout.fileno()
        self._err = self.process.stderr.fileno()
        self._open = {self._out, self._err}
        self._rest = b""
        self.words = b""

    def read(self, wait_s: float, *others: int) -> tuple[list[FromChild], bool]:
        """Wait until it or one of the other descriptors has something; return messages, and whether more may come."""
        poll = select.poll()
        for descriptor in (*self._open, *others):
            poll.register(descriptor, select.POLLIN)
        messages: list[FromChild] = []
        for descriptor, _ in poll.poll(max(0.0, wait_s) * 1000 + 1):
            if descriptor in self._open:
                data = os.read(descriptor, readings.LINE_BYTES_MAX)
                if not data:
                    self._open.discard(descriptor)
                elif descriptor == self._err:
                    self.words = (self.words + data)[-STDERR_BYTES:]
                else:
                    messages += self._messages(data)
        return messages, self._out in self._open

    def _messages(self, data: bytes) -> Iterator[FromChild]:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= readings.LINE_BYTES_MAX else b""
        for line in lines:
            if (message := parsed(readings.decoder, line)) is not None:
                yield message
            else:  # a library's own words on standard output: for people
                self.words = (self.words + line + b"\n")[-STDERR_BYTES:]

    def end(self) -> int | None:
        """Kill it and return its exit code; None where not even SIGKILL ends it."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to end
            return self.process.wait(0.0 if self._out in self._open else DIES_WITHIN_S)
        self.process.kill()
        try:
            return self.process.wait(DIES_WITHIN_S)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Give the pipes back.  A child that still lives sees its standard input end."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def said(self) -> str:
        """Return its last words, for people."""
        return self.words.decode(errors="replace").strip()


class NvmlProcess(Stoppable):
    """Keeps an NVML child running and hands its readings to a callback, on a thread of its own.

    The callback gets `NvmlStatus`, `NvmlXid`, `GpuHealth` and `Evidence`, and must not raise.
    """

    def __init__(
        self,
        callback: Callable[[Reading], None],
        *,
        health_every_s: float = 10.0,
        patience: Patience | None = None,
        on_failure: Callable[[BaseException], object],
    ) -> None:
        super().__init__("nvml", on_failure)
        self._callback = callback
        self._arguments = ["--health-every-s", f"{health_every_s:g}"]
        self._patience = patience or Patience()
        self._ready: NvmlStatus | None = None
        self._absent = ""
        self._absent_since: float | None = None
        self._absence_reported = False
        self._hung_since: float | None = None  # a new process may hang like the one before: that is one silence
        self.pid: int | None = None  # of the child that runs now

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        patience = self._patience
        pause_s = patience.restart_after_s
        while True:
            began = time.monotonic()
            self._live_one_life()
            if time.monotonic() - began >= patience.lasted_s:
                pause_s = patience.restart_after_s
            absent_s = patience.absent_again_s if self._absent_since is not None else 0.0
            if self._stopped(max(pause_s, absent_s)):
                return
            pause_s = min(2 * pause_s, patience.restart_after_max_s)

    def _live_one_life(self) -> None:
        """Start a child and follow it to its end."""
        try:
            child = _Child(self._arguments)
        except OSError as error:
            self._callback(_status(NvmlState.ENDED, f"cannot start the NVML process: {error}"))
            return
        self.pid = child.process.pid
        try:
            stuck_for_s = self._follow(child)
            if stuck_for_s and self._hung_since is None:
                self._hung_since = time.monotonic() - stuck_for_s
            code = child.end()
            if code is None:
                self._outlive(child, stuck_for_s)
                return
        finally:
            self.pid = None
            child.close()
        if code not in (readings.ENDS_ABSENT, readings.ENDS_TO_BEGIN_ANEW) and not self._stopped(0.0):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._callback(_status(NvmlState.ENDED, f"the NVML process ended: {how}; {child.said()}".rstrip("; ")))

    def _follow(self, child: _Child) -> float:
        """Pass on what the child says until it ends, we stop, or it is stuck for too long: return how long."""
        calls = Calls(time.monotonic(), self._patience, hung_since=self._hung_since)
        while True:
            messages, more = child.read(calls.wait_s(time.monotonic()), self._stop_read)
            for message in messages:
                if isinstance(message, Begins):
                    calls.begin(message, time.monotonic())
                else:
                    self._pass_on(message)
            now = time.monotonic()
            self._hung_since = calls.hung_since
            if not more or self._stopped(0.0):
                return 0.0
            if calls.is_back(now) and self._ready is not None:
                self._callback(msgspec.structs.replace(self._ready, at=time.time(), detail="NVML answers again"))
            if (report := calls.report(now)) is not None:
                self._callback(report)
            if calls.is_stuck and (stuck_s := calls.worst(now)[1]) >= self._patience.abandon_after_s:
                return stuck_s

    def _outlive(self, child: _Child, stuck_for_s: float) -> None:
        """Wait for a child that cannot be killed: a second one would only hang beside it.  Say so now and then."""
        since = time.monotonic() - stuck_for_s
        why = f"the NVML process {child.process.pid} cannot be killed: it hangs in the driver"
        while child.process.poll() is None:
            self._callback(_status(NvmlState.STUCK, why, stuck_s=time.monotonic() - since))
            if self._stopped(self._patience.stuck_again_s):
                return

    def _pass_on(self, reading: Reading) -> None:
        if isinstance(reading, NvmlStatus):
            if reading.state is NvmlState.READY:
                self._ready = reading
                self._absent = ""
                self._absent_since, self._absence_reported = None, False
            elif reading.state is NvmlState.ABSENT:
                if (report := self._absence(reading)) is None:
                    return
                reading = report
        self._callback(reading)

    def _absence(self, status: NvmlStatus) -> NvmlStatus | None:
        """Return what is to be reported of an absence; None where that was said already."""
        now = time.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        for_s = now - self._absent_since
        lasts = not self._absence_reported and for_s >= self._patience.absent_lasts_s
        if status.detail == self._absent and not lasts:
            return None
        self._absent = status.detail
        self._absence_reported = self._absence_reported or lasts
        return msgspec.structs.replace(status, stuck_s=for_s)


class Once(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at NVML gave."""

    status: NvmlStatus
    health: tuple[GpuHealth, ...] = ()


def once(within_s: float) -> Once:
    """Look at all GPUs once.  Returns in time (and a second for the child to die), whatever the driver does."""
    until = time.monotonic() + within_s
    try:
        child = _Child(["--once"])
    except OSError as error:
        return Once(status=_status(NvmlState.ENDED, f"cannot start the NVML process: {error}", once=True))
    status: NvmlStatus | None = None
    health: list[GpuHealth] = []
    call, more = STARTING, True
    try:
        while more and time.monotonic() < until:
            messages, more = child.read(until - time.monotonic())
            for message in messages:
                if isinstance(message, Begins):
                    call = message.call
                elif isinstance(message, NvmlStatus):
                    status = message
                elif isinstance(message, GpuHealth):
                    health.append(message)
        code = child.end()
    finally:
        child.close()
    if more:
        status = _status(NvmlState.STUCK, f"no answer within {within_s:g} s: {call}", call=call, stuck_s=within_s)
    elif status is None or code not in (0, readings.ENDS_ABSENT):
        detail = f"the NVML process ended with {code} in {call}; {child.said()}".rstrip("; ")
        status = _status(NvmlState.ENDED, detail)
    return Once(status=msgspec.structs.replace(status, once=True), health=tuple(health))


def _status(state: NvmlState, detail: str, *, call: str = "", stuck_s: float = 0.0, once: bool = False) -> NvmlStatus:
    return NvmlStatus(at=time.time(), state=state, detail=detail, call=call, stuck_s=stuck_s, once=once)

"""`stepkeeper status --web`: the report of a run that goes on, in a browser.  It reads the run directory only.

A caller has to know the token in the URL, and to call this machine by a name that no other site can have: a page
of another site reaches a port of ours by a name of its own (DNS rebinding), and knows no token.  Only GET is answered.
"""

from __future__ import annotations

import hmac
import json
import os
import pwd
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from stepkeeper import __version__, printing
from stepkeeper.errors import UsageError
from stepkeeper.run_analytics import reading, serving
from stepkeeper.run_analytics.follow import Look, leaving
from stepkeeper.run_analytics.glance import Glance
from stepkeeper.run_analytics.model import Checkpoint, micro
from stepkeeper.run_analytics.report import live, page
from stepkeeper.run_analytics.report.page import About
from stepkeeper.run_store.paths import RunDirectory

ADDRESS = "127.0.0.1"
HOSTS = frozenset((ADDRESS, "localhost", "::1"))  # as a browser may name this machine, by a tunnel too
CALLERS_MAX = 16
QUICK_EVERY_S = 1.0  # what all callers see is read at most so often
WHOLE_EVERY_S = 2.0
WHOLE_TIMES = 20  # no more than a twentieth of the time is spent on the whole run
DIGITS_MAX = 18  # of a version
FORWARDED_PORT = 8265  # of the reader's own computer, where the server has a socket
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": page.policy(live.SCRIPTS) + "; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Watched:
    """What all callers see: read once for all of them, and the less often the longer it takes."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._look = Look(run)
        self._reader = reading.Reader(run)
        self._reads_whole = threading.Lock()  # one caller reads it; the others see what was read before
        self._whole_at = 0.0  # when that is due, by the monotonic clock
        self._lock = threading.Lock()  # of what stands below
        self._quick_at = 0.0  # when a quick look is due
        self._glance = Glance(status=None)
        self._checkpoints: list[Checkpoint] = []
        self._parts: dict[str, str] = {}
        self._changed: dict[str, int] = {}  # part -> the version in which it changed
        self._version = 0
        self._problems: dict[str, str] = {}  # why the quick look, or the whole, could not be read
        self._about = About(name=run.path.name, path=str(run.path), made_at=micro(time.time()), version=__version__)

    def html(self) -> bytes:
        """Return the page."""
        self._read_whole_if_due()
        with self._lock:
            self._read_quickly_if_due()
            return live.document(self._about, self._parts, self._version).encode("utf-8", errors="replace")

    def news(self, since: int) -> bytes:
        """Return the parts that have changed since a version."""
        self._read_whole_if_due()
        with self._lock:
            self._read_quickly_if_due()
            parts = {
                name: self._parts[name] for name, at in self._changed.items() if at > since or since > self._version
            }
            problem = "; ".join(dict.fromkeys(self._problems.values()))
            return json.dumps({"version": self._version, "problem": problem, "parts": parts}).encode()  # in ASCII

    def _read_whole_if_due(self) -> None:
        """Read the whole run; where another caller does just now, wait for it only if nothing was ever read."""
        if time.monotonic() < self._whole_at or not self._reads_whole.acquire(blocking=not self._whole_at):
            return
        try:
            if time.monotonic() >= self._whole_at:
                self._read_whole()
        finally:
            self._reads_whole.release()

    def _read_whole(self) -> None:
        began = time.monotonic()
        try:
            seen = self._reader.see()
            started = reading.read(self._run, (attempt.number for attempt in seen.attempts))
            about = msgspec.structs.replace(self._about, started=started)
            parts = live.whole_parts(seen, about, self._reader.nodes.listed(_ranks_each(started)))
        except OSError as error:
            with self._lock:
                self._problems["whole"] = _in_words(error)
        else:
            with self._lock:
                self._about, self._checkpoints = about, seen.checkpoints
                self._put(parts)
                self._problems.pop("whole", None)
        ended = time.monotonic()
        self._whole_at = ended + max(WHOLE_EVERY_S, WHOLE_TIMES * (ended - began))

    def _read_quickly_if_due(self) -> None:
        if time.monotonic() < self._quick_at:
            return
        try:
            os.stat(self._run.path)  # of a directory that is gone, all files are only missing
            self._glance = self._look.look()
            self._problems.pop("quick", None)
        except OSError as error:
            self._problems["quick"] = _in_words(error)
        self._put(live.now_parts(self._glance, self._about, self._checkpoints, time.time()))
        self._quick_at = time.monotonic() + QUICK_EVERY_S

    def _put(self, parts: dict[str, str]) -> None:
        changed = {name: part for name, part in parts.items() if self._parts.get(name) != part}
        if changed:
            self._version += 1
            self._parts.update(changed)
            self._changed.update(dict.fromkeys(changed, self._version))


def _ranks_each(started: Sequence[reading.Started]) -> int | None:
    """Return how many ranks the newest attempt's settings put on a node; None where they leave that to Slurm."""
    said = started[-1].settings.get("tasks_per_node", "") if started else ""
    return int(said) if said.isdigit() else None


def _in_words(error: OSError) -> str:
    return printing.clean(f"{error.filename}: {error.strerror or error}" if error.filename else str(error))


class _Handler(serving.Handler):
    watched: Watched
    token: bytes

    def do_GET(self) -> None:  # noqa: N802 - as the base class names it
        """Answer who may ask."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or _name_of(hosts[0]) not in HOSTS:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, f"call this machine localhost or {ADDRESS}")
            return
        asked = urlsplit(self.path)
        token, _, wanted = asked.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(errors="replace"), self.token):
            self._refuse(
                HTTPStatus.FORBIDDEN, "the URL has no valid token; `stepkeeper status --web` printed the whole URL"
            )
            return
        match wanted:
            case "":
                self._say("text/html; charset=utf-8", self.watched.html())
            case "page.json":
                self._say("application/json", self.watched.news(_version(asked.query)))
            case _:
                self._refuse(HTTPStatus.NOT_FOUND, "there are the page itself and page.json")

    def _say(self, kind: str, body: bytes) -> None:
        self.say(HTTPStatus.OK, kind, body, HEADERS)

    def _refuse(self, status: HTTPStatus, why: str, headers: dict[str, str] | None = None) -> None:
        self.say(
            status, "text/plain; charset=utf-8", f"{status.phrase}: {why}\n".encode(), {**HEADERS, **(headers or {})}
        )

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request of ours; the words of the caller are not repeated."""
        del message, explain
        if code == HTTPStatus.NOT_IMPLEMENTED:  # the base class knows no such method here
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "the page can only be read", {"Allow": "GET"})
        else:
            self._refuse(HTTPStatus(code), "not a request for this page")


def _name_of(host: str) -> str:
    """Return the name of a Host header, without its port.

    >>> _name_of("localhost:8000"), _name_of("[::1]:8000"), _name_of("127.0.0.1"), _name_of("evil.example:80")
    ('localhost', '::1', '127.0.0.1', 'evil.example')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _version(query: str) -> int:
    """Return the version that a browser has; 0 where it says none."""
    since = parse_qs(query).get("since", ["0"])[0]
    return int(since) if since.isascii() and since.isdigit() and len(since) <= DIGITS_MAX else 0


def listen(run: RunDirectory, *, port: int = 0, socket_path: Path | None = None) -> tuple[serving.Server, str]:
    """Return a server of a run's page, and the token that its callers have to know.

    Raises:
        StepkeeperError: the port or the socket cannot be had.
    """
    token = secrets.token_urlsafe(24)

    class Handler(_Handler):
        pass

    Handler.watched, Handler.token = Watched(run), token.encode()
    where = socket_path if socket_path is not None else (ADDRESS, port)
    try:
        return serving.Server(where, Handler, callers_max=CALLERS_MAX), token
    except OSError as error:
        what = f"--socket {socket_path}" if socket_path is not None else f"--port {port}"
        raise UsageError(f"{what}: {error.strerror or error}; name another one, or none for a free port") from error
    except OverflowError as error:
        raise UsageError(f"--port {port}: a port is a number from 1 to 65535") from error


def serve(run: RunDirectory, *, port: int = 0, socket_path: Path | None = None) -> None:
    """Show a run in browsers until somebody presses Ctrl-C.

    Raises:
        StepkeeperError: the port or the socket cannot be had.
    """
    server, token = listen(run, port=port, socket_path=socket_path)
    with server, leaving():
        for line in _how_to_open(server, token):
            printing.say(line)
        sys.stdout.flush()
        server.serve_forever(poll_interval=0.5)


def _how_to_open(server: serving.Server, token: str) -> list[str]:
    there = f"{pwd.getpwuid(os.geteuid()).pw_name}@{socket.gethostname()}"
    if server.socket_path is not None:
        way, port = f"{FORWARDED_PORT}:{server.socket_path}", FORWARDED_PORT
    else:
        way, port = f"{server.server_port}:{ADDRESS}:{server.server_port}", server.server_port
    return [
        f"http://{ADDRESS}:{port}/{token}/",
        "",
        "Anyone with this URL can read the page. From another computer, first run:",
        f"    ssh -N -L {shlex.quote(way)} {there}",
        "Ctrl-C ends it; the run continues.",
    ]

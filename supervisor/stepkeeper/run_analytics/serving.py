"""A small HTTP server for those who look at a run: a few callers at a time, each within seconds; and the metrics there.

Imported only where it is asked for: `http.server` costs 30 ms.
"""

from __future__ import annotations

import os
import socket
import socketserver
import stat
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CALL_WITHIN_S = 5.0


class Server(ThreadingHTTPServer):
    """Answers at most `callers_max` callers at a time; others are turned away."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int] | Path, handler: type[BaseHTTPRequestHandler], *, callers_max: int
    ) -> None:
        """Listen at an address and a port, or at a Unix socket that this account alone may open.

        Raises:
            OSError: the port is taken, the address is not of this node, or something else has the socket's name.
        """
        self._callers = threading.BoundedSemaphore(callers_max)
        self.request_queue_size = callers_max
        self.socket_path = address if isinstance(address, Path) else None
        self._is_bound = False  # to the socket, whose name is ours then
        if self.socket_path is not None:
            self.address_family = socket.AF_UNIX
            _remove_dead(self.socket_path)
        super().__init__(str(address) if isinstance(address, Path) else address, handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind.  No name is looked up, which takes seconds on a node without a name server."""
        if self.socket_path is None:
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
            return
        before = os.umask(0o177)
        try:
            self.socket.bind(str(self.socket_path))
            self._is_bound = True
        finally:
            os.umask(before)
        self.server_address, self.server_name, self.server_port = str(self.socket_path), "localhost", 0  # type: ignore[assignment]

    def get_request(self) -> tuple[Any, Any]:
        """Return the next caller; one at a Unix socket has no address."""
        request, address = super().get_request()
        return request, address or ("local", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take one more caller, if there are not too many."""
        if not self._callers.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one caller."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._callers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a caller that hangs up is no trouble of ours."""

    def server_close(self) -> None:
        """Listen no more."""
        super().server_close()
        if self.socket_path is not None and self._is_bound:
            self.socket_path.unlink(missing_ok=True)


def _remove_dead(path: Path) -> None:
    """Remove a socket of ours that nobody listens at any more.  Raises OSError."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        return  # binding says that the name is taken
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CALL_WITHIN_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


class Handler(BaseHTTPRequestHandler):
    """Answers with whole documents, and ends the connection after each."""

    timeout = CALL_WITHIN_S  # of each read and write
    server_version = "stepkeeper"
    sys_version = ""

    def say(self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class has it
        """Keep calls out of the log."""


# The metrics, for a Prometheus that scrapes.
#
# The port answers `GET /metrics` only; it is bound to this node alone unless another address is given: figures of a run
# are nobody else's business by default.

CALLERS_MAX = 8  # at a time; others are turned away
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Port:
    """Serves the metrics over HTTP."""

    def __init__(self, address: str, number: int, render: Callable[[], str]) -> None:
        """Listen.

        Raises:
            OSError: the port is taken, or the address is not of this node.
        """

        class Handler(_Metrics):
            metrics = staticmethod(render)

        self._server = Server((address, number), Handler, callers_max=CALLERS_MAX)
        self.number = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="metrics-port", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


class _Metrics(Handler):
    metrics: Callable[[], str]

    def do_GET(self) -> None:
        """Answer."""
        if self.path.partition("?")[0] != "/metrics":
            self.say(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"the metrics are at /metrics\n")
            return
        self.say(HTTPStatus.OK, CONTENT_TYPE, type(self).metrics().encode())

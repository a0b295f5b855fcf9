"""The metrics over HTTP, for a Prometheus that scrapes.  Imported only where it is asked for: it costs 30 ms.

The port answers `GET /metrics` only, a few callers at a time, each within seconds; it is bound to this node alone
unless another address is given: figures of a run are nobody else's business by default.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CALLERS_MAX = 8  # at a time; others are turned away
CALL_WITHIN_S = 5.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Port:
    """Serves the metrics over HTTP."""

    def __init__(self, address: str, number: int, render: Callable[[], str]) -> None:
        """Listen.

        Raises:
            OSError: the port is taken, or the address is not of this node.
        """
        callers = threading.BoundedSemaphore(CALLERS_MAX)

        class Handler(_Handler):
            metrics = staticmethod(render)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = CALLERS_MAX

            def process_request(self, request: Any, client_address: Any) -> None:
                """Take one more caller, if there are not too many."""
                if not callers.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                """Answer one caller."""
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    callers.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Say nothing: a caller that hangs up is no trouble of ours."""

        self._server = Server((address, number), Handler)
        self.number = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="metrics-port", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    metrics: Callable[[], str]
    timeout = CALL_WITHIN_S  # of each read and write
    server_version = "stepkeeper"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer."""
        if self.path.partition("?")[0] != "/metrics":
            self._say(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"the metrics are at /metrics\n")
            return
        self._say(HTTPStatus.OK, CONTENT_TYPE, type(self).metrics().encode())

    def _say(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class has it
        """Keep scrapes out of the log."""

"""The metrics over HTTP, for a Prometheus that scrapes.  Imported only where it is asked for: it costs 30 ms.

The port answers `GET /metrics` only, a few callers at a time, each within seconds; it is bound to this node alone
unless another address is given: figures of a run are nobody else's business by default.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus

from stepkeeper.run_analytics import serving

CALLERS_MAX = 8  # at a time; others are turned away
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Port:
    """Serves the metrics over HTTP."""

    def __init__(self, address: str, number: int, render: Callable[[], str]) -> None:
        """Listen.

        Raises:
            OSError: the port is taken, or the address is not of this node.
        """

        class Handler(_Handler):
            metrics = staticmethod(render)

        self._server = serving.Server((address, number), Handler, callers_max=CALLERS_MAX)
        self.number = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="metrics-port", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(serving.Handler):
    metrics: Callable[[], str]

    def answer(self) -> None:
        """Answer."""
        if self.path.partition("?")[0] != "/metrics":
            self.say(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"the metrics are at /metrics\n")
            return
        self.say(HTTPStatus.OK, CONTENT_TYPE, type(self).metrics().encode())

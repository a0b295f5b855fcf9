"""Stands between a process and an object store, and kills the process at one of its requests.

    python -m tests.trainer.crash.between PORT_OF_THE_STORE

prints the port on which it listens.  `POST /-/arm` says whom to kill, at which request and when, and begins a new
list of the requests that change the store; `GET /-/seen` returns that list, and whether the kill has happened.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

BEFORE, HALF, AFTER = "before it arrives", "half of it has arrived", "before it is answered"
_CHANGES = frozenset({"PUT", "POST", "DELETE"})
_LATE_S = 90.0
_HOP = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive"})


def name_of(method: str, target: str, body: bytes) -> str:
    """Return what a request is called: the same each time the same is asked; the store makes up upload ids."""
    parts = urlsplit(target)
    query = sorted(parse_qsl(parts.query, keep_blank_values=True))
    paths = [parts.path.removeprefix("/bucket/")]
    if "delete" in dict(query):  # of many objects at once
        paths = re.findall(r"<Key>([^<]*)</Key>", body.decode())
    below = [path.partition("/")[2] for path in paths]  # what each play has for itself
    return " ".join([method, *below, *(f"{key}={'' if key == 'uploadId' else value}" for key, value in query)])


class Armed:
    """Whom to kill, and what was asked so far."""

    def __init__(self, pid: int = 0, at: str = "", when: str = "") -> None:
        self.pid, self.at, self.when = pid, at, when
        self.lock = threading.Lock()
        self.seen: list[tuple[str, int]] = []  # requests that change the store, and the bytes that they bring
        self.fired = False

    def strikes(self, name: str, when: str) -> bool:
        """Whether this is the request and the moment; once."""
        with self.lock:
            if self.fired or (name, when) != (self.at, self.when):
                return False
            self.fired = True
        os.kill(self.pid, signal.SIGKILL)
        return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ClassVar[int]
    armed: ClassVar[Armed] = Armed()

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/-/arm":
            type(self).armed = Armed(**json.loads(body))
            self._answer(200, b"", {})
        elif self.path == "/-/seen":
            armed = self.armed
            self._answer(200, json.dumps({"seen": armed.seen, "fired": armed.fired}).encode(), {})
        else:
            self._pass_on(self.armed, body)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815  # as http.server wants them

    def _pass_on(self, armed: Armed, body: bytes) -> None:
        name = name_of(self.command, self.path, body)
        if self.command in _CHANGES:
            with armed.lock:
                armed.seen.append((name, len(body)))
        if armed.strikes(name, BEFORE):
            self.close_connection = True
            return
        if armed.strikes(name, HALF):
            self._send_half(body)
            self.close_connection = True
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.store, timeout=_LATE_S)
        headers = {key: value for key, value in self.headers.items() if key.lower() not in _HOP}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if armed.strikes(name, AFTER):
            self.close_connection = True
            return
        self._answer(answer.status, data, dict(answer.getheaders()))

    def _send_half(self, body: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self.store), timeout=_LATE_S) as connection:
            head = [f"{self.command} {self.path} HTTP/1.1"]
            head += [f"{key}: {value}" for key, value in self.headers.items()]
            connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body[: len(body) // 2])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # whatever the store says of it: nobody is there to hear
                pass

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        for key, value in headers.items():
            if key.lower() not in _HOP:
                self.send_header(key, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def between(store: str) -> Iterator[str]:
    """Stand before the store at an address, and give the address to use instead."""
    port = str(urlsplit(store).port)
    process = subprocess.Popen([sys.executable, "-m", "tests.trainer.crash.between", port], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def arm(address: str, **words: Any) -> None:
    """Have it begin a new list, and kill `pid` at the request `at`, at the moment `when`."""
    data = json.dumps(words).encode()
    with urllib.request.urlopen(f"{address}/-/arm", data, timeout=_LATE_S):  # noqa: S310  # our own
        pass


def seen(address: str) -> tuple[list[tuple[str, int]], bool]:
    """Return the requests that changed the store, with the bytes that each brought, and whether it has killed."""
    with urllib.request.urlopen(f"{address}/-/seen", timeout=_LATE_S) as answer:  # noqa: S310  # our own
        found = json.load(answer)
    return [(name, size) for name, size in found["seen"]], found["fired"]


def main() -> None:
    _Handler.store = int(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

"""The lab's own init process: starts its daemons, adopts their orphans, and takes all down when the owner is gone.

It is a child subreaper, so every process of the lab (slurmstepd forks twice and would go to init) is below it for
as long as it lives: nothing has to be looked for by name.  It holds a pidfd of the owner, which also tells of a
`kill -9`.  It must import nothing heavy and never wait without a limit.
"""

import argparse
import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.lab import processes, teardown

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TURN_S = 0.5
REQUEST_S = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


def request(directory: Path, timeout_s: float = 60.0, **what: Any) -> dict[str, Any]:
    """Ask the guardian of a lab for something; the answer has `error` where it could not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(directory / "guardian.sock"))
        connection.sendall(json.dumps(what).encode() + b"\n")
        answer: dict[str, Any] = json.loads(connection.makefile().readline() or '{"error": "no answer"}')
        return answer


class Guardian:
    """One loop over the owner, requests and dead children."""

    def __init__(self, directory: Path, owner: int | None) -> None:
        self._directory = directory
        self._owner = owner
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stop = False

    def run(self) -> None:
        """Serve until asked to end, told by a signal, or until the owner is gone; then take the lab down."""
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place = self._directory / "guardian.sock"
        server.bind(f"{place}.new")
        os.chmod(f"{place}.new", 0o600)
        server.listen(8)
        os.rename(f"{place}.new", place)  # whoever sees it is heard
        selector = selectors.DefaultSelector()
        selector.register(server, selectors.EVENT_READ)
        if self._owner is not None:
            selector.register(self._owner, selectors.EVENT_READ)
        asker: socket.socket | None = None
        while not self._stop and asker is None:
            for key, _ in selector.select(TURN_S):
                if key.fileobj is server:
                    asker = self._serve(server)
                else:
                    self._stop = True  # the owner's pidfd became readable: it is gone
            self._reap()
        left = teardown.take_down(self._directory, self._find, self._reap)
        if asker is not None:
            with contextlib.suppress(OSError):  # the asker gave up waiting
                asker.sendall(json.dumps({"left": sorted(left)}).encode() + b"\n")

    def _serve(self, server: socket.socket) -> socket.socket | None:
        """Answer one request; return the connection when it asks for the end, to be answered after that."""
        connection, _ = server.accept()
        connection.settimeout(REQUEST_S)
        answer: dict[str, Any]
        try:
            what = json.loads(connection.makefile().readline())
            if what["do"] == "down":
                return connection
            answer = {"pid": self._spawn(what["argv"], what["env"], what["log"])}
        except (OSError, ValueError, KeyError) as error:
            answer = {"error": repr(error)}
        with contextlib.suppress(OSError):  # the asker gave up waiting
            connection.sendall(json.dumps(answer).encode() + b"\n")
        connection.close()
        return None

    def _spawn(self, argv: list[str], env: dict[str, str], log: str) -> int:
        with open(log, "ab") as output:
            child = subprocess.Popen(
                argv,
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # A guardian that is killed itself takes the daemons along; single-threaded, so this is safe.
                preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509
            )
        self._children[child.pid] = child
        return child.pid

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # no children at all
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if child := self._children.pop(pid, None):
                    child.returncode = 0  # reaped here: Popen need not ask

    def _find(self) -> set[int]:
        return processes.descendants(os.getpid())

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--owner-pidfd", type=int)
    chosen = parser.parse_args()
    started = time.monotonic()
    Guardian(chosen.directory, chosen.owner_pidfd).run()
    sys.stderr.write(f"lab ended after {time.monotonic() - started:.1f} s\n")


if __name__ == "__main__":
    main()

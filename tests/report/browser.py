"""Chromium for tests, without a library: commands and events of its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.lab import requirements

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WITHIN_S = 120.0


def need() -> None:
    """Skip where no browser is installed, fail where CI says that all must be there."""
    if BINARY is None:
        reason = "no browser here: apt-get install chromium"
        if requirements.required():
            pytest.fail(reason)
        pytest.skip(reason)


class Browser:
    """One page in a headless browser; it remembers what the console said and what was asked of any server."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None, "`need` comes first"
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        self._number = 0
        self._data = b""
        self.console: list[str] = []
        self.requests: list[str] = []
        sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
        argv = [
            BINARY, "--headless=new", *sandbox, "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # it reads commands from descriptor 3, and writes to 4
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "bash", *argv],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        os.close(self._to)
        os.close(self._from)

    _session = ""

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + WITHIN_S
        while True:
            said = self._next(limit)
            if said.get("id") == self._number:
                assert "error" not in said, (method, said)
                found: dict[str, Any] = said["result"]
                return found
            self._hear(said)

    def _next(self, limit: float) -> dict[str, Any]:
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._from], [], [], max(0.0, limit - time.monotonic()))
            assert ready, "the browser says nothing"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._data += part
        line, _, self._data = self._data.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _hear(self, said: dict[str, Any]) -> None:
        told = said.get("params", {})
        match said.get("method"):
            case "Runtime.consoleAPICalled":
                self.console.append(f"{told['type']}: {told['args']}")
            case "Runtime.exceptionThrown":
                self.console.append(f"exception: {told['exceptionDetails']}")
            case "Log.entryAdded":
                self.console.append(f"{told['entry']['level']}: {told['entry']['text']}")
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case _:
                pass  # of no interest here

    def run(self, script: str) -> Any:
        """Return what a script evaluates to in the page."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (script, answer)
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until a script is true in the page."""
        limit = time.monotonic() + WITHIN_S
        while not self.run(script):
            assert time.monotonic() < limit, (script, self.console)
            time.sleep(0.1)

    def look(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the window, and whether its user likes the dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self.command("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def picture(self, path: Path) -> None:
        """Save what the window shows."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))

"""A `libnvidia-ml.so.1` of our own, and what a test says to it.

    nvml = FakeNvml(tmp_path / "nvml", gpus=4)
    subprocess.Popen([...], env={**os.environ, **nvml.environment()})
    nvml.xid(2, 79)

Every process with that environment sees the same GPUs, whenever it starts; a command is in force in every call that
begins after it was given.  One `FakeNvml` is one node: a lab of four nodes has four.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.fake_nvml.build import library

NO_INSTANCE = 0xFFFFFFFF

XID = 0x8
DOUBLE_BIT_ECC = 0x2
UNAVAILABLE = 0x4000
RECOVERY_ACTION = 0x8000

# what functions answer
OK = 0
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
UNKNOWN = 999


class FakeNvml:
    """One node's GPUs, in a directory that all its processes can read."""

    def __init__(self, directory: Path, *, gpus: int = 8, old: bool = False) -> None:
        """Build the library if need be; `old`: without the newer functions.  Skips where there is no C compiler."""
        self.directory = directory
        self.library = library(old=old)
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
        self._commands = directory / "commands"
        self._calls = directory / "calls"
        for path, mode in ((self._commands, 0o644), (self._calls, 0o666)):
            path.touch()
            path.chmod(mode)
        self.count(gpus)

    def environment(self) -> dict[str, str]:
        """Return the variables that make a new process load this library."""
        search = [str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {"LD_LIBRARY_PATH": ":".join(filter(None, search)), "FAKE_NVML": str(self.directory)}

    # --- events -----------------------------------------------------------------------------------

    def xid(self, gpu: int, code: int, *, gi: int = NO_INSTANCE, ci: int = NO_INSTANCE) -> None:
        """Send an XID event to every process that has registered for it."""
        self.event(gpu, XID, code, gi=gi, ci=ci)

    def event(self, gpu: int, kind: int, data: int = 0, *, gi: int = NO_INSTANCE, ci: int = NO_INSTANCE) -> None:
        """Send an event of any type."""
        self._say(f"event {gpu} {kind:#x} {data} {gi} {ci}")

    # --- state ------------------------------------------------------------------------------------

    def count(self, gpus: int) -> None:
        """Set the number of GPUs."""
        self._say(f"count {gpus}")

    def driver(self, version: str) -> None:
        """Set the driver's version."""
        self._say(f"driver {version}")

    def place(self, gpu: int, *, pci: str, uuid: str) -> None:
        """Set where a GPU is, such as `0000:3b:00`, and who it is."""
        self._say(f"set {gpu} pci {pci}")
        self._say(f"set {gpu} uuid {uuid}")

    def set(self, gpu: int, **values: int) -> None:
        """Set temperature, rows_pending, rows_failed, pages_pending, ecc_uncorrected, links, ..."""
        for name, value in values.items():
            self._say(f"set {gpu} {name} {value}")

    def field(self, gpu: int, number: int, value: int | None) -> None:
        """Set the value of a field, such as 230, the recovery action; None: not supported."""
        self._say(f"set {gpu} field:{number} {'none' if value is None else value}")

    def lose(self, gpu: int) -> None:
        """Answer GPU_IS_LOST to every call about the GPU."""
        self._say(f"lost {gpu} 1")

    def find(self, gpu: int) -> None:
        """End `lose`."""
        self._say(f"lost {gpu} 0")

    def answer(self, function: str, code: int, *, gpu: int | None = None) -> None:
        """Let a function return a code; `OK` ends it."""
        self._say(f"answer {function} {'*' if gpu is None else gpu} {code}")

    def delay(self, function: str, seconds: float, *, gpu: int | None = None) -> None:
        """Let a function take its time; 0 ends it, for calls under way too."""
        self._say(f"delay {function} {'*' if gpu is None else gpu} {round(seconds * 1000)}")

    def reset(self, *, gpus: int) -> None:
        """Make everything as it was at first."""
        self._say("reset")
        self.count(gpus)

    # --- what was called --------------------------------------------------------------------------

    def calls(self) -> list[tuple[int, str, int]]:
        """Return (pid, function, GPU or -1) of every call so far."""
        lines = self._calls.read_text().rpartition("\n")[0].splitlines()  # the last one may be half there
        return [(int(pid), function, int(gpu)) for pid, function, gpu in (line.split() for line in lines)]

    def wait_for_call(self, function: str, *, pid: int | None = None, times: int = 1, within_s: float = 90.0) -> None:
        """Return once a function was called that often (by one process): from then on it waits for events, say."""
        wait_until(
            lambda: sum(name == function and pid in {None, caller} for caller, name, _ in self.calls()) >= times,
            f"{function} was called {times} times",
            within_s,
        )

    def _say(self, command: str) -> None:
        descriptor = os.open(self._commands, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{command}\n".encode())  # one write: a reader sees all of it or nothing
        finally:
            os.close(descriptor)


def wait_until(condition: Callable[[], object], what: str, within_s: float = 90.0) -> None:
    """Return once the condition holds; fail the test when it does not in time."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"not in {within_s:g} s: {what}"
        time.sleep(0.005)

"""One srun of ours: started, spoken to, read to its end, and ended where it must."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from stepkeeper.redaction import redact
from stepkeeper.slurm import launch
from stepkeeper.supervisor.sources.process import Inbox, Part

ERRORS_WITHIN_S = 1.0


class Srun:
    """A Slurm step.  Its tasks write to files of their own, or speak with us."""

    def __init__(
        self,
        inbox: Inbox,
        part: Part,
        name: str,
        *,
        on_word: Callable[[str], None],
        on_line: Callable[[bytes], None] | None = None,
        errors: Part = Part.BUS_ERRORS,
    ) -> None:
        """Start nothing yet.

        Args:
            inbox: for the threads.
            part: whose step this is.
            name: of the threads.
            on_word: called with each line of srun's own.
            on_line: called with each line of the tasks; None: they do not speak with us.
            errors: the part of the thread that calls `on_word`, where tasks speak.
        """
        self._inbox, self._part, self._name, self._errors = inbox, part, name, errors
        self._on_word, self._on_line = on_word, on_line
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self.ended = threading.Event()

    def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> Callable[[], int]:
        """Start it; return what reads it to its end and gives its exit code.

        Raises:
            OSError: it cannot be started.
        """
        alone = self._on_line is None
        process = self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if alone else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if alone else subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a signal to our process group is for us alone
        )
        # what runs in the step outlives us, to be saved
        self._inbox.run(Part.SHEPHERD, lambda: launch.dismiss_shepherd(process.pid), name=f"{self._name}-shepherd")
        return lambda: self._follow(process)

    def say(self, line: bytes | None) -> None:
        """Queue a line for all tasks; None ends what they hear.  Never waits."""
        self._said.put(line)

    def end(self, ladder: Sequence[tuple[float, signal.Signals]]) -> None:
        """Send each signal when it has not ended so many seconds after the one before.

        With SIGTERM srun has Slurm end the tasks; with a lost node even that waits for long, so srun itself goes last.
        """
        for patience_s, number in ladder:
            if self.ended.wait(patience_s):
                return
            if self._process is not None:
                self._process.send_signal(number)

    # --- threads ----------------------------------------------------------------------------------

    def _follow(self, process: subprocess.Popen[bytes]) -> int:
        if self._on_line is None:
            self._read_words(process.stdout)
            code = process.wait()
            self.ended.set()
            return code
        errors = self._inbox.run(self._errors, lambda: self._read_words(process.stderr), name=f"{self._name}-error")
        self._inbox.run(self._part, lambda: self._write(process.stdin), name=f"{self._name}-write")
        for line in process.stdout or ():
            self._on_line(line)
        code = process.wait()
        self.ended.set()
        errors.join(ERRORS_WITHIN_S)
        return code

    def _read_words(self, stream: IO[bytes] | None) -> None:
        for line in stream or ():
            text = redact(line.decode(errors="replace").strip())
            if text and launch.NOISE not in text:
                self._on_word(text)

    def _write(self, stdin: IO[bytes] | None) -> None:
        if stdin is None:
            return
        with contextlib.suppress(BrokenPipeError), stdin:  # srun is gone: the reader says so
            while (line := self._said.get()) is not None:
                stdin.write(line)
                stdin.flush()

"""Leaving the process: after flushing, without waiting for threads.

A stuck save would block the exit; and torch's own threads abort a process that ends in the ordinary way now and then
(SIGABRT, "terminate called without an active exception", in 3 of 50 exits after collectives over gloo in torch 2.13):
a thread that lets its last tensor go asks for an interpreter that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from stepkeeper_trainer.errors import StepkeeperError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

EXIT_INTERRUPTED = 130


def leave(code: int) -> NoReturn:
    """Flush what was said, and end the process at once."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more: that must not keep us
            stream.flush()
    os._exit(code)


def install_excepthook(last_act: Callable[[], None]) -> None:
    """Make an uncaught exception end the process: an error of ours without a traceback, with its exit code.

    `last_act` comes between: it may give a save in flight its last seconds.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        code = 1
        if isinstance(error, StepkeeperError):
            code = error.exit_code
            print(f"stepkeeper_trainer: error: {error}", file=sys.stderr)  # noqa: T201
        else:
            before(kind, error, traceback)
            if issubclass(kind, KeyboardInterrupt):
                code = EXIT_INTERRUPTED
        try:
            last_act()
        finally:
            leave(code)

    sys.excepthook = hook

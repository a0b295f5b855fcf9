"""How the process of a rank ends whose framework saves on notice.

The exit handler is registered when this module is imported, before the script's own: so it is called after them.
"""

from __future__ import annotations

import atexit
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from stepkeeper_trainer.coordinate import ending
from stepkeeper_trainer.integrations import hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepkeeper_trainer.integrations.attachment import Attachment

LEAVE_WITHIN_S = 20.0  # from the end of the last save to the end of the process, whatever the script does


class Current:
    """The training of this process: the framework that is attached to first has it until it ends."""

    def __init__(self) -> None:
        self.number = 0  # of trainings so far
        self.attachment: Attachment | None = None

    def is_anothers(self, framework: str) -> bool:
        """Tell whether the training of another framework is under way, which uses this one."""
        attachment = self.attachment
        return attachment is not None and not attachment.over and attachment.training.framework != framework

    def take(self, attachment: Attachment) -> None:
        """Begin with another training; one that never came to its end is left as it is."""
        if self.attachment is not None:
            self.attachment.open = False
        self.number += 1
        self.attachment = attachment
        at_exit.finished = None


class AtExit:
    """What is said when the interpreter ends."""

    def __init__(self) -> None:
        self.finished: Callable[[], None] | None = None  # training has come to its end by itself
        self.code: int | None = None  # to leave with

    def __call__(self) -> None:
        """Leave with the code that was asked for; else say what the end of the script means."""
        if not hook.is_rank():
            return
        if self.code is not None:
            ending.leave(self.code)
        if current.attachment is None:
            return
        failed = getattr(sys, "last_value", None) is not None  # an exception that nobody caught
        with suppress(Exception):
            if self.finished is not None and not failed and current.attachment.rank == 0:
                self.finished()
            current.attachment.ends_now(failed=failed)


def leave(code: int) -> NoReturn:
    """End the script as if it had called `sys.exit`, and the process even where the script goes on.

    Raises:
        SystemExit: so that the script's own `finally` and exit handlers run.
    """
    at_exit.code = code
    timer = threading.Timer(LEAVE_WITHIN_S, ending.leave, (code,))
    timer.daemon = True
    timer.start()
    raise SystemExit(code)


current = Current()
at_exit = AtExit()
atexit.register(at_exit)

"""Errors that end a command: each carries its exit code and says what, which, and what to do."""

from __future__ import annotations

from stepkeeper.core.exits import ExitCode


class StepkeeperError(Exception):
    """Shown as one line, without a traceback."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


class UsageError(StepkeeperError):
    """An argument, a setting or a file of the user's is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


class NotFoundError(StepkeeperError):
    """What was asked for is not there: a run, a job, a checkpoint."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.NOTHING_FOUND)

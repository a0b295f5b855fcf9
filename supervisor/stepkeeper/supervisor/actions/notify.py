"""Calling a person: Slurm's job comment, which `squeue` and `sacct` show, and the user's own command.  Never fatal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core.exits import ExitCode
from stepkeeper.log import Log
from stepkeeper.reason_text import text
from stepkeeper.redaction import redact
from stepkeeper.run_store import requests
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.supervisor.sources.process import Inbox, Part

OUTPUT_BYTES_MAX = 2000  # of the command's, in the log


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Whose run it is, and how its people are notified."""

    job: str  # as Slurm's commands name it
    run_directory: str
    command: str | None  # for a shell
    within_s: float


def notify_user(
    effect: do.NotifyUser,
    call: Call,
    *,
    client: SlurmCommands,
    environment: Mapping[str, str],
    inbox: Inbox,
    log: Log,
) -> threading.Thread:
    """Tell people that the run stopped and why; the thread ends within the call's time limit."""

    def work() -> None:
        began = time.monotonic()
        command = _start(effect, call, environment, log) if call.command is not None else None
        try:
            client.comment(call.job, comment(effect))
        except SlurmError as error:
            log.warning("job_comment_not_set", error=str(error))
        if command is not None:
            _wait(*command, until=began + call.within_s, log=log)

    return inbox.run(Part.NOTIFY, work)


def comment(effect: do.NotifyUser) -> str:
    """Return the job's comment: a code only, for everybody can read it.

    >>> comment(do.NotifyUser(code=20))
    'stepkeeper:20:TRAINING_FAILED'
    """
    cause = f":{effect.cause.value}" if effect.cause is not None else ""
    name = next(code.name for code in ExitCode if code == effect.code)
    return f"stepkeeper:{effect.code}:{name}{cause}"


def _start(
    effect: do.NotifyUser, call: Call, environment: Mapping[str, str], log: Log
) -> tuple[subprocess.Popen[bytes], tempfile.SpooledTemporaryFile[bytes]] | None:
    facts = {
        "STEPKEEPER_REASON": redact(text(effect.reasons)),
        "STEPKEEPER_EXIT_CODE": str(effect.code),
        "STEPKEEPER_CAUSE": effect.cause.value if effect.cause is not None else "",
        "STEPKEEPER_RUN_DIR": call.run_directory,
        "STEPKEEPER_JOB_ID": call.job,
    }
    output = tempfile.SpooledTemporaryFile[bytes](max_size=0)
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", call.command or ""],
            env={**environment, **facts},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all of it can be ended, and our signals do not reach it
        )
    except OSError as error:
        output.close()
        log.warning("notify_command_not_started", error=str(error))
        return None
    return process, output


def _wait(
    process: subprocess.Popen[bytes],
    output: tempfile.SpooledTemporaryFile[bytes],
    *,
    until: float,
    log: Log,
) -> None:
    try:
        code: int | None = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with output:
        output.seek(0)
        said = redact(output.read(OUTPUT_BYTES_MAX).decode(errors="replace").strip())
    if code == 0:
        log.info("notified", said=said)
    else:
        log.warning("notify_command_failed", code=code if code is not None else "too slow: killed", said=said)


# Answering what a person asked, on a thread: the storage may hang.


def answer_request(
    run_directory: Path, effect: do.AnswerRequest, *, inbox: Inbox, on_error: Callable[[OSError], None]
) -> None:
    """Write the answer beside the ask."""

    def work() -> None:
        answered = requests.Answer(said=text(effect.reasons), ok=effect.ok, at=inbox.clock.now())
        try:
            requests.answer(run_directory, effect.name, answered)
        except OSError as error:
            on_error(error)  # the asker waits in vain, and says so

    inbox.run(Part.ANSWER, work)

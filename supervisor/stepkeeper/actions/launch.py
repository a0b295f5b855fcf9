"""Starting a training step, and waiting for its end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepkeeper import wrapper
from stepkeeper.core import events as on
from stepkeeper.slurm import argv as lines
from stepkeeper.slurm.environment import scrub_geometry
from stepkeeper.sources.inbox import Inbox
from stepkeeper.store import logs
from stepkeeper.store.rundir import RunDirectory
from stepkeeper_trainer.formats import outcome

RESUME_PLACEHOLDER = "{resume}"
ERROR_CHARACTERS_MAX = 300
KILL_BY_SLURM_AFTER_S = 3.0
KILL_SRUN_AFTER_S = 10.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every launch of an attempt."""

    command: tuple[str, ...]
    torchrun: bool
    geometry: lines.Geometry
    run_directory: Path
    run_id: str
    attempt: int
    socket: str  # with %N for the node


def with_resume(command: Sequence[str], resume_from: str | None) -> list[str]:
    """Put the resume argument where `{resume}` stands, else at the end; none on the first start.

    >>> with_resume(["train.py", "{resume}", "--fast"], "/r/step_00000100")
    ['train.py', '--resume-from', '/r/step_00000100', '--fast']
    >>> with_resume(["train.py", "{resume}"], None)
    ['train.py']
    >>> with_resume(["bash", "-c", "python train.py {resume} | tee log"], "/r/s 1")
    ['bash', '-c', "python train.py --resume-from '/r/s 1' | tee log"]
    """
    argument = ["--resume-from", resume_from] if resume_from is not None else []
    if not any(RESUME_PLACEHOLDER in word for word in command):
        return [*command, *argument]
    result: list[str] = []
    for word in command:
        if word == RESUME_PLACEHOLDER:
            result += argument
        else:
            result.append(word.replace(RESUME_PLACEHOLDER, shlex.join(argument)))
    return result


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """One launch: its number, where its ranks meet, and what it resumes from."""

    launch: int
    address: str
    port: int
    resume_from: str | None


def launch_argv(job: Job, meeting: Meeting, directory: Path) -> list[str]:
    """Return the command line of a launch, by the one rule for CMD."""
    command = with_resume(job.command, meeting.resume_from)
    pattern = str(directory).replace("%", "%%") + "/%N.log"
    if command[0] == "srun":
        return lines.own_srun_argv(command, pattern)
    program = [sys.executable, "-I", "-S", os.path.abspath(wrapper.__file__)]
    geometry = job.geometry
    if job.torchrun:
        program += ["--agent", "--", *_torchrun(job, meeting), *command]
        geometry = msgspec.structs.replace(
            geometry,
            tasks_per_node=1,
            cpus_per_task=(geometry.cpus_per_task or 1) * geometry.tasks_per_node,
        )
    else:
        program += ["--", *command]
    return lines.training_argv(geometry, pattern, program)


def _torchrun(job: Job, meeting: Meeting) -> list[str]:
    return [
        "torchrun",
        f"--nnodes={len(job.geometry.nodes)}",
        f"--nproc-per-node={job.geometry.tasks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meeting.address}:{meeting.port}",
        f"--rdzv-id={job.run_id}-{job.attempt}-{meeting.launch}",
        "--max-restarts=0",  # restarts are ours: two supervisors of one training would fight
        "--no-python",
    ]


def launch_environment(job: Job, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the ranks find in their environment, besides the user's own."""
    return {
        **scrub_geometry(environment),
        "STEPKEEPER_SOCKET": job.socket,
        "STEPKEEPER_RUN_DIR": str(job.run_directory),
        "STEPKEEPER_RUN_ID": job.run_id,
        "STEPKEEPER_ATTEMPT": str(job.attempt),
        "STEPKEEPER_LAUNCH": str(meeting.launch),
        "STEPKEEPER_RESUME_FROM": meeting.resume_from or "",
        "STEPKEEPER_TASKS_PER_NODE": str(job.geometry.tasks_per_node),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "PYTHONUNBUFFERED": environment.get("PYTHONUNBUFFERED", "1"),
    }


class Launch:
    """A training step that runs.  `LaunchEnded` comes when it is over."""

    def __init__(self, job: Job, meeting: Meeting, environment: Mapping[str, str], *, inbox: Inbox) -> None:
        """Start srun.  Raises OSError when it could not be started."""
        self._job = job
        self._launch = meeting.launch
        self._inbox = inbox
        self._logs = RunDirectory(job.run_directory).logs(job.attempt, meeting.launch)
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ended = threading.Event()
        self._process = subprocess.Popen(
            launch_argv(job, meeting, self._logs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=launch_environment(job, meeting, environment),
            start_new_session=True,  # a signal to our process group is for us alone
        )
        inbox.run_thread(f"launch-{meeting.launch}", self._wait)

    def kill(self) -> None:
        """See to it that the step ends, also where a watcher that should kill its ranks is gone.

        SIGTERM to srun makes Slurm SIGKILL all tasks.  With a lost node even that waits for Slurm to
        notice, so srun itself goes last.
        """
        self._inbox.run_thread(f"kill-{self._launch}", self._kill)

    def _kill(self) -> None:
        for patience_s, number in (
            (KILL_BY_SLURM_AFTER_S, signal.SIGTERM),
            (KILL_SRUN_AFTER_S, signal.SIGKILL),
        ):
            if self._ended.wait(patience_s):
                return
            self._process.send_signal(number)

    def _wait(self) -> None:
        """Keep what srun itself says (the ranks write to their own files), and report the end."""
        error = ""
        assert self._process.stdout is not None, "Popen was given a pipe"
        with (self._logs / "srun.log").open("ab") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                text = line.decode(errors="replace").strip()
                error = text[:ERROR_CHARACTERS_MAX] or error
        code = self._process.wait()
        self._ended.set()
        said = _outcome(self._job, self._launch)
        with contextlib.suppress(OSError):  # housekeeping of logs must not keep the end of a launch from the loop
            if not said:
                logs.mark_failed(self._logs, f"srun ended with {code}; {error}")
            logs.prune(self._job.run_directory / "logs")
        self._inbox.put(
            on.LaunchEnded(
                at=self._inbox.clock.now(),
                launch=self._launch,
                code=code,
                finished=said == "finished",
                stopped=said == "stopped",
                error=error,
            )
        )


def _outcome(job: Job, launch: int) -> str:
    """Return what rank 0 wrote about the end of this very launch."""
    try:
        found = outcome.read(job.run_directory)
    except (OSError, msgspec.MsgspecError):
        return ""  # as if it had not been written: the launch counts as failed, and is repeated
    if found is None or found.launch != f"{job.attempt}.{launch}":
        return ""
    return found.outcome

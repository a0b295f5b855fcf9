"""`stepkeeper run [options] -- CMD ARGS...`: supervise a training.  It is the batch process."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from stepkeeper import __version__
from stepkeeper.actions.launch import Job
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.errors import StepkeeperError
from stepkeeper.log import PatientStream, configure
from stepkeeper.slurm.allocation import Allocation, read_allocation, require_batch_process
from stepkeeper.slurm.argv import Geometry
from stepkeeper.slurm.client import SlurmClient, SlurmError
from stepkeeper.slurm.commands import SlurmCommands
from stepkeeper.sources import lease as lease_source
from stepkeeper.sources import signals
from stepkeeper.sources.clock import Clock
from stepkeeper.sources.inbox import Inbox
from stepkeeper.store import journal, rundir, tenure
from stepkeeper.supervise import Setting, Supervisor
from stepkeeper.watcher.assignment import Assignment
from stepkeeper_trainer.formats import outcome
from stepkeeper_trainer.formats.lease import Lease

T = TypeVar("T")
SLURM_WITHIN_S = 300.0
LOG_WITHIN_S = 2.0


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "run",
        help="supervise a training: `exec stepkeeper run -- CMD` in the batch script",
        description="Supervise a training inside a batch script: exec stepkeeper run [options] -- CMD ARGS...",
        epilog="Exit codes: " + "; ".join(f"{code.value} {code.meaning}" for code in ExitCode),
        allow_abbrev=False,
    )
    command.add_argument(
        "--run-dir",
        metavar="DIR",
        help=f"the run directory, on shared storage; %%j %%A %%a %%x %%u as in sbatch "
        f"(default: STEPKEEPER_RUN_DIR, else {rundir.DEFAULT_PATTERN.replace('%', '%%')} below the submit directory)",
    )
    command.add_argument("--torchrun", action="store_true", help="start one torchrun a node, with c10d rendezvous")
    command.add_argument(
        "--tasks-per-node",
        type=int,
        metavar="N",
        help="ranks on a node (default: one a GPU, else --ntasks-per-node of the job, else 1)",
    )
    command.add_argument(
        "--spares",
        type=int,
        metavar="N",
        default=0,
        help="nodes of the allocation that take no part until another one fails (default: %(default)s)",
    )
    command.add_argument(
        "--min-nodes",
        type=int,
        metavar="N",
        default=0,
        help="go on with so few nodes when others fail, before the job is requeued (default: never with fewer)",
    )
    command.add_argument(
        "--free-gib-min",
        type=float,
        metavar="GIB",
        default=1.0,
        help="what the run directory's storage must have free before each launch (default: %(default)s)",
    )
    command.add_argument("--group-readable", action="store_true", help="let your group read the run directory")
    command.add_argument(
        "--failures-max",
        type=int,
        metavar="N",
        default=Policy().failures_max,
        help="launches that may fail without a newly verified step before the run stops (default: %(default)s)",
    )
    command.add_argument(
        "--save-margin-s",
        type=float,
        metavar="SECONDS",
        default=Policy().save_margin_s,
        help="kept free between an emergency save and the end of the notice (default: %(default)s)",
    )
    command.add_argument(
        "--progress-log-every-s",
        type=float,
        metavar="SECONDS",
        default=10.0,
        help="a progress line in the log at most this often (default: %(default)s)",
    )
    command.add_argument("cmd", nargs=argparse.REMAINDER, metavar="-- CMD ARGS...")
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Supervise until the attempt ends."""
    environment = dict(os.environ)
    command = _command(arguments.cmd)
    policy = _policy(arguments)
    client = SlurmCommands()
    require_batch_process(environment)
    directory = _directory(arguments, environment)
    clock = Clock()
    inbox = Inbox(clock)
    signals.listen(inbox)  # before anything that takes time: by default a signal would end us
    out = PatientStream(lambda: sys.stdout)
    allocation = patiently(lambda: read_allocation(environment, client, arguments.tasks_per_node))
    settings = patiently(client.settings)
    wanted = _nodes_wanted(arguments, allocation, command)
    merged = _merge_spool(directory)
    carried = _carried(directory)
    lease = _lease(directory, allocation, carried, clock, client)
    log = configure(out, job=allocation.job_id, attempt=lease.attempt)
    assignment = Assignment(
        run_directory=str(directory.path),
        run_id=directory.run_id,
        job_id=allocation.job_id,
        slurm_name=allocation.slurm_name,
        restart_count=allocation.restart_count,
        attempt=lease.attempt,
        nodes=allocation.nodes,
        kill_wait_s=settings.kill_wait_s,
        nonce=secrets.token_hex(8),
    )
    setting = Setting(
        directory=directory,
        assignment=assignment,
        job=Job(
            command=command,
            torchrun=arguments.torchrun,
            geometry=Geometry(
                tasks_per_node=allocation.tasks_per_node,
                cpus_per_task=allocation.cpus_per_task,
                overcommit=allocation.overcommit,
            ),
            run_directory=directory.path,
            run_id=directory.run_id,
            attempt=lease.attempt,
            socket=assignment.socket_name(),
        ),
        lease=lease,
        policy=policy,
        progress_log_every_s=arguments.progress_log_every_s,
        gpus_per_node=allocation.gpus_per_node,
        free_bytes_min=int(arguments.free_gib_min * 2**30),
    )
    log.info(
        "attempt_started",
        version=__version__,
        run_dir=str(directory.path),
        nodes=",".join(allocation.nodes),
        slurm=settings.version,
        previous=carried.previous or "none",
        see_status=f"stepkeeper status {directory.path}",
        see_logs=f"stepkeeper logs {directory.path}",
        to_stop=f"scancel {allocation.slurm_name}",
    )
    if merged:
        log.warning("spool_merged", records=merged, why="the shared storage did not take them in an earlier attempt")
    if allocation.overcommit:
        log.warning("fewer_cpus_than_ranks", ask_for=f"sbatch --cpus-per-task or -c {allocation.tasks_per_node}")
    inbox.put(
        on.AttemptStarted(
            at=clock.now(),
            job_id=allocation.job_id,
            restart_count=allocation.restart_count,
            attempt=lease.attempt,
            nodes=allocation.nodes,
            batch_node=allocation.batch_node,
            kill_wait_s=settings.kill_wait_s,
            finished_step=_finished_step(directory),
            failures=carried.failures,
            best_step=carried.best_step,
            node_losses=carried.node_losses,
            previous=carried.previous,
            wrapped=setting.job.wrapped,
            nodes_wanted=wanted,
            nodes_min=arguments.min_nodes,
            excluded=carried.excluded,
        )
    )
    lease_source.watch(
        directory.path,
        lease,
        inbox=inbox,
        on_error=lambda error: log.warning("lease_unreadable", error=str(error)),
    )
    writer = journal.JournalWriter(directory.journal)
    supervisor = Supervisor(
        setting=setting, client=client, inbox=inbox, journal=writer, environment=environment, log=log
    )
    try:
        return supervisor.run()
    finally:
        out.drain(LOG_WITHIN_S)


def _command(words: list[str]) -> tuple[str, ...]:
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise StepkeeperError("no CMD: write `stepkeeper run [options] -- CMD ARGS...`", ExitCode.USAGE)
    if words[:1] != ["--"] and command[0].startswith("-"):
        raise StepkeeperError(
            f"unknown option {command[0]}; CMD comes after `--`; see `stepkeeper run --help`", ExitCode.USAGE
        )
    return tuple(command)


def _policy(arguments: argparse.Namespace) -> Policy:
    if arguments.failures_max < 1 or arguments.save_margin_s < 0:
        raise StepkeeperError("--failures-max is at least 1, --save-margin-s at least 0", ExitCode.USAGE)
    return Policy(failures_max=arguments.failures_max, save_margin_s=arguments.save_margin_s)


def _nodes_wanted(arguments: argparse.Namespace, allocation: Allocation, command: Sequence[str]) -> int:
    """Return how many nodes a launch shall have.

    Raises:
        StepkeeperError: the options do not fit the allocation, or the user's own srun line.
    """
    nodes = len(allocation.nodes)
    wanted: int = nodes - arguments.spares
    if arguments.spares < 0 or wanted < 1:
        raise StepkeeperError(
            f"--spares {arguments.spares}: the allocation has {nodes} nodes, and at least one must train",
            ExitCode.USAGE,
        )
    if not 0 <= arguments.min_nodes <= wanted:
        raise StepkeeperError(
            f"--min-nodes {arguments.min_nodes}: a launch has {wanted} nodes "
            f"({nodes} of the allocation, {arguments.spares} of them spares)",
            ExitCode.USAGE,
        )
    if command[0] == "srun" and (arguments.spares or arguments.min_nodes):
        raise StepkeeperError(
            "--spares and --min-nodes choose the nodes of a launch, which an own srun line does itself: "
            "leave out `srun` and its options, and one task a GPU is started",
            ExitCode.USAGE,
        )
    return wanted


def patiently(call: Callable[[], T]) -> T:
    """Ask Slurm again while its controller is away or busy: after a mass requeue every job starts at once.

    Raises:
        StepkeeperError: Slurm refused, or was away for `SLURM_WITHIN_S`.
    """
    give_up_at, pause_s = time.monotonic() + SLURM_WITHIN_S, 1.0
    while True:
        try:
            return call()
        except SlurmError as error:
            if not error.unreachable or time.monotonic() + pause_s > give_up_at:
                raise StepkeeperError(f"Slurm does not answer: {error}", ExitCode.NO_SLURM) from error
            with contextlib.suppress(OSError):  # a full disk below stderr
                sys.stderr.write(f"stepkeeper: Slurm does not answer ({error}); asking again\n")
                sys.stderr.flush()
        time.sleep(pause_s + random.uniform(0, pause_s))  # noqa: S311 - so that not all jobs ask in step
        pause_s = min(2 * pause_s, 30.0)


def _directory(arguments: argparse.Namespace, environment: Mapping[str, str]) -> rundir.RunDirectory:
    chosen = arguments.run_dir or environment.get("STEPKEEPER_RUN_DIR")
    path = rundir.expand(chosen or rundir.DEFAULT_PATTERN, environment)
    return rundir.prepare(path, group_readable=arguments.group_readable, default=chosen is None)


def _merge_spool(directory: rundir.RunDirectory) -> int:
    """Take over what an earlier attempt could only write to this node's disk; what fails is left for the next one."""
    try:
        return journal.merge_spool(directory.journal)
    except OSError:
        return 0


def _carried(directory: rundir.RunDirectory) -> journal.Carried:
    try:
        return journal.reconstruct(directory.journal)
    except OSError as error:
        raise StepkeeperError(
            f"{directory.journal}: cannot be read: {error.strerror}", ExitCode.RUN_DIRECTORY
        ) from error


def _lease(
    directory: rundir.RunDirectory,
    allocation: Allocation,
    carried: journal.Carried,
    clock: Clock,
    client: SlurmClient,
) -> Lease:
    wanted = Lease(
        job_id=allocation.job_id,
        restart_count=allocation.restart_count,
        attempt=carried.attempt,
        node=allocation.batch_node,
        pid=os.getpid(),
        taken_at=clock.now(),
    )
    try:
        return tenure.take(directory.path, wanted, job_runs=lambda job: patiently(lambda: client.job_runs(str(job))))
    except StepkeeperError as error:
        error.add_note(f"asked about the job that held {directory.path}")
        raise


def _finished_step(directory: rundir.RunDirectory) -> int | None:
    try:
        said = outcome.read(directory.path)
    except (OSError, ValueError) as error:
        raise StepkeeperError(
            f"{directory.path / outcome.OUTCOME_NAME}: cannot be read: {error}", ExitCode.RUN_DIRECTORY
        ) from error
    return said.step if said is not None and said.outcome == "finished" else None

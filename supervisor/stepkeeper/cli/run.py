"""`stepkeeper run [options] -- CMD ARGS...`: supervise a training.  It is the batch process."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stepkeeper import __version__, printing
from stepkeeper.cli import attempt, dry_run
from stepkeeper.cli.arguments import add_cmd, read_cmd
from stepkeeper.config import resolve, shape
from stepkeeper.config.resolve import Config, Origin
from stepkeeper.config.values import Outdated
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError
from stepkeeper.frameworks.following import Following
from stepkeeper.log import Form, Log, PatientStream, configure, is_empty
from stepkeeper.loop_tools import Clock
from stepkeeper.run_analytics.metrics import TalliedJournal, Tally, exported
from stepkeeper.run_store import journal, lines, paths
from stepkeeper.run_store import lease as run_store_lease
from stepkeeper.slurm import cmd
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.slurm.launch import Allocation, is_batch_process, node_name, read_allocation, require_no_batch_script
from stepkeeper.slurm.pyslurm_client import ClientKind, choose
from stepkeeper.submit import own_script
from stepkeeper.supervisor.actions.verify_pool import Limits
from stepkeeper.supervisor.loop import Setting, Supervisor
from stepkeeper.supervisor.sources import process, run_directory
from stepkeeper.supervisor.sources import run_directory as lease_source
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher.messages import Assignment
from stepkeeper_trainer.formats.lease import Lease, birth

T = TypeVar("T")
SLURM_WITHIN_S = 300.0
LOG_WITHIN_S = 2.0
NO_BATCH_SCRIPT = (
    "Slurm can requeue nothing of an allocation of salloc or srun: at its end the run is saved. It continues when it "
    "is started again with the same --run-dir"
)


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "run",
        help="supervise a training: `exec stepkeeper run -- CMD` in the batch script",
        description="Supervise a training inside a batch script: exec stepkeeper run [options] -- CMD ARGS...",
        epilog="Exit codes: " + "; ".join(f"{code.value} {code.meaning}" for code in ExitCode),
    )
    resolve.declare_flags(command)
    command.add_argument("--print-config", action="store_true", help="show every setting and where it came from; exit")
    command.add_argument(
        "--dry-run", action="store_true", help="show what would be started, also outside a job; start nothing"
    )
    command.add_argument("--json", action="store_true", help="with --print-config or --dry-run: one JSON document")
    add_cmd(command)
    command.set_defaults(execute=execute, is_service=True)


def execute(arguments: argparse.Namespace) -> int:
    """Supervise until the attempt ends."""
    if arguments.print_config or arguments.dry_run:
        return printing.safely(_show, arguments)
    if arguments.json:
        raise UsageError("--json goes with --print-config or --dry-run")
    try:
        code = _supervise(arguments)
    except StepkeeperError as error:
        _let_end(error.code)
        raise
    _let_end(code)
    return code


def _say(text: str) -> None:
    """Print one line before there is a log; a full disk below stderr stops nothing."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"stepkeeper: {text}\n")
        sys.stderr.flush()


def _let_end(code: int) -> None:
    """Where Slurm would hold a job that ends with this code, have it end like any other."""
    try:
        done = SlurmCommands().let_end(code)
    except SlurmError as error:
        done = (
            f"Slurm does not let the job end ({error}): it may be held; scancel it, or continue it by scontrol release"
        )
    if done:
        _say(done)


def _supervise(arguments: argparse.Namespace) -> int:
    environment = dict(os.environ)
    command = read_cmd(arguments.cmd, "run")
    client: SlurmCommands = SlurmCommands()
    batch = is_batch_process(environment)
    config, directory = _configure(arguments, environment)
    settings = config.settings
    clock = Clock()
    inbox = Inbox(clock)
    process.listen_for_signals(inbox)  # before anything that takes time: by default a signal would end us
    out = PatientStream(lambda: sys.stdout)
    allocation = patiently(inbox, lambda: read_allocation(environment, client, settings.tasks_per_node))
    if not batch:
        require_no_batch_script(patiently(inbox, lambda: client.job(allocation.slurm_name)))
    cluster = patiently(inbox, client.settings)
    clock.follow_slurm(
        clock.slurm_set(patiently(inbox, SlurmCommands().time))
    )  # how the cluster's clock stands to ours
    sized = shape.of(config, len(allocation.nodes), command, allocation.tasks_per_node)
    script, following = _script(command, config)
    merged = 0
    with contextlib.suppress(OSError):  # what fails is left for the next attempt
        merged = journal.merge_spool(directory.journal)
    carried = attempt.carried(directory)
    kind, _, python = settings.slurm_client.partition(":")
    slurm = patiently(
        inbox, lambda: choose(ClientKind(kind), job=allocation.slurm_name, python=python or sys.executable)
    )
    client = slurm.client
    lease = _lease(
        directory, allocation, carried, clock, lambda job: patiently(inbox, lambda: client.job_runs(str(job)))
    )
    emptied = batch and allocation.restart_count > 0 and is_empty(sys.stdout)
    attempt_logs = directory.attempt_logs(lease.attempt)
    kept = PatientStream(lambda: paths.open_supervisors(attempt_logs))
    log = configure(out, kept, form=Form(settings.log_format), job=allocation.job_id, attempt=lease.attempt)
    assignment = Assignment(
        run_directory=str(directory.path),
        run_id=directory.run_id,
        job_id=allocation.job_id,
        slurm_name=allocation.slurm_name,
        restart_count=allocation.restart_count,
        attempt=lease.attempt,
        nodes=allocation.nodes,
        kill_wait_s=cluster.kill_wait_s,
        accounting=cluster.accounting,
        nonce=secrets.token_hex(8),
        started_at=clock.now(),
        stop_signal=settings.policy.stop_signal,
        gpus_per_node=allocation.gpus_per_node,
        free_bytes_min=int(settings.free_gib_min * 2**30),
        words=tuple(sys.argv[1:]),
        batch=batch,
    )
    setting = Setting(
        directory=directory,
        assignment=assignment,
        job=attempt.job(
            command,
            settings,
            allocation,
            directory,
            attempt=lease.attempt,
            socket=assignment.socket_name(),
            script=script,
            following=following,
        ),
        lease=lease,
        policy=settings.policy,
        notify_command=settings.notify_command,
        repair_pointers=settings.repair_pointers,
        standby_imports=attempt.standby_imports(settings),
        standby_always=bool(settings.warm_standby),
        reading=Limits(mib_per_s=settings.verify_mib_per_s),
    )
    log.info(
        "attempt_started",
        ranks_print_to=cmd.own_output(command) or f"{attempt_logs}/launch-*/NODE.log",
        see_logs=f"stepkeeper logs {directory.typed} --follow",
        version=__version__,
        run_dir=str(directory.path),
        nodes=",".join(allocation.nodes),
        slurm=cluster.version,
        slurm_client=slurm.why,
        previous=carried.previous or "none",
        see_status=f"stepkeeper status {directory.typed}",
        to_stop=f"stepkeeper stop {directory.typed}",
    )
    attempt.note(config, directory, lease.attempt, command, log)
    attempt.say_framework(following, command, settings, log)
    if batch:
        attempt.note_submission(directory, allocation, sys.argv[1:], log)
    doubts = own_script.doubts(command, script, append=settings.resume_argument, framework=settings.framework)
    _say_what_surprises(log, setting, allocation, doubts, emptied=emptied, merged=merged)
    inbox.put(
        on.AttemptStarted(
            at=clock.now(),
            job_id=allocation.job_id,
            restart_count=allocation.restart_count,
            attempt=lease.attempt,
            nodes=allocation.nodes,
            batch_node=allocation.batch_node,
            kill_wait_s=cluster.kill_wait_s,
            finished_step=attempt.finished_step(directory.path),
            failures=carried.failures,
            best_step=carried.best_step,
            node_losses=carried.node_losses,
            previous=carried.previous,
            wrapped=setting.job.wrapped,
            nodes_wanted=sized.wanted,
            nodes_min=sized.least,
            node_counts=sized.counts,
            excluded=carried.excluded,
            tried=carried.tried,
            baseline=carried.baseline,
            skipped_data=carried.skipped_data,
            nodes_before=carried.nodes,
            losses=lines.losses_before(directory.path),
            gpus_per_node=allocation.gpus_per_node,
            end_at=clock.from_slurm(patiently(inbox, lambda: client.job(allocation.slurm_name))).end_at,
            batch=batch,
        )
    )
    lease_source.watch_lease(
        directory.path,
        lease,
        inbox=inbox,
        on_error=lambda error: log.warning("lease_unreadable", error=str(error)),
    )
    run_directory.watch_requests(
        directory.path,
        allocation.job_id,
        inbox=inbox,
        on_error=lambda error: log.warning("requests_unreadable", error=str(error)),
    )
    tally = Tally()
    writer = TalliedJournal(directory.journal, tally)
    supervisor = Supervisor(
        setting=setting, client=client, inbox=inbox, journal=writer, environment=environment, log=log
    )
    try:
        with (
            paths.kept(directory.path, wanted=settings.group_readable),
            exported(settings, directory, tally, lambda: supervisor.decision_log.status, now=clock.now, log=log),
        ):
            return supervisor.run()
    finally:
        for stream in (out, kept):
            stream.drain(LOG_WITHIN_S)


def _script(command: tuple[str, ...], config: Config) -> tuple[own_script.Found, Following | None]:
    """Look at the script in CMD; refuse one that would start ranks twice.  It trains without its framework, too."""
    script = own_script.Found()
    try:
        script = own_script.look(command, Path.cwd())
        own_script.require_startable(script, torchrun=config.settings.torchrun)
        return script, attempt.following(command, config)
    except StepkeeperError:
        raise
    except Exception as error:  # noqa: BLE001 - a script or a directory that nobody has foreseen
        _say(f"the script or its framework cannot be recognized: {error!r}; please report it")
        return script, None


def _say_what_surprises(
    log: Log,
    setting: Setting,
    allocation: Allocation,
    doubts: own_script.Doubts,
    *,
    emptied: bool,
    merged: int,
) -> None:
    """Say what this job does that its owner may not expect, and at the first launch why a resume may fail."""
    if not setting.assignment.batch:
        log.warning("no_batch_script", why=NO_BATCH_SCRIPT)
    if emptied:
        why = f"Slurm empties it at each attempt; copies: {setting.directory.path / 'logs'}"
        log.warning("log_emptied", ask_for="sbatch --open-mode=append", why=why)
    if merged:
        log.warning("spool_merged", records=merged, why="the shared storage did not take them in an earlier attempt")
    if doubts.no_place:
        log.warning("no_place_for_resume", why=doubts.no_place)
    if doubts.unknown:
        log.warning("resume_argument_unknown", why=doubts.unknown)
    if doubts.no_way:
        log.warning("no_way_to_resume", why=doubts.no_way)
    if allocation.uneven_tasks:
        why = f"Slurm shares the job's tasks as {allocation.uneven_tasks}: each node gets one rank"
        log.warning("tasks_not_even", why=why, ask_for="sbatch --ntasks-per-node")
    if allocation.overcommit:
        log.warning("fewer_cpus_than_ranks", ask_for=f"sbatch --cpus-per-task or -c {allocation.tasks_per_node}")


def _show(arguments: argparse.Namespace) -> None:
    """Print the configuration, or what would be started; needs no Slurm."""
    environment = dict(os.environ)
    sources = resolve.gather(resolve.read_flags(arguments), environment)
    if arguments.print_config:
        dry_run.show_config(sources, environment, as_json=arguments.json)
    else:
        dry_run.show(sources, environment, read_cmd(arguments.cmd, "run"), as_json=arguments.json)


def _configure(arguments: argparse.Namespace, environment: dict[str, str]) -> tuple[Config, paths.RunDirectory]:
    """Return the configuration and the run directory, which holds a part of it."""
    path = attempt.continued(environment)
    continues = path is not None or environment.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    # whoever submitted the job is not there: what an upgrade has removed since then must not end their run
    outdated: list[Outdated] | None = [] if continues else None
    sources = resolve.gather(resolve.read_flags(arguments, outdated), environment, outdated=outdated)
    path = path or paths.expand_pattern(sources.resolve().settings.run_dir, environment)
    config = sources.resolve(path)
    is_default = config.values["run_dir"].origin is Origin.DEFAULT
    return config, paths.prepare_run_directory(path, group_readable=config.settings.group_readable, default=is_default)


def patiently(inbox: Inbox, call: Callable[[], T]) -> T:
    """Ask Slurm again while its controller is away or busy: after a mass requeue every job starts at once.

    Args:
        inbox: where signals arrive; nothing runs yet, so one of them ends the waiting.
        call: asks Slurm.

    Raises:
        StepkeeperError: Slurm refused, was away for `SLURM_WITHIN_S`, or a signal came while it was away.
    """
    give_up_at, pause_s = time.monotonic() + SLURM_WITHIN_S, 1.0
    while True:
        try:
            return call()
        except SlurmError as error:
            if not error.unreachable or time.monotonic() + pause_s > give_up_at:
                raise StepkeeperError(f"Slurm does not answer: {error}", ExitCode.NO_SLURM) from error
            _say(f"Slurm does not answer ({error}); asking again")
            if inbox.wait_for_item(pause_s + random.uniform(0, pause_s)):  # noqa: S311 - so that not all ask in step
                why = f"a signal came while Slurm did not answer, and nothing runs yet: {error}"
                raise StepkeeperError(why, ExitCode.NO_SLURM) from error
        pause_s = min(2 * pause_s, 30.0)


def _lease(
    directory: paths.RunDirectory,
    allocation: Allocation,
    carried: journal.Carried,
    clock: Clock,
    job_runs: Callable[[int], bool],
) -> Lease:
    wanted = Lease(
        job_id=allocation.job_id,
        restart_count=allocation.restart_count,
        attempt=carried.attempt,
        node=node_name(),
        pid=os.getpid(),
        taken_at=clock.now(),
        birth=birth(os.getpid()),
    )
    try:
        return run_store_lease.take(directory.path, wanted, job_runs=job_runs)
    except StepkeeperError as error:
        error.add_note(f"asked about the job that held {directory.path}")
        raise

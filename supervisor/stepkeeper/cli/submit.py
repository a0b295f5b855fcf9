"""`stepkeeper submit [options] -- CMD ARGS...`, `stepkeeper resume RUN`: a run is submitted, and submitted again."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
import time
from pathlib import Path

import msgspec

from stepkeeper import printing
from stepkeeper.cli.arguments import add_cmd, add_run, read_cmd
from stepkeeper.config import resolve, shape
from stepkeeper.config.resolve import Config, Origin
from stepkeeper.config.settings import SETTINGS
from stepkeeper.core.events import JobState
from stepkeeper.core.exits import ExitCode
from stepkeeper.doctor import rules, site
from stepkeeper.doctor.site import Finding, Level, Site
from stepkeeper.errors import NotFoundError, StepkeeperError, UsageError
from stepkeeper.redaction import redact_words
from stepkeeper.run_analytics import queue
from stepkeeper.run_store import find, paths, submission
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store import submission as submissions
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.submission import Submission
from stepkeeper.slurm import cmd, requeue
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands, job_state
from stepkeeper.submit import own_script, preflight, sbatch
from stepkeeper.submit.plan import measure
from stepkeeper.submit.sbatch import Wanted, notice_s, program, render
from stepkeeper_trainer.formats import lease

# `stepkeeper submit`: a batch script for this cluster, checked, then submitted.

HANDLED = ("JobRequeue", "JobFileAppend", "send_user_signal")  # by the directives of our own script


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare both commands."""
    command = subcommands.add_parser(
        "submit",
        help="write a batch script for this cluster, check it, and submit it",
        description="Write a batch script for this cluster, have Slurm check it, and submit it.  Example: "
        "`stepkeeper submit -N 4 --gpus-per-node 8 -t 1-00:00:00 --setup 'module load cuda' -- python train.py`.",
    )
    job = command.add_argument_group("job")
    job.add_argument("-N", "--nodes", metavar="N", default="1", help="nodes, spares included (default: 1)")
    job.add_argument("--gpus-per-node", metavar="N", help="GPUs on each node, as for sbatch")
    job.add_argument("-t", "--time", metavar="TIME", help="time limit of one attempt; a longer training is requeued")
    job.add_argument("-p", "--partition", metavar="NAME", help="default: the cluster's")
    job.add_argument("-A", "--account", metavar="NAME", help="account that pays")
    job.add_argument("-J", "--job-name", metavar="NAME", help="default: the script's name")
    job.add_argument("-o", "--output", metavar="PATTERN", default="%x-%j.log", help="the log (default: %%x-%%j.log)")
    job.add_argument(
        "--sbatch", metavar="OPTION", action="append", default=[], help="any other option: --sbatch=--mem=0; repeat it"
    )
    job.add_argument(
        "--setup",
        metavar="LINE",
        action="append",
        default=[],
        help="shell line before the training: 'module load cuda'",
    )
    job.add_argument("--notice-s", metavar="S", type=int, help="seconds before the time limit to save and requeue")
    job.add_argument("--like", metavar="RUN", help="an earlier run: its save times set --notice-s")
    command.add_argument("--dry-run", action="store_true", help="print the script; submit nothing")
    command.add_argument("--json", action="store_true", help="one JSON document")
    resolve.declare_flags(command)
    add_cmd(command)
    command.set_defaults(execute=execute)
    _add_resume(subcommands)


def execute(arguments: argparse.Namespace) -> None:
    """Render, check, submit."""
    wanted = _wanted(arguments)
    script = render(wanted)
    not_checked = ""
    _limit(wanted, None)
    config = _configure(arguments, wanted)
    run_dir = config.settings.run_dir
    try:
        here = site.gather(partition=wanted.partition, save_s=wanted.save_s)
        here = here if wanted.partition is not None else site.only_default(here)
        attempt_s = _limit(wanted, here)
        findings = _findings(here)
        _say_busy(run_dir, wanted)
    except SlurmError as error:
        if not arguments.dry_run:
            raise StepkeeperError(str(error), ExitCode.NO_SLURM) from error
        not_checked = f"the script is not checked against a cluster: {error}"
        printing.warn(f"warning: {not_checked}")
        findings = []
    if arguments.dry_run:
        if arguments.json:
            lines = [not_checked] if not_checked else [_line(each) for each in findings]
            printing.say_json({"script": script, "findings": lines})
        else:
            sys.stdout.write(script)
            _warn(findings)
        return
    _warn(findings)
    sbatch.check(script)
    job = sbatch.submit(script)
    where = _where(run_dir, job, wanted)
    # each task of an array has a run of its own
    is_array = any(option.startswith(("--array", "-a")) for option in wanted.sbatch) or "SBATCH_ARRAY_INX" in os.environ
    if not is_array:
        _note(where, job, script, config)
    if arguments.json:
        printing.say_json({"job": job, "run_dir": where, "notice_s": notice_s(wanted), "script": script})
    else:
        printing.say(f"job {job} is submitted")
        printing.say(f"  run directory  {where}")
        if attempt_s is not None:
            length = printing.duration(attempt_s)
            printing.say(f"  time limit     {length} an attempt; a longer training is a chain of them")
        printing.say(f"  see            stepkeeper status {shlex.quote(where)}")
        printing.say(f"  stop           stepkeeper stop {shlex.quote(where)} (saves first), or scancel {job}")
        printing.say(f"  Slurm says     {queue.words(queue.query(str(job)), time.time())}")


def _note(where: str, job: int, script: str, config: Config) -> None:
    """Make the run directory and keep there how the job was submitted: from now on every command knows the run."""
    is_default = config.values["run_dir"].origin is Origin.DEFAULT
    try:
        group_readable = config.settings.group_readable
        directory = paths.prepare_run_directory(Path(where), group_readable=group_readable, default=is_default)
        noted = submission.Submission(
            job=str(job),
            at=time.time(),
            directory=os.getcwd(),
            log=requeue.log_of(str(job)),
            script=script,
            environment=submission.settings(os.environ),
        )
        submission.write(directory.path, noted)
        find.remember(directory.path, os.environ)
    except (StepkeeperError, OSError) as error:
        printing.warn(f"warning: the job is submitted, and the commands know its run only when it starts: {error}")


def _configure(arguments: argparse.Namespace, wanted: Wanted) -> Config:
    """Return the settings of the run.

    Raises:
        StepkeeperError: what the supervisor would refuse when the job starts, hours later.
    """
    sources = resolve.gather(resolve.read_flags(arguments), dict(os.environ))
    config = sources.resolve()
    run_dir = config.settings.run_dir
    if config.values["run_dir"].origin is not Origin.DEFAULT and "%" not in os.path.dirname(run_dir):
        paths.require_parent(Path(_where(run_dir, 0, wanted)))
    if _is_one_place(run_dir):  # it may hold a file of its own, or a run
        config = sources.resolve(Path(_where(run_dir, 0, wanted)))
        preflight.require_open(Path(_where(run_dir, 0, wanted)))
    most = re.fullmatch(r"(?:\d+-)?(\d+)", wanted.nodes or "")
    if most:
        shape.nodes_wanted(config, int(most[1]), wanted.command)
    else:  # in words that only sbatch understands
        cmd.require_startable(wanted.command, torchrun=config.settings.torchrun)
    script = own_script.look(wanted.command, Path.cwd())
    own_script.require_startable(script, torchrun=config.settings.torchrun)
    doubts = own_script.doubts(
        wanted.command,
        script,
        append=config.settings.resume_argument,
        framework=config.settings.framework,
    )
    if script.missing and not any(option.startswith(("--chdir", "-D")) for option in wanted.sbatch):
        printing.warn(f"warning: {script.missing}: mistyped? (a path in a container is fine)")
    if script.starts_ranks:
        printing.warn(f"note: {script.starts_ranks}")
    for doubt in doubts.said:
        printing.warn(f"warning: {doubt}")
    return config


def _is_one_place(run_dir: str) -> bool:
    """Tell whether a run directory is the same for each job."""
    return re.search("%[jAa]", run_dir) is None


def _say_busy(run_dir: str, wanted: Wanted) -> None:
    """Warn where another job has the run, unless this one is to wait for it.  Raises `SlurmError`."""
    waits = any(option.startswith(("--dependency", "-d")) for option in wanted.sbatch)
    if waits or not _is_one_place(run_dir):
        return
    if who := preflight.busy(Path(_where(run_dir, 0, wanted)), SlurmCommands()):
        printing.warn(f"warning: {who}")


def _limit(wanted: Wanted, here: Site | None) -> float | None:
    """Return the time limit of an attempt, in seconds; None where there is none, or it is not known.

    Raises:
        StepkeeperError: it leaves nothing for training.
    """
    asked = preflight.requested_limit(wanted.time, wanted.sbatch)
    if asked is not None:
        found, where = preflight.limit_seconds(asked), f"-t {asked}"
    elif here is not None and len(here.partitions) == 1:
        (partition,) = here.partitions
        found = partition.max_time_s if partition.default_time_s is None else partition.default_time_s
        where = f"partition {partition.name}, without -t"
    else:
        return None
    if found is not None:
        preflight.require_room(found, notice_s(wanted), where)
    return found


def _where(run_dir: str, job: int, wanted: Wanted) -> str:
    """Return the run directory; of an array, where each task has its own, its pattern."""
    named = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NAME": wanted.job_name or "", "SLURM_SUBMIT_DIR": os.getcwd()}
    try:
        return str(paths.expand_pattern(run_dir, {**os.environ, **named}))
    except StepkeeperError:
        return run_dir


def _wanted(arguments: argparse.Namespace) -> Wanted:
    training = read_cmd(arguments.cmd, "submit")
    save_s = None
    if arguments.like is not None:
        save_s = measure(find.find(arguments.like, os.environ)).persist_s
    return Wanted(
        command=training,
        program=program(),
        options=tuple(_options(arguments)),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        job_name=arguments.job_name or _name(list(training)),
        output=arguments.output,
        sbatch=tuple(arguments.sbatch),
        setup=tuple(arguments.setup),
        save_s=save_s,
        notice_s=arguments.notice_s,
    )


def _name(words: list[str]) -> str:
    """Return the name of the script or module in a command: `train` of `python -u src/train.py`."""
    words = cmd.shell_words(words) or words
    scripts = [Path(word).stem for word in words if word.endswith(".py")]
    modules = [word.rpartition(".")[2] for option, word in itertools.pairwise(words) if option == "-m"]
    name = [*scripts, *modules, Path(words[0]).name][0]
    return re.sub(r"[^\w.-]", "-", name) or "stepkeeper"


def _options(arguments: argparse.Namespace) -> list[str]:
    """Return the settings of the command line as options of `stepkeeper run`."""
    words = []
    for key, entry in resolve.read_flags(arguments).items():
        setting = SETTINGS[key]
        if not setting.flag:
            words += ["--set", f"{key}={_plain(entry.value)}"]
        elif isinstance(entry.value, bool):
            words.append(setting.flag if entry.value else f"--no-{setting.flag[2:]}")
        else:
            words += [setting.flag, _plain(entry.value)]
    return words


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _findings(here: Site) -> list[Finding]:
    """Return what the doctor says that this job should know."""
    return [
        finding
        for finding in rules.examine(here)
        if finding.level in (Level.PROBLEM, Level.WARNING) and finding.subject not in HANDLED
    ]


def _line(finding: Finding) -> str:
    return f"{finding.subject}: {finding.found}: {finding.means}" + (f" -> {finding.remedy}" if finding.remedy else "")


def _warn(findings: list[Finding]) -> None:
    for finding in findings:
        printing.warn(f"{finding.level.value}: {_line(finding)}")


# `stepkeeper resume RUN`: submit a run again, as it was submitted.


def _add_resume(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "resume",
        help="submit a run again; it resumes from its newest checkpoint",
        description="Submit a run again as it was submitted: the same batch script, options and settings, which are "
        "shown first.  It resumes in its run directory, from the newest verified checkpoint.  Other variables come "
        "from this shell.",
    )
    add_run(command)
    command.add_argument(
        "--sbatch", metavar="OPTION", action="append", default=[], help="change one option: --sbatch=--time=2:00:00"
    )
    command.add_argument("--dry-run", action="store_true", help="show how it would be submitted; submit nothing")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=resume)


def resume(arguments: argparse.Namespace) -> None:
    """Submit a run again."""
    wrong = next((option for option in arguments.sbatch if not option.startswith("-")), None)
    if wrong is not None:
        raise UsageError(f"--sbatch {wrong!r}: write the option with its dashes")
    run = find.find(arguments.run, os.environ)
    preflight.require_open(run.path)
    newest = _newest_job(run)
    more = [*_after(run, newest), *arguments.sbatch]
    submission = _submission(run, newest)
    _require_current(run, submission)
    if not arguments.json:
        _show_submission(submission, more)
    document = {"run_directory": str(run.path), "as_job": submission.job, "sbatch": _sbatch_line(submission, more)}
    if arguments.dry_run:
        if arguments.json:
            printing.say_json({**document, "script": submission.script})
        return
    job = _submit(run, submission, more)
    if arguments.json:
        printing.say_json({**document, "job": job})
    else:
        printing.say(f"job {job} is submitted; it continues {run.path}")
        printing.say(f"  see            stepkeeper status {job}")
        printing.say(f"  Slurm says     {queue.words(queue.query(job), time.time())}")


def _newest_job(run: RunDirectory) -> str:
    """Return the newest job of a run, as Slurm's commands name it.

    Raises:
        StepkeeperError: no job is known.
    """
    status = status_file.known(run.status)  # of one of a newer version, the other files may say
    waiting = queue.waiting(run, status)
    if waiting is not None:
        return waiting.job
    if status is not None:
        return queue.name(status)
    raise NotFoundError(f"{run.path}: no job of this run is known: submit it with --run-dir")


def _after(run: RunDirectory, job: str) -> list[str]:
    """Return what makes the new job wait for the end of the run's newest one, where that is ending.

    Raises:
        StepkeeperError: that one works on the run, or waits to do so; or Slurm does not answer.
    """
    queued = queue.query(job)
    if queued.error:
        raise StepkeeperError(f"job {job} may still be there: {queued.error}", ExitCode.NO_SLURM)
    if queue.is_over(queued):
        return []
    if queued.state is not None and job_state(queued.state) is JobState.COMPLETING:
        return [f"--dependency=afterany:{job}"]
    said = queue.words(queued, time.time())
    raise StepkeeperError(f"{said}: the run is not over; `stepkeeper stop {run.path}` ends it first", ExitCode.RUN_BUSY)


def _submission(run: RunDirectory, newest: str) -> Submission:
    """Return how the run was submitted: as it was recorded, else as Slurm still knows.

    Raises:
        StepkeeperError: neither says so.
    """
    recorded = submissions.read(run.path)
    if recorded is not None and not recorded.secret:
        return recorded
    why = "no record of its submission"
    if recorded is not None:
        why = "its batch script or its options hold what looks like a secret, of which no copy is kept"
        if recorded.path and (script := _own(Path(recorded.path))):
            printing.warn(f"note: {recorded.path} is taken as it is now: of a script with a secret no copy is kept")
            return msgspec.structs.replace(recorded, script=script)
    try:
        return requeue.find_out(newest, {})
    except SlurmError as error:
        script = f" ({recorded.path})" if recorded is not None and recorded.path else ""
        raise NotFoundError(
            f"{run.path}: {why}, and Slurm does not have it either ({error}); submit your batch script{script} again "
            f"with STEPKEEPER_RUN_DIR={run.typed}"
        ) from error


def _require_current(run: RunDirectory, submission: Submission) -> None:
    """Refuse settings that this release does not take, before a job waits with them.

    Raises:
        StepkeeperError: a variable of then, or a variable or a file of now, is wrong.
    """
    try:
        resolve.read_environment(submission.environment)
    except StepkeeperError as error:
        raise UsageError(
            f"{error}; job {submission.job} had this variable: correct your batch script, and submit it again with "
            f"STEPKEEPER_RUN_DIR={run.typed}"
        ) from error
    resolve.gather({}, {**os.environ, **submission.environment})


def _own(path: Path) -> str:
    """Return the user's own batch script; empty where it is not there any more."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _sbatch_line(submission: Submission, more: list[str]) -> str:
    """Return the command line of sbatch, as a person reads it."""
    script = submission.path or "(its batch script)"
    options = shlex.join(redact_words(["sbatch", *requeue.options(submission, more)]))
    arguments = shlex.join(redact_words(submission.arguments))
    return f"{options} {shlex.quote(script) if submission.path else script} {arguments}".rstrip()


def _show_submission(submission: Submission, more: list[str]) -> None:
    printing.say(f"as job {submission.job} was submitted, in {submission.directory}:")
    printing.say(f"  {_sbatch_line(submission, more)}")
    for name, value in sorted(submission.environment.items()):
        printing.say(f"  {name}={value}")
    if not submission.path:
        for line in submission.script.splitlines():
            if line.startswith(("#SBATCH", "exec ")):
                printing.say(f"  | {line}")
    for each in submission.unknown:
        printing.say(f"  not known: {each}")


def _submit(run: RunDirectory, submission: Submission, more: list[str]) -> str:
    """Submit it, and note the new job.

    Raises:
        StepkeeperError: Slurm refuses it.
    """
    try:
        held = lease.read(run.path)
    except lease.LeaseError as error:
        raise StepkeeperError(str(error), ExitCode.RUN_DIRECTORY) from error
    number = held.job_id if held is not None else submission.number
    try:
        job = requeue.submit(submission, run.path, number, more)
    except SlurmError as error:
        code = ExitCode.NO_SLURM if error.unreachable else ExitCode.START_FAILED
        raise StepkeeperError(f"Slurm refuses the job: {error}", code) from error
    try:
        again = msgspec.structs.replace(submission, job=job, at=time.time(), log=requeue.log_of(job))
        submissions.write(run.path, again)
        find.remember(run.path, os.environ)
    except OSError as error:
        printing.warn(f"warning: job {job} is submitted, and not noted in the run directory: {error}")
    return job

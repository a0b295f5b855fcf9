"""`stepkeeper submit [options] -- CMD ARGS...`: a batch script for this cluster, checked, then submitted."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
import time
from pathlib import Path

from stepkeeper.cli import printing
from stepkeeper.config import resolve, shape
from stepkeeper.config.resolve import Config, Origin
from stepkeeper.config.settings import SETTINGS
from stepkeeper.core.exits import ExitCode
from stepkeeper.doctor import rules, site
from stepkeeper.doctor.site import Finding, Level, Site
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_analytics import queue
from stepkeeper.run_store import find, paths, run_registry, submission
from stepkeeper.slurm import cmd, requeue
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.submit import own_script, preflight, sbatch
from stepkeeper.submit.plan import METRICS_NAME, measure
from stepkeeper.submit.sbatch import Wanted, notice_s, program, render

HANDLED = ("JobRequeue", "JobFileAppend", "send_user_signal")  # by the directives of our own script


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "submit",
        help="render a batch script for this cluster, check it, and submit it",
        description="Render a batch script for this cluster, have Slurm check it, and submit it: "
        "stepkeeper submit -N 4 --gpus-per-node 8 -t 1-00:00:00 --setup 'module load cuda' -- python train.py",
        allow_abbrev=False,
    )
    job = command.add_argument_group("job")
    job.add_argument("-N", "--nodes", metavar="N", default="1", help="nodes, spares included (default: 1)")
    job.add_argument("--gpus-per-node", metavar="N", help="GPUs a node, as sbatch reads them")
    job.add_argument("-t", "--time", metavar="TIME", help="time limit of one attempt; a longer training is a chain")
    job.add_argument("-p", "--partition", metavar="NAME", help="default: the cluster's")
    job.add_argument("-A", "--account", metavar="NAME", help="who pays")
    job.add_argument("-J", "--job-name", metavar="NAME", help="default: the script's name")
    job.add_argument("-o", "--output", metavar="PATTERN", default="%x-%j.log", help="the log (default: %%x-%%j.log)")
    job.add_argument(
        "--sbatch", metavar="OPTION", action="append", default=[], help="any other option: --sbatch=--mem=0; repeat it"
    )
    job.add_argument(
        "--setup", metavar="LINE", action="append", default=[], help="shell before the training: 'module load cuda'"
    )
    job.add_argument("--notice-s", metavar="S", type=int, help="seconds before the time limit to save and requeue")
    job.add_argument("--like", metavar="RUN", help="a run that has saved: its save time sets --notice-s")
    command.add_argument("--dry-run", action="store_true", help="print the script; submit nothing")
    command.add_argument("--json", action="store_true", help="one JSON document")
    resolve.declare_flags(command)
    command.add_argument("cmd", nargs=argparse.REMAINDER, metavar="-- CMD ARGS...")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Render, check, submit."""
    wanted = _wanted(arguments)
    script = render(wanted)
    not_checked = ""
    _limit(wanted, None)
    config = _configure(arguments, wanted)
    run_dir = config.settings.run_dir
    try:
        here = _site(wanted)
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
            printing.say_json({"script": script, "findings": lines}, indent=2)
        else:
            sys.stdout.write(script)
            _warn(findings)
        return ExitCode.FINISHED
    _warn(findings)
    sbatch.check(script)
    job = sbatch.submit(script)
    where = _where(run_dir, job, wanted)
    if not _is_array(wanted):
        _note(where, job, script, config)
    if arguments.json:
        printing.say_json({"job": job, "run_dir": where, "notice_s": notice_s(wanted), "script": script}, indent=2)
    else:
        printing.say(f"job {job} is submitted")
        printing.say(f"  run directory  {where}")
        if attempt_s is not None:
            length = printing.duration(attempt_s)
            printing.say(f"  time limit     {length} an attempt; a longer training is a chain of them")
        printing.say(f"  see            stepkeeper status {shlex.quote(where)}")
        printing.say(f"  stop           stepkeeper stop {shlex.quote(where)} (saves first), or scancel {job}")
        printing.say(f"  Slurm says     {queue.words(queue.query(str(job)), time.time())}")
    return ExitCode.FINISHED


def _is_array(wanted: Wanted) -> bool:
    """Tell whether each task of the job has a run of its own."""
    return any(option.startswith(("--array", "-a")) for option in wanted.sbatch) or "SBATCH_ARRAY_INX" in os.environ


def _note(where: str, job: int, script: str, config: Config) -> None:
    """Make the run directory and keep there how the job was submitted: from now on every command knows the run."""
    is_default = config.values["run_dir"].origin is Origin.DEFAULT
    try:
        log = requeue.log_of(str(job))
    except SlurmError:
        log = ""  # a help for people: the job may be over already
    try:
        group_readable = config.settings.group_readable
        directory = paths.prepare_run_directory(Path(where), group_readable=group_readable, default=is_default)
        noted = submission.Submission(
            job=str(job),
            at=time.time(),
            directory=os.getcwd(),
            log=log,
            script=script,
            environment=submission.settings(os.environ),
        )
        submission.write(directory.path, noted)
        run_registry.remember(directory.path, os.environ)
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
    doubts = own_script.doubts(wanted.command, script, append=config.settings.resume_argument)
    if script.missing and not any(option.startswith(("--chdir", "-D")) for option in wanted.sbatch):
        printing.warn(f"warning: {script.missing}: mistyped? (a path in a container is fine)")
    if script.starts_ranks:
        printing.warn(f"note: {script.starts_ranks}")
    for doubt in filter(None, (doubts.no_place, doubts.unknown, doubts.no_way)):
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
    words = arguments.cmd[1:] if arguments.cmd[:1] == ["--"] else arguments.cmd
    if not words or (arguments.cmd[:1] != ["--"] and words[0].startswith("-")):
        raise StepkeeperError("no CMD: write `stepkeeper submit [options] -- CMD ARGS...`", ExitCode.USAGE)
    save_s = None
    if arguments.like is not None:
        directory = find.find(arguments.like, os.environ)
        save_s = measure(directory.journal, directory.path / METRICS_NAME).persist_s
    return Wanted(
        command=tuple(words),
        program=program(),
        options=tuple(_options(arguments)),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        job_name=arguments.job_name or _name(words),
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


def _site(wanted: Wanted) -> Site:
    """Return the cluster as this job will see it.  Raises `SlurmError`."""
    here = site.gather(partition=wanted.partition, save_s=wanted.save_s)
    return here if wanted.partition is not None else site.only_default(here)


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

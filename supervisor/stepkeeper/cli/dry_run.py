"""`stepkeeper run --dry-run -- CMD`: what would be started, and from what it would resume.  Starts nothing.

Outside a job what only a job knows is assumed, and said to be.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepkeeper import printing
from stepkeeper.cli import attempt
from stepkeeper.config import resolve, shape
from stepkeeper.config.resolve import Config, Sources
from stepkeeper.config.settings import SETTINGS
from stepkeeper.config.values import shown
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.placement import places
from stepkeeper.core.state import Nodes, State
from stepkeeper.errors import StepkeeperError
from stepkeeper.frameworks.asking import Question, answer
from stepkeeper.frameworks.following import Following
from stepkeeper.redaction import redact, redact_words
from stepkeeper.run_store import paths
from stepkeeper.slurm import cmd
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.slurm.launch import Allocation, read_allocation, watcher_argv
from stepkeeper.submit import own_script
from stepkeeper.supervisor.actions.launch import Meeting, launch_argv
from stepkeeper.supervisor.loop import watcher_program
from stepkeeper_trainer.formats import steps
from stepkeeper_trainer.formats.steps import COMMITTED

# what Slurm would set, shown as it is written in a pattern
_UNKNOWN = {"SLURM_JOB_ID": "%j", "SLURM_ARRAY_TASK_ID": "%a", "SLURM_JOB_NAME": "%x"}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a start would do, for people and as JSON."""

    run_directory: str
    attempt: int
    previous: str  # how the attempt before ended; empty where there was none
    finished_step: int | None  # of a run that is not started again
    resume_from: str | None
    passed_over: tuple[str, ...]
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    watchers: tuple[str, ...]
    training: tuple[str, ...]
    assumed: tuple[str, ...]
    doubts: tuple[str, ...] = ()  # why a resume may fail
    framework: str = ""  # of the script, where it does not use our own library


def show(sources: Sources, environment: Mapping[str, str], command: tuple[str, ...], *, as_json: bool) -> None:
    """Print the plan."""
    plan = make(sources, environment, command)
    if as_json:
        printing.say_json(plan)
        return
    printing.say(f"run directory  {plan.run_directory}")
    printing.say(f"attempt        {plan.attempt}{f' ({plan.previous})' if plan.previous else ''}")
    if plan.finished_step is not None:
        printing.say(f"finished at step {plan.finished_step}: nothing would be started")
        return
    if plan.framework:
        printing.say(f"framework      {plan.framework}")
    found = f"{plan.resume_from} ({COMMITTED}: the job verifies it first)" if plan.resume_from else ""
    printing.say(f"resume from    {found or 'the beginning: no step directory, or damaged ones only'}")
    for each in plan.passed_over:
        printing.say(f"passed over    {each}")
    spares = f" (spare: {' '.join(plan.spares)})" if plan.spares else ""
    printing.say(f"nodes          {' '.join(plan.nodes)}{spares}")
    for each in plan.assumed:
        printing.say(f"assumed        {each}")
    for each in plan.doubts:
        printing.say(f"doubtful       {each}")
    printing.say()
    printing.say(f"watchers:  {shlex.join(plan.watchers)}")
    printing.say()
    printing.say(f"training:  {shlex.join(plan.training)}")


def make(sources: Sources, environment: Mapping[str, str], command: tuple[str, ...]) -> Plan:
    """Return the plan of a start.

    Raises:
        StepkeeperError: the start would be refused, or Slurm does not answer.
    """
    is_job = "SLURM_JOB_ID" in environment and "SLURM_JOB_NODELIST" in environment
    expanding = environment if is_job else {**_UNKNOWN, **environment}
    path = paths.expand_pattern(sources.resolve().settings.run_dir, expanding)
    config = sources.resolve(path)
    directory = paths.RunDirectory(path.resolve())
    assumed = ["step directories are compared by names and sizes only; a start reads every byte"]
    allocation = _allocation(config, environment) if is_job else _assume(config, environment, command, assumed)
    sized = shape.of(config, len(allocation.nodes), command, allocation.tasks_per_node)
    nodes = places(State(nodes=Nodes(usable=allocation.nodes, wanted=sized.wanted)))
    carried = attempt.carried(directory)
    resume_from, passed_over = _resume(directory)
    script = own_script.look(command, Path.cwd())
    own_script.require_startable(script, torchrun=config.settings.torchrun)
    following = attempt.following(command, config)
    arguments = None
    if following is not None and resume_from is None and not passed_over:
        resume_from, arguments, passed_over = _resume_of_framework(following)
    job = attempt.job(
        command,
        config.settings,
        allocation,
        directory,
        attempt=carried.attempt,
        socket="",
        script=script,
        following=following,
    )
    if config.settings.torchrun and job.wrapped:
        assumed.append("torchrun's rendezvous port is a free one of the first node; 0 stands for it")
    if script.starts_ranks:
        assumed.append(script.starts_ranks)
    doubts = own_script.doubts(
        command, script, append=config.settings.resume_argument, framework=config.settings.framework
    )
    answered = carried.baseline.start_s > 0.0
    meeting = Meeting(
        launch=0,
        nodes=nodes,
        address=nodes[0],
        port=0,
        resume_from=resume_from,
        arguments=arguments,
        answered=answered,
    )
    training = launch_argv(job, meeting, directory.logs(carried.attempt, meeting.launch))
    return Plan(
        run_directory=str(directory.path),
        attempt=carried.attempt,
        previous=carried.previous,
        finished_step=attempt.finished_step(directory.path),
        resume_from=resume_from,
        passed_over=passed_over,
        nodes=nodes,
        spares=tuple(node for node in allocation.nodes if node not in nodes),
        watchers=tuple(watcher_argv(allocation.nodes, watcher_program())),
        training=tuple(redact_words(training)),
        assumed=tuple(assumed),
        doubts=doubts.said,
        framework=_shown(following) if following is not None else "",
    )


def _allocation(config: Config, environment: Mapping[str, str]) -> Allocation:
    try:
        return read_allocation(environment, SlurmCommands(), config.settings.tasks_per_node)
    except SlurmError as error:
        raise StepkeeperError(f"Slurm does not answer: {error}", ExitCode.NO_SLURM) from error


def _assume(config: Config, environment: Mapping[str, str], command: Sequence[str], assumed: list[str]) -> Allocation:
    """Return the smallest allocation that the settings want; say what was assumed."""
    settings = config.settings
    fewest, _ = cmd.nodes_range(command) or (1, 1)
    count = settings.spares + max(settings.min_nodes, fewest)
    assumed.append(f"not inside a job: {count} node{'s' if count > 1 else ''}; a job uses all that it has")
    if settings.tasks_per_node is None:
        assumed.append("one rank a node; a job starts one a GPU")
    for name, letter in _UNKNOWN.items():
        if letter in settings.run_dir and name not in environment:
            assumed.append(f"{letter} of the run directory is the job's")
    nodes = tuple(f"node{number}" for number in range(1, count + 1))
    return Allocation(
        job_id=0,
        slurm_name="0",
        restart_count=0,
        nodes=nodes,
        batch_node=nodes[0],
        tasks_per_node=settings.tasks_per_node or 1,
        gpus_per_node=None,
        cpus_per_task=None,
        overcommit=False,
    )


def _resume(directory: paths.RunDirectory) -> tuple[str | None, tuple[str, ...]]:
    """Return the newest step directory that is not damaged by names and sizes, and what was passed over."""
    if not os.path.isdir(directory.checkpoints):
        return None, ()
    choice = steps.newest_verified(Path(directory.checkpoints), deep=False)
    skipped = tuple(f"{step.path.name}: {'; '.join(problems)}" for step, problems in choice.skipped)
    return str(choice.chosen.path) if choice.chosen else None, skipped


def _resume_of_framework(following: Following) -> tuple[str | None, tuple[str, ...] | None, tuple[str, ...]]:
    """Return the newest whole checkpoint of the script's framework, its resume arguments, and what was passed over."""
    if following.directory is None:
        return None, None, ()
    question = Question(
        framework=following.framework,
        root=str(following.directory),
        patterns=following.patterns,
        deep=False,
        converted=following.converted,
    )
    try:
        found = answer(question)
    except OSError as error:
        return None, None, (f"{error.filename}: {error.strerror}",)
    passed = tuple(f"{each.name}: {each.problem}" for each in found.passed)
    if found.newest is None:
        return None, None, passed
    return found.newest.directory, following.arguments(found.newest), passed


def _shown(following: Following) -> str:
    place = f"checkpoints in {following.directory}" if following.directory is not None else "checkpoints unknown"
    resume = following.resume or "nothing shows that the script takes a resume argument of it"
    return f"{following.title}: {following.why}; {place} ({following.where}); {resume}"


# `stepkeeper run --print-config`: every setting, its value, and where that came from.  Needs no Slurm.


def show_config(sources: Sources, environment: Mapping[str, str], *, as_json: bool) -> None:
    """Print the configuration of a run that would start here."""
    config, unknown = _resolve(sources, environment)
    if as_json:
        printing.say_json({**resolve.record_document(config), "run_directory_unknown": unknown or None})
        return
    table = [("KEY", "VALUE", "UNIT", "FROM")]
    for key, found in config.values.items():
        where = found.origin.value + (f": {found.where}" if found.where else "")
        lock = f", locked in {found.locked}" if found.locked else ""
        table.append((key, redact(shown(found.value)), SETTINGS[key].about.unit or "-", redact(where + lock)))
    printing.say_table(table)
    if unknown:
        printing.warn(f"the run directory's own file is not among these: {unknown}")


def _resolve(sources: Sources, environment: Mapping[str, str]) -> tuple[Config, str]:
    """Return the configuration, and why the run directory is not known where that is so."""
    config = sources.resolve()
    try:
        path = paths.expand_pattern(config.settings.run_dir, environment)
    except StepkeeperError as error:
        if "SLURM_JOB_ID" in environment:
            raise  # the job itself would end with it
        return config, str(error)
    return sources.resolve(path), ""

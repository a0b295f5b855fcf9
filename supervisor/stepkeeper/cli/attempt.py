"""What the start of an attempt and its dry run share: what is left of the attempts before, and what is launched."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from stepkeeper.config import rank_settings, resolve
from stepkeeper.config.resolve import Config
from stepkeeper.config.settings import RunSettings
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError
from stepkeeper.frameworks import selection
from stepkeeper.frameworks.following import Following, follow, notice, without_argument
from stepkeeper.frameworks.recognise import AUTO, NONE
from stepkeeper.log import Log
from stepkeeper.redaction import redact
from stepkeeper.run_store import find, journal, paths, submission
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm import cmd, requeue, resubmission
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.launch import Allocation, Geometry
from stepkeeper.submit import own_script
from stepkeeper.supervisor.actions.launch import Job
from stepkeeper_trainer.formats import lease, records


def carried(directory: paths.RunDirectory) -> journal.Carried:
    """Return what the attempts before left.  Raises `StepkeeperError`."""
    try:
        return journal.reconstruct(directory.journal)
    except OSError as error:
        raise StepkeeperError(
            f"{directory.journal}: cannot be read: {error.strerror}", ExitCode.RUN_DIRECTORY
        ) from error


def continued(environment: dict[str, str]) -> Path | None:
    """Take out of the environment whose run this job goes on with, where it was submitted in place of another.

    It must be that job's run still, or ours already: the variable may have been inherited by any other job.
    """
    number, _, directory = environment.pop(resubmission.CONTINUES, "").partition(":")
    if not number.isdigit() or not os.path.isabs(directory):
        return None
    try:
        held = lease.read(Path(directory))
        submitted = submission.read(Path(directory)) if held is None else None  # no job has worked on it yet
    except (OSError, lease.LeaseError):
        return None  # another place than that is then what the settings say
    ours = environment.get("SLURM_JOB_ID", "")
    whose = str(held.job_id) if held is not None else str(submitted.number) if submitted is not None else ""
    return Path(directory) if whose and whose in (number, ours) else None


def standby_imports(settings: RunSettings) -> tuple[str, ...] | None:
    """Return what warm standbys import besides torch and the trainer library; None where there are never any."""
    modules = (settings.warm_standby_imports or "").split(",")
    return tuple(module.strip() for module in modules if module.strip()) if settings.warm_standby is not False else None


def finished_step(path: Path) -> int | None:
    """Return the last step of a finished run, else None.  Raises `StepkeeperError`."""
    try:
        said = records.read_outcome(path)
    except (OSError, ValueError) as error:
        raise StepkeeperError(
            f"{path / records.OUTCOME_NAME}: cannot be read: {error}", ExitCode.RUN_DIRECTORY
        ) from error
    return said.step if said is not None and said.outcome == "finished" else None


def following(command: tuple[str, ...], config: Config) -> Following | None:
    """Return the framework whose checkpoints are followed; None where our own library saves, or nobody is known to.

    Raises:
        StepkeeperError: the settings name a framework that is not known.
    """
    settings, where = config.settings, config.values["framework"].where
    if settings.framework == NONE:
        return None
    frameworks = selection.known(config.generic)
    named = None
    if settings.framework != AUTO:
        named = selection.named(settings.framework, where, frameworks, config.generic)
    try:
        return follow(
            own_script.training(command, Path.cwd()),
            Path.cwd(),
            frameworks,
            named=named,
            directory=settings.checkpoint_dir,
            patterns=config.generic,
        )
    except OSError as error:
        raise UsageError(f"--checkpoint-dir {settings.checkpoint_dir}: cannot be listed: {error.strerror}") from error


def say_framework(found: Following | None, command: Sequence[str], settings: RunSettings, log: Log) -> None:
    """Say which framework is followed, and what it cannot do, at the first launch and not at the first resume."""
    if found is None:
        return
    resume = found.resume or without_argument(found, attach=settings.attach, repair_pointers=settings.repair_pointers)
    log.info(
        "framework_recognized",
        framework=found.framework,
        why=found.why,
        checkpoints=str(found.directory or "unknown"),
        where=found.where,
        resume=resume or "unknown",
        save=found.save,
    )
    if found.directory is None:
        log.warning("framework_directory_unknown", framework=found.framework, why=found.where)
    elif not resume and not found.has_arguments:
        other = ", or set --repair-pointers" if found.points else ""
        why = f"this framework has no resume argument: have the script read STEPKEEPER_RESUME_FROM{other}"
        log.warning("framework_cannot_resume", framework=found.framework, why=why)
    elif not (resume or settings.resume_argument or cmd.has_place(command)):
        log.warning(
            "framework_cannot_resume",
            framework=found.framework,
            why="nothing shows that the script takes a resume argument of this framework: say {resume} where it goes, "
            "set --resume-argument, or have the script read STEPKEEPER_RESUME_FROM",
        )
    said = notice(found, command, attach=settings.attach)
    if not said.answered:
        log.warning("cannot_save_on_notice", framework=found.framework, why=said.means, ask_for=said.remedy)


def job(
    command: tuple[str, ...],
    settings: RunSettings,
    allocation: Allocation,
    directory: paths.RunDirectory,
    *,
    attempt: int,
    socket: str,
    script: own_script.Found,
    following: Following | None = None,
) -> Job:
    """Return what is the same for every launch of an attempt."""
    return Job(
        command=command,
        torchrun=settings.torchrun,
        geometry=Geometry(
            tasks_per_node=allocation.tasks_per_node,
            cpus_per_task=allocation.cpus_per_task,
            overcommit=allocation.overcommit,
        ),
        run_directory=directory.path,
        run_id=directory.run_id,
        attempt=attempt,
        socket=socket,
        variables={
            **rank_settings.tier_variables(settings),
            **rank_settings.rank_variables(settings),
            **rank_settings.attach_variables(settings),
        },
        starts_ranks=bool(script.starts_ranks),
        resume_argument=settings.resume_argument,
        takes_resume=script.takes,
        following=following,
    )


# What an attempt notes at its start: by what settings and code it goes, and where its run is.


def note(config: Config, directory: RunDirectory, number: int, command: Sequence[str], log: Log) -> None:
    """Say and keep by what the attempt goes; storage that does not take it stops nothing.

    Raises:
        StepkeeperError: the code is not that of the attempt before, and the user wants no other (`--same-code`).
    """
    if changed := resolve.changed_settings(config):
        log.info("configured", **{key.replace(".", "_"): value for key, value in changed.items()})
    for each in config.outdated:
        log.warning("setting_removed", key=each.key, where=redact(each.where), instead=each.instead)
    try:
        resolve.write_record(directory.path, number, config)
    except OSError as error:
        log.warning("config_not_recorded", error=f"{error.filename}: {error.strerror}")
    try:
        find.remember(directory.path, os.environ)
    except OSError as error:  # a help for people, no more: a home may be read-only on compute nodes
        log.debug("run_not_noted", error=f"{error.filename}: {error.strerror}")
    _compare_code(directory, number, command, log, must_be_same=config.settings.same_code)


def note_submission(directory: RunDirectory, allocation: Allocation, words: Sequence[str], log: Log) -> None:
    """Keep how the job was submitted, for `stepkeeper resume`, on a thread: Slurm may be slow, and nothing waits.

    What `submit` or `resume` has kept already stays; so an attempt that was requeued asks Slurm nothing.
    """
    environment = dict(os.environ)

    def keep() -> None:
        try:
            known_already = submission.read(directory.path)
            if known_already is not None and known_already.job == allocation.slurm_name:
                return
            found = requeue.find_out(allocation.slurm_name, environment, words, len(allocation.nodes))
            submission.write(directory.path, found)
        except (SlurmError, OSError) as error:
            log.warning("submission_not_recorded", error=str(error))

    threading.Thread(target=keep, name="submission", daemon=True).start()


def _compare_code(
    directory: RunDirectory, number: int, command: Sequence[str], log: Log, *, must_be_same: bool
) -> None:
    now = submission.look_at_code(command, Path.cwd())
    before = submission.newest_code_before(directory.path, number)
    differences = submission.code_differences(before, now) if before is not None else []
    if differences and must_be_same:
        raise StepkeeperError(
            f"the code is not that of the attempt before: {'; '.join(differences)}; bring it back, or continue with it "
            "by --no-same-code",
            ExitCode.CODE_CHANGED,
        )
    if differences:
        log.warning("code_changed", differences=differences, why="this attempt resumes by other code than the last one")
    try:
        submission.write_code(directory.path, number, now)
    except OSError as error:
        log.warning("code_not_recorded", error=f"{error.filename}: {error.strerror}")

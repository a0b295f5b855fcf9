"""What a run would know of a command: its framework, its answer to a notice, and how it is resumed."""

from __future__ import annotations

from collections.abc import Sequence

from stepkeeper.doctor.site import Finding, Level
from stepkeeper.frameworks import converting
from stepkeeper.frameworks.following import Following, notice, without_argument
from stepkeeper.frameworks.framework import WorldChange
from stepkeeper.slurm import cmd


def examine(
    found: Following | None,
    command: Sequence[str],
    *,
    attach: str,
    resume_argument: bool | None,
    ours: bool,
    repair_pointers: bool = False,
) -> list[Finding]:
    """Return what there is to say of a command.

    Args:
        found: the framework of its script.
        command: as behind `stepkeeper run --`.
        attach: the setting.
        resume_argument: the setting.
        ours: the script uses our own trainer library.
        repair_pointers: the setting.
    """
    if ours:
        means = "it saves on a notice, and resumes from what it has saved"
        return [Finding(level=Level.OK, subject="framework", found="the script uses stepkeeper_trainer", means=means)]
    if found is None:
        return [
            Finding(
                level=Level.WARNING,
                subject="framework",
                found="none is recognized in the command, and no import of stepkeeper_trainer",
                means="a run relaunches the script; it chooses no checkpoint, and passes no resume argument",
                remedy="name it with --framework, or with --checkpoint-dir where its checkpoints are there already",
            )
        ]
    return [
        _directory(found),
        _notice(found, command, attach),
        _resume(
            found,
            command,
            setting=resume_argument,
            other=without_argument(found, attach=attach, repair_pointers=repair_pointers),
        ),
        _world(found, attach),
    ]


def _directory(found: Following) -> Finding:
    recognized = f"{found.title}: {found.why}"
    if found.directory is None:
        return Finding(
            level=Level.WARNING,
            subject="framework",
            found=recognized,
            means=f"where its checkpoints are is not known: {found.where}",
            remedy="set --checkpoint-dir",
        )
    means = f"its checkpoints are in {found.directory} ({found.where})"
    return Finding(level=Level.OK, subject="framework", found=recognized, means=means)


def _notice(found: Following, command: Sequence[str], attach: str) -> Finding:
    said = notice(found, command, attach=attach)
    level = Level.OK if said.answered else Level.WARNING
    return Finding(level=level, subject="save on notice", found=said.shown, means=said.means, remedy=said.remedy)


def _resume(found: Following, command: Sequence[str], *, setting: bool | None, other: str) -> Finding:
    subject, means = "resume argument", "the newest verified checkpoint is passed to the script at each launch"
    if found.has_arguments and cmd.has_place(command):
        place = "where {resume} stands"
    elif setting or (setting is None and found.appended and found.resume):
        place = f"at the end of the command ({found.resume or '--resume-argument'})"
    elif found.resume:
        place, means = found.resume, "the script itself takes the newest verified checkpoint"
    elif other:
        place, means = other, "the newest verified checkpoint is taken at each launch"
    else:
        return Finding(
            level=Level.WARNING,
            subject=subject,
            found="nothing shows that the script takes one",
            means="STEPKEEPER_RESUME_FROM names the newest verified checkpoint, and the script does not read it",
            remedy="write {resume} where it goes, set --resume-argument, or have the script read that variable"
            if found.has_arguments
            else "have the script read that variable"
            + (", or set --repair-pointers" if found.points else "")
            + ": this framework has no resume argument",
        )
    return Finding(level=Level.OK, subject=subject, found=place, means=means)


def _world(found: Following, attach: str) -> Finding:
    converts = found.framework == converting.FRAMEWORK
    if converts and (found.converted or attach in ("auto", found.framework)):
        return Finding(
            level=Level.OK,
            subject="ranks of a resume",
            found="any number of ranks: ZeRO is converted before a launch that needs it",
            means="a launch may shrink to --min-nodes; pipelines, tensor parallel ranks and experts are not converted",
        )
    means = {
        WorldChange.YES: "a launch may shrink to --min-nodes",
        WorldChange.NO: "a launch keeps its number of nodes, whatever --min-nodes says",
        WorldChange.SCRIPT: "whether a launch may shrink to --min-nodes is for the script to say",
    }[found.world_change]
    return Finding(
        level=Level.NOTE if found.world_change is WorldChange.NO else Level.OK,
        subject="ranks of a resume",
        found=found.world_change.value,
        means=means,
        remedy="set --attach auto: ZeRO is converted for another number of ranks" if converts else "",
    )

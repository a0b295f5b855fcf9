"""What the user's CMD is, and where its resume argument goes.  Pure: golden tests hold it.

The rule: a CMD that starts with `srun` is the user's own line; one that starts ranks itself (torchrun, `accelerate
launch`) gets one task a node; anything else gets one task a GPU.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from enum import Enum
from pathlib import PurePosixPath

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError

RESUME_PLACEHOLDER = "{resume}"
RESUME_VARIABLE = "STEPKEEPER_RESUME_FROM"
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh"))
_LAUNCHERS = frozenset(("torchrun", "ft_launcher", "deepspeed"))  # besides `accelerate launch`
_LAUNCHER_MODULES = frozenset(("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"))
# commands whose own words end where another command begins
_BEFORE_COMMANDS = frozenset(
    ("env", "exec", "time", "timeout", "nice", "ionice", "nohup", "stdbuf", "numactl", "setsid")
)
_SHAPE_OPTION = re.compile(
    r"-[nc]\d*|--(?:ntasks|cpus-per|tres-per-task|exact|exclusive|overcommit)\S*|-O|:|--multi-prog"
)


class Kind(Enum):
    """How many tasks a CMD gets, and who gives them ranks."""

    OWN_SRUN = "the user's own srun line"
    LAUNCHER = "starts ranks itself: one task a node"
    RANK = "is a rank: one task a GPU"


def kind(command: Sequence[str]) -> Kind:
    """Tell what a CMD is, by its words up to the training script.

    >>> kind(["/usr/bin/srun", "-n", "8", "python", "train.py"])
    <Kind.OWN_SRUN: "the user's own srun line">
    >>> kind(["torchrun", "--nnodes=1:4", "train.py"])
    <Kind.LAUNCHER: 'starts ranks itself: one task a node'>
    >>> kind(["python", "train.py", "--launcher", "torchrun"])
    <Kind.RANK: 'is a rank: one task a GPU'>
    """
    if is_own_srun(command):
        return Kind.OWN_SRUN
    words = shell_words(command)
    return Kind.LAUNCHER if _starts_ranks(words if words is not None else command) else Kind.RANK


def is_own_srun(command: Sequence[str]) -> bool:
    """Return whether a CMD is a user's own srun line."""
    return _name(command[0]) == "srun"


def _name(word: str) -> str:
    return PurePosixPath(word).name


def _starts_ranks(words: Sequence[str]) -> bool:
    """Look for a launcher among the words before the script; what follows the script is the script's own."""
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        name = _name(word)
        if name in _LAUNCHERS or (name == "accelerate" and following == "launch"):
            return True
        if word == "-m":
            return following in _LAUNCHER_MODULES
        if name.endswith(".py"):
            return False
    return False


def _before_script(command: Sequence[str]) -> list[str]:
    """Return the words up to the training script."""
    return list(itertools.takewhile(lambda word: not word.endswith(".py"), command))


def shell_words(command: Sequence[str]) -> list[str] | None:
    """Return the words of a script that is given to a shell (`bash -c '...'`); None where there is none.

    The shell may stand behind other words: `srun -n4 bash -c '...'`, `apptainer exec image bash -c '...'`.
    """
    place = _script_place(command)
    if place is None:
        return None
    lexer = shlex.shlex(command[place], posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:  # a quotation that does not end, or one that only a shell understands
        return command[place].split()


def _script_place(command: Sequence[str]) -> int | None:
    """Return where the script of a `bash -c` stands."""
    for place, word in enumerate(command):
        if _name(word) not in _SHELLS:
            continue
        after = place + 1
        while after < len(command) and command[after].startswith("-"):
            is_script_next = not command[after].startswith("--") and "c" in command[after]
            after += 1
            if is_script_next:
                while after < len(command) and command[after].startswith("-"):  # bash -c -l '...'
                    after += 1
                return after if after < len(command) else None
    return None


def require_startable(command: Sequence[str], *, torchrun: bool) -> None:
    """Refuse what would start ranks twice, or never resume.

    Raises:
        StepkeeperError: what does, and what to write instead.
    """
    for word in command:
        if RESUME_PLACEHOLDER in word and word != RESUME_PLACEHOLDER and not re.search(r"\s", word):
            raise StepkeeperError(
                f"{word}: {RESUME_PLACEHOLDER} stands for two words, `--resume-from DIR`, and for none on the first "
                f"start; for an option of another name: bash -c 'exec PROGRAM "
                f"${{{RESUME_VARIABLE}:+--ckpt=${RESUME_VARIABLE}}}'",
                ExitCode.USAGE,
            )
    if is_own_srun(command):
        return
    if torchrun and kind(command) is Kind.LAUNCHER:
        raise StepkeeperError(
            "--torchrun (or the setting `torchrun`) starts one torchrun a node, and CMD starts ranks itself: "
            "leave out one of the two",
            ExitCode.USAGE,
        )
    if _name(command[0]) in _BEFORE_COMMANDS and any(_name(word) == "srun" for word in _before_script(command)):
        raise StepkeeperError(
            f"CMD starts srun behind `{command[0]}`, and would itself be started once a GPU: let CMD begin with srun, "
            "and put the rest behind its options, `srun OPTIONS env NAME=VALUE PROGRAM`",
            ExitCode.USAGE,
        )
    if any(_name(word) == "srun" for word in shell_words(command) or ()):
        raise StepkeeperError(
            "CMD is a shell script that starts srun, and would itself be started once a GPU: give the srun line "
            "itself, `stepkeeper run -- srun OPTIONS PROGRAM`, and put pipes and the like behind it: "
            "`srun OPTIONS bash -c '...'`",
            ExitCode.USAGE,
        )


def with_resume(command: Sequence[str], resume_from: str | None) -> list[str]:
    """Put the resume argument where `{resume}` stands, else at the end; none on the first start.

    A `bash -c SCRIPT` without further words has no end to put it: its next word would be the script's name.  There
    the script reads `STEPKEEPER_RESUME_FROM`, or says `{resume}`.

    >>> with_resume(["train.py", "{resume}", "--fast"], "/r/step_00000100")
    ['train.py', '--resume-from', '/r/step_00000100', '--fast']
    >>> with_resume(["train.py", "{resume}"], None)
    ['train.py']
    >>> with_resume(["bash", "-c", "python train.py {resume} | tee log"], "/r/s 1")
    ['bash', '-c', "python train.py --resume-from '/r/s 1' | tee log"]
    >>> with_resume(["bash", "-c", "python train.py"], "/r/s1")
    ['bash', '-c', 'python train.py']
    """
    argument = ["--resume-from", resume_from] if resume_from is not None else []
    if not any(RESUME_PLACEHOLDER in word for word in command):
        return [*command] if _script_place(command) == len(command) - 1 else [*command, *argument]
    result: list[str] = []
    for word in command:
        if word == RESUME_PLACEHOLDER:
            result += argument
        else:
            result.append(word.replace(RESUME_PLACEHOLDER, shlex.join(argument)))
    return result


def takes_resume(command: Sequence[str]) -> bool:
    """Return whether a CMD hears where to resume from: by an argument, or by reading the variable itself.

    >>> takes_resume(["bash", "-c", "python train.py"])
    False
    """
    return with_resume(command, "/") != with_resume(command, None) or any(RESUME_VARIABLE in word for word in command)


def leaves_shape_to_the_job(line: Sequence[str]) -> bool:
    """Return whether an own srun line says nothing of tasks and CPUs, so that those of the job fit it.

    A word of the program that looks like such an option counts as one: then nothing is added.
    """
    return not any(_SHAPE_OPTION.fullmatch(word) for word in line[1:])

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
from typing import NamedTuple

from stepkeeper.errors import UsageError

RESUME_PLACEHOLDER = "{resume}"
RESUME_OPTION = "--resume-from"
RESUME_VARIABLE = "STEPKEEPER_RESUME_FROM"
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh"))
_LAUNCHERS = frozenset(("torchrun", "ft_launcher", "deepspeed"))  # besides `accelerate launch`
# that start processes on all nodes of a job, as srun does
_EVERYWHERE = frozenset(("srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "horovodrun"))
_TORCHRUN_MODULES = frozenset(("torch.distributed.run", "torch.distributed.launch"))
_LAUNCHER_MODULES = _TORCHRUN_MODULES | {"accelerate.commands.launch"}
# commands whose own words end where another command begins
_BEFORE_COMMANDS = frozenset(
    ("env", "exec", "time", "timeout", "nice", "ionice", "nohup", "stdbuf", "numactl", "setsid")
)
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node(?:=(?P<value>.*))?")
_NNODES = re.compile(r"--nnodes(?:=(?P<value>.*))?")
_RANGE = re.compile(r"(\d{1,7}):(\d{1,7})")
_SHAPE_OPTION = re.compile(
    r"-[nc]\d*|--(?:ntasks|cpus-per|tres-per-task|exact|exclusive|overcommit)\S*|-O|:|--multi-prog"
)

_OUTPUT = re.compile(r"--output(?:=(?P<long>.+))?|-o(?P<short>.+)?")


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


def own_output(line: Sequence[str]) -> str:
    """Return where a user's own srun line writes what the tasks print; empty where it leaves that to us.

    >>> own_output(["srun", "-N2", "-o", "ranks-%t.txt", "python", "train.py", "-o", "model.pt"])
    'ranks-%t.txt'
    >>> own_output(["srun", "python", "train.py", "--output=model.pt"])
    ''
    """
    if not is_own_srun(line):
        return ""
    for place, word in enumerate(line[1:], 1):
        if word.endswith((".py", ".sh")) or word == "--" or _name(word).startswith("python") or is_shell(word):
            break
        if (option := _OUTPUT.fullmatch(word)) is not None:
            following = line[place + 1] if place + 1 < len(line) else ""
            return option["long"] or option["short"] or following
    return ""


def is_shell(word: str) -> bool:
    """Return whether a word of a CMD is a shell."""
    return _name(word) in _SHELLS


def starts_everywhere(words: Sequence[str]) -> str:
    """Return which program of a command starts processes on all nodes (`srun`, `mpirun`); empty where none does.

    >>> starts_everywhere(["timeout", "60", "/opt/mpi/bin/mpirun", "-np", "4", "train"])
    'mpirun'
    """
    before = _before_script(words) if _name(words[0]) in _BEFORE_COMMANDS else words[:1]
    return next((name for name in map(_name, before) if name in _EVERYWHERE), "")


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


def is_launcher_module(names: Sequence[str]) -> bool:
    """Return whether `python -m` starts a launcher, behind whose options the script stands."""
    return any(name in _LAUNCHER_MODULES for name in names)


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
            raise UsageError(
                f"{word}: {RESUME_PLACEHOLDER} stands for two words, `--resume-from DIR`, and for none on the first "
                f"start; for an option of another name: bash -c 'exec PROGRAM "
                f"${{{RESUME_VARIABLE}:+--ckpt=${RESUME_VARIABLE}}}'"
            )
    if is_own_srun(command):
        return
    if torchrun and kind(command) is Kind.LAUNCHER:
        raise UsageError(
            "--torchrun (or the setting `torchrun`) starts one torchrun a node, and CMD starts ranks itself: "
            "leave out one of the two"
        )
    if _name(command[0]) in _BEFORE_COMMANDS and any(_name(word) == "srun" for word in _before_script(command)):
        raise UsageError(
            f"CMD starts srun behind `{command[0]}`, and would itself be started once a GPU: let CMD begin with srun, "
            "and put the rest behind its options, `srun OPTIONS env NAME=VALUE PROGRAM`"
        )
    if program := starts_everywhere(command):
        raise UsageError(
            f"{program} starts processes on all nodes, and would be started once a GPU: let srun start them, "
            "`stepkeeper run -- srun --mpi=pmix OPTIONS PROGRAM` (`srun --mpi=list` shows the kinds)"
        )
    if any(_name(word) == "srun" for word in shell_words(command) or ()):
        raise UsageError(
            "CMD is a shell script that starts srun, and would itself be started once a GPU: give the srun line "
            "itself, `stepkeeper run -- srun OPTIONS PROGRAM`, and put pipes and the like behind it: "
            "`srun OPTIONS bash -c '...'`"
        )


def resume_argument(resume_from: str | None) -> tuple[str, ...]:
    """Return the argument of our own library's scripts; none on the first start."""
    return () if resume_from is None else (RESUME_OPTION, resume_from)


def with_resume(command: Sequence[str], argument: Sequence[str], *, append: bool = True) -> list[str]:
    """Put the resume argument where `{resume}` stands, else at the end, where it may; none on the first start.

    A `bash -c SCRIPT` without further words has no end to put it: its next word would be the script's name.  There
    the script reads `STEPKEEPER_RESUME_FROM`, or says `{resume}`.

    >>> with_resume(["train.py", "{resume}", "--fast"], resume_argument("/r/step_00000100"))
    ['train.py', '--resume-from', '/r/step_00000100', '--fast']
    >>> with_resume(["train.py", "{resume}"], resume_argument(None))
    ['train.py']
    >>> with_resume(["bash", "-c", "python train.py {resume} | tee log"], resume_argument("/r/s 1"))
    ['bash', '-c', "python train.py --resume-from '/r/s 1' | tee log"]
    >>> with_resume(["bash", "-c", "python train.py"], resume_argument("/r/s1"))
    ['bash', '-c', 'python train.py']
    """
    if not has_place(command):
        has_end = append and _script_place(command) != len(command) - 1
        return [*command, *argument] if has_end else [*command]
    result: list[str] = []
    for word in command:
        if word == RESUME_PLACEHOLDER:
            result += argument
        else:
            result.append(word.replace(RESUME_PLACEHOLDER, shlex.join(argument)))
    return result


def has_place(command: Sequence[str]) -> bool:
    """Return whether CMD says where the resume argument goes."""
    return any(RESUME_PLACEHOLDER in word for word in command)


def says_resume(command: Sequence[str]) -> bool:
    """Return whether CMD itself gives the resume option: its script takes it.

    >>> says_resume(["python", "train.py", "--resume-from=/old/step_00000100"])
    True
    """
    return any(word.partition("=")[0] == RESUME_OPTION for word in command)


def nodes_range(command: Sequence[str]) -> tuple[int, int] | None:
    """Return the bounds of an elastic torchrun's line, `--nnodes=MIN:MAX`; None where CMD says no range.

    A script that is given to a shell is left to the shell.

    >>> nodes_range(["torchrun", "--nnodes=2:4", "train.py"])
    (2, 4)
    >>> nodes_range(["python", "train.py", "--nnodes=2:4"])
    """
    found = _range_place(command)
    return None if found is None else found[1]


def with_nodes(command: Sequence[str], nodes: int) -> list[str]:
    """Put the number of a launch's nodes in place of such a range.

    torchrun would wait for more nodes than there are, and Stepkeeper starts all of them at once: when a node is lost,
    the next launch has fewer, and when it returns, more.

    >>> with_nodes(["torchrun", "--nnodes", "2:4", "train.py"], 3)
    ['torchrun', '--nnodes', '3', 'train.py']
    """
    found = _range_place(command)
    if found is None:
        return [*command]
    place = found[0]
    word = f"--nnodes={nodes}" if command[place].startswith("--nnodes") else str(nodes)
    return [*command[:place], word, *command[place + 1 :]]


def _range_place(command: Sequence[str]) -> tuple[int, tuple[int, int]] | None:
    """Return which word holds the range, and its bounds."""
    if shell_words(command) is not None or not _starts_ranks(command):
        return None
    for place, word in enumerate(command):
        option = _NNODES.fullmatch(word)
        if option is not None:
            there = place if option["value"] is not None else place + 1
            bounds = _RANGE.fullmatch(command[there].removeprefix("--nnodes=")) if there < len(command) else None
            return None if bounds is None else (there, (int(bounds[1]), int(bounds[2])))
        if word.endswith(".py"):
            break
    return None


def torchrun_ranks(command: Sequence[str], tasks_per_node: int) -> int | None:
    """Return how many ranks a torchrun in CMD starts on a node; None where that cannot be told from its line.

    Without a number in its line it starts one a task of the job: the launch sets `PET_NPROC_PER_NODE`.

    >>> torchrun_ranks(["torchrun", "--nproc-per-node=4", "train.py"], 8)
    4
    >>> torchrun_ranks(["python", "-m", "torch.distributed.run", "train.py"], 8)
    8
    >>> torchrun_ranks(["torchrun", "--nproc_per_node", "gpu", "train.py"], 8)
    >>> torchrun_ranks(["accelerate", "launch", "train.py"], 8)
    """
    if shell_words(command) is not None or not _starts_ranks(command):
        return None
    words = list(itertools.takewhile(lambda word: not word.endswith(".py"), command))
    if not any(_name(word) == "torchrun" or word == "torch.distributed.run" for word in words):
        return None
    for place, word in enumerate(words):
        option = _PER_NODE.fullmatch(word)
        if option is not None:
            value = option["value"] if option["value"] is not None else "".join(words[place + 1 : place + 2])
            return int(value) if value.isdecimal() and value.isascii() else None
    return tasks_per_node


def takes_resume(command: Sequence[str]) -> bool:
    """Return whether a CMD gets the checkpoint to resume from: by an argument, or by reading the variable itself.

    >>> takes_resume(["bash", "-c", "python train.py"])
    False
    """
    by_argument = with_resume(command, resume_argument("/")) != with_resume(command, ())
    return by_argument or any(RESUME_VARIABLE in word for word in command)


def leaves_shape_to_the_job(line: Sequence[str]) -> bool:
    """Return whether an own srun line says nothing of tasks and CPUs, so that those of the job fit it.

    A word of the program that looks like such an option counts as one: then nothing is added.
    """
    return not any(_SHAPE_OPTION.fullmatch(word) for word in line[1:])


# Which CMD a warm standby can stand in for.  Pure.

_PYTHON = re.compile(r"python(?:3(?:\.\d+)?)?t?")
_SHEBANG = re.compile(r"^(?:#!|'''exec' )(?P<words>.*)", re.MULTILINE)
_PLAIN = re.compile(r"-[uBOEsPIq]+")  # options of an interpreter without a word of their own
_WITH_WORD = ("-X", "-W")


def standby_prefix(command: Sequence[str]) -> list[str] | None:
    """Return the words of `python [OPTIONS] script.py ...` or `python [OPTIONS] -m MODULE ...` before script or -m.

    None for everything else: what a shell, a container or `uv run` does before Python starts is not for us to repeat.

    >>> standby_prefix(["/env/bin/python3", "-u", "-X", "dev", "train.py", "--steps", "9"])
    ['/env/bin/python3', '-u', '-X', 'dev']
    >>> standby_prefix(["python", "-m", "train"])
    ['python']
    >>> standby_prefix(["uv", "run", "train.py"]), standby_prefix(["python", "-c", "1"])
    (None, None)
    """
    if not command or not _PYTHON.fullmatch(PurePosixPath(command[0]).name):
        return None
    place = 1
    while place < len(command):
        word = command[place]
        if word == "-m":
            return [*command[:place]] if place + 1 < len(command) else None
        if word in _WITH_WORD:
            place += 2
        elif _PLAIN.fullmatch(word) or word.startswith(_WITH_WORD):
            place += 1
        else:
            return [*command[:place]] if word.endswith(".py") and not word.startswith("-") else None
    return None


class OwnStandby(NamedTuple):
    """A user's own srun line: its options, the words before Python such as `env`, and those of `standby_prefix`."""

    options: list[str]
    before: list[str]
    prefix: list[str]


# options of srun whose value is the next word, where it is not joined by `=`; of others we say that we do not know
_VALUES_SHORT = frozenset("ABCcDdeGgiJLMmNnopRrStTwx")
_VALUES_LONG = frozenset(
    (
        "account", "chdir", "constraint", "cpu-bind", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "distribution",
        "error", "exclude", "export", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-task", "gres", "hint",
        "input", "job-name", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mpi", "network", "nodelist", "nodes",
        "ntasks", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "output", "partition", "qos", "relative",
        "reservation", "threads-per-core", "time",
    )
)  # fmt: skip
_PASSERS = frozenset(("env", "numactl", "nice", "ionice", "stdbuf"))  # they become Python, and change no words of it
_TIME_LIMIT = re.compile(r"--time(=|$)|-t")
# of srun: programs that are not Python, and tasks that do not speak with us
_NO_STANDBY = re.compile(r":|--(?:multi-prog|pty|het-group|pack-group|bcast)(?:=.*)?")


def own_standby(line: Sequence[str]) -> OwnStandby | None:
    """Take an own srun line apart, `srun OPTIONS [env NAME=VALUE] python script.py`; None where it is another one.

    Where an option is not known, its value counts as a program: none is ever started that is not Python.

    >>> own_standby(["srun", "-n", "8", "--cpu-bind=cores", "env", "A=1", "python", "-u", "train.py", "--steps", "9"])
    OwnStandby(options=['-n', '8', '--cpu-bind=cores'], before=['env', 'A=1'], prefix=['python', '-u'])
    >>> own_standby(["srun", "--exclusive", "./launch", "python", "train.py"])
    >>> own_standby(["srun", "--some-option", "python", "python", "train.py"])
    >>> own_standby(["srun", "-N2", "python", "-m", "torch.distributed.run", "train.py"])
    >>> own_standby(["srun", "--export=ALL,PYTHONPATH=/x", "python", "train.py"])
    >>> own_standby(["srun", "-t", "60", "--time=90", "-n2", "python", "train.py"]).options
    ['-n2']
    """
    place, options = 1, list[str]()
    while place < len(line) and line[place].startswith("-") and line[place] != "--":
        word = line[place]
        takes = word[2:] in _VALUES_LONG if word.startswith("--") else len(word) == 2 and word[1] in _VALUES_SHORT  # noqa: PLR2004 - -n
        words = line[place : place + (2 if takes else 1)]
        place += len(words)
        if not _TIME_LIMIT.match(word):  # of a launch: the standbys wait before it
            options += words
    program = [*line[place:]][1:] if line[place : place + 1] == ["--"] else [*line[place:]]
    start = 0
    while start < len(program) and _name(program[start]) in _PASSERS:
        start += 1
        while start < len(program) and (program[start].startswith("-") or "=" in program[start]):
            start += 1
    prefix = standby_prefix(program[start:])
    blind = any(_PLAIN.fullmatch(word) and {"E", "I"} & set(word) for word in prefix or ())
    blind = blind or any("PYTHONPATH=" in word for word in [*options, *program[:start]])
    if prefix is None or blind or any(map(_NO_STANDBY.fullmatch, options)):
        return None
    module = program[start + len(prefix) :]
    if module[0] == "-m" and module[1] in _LAUNCHER_MODULES:
        return None  # its ranks are not what srun starts
    return OwnStandby(options, program[:start], prefix)


def python_of(beginning: str) -> list[str]:
    r"""Return the Python that a program's shebang names, also as pip writes a long one; none where it has options.

    >>> python_of("#!/env/bin/python3.11"), python_of("#!/usr/bin/env python3"), python_of("#!/bin/bash")
    (['/env/bin/python3.11'], ['python3'], [])
    >>> python_of("#!/bin/bash\n#! isn't python")
    []
    """
    for found in _SHEBANG.finditer(beginning):
        try:
            words = [word for word in shlex.split(found["words"]) if not word.startswith("$") and _name(word) != "env"]
        except ValueError:  # a quote that is not closed: another text, which looks like one
            continue
        if len(words) == 1 and _PYTHON.fullmatch(_name(words[0])):
            return words
    return []


def torchrun_standby(command: Sequence[str], python: Sequence[str]) -> list[str] | None:
    """Return the words with which the torchrun in CMD starts a rank, up to script or -m; None where it has other ranks.

    Args:
        command: CMD.
        python: by which the program `torchrun` runs, and its ranks.

    >>> torchrun_standby(["torchrun", "--nproc-per-node=4", "train.py"], ["/env/bin/python3.11"])
    ['/env/bin/python3.11', '-u']
    >>> torchrun_standby(["python", "-m", "torch.distributed.run", "-m", "package.train"], [])
    ['python', '-u']
    >>> torchrun_standby(["torchrun", "--no-python", "./train"], ["/env/bin/python3"])
    """
    if _name(command[0]) == "torchrun":
        rest = command[1:]
    else:
        prefix = standby_prefix(command) or []
        if not prefix or command[len(prefix)] != "-m" or command[len(prefix) + 1] not in _TORCHRUN_MODULES:
            return None
        rest, python = command[len(prefix) + 2 :], command[:1]
    options = _before_script(rest)
    is_python = len(options) < len(rest) or not {"-m", "--module"}.isdisjoint(options)
    is_other = any(word.replace("_", "-") in ("--no-python", "--run-path") for word in options)
    return [*python, "-u"] if python and is_python and not is_other else None

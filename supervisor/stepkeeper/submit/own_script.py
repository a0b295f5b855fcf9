"""What the script in CMD shows before it runs: does it start ranks, and can it get the checkpoint to resume from?

A shell script is judged as its lines would be; of a Python script, only how it reads its options.  What cannot be
read here, such as a path in a container, shows nothing.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stepkeeper.errors import UsageError
from stepkeeper.frameworks.recognise import AUTO, NONE
from stepkeeper.frameworks.script import Script, last_name, parse
from stepkeeper.slurm import cmd
from stepkeeper_trainer.formats.plain import open_plain

BYTES_MAX = 256 * 1024
_SHEBANG = re.compile(r"#!\s*\S*/(?:env\s+(?:-\S+\s+)*)?(?:ba|da|z|k)?sh\b")
_SHELL_NAMES = (".sh", ".bash", ".zsh")
_HERE_DOCUMENT = re.compile(r"<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=(?P<value>.*)", re.DOTALL)
# words that stand before a command, or before an assignment
_BEFORE = frozenset(
    ("if", "then", "else", "elif", "do", "while", "until", "!", "{", "exec", "time", "export", "declare", "local")
)
# commands that only speak of others
_SPEAKING = frozenset(
    ("echo", "printf", "which", "command", "type", "hash", "pip", "pip3", "test", "[", "[[", "alias", "unset", "grep")
)
_PASSES_ARGUMENTS = re.compile(r"\$(?:[@*1]|\{[@*1])")
_HEARS_ARGUMENTS = re.compile(rf"{_PASSES_ARGUMENTS.pattern}|{cmd.RESUME_VARIABLE}")
_STRICT_OPTIONS = re.compile(
    r"\.parse_args\(|\.parse_args_into_dataclasses\(|@\w+\.command\b|\b(?:typer\.run|tyro\.cli)\("
)
_ANY_OPTION = "parse_known_args"
_BY_NAMES = re.compile(r"\b(?:typer|tyro|fire|HfArgumentParser)\b")  # they make options of parameters and fields
_RESUME_NAME = cmd.RESUME_OPTION[2:].replace("-", "_")
_TRAINS = re.compile(r"\.backward\(")
_GOES_ON = re.compile(r"(?i)resume|restore|checkpoint|ckpt|torch\.load|load_state|stepkeeper_trainer")
_SAVES_ITSELF = re.compile(r"\btorch\.save\(")
# it looks for its newest checkpoint, loads one by a name of its own, or has a framework or our library do so
_FINDS = re.compile(
    r"(?i)\b(?:i?glob|listdir|scandir|iterdir)\b|latest|newest|stepkeeper"
    r"|load\w*\(\s*f?['\"][^'\"]*\.(?:pt|pth|ckpt)\b"
    r"|\b(?:transformers|lightning|pytorch_lightning|accelerate|deepspeed|megatron|torchtitan|nemo|ignite|composer)\b"
)
_RESUME_WORD = re.compile(r"--(?!.*(?:wandb|mlflow|comet|neptune))[\w-]*resume[\w-]*")  # a tracker resumes no training
_LOADS = re.compile(r"(?i)load|restore|resume")  # in the name of a function


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a script shows, in words for people; empty: nothing."""

    starts_ranks: str = ""  # by a launcher, which wants one task a node
    starts_everywhere: str = ""  # by srun or another program that starts processes on all nodes
    deaf: str = ""  # it passes no argument on
    takes: bool = False  # it declares the resume option
    strict: str = ""  # it would end on that option, which it does not know
    no_way: str = ""  # it trains, and nothing in it goes on from a checkpoint
    unasked: str = ""  # it resumes from what an option of its own names, and the command does not give it
    missing: str = ""  # a relative path at which there is nothing: mistyped, unless it is one in a container


class Doubts(msgspec.Struct, frozen=True, kw_only=True):
    """Why a training may not get its checkpoint, or not accept the argument, in words; empty: no doubt."""

    no_place: str = ""
    unknown: str = ""
    no_way: str = ""

    @property
    def said(self) -> tuple[str, ...]:
        """Those that there are."""
        return tuple(filter(None, (self.no_place, self.unknown, self.no_way)))


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A simple command of a shell script."""

    line: int
    words: tuple[str, ...]  # without what stands before it
    assigned: bool = False  # the value of a variable, which may be run later


def look(command: Sequence[str], directory: Path) -> Found:
    """Return what the script of a CMD shows; of a user's own srun line, only what it gets.

    Args:
        command: CMD.
        directory: in which it is started.
    """
    found = msgspec.structs.replace(_look(command, directory), unasked=_unasked(training(command, directory)))
    if cmd.is_own_srun(command):
        return msgspec.structs.replace(found, starts_ranks="", starts_everywhere="")
    return found


def _look(command: Sequence[str], directory: Path) -> Found:
    for word, is_shell in _candidates(command):
        text = _read(directory / word)
        if text is None:
            if word in command and not os.path.isabs(word) and not os.path.lexists(directory / word):
                return Found(missing=f"{word}: no such file in {directory}")
            continue
        if word.endswith(".py"):
            return of_python(word, text)
        if is_shell or _SHEBANG.match(text):
            return _with_what_it_runs(of_shell(word, text), text, directory)
    return Found()


def training(command: Sequence[str], directory: Path) -> Script:
    """Return the Python script that a CMD starts, also by way of a shell script, and the words that it gets.

    Args:
        command: CMD.
        directory: in which it is started.
    """
    found = _training(command, directory)
    for word in found.words:
        if word.endswith((".yaml", ".yml")) and (text := _read(directory / word)) is not None:
            return dataclasses.replace(found, settings_name=word, settings=text)
    return found


def _training(command: Sequence[str], directory: Path) -> Script:
    inline = cmd.shell_words(command)
    words = (*command, *inline) if inline is not None else tuple(command)
    for word, is_shell in _candidates(inline if inline is not None else command):
        text = _read(directory / word)
        if text is None:
            continue
        if word.endswith(".py"):
            return Script(words, word, text)
        if is_shell or _SHEBANG.match(text):
            for inner in commands(text):
                name = next((name for name, _ in _candidates(inner.words) if name.endswith(".py")), "")
                shown = _read(directory / name) if name else None
                if shown is not None:
                    return Script((*words, *inner.words), name, shown)
    return Script(words)


def _with_what_it_runs(found: Found, text: str, directory: Path) -> Found:
    """Add what the Python script shows that a shell script passes its arguments on to."""
    for command in commands(text):
        if any(_PASSES_ARGUMENTS.search(word) for word in command.words):
            inner = next((name for name, _ in _candidates(command.words) if name.endswith(".py")), "")
            shown = _read(directory / inner) if inner else None
            if shown is not None:
                said = of_python(inner, shown)
                return msgspec.structs.replace(found, takes=said.takes, strict=said.strict, no_way=said.no_way)
    return found


def require_startable(found: Found, *, torchrun: bool) -> None:
    """Refuse a script that would start ranks twice.

    Raises:
        StepkeeperError: which line does, and what to write instead.
    """
    if found.starts_everywhere:
        raise UsageError(
            f"{found.starts_everywhere}, and would itself be started once a GPU: give that line as CMD, `stepkeeper "
            "run -- srun OPTIONS PROGRAM`, and leave what comes before it to the batch script (`stepkeeper submit "
            "--setup LINE`)"
        )
    if torchrun and found.starts_ranks:
        raise UsageError(
            f"--torchrun (or the setting `torchrun`) starts one torchrun a node, and {found.starts_ranks}: leave out "
            "one of the two"
        )


def doubts(command: Sequence[str], found: Found, *, append: bool | None, framework: str = AUTO) -> Doubts:
    """Return why a training may not resume.

    Args:
        command: CMD.
        found: in its script.
        append: the argument is appended where CMD does not say where it goes; None: if the script takes it.
        framework: the setting; one that is named, or a layout of its own, says which checkpoints count.
    """
    unasked = ""
    if found.unasked and append is not False and framework in (AUTO, NONE):
        unasked = (
            f"{found.unasked}: it starts from the beginning in each attempt, and every requeue loses all its work; "
            "Stepkeeper gives it that option once `[framework.generic]` says what its checkpoints look like: see "
            "docs/guides/generic.md"
        )
    if append is False or any(cmd.RESUME_PLACEHOLDER in word for word in command):
        return Doubts(no_way=unasked)
    no_place = unknown = ""
    no_way = unasked
    deaf = "" if cmd.takes_resume(command) else "CMD is the script of a shell"
    if deaf := deaf or found.deaf:
        no_place = (
            f"{deaf}: the resume argument has no place; say {cmd.RESUME_PLACEHOLDER} where it shall go, or read "
            f"${cmd.RESUME_VARIABLE}, as the trainer library does; any other script starts from the beginning each time"
        )
    if found.strict and append:
        unknown = (
            f"{found.strict}, which --resume-argument appends on a resume: it would end there; add that option, or "
            "leave out --resume-argument"
        )
    if found.no_way:
        no_way = (
            f"{found.no_way}: it starts from the beginning in each attempt, and every requeue loses all its work; see "
            "docs/tutorials/own-loop.md, or the guide of your framework in docs/frameworks.md"
        )
    return Doubts(no_place=no_place, unknown=unknown, no_way=no_way)


def _unasked(script: Script) -> str:
    """Return which option a script that saves by itself resumes from, where the command leaves it out."""
    if not _SAVES_ITSELF.search(script.text) or _FINDS.search(script.text):
        return ""
    if any(cmd.RESUME_VARIABLE in word for word in script.words):
        return ""
    words = (node.value for node in script.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    for option in filter(_RESUME_WORD.fullmatch, words):
        left_out = script.declares(option) is not None and not script.default(option)
        if left_out and not script.has_option((option,)) and _is_loaded(script, option):
            return f"{script.name} resumes from what its option {option} names, and the command does not give it"
    return ""


def _is_loaded(script: Script, option: str) -> bool:
    """Tell whether the value of an option goes into a call that loads, directly or by one assignment."""
    names = {option[2:].replace("-", "_")}
    for node in script.nodes:
        if isinstance(node, ast.Assign) and _mentions(node.value, names):
            names = names | {last_name(target) for target in node.targets} - {""}
    return any(
        _mentions(given, names)
        for node in script.nodes
        if isinstance(node, ast.Call) and _LOADS.search(last_name(node.func))
        for given in (*node.args, *(keyword.value for keyword in node.keywords))
    )


def _mentions(node: ast.expr, names: set[str]) -> bool:
    """Tell whether an expression contains a variable, a field or a key with one of some names."""
    return any(
        (isinstance(each, ast.Name) and each.id in names)
        or (isinstance(each, ast.Attribute) and each.attr in names)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value in names)
        for each in ast.walk(node)
    )


def _candidates(command: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the words that may be the script, and whether it is one of a shell for certain."""
    if cmd.shell_words(command) is not None:
        return  # it stands in the line itself
    after_shell = False
    for place, word in enumerate(command):
        if word == "-m" and cmd.is_launcher_module(command[place + 1 : place + 2]):
            continue
        if word == "-m":
            yield from _of_module(command[place + 1 : place + 2])
            return
        if word.endswith(".py") or (after_shell and not word.startswith("-")):
            yield word, after_shell
            return
        after_shell = after_shell or cmd.is_shell(word)
        named = word.endswith(_SHELL_NAMES)
        if named or (place == 0 and "/" in word):
            yield word, named


def _of_module(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield where `python -m` may find a module of the directory that it is started in."""
    for name in names:
        yield f"{name.replace('.', '/')}.py", False


def _read(path: Path) -> str | None:
    """Return the text of a script; None where there is none that could be read."""
    try:
        with open_plain(Path(os.path.realpath(path))) as file:
            data = file.read(BYTES_MAX)
    except (OSError, ValueError):
        return None  # on other nodes alone, in a container, or no name of a file
    return None if b"\0" in data else data.decode(errors="replace")


def of_shell(name: str, text: str) -> Found:
    """Return what a shell script shows."""
    ranks = everywhere = ""
    for found in commands(text):
        where = f"{name}, line {found.line}"
        program = cmd.starts_everywhere(found.words)
        if program and not found.assigned:
            everywhere = everywhere or f"{where}: {program} starts processes on all nodes"
        elif cmd.kind(found.words) is cmd.Kind.LAUNCHER:
            ranks = ranks or f"{where}: starts ranks itself: one task a node"
    deaf = "" if _HEARS_ARGUMENTS.search(text) else f"{name} passes no argument on (no $@ in it)"
    return Found(starts_ranks=ranks, starts_everywhere=everywhere, deaf=deaf)


def commands(text: str) -> Iterator[Command]:
    """Yield the simple commands of a shell script; of those that only speak of others, none."""
    for number, line in _logical_lines(text):
        words: list[str] = []
        for word in [*_words(line), ";"]:
            if word.strip(";&|()<>"):
                words.append(word)
                continue
            if found := _command(number, words):
                yield found
            words = []


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines, joined where a backslash does so, with the number of their first one; no here-documents."""
    numbered = enumerate(text.splitlines(), start=1)
    for number, line in numbered:
        while line.endswith("\\"):
            line = line[:-1] + " " + next(numbered, (0, ""))[1]  # noqa: PLW2901 - its continuation belongs to it
        yield number, line
        if here := _HERE_DOCUMENT.search(line):
            for _, inside in numbered:
                if inside.strip() == here["end"]:
                    break


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quotation over several lines, or one that only a shell understands
        return line.split()


def _command(line: int, words: Sequence[str]) -> Command | None:
    for place, word in enumerate(words):
        if word in _BEFORE:
            continue
        if match := _ASSIGNMENT.fullmatch(word):
            if place < len(words) - 1:
                continue
            value = tuple(match["value"].split())
            return Command(line=line, words=value, assigned=True) if value else None
        return None if word in _SPEAKING else Command(line=line, words=tuple(words[place:]))
    return None


def of_python(name: str, text: str) -> Found:
    """Return what a Python script shows."""
    takes = _takes_resume(text)
    knows = takes or _ANY_OPTION in text
    strict = f"{name} reads its options and knows no {cmd.RESUME_OPTION}"
    no_way = f"{name} trains, and nothing in it resumes from a checkpoint"
    return Found(
        takes=takes,
        strict=strict if _STRICT_OPTIONS.search(text) and not knows else "",
        no_way=no_way if _TRAINS.search(text) and not _GOES_ON.search(text) else "",
    )


def _takes_resume(text: str) -> bool:
    """Tell whether a Python script declares the resume option; what comments and texts say of it does not count."""
    nodes = parse(text)
    declared = (word for node in nodes if isinstance(node, ast.Call) for word in node.args)
    if any(isinstance(word, ast.Constant) and word.value == cmd.RESUME_OPTION for word in declared):
        return True
    fields = (node.target for node in nodes if isinstance(node, ast.AnnAssign))
    named = any(isinstance(field, ast.Name) and field.id == _RESUME_NAME for field in fields)
    named = named or any(isinstance(node, ast.arg) and node.arg == _RESUME_NAME for node in nodes)
    return named and _BY_NAMES.search(text) is not None

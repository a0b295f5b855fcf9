"""The framework of a run's training script: which one, where its checkpoints are, and how it is resumed."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepkeeper.frameworks import recognise
from stepkeeper.frameworks.adapters.generic import Patterns
from stepkeeper.frameworks.asking import Newest
from stepkeeper.frameworks.framework import DIGITS_MAX, Framework, WorldChange, Writes
from stepkeeper.frameworks.recognise import Finding
from stepkeeper.frameworks.script import Script
from stepkeeper_trainer.integrations import hook

OURS = "stepkeeper_trainer"
_INTEGRATIONS = f"{OURS}.integrations"
_VARIABLE = "STEPKEEPER_RESUME_FROM"
_PERIODIC = "at a notice the last periodic checkpoint counts: what was trained since then is trained again"


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor goes by."""

    framework: str
    title: str
    why: str  # what shows the framework
    directory: Path | None  # of the checkpoints; None: it is not known
    where: str  # what shows the directory, or what would
    patterns: Patterns | None = None  # of `generic`
    has_arguments: bool = True  # there are resume arguments, which `{resume}` in CMD stands for
    appended: bool = False  # the script takes the resume arguments at the end of its command line
    option: str = ""  # in place of the framework's own, where the script calls it otherwise
    resume: str = ""  # what shows how it is resumed; where nothing does, what to do
    save: str = ""  # how the framework can be asked for a save
    notice_options: tuple[str, ...] = ()  # by which it saves on a signal on its own
    answers_notice: bool = False  # it saves on SIGTERM without any option
    attach_takes: str = ""  # the call that takes the chosen checkpoint where it names none, with `--attach`
    points: bool = False  # a file beside its checkpoints names the one that it resumes from
    target: int | None = None  # the step at which training ends, as the command says
    ends_at_target: bool = False  # exit code 0 before that step is no end of the training
    step_line: str = ""  # expression of a line that the script prints of a step, which is group 1
    world_change: WorldChange = WorldChange.YES  # which numbers of ranks can resume from its usual checkpoints
    converted: bool = False  # the script loads checkpoints that were made of others (Universal Checkpoint)
    converted_option: str = ""  # by which it does so

    def arguments(self, newest: Newest) -> tuple[str, ...]:
        """Return the resume arguments of a checkpoint, with the script's own name of their option."""
        if newest.converted:
            return (self.converted_option,) if self.converted_option else ()
        if not (self.option and newest.arguments):
            return newest.arguments
        if self.option.endswith("="):
            return (f"{self.option}{newest.arguments[1]}",)
        return (self.option, *newest.arguments[1:])


class Notice(NamedTuple):
    """Whether ranks save when a notice comes."""

    answered: bool
    shown: str  # by what
    means: str
    remedy: str = ""  # where they do not


def notice(found: Following, command: Sequence[str], *, attach: str) -> Notice:
    """Return whether ranks of a framework save when a notice comes, and what would have them do so."""
    if found.framework in hook.NAMES and attach in ("auto", found.framework):
        means = "at a notice all ranks save the framework's own checkpoint at one step, and leave together"
        return Notice(answered=True, shown=f"--attach {attach}", means=means)
    given = [option for option in found.notice_options if option in command]
    if found.answers_notice or given:
        by = "SIGTERM" if found.answers_notice else "the stop signal"
        shown = given[0] if given else found.title
        return Notice(answered=True, shown=shown, means=f"it saves on its own on {by}: {found.save}")
    if found.notice_options:
        remedy = f"add {found.notice_options[0]} to the command, and set --stop-signal TERM"
    elif found.framework in hook.NAMES:
        remedy = "set --attach auto (versions: docs/frameworks.md)"
    else:
        remedy = f"save often enough; the script itself can save: {found.save}"
    return Notice(answered=False, shown="none", means=_PERIODIC, remedy=remedy)


def without_argument(found: Following, *, attach: str, repair_pointers: bool) -> str:
    """Return how a script gets the chosen checkpoint without an argument of ours; empty: it does not.

    >>> at = Following(framework="deepspeed", title="", why="", directory=None, where="", points=True)
    >>> without_argument(at, attach="off", repair_pointers=True)
    'its pointer file names it (--repair-pointers)'
    >>> without_argument(at, attach="off", repair_pointers=False)
    ''
    """
    if found.attach_takes and attach in ("auto", found.framework):
        return f"{found.attach_takes} takes it where the script names none (--attach)"
    return "its pointer file names it (--repair-pointers)" if found.points and repair_pointers else ""


def follow(
    script: Script,
    working: Path,
    frameworks: Mapping[str, Framework],
    *,
    named: Finding | None = None,
    directory: str | None = None,
    patterns: Patterns | None = None,
) -> Following | None:
    """Recognise the framework of a script; None where it has none that is known, or uses our own library.

    Args:
        script: the command, and what it starts.
        working: the directory in which it is started.
        frameworks: that are known, by name, the more special first.
        named: what a setting names; None: the framework is to be recognised.
        directory: of the checkpoints, as a setting names it.
        patterns: of `[framework.generic]`.

    Raises:
        OSError: the directory of the setting cannot be listed.
    """
    found = named
    if found is None and uses_ours(script):
        return None
    found = found or recognise.of_script(script, dict(frameworks))
    if found is None and directory is not None and (working / directory).is_dir():
        found = recognise.of_directory(working / directory, dict(frameworks))
    if found is None:
        return None
    framework = found.framework
    place, where = _directory(framework, script, directory)
    appended, option, resume = _resume(framework, script)
    converted_option = framework.converted_option
    if not script.takes_switch(converted_option) or script.has_option((converted_option,)):
        converted_option = ""
    return Following(
        framework=framework.name,
        title=framework.title,
        why=found.why,
        directory=None if place is None else working / place,
        where=where,
        patterns=patterns if framework.name == "generic" else None,
        has_arguments=framework.has_resume_arguments or bool(converted_option),
        appended=appended or bool(converted_option),
        option=option,
        resume=resume,
        save=framework.how_to_save,
        notice_options=framework.notice_options,
        answers_notice=framework.answers_notice,
        attach_takes=framework.attach_takes,
        points=type(framework).pointers is not Framework.pointers,
        target=_target(framework, script),
        ends_at_target=framework.ends_at_target,
        step_line=_step_line(framework, script),
        world_change=framework.world_change,
        converted=_asks_for_converted(framework, script),
        converted_option=converted_option,
    )


def _target(framework: Framework, script: Script) -> int | None:
    """Return the step at which training ends, by the command or by the script in one place; None: it is not known."""
    if framework.target_step is not None:
        return framework.target_step
    if said := script.option(framework.target_options):
        return int(said[0]) if said[0].isascii() and said[0].isdecimal() and len(said[0]) <= DIGITS_MAX else None
    if script.has_option(framework.target_options):
        return None  # by a variable of the shell
    found = {
        each.value if isinstance(each, ast.Constant) else None
        for keyword, call in framework.target_keywords
        for each in script.given_to(call, keyword)
    }
    return next((each for each in found if len(found) == 1 and type(each) is int and each > 0), None)


def _step_line(framework: Framework, script: Script) -> str:
    """Return the expression of a line of a step, with the last step in it where that needs it."""
    if "{total}" not in framework.step_line:
        return framework.step_line
    said = script.option(framework.total_options)
    known = said is not None and said[0].isascii() and said[0].isdecimal()
    return framework.step_line.replace("{total}", said[0]) if said is not None and known else ""


def uses_ours(script: Script) -> bool:
    """Tell whether a script saves by our own library."""
    return OURS in script.modules and _INTEGRATIONS not in script.modules


def _asks_for_converted(framework: Framework, script: Script) -> bool:
    return any(word in text for word in framework.converted_words for text in (script.text, *script.words))


def _directory(framework: Framework, script: Script, wanted: str | None) -> tuple[str | None, str]:
    """Return where the checkpoints go, and what shows it: setting, command, script, or the framework's default."""
    if wanted is not None:
        return wanted, "--checkpoint-dir"
    if (decided := framework.directory(script)) is not None:
        return decided
    writes = framework.writes
    named = _named(writes)
    options = _directory_options(framework, script)
    if said := script.option(options):
        return _of_option(script, named, *said)
    if script.has_option(options):
        return None, "the command names it by a variable of the shell: name it with --checkpoint-dir"
    for name, calls in named:
        values = script.given(name, calls)
        texts = {each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)} or {
            text for option in script.options_given(name, calls) if (text := script.default(option))
        }
        if len(texts) == 1 and not any(map(script.is_computed, values)):
            return texts.pop(), f"{name} in {script.name}"
        if values:
            several = "names several" if texts else "does not say it as a text"
            return None, f"{name} in {script.name} {several}: name it with --checkpoint-dir"
    defaults = {text for option in options if (text := script.default(option))}
    if len(defaults) == 1:
        return defaults.pop(), f"the default of an option in {script.name}"
    if writes.default:
        return writes.default, f"the default of {framework.title}"
    return None, "neither command nor script name it: name it with --checkpoint-dir"


def _of_option(
    script: Script, named: list[tuple[str, tuple[str, ...]]], value: str, option: str
) -> tuple[str | None, str]:
    """Return the value of an option in the command, unless the script makes another directory of it."""
    if any(script.computes_from(option, name, calls) for name, calls in named):
        return None, f"{script.name} computes the directory from {option}: name it with --checkpoint-dir"
    return value, f"{option} of the command"


def _named(writes: Writes) -> list[tuple[str, tuple[str, ...]]]:
    """Return the keywords, and the calls whose first argument has the same meaning."""
    return [(name, writes.calls if name == writes.keywords[0] else ()) for name in writes.keywords]


def _directory_options(framework: Framework, script: Script) -> tuple[str, ...]:
    """Return the options that name the directory: the framework's, and those that the script passes on."""
    writes = framework.writes
    own = (option for name, calls in _named(writes) for option in script.options_given(name, calls))
    return (*writes.options, *own)


def _resume(framework: Framework, script: Script) -> tuple[bool, str, str]:
    """Return whether the script takes the resume arguments, by which option, and what shows it."""
    if (own_program := framework.own_resume(script)) is not None:
        return True, *own_program
    option = "" if script.refuses(framework.resume_option) else framework.resume_option
    if option and script.declares(option) is not None:
        return True, "", f"{script.name} declares {option}"
    if (option or not framework.resume_option) and framework.takes_resume(script):
        return True, "", f"the parser of {framework.title} takes it"
    if option and script.has_option((option,)):
        return True, "", f"the command has {option}"
    if framework.resume_keyword:
        places = _directory_options(framework, script)
        own = [option for option in script.options_given(framework.resume_keyword) if option not in places]
        if len(own) == 1:
            return True, own[0], f"{script.name} passes {own[0]} on as {framework.resume_keyword}"
    if _VARIABLE in script.text or any(_VARIABLE in word for word in script.words):
        return False, "", f"the script reads {_VARIABLE}"
    return False, "", ""

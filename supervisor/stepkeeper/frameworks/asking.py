"""The supervisor's questions about foreign checkpoints, and the answers: `python -m stepkeeper.frameworks.asking`.

A process of its own reads the checkpoints: whatever they hold, and however long that takes, the supervisor's memory,
loop and interpreter are not concerned.  One JSON document on stdin, one on stdout.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from stepkeeper.frameworks import choosing, recognise, repair
from stepkeeper.frameworks.adapters.generic import Generic, Patterns
from stepkeeper.frameworks.choosing import How, Judged, Launched, State
from stepkeeper.frameworks.framework import Framework, WorldChange
from stepkeeper.frameworks.repair import Pointing, RefusedError
from stepkeeper_trainer.formats.reading import Reading

Asked = TypeVar("Asked", bound=msgspec.Struct)


class Seen(msgspec.Struct, frozen=True):
    """A checkpoint as it was at an instant: one that is written anew is another one."""

    directory: str
    changed_at: float


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Which is the newest checkpoint that is whole and resumable?"""

    framework: str
    root: str
    patterns: Patterns | None = None
    deep: bool = True
    by_name: bool = False  # the steps in the names order them: older ones are not judged
    bytes_per_s: float | None = None
    below_step: int | None = None  # only older ones count
    left_out: tuple[Seen, ...] = ()  # that do not count
    converted: bool = False  # the script loads those that were made of others
    launched: tuple[Launched, ...] = ()  # that have perhaps saved them, the oldest first
    repair: Repair | None = None


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """Have the pointer files name the checkpoint that the question is answered with, if it is this one."""

    directory: str


class Pointed(msgspec.Struct, frozen=True, kw_only=True):
    """A pointer file that named another checkpoint."""

    file: str
    named: str  # what it named
    names: str  # the checkpoint
    error: str = ""  # why it was not rewritten


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was passed over, and why."""

    name: str
    problem: str
    step: int | None = None
    whole: bool = False  # it lacks nothing but what a resume needs


class Newest(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that was chosen."""

    directory: str
    step: int | None
    target: int | None  # the step at which its training ends, where it says so
    finished: bool | None
    arguments: tuple[str, ...]  # that resume from it
    how: str  # for people
    bytes_read: int
    ranks: int | None = None  # that saved it, where that is known
    world_change: WorldChange = WorldChange.YES
    converted: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    newest: Newest | None = None
    passed: tuple[Passed, ...] = ()
    passed_seen: tuple[Seen, ...] = ()  # the same, as they were
    left_out: tuple[Seen, ...] = ()  # those that are not below `below_step`
    pointed: tuple[Pointed, ...] = ()


def answer(question: Question) -> Answer:
    """Judge the checkpoints.  Raises OSError where the directory cannot be listed, unless it is not there."""
    frameworks = recognise.known()
    frameworks["generic"] = Generic(question.patterns)
    framework, root = frameworks[question.framework], Path(question.root)
    if not os.path.lexists(root):
        return Answer()  # nothing was written yet
    how = How(
        environment=os.environ,
        deep=question.deep,
        cached=True,
        world_size=None,
        launched=question.launched,
        reading=Reading(bytes_per_s=question.bytes_per_s),
    )
    beyond: list[Seen] = []

    def left_out(each: Judged) -> bool:
        if each.contents is not None and each.contents.converted and not question.converted:
            return True
        seen = _seen(each)
        if question.below_step is None or (each.number is not None and each.number < question.below_step):
            return seen in question.left_out
        beyond.append(seen)
        return True

    if question.repair is not None:
        return Answer(pointed=_repaired(framework, root, how, question.repair, left_out))
    chosen, skipped = choosing.newest(framework, root, how, left_out=left_out, by_name=question.by_name)
    passed = tuple(
        Passed(
            name=_name(each, root),
            problem=_shown(f"{each.state.value}: {'; '.join(each.problems)}"),
            step=each.number,
            whole=each.state is State.NOT_RESUMABLE,
        )
        for each in skipped
    )
    return Answer(
        newest=None if chosen is None else _newest(chosen),
        passed=passed,
        passed_seen=tuple(map(_seen, skipped)),
        left_out=tuple(beyond),
    )


def _repaired(
    framework: Framework, root: Path, how: How, wanted: Repair, left_out: Callable[[Judged], bool]
) -> tuple[Pointed, ...]:
    """Rewrite the pointer files that name another checkpoint than the wanted one, where it is the newest right one."""
    found = []
    for pointer in repair.look(framework, root, how, left_out=left_out).pointers:
        target = pointer.target
        if target is None or str(target.step.path) != wanted.directory or pointer.state is Pointing.RIGHT:
            continue
        error = ""
        try:
            repair.rewrite(pointer, root)
        except RefusedError as refused:
            error = str(refused)
        named = pointer.shown or pointer.state.value
        found.append(
            Pointed(
                file=_shown(str(pointer.path)), named=_shown(named), names=_shown(target.step.path.name), error=error
            )
        )
    return tuple(found)


def _seen(each: Judged) -> Seen:
    return Seen(_shown(str(each.step.path)), each.contents.tree.changed_at() if each.contents is not None else 0.0)


def _newest(chosen: Judged) -> Newest:
    contents = chosen.contents
    assert contents is not None, "one that is complete"
    return Newest(
        directory=str(chosen.step.path),
        step=chosen.number,
        target=contents.target,
        finished=chosen.finished,
        arguments=chosen.resume.arguments if chosen.resume is not None else (),
        how=chosen.resume.how if chosen.resume is not None else "",
        bytes_read=chosen.deep.bytes_read if chosen.deep is not None else 0,
        ranks=contents.world_size,
        world_change=chosen.world_change or WorldChange.YES,
        converted=contents.converted,
    )


def _name(each: Judged, root: Path) -> str:
    path = each.step.path
    return _shown(str(path.relative_to(root)) if path.is_relative_to(root) else str(path))


def _shown(text: str) -> str:
    """Return a text with a name in it as JSON takes it."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def serve(kind: type[Asked], act: Callable[[Asked], msgspec.Struct], refusal: type[Exception] = OSError) -> int:
    """Answer one document of stdin on stdout; an OSError, or a refusal, goes to stderr as one line."""
    with contextlib.suppress(OSError):  # refused in some containers; where memory runs out, we go before the supervisor
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    try:
        document = msgspec.json.encode(act(asked))
    except OSError as error:
        sys.stderr.write(f"{error.filename}: {error.strerror}\n")
        return 1
    except refusal as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(document)
    return 0


if __name__ == "__main__":
    sys.exit(serve(Question, answer))

"""`docs/events.md`: the records of the journal, from their declarations and the comments behind them."""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
import typing
from collections.abc import Iterator
from enum import StrEnum
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from stepkeeper import reason_text
from stepkeeper.core import effects, events, reasons
from stepkeeper.core.state import Phase
from stepkeeper.run_store import journal
from tests.pages.tables import MADE, table

_CLASS = re.compile(r"`([A-Z]\w+)`")


class Field(NamedTuple):
    """One field of a declared structure."""

    name: str
    kind: str
    default: str | None
    comment: str


def page() -> str:
    """Return the page."""
    out = ["# The journal: `journal.jsonl`", "", MADE, "", inspect.cleandoc(_doc(journal)), ""]
    out += [
        "`stepkeeper events RUN --json` prints the records.  After a failed write a record may be there twice.",
        "A field that has its default value is left out.",
        "",
        "## Record",
        "",
        inspect.cleandoc(_doc(journal.Record)),
        "",
        *_fields(journal.Record, journal, ()),
        f"`phase` is one of {', '.join(f'`{phase.value}`' for phase in Phase)}.  Types are those of Python.",
        "`Why` is a list of [reasons](#reasons).  The other structures have a section [at the end](#structures).",
        "",
        "## Events",
        "",
        "`event` has the name of the event, and `at` its time in Unix seconds.  Within an attempt this time never goes",
        "backwards.",
        "",
    ]
    for each in typing.get_args(events.Event):
        out += _section(each, sys.modules[each.__module__], ("at",))
    out += ["## Effects", "", "An effect is one thing that the supervisor does.  `effect` has its name.", ""]
    for each in typing.get_args(effects.Effect):
        out += _section(each, effects, ())
    out += ["## Reasons", "", inspect.cleandoc(_doc(reasons)), "", "`reason` has the name of the reason.", ""]
    facts = [
        [f"`{_tag(each)}`", _facts(each), inspect.cleandoc(_doc(each))] for each in typing.get_args(reasons.Reason)
    ]
    out += [*table("name facts meaning", facts), "", "## Structures", ""]
    for structure in _inside():
        out += [f"### {structure.__name__}", "", inspect.cleandoc(_doc(structure)), ""]
        if issubclass(structure, StrEnum):
            words = reason_text.FACTS if structure is reasons.Fact else {}
            said = {each: f": {words[each]}" if words else "" for each in structure}
            out += ["One of these:", "", *(f"- `{each.value}`{said[each]}" for each in structure), ""]
        else:
            out += _fields(structure, sys.modules[structure.__module__], ())
    return "\n".join(out).rstrip() + "\n"


def _inside() -> list[type]:
    """Return the structures and enumerations that stand in records, events and effects, each once, in their order."""
    found: dict[type, None] = {}
    waiting: list[Any] = [journal.Record, *typing.get_args(events.Event), *typing.get_args(effects.Effect)]
    listed = set(waiting)
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, type) and issubclass(kind, StrEnum | msgspec.Struct):
            if kind not in listed and kind is not Phase and kind not in typing.get_args(reasons.Reason):
                found[kind] = None
            listed.add(kind)
            hints = typing.get_type_hints(kind) if issubclass(kind, msgspec.Struct) else {}
            waiting += [hint for hint in hints.values() if hint not in listed]
        else:
            waiting += [part for part in typing.get_args(kind) if part not in listed]
    return list(found)


def _section(declared: Any, module: ModuleType, known: tuple[str, ...]) -> list[str]:
    return [f"### {_tag(declared)}", "", inspect.cleandoc(_doc(declared)), "", *_fields(declared, module, known)]


def _tag(declared: Any) -> str:
    return str(declared.__struct_config__.tag)


def _facts(declared: Any) -> str:
    return ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(declared))


def _doc(thing: Any) -> str:
    assert thing.__doc__, f"{thing} has a docstring: ruff sees to it"
    return _CLASS.sub(_linked, str(thing.__doc__))


def _linked(found: re.Match[str]) -> str:
    """Return a class that has a section by its name in the journal, as a link to that section."""
    tag = {each.__name__: _tag(each) for each in (*typing.get_args(events.Event), *typing.get_args(effects.Effect))}
    name = tag.get(found[1])
    return f"[`{name}`](#{name})" if name else found[0]


def _fields(declared: Any, module: ModuleType, known: tuple[str, ...]) -> list[str]:
    """Return a table of the fields that are not described elsewhere; nothing where there are none."""
    lineage = [each for each in reversed(declared.__mro__) if each.__module__ == module.__name__]
    by_name = _declared(module)
    fields = [field for each in lineage for field in by_name.get(each.__name__, ())]
    rows = []
    for field in fields:
        if field.name in known:
            continue
        default = "" if field.default is None else f"`{field.default}`"
        rows.append([f"`{field.name}`", f"`{field.kind}`".replace("|", "\\|"), default, field.comment])
    return [*table("key type default meaning", rows), ""] if rows else []


def _declared(module: ModuleType) -> dict[str, list[Field]]:
    """Return the fields of every class of a module, with the comments that stand behind them."""
    source = inspect.getsource(module)
    comments = dict(_comments(source))
    classes: dict[str, list[Field]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        classes[node.name] = [
            Field(
                name=item.target.id,
                kind=ast.unparse(item.annotation),
                default=ast.unparse(item.value) if item.value is not None else None,
                comment=comments.get(item.lineno, ""),
            )
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
    return classes


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")

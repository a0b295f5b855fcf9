"""The rules: `rules.toml` beside this file, read once and checked.

The first rule of the table that matches a line or an exception decides for it, so the special ones stand first.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Literal

import msgspec

from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis.classify import Plane, Role

NAME = "rules.toml"


class RulesError(ValueError):
    """The table of rules is wrong: says which rule, and what to change."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule, as it stands in the table."""

    id: str
    cause: Cause
    role: Role
    confidence: float
    match: tuple[str, ...]  # regular expressions: one of them is found
    unless: tuple[str, ...] = ()  # none of them is found
    frames: tuple[str, ...] = ()  # of an exception: one of them is found in `path:function` of a frame
    where: Literal["any", "exception", "end"] = "any"  # of an exception only; in the last lines of a log only
    plane: Plane = Plane.APPLICATION
    persists: bool = False  # counts although training went on after it
    says: str  # in plain words
    todo: str = ""  # where the cause's own advice does not fit


class Meaning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cause means to a person."""

    happened: str
    todo: str
    confirm: tuple[str, ...]  # commands; JOB, NODE and RUN stand for what is known of them
    next: str = ""  # what Stepkeeper does, where no row of the ladder says it


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    causes: dict[Cause, Meaning]
    rule: tuple[Row, ...]


class Rule(msgspec.Struct, frozen=True):
    """A rule with its expressions compiled."""

    row: Row
    wanted: re.Pattern[str]
    unwanted: re.Pattern[str] | None
    frames: re.Pattern[str] | None

    def matches(self, text: str, frames: Sequence[str]) -> bool:
        """Tell whether the rule is about this text, raised through these frames."""
        if self.wanted.search(text) is None or (self.unwanted is not None and self.unwanted.search(text)):
            return False
        return self.frames is None or any(self.frames.search(frame) for frame in frames)


class Rules(msgspec.Struct, frozen=True):
    """All rules in their order, and what each cause means."""

    rules: tuple[Rule, ...]
    meanings: dict[Cause, Meaning]

    def of_line(self, text: str, *, end: bool) -> Row | None:
        """Return the first rule that matches a line; `end`: one of the last of its log."""
        return self._first(text, {"any", "end"} if end else {"any"}, ())

    def of_exception(self, text: str, frames: Sequence[str] = ()) -> Row | None:
        """Return the first rule that matches an exception, as Python prints it, with its `path:function` frames."""
        return self._first(text, {"any", "exception"}, frames)

    def _first(self, text: str, where: set[str], frames: Sequence[str]) -> Row | None:
        rules = (rule for rule in self.rules if rule.row.where in where)
        return next((rule.row for rule in rules if rule.matches(text, frames)), None)

    def says(self, rule: str) -> str:
        """Return what a rule means in plain words; nothing for what is no rule of the table."""
        return next((each.row.says for each in self.rules if each.row.id == rule), "")

    def todo(self, rule: str, cause: Cause) -> str:
        """Return what a person should do: what the rule advises, else the cause."""
        own = next((each.row.todo for each in self.rules if each.row.id == rule), "")
        return own or self.meanings[cause].todo


@functools.cache
def load() -> Rules:
    """Return the rules of this version."""
    return parse(resources.files(__package__).joinpath(NAME).read_text(encoding="utf-8"))


def parse(text: str) -> Rules:
    """Read a table of rules.

    Raises:
        RulesError: something in it is wrong.
    """
    try:
        table = msgspec.convert(tomllib.loads(text), _Table)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RulesError(f"{NAME}: {error}; see docs/verdicts.md for the fields") from error
    seen: set[str] = set()
    for row in table.rule:
        if row.id in seen:
            raise RulesError(f"{NAME}: rule {row.id} stands there twice; rename one")
        if not 0.0 < row.confidence < 1.0:
            raise RulesError(f"{NAME}: rule {row.id}: confidence {row.confidence} is not between 0 and 1")
        if row.frames and row.where != "exception":
            raise RulesError(f"{NAME}: rule {row.id}: frames are of exceptions only; set where = 'exception'")
        if not row.match:
            raise RulesError(f"{NAME}: rule {row.id} matches nothing; give it an expression")
        seen.add(row.id)
    if missing := [cause.value for cause in Cause if cause not in table.causes]:
        raise RulesError(f"{NAME}: no meaning for {', '.join(missing)}; add [causes.{missing[0]}]")
    return Rules(tuple(_compile(row) for row in table.rule), table.causes)


def _compile(row: Row) -> Rule:
    try:
        wanted = re.compile("|".join(map(_group, row.match)))
        unwanted = re.compile("|".join(map(_group, row.unless))) if row.unless else None
        frames = re.compile("|".join(map(_group, row.frames))) if row.frames else None
    except re.error as error:
        raise RulesError(f"{NAME}: rule {row.id}: {error.pattern!r}: {error}") from error
    return Rule(row, wanted, unwanted, frames)


def _group(expression: str) -> str:
    """Return an expression as an alternative; one that begins with (?i) takes letters of either case."""
    return f"(?i:{expression[4:]})" if expression.startswith("(?i)") else f"(?:{expression})"

"""Has the rules make a mistake for a while, in this process; and looks whether a scenario ends otherwise with it."""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import stepkeeper
from stepkeeper.simulate.scenario import play
from tests.core.mutations import Mutation
from tests.core.operators import line, places, put

CORE = Path(stepkeeper.__file__).parent / "core"
SCENARIOS = Path(__file__).parent / "scenarios"
BROKEN = (NameError, SyntaxError, ImportError)  # the mutation is no mistake but nonsense


class Moved(AssertionError):  # noqa: N818 - a finding of a test
    """The place of a mutation is not there, or not the only one."""


@cache
def functions(module: str) -> dict[str, tuple[str, int]]:
    """Return the text of each function of a module of the core, and its line."""
    path = CORE / f"{module}.py"
    text = path.read_text() if path.exists() else ""  # gone: `--mend` looks for its functions elsewhere
    found = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
    return {each.name: (ast.get_source_segment(text, each) or "", each.lineno) for each in found}


def tree(module: str, function: str) -> ast.Module:
    """Return the syntax tree of one function, to be changed; empty where there is none of that name."""
    text, first_line = functions(module).get(function, ("", 1))
    return ast.increment_lineno(ast.parse(text), first_line - 1)


@cache
def apply(mutation: Mutation) -> CodeType:
    """Return the function's code with the mistake in it.  Raises Moved."""
    module, _, function = mutation.where.partition(".")
    right = tree(module, function)
    found = places(right, mutation.operator, mutation.at)
    if len(found) < max(1, mutation.nth) or (not mutation.nth and len(found) > 1):
        lines = "".join(f"\n  line {line(place.node)[0]}: {ast.unparse(place.node)}" for place in found)
        raise Moved(
            f"core/{module}.py, {function}: {len(found)} places with `{mutation.at}` for {mutation.breaks!r}; "
            f"`python -m tests.core.mutating --mend` looks for it{lines}"
        )
    # not under the name of the file: what is played here covers no line of the rules
    wrong = compile(put(right, found[max(0, mutation.nth - 1)]), f"<{module} with a mistake>", "exec")
    [code] = [each for each in wrong.co_consts if isinstance(each, CodeType) and each.co_name == function]
    return code


@contextlib.contextmanager
def mistaken(mutation: Mutation) -> Iterator[None]:
    """Have the function run the code with the mistake in it, also in modules that have imported it."""
    code = apply(mutation)
    module, _, name = mutation.where.partition(".")
    function: FunctionType = getattr(importlib.import_module(f"stepkeeper.core.{module}"), name)
    right = function.__code__
    try:
        function.__code__ = code
        yield
    finally:
        function.__code__ = right


def tells(scenario: str) -> bool:
    """Tell whether a scenario ends otherwise than it is written."""
    text = (SCENARIOS / f"{scenario}.txt").read_text()
    try:
        return play(text) != text
    except BROKEN:
        raise
    except Exception:  # noqa: BLE001 - whatever the rules raise, they did not before
        return True


def tellers() -> tuple[str, ...]:
    """Return all scenarios that end otherwise than they are written."""
    return tuple(path.stem for path in sorted(SCENARIOS.glob("*.txt")) if tells(path.stem))

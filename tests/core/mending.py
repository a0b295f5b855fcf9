"""Finds the places of mutations again, after the rules have changed, and writes them into `mutations.py`."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tests.core import mutations
from tests.core.mistaken import CORE, Moved, apply, functions, mistaken, tells, tree
from tests.core.mutations import Mutation
from tests.core.operators import places


def stands(mutation: Mutation) -> bool:
    """Whether a mutation has its place, and its scenario tells it."""
    try:
        apply(mutation)
    except Moved:
        return False
    with mistaken(mutation):
        return tells(mutation.told_by)


def candidates(mutation: Mutation) -> list[Mutation]:
    """Return the same mutation at each place where its scenario tells it: in its function, else module, else all."""
    module, _, function = mutation.where.partition(".")
    own = [module] if (CORE / f"{module}.py").exists() else []
    others = sorted(path.stem for path in CORE.glob("*.py") if path.stem not in (module, "__init__"))
    reaches = (
        [(module, function)] if own and function in functions(module) else [],
        [(each, name) for each in own for name in functions(each)],
        [(each, name) for each in others for name in functions(each)],
    )
    for reach in reaches:
        if found := [each for place in reach for each in _there(mutation, *place) if stands(each)]:
            return found
    return []


def _there(mutation: Mutation, module: str, function: str) -> list[Mutation]:
    count = len(places(tree(module, function), mutation.operator, mutation.at))
    numbers = range(1, count + 1) if count > 1 else range(count)
    return [mutation._replace(where=f"{module}.{function}", nth=number) for number in numbers]


def rewritten(text: str, mutation: Mutation) -> str:
    """Return the text of `mutations.py` with another place for the mutation that breaks the same."""
    for call in ast.walk(ast.parse(text)):
        match call:
            case ast.Call(func=ast.Name(id="Mutation"), args=[_, *_, ast.Constant()]) if any(
                isinstance(each, ast.Constant) and each.value == mutation.breaks for each in call.args
            ):
                rest = [ast.get_source_segment(text, each) or "" for each in call.args[1:]]
                rest += [f"nth={mutation.nth}"] if mutation.nth else []
                return text.replace(
                    ast.get_source_segment(text, call) or "", f'Mutation("{mutation.where}", {", ".join(rest)})'
                )
    raise AssertionError(f"mutations.py has none that breaks {mutation.breaks!r}")


def mend(chosen: Sequence[Mutation]) -> int:
    """Write the places of mutations that have moved, where there is one for each; return how many have none."""
    file = mutations.__file__
    left = 0
    for mutation in chosen:
        if stands(mutation):
            continue
        found = candidates(mutation)
        print(f"{mutation.breaks}\n  was in {mutation.where}, at `{mutation.at}`")
        if len(found) == 1:
            print(f"  is in {found[0].where} now, and written down")
            with open(file) as reading:
                text = rewritten(reading.read(), found[0])
            with open(file, "w") as writing:
                writing.write(text)
            continue
        left += 1
        where = ", ".join(f"{each.where} nth={each.nth}" for each in found)
        print(
            f"  {mutation.told_by} would tell it in: {where or 'no place: choose another operator, name or scenario'}"
        )
    print(f"{len(chosen)} mutations, of which {left} have no place, or more than one; `ruff format` comes next")
    return left

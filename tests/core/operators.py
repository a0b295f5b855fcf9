"""What a mutation does to the rules: operators on the syntax tree of one function.

An operator changes one place, which is found by a name in it, such as `requesting` in `if state.requesting:`.  Of
places that lie in each other the innermost counts.  Layout, comments and the rest of the function may change.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

Operator = Callable[[ast.AST, str], ast.AST | None]
"""Takes a node and a name; returns what becomes of the node, None where this is no place of it."""


class Place(NamedTuple):
    """One node that an operator could change."""

    node: ast.AST
    changed: ast.AST


# --- tests ---------------------------------------------------------------------------------------


def never(node: ast.AST, name: str) -> ast.AST | None:
    """Take `if` and `x if ... else y` for false."""
    return _decided(node, name, value=False)


def always(node: ast.AST, name: str) -> ast.AST | None:
    """Take `if` and `x if ... else y` for true."""
    return _decided(node, name, value=True)


def _decided(node: ast.AST, name: str, *, value: bool) -> ast.AST | None:
    if not isinstance(node, ast.If | ast.IfExp) or not _has(node.test, name):
        return None
    return _with(node, test=ast.Constant(value))


def _compares(becomes: dict[type[ast.cmpop], type[ast.cmpop]], node: ast.AST, name: str) -> ast.AST | None:
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or type(node.ops[0]) not in becomes:
        return None
    return _with(node, ops=[becomes[type(node.ops[0])]()]) if _has(node, name) else None


invert: Operator = partial(_compares, {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq})
"""Have a comparison say the opposite."""
mirror: Operator = partial(_compares, {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE})
"""Compare the other way round."""
bound: Operator = partial(_compares, {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt})
"""Count the bound itself to the other side."""


# --- parts ---------------------------------------------------------------------------------------


def drop(node: ast.AST, name: str) -> ast.AST | None:
    """Leave out an operand of `and` and `or`, a keyword, an element of a tuple, or the filter of a comprehension."""
    match node:
        case ast.BoolOp(values=values):
            left = [each for each in values if not _has(each, name)]
            if len(left) != len(values) - 1:
                return None
            return left[0] if len(left) == 1 else _with(node, values=left)
        case ast.Call(keywords=keywords) if any(each.arg == name for each in keywords):
            return _with(node, keywords=[each for each in keywords if each.arg != name])
        case ast.Tuple(elts=elements) if any(_is(each, name) for each in elements):
            return _with(node, elts=[each for each in elements if not _is(each, name)])
        case ast.comprehension(ifs=[test]) if _has(test, name):
            return _with(node, ifs=[])
        case _:
            return None


def swap(node: ast.AST, name: str) -> ast.AST | None:
    """Exchange an element of a tuple with the one behind it."""
    if not isinstance(node, ast.Tuple):
        return None
    for index, each in enumerate(node.elts[:-1]):
        if _is(each, name):
            return _with(node, elts=[*node.elts[:index], node.elts[index + 1], each, *node.elts[index + 2 :]])
    return None


def first(node: ast.AST, name: str) -> ast.AST | None:
    """Keep the first argument of a call of that name, or the left operand of arithmetic."""
    return _one_of(node, name, 0)


def last(node: ast.AST, name: str) -> ast.AST | None:
    """Keep the last argument of a call of that name, or the right operand of arithmetic."""
    return _one_of(node, name, -1)


def _one_of(node: ast.AST, name: str, index: int) -> ast.AST | None:
    match node:
        case ast.Call(func=called, args=[_, *_] as arguments) if _is(called, name):
            return arguments[index]
        case ast.BinOp(left=left, right=right) if _has(node, name):
            return (left, right)[index]
        case _:
            return None


# --- values --------------------------------------------------------------------------------------


def becomes(value: str) -> Operator:
    """Have a keyword, a variable, or what is returned (`return`) be a constant."""

    def operator(node: ast.AST, name: str) -> ast.AST | None:
        constant = ast.parse(value, mode="eval").body
        match node:
            case ast.keyword(arg=arg) if arg == name:
                return _with(node, value=constant)
            case ast.Assign(targets=[target]) if _is(target, name):
                return _with(node, value=constant)
            case ast.Return() if name == "return":
                return _with(node, value=constant)
            case _:
                return None

    return operator


def member(other: str) -> Operator:
    """Have an attribute, such as the member of an enum, be another one."""

    def operator(node: ast.AST, name: str) -> ast.AST | None:
        return _with(node, attr=other) if isinstance(node, ast.Attribute) and node.attr == name else None

    return operator


def one_more(node: ast.AST, name: str) -> ast.AST | None:
    """Add one to a value."""
    if not isinstance(node, ast.Attribute) or node.attr != name:
        return None
    return ast.BinOp(left=node, op=ast.Add(), right=ast.Constant(1))


def opposite(node: ast.AST, name: str) -> ast.AST | None:
    """Add instead of subtracting, and the other way round."""
    signs: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
    if not isinstance(node, ast.BinOp) or type(node.op) not in signs or not _has(node, name):
        return None
    return _with(node, op=signs[type(node.op)]())


def extreme(node: ast.AST, name: str) -> ast.AST | None:
    """Take the larger one instead of the smaller, and the other way round."""
    match node:
        case ast.Call(func=ast.Name(id="min" | "max" as called)) if _has(node, name):
            return _with(node, func=ast.Name(id={"min": "max", "max": "min"}[called], ctx=ast.Load()))
        case _:
            return None


def does_nothing(node: ast.AST, name: str) -> ast.AST | None:
    """Return the state as it is, in place of what is returned."""
    if not isinstance(node, ast.Return) or not _has(node, name):
        return None
    return _with(node, value=ast.parse("Decision(state)", mode="eval").body)


# --- places --------------------------------------------------------------------------------------


def places(function: ast.AST, operator: Operator, name: str) -> list[Place]:
    """Return where an operator could change a function, in the order of the text."""
    found = [
        Place(node, changed) for node in ast.walk(function) if (changed := operator(node, name)) is not None
    ]  # fmt: skip
    nodes = [place.node for place in found]
    inner = [
        place
        for place in found
        if not isinstance(place.node, ast.expr)
        or not any(other is not place.node and other in set(ast.walk(place.node)) for other in nodes)
    ]
    return sorted(inner, key=lambda place: line(place.node))


def line(node: ast.AST) -> tuple[int, int]:
    """Return where a node stands: line and column."""
    inside = [(each.lineno, each.col_offset) for each in ast.walk(node) if isinstance(each, ast.expr | ast.stmt)]
    return min(inside, default=(0, 0))


def put(tree: ast.Module, place: Place) -> ast.Module:
    """Put the change of a place into its tree."""

    class Putting(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return place.changed if node is place.node else self.generic_visit(node)

    return ast.fix_missing_locations(Putting().visit(tree))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is(node: ast.AST, name: str) -> bool:
    """Whether a name, an attribute (`code`, or all of it: `event.code`) or a starred one is called so."""
    match node:
        case ast.Starred(value=inner):
            return _is(inner, name)
        case ast.Name(id=called):
            return called == name
        case ast.Attribute(attr=called):
            return called == name or ("." in name and ast.unparse(node) == name)
        case _:
            return False


def _has(node: ast.AST, name: str) -> bool:
    """Whether something in a node is called so."""
    return any(_is(each, name) for each in ast.walk(node))

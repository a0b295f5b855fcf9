"""What a training script and its command line show without being run: options, imports, and what it gives to calls."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_VARIABLE = "$"
_QUOTED = re.compile(r"""(["'])([^"'\\]*)\1\s*(?:#.*)?""")  # of YAML, with nothing in it that must be unfolded
_COMMENT = re.compile(r"\s#.*")
_NO_TEXT = ("null", "Null", "NULL", "~", "")
_SPECIAL = tuple("&*!|>{}[]%@`,?\"'#-")  # how what is no plain text of YAML begins


@dataclass(frozen=True)
class Script:
    """A command, and the Python script in it."""

    words: tuple[str, ...]  # of the command; of a shell script in it, those that start the Python script too
    name: str = ""  # of the Python script, as the command writes it; empty: there is none that could be read
    text: str = ""
    settings_name: str = ""  # of a YAML file in the command
    settings: str = ""  # what it holds

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Return the syntax of the script; nothing where it is of another Python."""
        return parse(self.text)

    @functools.cached_property
    def modules(self) -> frozenset[str]:
        """Return what the script imports."""
        return modules(self.nodes)

    def option(self, names: Sequence[str]) -> tuple[str, str] | None:
        """Return the last value that the command gives to one of some options, and the word that shows it.

        `--NAME VALUE`, `--NAME=VALUE` and `NAME=VALUE` count; dashes and underscores are the same.

        >>> Script(("train.py", "--output-dir", "out")).option(("--output_dir",))
        ('out', '--output-dir')
        >>> Script(("train.py", "checkpoint.save=/c")).option(("checkpoint.save",))
        ('/c', 'checkpoint.save')
        """
        wanted = {_plain(name) for name in names}
        found = None
        for place, word in enumerate(self.words):
            name, equal, value = word.partition("=")
            if _plain(name) not in wanted or (not equal and not name.startswith("-")):
                continue
            if not equal:
                value = self.words[place + 1] if place + 1 < len(self.words) else ""
            if value and _VARIABLE not in value and (equal or not value.startswith("--")):
                found = (value, name)
        return found

    def setting(self, name: str) -> str | None:
        """Return the text that a key at the top of the YAML file has; None where it is not there, or no plain text.

        >>> Script((), settings="output_dir: './out'  # here").setting("output_dir")
        './out'
        >>> Script((), settings="output_dir: ${HOME}/x").setting("output_dir")
        """
        found = re.findall(rf"^{re.escape(name)}:[ \t]+(.*)$", self.settings, re.MULTILINE)
        if len(found) != 1 or _VARIABLE in found[0]:
            return None
        if quoted := _QUOTED.fullmatch(found[0]):
            return quoted[2] or None
        text = _COMMENT.sub("", found[0]).strip()
        return None if text in _NO_TEXT or text.startswith(_SPECIAL) or ": " in text else str(text)

    def has_option(self, names: Sequence[str]) -> bool:
        """Tell whether the command gives one of some options."""
        wanted = {_plain(name) for name in names}
        given = (word.partition("=") for word in self.words)
        return any(_plain(name) in wanted and (equal or name.startswith("-")) for name, equal, _ in given)

    def has_positional(self, endings: tuple[str, ...]) -> bool:
        """Tell whether the command gives the script a file of some kinds that is no option's value."""
        place = self.words.index(self.name) + 1 if self.name in self.words else 0
        behind = zip(self.words[place:], ("", *self.words[place:]), strict=False)
        return any(word.endswith(endings) and not before.startswith("-") for word, before in behind if word[:1] != "-")

    def reads(self, name: str) -> bool:
        """Tell whether the script reads a field (`args.NAME`, `getattr(args, "NAME")`)."""
        return any(
            (isinstance(node, ast.Attribute) and node.attr == name)
            or (isinstance(node, ast.Constant) and node.value == name)
            for node in self.nodes
        )

    def refuses(self, option: str) -> bool:
        """Tell whether the script declares an option that takes no path: a switch, a number."""
        return self._declaration(option) is not None and self.declares(option) is None

    def declares(self, option: str) -> ast.Call | None:
        """Return the call that declares an option with a text as its value (`add_argument`, `click.option`, ...)."""
        call = self._declaration(option)
        if call is None or {keyword.arg for keyword in call.keywords} & {"action", "nargs", "is_flag"}:
            return None
        types = [last_name(keyword.value).lower() for keyword in call.keywords if keyword.arg == "type"]
        return None if any(name in ("int", "float") or "bool" in name for name in types) else call

    def takes_switch(self, option: str) -> bool:
        """Tell whether the script declares an option without a value."""
        call = self._declaration(option) if option else None
        actions = [keyword.value for keyword in call.keywords if keyword.arg == "action"] if call is not None else []
        return any(isinstance(action, ast.Constant) and action.value == "store_true" for action in actions)

    def _declaration(self, option: str) -> ast.Call | None:
        for node in self.nodes:
            if not isinstance(node, ast.Call) or not node.args:
                continue
            names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if any(name.startswith("--") and _plain(name) == _plain(option) for name in names):
                return node
        return None

    def given(self, keyword: str, calls: Sequence[str] = ()) -> list[ast.expr]:
        """Return the values that the script gives to calls by a keyword, or to some calls as their first argument."""
        found: list[ast.expr] = []
        for node in self.nodes:
            if isinstance(node, ast.Call):
                found += [each.value for each in node.keywords if each.arg == keyword]
                if last_name(node.func) in calls:
                    found += node.args[:1]
        return [value for each in found for value in self._assigned(each)]

    def given_to(self, call: str, keyword: str) -> list[ast.expr]:
        """Return the values that the script gives to one kind of call by a keyword."""
        calls = (node for node in self.nodes if isinstance(node, ast.Call) and last_name(node.func) == call)
        given = [each.value for node in calls for each in node.keywords if each.arg == keyword]
        return [value for each in given for value in self._assigned(each)]

    def _assigned(self, node: ast.expr, before: frozenset[str] = frozenset()) -> list[ast.expr]:
        """Return what the script assigns to a variable, through other variables; else the expression itself."""
        inner = _value(node)
        if not isinstance(inner, ast.Name) or inner.id in before:
            return [node]
        values = self._assignments.get(inner.id, [])
        return [each for value in values for each in self._assigned(value, before | {inner.id})] or [node]

    @functools.cached_property
    def _assignments(self) -> dict[str, list[ast.expr]]:
        """Return the values of each variable; what only changes or takes apart a value counts as computed."""
        found: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    pass
                case (
                    ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value)
                ):
                    targets = [target]
                case ast.AugAssign(target=target, op=operator, value=right):
                    targets, value = [target], ast.BinOp(target, operator, right)
                case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                    targets, value = [target], ast.List(elts=[value], ctx=ast.Load())
                case _:
                    continue
            for target in targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(value)
                elif isinstance(target, ast.Tuple | ast.List):
                    parts = (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
                    for name in parts:
                        found.setdefault(name, []).append(ast.List(elts=[value], ctx=ast.Load()))
        return found

    def options_given(self, keyword: str, calls: Sequence[str] = ()) -> list[str]:
        """Return the options of its own that a script gives to calls by a keyword (`output_dir=args.out`: `--out`).

        Only an option's value itself counts: what is computed from it is another value.
        """
        values = [_value(given) for given in self.given(keyword, calls)]
        options = [f"--{last_name(value)}" for value in values if _is_read(value)]
        return list(dict.fromkeys(option for option in options if self.declares(option) is not None))

    def computes_from(self, option: str, keyword: str, calls: Sequence[str] = ()) -> bool:
        """Tell whether the script gives calls a value by a keyword that it computes from an option."""
        wanted = _plain(option).lstrip("-")
        values = [_value(given) for given in self.given(keyword, calls)]
        computed = filter(self.is_computed, values)
        return any(self._mentions(value, wanted) for value in computed)

    def _mentions(self, value: ast.expr, wanted: str, before: frozenset[str] = frozenset()) -> bool:
        """Tell whether an expression has an option in it, or a variable whose value has."""
        for node in ast.walk(value):
            if _plain(last_name(node)) == wanted:
                return True
            if isinstance(node, ast.Name) and node.id not in before:
                inner = self._assignments.get(node.id, [])
                if any(self._mentions(each, wanted, before | {node.id}) for each in inner):
                    return True
        return False

    @staticmethod
    def is_computed(value: ast.expr) -> bool:
        """Tell whether a value is neither a constant, nor a variable, nor `args.x`."""
        inner = _value(value)
        return not (isinstance(inner, ast.Constant | ast.Name) or _is_read(inner))

    def default(self, option: str) -> str | None:
        """Return the default of an option that the script declares, where it is a text."""
        call = self.declares(option)
        for keyword in call.keywords if call is not None else ():
            if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
                return keyword.value.value if isinstance(keyword.value.value, str) else None
        return None


def last_name(node: ast.AST) -> str:
    """Return the name of a variable, or the last one of `a.b.c`; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.expr) -> ast.expr:
    """Return what `str(...)`, `Path(...)` and `... or None` take, for they change no path."""
    match node:
        case ast.Call(func=function, args=[inner], keywords=[]) if last_name(function) in ("str", "Path"):
            return _value(inner)
        case ast.BoolOp(op=ast.Or(), values=[inner, ast.Constant(value=None)]):
            return _value(inner)
    return node


def _is_read(node: ast.expr) -> bool:
    """Tell whether an expression is `args.x`, and nothing that is computed from it."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def _plain(name: str) -> str:
    return name.replace("_", "-")


def parse(text: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a Python text; none where it cannot be parsed."""
    try:
        return tuple(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def modules(nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Return the modules and names that a script imports, and the names that it takes out of imported modules."""
    found: set[str] = set()
    named: dict[str, str] = {}  # as the script calls a module
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            named.update({alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in named:
            found.add(f"{named[node.value.id].partition('.')[0]}.{node.attr}")
    return frozenset(found)

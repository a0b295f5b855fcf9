"""Shared machinery: files of a tree, scopes of names, edits by byte positions.  Standard library only (Python 3.11)."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

BUILTINS = frozenset(dir(builtins))


def stop(message: str) -> None:
    print(f"STOP: {message}", file=sys.stderr)
    sys.exit(1)


def tracked(root: Path) -> list[str]:
    out = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], check=True, capture_output=True).stdout
    return [name for name in out.decode().split("\0") if name]


def clean(root: Path) -> None:
    out = subprocess.run(["git", "-C", str(root), "status", "--porcelain"], check=True, capture_output=True, text=True)
    if out.stdout.strip():
        stop(f"the tree is not committed:\n{out.stdout}")


def read(path: Path) -> str | None:
    """Return the text; None for what is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
        return None


@dataclass(eq=False)
class Scope:
    node: ast.AST
    parent: "Scope | None"
    kind: str  # module, function, class
    bound: dict[str, list[tuple[str, ast.AST]]] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)

    def bind(self, name: str, kind: str, node: ast.AST) -> None:
        if name in self.globals:
            scope = self
            while scope.parent:
                scope = scope.parent
            scope.bound.setdefault(name, []).append((kind, node))
        elif name in self.nonlocals:
            return
        else:
            self.bound.setdefault(name, []).append((kind, node))

    def resolve(self, name: str) -> "Scope | None":
        scope: Scope | None = self
        first = True
        while scope is not None:
            if name in scope.globals:
                while scope.parent:
                    scope = scope.parent
                return scope
            if name in scope.bound and (first or scope.kind != "class"):
                return scope
            scope, first = scope.parent, False
        return None


class Scopes(ast.NodeVisitor):
    """Find all scopes, what each binds, and where each name is used."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree, None, "module")
        self.scope = self.module
        self.uses: list[tuple[ast.Name, Scope]] = []
        self.strings: list[tuple[ast.Constant, Scope]] = []
        self.attributes: list[tuple[ast.Attribute, Scope]] = []
        self.imports: list[tuple[ast.ImportFrom | ast.Import, Scope]] = []
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.global_statements: list[ast.Global] = []
        self._prebind(tree, self.module)
        self.generic_visit(tree)

    # `global` has to be known before the bindings of its function
    def _prebind(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                continue
            if isinstance(child, ast.Global):
                scope.globals.update(child.names)
            if isinstance(child, ast.Nonlocal):
                scope.nonlocals.update(child.names)
            self._prebind(child, scope)

    def _inner(self, node: ast.AST, kind: str) -> Scope:
        scope = Scope(node, self.scope, kind)
        self._prebind(node, scope)
        return scope

    def visit_Global(self, node: ast.Global) -> None:
        self.global_statements.append(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            self.scope.bind(node.id, "name", node)
        self.uses.append((node, self.scope))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope = self.scope
        while scope.kind == "comprehension" and scope.parent:
            scope = scope.parent
        scope.bind(node.target.id, "name", node.target)
        self.uses.append((node.target, self.scope))
        self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.append((node, self.scope))
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.calls.append((node, self.scope))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.append((node, self.scope))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.bind(node.name, "def", node)
        for each in [*node.decorator_list, *node.args.defaults, *[d for d in node.args.kw_defaults if d]]:
            self.visit(each)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [each for each in (node.args.vararg, node.args.kwarg) if each]
        for each in arguments:
            if each.annotation:
                self.visit(each.annotation)
        if node.returns:
            self.visit(node.returns)
        outer, self.scope = self.scope, self._inner(node, "function")
        for each in arguments:
            self.scope.bind(each.arg, "arg", each)
        for each in node.body:
            self.visit(each)
        self.scope = outer

    visit_FunctionDef = visit_AsyncFunctionDef = _function  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for each in [*node.args.defaults, *[d for d in node.args.kw_defaults if d]]:
            self.visit(each)
        outer, self.scope = self.scope, self._inner(node, "function")
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for each in [*arguments, *[a for a in (node.args.vararg, node.args.kwarg) if a]]:
            self.scope.bind(each.arg, "arg", each)
        self.visit(node.body)
        self.scope = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.bind(node.name, "class", node)
        for each in [*node.decorator_list, *node.bases, *[k.value for k in node.keywords]]:
            self.visit(each)
        outer, self.scope = self.scope, self._inner(node, "class")
        for each in node.body:
            self.visit(each)
        self.scope = outer

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.visit(node.generators[0].iter)
        outer, self.scope = self.scope, self._inner(node, "comprehension")
        for i, each in enumerate(node.generators):
            self.visit(each.target)
            if i:
                self.visit(each.iter)
            for test in each.ifs:
                self.visit(test)
        for part in ("elt", "key", "value"):
            if hasattr(node, part):
                self.visit(getattr(node, part))
        self.scope = outer

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension  # type: ignore[assignment]

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.scope.bind(node.name, "except", node)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self.scope.bind(node.name, "match", node)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self.scope.bind(node.name, "match", node)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.scope.bind(node.rest, "match", node)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.imports.append((node, self.scope))
        for each in node.names:
            self.scope.bind((each.asname or each.name).split(".")[0], "import", each)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.append((node, self.scope))
        for each in node.names:
            self.scope.bind(each.asname or each.name, "import", each)

    def everywhere(self) -> set[str]:
        """Return every name that is bound or used in any scope."""
        names = {use.id for use, _ in self.uses}
        todo = [self.module]
        for _, scope in self.uses:
            while scope and scope not in todo:
                todo.append(scope)
                scope = scope.parent
        for scope in self.all_scopes():
            names |= set(scope.bound)
        return names

    def all_scopes(self) -> list[Scope]:
        seen: list[Scope] = [self.module]
        known = {id(self.module)}
        for collection in (self.uses, self.strings, self.attributes, self.imports, self.calls):
            for _, scope in collection:
                while scope is not None and id(scope) not in known:
                    known.add(id(scope))
                    seen.append(scope)
                    scope = scope.parent
        return seen


class Source:
    """One Python file, its scopes, and edits that wait."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            stop(f"{path}: {error}")
        self.scopes = Scopes(self.tree)
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits: dict[tuple[int, int], str] = {}

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def edit(self, start: int, end: int, text: str) -> None:
        old = self.edits.get((start, end))
        if old is not None and old != text:
            stop(f"{self.path}: two edits at {start}: {old!r} and {text!r}")
        self.edits[start, end] = text

    def edit_node(self, node: ast.AST, text: str) -> None:
        self.edit(self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset), text)

    def edit_name(self, node: ast.AST, old: str, new: str) -> None:
        """Edit the name token of a Name, an Attribute, a def or a class, an argument, an except or a match."""
        if isinstance(node, ast.Name | ast.arg):
            start = self.at(node.lineno, node.col_offset)
        elif isinstance(node, ast.Attribute):
            start = self.at(node.end_lineno, node.end_col_offset) - len(old.encode())
        else:
            begin = self.at(node.lineno, node.col_offset)
            word = rb"(?:def|class)\s+" if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) else rb"\b"
            found = re.compile(word + rb"(?=" + re.escape(old.encode()) + rb"\b)").search(self.data, begin)
            if not found:
                stop(f"{self.path}:{node.lineno}: no {old}")
            start = found.end()
        end = start + len(old.encode())
        if self.data[start:end] != old.encode():
            stop(f"{self.path}:{node.lineno}: expected {old}, found {self.data[start:end]!r}")
        self.edit(start, end, new)

    def result(self) -> str:
        out, last = [], 0
        for (start, end), text in sorted(self.edits.items()):
            if start < last:
                stop(f"{self.path}: overlapping edits near byte {start}: {text!r}")
            out += [self.data[last:start], text.encode()]
            last = end
        out.append(self.data[last:])
        return b"".join(out).decode()


def module_name(path: str) -> str | None:
    """Return the dotted name of a file below supervisor/."""
    if not path.startswith("supervisor/stepkeeper/") or not path.endswith(".py"):
        return None
    name = path[len("supervisor/") : -3].replace("/", ".")
    return name[: -len(".__init__")] if name.endswith(".__init__") else name


def run(*words: str, cwd: Path) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        stop(f"{' '.join(words)}: {done.stdout}{done.stderr}")


def exists(path: Path) -> bool:
    return os.path.lexists(path)


def literal(text: str) -> str:
    quoted_text = repr(text)
    if "'" == quoted_text[0] and '"' not in text:
        return '"' + quoted_text[1:-1].replace("\\'", "'") + '"'
    return quoted_text


def quoted(source: Source, old: str, new: str) -> tuple[str, str] | None:
    """Return how a piece of a file, and another text in its place, read after the edits of that file."""
    data = old.encode()
    if source.data.count(data) != 1:
        return None
    begin = source.data.index(data)
    end = begin + len(data)
    words: dict[tuple[str, str], set[str]] = {}
    for (a, b), text in source.edits.items():
        after = source.data[b : b + 2]
        kind = "." if source.data[a - 1 : a] == b"." else "=" if after[:1] == b"=" and after != b"==" else ""
        words.setdefault((source.data[a:b].decode(), kind), set()).add(text)
    out, last = [], begin
    for (a, b), text in sorted(source.edits.items()):
        if b <= begin or a >= end:
            continue
        if a < begin or b > end:
            return None
        out += [source.data[last:a], text.encode()]
        last = b
    out.append(source.data[last:end])
    for (word, kind), texts in sorted(words.items(), key=lambda pair: (-len(pair[0][0]), -len(pair[0][1]))):
        if len(texts) == 1 and re.fullmatch(r"[\w.]+", word):
            before, after = {".": (r"(?<=\.)", ""), "=": (r"(?<![\w.])", r"(?==[^=])"), "": (r"(?<![\w.])", r"(?!=[^=])")}[kind]
            new = re.sub(rf"{before}{re.escape(word)}\b{after}", next(iter(texts)), new)
    return b"".join(out).decode(), new

"""move.py ROOT [--dry]: bring a clean, committed tree into the new layout.  See README beside this file."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import layout_table as table
from lib import BUILTINS, Scope, Source, clean, literal, module_name, quoted, read, run, stop, tracked

ROOT = Path(sys.argv[1]).resolve()
TOP = "stepkeeper"
NEVER = ("tests/fixtures/", "CHANGELOG.md")


def short(name: str) -> str:
    return name[len(TOP) + 1 :]


def wrapped(text: str) -> list[str]:
    """Return lines of at most 118 characters: paragraphs with a longer one are filled anew."""
    out: list[str] = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        if any(len(line) > 116 for line in lines) and not any(line.startswith(" ") for line in lines):
            lines = textwrap.wrap(" ".join(lines), 116, break_long_words=False, break_on_hyphens=False)
        out += [*lines, ""]
    return out[:-1]


class Mover:
    def __init__(self) -> None:
        self.files = tracked(ROOT)
        self.sources: dict[str, Source] = {}  # by path
        self.modules: dict[str, str] = {}  # old dotted -> path
        self.packages: set[str] = set()
        for path in self.files:
            if not path.endswith(".py") or not path.startswith(("supervisor/", "tests/", "trainer/")):
                continue
            text = read(ROOT / path)
            if text is None:
                continue
            self.sources[path] = Source(path, text)
            if name := module_name(path):
                self.modules[name] = path
                if path.endswith("__init__.py"):
                    self.packages.add(name)
        self.new: dict[str, str] = {}  # old dotted -> new dotted
        self.groups: dict[str, list[str]] = {}
        self.place()
        self.symbols: dict[tuple[str, str], str] = {
            (f"{TOP}.{m}", n): new for (m, n), new in table.SYMBOLS.items() if f"{TOP}.{m}" in self.modules
        }
        self.aliases: dict[tuple[str, str], str] = {}  # (path, old local name at module scope) -> forced new local name
        self.defs = {m: self.definitions(p) for m, p in self.modules.items()}
        self.dropped_defs: set[tuple[str, str]] = set()
        self.auto: list[str] = []

    # --- where everything goes

    def place(self) -> None:
        named: dict[str, str] = {}
        for new, olds in table.MODULES.items():
            for old in olds:
                full = f"{TOP}.{old}"
                if full not in self.modules:
                    print(f"warning: {full} is not there any more (for {new})")
                    continue
                if full in named:
                    stop(f"{full} is named twice")
                named[full] = f"{TOP}.{new}"
                self.groups.setdefault(f"{TOP}.{new}", []).append(full)
        for full in sorted(self.modules):
            if full in named:
                self.new[full] = named[full]
                continue
            old = short(full)
            if old in table.DROPPED:
                self.new[full] = f"{TOP}.submit"
                continue
            if full in self.packages and old in table.PACKAGES:
                self.new[full] = f"{TOP}.{table.PACKAGES[old]}"
            elif "." in old:
                package, _, base = old.rpartition(".")
                target = table.PACKAGES.get(package, package)
                if target is None:
                    stop(f"{full}: its package goes; name its place in MODULES")
                self.new[full] = f"{TOP}.{target}.{base}"
            else:
                self.new[full] = full
            self.groups.setdefault(self.new[full], []).append(full)
        for new in self.groups:
            parent = new.rpartition(".")[0]
            if parent in self.groups and parent not in {self.new[p] for p in self.packages if p in self.new}:
                stop(f"{new}: its package {parent} would be a module")
        for full in self.modules:
            if full not in self.new:
                stop(f"{full} goes nowhere")

    def path_of(self, new: str) -> str:
        olds = self.groups.get(new, [])
        base = "supervisor/" + new.replace(".", "/")
        return f"{base}/__init__.py" if any(o in self.packages for o in olds) else f"{base}.py"

    # --- names

    def definitions(self, path: str) -> dict[str, list[ast.AST]]:
        out: dict[str, list[ast.AST]] = {}
        for name, places in self.sources[path].scopes.module.bound.items():
            nodes = [node for kind, node in places if kind != "import"]
            if nodes and name != "__all__":
                out[name] = nodes
        return out

    def origin(self, module: str, name: str, depth: int = 0) -> tuple[str, str]:
        if module not in self.modules or name in self.defs[module] or depth > 5:
            return module, name
        for statement, scope in self.sources[self.modules[module]].scopes.imports:
            if scope.kind == "module" and isinstance(statement, ast.ImportFrom) and statement.module in self.modules:
                for each in statement.names:
                    if (each.asname or each.name) == name:
                        return self.origin(statement.module, each.name, depth + 1)
        return module, name

    def renamed(self, module: str, name: str) -> str:
        return self.symbols.get(self.origin(module, name), name)

    def segment(self, module: str, name: str) -> str:
        """Return the text of a top-level definition."""
        source = self.sources[self.modules[module]]
        for node in source.tree.body:
            targets: list[str] = []
            if isinstance(node, ast.Assign):
                targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                targets = [node.target.id]
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                targets = [node.name]
            if targets == [name]:
                return ast.unparse(node)
        return f"{module}.{name}"

    def module_local(self, path: str, old_local: str, asname: str | None, target: str, scope: Scope) -> str:
        """Return the local name for a module that is imported."""
        if forced := self.aliases.get((path, old_local)):
            return forced
        if asname:
            return asname
        base = target.rpartition(".")[2]
        package = target.rpartition(".")[0].rpartition(".")[2]
        for candidate in (base, f"{package}_{base}", f"{base}_module"):
            if candidate == old_local or self.free(path, candidate, target, old_local):
                return candidate
        return stop(f"{path}: no name for {target}") or ""

    def free(self, path: str, name: str, target: str, old_local: str) -> bool:
        """Tell whether nothing else in a file is called so; another import of the same module may be."""
        source = self.sources[path]
        for scope in source.scopes.all_scopes():
            for kind, node in scope.bound.get(name, []):
                if kind != "import":
                    return False
                if self.target_of(path, node) != target:
                    return False
        return name not in {u.id for u, s in source.scopes.uses if s.resolve(u.id) is None}

    def target_of(self, path: str, alias: ast.AST) -> str:
        for statement, _ in self.sources[path].scopes.imports:
            if alias in statement.names:
                if isinstance(statement, ast.Import):
                    return alias.name
                full = f"{statement.module}.{alias.name}"
                if full in self.modules:
                    return self.new[full]
                if statement.module in self.modules:
                    return f"{self.new[statement.module]}.{self.renamed(statement.module, alias.name)}"
                return full
        return "?"

    # --- one file

    def bindings(self, path: str) -> list[tuple[str, str, str]]:
        """Return (old local, new local, target) of the imports at module scope that stay."""
        out = []
        me = module_name(path)
        here = self.new.get(me or "", "")
        for statement, scope in self.sources[path].scopes.imports:
            if scope.kind != "module":
                continue
            for each in statement.names:
                old_local = each.asname or each.name
                if isinstance(statement, ast.Import):
                    out.append((old_local.split(".")[0], old_local.split(".")[0], each.name))
                    continue
                full = f"{statement.module}.{each.name}"
                if full in self.modules:
                    if self.new[full] != here:
                        out.append((old_local, self.module_local(path, old_local, each.asname, self.new[full], scope), self.new[full]))
                elif statement.module in self.modules:
                    if self.new[statement.module] != here:
                        new = self.renamed(statement.module, each.name)
                        local = self.symbol_local(path, each, new)
                        out.append((old_local, local, f"{self.new[statement.module]}.{new}"))
                elif statement.module != "__future__":
                    out.append((old_local, old_local, full))
        return out

    def symbol_local(self, path: str, each: ast.alias, new: str) -> str:
        old_local = each.asname or each.name
        if forced := self.aliases.get((path, old_local)):
            return forced
        if each.asname:
            return each.asname
        if new == each.name:
            return new
        return new if self.free(path, new, "", old_local) else old_local

    def shadowed(self, scope: Scope, name: str, path: str) -> bool:
        """Tell whether a use in this scope of a module-level `name` would find a local one."""
        found = scope.resolve(name)
        return found is not None and found.kind != "module"

    def name_clashes(self) -> bool:
        """Find one round of clashes, and give names; tell whether there were any."""
        changed = False

        def rename(module: str, name: str, why: str) -> None:
            nonlocal changed
            base = module.rpartition(".")[2]
            now = self.symbols.get((module, name), name)
            new = f"{now}_{base}" if not now.endswith(f"_{base}") else f"{now}_"
            if name.isupper() or name.strip("_").isupper():
                new = (f"_{base.upper()}{now}" if now.startswith("_") else f"{base.upper()}_{now}") if now == name else f"{now}_"
            elif name.strip("_")[:1].isupper():
                head = "".join(part.capitalize() for part in base.split("_"))
                new = f"_{head}{now.strip('_')}" if now.startswith("_") else f"{head}{now}"
            self.symbols[module, name] = new
            self.auto.append(f"{module}.{name} -> {new} ({why})")
            changed = True

        for new, olds in self.groups.items():
            if len(olds) < 2:
                continue
            # builtins that one uses and another defines
            for module in olds:
                source = self.sources[self.modules[module]]
                unresolved = {u.id for u, s in source.scopes.uses if s.resolve(u.id) is None} & BUILTINS
                for other in olds:
                    if other == module:
                        continue
                    for name in self.defs[other]:
                        if self.symbols.get((other, name), name) in unresolved:
                            rename(other, name, f"a built-in name that {module} uses")
            if changed:
                return True
            taken: dict[str, tuple[str, str, str]] = {}  # name -> (kind, module, target or old name)
            for module in olds:
                path = self.modules[module]
                for name in self.defs[module]:
                    final = self.symbols.get((module, name), name)
                    if final in taken:
                        kind, other, what = taken[final]
                        if kind == "def" and other != module:
                            if self.segment(module, name) == self.segment(other, what):
                                self.dropped_defs.add((module, name))
                                continue
                            rename(module, name, f"also in {other}")
                            return True
                        if kind == "import" and other != module:
                            if what.startswith(TOP):
                                self.force(other, final, what)
                            else:
                                rename(module, name, f"imported by {other}")
                            return True
                    taken[final] = ("def", module, name)
                for old_local, local, target in self.bindings(path):
                    if local in taken:
                        kind, other, what = taken[local]
                        if kind == "import" and what == target:
                            continue
                        if kind == "import" and other == module:
                            continue
                        if target.startswith(TOP):
                            self.force(module, local, target)
                            return True
                        if kind == "def":
                            rename(other, what, f"imported by {module}")
                            return True
                        if what.startswith(TOP):
                            self.force(other, local, what)
                            return True
                        stop(f"{new}: {local} is {what} in {other} and {target} in {module}")
                    taken[local] = ("import", module, target)
            # uses of a module of the same group, by attribute
            for module in olds:
                path = self.modules[module]
                source = self.sources[path]
                for statement, scope in source.scopes.imports:
                    if not isinstance(statement, ast.ImportFrom):
                        continue
                    for each in statement.names:
                        full = f"{statement.module}.{each.name}"
                        local = each.asname or each.name
                        if full in self.modules and self.new[full] == new and full != module:
                            for attribute, inner in source.scopes.attributes:
                                if isinstance(attribute.value, ast.Name) and attribute.value.id == local and inner.resolve(local) is scope:
                                    where, name = self.origin(full, attribute.attr)
                                    final = self.symbols.get((where, name), name)
                                    if self.shadowed(inner, final, path):
                                        rename(where, name, f"a local variable of {module}")
                                        return True
                        elif statement.module in self.modules and self.new[statement.module] == new and each.name in self.defs[statement.module]:
                            where, name = self.origin(statement.module, each.name)
                            final = self.symbols.get((where, name), name)
                            if final != local:
                                for use, inner in source.scopes.uses:
                                    if use.id == local and inner.resolve(local) is scope and self.shadowed(inner, final, path):
                                        rename(where, name, f"a local variable of {module}")
                                        return True
            # renamed definitions, in their own module
            for module in olds:
                source = self.sources[self.modules[module]]
                for name in self.defs[module]:
                    final = self.symbols.get((module, name), name)
                    if final == name:
                        continue
                    for use, inner in source.scopes.uses:
                        if use.id == name and (s := inner.resolve(name)) and s.kind == "module" and self.shadowed(inner, final, ""):
                            rename(module, name, f"a local variable of its own module")
                            return True
        return changed

    def force(self, module: str, local: str, target: str) -> None:
        path = self.modules[module]
        base = target.rpartition(".")[2]
        package = target.rpartition(".")[0].rpartition(".")[2]
        old_local = next(old for old, new, what in self.bindings(path) if new == local and what == target)
        for candidate in (base, f"{package}_{base}", f"{base}_of_{package}", f"{package}_{base}_"):
            if candidate != local and candidate != self.aliases.get((path, old_local)) and self.free(path, candidate, target, old_local):
                self.aliases[path, old_local] = candidate
                self.auto.append(f"{path}: {old_local} is imported as {candidate}")
                return
        stop(f"{path}: no name for {target}")

    def rewrite(self, path: str) -> None:
        source = self.sources[path]
        scopes = source.scopes
        me = module_name(path)
        here = self.new.get(me or "", "")
        grouped = bool(me) and me in self.groups.get(here, [])
        # symbols of its own
        if me:
            for name in self.defs[me]:
                new = self.symbols.get((me, name))
                if not new:
                    continue
                for node in self.defs[me][name]:
                    if not isinstance(node, ast.Name):  # names are among the uses
                        source.edit_name(node, name, new)
                for use, scope in scopes.uses:
                    if use.id == name and (s := scope.resolve(name)) and s.kind == "module":
                        source.edit_name(use, name, new)
                for statement in scopes.global_statements:
                    if name in statement.names:
                        source.edit_node(statement, "global " + ", ".join(self.symbols.get((me, n), n) for n in statement.names))
        # imports
        for statement, scope in scopes.imports:
            if not isinstance(statement, ast.ImportFrom) or not (statement.module or "").startswith(TOP):
                continue
            if (statement.module or "").split(".")[0] != TOP:
                continue
            wanted: dict[str, list[str]] = defaultdict(list)
            for each in statement.names:
                old_local = each.asname or each.name
                full = f"{statement.module}.{each.name}"
                if full in self.modules:
                    target = self.new[full]
                    if grouped and target == here and full != me:
                        self.inline_module(source, path, full, old_local, scope)
                        continue
                    local = self.module_local(path, old_local, each.asname, target, scope)
                    package, _, base = target.rpartition(".")
                    wanted[package].append(base if local == base else f"{base} as {local}")
                    self.use_module(source, full, old_local, local, scope)
                elif statement.module in self.modules:
                    target = self.new[statement.module]
                    new = self.renamed(statement.module, each.name)
                    if grouped and target == here:
                        if new != old_local:
                            self.rename_uses(source, old_local, new, scope)
                        continue
                    local = self.symbol_local(path, each, new)
                    wanted[target].append(new if local == new else f"{new} as {local}")
                    if local != old_local:
                        self.rename_uses(source, old_local, local, scope)
                else:
                    stop(f"{path}:{statement.lineno}: what is {full}?")
            indent = " " * statement.col_offset
            lines = [f"from {package} import {', '.join(dict.fromkeys(names))}" for package, names in wanted.items()]
            text = source.data[source.at(statement.lineno, statement.col_offset) : source.at(statement.end_lineno, statement.end_col_offset)].decode()
            if "#" in text:
                print(f"warning: {path}:{statement.lineno}: a comment in an import is lost")
            plain = ast.unparse(statement)
            if lines == [plain]:
                continue
            source.edit_node(statement, f"\n{indent}".join(lines) if lines else "pass")
        # setattr(module, "name")
        for call, scope in scopes.calls:
            if len(call.args) > 1 and isinstance(call.args[0], ast.Name) and isinstance(call.args[1], ast.Constant):
                full = self.module_behind(path, call.args[0].id, scope)
                name = call.args[1].value
                if full and isinstance(name, str) and (new := self.renamed(full, name)) != name:
                    source.edit_node(call.args[1], f'"{new}"')

    def module_behind(self, path: str, local: str, scope: Scope) -> str:
        found = scope.resolve(local)
        if not found:
            return ""
        for kind, node in found.bound[local]:
            if kind == "import":
                for statement, _ in self.sources[path].scopes.imports:
                    if node in statement.names and isinstance(statement, ast.ImportFrom):
                        full = f"{statement.module}.{node.name}"
                        return full if full in self.modules else ""
        return ""

    def use_module(self, source: Source, full: str, old_local: str, local: str, scope: Scope) -> None:
        if local != old_local:
            self.rename_uses(source, old_local, local, scope)
        for attribute, inner in source.scopes.attributes:
            if isinstance(attribute.value, ast.Name) and attribute.value.id == old_local and inner.resolve(old_local) is scope:
                new = self.renamed(full, attribute.attr)
                if new != attribute.attr:
                    source.edit_name(attribute, attribute.attr, new)

    def rename_uses(self, source: Source, old: str, new: str, scope: Scope) -> None:
        for use, inner in source.scopes.uses:
            if use.id == old and inner.resolve(old) is scope:
                source.edit_name(use, old, new)

    def inline_module(self, source: Source, path: str, full: str, local: str, scope: Scope) -> None:
        done = set()
        for attribute, inner in source.scopes.attributes:
            value = attribute.value
            if isinstance(value, ast.Name) and value.id == local and inner.resolve(local) is scope:
                source.edit_node(attribute, self.renamed(full, attribute.attr))
                done.add(id(value))
        for use, inner in source.scopes.uses:
            if use.id == local and inner.resolve(local) is scope and id(use) not in done:
                source.edit_node(use, "sys.modules[__name__]")
                print(f"warning: {path}:{use.lineno}: the module {full} itself is used where it joins; look there")

    def mutations(self) -> None:
        """Bring what tests/core/mutations.py quotes of the rules along."""
        source = self.sources.get("tests/core/mutations.py")
        if source is None:
            return
        for call, _ in source.scopes.calls:
            if not (isinstance(call.func, ast.Name) and call.func.id == "Mutation" and len(call.args) > 2):
                continue
            first, old, new = call.args[:3]
            if not all(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in (first, old, new)):
                continue
            module = f"{TOP}.core.{first.value}"
            if module not in self.modules:
                print(f"warning: a mutation of {module}, which is not there")
                continue
            base = self.new[module].removeprefix(f"{TOP}.core.")
            if base != first.value:
                source.edit_node(first, f'"{base}"')
            words = quoted(self.sources[self.modules[module]], old.value, new.value)
            if words is None:
                print(f"warning: mutation of {module}: {old.value!r} does not stand there once")
                continue
            for node, text in zip((old, new), words, strict=True):
                if text != node.value:
                    source.edit_node(node, literal(text))

    # --- joining

    def joined(self, new: str) -> str:
        olds = self.order(self.groups[new])
        texts = {m: self.sources[self.modules[m]].result() for m in olds}
        first = self.groups[new][0]
        docstring = table.DOCSTRINGS.get(short(new))
        future = False
        imports: dict[str, None] = {}
        checking: list[str] = []
        bodies: list[str] = []
        mains: list[str] = []
        for module in olds:
            text = texts[module]
            tree = ast.parse(text)
            lines = text.splitlines(keepends=True)
            cut: set[int] = set()
            about = ast.get_docstring(tree, clean=True) or ""
            for i, node in enumerate(tree.body):
                span = range(node.lineno - 1, node.end_lineno)
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.decorator_list:
                    span = range(node.decorator_list[0].lineno - 1, node.end_lineno)
                if i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                    cut.update(span)
                    if module == first and docstring is None:
                        docstring = "".join(lines[span.start : span.stop])
                elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
                    future = True
                    cut.update(span)
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    cut.update(span)
                    statement = "".join(lines[span.start : span.stop])
                    if "#" in statement:
                        imports.setdefault(statement)
                    else:
                        for each in node.names:
                            one = ast.Import([each]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [each], node.level)
                            imports.setdefault(ast.unparse(one) + "\n")
                elif isinstance(node, ast.Pass):
                    cut.update(span)
                elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                    cut.update(span)
                    inside = [n for n in node.body if not isinstance(n, ast.Pass)]
                    checking += ["    " + ast.unparse(n) + "\n" for n in inside]
                elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                    cut.update(span)
                    mains.append("".join(lines[span.start : span.stop]))
                elif (names := self.names_of(node)) and len(names) == 1 and (module, names[0]) in self.dropped_defs:
                    cut.update(span)
            body = "".join(line for i, line in enumerate(lines) if i not in cut).strip("\n")
            if module != first and about:
                note = "".join(f"# {line}".rstrip() + "\n" for line in wrapped(about))
                body = f"{note}\n{body}" if bodies or True else body
            elif bodies and module == first:
                body = body
            bodies.append(body)
        out = [docstring or "", "\n"]
        if future:
            out.append("from __future__ import annotations\n\n")
        out += list(imports)
        if checking:
            out += ["\nif TYPE_CHECKING:\n", *dict.fromkeys(checking)]
        out.append("\n\n")
        out.append("\n\n\n".join(body for body in bodies if body) + "\n")
        for main in mains:
            out += ["\n\n", main]
        text = "".join(out)
        try:
            ast.parse(text)
        except SyntaxError as error:
            stop(f"{new}: joined it does not parse: {error}")
        return text

    def names_of(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Assign):
            return [t.id for t in node.targets if isinstance(t, ast.Name)]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            return [node.target.id]
        return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []

    def order(self, olds: list[str]) -> list[str]:
        """Whoever is imported comes first; else as in the table."""
        needs: dict[str, set[str]] = {m: set() for m in olds}
        for module in olds:
            for statement, scope in self.sources[self.modules[module]].scopes.imports:
                if scope.kind != "module" or not isinstance(statement, ast.ImportFrom):
                    continue
                for each in statement.names:
                    for full in (f"{statement.module}.{each.name}", statement.module):
                        if full in needs and full != module:
                            needs[module].add(full)
        out: list[str] = []
        while len(out) < len(olds):
            ready = next((m for m in olds if m not in out and needs[m] <= set(out)), None)
            if ready is None:
                stop(f"modules import each other: {olds}")
            out.append(ready)
        return out

    # --- all text

    def text_names(self) -> None:
        dotted = {**{short(o): short(n) for o, n in self.new.items() if o != TOP}}
        for old, new in table.PACKAGES.items():
            if new:
                dotted[old] = new
        paths: dict[str, str] = {}
        for old, path in self.modules.items():
            paths[path.removeprefix("supervisor/stepkeeper/")] = self.path_of(self.new[old]).removeprefix("supervisor/stepkeeper/")
        for path in self.files:
            if path.startswith("supervisor/stepkeeper/") and not path.endswith(".py"):
                paths[path.removeprefix("supervisor/stepkeeper/")] = self.data_path(path).removeprefix("supervisor/stepkeeper/")
        folders = {o.replace(".", "/"): n.replace(".", "/") for o, n in table.PACKAGES.items() if n}

        def one_dotted(match: re.Match[str]) -> str:
            words = match[1].strip(".").split(".")
            for n in range(len(words), 0, -1):
                old = ".".join(words[:n])
                if old in dotted:
                    rest = words[n:]
                    if rest and f"{TOP}.{old}" in self.modules:
                        rest[0] = self.renamed(f"{TOP}.{old}", rest[0])
                    return ".".join([TOP, dotted[old], *rest]) if dotted[old] else match[0]
            return match[0]

        def short_dotted(match: re.Match[str]) -> str:
            old = match[1]
            words = old.split(".")
            for n in (len(words), len(words) - 1):
                name = ".".join(words[:n])
                if n > 1 and name in dotted and f"{TOP}.{name}" in self.modules:
                    rest = words[n:]
                    if rest:
                        rest[0] = self.renamed(f"{TOP}.{name}", rest[0])
                    return "`" + ".".join([*dotted[name].split(".")[-2:], *rest]) + match[2]
            return match[0]

        def one_path(match: re.Match[str]) -> str:
            prefix = ""
            rest = match[0]
            for each in ("supervisor/", "stepkeeper/"):
                if rest.startswith(each):
                    prefix, rest = prefix + each, rest[len(each) :]
            return prefix + paths[rest] if rest in paths and ("/" in rest or prefix) else match[0]

        def one_folder(match: re.Match[str]) -> str:
            words = match[1].split("/")
            for n in range(len(words), 0, -1):
                old = "/".join(words[:n])
                if old in folders:
                    return "/".join(["supervisor/stepkeeper", folders[old], *words[n:]])
            return match[0]

        for path in tracked(ROOT):
            if path.startswith(NEVER) or not (ROOT / path).is_file():
                continue
            text = read(ROOT / path)
            if text is None or path == "tests/durations.txt":
                continue
            new = text
            if path.endswith(".py"):
                new = self.in_strings(new, one_dotted, short_dotted, one_path, one_folder)
            else:
                new = re.sub(r"\bstepkeeper((?:\.[a-z_0-9A-Z]+)+)(?![\w-])", one_dotted, new)
                new = re.sub(r"`([a-z_]+(?:\.[a-zA-Z_]+)+)([`(])", short_dotted, new)
                new = re.sub(r"(?<![\w/.-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|csv|toml|css|js)\b", one_path, new)
                new = re.sub(r"supervisor/stepkeeper/([a-z_/]+)(?![\w./])", one_folder, new)
            if new != text:
                (ROOT / path).write_text(new, encoding="utf-8")

    def in_strings(self, text: str, one_dotted, short_dotted, one_path, one_folder) -> str:
        import io
        import tokenize

        data = text.splitlines(keepends=True)
        starts = [0]
        for line in data:
            starts.append(starts[-1] + len(line))
        out, last = [], 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (tokenize.STRING, tokenize.COMMENT) and token.type != getattr(tokenize, "FSTRING_MIDDLE", -1):
                continue
            begin = starts[token.start[0] - 1] + token.start[1]
            end = starts[token.end[0] - 1] + token.end[1]
            old = text[begin:end]
            new = re.sub(r"\bstepkeeper((?:\.[a-z_0-9A-Z]+)+)(?![\w-])", one_dotted, old)
            new = re.sub(r"`([a-z_]+(?:\.[a-zA-Z_]+)+)([`(])", short_dotted, new)
            new = re.sub(r"(?<![\w/.-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|csv|toml|css|js)\b", one_path, new)
            new = re.sub(r"supervisor/stepkeeper/([a-z_/]+)(?![\w./])", one_folder, new)
            if new != old:
                out += [text[last:begin], new]
                last = end
        out.append(text[last:])
        return "".join(out)

    def data_path(self, path: str) -> str:
        package = path.removeprefix("supervisor/stepkeeper/").rpartition("/")[0].replace("/", ".")
        target = table.PACKAGES.get(package, package)
        return f"supervisor/stepkeeper/{(target or package).replace('.', '/')}/{path.rpartition('/')[2]}"

    # --- cycles

    def cycles(self) -> list[list[str]]:
        """Return the groups of new modules that import each other at their top level."""
        graph: dict[str, set[str]] = {n: set() for n in self.groups}
        why: dict[tuple[str, str], str] = {}
        for module, path in self.modules.items():
            here = self.new[module]
            skipped = set()
            for node in ast.walk(self.sources[path].tree):
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                    skipped |= {id(n) for n in ast.walk(node)}
            for statement, scope in self.sources[path].scopes.imports:
                if scope.kind != "module" or id(statement) in skipped or not isinstance(statement, ast.ImportFrom):
                    continue
                for each in statement.names:
                    full = f"{statement.module}.{each.name}"
                    old = full if full in self.modules else statement.module
                    if old in self.modules and self.new[old] != here:
                        graph.setdefault(here, set()).add(self.new[old])
                        why[here, self.new[old]] = f"{short(module)} -> {short(old)}"
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        out: list[list[str]] = []

        def visit(node: str) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            for other in graph.get(node, ()):
                if other not in index:
                    visit(other)
                    low[node] = min(low[node], low[other])
                elif other in stack:
                    low[node] = min(low[node], index[other])
            if low[node] == index[node]:
                part = []
                while True:
                    part.append(stack.pop())
                    if part[-1] == node:
                        break
                if len(part) > 1:
                    out.append(part)

        sys.setrecursionlimit(10000)
        for node in list(graph):
            if node not in index:
                visit(node)
        for part in out:
            print("CYCLE: " + ", ".join(sorted(part)))
            for (a, b), text in sorted(why.items()):
                if a in part and b in part:
                    print(f"    {text}")
        return out

    # --- everything

    def go(self) -> None:
        cycles = self.cycles()
        for _ in range(2000):
            if not self.name_clashes():
                break
        else:
            stop("clashes without an end")
        for line in self.auto:
            print(f"name: {line}")
        if "--dry" in sys.argv:
            for path in self.sources:
                self.rewrite(path)
            for new, olds in self.groups.items():
                size = len(self.joined(new).splitlines()) if len(olds) > 1 else 0
                if size > 470:
                    print(f"large: {new} {size}")
            print(f"{len(self.modules)} modules would be {len(self.groups) + len(table.NEW_PACKAGES)}")
            return
        if cycles:
            stop("modules would import each other")
        for path in self.sources:
            self.rewrite(path)
        results: dict[str, str] = {}
        for new, olds in self.groups.items():
            results[self.path_of(new)] = self.joined(new) if len(olds) > 1 else self.sources[self.modules[olds[0]]].result()
        self.mutations()
        others = {p: s.result() for p, s in self.sources.items() if not module_name(p) and s.edits}
        # git mv keeps histories: the first of a group moves, the others are removed
        moves: list[tuple[str, str]] = []
        removed: list[str] = []
        for new, olds in self.groups.items():
            largest = max(olds, key=lambda m: len(self.sources[self.modules[m]].text))
            moves.append((self.modules[largest], self.path_of(new)))
            removed += [self.modules[m] for m in olds if m != largest]
        removed += [self.modules[f"{TOP}.{m}"] for m in table.DROPPED if f"{TOP}.{m}" in self.modules]
        for path in self.files:
            if path.startswith("supervisor/stepkeeper/") and not path.endswith(".py"):
                moves.append((path, self.data_path(path)))
        if removed:
            run("git", "rm", "-q", "--cached", *removed, cwd=ROOT)
            for path in removed:
                (ROOT / path).unlink()
        moves = [(a, b) for a, b in moves if a != b]
        for i, (old, _) in enumerate(moves):  # by a detour: places change among each other
            run("git", "mv", old, f"supervisor/moving-{i}", cwd=ROOT)
        for i, (_, new) in enumerate(moves):
            (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
            run("git", "mv", f"supervisor/moving-{i}", new, cwd=ROOT)
        for path, text in {**results, **others}.items():
            (ROOT / path).write_text(text, encoding="utf-8")
        for package, text in table.NEW_PACKAGES.items():
            path = ROOT / "supervisor/stepkeeper" / package.replace(".", "/") / "__init__.py"
            if path.exists():
                stop(f"{path} is there already")
            path.write_text(text)
            run("git", "add", str(path), cwd=ROOT)
        for folder in sorted((ROOT / "supervisor/stepkeeper").rglob("*"), reverse=True):
            if folder.is_dir() and folder.name == "__pycache__":
                import shutil

                shutil.rmtree(folder)
        for folder in sorted((ROOT / "supervisor/stepkeeper").rglob("*"), reverse=True):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        self.text_names()
        files = Path(__file__).parent / "files"
        for name, target in (("glossary.md", "docs/glossary.md"), ("test_old_names.py", "tests/store/test_old_names.py")):
            if (ROOT / target).exists():
                stop(f"{target} is there already")
            (ROOT / target).write_text((files / name).read_text())
            run("git", "add", target, cwd=ROOT)
        page = (ROOT / "ARCHITECTURE.md").read_text()
        begin, end = page.find("    supervisor/stepkeeper/\n"), page.find("    trainer/stepkeeper_trainer/")
        if begin < 0 or end < begin:
            print("PATCH MISSED: ARCHITECTURE.md has no layout of supervisor/stepkeeper before trainer/stepkeeper_trainer")
        else:
            print("ARCHITECTURE.md: the layout is replaced; bring along what others added to this part of it:")
            print(page[begin:end])
            (ROOT / "ARCHITECTURE.md").write_text(page[:begin] + (files / "architecture_layout.txt").read_text() + page[end:])
        for file, old, new in table.PATCHES:
            text = read(ROOT / file)
            if text is None or old not in text:
                print(f"PATCH MISSED: {file}: {old!r}")
                continue
            (ROOT / file).write_text(text.replace(old, new))
        print(f"{len(self.modules)} modules are {len(self.groups) + len(table.NEW_PACKAGES)} now")


if __name__ == "__main__":
    if "--dry" not in sys.argv:
        clean(ROOT)
    Mover().go()

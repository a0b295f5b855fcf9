"""rename.py ROOT: new names for symbols, fields, tags and words, in a clean, committed tree of the old layout."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import names_table as table
from lib import Source, clean, literal, module_name, quoted, read, run, stop, tracked

ROOT = Path(sys.argv[1]).resolve()
TOP = "stepkeeper"
NEVER = ("tests/fixtures/", "CHANGELOG.md", "trainer/", "tests/durations.txt", "tests/seeing/recorded/")


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return last_name(node.func) + "()"
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return ""


class Renamer:
    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}
        self.modules: dict[str, str] = {}
        for path in tracked(ROOT):
            if path.endswith(".py") and path.startswith(("supervisor/", "tests/")) and not path.startswith(NEVER):
                text = read(ROOT / path)
                if text is not None:
                    self.sources[path] = Source(path, text)
                    if name := module_name(path):
                        self.modules[name] = path
        self.defs = {
            m: {n for n, places in self.sources[p].scopes.module.bound.items() if any(k != "import" for k, _ in places)}
            for m, p in self.modules.items()
        }
        self.symbols: dict[tuple[str, str], str] = {}
        for (module, name), new in table.SYMBOLS.items():
            full = f"{TOP}.{module}"
            if full not in self.modules or name not in self.defs[full]:
                print(f"warning: no {full}.{name} (any more)")
                continue
            if new in self.sources[self.modules[full]].scopes.module.bound:
                stop(f"{full} has a {new} already")
            self.symbols[full, name] = new
        self.counts: dict[str, int] = {}

    def origin(self, module: str, name: str, depth: int = 0) -> tuple[str, str]:
        if module not in self.modules or name in self.defs[module] or depth > 5:
            return module, name
        for statement, scope in self.sources[self.modules[module]].scopes.imports:
            if scope.kind == "module" and isinstance(statement, ast.ImportFrom) and statement.module in self.modules:
                for each in statement.names:
                    if (each.asname or each.name) == name:
                        return self.origin(statement.module, each.name, depth + 1)
        return module, name

    def new_name(self, module: str, name: str) -> str:
        return self.symbols.get(self.origin(module, name), name)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # --- symbols

    def symbols_in(self, path: str) -> None:
        source = self.sources[path]
        scopes = source.scopes
        me = module_name(path)
        if me:
            for name in self.defs[me]:
                new = self.symbols.get((me, name))
                if not new:
                    continue
                for kind, node in scopes.module.bound[name]:
                    if kind != "import" and not isinstance(node, ast.Name):
                        source.edit_name(node, name, new)
                self.uses(source, name, new, scopes.module)
                self.count(name)
        for statement, scope in scopes.imports:
            if not isinstance(statement, ast.ImportFrom) or statement.module not in self.modules:
                continue
            for each in statement.names:
                full = f"{statement.module}.{each.name}"
                local = each.asname or each.name
                if full in self.modules:
                    for attribute, inner in scopes.attributes:
                        if isinstance(attribute.value, ast.Name) and attribute.value.id == local and inner.resolve(local) is scope:
                            new = self.new_name(full, attribute.attr)
                            if new != attribute.attr:
                                source.edit_name(attribute, attribute.attr, new)
                    for call, inner in scopes.calls:
                        if len(call.args) > 1 and isinstance(call.args[0], ast.Name) and call.args[0].id == local and isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str):
                            new = self.new_name(full, call.args[1].value)
                            if new != call.args[1].value:
                                source.edit_node(call.args[1], f'"{new}"')
                    continue
                new = self.new_name(statement.module, each.name)
                if new == each.name:
                    continue
                start = source.at(each.lineno, each.col_offset)
                bound = {n for s in scopes.all_scopes() for n in s.bound if any(k != "import" or s is scope for k, _ in s.bound[n])}
                if each.asname == new:
                    source.edit_node(each, new)
                    continue
                if not each.asname and new in bound:
                    print(f"warning: {path}: {new} is another thing there; {each.name} stays the local name")
                    source.edit(start, start + len(each.name), f"{new} as {each.name}")
                    continue
                source.edit(start, start + len(each.name), new)
                if not each.asname:
                    self.uses(source, each.name, new, scope)
        # names in __all__
        for node in source.tree.body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
                for item in node.value.elts:
                    if me and isinstance(item, ast.Constant) and (new := self.new_name(me, item.value)) != item.value:
                        source.edit_node(item, f'"{new}"')

    def uses(self, source: Source, old: str, new: str, scope: object) -> None:
        for use, inner in source.scopes.uses:
            if use.id == old and inner.resolve(old) is scope:
                shadow = inner.resolve(new)
                if shadow is not None and shadow is not scope and shadow.kind != "module":
                    stop(f"{source.path}:{use.lineno}: {new} is a local variable there")
                source.edit_name(use, old, new)

    # --- fields

    def keyword(self, source: Source, node: ast.keyword, new: str) -> None:
        start = source.at(node.lineno, node.col_offset)
        source.edit(start, start + len(node.arg or ""), new)

    def fields_in(self, path: str) -> None:
        source = self.sources[path]
        me = module_name(path)
        for old, new, classes, receivers, functions in table.FIELDS:
            own = {c for m, c in classes if me == f"{TOP}.{m}"}
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef) and node.name in own:
                    for each in ast.walk(node):
                        if isinstance(each, ast.AnnAssign) and each in node.body and isinstance(each.target, ast.Name) and each.target.id == old:
                            source.edit_name(each.target, old, new)
                            self.count(f"{old} (field)")
                        if isinstance(each, ast.Attribute) and each.attr == old and isinstance(each.value, ast.Name) and each.value.id == "self":
                            source.edit_name(each, old, new)
            if not path.startswith(table.CORE) and not own:
                continue
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Attribute) and node.attr == old and last_name(node.value) in receivers:
                    source.edit_name(node, old, new)
                    self.count(f"{old} (attribute)")
                if isinstance(node, ast.Call):
                    function = last_name(node.func)
                    names = {self.symbols_back(f) for f in functions} | functions
                    if function not in names:
                        continue
                    if function == "replace" and (not node.args or last_name(node.args[0]) in table.NOT_STATE):
                        continue
                    if isinstance(node.func, ast.Attribute) and last_name(node.func.value) in ("lineage",):
                        continue
                    for each in node.keywords:
                        if each.arg == old:
                            self.keyword(source, each, new)
                            self.count(f"{old} (keyword)")
                if isinstance(node, ast.MatchClass) and old in node.kwd_attrs and last_name(node.cls) in {c for _, c in classes}:
                    stop(f"{path}:{node.lineno}: a pattern names {old}; teach this script")

    def symbols_back(self, name: str) -> str:
        return next((new for (_, old), new in self.symbols.items() if old == name), name)

    def identifiers_in(self, path: str) -> None:
        source = self.sources[path]
        for globs, old, new in table.IDENTIFIERS:
            if not path.startswith(globs):
                continue
            for use, inner in source.scopes.uses:
                if use.id == old:
                    scope = inner.resolve(old)
                    if scope is None or any(k == "import" for k, _ in scope.bound[old]):
                        continue
                    source.edit_name(use, old, new)
            for scope in source.scopes.all_scopes():
                for kind, node in scope.bound.get(old, []):
                    if kind in ("arg", "def"):
                        source.edit_name(node, old, new)
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Attribute) and node.attr == old:
                    source.edit_name(node, old, new)
                if isinstance(node, ast.keyword) and node.arg == old:
                    self.keyword(source, node, new)
                if isinstance(node, ast.FunctionDef) and node.name == old:
                    source.edit_name(node, old, new)

    def methods_in(self, path: str) -> None:
        source = self.sources[path]
        me = module_name(path)
        for module, class_name, old, new, receivers in table.METHODS:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef) and node.name == class_name and me == f"{TOP}.{module}":
                    for each in ast.walk(node):
                        if isinstance(each, ast.FunctionDef) and each in node.body and each.name == old:
                            source.edit_name(each, old, new)
                        if isinstance(each, ast.Attribute) and each.attr == old and isinstance(each.value, ast.Name) and each.value.id == "self":
                            source.edit_name(each, old, new)
                if isinstance(node, ast.Attribute) and node.attr == old and last_name(node.value) in receivers:
                    if isinstance(node.value, ast.Name) and node.value.id == module.rpartition(".")[2]:
                        scopes = [s for s in source.scopes.all_scopes() if any(k == "import" for k, _ in s.bound.get(node.value.id, []))]
                        if scopes:
                            continue  # the module, not an object
                    source.edit_name(node, old, new)

    def tags_in(self, path: str) -> None:
        source = self.sources[path]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.keyword) and node.arg == "tag" and isinstance(node.value, ast.Constant):
                new = table.TAGS.get(node.value.value)
                if new and path.startswith("supervisor/stepkeeper/core/"):
                    source.edit_node(node.value, f'"{new}"')

    def mutations(self) -> None:
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
                continue
            words = quoted(self.sources[self.modules[module]], old.value, new.value)
            if words is None:
                print(f"warning: mutation of {module}: {old.value!r} does not stand there once")
                continue
            for node, text in zip((old, new), words, strict=True):
                if text != node.value:
                    source.edit_node(node, literal(text))

    # --- text

    def text(self) -> None:
        words = dict(table.WORDS) | {old: new for old, new in table.TAGS.items() if old not in table.COMMON_TAGS}
        pattern = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + r")(?![\w-])")
        for path in tracked(ROOT):
            if path.startswith(NEVER):
                continue
            text = read(ROOT / path)
            if text is None:
                continue
            new = self.in_strings(text, pattern, words) if path.endswith(".py") else pattern.sub(lambda m: words[m[1]], text)
            for glob, old, replacement in table.TEXT:
                if path.startswith(glob):
                    new = re.sub(old, replacement, new)
            if new != text:
                (ROOT / path).write_text(new, encoding="utf-8")

    def in_strings(self, text: str, pattern: re.Pattern[str], words: dict[str, str]) -> str:
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        out, last = [], 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (tokenize.STRING, tokenize.COMMENT):
                continue
            begin, end = starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
            new = pattern.sub(lambda m: words[m[1]], text[begin:end])
            if new != text[begin:end]:
                out += [text[last:begin], new]
                last = end
        return "".join([*out, text[last:]])

    def go(self) -> None:
        for path in self.sources:
            self.symbols_in(path)
            self.fields_in(path)
            self.methods_in(path)
            self.identifiers_in(path)
            self.tags_in(path)
        self.mutations()
        for path, source in self.sources.items():
            if source.edits:
                (ROOT / path).write_text(source.result(), encoding="utf-8")
        self.text()
        here = Path(__file__).parent / "files"
        target = ROOT / "supervisor/stepkeeper/store/old_names.py"
        if target.exists():
            stop(f"{target} is there already")
        target.write_text((here / "old_names.py").read_text())
        run("git", "add", str(target), cwd=ROOT)
        journal = ROOT / "supervisor/stepkeeper/store/journal.py"
        text = journal.read_text()
        for old, new in (
            (r"(def _decode\(data: bytes\)[^\n]*:\n    try:\n)", r"\1        data = old_names.translate(data)\n"),
            (r"(?m)^from stepkeeper\.store import ([a-z_, ]*lines\b)", r"from stepkeeper.store import old_names, \1"),
        ):
            text, times = re.subn(old, new, text)
            if times != 1:
                stop(f"journal.py: not once there: {old!r}; read the end of rename.py")
        journal.write_text(text)
        for word, n in sorted(self.counts.items()):
            print(f"{word}: {n}")


if __name__ == "__main__":
    clean(ROOT)
    Renamer().go()

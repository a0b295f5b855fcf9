"""Which framework wrote a directory, or is used by a command: by words, imports and names; nothing is run."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stepkeeper.frameworks import adapters
from stepkeeper.frameworks.framework import Framework
from stepkeeper_trainer.formats.plain import read_plain

AUTO = "auto"
SCRIPT_BYTES_MAX = 1024 * 1024
# of those that a directory may look like at once, the one that builds on the others first
_ORDER = (
    "generic",
    "nemo",
    "megatron-bridge",
    "megatron",
    "automodel",
    "torchtitan",
    "huggingface",
    "lightning",
    "accelerate",
    "deepspeed",
    "torch-checkpointing",
    "dcp",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A framework, and what shows it."""

    framework: Framework
    why: str


def known() -> dict[str, Framework]:
    """Return the adapters by name, the more special first."""
    found: dict[str, Framework] = {}
    for module in pkgutil.iter_modules(adapters.__path__):
        adapter: Framework = importlib.import_module(f"{adapters.__name__}.{module.name}").FRAMEWORK
        found[adapter.name] = adapter
    place = {name: index for index, name in enumerate(_ORDER)}
    return dict(sorted(found.items(), key=lambda item: place.get(item[0], -1)))


def of_directory(path: Path, frameworks: dict[str, Framework]) -> Finding | None:
    """Recognise a checkpoint, or a directory of checkpoints.  Raises OSError where it cannot be listed."""
    for framework in frameworks.values():
        if framework.is_step(path):
            return Finding(framework, f"{path.name} is a checkpoint of it")
    for framework in frameworks.values():
        if not path.is_dir():
            break
        steps = [step for step in framework.list_steps(path) if framework.is_step(step.path)]
        if steps:
            more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
            return Finding(framework, f"{steps[0].path.relative_to(path)}{more} in {path}")
    return None


def of_command(command: Sequence[str], directory: Path, frameworks: dict[str, Framework]) -> Finding | None:
    """Recognise what a command starts: by its words, then by the imports of its Python script."""
    names = [PurePosixPath(word).name for word in command]
    for framework in frameworks.values():
        for word in framework.commands:
            if word in names or word in command:
                return Finding(framework, f"the command has the word {word!r}")
    for word in command:
        if word.endswith(".py"):
            modules = imports(directory / word)
            return _of_imports(modules, word, frameworks)
    return None


def _of_imports(modules: frozenset[str], script: str, frameworks: dict[str, Framework]) -> Finding | None:
    for framework in frameworks.values():  # a Trainer comes before the library below it
        for name in framework.imports:
            if any(module == name or module.startswith(f"{name}.") for module in modules):
                return Finding(framework, f"{script} imports {name}")
    return None


def imports(script: Path) -> frozenset[str]:
    """Return the modules that a Python script names in its imports; none where it cannot be read."""
    try:
        tree = ast.parse(read_plain(Path(os.path.realpath(script)), SCRIPT_BYTES_MAX))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)

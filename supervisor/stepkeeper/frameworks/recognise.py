"""Which framework wrote a directory, or is used by a command: by words, imports and names; nothing is run."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stepkeeper.frameworks import adapters
from stepkeeper.frameworks.framework import Framework
from stepkeeper.frameworks.script import Script

AUTO, NONE = "auto", "none"
_LAUNCHERS = ("deepspeed",)
_INTERPRETER = re.compile(r"python[0-9.]*|torchrun")
_NAMING = ("-n", "--name", "-p", "--prefix", "-J", "--job-name", "--launcher")  # of conda, srun, axolotl: no program
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


def of_script(script: Script, frameworks: dict[str, Framework]) -> Finding | None:
    """Recognise what a script uses.  A launcher's word counts last: `deepspeed` starts any script."""
    programs = {name: each for name, each in frameworks.items() if name not in _LAUNCHERS}
    return _of_words(script, programs) or _of_imports(script, frameworks) or _of_words(script, frameworks)


def _of_words(script: Script, frameworks: dict[str, Framework]) -> Finding | None:
    words = _program(script.words)
    names = [PurePosixPath(word).name for word in words]
    for framework in frameworks.values():
        for word in framework.commands:
            if word in names or word in words:
                return Finding(framework, f"the command has the word {word!r}")
    return None


def _program(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that can name a program: up to the script, and none that an environment's tool takes.

    >>> _program(("conda", "run", "-n", "trl", "python", "train.py", "--model", "axolotl"))
    ('python', 'train.py')
    >>> _program(("srun", "--job-name", "trl", "axolotl", "train"))
    ('srun', '--job-name', 'axolotl', 'train')
    """
    before = list(itertools.takewhile(lambda word: not word.endswith(".py"), words))
    words = words[: len(before) + 1]  # what follows the script are its own arguments
    interpreters = [
        place
        for place, (option, word) in enumerate(zip(("", *words), words, strict=False))
        if _INTERPRETER.fullmatch(PurePosixPath(word).name) and option not in _NAMING
    ]
    words = words[interpreters[-1] :] if interpreters else words
    behind = zip(words, ("", *words), strict=False)
    return tuple(word for word, option in behind if option not in _NAMING)


def _of_imports(script: Script, frameworks: dict[str, Framework]) -> Finding | None:
    for framework in frameworks.values():  # a Trainer comes before the library below it
        for name in framework.imports:
            if any(module == name or module.startswith(f"{name}.") for module in script.modules):
                return Finding(framework, f"{script.name} imports {name}")
    return None

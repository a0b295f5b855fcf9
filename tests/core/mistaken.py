"""Has the rules make a mistake for a while, in this process; and looks whether a scenario ends otherwise with it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import stepkeeper
from stepkeeper.simulating.scenario import play
from tests.core.mutations import Mutation

PACKAGE = Path(stepkeeper.__file__).parent
SCENARIOS = Path(__file__).parent / "scenarios"
BROKEN = (NameError, SyntaxError, ImportError)  # the mutation is no mistake but nonsense


def apply(mutation: Mutation) -> str:
    """Return the module's text with the mistake in it."""
    text = (PACKAGE / "core" / f"{mutation.module}.py").read_text()
    times = text.count(mutation.old)
    assert times == 1, (
        f"core/{mutation.module}.py has it {times} times, so `mutations` is to be changed: {mutation.old}"
    )
    return text.replace(mutation.old, mutation.new)


@contextlib.contextmanager
def mistaken(mutation: Mutation) -> Iterator[None]:
    """Have the module's functions run the code with the mistake in it: whoever imported them has it too."""
    module = importlib.import_module(f"stepkeeper.core.{mutation.module}")
    wrong = ModuleType(module.__name__)
    # not under the name of the file: what is played here covers no line of the rules
    exec(compile(apply(mutation), f"<{mutation.module} with a mistake>", "exec"), wrong.__dict__)  # noqa: S102 - our own
    functions = [
        (each, each.__code__, vars(wrong)[name].__code__)
        for name, each in vars(module).items()
        if isinstance(each, FunctionType) and each.__module__ == module.__name__
    ]
    try:
        for function, _, code in functions:
            function.__code__ = code
        yield
    finally:
        for function, code, _ in functions:
            function.__code__ = code


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

"""Plays the property tests against mistakes in the rules, and tells which promise finds each.

    python -m tests.core.mutating [--quick] [WORD ...]      those whose promise has one of the words; else all

Each is played in a child of its own, which imports the rules with the mistake in them: first the test that is known to
find it, from several seeds, then (not with --quick) all of them with more histories.  The exit code is the number of
those that nobody finds.  A `CONTROL` without a mistake is played first: what is found in it is found everywhere, and
proves nothing.  Not part of CI, for what is found is a matter of chance: after a change of the generators, play it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import hypothesis

import stepkeeper
from tests.core.mutations import MUTATIONS, Mutation

PACKAGE = Path(stepkeeper.__file__).parent
PROPERTIES = "tests.core.test_properties"
QUICK, THOROUGH = 120, 600  # histories a test and seed: of the one that is known to find it, else of all
SEEDS = range(4)  # histories of one seed resemble each other
WITHIN_S = 900.0
AT_ONCE = 2
CONTROL = Mutation("decide", "def decide(", "def decide(", "nothing: the control", "test_")
BROKEN = (NameError, SyntaxError, ImportError)  # the mutation is no mistake but nonsense


class Outcome(NamedTuple):
    """What the property tests made of a mutation."""

    mutation: Mutation
    by: str  # the test, and the promise; empty: it survived
    seconds: float


class _Mistaken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with the mistake in it."""

    def __init__(self, mutation: Mutation) -> None:
        self._name = f"stepkeeper.core.{mutation.module}"
        self._text = apply(mutation)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._text, self._name, "exec"), module.__dict__)  # noqa: S102 - our own text


def apply(mutation: Mutation) -> str:
    """Return the module's text with the mistake in it."""
    text = (PACKAGE / "core" / f"{mutation.module}.py").read_text()
    times = text.count(mutation.old)
    assert times == 1, (
        f"core/{mutation.module}.py has it {times} times, so `mutations` is to be changed: {mutation.old}"
    )
    return text.replace(mutation.old, mutation.new)


def play_all(mutations: Sequence[Mutation], *, quick: bool = False, at_once: int = AT_ONCE) -> Iterator[Outcome]:
    """Yield what became of each, as they end.  The rules must not have been imported yet: children inherit them."""
    assert "stepkeeper.core.decide" not in sys.modules, "play them in a process of their own"
    forking = multiprocessing.get_context("fork")
    waiting, playing = list(mutations), {}
    while waiting or playing:
        while waiting and len(playing) < at_once:
            ours, theirs = forking.Pipe(duplex=False)
            child = forking.Process(target=_play, args=(waiting[0], theirs, quick), daemon=True)
            child.start()
            theirs.close()
            playing[ours] = (waiting.pop(0), child, time.monotonic())
        for ready in wait(list(playing), timeout=1.0):
            mutation, child, began = playing.pop(ready)
            try:
                by = ready.recv()
            except EOFError:
                raise AssertionError(f"its child ended without a word: {mutation}") from None
            child.join(WITHIN_S)
            yield Outcome(mutation, by, time.monotonic() - began)
        late = [each for each in playing.values() if time.monotonic() - each[2] > WITHIN_S]
        assert not late, f"not played in {WITHIN_S:g} s: {late}"


def _play(mutation: Mutation, pipe: Connection, quick: bool) -> None:  # noqa: FBT001 - of a process
    sys.meta_path.insert(0, _Mistaken(mutation))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        seeds = SEEDS if mutation is not CONTROL else SEEDS[:1]
        by = next(filter(None, (_found(QUICK, mutation.found_by, seed) for seed in seeds)), "")
        more = not by and not quick and mutation is not CONTROL
        pipe.send(_found(THOROUGH, "test_") if more else by)


def _found(examples: int, word: str, seed: int = 0) -> str:
    """Return which of the tests with that word in their names fails, and by what; nothing if none does."""
    os.environ["STEPKEEPER_EXAMPLES"] = str(examples)
    hypothesis.settings.register_profile("mutations", database=None)
    hypothesis.settings.load_profile("mutations")
    sys.modules.pop(PROPERTIES, None)
    module = importlib.import_module(PROPERTIES)
    tests: dict[str, Callable[[], None]] = {name: test for name, test in vars(module).items() if name[:5] == "test_"}
    chosen = [name for name in tests if word in name and hasattr(tests[name], "hypothesis")]
    assert chosen, f"no property test has {word} in its name"
    for name in chosen:
        try:
            hypothesis.seed(seed)(tests[name])()
        except BROKEN:
            raise
        except BaseException as error:  # noqa: BLE001 - `pytest.fail` raises one; whatever fails it is what we look for
            return f"{name}: {_promise(error)}"
    return ""


def _promise(error: BaseException) -> str:
    """Return where it failed: the promise, else the line of the rules."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tests/core/promises/" in frame.filename and frame.name != "assert_kept"]
    return ours[0].name if ours else f"{type(error).__name__} in {frames[-1].name}"


def main(words: list[str]) -> int:
    """Print what became of each."""
    quick = "--quick" in words
    words = [word for word in words if word != "--quick"]
    chosen = [each for each in MUTATIONS if not words or any(word in each.breaks for word in words)]
    survivors = 0
    for outcome in play_all([CONTROL, *chosen], quick=quick):
        if outcome.mutation.breaks == CONTROL.breaks:
            assert not outcome.by, f"the rules as they are break a promise: {outcome.by}"
            continue
        survivors += not outcome.by
        print(f"{outcome.seconds:5.1f} s  {outcome.mutation.module:10} {outcome.mutation.breaks}", flush=True)
        print(f"         {outcome.by or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} are found")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

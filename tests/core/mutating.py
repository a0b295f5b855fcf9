"""Plays scenarios and property tests against mistakes in the rules, and tells which of them find each.

    python -m tests.core.mutating [--scenarios | --quick | --mend] [--alone] [WORD ...]

Each is played in a child of its own: first all scenarios, then the directed histories and the property test that is
known to find it, from several seeds, then (not with --quick) all of them with more histories.  The exit code is the
number of those that neither a scenario nor a promise finds.  A `CONTROL` without a mistake is played first: what is
found in it is found everywhere, and proves nothing.

With --mend nothing of that is played: what has moved in the rules is looked for, and written into `mutations.py`.

What the scenarios tell is certain, and part of CI (`test_mutations`).  What the promises find in histories drawn at
random is a matter of chance: after a change of the generators, play it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import hypothesis

from tests.core.directed import DIRECTED
from tests.core.histories import run
from tests.core.mending import mend
from tests.core.mistaken import BROKEN, mistaken, tellers
from tests.core.mutations import MUTATIONS, Mutation
from tests.core.promises import assert_kept

PROPERTIES = "tests.core.test_properties"
SCENARIOS_ONLY, QUICKLY, THOROUGHLY = range(3)
QUICK, THOROUGH = 120, 600  # histories a test and seed: of the one that is known to find it, else of all
SEEDS = range(4)  # histories of one seed resemble each other
WITHIN_S = 900.0
AT_ONCE = 2
NAMES_MAX = 3


def _unchanged(node: ast.AST, name: str) -> ast.AST | None:
    return node if isinstance(node, ast.FunctionDef) and node.name == name else None


CONTROL = Mutation("decide.decide", _unchanged, "decide", "nothing: the control", "", "test_")


class Outcome(NamedTuple):
    """What became of a mutation."""

    mutation: Mutation
    told_by: tuple[str, ...]  # scenarios
    by: str  # the test, and the promise; empty: none found it
    seconds: float


def play_all(mutations: Sequence[Mutation], how: int, at_once: int = AT_ONCE) -> Iterator[Outcome]:
    """Yield what became of each, as they end."""
    forking = multiprocessing.get_context("fork")
    waiting, playing = list(mutations), {}
    while waiting or playing:
        while waiting and len(playing) < at_once:
            ours, theirs = forking.Pipe(duplex=False)
            child = forking.Process(target=_play, args=(waiting[0], theirs, how), daemon=True)
            child.start()
            theirs.close()
            playing[ours] = (waiting.pop(0), child, time.monotonic())
        for ready in wait(list(playing), timeout=1.0):
            mutation, child, began = playing.pop(ready)
            try:
                told_by, by = ready.recv()
            except EOFError:
                raise AssertionError(f"its child ended without a word: {mutation}") from None
            child.join(WITHIN_S)
            yield Outcome(mutation, told_by, by, time.monotonic() - began)
        late = [each for each in playing.values() if time.monotonic() - each[2] > WITHIN_S]
        assert not late, f"not played in {WITHIN_S:g} s: {late}"


def _play(mutation: Mutation, pipe: Connection, how: int) -> None:
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        mistaken(mutation),
    ):
        pipe.send((tellers(), _found_by(mutation, how) if how != SCENARIOS_ONLY else ""))


def _found_by(mutation: Mutation, how: int) -> str:
    seeds = SEEDS if mutation is not CONTROL else SEEDS[:1]
    by = _found_directly() or next(filter(None, (_found(QUICK, mutation.found_by, seed) for seed in seeds)), "")
    more = not by and how == THOROUGHLY and mutation is not CONTROL
    return _found(THOROUGH, "test_") if more else by


def _found_directly() -> str:
    """Return which directed history breaks a promise, and which one."""
    for directed in DIRECTED:
        try:
            assert_kept(run(list(directed.events), directed.policy))
        except BROKEN:
            raise
        except Exception as error:  # noqa: BLE001 - whatever fails is what we look for
            return f"directed history: {_promise(error)}"
    return ""


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


def main() -> int:
    """Print what became of each."""
    parser = argparse.ArgumentParser(description="Play scenarios and promises against mistakes in the rules.")
    parser.add_argument("words", nargs="*", help="only those with one of them in what they break")
    parser.add_argument("--scenarios", action="store_true", help="play no promises")
    parser.add_argument("--quick", action="store_true", help="not all promises against what the known one did not find")
    parser.add_argument("--mend", action="store_true", help="look for the places that have moved, and write them down")
    parser.add_argument("--alone", action="store_true", help="one at a time")
    options = parser.parse_args()
    how = SCENARIOS_ONLY if options.scenarios else QUICKLY if options.quick else THOROUGHLY
    words = options.words
    chosen = [each for each in MUTATIONS if not words or any(word in each.breaks for word in words)]
    if options.mend:
        return mend(chosen)
    outcomes = []
    for outcome in play_all([CONTROL, *chosen], how, 1 if options.alone else AT_ONCE):
        if outcome.mutation.breaks == CONTROL.breaks:
            assert not outcome.told_by, f"the rules as they are do not play {outcome.told_by}"
            assert not outcome.by, f"the rules as they are break a promise: {outcome.by}"
            continue
        outcomes.append(outcome)
        names = ", ".join(outcome.told_by[:NAMES_MAX]) + (", ..." if len(outcome.told_by) > NAMES_MAX else "")
        print(f"{outcome.seconds:5.1f} s  {outcome.mutation.where:10} {outcome.mutation.breaks}")
        print(f"         {len(outcome.told_by)} scenarios{': ' if names else ''}{names}")
        if how != SCENARIOS_ONLY:
            print(f"         {outcome.by or 'no promise'}", flush=True)
    told, found = sum(bool(each.told_by) for each in outcomes), sum(bool(each.by) for each in outcomes)
    survivors = sum(not each.told_by and not each.by for each in outcomes)
    promises = f"{found} break a promise, " if how != SCENARIOS_ONLY else ""
    print(f"{len(chosen)} mistakes: {told} are told by a scenario, {promises}{survivors} are found by nobody")
    return survivors


if __name__ == "__main__":
    sys.exit(main())

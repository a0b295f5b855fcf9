"""Plays the property tests against mistakes in the rules, and tells which of them find each.

python -m tests.core.mutating [WORD ...]      those of `mutations` whose promise has one of the words; else all
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import stepkeeper
from tests.core.mutations import MUTATIONS, Mutation

PACKAGE = Path(stepkeeper.__file__).parent
ROOT = Path(__file__).parents[2]
PROPERTIES = "tests/core/test_properties.py"
WITHIN_S = 240.0
EXAMPLES = (150, 1500)  # histories a test: the second number where the first finds nothing
FOUND, NOT_FOUND = 1, 0  # pytest's exit codes


class Outcome(NamedTuple):
    """What the property tests made of it."""

    mutation: Mutation
    by: str  # the test, and the line that failed; empty: it survived
    seconds: float


def apply(mutation: Mutation) -> str:
    """Return the module's text with the mistake in it."""
    text = (PACKAGE / "core" / f"{mutation.module}.py").read_text()
    assert text.count(mutation.old) == 1, (
        f"{mutation.module}: stands there {text.count(mutation.old)} times: {mutation}"
    )
    return text.replace(mutation.old, mutation.new)


def play(mutation: Mutation) -> Outcome:
    """Run the property tests on a copy of the package that has the mistake."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        copy = Path(directory, "stepkeeper")
        copy.mkdir()
        for entry in PACKAGE.iterdir():
            if entry.name not in ("core", "__pycache__"):
                (copy / entry.name).symlink_to(entry)
        shutil.copytree(PACKAGE / "core", copy / "core", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "core" / f"{mutation.module}.py").write_text(apply(mutation))
        by = ""
        for examples in EXAMPLES:
            by = by or _found(Path(directory), examples)
    return Outcome(mutation, by, time.monotonic() - began)


def _found(directory: Path, examples: int) -> str:
    """Return which test fails with that package; nothing if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "--noconftest", "--hypothesis-seed=0"]
    played = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", PROPERTIES],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(directory),
            "PYTHONDONTWRITEBYTECODE": "1",
            "STEPKEEPER_EXAMPLES": str(examples),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(directory / "hypothesis"),
        },
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert played.returncode in (FOUND, NOT_FOUND), played.stdout + played.stderr
    if played.returncode == NOT_FOUND:
        return ""
    said = [line for line in played.stdout.splitlines() if line.startswith(("FAILED", "/", "E  "))]
    assert not any(word in played.stdout for word in ("NameError", "SyntaxError", "ImportError")), played.stdout
    return " | ".join(line.removeprefix(f"{ROOT}/")[:160] for line in said)


def play_all(mutations: Iterable[Mutation], *, at_once: int = 2) -> Iterator[Outcome]:
    """Yield what became of each, in their order."""
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(play, mutations)


def main(words: list[str]) -> int:
    """Print what became of each; the exit code is the number of survivors."""
    chosen = [each for each in MUTATIONS if not words or any(word in each.breaks for word in words)]
    survivors = 0
    for outcome in play_all(chosen):
        survivors += not outcome.by
        print(f"{outcome.seconds:5.1f} s  {outcome.mutation.module:10} {outcome.mutation.breaks}", flush=True)
        print(f"         {outcome.by or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} are found")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

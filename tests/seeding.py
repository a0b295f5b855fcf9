"""The seed of Hypothesis is the commit's: each commit tries other examples, and the same ones each time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

VARIABLE = "TEST_SEED"
WITHIN_S = 20.0


def seed_of(directory: Path) -> tuple[int, str]:
    """Return the seed, and where it comes from: `TEST_SEED`, else the commit that is checked out in a directory."""
    if chosen := os.environ.get(VARIABLE):
        if not chosen.isdecimal():
            raise pytest.UsageError(f"{VARIABLE}={chosen}: give a whole number, such as the one in a session's header")
        return int(chosen), VARIABLE
    # `make test` may run as another user than the one who owns the checkout
    command = ["git", "-c", f"safe.directory={directory}", "-C", str(directory), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WITHIN_S).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return 0, "no commit is known"
    return int(commit[:8], 16), f"commit {commit[:12]}"


def seed_examples(config: pytest.Config) -> None:
    """Choose the seed of a session.  pytest-xdist hands the option on to its workers."""
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed, config.stash[_SOURCE] = seed_of(config.rootpath)


def header(config: pytest.Config) -> str:
    """Return the line of a session's header that says how to draw the same examples again."""
    seed = config.getoption("hypothesis_seed")
    return f"hypothesis seed: {seed} ({config.stash.get(_SOURCE, 'chosen')}); again: {VARIABLE}={seed}"


_SOURCE = pytest.StashKey[str]()

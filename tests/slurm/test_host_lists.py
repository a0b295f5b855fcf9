"""Host lists: as Slurm prints them, and as its commands take them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stepkeeper.slurm.client import SlurmError, expand, fold
from stepkeeper.slurm.launch import watcher_argv
from tests.lab import Lab

WORD_BYTES_MAX = 128 * 1024  # MAX_ARG_STRLEN of Linux
NAMES = some.from_regex(r"[a-z]{1,3}(?:[0-9]{0,3}-)?[0-9]{0,11}", fullmatch=True)


def test_they_are_expanded() -> None:
    assert expand("a,b[1-2]c[01-02],d7") == ("a", "b1c01", "b1c02", "b2c01", "b2c02", "d7")
    for unreadable in ("a[x-y]", "a1,a[3-4", "a3-4]"):
        with pytest.raises(SlurmError):
            expand(unreadable)


@given(some.lists(NAMES, max_size=12))
def test_what_is_folded_expands_to_the_same_names_in_the_same_order(names: list[str]) -> None:
    assert list(expand(fold(names))) == names


def test_slurm_expands_what_is_folded(lab: Lab) -> None:
    names = ["gpu08", "gpu09", "gpu10", "n9", "n10", "n11", "login", "r1-n007", "r1-n009", "r2-n1", "x123456789012"]

    assert lab.run("scontrol", "show", "hostnames", fold(names)).stdout.split() == names


def test_ten_thousand_long_names_fit_into_a_word_of_a_command_line() -> None:
    nodes = [f"a-cluster-gpu-node-{number:05d}" for number in range(1, 20_001) if number % 2]
    assert len(",".join(nodes)) > WORD_BYTES_MAX

    assert max(map(len, watcher_argv(nodes, ["true"]))) < WORD_BYTES_MAX

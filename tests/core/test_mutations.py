"""Each mistake is told by a scenario, in each run of the tests; `mutating` plays the promises against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.core import mutations
from tests.core.directed import DIRECTED, Directed
from tests.core.histories import run
from tests.core.mending import candidates, rewritten, stands
from tests.core.mistaken import SCENARIOS, apply, mistaken, tells
from tests.core.mutations import MUTATIONS, Mutation
from tests.core.promises import assert_kept

BY_NAME = {each.breaks: each for each in MUTATIONS}


def test_each_mutation_has_its_place_in_the_code():
    for mutation in MUTATIONS:
        apply(mutation)

    assert len(BY_NAME) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.breaks)
def test_a_scenario_tells_of_each_mistake(mutation: Mutation):
    assert (SCENARIOS / f"{mutation.told_by}.txt").exists()
    assert not tells(mutation.told_by), "it is told without the mistake too: see test_scenarios"

    with mistaken(mutation):
        told = tells(mutation.told_by)

    assert told, "no line of it is another one: `python -m tests.core.mutating --scenarios` names those that tell it"
    assert not tells(mutation.told_by)  # the rules are right again


def test_a_place_that_has_moved_is_found_again_and_written_down():
    moved = BY_NAME["a save ends before Slurm does"]
    before = moved._replace(where="phases.is_gone", nth=7)
    assert not stands(before)

    assert candidates(before) == [moved]
    text = rewritten(Path(mutations.__file__).read_text(), before)
    there: dict[str, Any] = {"__name__": mutations.__name__}
    exec(text, there)  # noqa: S102 - our own
    assert [each._replace(operator=None) for each in there["MUTATIONS"]] == [
        (before if each is moved else each)._replace(operator=None) for each in MUTATIONS
    ]


@pytest.mark.parametrize("directed", DIRECTED, ids=lambda each: each.finds)
def test_a_promise_is_broken_where_chance_seldom_comes(directed: Directed):
    assert_kept(run(list(directed.events), directed.policy))

    with mistaken(BY_NAME[directed.finds]), pytest.raises(AssertionError):
        assert_kept(run(list(directed.events), directed.policy))

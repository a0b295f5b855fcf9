"""Each mistake is told by a scenario, in each run of the tests; `mutating` plays the promises against them."""

from __future__ import annotations

import pytest

from tests.core.directed import DIRECTED, Directed
from tests.core.histories import run
from tests.core.mistaken import SCENARIOS, apply, mistaken, tells
from tests.core.mutations import MUTATIONS, Mutation
from tests.core.promises import assert_kept

BY_NAME = {each.breaks: each for each in MUTATIONS}


def test_each_mutation_still_stands_in_the_code_once_and_is_python():
    for mutation in MUTATIONS:
        compile(apply(mutation), mutation.module, "exec")

    assert len(BY_NAME) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.breaks)
def test_a_scenario_tells_of_each_mistake(mutation: Mutation):
    assert (SCENARIOS / f"{mutation.told_by}.txt").exists()
    assert not tells(mutation.told_by), "it is told without the mistake too: see test_scenarios"

    with mistaken(mutation):
        told = tells(mutation.told_by)

    assert told, "no line of it is another one: `python -m tests.core.mutating --scenarios` names those that tell it"
    assert not tells(mutation.told_by)  # the rules are right again


@pytest.mark.parametrize("directed", DIRECTED, ids=lambda each: each.finds)
def test_a_promise_is_broken_where_chance_seldom_comes(directed: Directed):
    assert_kept(run(list(directed.events), directed.policy))

    with mistaken(BY_NAME[directed.finds]), pytest.raises(AssertionError):
        assert_kept(run(list(directed.events), directed.policy))

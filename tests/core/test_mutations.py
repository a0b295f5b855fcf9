"""The property tests are tested: each mistake of `mutations` must be found by them."""

from __future__ import annotations

import pytest

from tests.core.mutating import apply, play_all
from tests.core.mutations import MUTATIONS


def test_each_mutation_still_stands_in_the_code_once_and_is_python():
    for mutation in MUTATIONS:
        compile(apply(mutation), mutation.module, "exec")

    assert len({each.breaks for each in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_every_mutation_of_the_rules_is_found_by_the_property_tests():
    survivors = [outcome.mutation for outcome in play_all(MUTATIONS) if not outcome.by]

    assert survivors == []

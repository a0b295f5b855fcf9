"""The list of mutations stays true to the code; `mutating` plays the property tests against it."""

from __future__ import annotations

from tests.core.mutating import apply
from tests.core.mutations import MUTATIONS


def test_each_mutation_still_stands_in_the_code_once_and_is_python():
    for mutation in MUTATIONS:
        compile(apply(mutation), mutation.module, "exec")

    assert len({each.breaks for each in MUTATIONS}) == len(MUTATIONS)

"""Looking again and again until something holds, without taking the machine away from what is waited for."""

import time
from collections.abc import Callable

LEAST_S = 0.03
MOST_S = 0.4
SHARE = 12
"""A look is followed by a pause of so many times what it took: Slurm's commands cost some 20 ms of a core each."""


def holds_within(condition: Callable[[], object], timeout_s: float, *, closely: bool = False) -> bool:
    """Look until `condition` holds, and return whether it did in time.

    Args:
        condition: What is looked at; the dearer it is, the rarer.
        timeout_s: The last look is taken after that.
        closely: Where the instant is measured: pauses stay as short as can be.
    """
    limit = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if condition():
            return True
        now = time.monotonic()
        if now > limit:
            return False
        time.sleep(LEAST_S if closely else min(max(LEAST_S, SHARE * (now - began)), MOST_S))

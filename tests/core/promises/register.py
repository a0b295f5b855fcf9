"""Where promises stand together: each is a function over the turns of a history, and asserts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from tests.core.histories import Turn

# so small that histories use them up
POLICY = Policy(bus_restarts_max=3, node_losses_max=2, requeue_tries_max=4, excluded_max=2)
GROWING = msgspec.structs.replace(POLICY, grow_back="checkpoint", unfit_looks_max=3, grow_idle_s=5.0)
CODES = {int(code): code for code in ExitCode}

Promise = Callable[[list[Turn]], None]
_PROMISES: list[Promise] = []


def promise(holds: Promise) -> Promise:
    """Have a promise checked on every history."""
    _PROMISES.append(holds)
    return holds


def all_watched(state: State) -> bool:
    """Tell whether the watcher of every node answers; in words of our own, so as to find what the rules' are worth."""
    return all(node in state.watchers.ready for node in state.nodes.usable)


def assert_kept(turns: list[Turn]) -> None:
    """Check every promise on one history."""
    for holds in _PROMISES:
        holds(turns)

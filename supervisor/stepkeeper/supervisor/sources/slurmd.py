"""Whether slurmd takes connections on nodes whose watcher is late: a witness of a lost node besides silence.

The kernel of a node refuses a connection only where it runs and slurmd does not.  A pause of the node, a slow network
or a cut one never look like that: there a connection is taken, or nothing answers at all.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping

REFUSALS = 6  # three seconds: a slurmd that is restarted takes connections again by then
FOLLOW_S = 30.0  # then the node is lost by its silence, or its watcher is back
LOOK_EVERY_S = 0.5
CONNECT_WITHIN_S = 1.0

Address = tuple[str, int]


def follow(
    late: Iterable[str],
    other: str,
    addresses: Mapping[str, Address],
    *,
    spoke: Callable[[str], bool],
    wait: Callable[[float], bool],
    report: Callable[[str], None],
) -> None:
    """Look at nodes for a while, and report each that refuses connections without a pause, every few seconds.

    Args:
        late: nodes whose watcher is late.
        other: a node whose watcher is not: where its slurmd does not answer either, nothing is known of the late ones.
        addresses: of each node's slurmd.
        spoke: tells whether a node's watcher has said something since; then it is left alone.
        wait: waits for so many seconds, and returns true where nobody needs the answer any more.
        report: is called with a node.
    """
    until = time.monotonic() + FOLLOW_S
    refusals = dict.fromkeys(late, 0)  # in a row, and no time: we may have been paused ourselves
    while refusals and time.monotonic() < until and not wait(LOOK_EVERY_S):
        refusals = {
            node: count + 1
            for node, count in refusals.items()
            if not spoke(node) and connects(addresses[node]) is False
        }
        due = [node for node, count in refusals.items() if count % REFUSALS == 0]
        if due and not connects(addresses[other]):
            return
        for node in due:
            if not spoke(node):
                report(node)


def connects(address: Address) -> bool | None:
    """Tell whether a connection is made; false where it is refused, None where nobody answers."""
    try:
        socket.create_connection(address, CONNECT_WITHIN_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # no answer in time, no way to the host, no such name
        return None
    return True

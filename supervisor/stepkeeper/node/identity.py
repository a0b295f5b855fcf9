"""Whether a node of Slurm's is this machine: a `node_name` that was copied from another node would drain that one."""

from __future__ import annotations

import socket
from collections.abc import Callable

from stepkeeper.slurm.nodes import NodeFacts


def mistaken(node: NodeFacts) -> str:
    """Return why the node is another machine; "" where it is this one, or where that cannot be told."""
    return judge(node, socket.gethostname(), is_local)


def judge(node: NodeFacts, hostname: str, is_local: Callable[[str], bool]) -> str:
    r"""Compare names and address.  One that fits is enough: a slurmd may be started with any name (`-N`).

    >>> judge(NodeFacts(name="gpu17", states=frozenset(), host="gpu17", address="10.0.0.17"), "gpu18", lambda _: False)
    'Slurm\'s node gpu17 is the host gpu17 at 10.0.0.17, and this is gpu18: correct `node_name`'
    """
    names = {_short(name) for name in (node.name, node.host) if name}
    if _short(hostname) in names or (not node.host and not node.address) or is_local(node.address):
        return ""
    where = f" at {node.address}" if node.address else ""
    host = f"the host {node.host or 'unknown'}{where}"
    return f"Slurm's node {node.name} is {host}, and this is {hostname}: correct `node_name`"


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


def is_local(address: str) -> bool:
    """Tell whether an address is one of this machine's: only such a one can be bound.  True where nobody can tell."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.bind(place)
        except OSError:
            continue
        return True
    return not found

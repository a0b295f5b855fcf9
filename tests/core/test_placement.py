"""Which nodes train, by Slurm's switches and blocks: a table of cases."""

from __future__ import annotations

import pytest

from stepkeeper.core.placement import close_nodes, common, places, replacements
from stepkeeper.core.state import Identity, Launch, Nodes, State
from stepkeeper.watcher.messages import switches_above


def switches(text: str) -> dict[str, str]:
    """Return what is above each node: `core.leaf1: a b; core.leaf2: c`."""
    found = {}
    for part in filter(None, text.split(";")):
        path, _, names = part.partition(":")
        found |= dict.fromkeys(names.split(), path.strip())
    return found


FIRST = [
    # known switches, nodes in Slurm's order, how many are wanted -> which
    ("", "a b c d", 3, "a b c"),  # no topology: the last ones are spares
    ("l1: a b; l2: c d", "a b c d", 4, "a b c d"),  # no spares
    ("l1: a b c; l2: d", "a b c d", 3, "a b c"),  # no switch for one node
    ("l1: a; l2: b c d", "a b c d", 3, "b c d"),
    ("l1: a; l2: b c; l3: d", "a b c d", 2, "b c"),
    ("l1: a b; l2: c d e", "a b c d e", 4, "a b c d"),  # of the larger one: a single node would be left of the other
    ("l1: a b c; l2: d e", "a b c d e", 4, "a b d e"),
    ("l1: a b c; l2: d e f", "a b c d e f", 4, "a b d e"),  # a spare on each, rather than both from one
    ("l1: a b; l2: c d; l3: e f", "a b c d e f", 4, "a b c d"),  # one switch less
    ("l1: a c; l2: b d", "a b c d", 2, "a c"),  # names need not follow the switches
    ("c1.l1: a b; c1.l2: c d; c2.l3: e f", "a b c d e f", 4, "a b c d"),  # nor is the second core switch used
    ("c1.l1: a; c1.l2: b c; c2.l3: d; c2.l4: e f", "a b c d e f", 5, "a b c e f"),
    ("l1: a b", "a b c", 2, "a b"),  # c is not known
    ("t:0:0:0: a; t:0:0:1: b; t:0:1:0: c", "a b c", 2, "a b"),  # a torus: each place is one node's
]


@pytest.mark.parametrize(("known", "nodes", "wanted", "chosen"), FIRST)
def test_the_first_launch_gets_nodes_that_are_close(known: str, nodes: str, wanted: int, chosen: str) -> None:
    known_switches = {"a": "t:0:0:0", "b": "t:0:0:1", "c": "t:0:1:0"} if known.startswith("t:") else switches(known)

    assert close_nodes(nodes.split(), wanted, known_switches) == tuple(chosen.split())


NEXT = [
    # known switches, usable nodes, nodes of the launch before, how many are wanted -> which, in the order of the ranks
    ("", "b c d", "a b c", 3, "b c d"),  # no topology: Slurm's order
    ("l1: a b e; l2: c d f", "b c d e f", "a b c d", 4, "e b c d"),
    ("l1: a b e; l2: c d f", "a b d e f", "a b c d", 4, "a b f d"),
    ("l1: a b e; l2: c d f", "a d e f", "a b c d", 4, "a e f d"),  # two at once: each its own switch's
    ("l1: a b e; l2: c d f", "c d e f", "a b c d", 4, "e f c d"),  # and one from elsewhere
    ("c1.l1: a; c2.l2: b e; c1.l3: f", "b e f", "a b", 2, "f b"),  # the same core switch is closer than none
    ("l1: a b; l2: c d e", "b c d e", "a b c d", 4, "e b c d"),
    ("l1: b; l2: a c", "b c", "a b", 2, "c b"),
    ("l1: a b e; l2: c d f", "a b c d e f", "e b c d", 4, "e b c d"),  # a later launch keeps the order
    ("l1: a b; l2: c d", "b c d", "a b c d", 3, "b c d"),  # a smaller world: Slurm's order
    ("l1: a b; l2: c d", "b c d", "a b c d", 2, "c d"),
    ("l1: a b; l2: c d", "a b c d", "c b", 4, "a b c d"),  # a larger one, too
    ("l1: a b; l2: c d e", "a b c d e", "c d", 3, "c d e"),  # which grows by what is closest
]


@pytest.mark.parametrize(("known", "usable", "before", "wanted", "chosen"), NEXT)
def test_a_spare_takes_the_place_of_the_node_that_it_is_closest_to(
    known: str, usable: str, before: str, wanted: int, chosen: str
) -> None:
    nodes = Nodes(usable=tuple(usable.split()), wanted=wanted, switches=switches(known))
    state = State(nodes=nodes, launch=Launch(nodes=tuple(before.split())))

    assert places(state) == tuple(chosen.split())


def test_an_own_srun_line_has_its_nodes_in_slurms_order() -> None:
    """Nobody but its author may say how its tasks are distributed."""
    nodes = Nodes(usable=("b", "c", "d"), wanted=3)
    state = State(identity=Identity(wrapped=False), nodes=nodes, launch=Launch(nodes=("a", "b", "c")))

    assert places(state) == ("b", "c", "d")


def test_what_two_nodes_have_in_common() -> None:
    known = switches("c1.l1: a b; c1.l2: c; c2.l3: d; c1: e")

    found = [common("a", other, known) for other in "bcdex"]

    assert found == [("c1", "l1"), ("c1",), (), ("c1",), ()]


def test_where_spares_are_too_few_the_closest_pair_comes_first() -> None:
    assert replacements("ab", "c", switches("l1: a; l2: b c")) == {"b": "c"}


@pytest.mark.parametrize(
    ("address", "node", "found"),
    [
        ("top.leaf1.n1", "n1", "top.leaf1"),
        ("top.leaf[1-2].n1", "n1", "top.leaf[1-2]"),  # a node with two leaf switches
        ("block3.n1", "n1", "block3"),
        ("torus:0:1:2.n1", "n1", "torus:0:1:2"),
        ("top.leaf1.n1.site", "n1.site", "top.leaf1"),
        ("n1", "n1", ""),  # topology/flat
        ("", "n1", ""),
        ("top.leaf1.n2", "n1", ""),  # inherited from another node's environment
    ],
)
def test_an_address_of_slurm(address: str, node: str, found: str) -> None:
    assert switches_above(address, node) == found

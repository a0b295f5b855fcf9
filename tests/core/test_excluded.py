"""Which nodes a job does without at its next attempts, in which order, and how many."""

from __future__ import annotations

import msgspec
import pytest

from stepkeeper.core import reasons as because
from stepkeeper.core.events import Exclusion
from stepkeeper.core.faults import exclude_nodes, without_lost
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Identity, Nodes, State

AT = 1000.0
FAULT = because.NodeFault(node="x", name="XID 79", text="off the bus")
WORSE = because.NodeFault(node="x", name="XID 48", text="an uncorrectable error")
EIGHT, TWO, NO_LIMIT = Policy(), Policy(excluded_max=2), Policy(excluded_max=0)
LEFT = State(
    nodes=Nodes(usable=("a", "d"), allocated=("a", "b", "c", "d"), lost=(("c", 900.0), ("b", 950.0))),
    identity=Identity(batch_node="a"),
)


def lost(node: str, until: float) -> Exclusion:
    return Exclusion(node=node, reasons=(because.LostRecently(),), until=until)


def faulty(node: str, until: float = 90_000.0) -> Exclusion:
    return Exclusion(node=node, reasons=(FAULT,), until=until)


def excluding(*excluded: Exclusion) -> State:
    return msgspec.structs.replace(LEFT, nodes=msgspec.structs.replace(LEFT.nodes, excluded=excluded))


def test_lost_nodes_come_before_faulty_ones_and_each_in_the_order_of_its_time():
    state, kept = without_lost(excluding(lost("x", 1100.0), faulty("y"), faulty("d")), AT, EIGHT)

    assert state.nodes.excluded == (lost("x", 1100.0), lost("c", 1800.0), lost("b", 1850.0), faulty("y"), faulty("d"))
    assert kept == ("a", "d")


def test_a_node_that_is_lost_again_is_excluded_for_as_long_as_the_first_time():
    state, _ = without_lost(excluding(lost("b", 1010.0)), AT, EIGHT)

    assert state.nodes.excluded == (lost("c", 1800.0), lost("b", 1850.0))


def test_a_faulty_node_that_is_lost_stays_a_faulty_one():
    state, _ = without_lost(excluding(faulty("b")), AT, EIGHT)

    assert state.nodes.excluded == (lost("c", 1800.0), faulty("b"))


@pytest.mark.parametrize(
    ("policy", "left", "again"),
    [(EIGHT, "cbxy", ()), (TWO, "xy", ("c", "b")), (NO_LIMIT, "cbxy", ())],
    ids=["eight", "two", "no limit"],
)
def test_where_there_are_too_many_lost_nodes_make_room_for_faulty_ones(policy, left, again):
    state, _ = without_lost(excluding(faulty("x"), faulty("y")), AT, policy)

    assert tuple(each.node for each in state.nodes.excluded) == tuple(left)
    assert state.nodes.readmit == again


@pytest.mark.parametrize(
    ("policy", "left", "again"),
    [(EIGHT, "cxyz", ()), (TWO, "yz", ("c", "x")), (NO_LIMIT, "cxyz", ())],
    ids=["eight", "two", "no limit"],
)
def test_a_new_fault_takes_the_place_of_the_weakest_reasons(policy, left, again):
    state = exclude_nodes(excluding(lost("c", 1800.0), faulty("x"), faulty("y")), AT, {"z": (WORSE,)}, policy)

    assert tuple(each.node for each in state.nodes.excluded) == tuple(left)
    assert state.nodes.readmit == again


def test_the_second_fault_of_a_node_is_the_newest():
    state = exclude_nodes(excluding(faulty("x"), faulty("y")), AT, {"x": (WORSE,)}, TWO)

    assert [(each.node, each.reasons) for each in state.nodes.excluded] == [("y", (FAULT,)), ("x", (WORSE,))]
    assert state.nodes.readmit == ()


def test_a_limit_that_is_lower_than_before_holds_from_the_next_exclusion_on():
    state, _ = without_lost(excluding(faulty("x"), faulty("y"), faulty("z")), AT, TWO)

    assert state.nodes.excluded == (faulty("y"), faulty("z"))
    assert state.nodes.readmit == ("c", "b", "x")

"""Which nodes hold the others up, and which launches step slower than those before them."""

from __future__ import annotations

import random

import msgspec
import pytest

from stepkeeper.core import baseline
from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.baseline import Baseline, LaunchPace
from stepkeeper.core.decide import decide
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from stepkeeper.core.stragglers import Slow, Stragglers, Verdict, launched, observe_pace
from stepkeeper.reason_text import text
from stepkeeper.simulate.scenario import given_training

POLICY = Policy()
EVERY_S = 15.0
replace = msgspec.structs.replace


def windows(count: int, nodes: int, *, slow: dict[int, float], seed: int = 0) -> list[dict[str, float]]:
    """Return windows of nodes that differ by a few percent, some of them slow by a factor."""
    noise = random.Random(seed)  # noqa: S311 - noise, and the same each time
    return [
        {f"n{each}": 0.5 * slow.get(each, 1.0) * (1 + noise.gauss(0, 0.03)) for each in range(nodes)}
        for _ in range(count)
    ]


def played(found: list[dict[str, float]], known: Stragglers | None = None) -> tuple[Stragglers, list[Verdict]]:
    known, told = known or Stragglers(), []
    names = tuple(found[0])
    for number, own in enumerate(found):
        known, verdicts = observe_pace(known, names, own, at=EVERY_S * number, step_seconds=1.0, policy=POLICY)
        told += verdicts
    return known, told


@pytest.mark.parametrize("nodes", [2, 4, 7, 64, 500])
@pytest.mark.parametrize("seed", range(3))
def test_ordinary_nodes_are_never_slow(nodes: int, seed: int) -> None:
    assert played(windows(60, nodes, slow={}, seed=seed))[1] == []


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 64, 500])
def test_a_slow_node_is_told_once_by_its_name(nodes: int) -> None:
    (verdict,) = played(windows(60, nodes, slow={1: 1.6}))[1]

    assert (verdict.node, verdict.slow, verdict.since) == ("n1", True, 0.0)
    assert 1.4 < verdict.how.factor < 1.8


def test_several_slow_nodes_are_told_while_they_are_the_few() -> None:
    told = played(windows(60, 20, slow={3: 2.0, 11: 1.7}))[1]

    assert {verdict.node for verdict in told} == {"n3", "n11"}


def test_nodes_that_lie_far_apart_anyway_are_not_slow() -> None:
    noise = random.Random(1)  # noqa: S311 - noise, and the same each time
    spread = [{f"n{each}": 0.5 * noise.uniform(0.5, 1.5) for each in range(30)} for _ in range(60)]

    assert played(spread)[1] == []


def test_a_launch_begins_without_suspects_and_remembers_places() -> None:
    known = launched(played(windows(60, 4, slow={1: 1.6}))[0])

    assert known.suspects == ()
    assert known.places == ((1, "n1"),)


def test_a_pace_is_compared_with_launches_of_as_many_nodes() -> None:
    known = Baseline()
    for seconds in (1.0, 1.02, 0.99):
        known, slower = baseline.stepped(known, 4, seconds, POLICY)
        assert slower is None
    assert baseline.stepped(known, 2, 3.0, POLICY)[1] is None
    assert baseline.stepped(known, 4, 1.1, POLICY)[1] is None
    slower = baseline.stepped(known, 4, 1.3, POLICY)[1]

    assert slower is not None
    assert (slower.seconds, slower.baseline, slower.launches) == (1.3, 1.0, 3)


def test_launches_that_differ_much_anyway_are_not_slow() -> None:
    known = Baseline(paces=tuple(LaunchPace(nodes=4, seconds=seconds) for seconds in (1.0, 1.5, 0.7, 1.2, 0.9)))

    assert baseline.stepped(known, 4, 1.6, POLICY)[1] is None


def test_few_launches_are_kept() -> None:
    known = Baseline()
    for _ in range(50):
        known, _ = baseline.stepped(known, 4, 1.0, POLICY)

    assert len(known.paces) == baseline.LAUNCHES_KEPT


def after(before: tuple[str, ...], **observed: object) -> State:
    """Return a training whose launch before had these nodes."""
    state = given_training()
    return replace(state, nodes=replace(state.nodes, launched_before=before), **observed)


def train(state: State, seconds: float) -> tuple[State, list[do.ReportSlowLaunch], list[str]]:
    """Do steps until the launch has a pace."""
    told, words = [], []
    for step in range(1, 70):  # twice as many words as a pace needs, less the warm-up
        event = on.Progressed(
            at=100.0 + step, launch=state.launch.number, step=step, tokens=1, loss=1.0, step_seconds=seconds
        )
        decision = decide(state, event, POLICY)
        state = decision.state
        told += [effect for effect in decision.effects if isinstance(effect, do.ReportSlowLaunch)]
        words += [text(decision.why)] if decision.why else []
    return state, told, words


@pytest.mark.parametrize(
    ("before", "slowest", "suspects", "said"),
    [
        (("a", "c"), ("", Slow()), ("b",), "new in it: b"),
        (("a", "b"), ("b", Slow(factor=1.4)), ("b",), "the slowest node is b: 1.40 times as long as the others"),
        (
            ("a", "b"),
            ("b", Slow(factor=1.4, rank=3, loading_s=0.6)),
            ("b",),
            "the slowest node is b: 1.40 times as long as the others, for the data of rank 3",
        ),
        (("a", "b"), ("b", Slow(factor=1.02)), (), "no node of it stands out"),
        (("c", "d"), ("", Slow()), (), "all its nodes are new"),
    ],
)
def test_a_slow_launch_is_told_with_the_node_that_may_be_why(
    before: tuple[str, ...], slowest: tuple[str, Slow], suspects: tuple[str, ...], said: str
) -> None:
    known = Baseline(paces=(LaunchPace(nodes=2, seconds=1.0),))  # of an attempt before, through the journal
    state = after(before, baseline=known, stragglers=Stragglers(slowest=slowest))

    state, (told,), (why,) = train(state, 1.4)

    assert told.nodes == suspects
    assert why == text(told.reasons)
    assert why == f"this launch steps slower than those before it: 1.4 s a step, and 1 s in 1 of them; {said}"
    assert state.baseline.paces[-1] == LaunchPace(nodes=2, seconds=1.4)


def test_what_the_nodes_take_is_waited_for_before_a_slow_launch_is_told() -> None:
    known = Baseline(paces=(LaunchPace(nodes=2, seconds=1.0),))
    state = after(("a", "b"), baseline=known)
    told: list[do.ReportSlowLaunch] = []
    for step in range(1, 60):
        at = 100.0 + step
        progressed = on.Progressed(at=at, launch=state.launch.number, step=step, tokens=1, loss=1.0, step_seconds=1.4)
        paced = on.NodesPaced(
            at=at, launch=state.launch.number, step=step, step_seconds=1.4, own=(("a", 1.0), ("b", 1.4))
        )
        for event in (progressed, paced) if step == 45 else (progressed,):
            decision = decide(state, event, POLICY)
            state = decision.state
            told += [effect for effect in decision.effects if isinstance(effect, do.ReportSlowLaunch)]

    assert [each.nodes for each in told] == [("b",)]


def test_a_launch_as_fast_as_those_before_says_nothing() -> None:
    known = Baseline(paces=(LaunchPace(nodes=2, seconds=1.0),))

    state, told, words = train(replace(given_training(), baseline=known), 1.02)

    assert (told, words) == ([], [])
    assert len(state.baseline.paces) == 2


def slow_windows(
    *, own: float, loads: float, rank: int | None = 3, policy: Policy = POLICY
) -> tuple[State, list[do.ReportSlowNode]]:
    """Play windows in which b takes `own` seconds for a step, of which it loads data for `loads`; a takes 0.5, 0.1."""
    state, told = given_training(), []
    nodes = replace(state.nodes, usable=("a", "b", "c"))
    state = replace(state, launch=replace(state.launch, nodes=("a", "b")), nodes=nodes)
    for number in range(20):
        event = on.NodesPaced(
            at=100.0 + EVERY_S * number,
            launch=state.launch.number,
            step=number,
            step_seconds=1.0,
            own=(("a", 0.5), ("b", own)),
            loading=0.1,
            slowest=(("b", rank, loads), ("a", 0, 0.1)) if rank is not None else (),
        )
        decision = decide(state, event, policy)
        state = decision.state
        told += [effect for effect in decision.effects if isinstance(effect, do.ReportSlowNode)]
    return state, told


def killed_at_commit(state: State, policy: Policy) -> list[do.KillRanks]:
    """Return what a checkpoint leads to: the ranks end where a spare takes the place of a node."""
    save = {"launch": state.launch.number, "step": 20, "save_id": "s", "directory": "step_00000020"}
    decision = decide(state, on.CheckpointCommitted(at=500.0, bytes=1, seconds=1.0, **save), policy)
    return [effect for effect in decision.effects if isinstance(effect, do.KillRanks)]


def test_a_slow_data_loader_is_told_by_its_rank_and_its_node_is_not_replaced() -> None:
    policy = Policy(slow_node="replace")

    state, (told,) = slow_windows(own=1.0, loads=0.55, policy=policy)

    assert (told.node, told.rank, told.loading) == ("b", 3, True)
    assert text(told.reasons) == (
        "the data loader of rank 3 on b is slow, not the node: it takes 0.55 s for a step, and 0.1 s elsewhere; "
        "the node is not replaced for it"
    )
    assert not killed_at_commit(state, policy)
    assert slow_windows(own=1.0, loads=0.55)[1][0].reasons == told.reasons[:1]


def test_a_node_that_computes_slowly_is_replaced_and_its_slowest_rank_named() -> None:
    policy = Policy(slow_node="replace")

    state, (told,) = slow_windows(own=1.0, loads=0.2, policy=policy)

    assert (told.rank, told.loading) == (3, False)
    assert text(told.reasons).startswith(
        "b is slow: rank 3 works 2.00 times as long for a step as the others; a spare takes"
    )
    assert killed_at_commit(state, policy)
    assert not killed_at_commit(state, POLICY)


def test_watchers_of_a_version_that_names_no_rank_are_understood() -> None:
    _, (told,) = slow_windows(own=1.0, loads=0.9, rank=None)

    assert (told.rank, told.loading) == (None, False)
    assert text(told.reasons) == "b is slow: its ranks work 2.00 times as long for a step as the others"


def test_times_that_no_node_can_take_are_compared_like_others():
    """A rank may say anything: a broken clock, or a hostile script."""
    own = {f"n{each}": 10.0 ** (300 * (-1) ** each) for each in range(8)}

    assert played([own] * 3)[1] == []

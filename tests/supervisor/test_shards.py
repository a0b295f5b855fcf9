"""Who reads which shard of a step directory: nobody twice without need, and no shard forgotten."""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.supervisor.actions.shards import PATIENCE_MIN_S, STALLED_S, Shards
from stepkeeper_trainer.formats.verify import ShardVerdict


def found(index: int, of: int, *problems: str) -> ShardVerdict:
    return ShardVerdict(index, of, problems, 10, "m", "s", 0.0)


def taken(shards: Shards, *readers: str, now: float = 0.0) -> list[int | None]:
    return [shards.next_for(reader, now) for reader in readers]


def test_each_share_goes_to_one_reader_and_whoever_is_done_takes_the_next():
    shards = Shards(3)
    shards.here({"a", "b"})

    assert taken(shards, "a", "b", "a") == [0, 1, None]
    shards.done("b", found(1, 3), 1.0)
    assert taken(shards, "b", now=1.0) == [2]
    assert not shards.over
    shards.done("a", found(0, 3), 2.0)
    shards.done("b", found(2, 3), 2.0)
    assert shards.over
    assert shards.took_part == {"a", "b"}
    assert not shards.damaged


def test_a_lost_reader_s_share_is_read_by_another():
    shards = Shards(2)
    shards.here({"a", "b"})
    taken(shards, "a", "b")

    shards.here({"b"})
    shards.done("b", found(1, 2), 1.0)

    assert taken(shards, "b", now=1.0) == [0]


def test_a_reader_that_comes_later_takes_part():
    shards = Shards(2)
    shards.here({"a"})
    taken(shards, "a")
    shards.here({"a", "b"})

    assert taken(shards, "b") == [1]


def test_a_stalled_reader_s_share_is_read_by_an_idle_one_and_the_first_answer_counts():
    shards = Shards(1)
    shards.here({"a", "b"})
    taken(shards, "a")
    shards.receive("a", 0, 5, 1.0)

    assert taken(shards, "b", now=STALLED_S) == [None]
    shards.receive("a", 0, 5, 2.0)  # the same number: it has not moved
    assert taken(shards, "b", now=1.0 + STALLED_S) == [0]
    assert shards.next_for("c", 99.0) is None, "not here"
    shards.done("b", found(0, 1), 20.0)
    assert shards.over
    shards.done("a", found(0, 1, "late and wrong"), 21.0)
    assert not shards.damaged


def test_a_slow_reader_s_share_is_read_by_an_idle_one_once_it_takes_much_longer_than_the_others():
    shards = Shards(2)
    shards.here({"a", "b"})
    taken(shards, "a", "b")
    shards.done("a", found(0, 2), 3.0)
    for second in range(4, 7):
        shards.receive("b", 1, second, float(second))

    assert taken(shards, "a", now=PATIENCE_MIN_S - 0.1) == [None]
    assert taken(shards, "a", now=6.1) == [1]


def test_nobody_reads_what_he_wrote_while_there_is_another_one():
    shards = Shards(2, avoid={0: {"a"}, 1: {"b"}})
    shards.here({"a", "b"})

    assert taken(shards, "a", "b") == [1, 0]

    alone = Shards(2, avoid={0: {"a"}, 1: {"b"}})
    alone.here({"a"})
    assert taken(alone, "a") == [0]


def test_damage_is_believed_when_a_second_reader_sees_it_too():
    shards = Shards(2)
    shards.here({"a", "b"})
    taken(shards, "a", "b")

    shards.done("a", found(0, 2, "bytes are wrong"), 1.0)
    assert not shards.over
    assert taken(shards, "a", now=1.0) == [None], "not by the same one"
    shards.done("b", found(1, 2), 1.0)
    assert taken(shards, "b", now=1.0) == [0]
    shards.done("b", found(0, 2, "bytes are wrong"), 2.0)

    assert shards.over
    assert shards.damaged
    assert not shards.mistaken


def test_a_node_that_cannot_read_what_another_can_is_mistaken_and_the_step_is_right():
    shards = Shards(1)
    shards.here({"a", "b"})
    taken(shards, "a")
    shards.done("a", found(0, 1, "Stale file handle"), 1.0)
    taken(shards, "b", now=1.0)
    shards.done("b", found(0, 1), 2.0)

    assert shards.over
    assert not shards.damaged
    assert shards.mistaken == {"a"}


def test_a_single_reader_reads_twice_before_it_is_believed():
    shards = Shards(1)
    shards.here({"a"})
    taken(shards, "a")
    shards.done("a", found(0, 1, "bytes are wrong"), 1.0)

    assert taken(shards, "a", now=1.0) == [0]
    shards.done("a", found(0, 1, "bytes are wrong"), 2.0)
    assert shards.damaged


ACTS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from(("take", "done", "wrong", "fail", "lose", "come")), st.integers(0, 20)
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(ACTS, st.integers(1, 5))
def test_whatever_befalls_readers_a_patient_one_ends_it(acts: list[tuple[str, str, int]], of: int):
    """No history leaves a shard that nobody may read, and none is right that nobody found right."""
    shards, here, now = Shards(of), {"a", "b", "c"}, 0.0
    busy: dict[str, int] = {}
    right: set[int] = set()
    for reader, act, pause in acts:
        now += pause
        here = here - {reader} if act == "lose" else here | {reader} if act == "come" else here
        if act == "lose":
            busy.pop(reader, None)
        shards.here(here)
        if act == "take" and (index := shards.next_for(reader, now)) is not None:
            busy[reader] = index
        elif reader in busy and act in ("done", "wrong"):
            index = busy.pop(reader)
            right |= {index} if act == "done" else set()
            shards.done(reader, found(index, of, *(["wrong"] if act == "wrong" else [])), now)
        elif reader in busy and act == "fail":
            busy.pop(reader)
            shards.failed(reader)
    shards.here({"z"})
    for _ in range(2 * of):
        now += 100
        if (index := shards.next_for("z", now)) is not None:
            right.add(index)
            shards.done("z", found(index, of), now)

    assert shards.over
    assert {index for index, one in shards.found.items() if not one.problems} <= right

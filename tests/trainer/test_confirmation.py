"""A rank that computes wrongly is named by computing again; checks change no bit of a run."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats import messages
from stepkeeper_trainer.formats.manifest import CONFIRMED, read_manifest
from stepkeeper_trainer.formats.messages import Corrupted
from stepkeeper_trainer.observe.confirmation import _Seen, choose_every, find_guilty
from stepkeeper_trainer.store.retention import Candidate, Policy, decide
from tests.trainer.confirm_scenes import EVERY, STEPS, WRONG_AT
from tests.trainer.fsdp import needs_fsdp
from tests.trainer.ranks import finish, watcher_socket
from tests.trainer.scenes import Stage

TOLD_WITHIN_S = 60.0
FAILED = 70  # of a scene that ends with an error
HERE = "tests.trainer.confirm_scenes"
WRAPS = ["ddp", pytest.param("fsdp", marks=needs_fsdp)]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


def left(directory: Path, rank: int) -> list[torch.Tensor]:
    found: list[torch.Tensor] = torch.load(directory / f"left.{rank}")
    return found


def corrupted(sock: socket.socket) -> Corrupted | None:
    """Read what ranks say, as a watcher does, until one has computed wrongly."""
    give_up_at = time.monotonic() + TOLD_WITHIN_S
    while time.monotonic() < give_up_at:
        try:
            word = messages.decode_from_rank(sock.recv(2048))
        except TimeoutError:
            continue
        if isinstance(word, Corrupted):
            return word
    return None


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("wrap", [*WRAPS, pytest.param("mixed", marks=needs_fsdp)])
def test_checks_change_no_bit_of_a_run_and_confirm_its_steps(
    wrap: str, accumulate: int, stage: Stage, tmp_path: Path
) -> None:
    for name, every in (("with", EVERY), ("without", None)):
        (tmp_path / name).mkdir()
        ended = stage.play(
            f"{HERE}:train", tmp_path / name, ranks=2, limit_s=60.0, wrap=wrap, every=every, accumulate=accumulate
        )
        assert ended.codes == [0, 0], ended.said
        assert "not_deterministic" not in ended.said

    for rank in range(2):
        pairs = zip(left(tmp_path / "with", rank), left(tmp_path / "without", rank), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    steps = sorted((tmp_path / "with" / "checkpoints").glob("step_*"))
    manifests = [read_manifest(step) for step in steps]
    assert manifests[-1].step == STEPS
    assert all(each.state[CONFIRMED] == {3: 1, 6: 3, 9: 6}[each.step] for each in manifests), "a check follows its save"
    [step, *_] = sorted((tmp_path / "without" / "checkpoints").glob("step_*"))
    assert CONFIRMED not in read_manifest(step).state


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(
    ("scene", "wrap"),
    [
        ("flips_a_weight", "ddp"),
        ("flips_a_weight", "plain"),
        ("multiplies_wrongly", "ddp"),
        pytest.param("multiplies_wrongly", "fsdp", marks=needs_fsdp),
    ],
)
def test_a_rank_that_computes_wrongly_once_is_named_on_all_ranks(
    scene: str, wrap: str, guilty: int, stage: Stage, tmp_path: Path
) -> None:
    name = f"confirm-{time.monotonic_ns()}"
    with watcher_socket(name) as sock, ThreadPoolExecutor(1) as reader:
        told = reader.submit(corrupted, sock)
        ended = stage.play(
            f"{HERE}:{scene}", tmp_path, ranks=2, limit_s=60.0, guilty=guilty, wrap=wrap, watcher=f"@{name}"
        )
        word = told.result(TOLD_WITHIN_S)

    assert ended.codes == [FAILED, FAILED], ended.said
    assert (
        ended.said.count(f"silent corruption at step {WRONG_AT}: the same micro-batch came to other bits: rank ") >= 2
    )
    assert f"other bits: rank {guilty} on " in ended.said
    assert f"other bits: rank {1 - guilty} on " not in ended.said
    assert "Resume from step 3 or before" in ended.said
    assert word is not None
    assert (word.rank, word.step, word.confirmed) == (guilty, WRONG_AT, WRONG_AT - EVERY)
    assert "the loss" in word.what


@pytest.mark.parametrize(("ranks", "since"), [([0, 1], 0), ([0, 1], 18), ([0], 0)])
def test_a_run_that_is_not_deterministic_is_recognised_and_left_alone(
    ranks: list[int], since: int, stage: Stage, tmp_path: Path
) -> None:
    ended = stage.play(f"{HERE}:never_the_same", tmp_path, ranks=2, limit_s=60.0, ranks_that=ranks, since=since)

    assert ended.codes == [0, 0], ended.said
    assert ended.said.count("not_deterministic") == 1
    assert "first.weight" in ended.said
    assert CONFIRMED not in read_manifest(tmp_path / "checkpoints" / f"step_{STEPS:08d}").state


def test_without_deterministic_algorithms_nobody_is_blamed(stage: Stage, tmp_path: Path) -> None:
    """An operation that rarely differs looks like a GPU that errs: training goes on, and the log says so."""
    ended = stage.play(f"{HERE}:flips_a_weight", tmp_path, ranks=2, limit_s=60.0, guilty=1, watcher="", promised=False)

    assert ended.codes == [0, 0], ended.said
    assert ended.said.count("not_deterministic") == 1
    assert "ranks=1" in ended.said
    assert "silent corruption at step" not in ended.said


def test_a_computation_that_changes_weights_is_refused(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{HERE}:changes_weights", tmp_path, ranks=1, limit_s=60.0)

    assert ended.codes == [FAILED], ended.said
    assert "what confirm() is given changes parameters" in ended.said


def seen(*differ: bool) -> list[_Seen]:
    return [_Seen(differs=each) for each in differ]


@pytest.mark.parametrize(
    ("check", "again", "guilty"),
    [
        ([True, False], [False, False], [0]),
        ([False, True], [False, True], [1]),  # it computes wrongly more often
        ([True, False], [True, True], []),
        ([True, False], [False, True], []),
        ([True, True, False, False], [True, False, False, False], [0, 1]),  # two GPUs of a node
        ([True, True, True, False], [False, False, False, False], []),
        ([True], [False], [0]),
        ([True], [True], []),
    ],
)
def test_most_ranks_must_come_to_the_same_bits(check: list[bool], again: list[bool], guilty: list[int]) -> None:
    assert find_guilty([seen(*check), seen(*again)]) == guilty


def test_one_rank_without_deterministic_algorithms_is_enough_to_blame_nobody() -> None:
    look = [_Seen(differs=True), _Seen(differs=False, promised=False), _Seen(differs=False)]

    assert find_guilty([look, look]) == []


def test_the_environment_counts_instead_of_the_script() -> None:
    assert choose_every("7", 3) == 7
    assert choose_every(None, 3) == 3
    assert choose_every(None, None) is None
    for wrong in ("0", "-1", "often", "1.5"):
        with pytest.raises(UsageError, match="confirm_every="):
            choose_every(wrong, 3)


def test_the_newest_step_that_is_confirmed_is_kept() -> None:
    steps = [Candidate(name=str(n), step=n, save_id=str(n), verified=True, confirmed=4) for n in range(9, 0, -1)]

    kept = decide(steps, Policy(keep_last=2, epochs=False)).kept

    assert set(kept) == {"9", "8", "4"}
    assert set(decide(steps[:3], Policy(keep_last=2, epochs=False)).kept) == {"9", "8"}


def test_the_reference_script_comes_to_the_same_losses_with_checks(
    uninterrupted: tuple[Path, dict[int, str]], tmp_path: Path
) -> None:
    _, without = uninterrupted

    found = finish(2, tmp_path / "run", environment={"STEPKEEPER_CONFIRM_EVERY": "4"})

    assert found == without
    newest = tmp_path / "run" / "checkpoints" / "step_00000024"
    assert read_manifest(newest).state[CONFIRMED] == 20

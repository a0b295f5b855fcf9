"""An environment without NumPy: torch needs none to train, so the library needs none to save and to resume."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.errors import ResumeError
from stepkeeper_trainer.state import random_state, tree
from tests.trainer.bare import make_environment
from tests.trainer.fsdp import needs_fsdp
from tests.trainer.ranks import TINY, Ranks, losses, steps_of

STEPS = 12


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment") / "venv", without="numpy")


def train(python: Path, run_dir: Path, *, resume_from: str) -> dict[int, str]:
    command = [str(python), "-m", "tests.trainer.without_numpy", str(run_dir), str(STEPS)]
    with Ranks(2, run_dir, command=command, environment={"STEPKEEPER_RESUME_FROM": resume_from}) as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
    return losses(run_dir)


@pytest.mark.campaign
def test_two_ranks_save_and_resume_with_the_same_losses(python: Path, tmp_path: Path) -> None:
    """With data parallelism, two optimizers, a schedule, and two loaders with workers."""
    run_dir = tmp_path / "run"
    before = train(python, run_dir, resume_from="")
    assert len(set(before.values())) == STEPS, "every step has a loss of its own"

    chosen = steps_of(run_dir)[0]
    done = int(chosen.removeprefix("step_"))

    after = train(python, run_dir, resume_from=str(run_dir / "checkpoints" / chosen))

    assert after == before
    rows = (run_dir / "metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == [*range(1, STEPS + 1), *range(done + 1, STEPS + 1)]
    assert done < STEPS


@pytest.mark.campaign
@needs_fsdp
def test_the_reference_script_shards_its_model(python: Path, tmp_path: Path) -> None:
    script = [str(python), "-m", "stepkeeper_trainer.examples.train_lm", *TINY, "--steps=3", "--checkpoint-every=2"]
    with Ranks(2, tmp_path / "run", command=[*script, f"--run-dir={tmp_path / 'run'}"]) as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
    assert "step_00000003" in steps_of(tmp_path / "run")


def test_generators_that_numpy_had_part_in_are_restored_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = random_state.collect()
    assert "numpy" in saved
    expected = torch.rand(3)
    monkeypatch.setitem(sys.modules, "numpy", None)  # Python's own way to make an import fail

    with caplog.at_level("INFO"):
        random_state.restore(saved)

    assert torch.equal(torch.rand(3), expected)
    assert "rng_left_out generator=numpy" in caplog.text


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float64).reshape(3, 4),
        np.arange(12, dtype=np.int16).reshape(3, 4).T,
        np.arange(6, dtype=">i4"),
        np.array([True, False]),
        np.zeros((0, 3), dtype=np.float16),
        np.array(7, dtype=np.uint8),
        np.broadcast_to(np.float32(1.5), (2, 2)),
    ],
    ids=["plain", "transposed", "foreign byte order", "bool", "empty", "one number", "read-only"],
)
def test_arrays_come_back_as_they_were(array: np.ndarray) -> None:  # type: ignore[type-arg]
    tensors: dict[str, torch.Tensor] = {}
    back = tree.join(tree.split({"x": array}, "part", tensors), tensors)["x"]

    assert list(tensors) == ["part.x"]
    assert back.dtype == array.dtype.newbyteorder("=")
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_a_saved_array_needs_numpy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: dict[str, torch.Tensor] = {}
    skeleton = tree.split(np.zeros(2), "others.normaliser", tensors)
    monkeypatch.setitem(sys.modules, "numpy", None)

    with pytest.raises(ResumeError, match=r"others.normaliser was saved as a value of NumPy, .* install it"):
        tree.join(skeleton, tensors)


def test_bytes_are_looked_at_in_place() -> None:
    tensor = torch.arange(4, dtype=torch.int16)
    view = view_bytes(tensor)
    tensor[0] = 513

    assert bytes(view[:4]) == b"\x01\x02\x01\x00"
    assert view.readonly

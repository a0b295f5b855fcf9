"""How many nodes a launch has: what is refused says why, and what would do."""

from __future__ import annotations

import shlex

import pytest

from stepkeeper.config import shape
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm import cmd
from tests.config.conftest import Gather

ELASTIC = "torchrun --nnodes=2:4 --rdzv-backend=c10d train.py"


def shaped(gather: Gather, settings: dict[str, object], nodes: int, command: str, ranks: int | None = 1) -> shape.Shape:
    return shape.of(gather(settings).resolve(), nodes, shlex.split(command), ranks)


@pytest.mark.parametrize(
    ("settings", "nodes", "command", "expected"),
    [
        ({}, 4, "train.py", shape.Shape(wanted=4, least=0)),
        ({"spares": 1}, 4, "train.py", shape.Shape(wanted=3, least=0)),
        ({"min_nodes": 2}, 4, "train.py", shape.Shape(wanted=4, least=2)),  # of -N 2-8 came 4
        ({}, 6, ELASTIC, shape.Shape(wanted=4, least=2)),
        ({}, 3, ELASTIC, shape.Shape(wanted=3, least=2)),
        ({"min_nodes": 3, "spares": 1}, 4, ELASTIC, shape.Shape(wanted=3, least=3)),
        ({}, 3, "torchrun --nnodes=3 train.py", shape.Shape(wanted=3, least=0)),
        ({}, 3, f"bash -c '{ELASTIC}'", shape.Shape(wanted=3, least=0)),
        ({}, 3, "srun -N2 train.py", shape.Shape(wanted=3, least=0)),
    ],
)
def test_a_launch_gets_as_many_nodes_as_all_bounds_allow(
    settings: dict[str, object], nodes: int, command: str, expected: shape.Shape, gather: Gather
) -> None:
    assert shaped(gather, settings, nodes, command) == expected


@pytest.mark.parametrize(
    ("micro_batches", "nodes", "ranks", "least", "expected"),
    [
        (64, 8, 8, 0, shape.Shape(wanted=8, least=0, counts=(1, 2, 4, 8))),
        (64, 7, 8, 2, shape.Shape(wanted=4, least=2, counts=(1, 2, 4))),
        (96, 7, 8, 3, shape.Shape(wanted=6, least=3, counts=(1, 2, 3, 4, 6))),
    ],
)
def test_ranks_share_the_micro_batches_of_a_step_evenly(
    *, micro_batches: int, nodes: int, ranks: int, least: int, expected: shape.Shape, gather: Gather
) -> None:
    settings: dict[str, object] = {"micro_batches": micro_batches, "min_nodes": least}

    assert shaped(gather, settings, nodes, "train.py", ranks) == expected


def test_before_the_ranks_of_a_node_are_known_any_number_will_do(gather: Gather) -> None:
    assert shaped(gather, {"micro_batches": 64}, 7, "train.py", ranks=None) == shape.Shape(wanted=7, least=0)


@pytest.mark.parametrize(
    ("settings", "nodes", "command", "ranks", "words"),
    [
        ({"spares": 2, "min_nodes": 3}, 4, "train.py", 1, ("--min-nodes 3", "has 2 nodes", "2 of them spares")),
        ({"min_nodes": 3}, 2, "train.py", 1, ("--min-nodes 3", "has 2 nodes (2 of the allocation, 0 of them spares)")),
        ({"min_nodes": 5}, 6, ELASTIC, 1, ("--min-nodes 5", "has 4 nodes", "--nnodes up to 4")),
        ({"min_nodes": 1}, 4, ELASTIC, 1, ("at least 2 nodes (--nnodes)", "--min-nodes 1")),
        ({"spares": 3}, 4, ELASTIC, 1, ("at least 2 nodes (--nnodes)", "a launch has 1 nodes")),
        ({}, 4, "torchrun --nnodes=4:2 train.py", 1, ("--nnodes=4:2", "the first is the smaller one")),
        ({"spares": 1}, 3, "srun train.py", 1, ("--spares 1", "leave out `srun`")),
        ({"micro_batches": 8}, 3, "srun train.py", 1, ("--micro-batches 8", "leave out `srun`")),
        ({"micro_batches": 12, "min_nodes": 4}, 5, "train.py", 2, ("4 to 5 nodes", "would: 1, 2, 3, 6")),
        ({"micro_batches": 5}, 5, "train.py", 2, ("1 to 5 nodes, 2 on each", "no number of nodes would")),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    *, settings: dict[str, object], nodes: int, command: str, ranks: int, words: tuple[str, ...], gather: Gather
) -> None:
    with pytest.raises(StepkeeperError) as refused:
        shaped(gather, settings, nodes, command, ranks)

    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nnodes=1:4 train.py", "torchrun --nnodes=3 train.py"),
        ("torchrun --nnodes 1:4 train.py", "torchrun --nnodes 3 train.py"),
        (
            "python -m torch.distributed.run --nnodes=1:4 train.py",
            "python -m torch.distributed.run --nnodes=3 train.py",
        ),
        ("torchrun --nnodes=4 train.py", "torchrun --nnodes=4 train.py"),
        ("torchrun train.py --nnodes=1:4", "torchrun train.py --nnodes=1:4"),
        ("torchrun --nnodes", "torchrun --nnodes"),
        ("train.py --nnodes=1:4", "train.py --nnodes=1:4"),
        ("bash -c 'torchrun --nnodes=1:4 train.py'", "bash -c 'torchrun --nnodes=1:4 train.py'"),
    ],
)
def test_a_range_in_torchruns_line_becomes_the_number_of_a_launch(line: str, expected: str) -> None:
    """torchrun would wait for the nodes that are not there; what follows the script is the script's own."""
    assert cmd.with_nodes(shlex.split(line), 3) == shlex.split(expected)

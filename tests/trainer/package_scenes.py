"""Scenes of `any_state` with packages that have a state of their own kind: each resumes to the last bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from tests.trainer.any_state import Scene, _fit, _mlp

PACKAGE_SCENES: dict[str, Callable[[int, int], Scene]] = {}
NEEDS = {"torchao_8bit": "torchao", "bitsandbytes_8bit": "bitsandbytes", "hugging_face_streaming": "datasets"}
"""Packages beside those of `make setup`: tests/requirements-state-packages.txt."""
ROWS = 48
BATCH = 2
QUANTIZED = 800  # wide enough that a weight has the 4096 numbers from which on moments are quantized


def scene(make: Callable[[int, int], Scene]) -> Callable[[int, int], Scene]:
    PACKAGE_SCENES[make.__name__] = make
    return make


@scene
def torchao_8bit(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    import torch  # noqa: PLC0415

    torch.compile = lambda function, **_: function  # the optimizer's step is compiled, which takes minutes
    from torchao.optim import AdamW8bit  # noqa: PLC0415

    model = _mlp(1, inner=QUANTIZED)
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@scene
def bitsandbytes_8bit(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    from bitsandbytes.optim import AdamW8bit  # noqa: PLC0415

    model = _mlp(1, inner=QUANTIZED)
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


def _read(batches: Callable[[], Iterator[Any]], state: dict[str, Any], rows: Callable[[Any], list[int]]) -> Scene:
    """Train on what a loader yields; the iterator is made at the first step, which is after a resume.

    The rows and the weights are compared: what the package counts of its own is another number after a resume.
    """
    import torch  # noqa: PLC0415

    model = _mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fit = _fit(model, optimizer)
    seen: list[list[int]] = []
    reading: list[Iterator[Any]] = []

    def step() -> float:
        if not reading:
            reading.append(batches())
        seen[:] = [rows(next(reading[0]))]
        return fit()

    return Scene(
        state={"model": model, "optimizer": optimizer, **state},
        step=step,
        more=lambda: seen,
        counts_anew=frozenset(state),
    )


@scene
def torchdata_nodes(rank: int, world_size: int) -> Scene:
    import torch  # noqa: PLC0415
    from torchdata.nodes import Batcher, Loader, SamplerWrapper  # noqa: PLC0415

    shard = torch.utils.data.DistributedSampler(range(ROWS), num_replicas=world_size, rank=rank, seed=7)
    loader = Loader(Batcher(SamplerWrapper(shard), batch_size=BATCH))
    return _read(lambda: iter(loader), {"loader": loader}, lambda batch: [int(row) for row in batch])


@scene
def hugging_face_streaming(rank: int, world_size: int) -> Scene:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import Dataset  # noqa: PLC0415
    from datasets.distributed import split_dataset_by_node  # noqa: PLC0415

    rows = Dataset.from_dict({"row": list(range(ROWS))}).to_iterable_dataset(num_shards=4 * world_size)
    stream = split_dataset_by_node(rows, rank=rank, world_size=world_size).batch(BATCH)
    return _read(lambda: iter(stream), {"data": stream}, lambda batch: [int(row) for row in batch["row"]])

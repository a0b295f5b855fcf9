"""`.metadata` of many pieces: every reader of pickles gets what torch's own objects say."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.formats.metadata import parse
from stepkeeper_trainer.save.dcp_metadata import VALUES_NAME, Description
from stepkeeper_trainer.save.planner import Share
from stepkeeper_trainer.save.replicas import Replicas
from stepkeeper_trainer.save.report import Item, RankReport, encode_items

RANKS = 3
FAR = 2**31 + 2**40  # in a file: more than four bytes can say


def share() -> Share:
    chunks = [ChunkStorageMetadata(torch.Size([2 * rank]), torch.Size([2])) for rank in range(RANKS)]
    sharded = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2 * RANKS]), chunks)
    whole = [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    names = [f"model.layers.{number}.weight" for number in range(300)]  # more than one byte can count
    entries = dict.fromkeys(names, sharded) | {
        "step": TensorStorageMetadata(TensorProperties(torch.int64), torch.Size([]), whole)
    }
    return Share((), Replicas(()), Metadata(entries, planner_data={name: (name,) for name in entries}))


def reports(saved: Share) -> list[RankReport]:
    assert saved.metadata is not None
    found = []
    for rank in range(RANKS):
        file = f"__{rank}_0.distcp"
        items = []
        for name, entry in saved.metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            if rank < len(entry.chunks):
                offsets = tuple(entry.chunks[rank].offsets)
                items.append(Item(name, offsets, rank, file, FAR * rank + 8 * len(items), 8))
        files = {file: FileEntry(bytes=8, xxh3_128="0" * 32)}
        found.append(RankReport(rank=rank, save_id="s", items=encode_items(tuple(items)), files=files))
    values = (Item("lr", None, None, VALUES_NAME, 0, 5), Item("lr2", None, None, VALUES_NAME, 0, 5))
    return [*found, RankReport(rank=0, save_id="s", items=encode_items(values))]


@pytest.mark.parametrize("load", [pickle.loads, lambda data: pickle._Unpickler(io.BytesIO(data)).load()])  # type: ignore[attr-defined]
def test_each_reader_of_pickles_finds_each_piece(load: Callable[[bytes], Any]) -> None:
    saved = share()
    assert saved.metadata is not None

    data = Description().of("0123456789abcdef" * 2, saved, reports(saved))

    found = load(data)
    names = list(saved.metadata.state_dict_metadata)
    expected = {
        MetadataIndex(name, torch.Size([2 * rank])): _StorageInfo(f"__{rank}_0.distcp", FAR * rank + 8 * number, 8)
        for rank in range(RANKS)
        for number, name in enumerate(names[:-1])
    }
    expected[MetadataIndex("step", torch.Size([]))] = _StorageInfo("__0_0.distcp", 8 * (len(names) - 1), 8)
    expected |= {MetadataIndex(name): _StorageInfo(VALUES_NAME, 0, 5) for name in ("lr", "lr2")}
    assert found.storage_data == expected
    for index in found.storage_data:
        assert index.index == (index.offset[0] // 2 if index.offset else 0 if index.fqn == "step" else None)
    assert {n: e for n, e in found.state_dict_metadata.items() if n in names} == saved.metadata.state_dict_metadata
    assert found.storage_meta.save_id == "0123456789abcdef" * 2
    assert found.planner_data.keys() == {*names, "lr", "lr2"}


def test_our_own_reader_finds_each_piece() -> None:
    saved = share()

    contents = parse(Description().of("0" * 32, saved, reports(saved)))

    assert len(contents.tensors) == 301
    assert contents.unclaimed == ()
    last = contents.tensors["model.layers.299.weight"].pieces[2].extent
    assert last is not None
    assert (last.file, last.start, last.length) == ("__2_0.distcp", 2 * FAR + 8 * 299, 8)


def test_a_piece_that_nobody_wrote_is_named() -> None:
    saved = share()

    with pytest.raises(SaveError, match=r"nobody wrote model.layers.0.weight at \(2,\)"):
        Description().of("0" * 32, saved, [report for report in reports(saved) if report.rank != 1])

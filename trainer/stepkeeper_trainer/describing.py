"""`.metadata` of a save, from the plan and what all ranks have written: the same bytes as last time, mostly."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, StorageMeta

from stepkeeper_trainer.dcp_values import VALUES_NAME
from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.collecting import paused
from stepkeeper_trainer.report import RankReport, decode_items

if TYPE_CHECKING:
    from stepkeeper_trainer.planner import Share

_NO_SAVE_ID = "0" * 32  # in its place, until a save is known


class Description:
    """Pickled once for a layout; only the save's name differs from save to save."""

    def __init__(self) -> None:
        self._made_from: tuple[object, ...] | None = None
        self._data = b""

    def of(self, save_id: str, share: Share, reports: list[RankReport]) -> bytes:
        """Return the bytes of `.metadata`.

        Raises:
            SaveError: what was written is not what was planned.
        """
        made_from = (share, *(xxhash.xxh3_128_digest(bytes(report.items)) for report in reports))
        if self._made_from is None or self._made_from[0] is not share or self._made_from != made_from:
            with paused():
                self._data = _encode(share, reports)
            self._made_from = made_from
        return self._data.replace(_NO_SAVE_ID.encode(), save_id.encode())


def _encode(share: Share, reports: list[RankReport]) -> bytes:
    metadata = share.metadata
    assert metadata is not None, "rank 0 knows the whole"
    storage: dict[MetadataIndex, _StorageInfo] = {}
    places: dict[tuple[str, int, int], _StorageInfo] = {}  # equal values share one: `.metadata` holds it once
    written: set[tuple[str, tuple[int, ...] | None]] = set()
    entries, names = metadata.state_dict_metadata, metadata.planner_data
    for report in reports:
        for item in decode_items(report):
            if item.file == VALUES_NAME and item.name in entries:
                continue  # a tensor has that name already
            offset = None if item.offsets is None else torch.Size(item.offsets)
            place = (item.file, item.start, item.length)
            storage[MetadataIndex(item.name, offset, item.index)] = places.get(place) or places.setdefault(
                place, _StorageInfo(*place)
            )
            written.add((item.name, item.offsets))
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata) and (name, None) not in written:
            raise SaveError(f"nobody wrote {name}")
        for chunk in getattr(entry, "chunks", []):
            if (name, chunk.offsets) not in written and (name, None) not in written:
                raise SaveError(f"nobody wrote {name} at {tuple(chunk.offsets)}")
    values = [index.fqn for index in storage if index.fqn not in entries]
    whole = replace(
        metadata,
        state_dict_metadata=entries | dict.fromkeys(values, BytesStorageMetadata()),
        planner_data=names | {name: (name,) for name in values} if names is not None else None,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=_NO_SAVE_ID),
        version=CURRENT_DCP_VERSION,
    )
    data = pickle.dumps(whole)
    if data.count(_NO_SAVE_ID.encode()) != 1:
        raise SaveError(f"a tensor's name contains {_NO_SAVE_ID}")
    return data

"""Reading a step directory: every chunk is checked against the manifest before a byte of it is used.

Also where only slices are read (another world size), and `.metadata` before it is parsed.  Nothing is
unpickled into code.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

from stepkeeper_trainer.errors import DamagedError, ResumeError
from stepkeeper_trainer.formats.manifest import Manifest, ManifestError, read_manifest
from stepkeeper_trainer.formats.metadata import (
    METADATA_NAME,
    Contents,
    Extent,
    MetadataError,
    Piece,
    TensorEntry,
    parse,
)
from stepkeeper_trainer.formats.plain import collection_paused
from stepkeeper_trainer.formats.stored import StepBytes, StoredError
from stepkeeper_trainer.load.worker import Limits, Wanted, fill

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.checkpoint.planner import ReadItem

    from stepkeeper_trainer.coordinate.groups import Group
    from stepkeeper_trainer.formats.manifest import Manifest


ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(state_dict_loader.load).parameters else {}
"""Has a load or save of DCP ask no other process.  That of torch 2.6 asks none where there is no process group."""


class CheckedReader:
    """What a step directory holds, and its tensors."""

    def __init__(self, directory: Path, manifest: Manifest, contents: Contents | None = None) -> None:
        self._directory, self._manifest = directory, manifest
        self._contents = contents
        self._metadata: Metadata | None = None

    @property
    def contents(self) -> Contents:
        """What `.metadata` says, checked against the manifest and parsed as data.

        Raises:
            DamagedError: it is not what was saved.
            OSError: it cannot be opened.
        """
        if self._contents is None:
            self._contents = parse_contents(read_description(self._directory, self._manifest), self._directory)
        return self._contents

    def read_metadata(self) -> Metadata:
        """Return what the step holds, in torch's words.  Raises as `contents`."""
        if self._metadata is None:
            self._metadata = describe(self.contents)
        return self._metadata

    def fill(self, tensors: dict[str, torch.Tensor], *, limits: Limits | None = None, turn: float = 0.0) -> int:
        """Fill `tensors` in place with what this rank holds of them; return how many bytes were read.

        Raises:
            DamagedError: some byte is not what the manifest says, or cannot be read.
        """
        return fill(self._directory, self._manifest, self.plan(tensors), limits=limits, turn=turn)

    def plan(self, tensors: dict[str, torch.Tensor]) -> list[Wanted]:
        """Say which boxes of which stored pieces this rank needs; torch's planner knows all kinds of sharding.

        Raises:
            DamagedError: they are not stored, or in another size.
        """
        with collection_paused():
            return self._plan(tensors)

    def _plan(self, tensors: dict[str, torch.Tensor]) -> list[Wanted]:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self.read_metadata(), is_coordinator=True)
        try:
            plan = planner.create_local_plan()
        except (RuntimeError, ValueError) as error:  # torch's words for what is missing or of another size
            raise DamagedError(f"{self._directory}: {error}") from error
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise DamagedError(f"{self._directory}: {item.storage_index.fqn} is a pickle, which is never loaded")
        return self.wanted((item, planner.resolve_tensor(item)) for item in plan.items)

    def wanted(self, items: Iterable[tuple[ReadItem, torch.Tensor]]) -> list[Wanted]:
        """Say where the bytes of a plan's tensors lie, each with the tensor that they go to.

        Raises:
            DamagedError: they are stored nowhere, or compressed.
        """
        items = list(items)
        names = {item.storage_index.fqn for item, _ in items}
        places = {
            (name, piece.offsets): (self.contents.tensors[name], piece)
            for name in names & self.contents.tensors.keys()
            for piece in self.contents.tensors[name].pieces
        }
        return [self._wanted(item, target, places) for item, target in items]

    def read_objects(self, names: Iterable[str]) -> Iterator[tuple[str, Extent, bytes]]:
        """Yield the checked bytes of values that are no tensors; nothing is unpickled.

        Raises:
            DamagedError: some byte is not what the manifest says, or cannot be read.
        """
        found: list[tuple[Extent, str]] = []
        for name in names:
            extent = self.contents.objects.get(name)
            if extent is None:
                raise DamagedError(f"{self._directory}: {name} is stored nowhere")
            if extent.transformed:
                raise DamagedError(f"{self._directory / extent.file}: {name} is compressed")
            found.append((extent, name))
        try:
            with StepBytes(self._directory, self._manifest) as source:
                for extent, name in sorted(found, key=lambda each: (each[0].file, each[0].start)):
                    yield name, extent, source.read(extent.file, extent.start, extent.length)
        except StoredError as error:
            raise DamagedError(str(error)) from error
        except OSError as error:
            raise DamagedError(f"{error.filename or self._directory}: cannot be read: {error.strerror}") from error

    def _wanted(
        self, item: ReadItem, target: torch.Tensor, places: dict[tuple[str, tuple[int, ...]], tuple[TensorEntry, Piece]]
    ) -> Wanted:
        name = item.storage_index.fqn
        tensor, piece = places[name, tuple(item.storage_index.offset or (0,) * len(item.lengths))]
        if piece.extent is None:
            raise DamagedError(f"{self._directory}: {name} at {list(piece.offsets)} is stored nowhere")
        if piece.extent.transformed:
            raise DamagedError(f"{self._directory}: {name} is stored compressed, which Stepkeeper does not write")
        return Wanted(
            name=name,
            file=piece.extent.file,
            start=piece.extent.start,
            length=piece.extent.length,
            sizes=piece.sizes,
            dtype=_dtype(name, tensor),
            box_offsets=tuple(item.storage_offsets),
            box_sizes=tuple(item.lengths),
            target=target.detach(),
        )


def read_description(directory: Path, manifest: Manifest) -> bytes:
    """Return a step's `.metadata`, checked.  Raises DamagedError, OSError where it cannot be opened."""
    try:
        with StepBytes(directory, manifest, chunks_kept=1) as source:
            return source.read_whole(METADATA_NAME)
    except StoredError as error:
        raise DamagedError(str(error)) from error


def parse_contents(data: bytes, directory: Path) -> Contents:
    """Parse the `.metadata` of a step as data.  Raises DamagedError."""
    try:
        return parse(data)
    except MetadataError as error:
        raise DamagedError(f"{directory / METADATA_NAME}: {error}") from error


def open_manifest(directory: Path, if_absent: str, if_unusable: str) -> Manifest:
    """Read the manifest of a step directory; the two texts say what to do otherwise.  Raises ResumeError."""
    if not directory.is_dir():
        raise ResumeError(f"{directory}: no such step directory; {if_absent}")
    try:
        return read_manifest(directory)
    except ManifestError as error:
        raise ResumeError(f"{error}; {if_unusable}") from error
    except OSError as error:
        raise ResumeError(f"{error.filename or directory}: cannot be read: {error.strerror}") from error


def describe(contents: Contents) -> Metadata:
    """Return what a directory holds, in torch's words.  Raises DamagedError."""
    with collection_paused():
        return Metadata(dict(_entries(contents)))


def _entries(contents: Contents) -> Iterator[tuple[str, BytesStorageMetadata | TensorStorageMetadata]]:
    for name in contents.objects:
        yield name, BytesStorageMetadata()
    for name, tensor in contents.tensors.items():
        yield (
            name,
            TensorStorageMetadata(
                TensorProperties(dtype=_dtype(name, tensor)),
                torch.Size(tensor.size),
                [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces],
            ),
        )


def load(
    reader: CheckedReader, tensors: dict[str, torch.Tensor], group: Group | None, *, limits: Limits | None = None
) -> None:
    """Fill `tensors` in place, on all ranks together: all succeed, or all raise.

    Raises:
        DamagedError: some byte is not what the manifest says, or cannot be read.
    """
    own: str | None = None
    turn = group.rank / group.size if group is not None else 0.0
    try:
        reader.fill(tensors, limits=limits, turn=turn)
    except DamagedError as error:
        own = str(error)
    failures = _all_failures(own, group)
    if failures:
        rank, text = min(failures.items())
        raise DamagedError(text if len(failures) == 1 else f"rank {rank} of {len(failures)}: {text}")


def _all_failures(own: str | None, group: Group | None) -> dict[int, str]:
    """Return what went wrong on each rank of a group, on all of them alike."""
    if group is None:
        return {} if own is None else {0: own}
    any_failed = torch.tensor([int(own is not None)])
    group.reduce_max(any_failed)
    if not int(any_failed):
        return {}
    return {rank: text for rank, text in enumerate(group.all_gather(own)) if text is not None}


def _dtype(name: str, tensor: TensorEntry) -> torch.dtype:
    found = getattr(torch, tensor.dtype, None)
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"{name} is of type {tensor.dtype!r}, which this torch ({torch.__version__}) does not have")
    return found


def root_cause(error: BaseException) -> str:
    """Return what is behind DCP's exception, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        text = str(cause) or type(cause).__name__
        return text if len(error.failures) == 1 else f"rank {rank} of {len(error.failures)}: {text}"
    return str(error) or type(error).__name__

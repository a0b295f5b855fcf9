"""`StepkeeperReader`: `torch.distributed.checkpoint.load` from a step directory, with every byte verified before use.

torch's planner says what each rank needs, with any sharding; `reader` and `worker` read and verify it.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.load.reader import CheckedReader, open_manifest
from stepkeeper_trainer.load.worker import Limits, fill

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.formats.metadata import Extent


class StepkeeperReader(StorageReader):
    """Give it to `torch.distributed.checkpoint.load(state_dict, storage_reader=...)`.

    Each chunk of a file is compared with its digest in `MANIFEST.json` before a byte of it reaches a tensor.  Values
    that are no tensors are unpickled by torch's planner; one that would name code is refused before that.
    """

    def __init__(self, directory: str | os.PathLike[str], *, limits: Limits | None = None) -> None:
        """Read the manifest and `.metadata` of a step directory.

        Args:
            directory: the step directory, as `stepkeeper checkpoints latest` prints it.
            limits: threads and memory of a load.

        Raises:
            ResumeError: it is no committed step directory.
            DamagedError: `.metadata` is not what the manifest says.
        """
        self._limits = limits
        self._turn = 0.0
        self.reset(directory)

    @property
    def manifest(self) -> Manifest:
        """The manifest: step, tokens, versions and digests."""
        return self._manifest

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return self._manifest.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another step directory from now on.  Raises as the constructor."""
        if checkpoint_id is None:
            return
        self._directory = Path(checkpoint_id)
        self._manifest = open_manifest(
            self._directory, "`stepkeeper checkpoints latest` prints the newest one", "give a committed step directory"
        )
        self._reader = CheckedReader(self._directory, self._manifest)
        try:
            metadata = self._reader.read_metadata()
        except OSError as error:
            raise DamagedError(f"{error.filename or self._directory}: cannot be read: {error.strerror}") from error
        names = {name: (name,) for name in metadata.state_dict_metadata}  # who loads some keys only needs them
        self._metadata = replace(metadata, planner_data=names)

    def read_metadata(self, *_args: Any) -> Metadata:
        """Return what the step holds, in torch's words."""
        return self._metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002  # torch's signature
        is_coordinator: bool,  # noqa: ARG002, FBT001
        *_args: Any,
        **kwargs: Any,
    ) -> None:
        """Have ranks that read the same begin at different places."""
        rank, together = kwargs.get("rank", 0), dist.is_available() and dist.is_initialized()
        self._turn = rank / max(rank + 1, dist.get_world_size()) if together else 0.0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, and give it the other values.

        Raises:
            DamagedError: some byte is not what the manifest says, or a value names code.
        """
        items = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in items]
        wanted = self._reader.wanted(zip(items, targets, strict=True))
        fill(self._directory, self._manifest, wanted, limits=self._limits, turn=self._turn)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)
        names = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        values = read_objects(self._reader, [item.storage_index.fqn for item in names])
        for item in names:
            planner.load_bytes(item, io.BytesIO(values[item.storage_index.fqn]))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a step directory with a manifest."""
        return (Path(checkpoint_id) / MANIFEST_NAME).is_file()


def read_objects(reader: CheckedReader, names: list[str]) -> dict[str, bytes]:
    """Return the bytes of values that are no tensors: verified, and known to name no code.

    Raises:
        DamagedError: some byte is not what the manifest says, or a value names code.
    """
    known: dict[Extent, bytes] = {}
    found: dict[str, bytes] = {}
    for name, extent, data in reader.read_objects(names):
        if extent not in known:
            check_inert(name, data)
            known[extent] = data
        found[name] = known[extent]
    return found


def check_inert(name: str, data: bytes, *, error: type[Exception] = DamagedError) -> None:
    """Refuse a pickled value that a load would have to execute.

    Raises:
        Exception: of the type `error`: it names code.
    """
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever torch raises for it
        raise error(
            f"{name} is a value that only unpickling can load, which may run code: keep tensors, numbers, text, lists "
            "and dicts in the state, or allow its class with torch.serialization.add_safe_globals"
        ) from problem

"""Conversions that need torch, in a process of their own: `python -m stepkeeper_trainer.store.conversion`.

A checkpoint of DCP becomes one file of `torch.save`; safetensors files become a checkpoint of DCP, as initial weights.
The caller has verified what is read here.  The target is complete or not there.
"""

from __future__ import annotations

import argparse
import mmap
import os
import secrets
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from stepkeeper_trainer.errors import StepkeeperError
from stepkeeper_trainer.formats import safetensors
from stepkeeper_trainer.formats.durable import fsync_directory
from stepkeeper_trainer.load.initial import find_tensors
from stepkeeper_trainer.load.reader import ALONE
from stepkeeper_trainer.store.export import Names, NamesError

TO_TORCH, TO_DCP = "torch", "dcp"


def to_torch(source: Path, target: Path) -> int:
    """Write all tensors and values of a DCP directory into one file; return their number at the top.

    Raises:
        OSError: it cannot be read or written.
    """
    growing = _beside(target)
    try:
        dcp_to_torch_save(source, growing)
        _sync(growing)
        os.rename(growing, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(growing)
    fsync_directory(target.parent)
    found = FileSystemReader(source).read_metadata()
    paths = found.planner_data or {}
    return len({paths.get(name, (name,))[0] for name in found.state_dict_metadata})


def to_dcp(source: Path, target: Path, *, prefix: str, names: Names | None) -> int:
    """Write the tensors of safetensors files into a DCP directory; return their number.

    Raises:
        StepkeeperError: a file is damaged.
        NamesError: a name is not of Hugging Face's Llama.
        OSError: it cannot be read or written.
    """
    growing = _beside(target)
    slots = find_tensors(source)
    try:
        mapped = {path: _map(path) for path in {path for path, _ in slots.values()}}
        state = {}
        for name, (path, slot) in slots.items():
            here = names.from_hf(name) if names is not None else name
            if here is None:
                continue
            tensor = _tensor(mapped[path], slot)
            rows = names.rows_of(name) if names is not None else 0
            state[prefix + here] = _neighbours(name, tensor, rows) if rows else tensor
        state_dict_saver.save(state, checkpoint_id=growing, **ALONE)
        os.rename(growing, target)
    finally:
        shutil.rmtree(growing, ignore_errors=True)  # gone already where all went well
    fsync_directory(target.parent)
    return len(state)


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # tensors keep it open


def _tensor(mapped: mmap.mmap, slot: safetensors.Slot) -> torch.Tensor:
    dtype = getattr(torch, slot.dtype)
    if slot.end == slot.begin:
        return torch.empty(slot.shape, dtype=dtype)
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=slot.end - slot.begin, offset=slot.begin)
    if slot.begin % dtype.itemsize:  # other writers do not align
        data = data.clone()
    return data.view(dtype).view(slot.shape)


def _neighbours(name: str, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a projection with the rows of each head in Meta's order."""
    if tensor.dim() != 2 or tensor.shape[0] % rows:  # noqa: PLR2004 - rows and columns
        raise NamesError(f"{name}: of shape {list(tensor.shape)}, which heads of {rows} rows do not fill")
    heads, columns = tensor.shape[0] // rows, tensor.shape[1]
    return tensor.view(heads, 2, rows // 2, columns).transpose(1, 2).reshape(tensor.shape)


def _beside(target: Path) -> Path:
    if os.path.lexists(target):
        raise FileExistsError(17, "is there already", str(target))
    return target.with_name(f".{target.name}.export-{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> int:
    """Convert; print the number of values."""
    parser = argparse.ArgumentParser(description="Convert a checkpoint (called by `stepkeeper checkpoints export`).")
    parser.add_argument("to", choices=(TO_TORCH, TO_DCP))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--names", default="")
    parser.add_argument("--head-dim", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    target = Path(os.path.abspath(arguments.target))
    try:
        if arguments.to == TO_TORCH:
            count = to_torch(arguments.source, target)
        else:
            names = Names(arguments.names, arguments.head_dim) if arguments.names else None
            count = to_dcp(arguments.source, target, prefix=arguments.prefix, names=names)
    except OSError as error:
        sys.stderr.write(f"{error.filename or target}: {error.strerror}\n")
        return 1
    except (StepkeeperError, NamesError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{count}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Step directories of stock DCP's files, sealed by a manifest as ours are."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash

from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, seal


def entry(path: Path, chunk_bytes: int) -> FileEntry:
    """Return what a manifest says of a file as it is now."""
    data = path.read_bytes()
    chunks = tuple(xxhash.xxh3_128_hexdigest(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes))
    return FileEntry(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data), chunk_bytes=chunk_bytes, chunks=chunks)


def commit(
    directory: Path, *, step: int = 1, save_id: str = "a" * 32, parent: str | None = None, chunk_bytes: int = 64 * 1024
) -> Manifest:
    """Write the manifest of whatever is in a directory."""
    manifest = Manifest(
        step=step,
        tokens=0,
        world_size=1,
        created_at="",
        save_id=save_id,
        parent=parent,
        files={name: entry(directory / name, chunk_bytes) for name in sorted(os.listdir(directory))},
    )
    data = seal(manifest)
    (directory / "MANIFEST.json").write_bytes(data)
    return manifest


def save(directory: Path, state: dict[str, torch.Tensor], *, threads: int = 1, **options: object) -> Manifest:
    """Save by stock DCP in one process, and commit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(directory, thread_count=threads)
        dcp.save(state, storage_writer=writer)  # type: ignore[arg-type]
    return commit(directory, **options)  # type: ignore[arg-type]


def stock_load(directory: Path, state: dict[str, torch.Tensor]) -> None:
    """Load by stock DCP, in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=directory)  # type: ignore[arg-type]

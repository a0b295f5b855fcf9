"""How step directories are called, and `MANIFEST.json`: what a committed one holds, byte for byte.

The manifest is written last and then the directory is renamed: a step directory with a manifest is complete, and
one without is not.  Format 1 stays readable for ever; a newer format is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from stepkeeper_trainer.formats.plain import DecodeError, NewerFormatError, check_format, decode, read_plain

_STEP_NAME = re.compile(r"step_([0-9]{8,})(?:\.([0-9a-f]{8}))?")


def step_name(step: int) -> str:
    """Return the name of the directory of a step, as long as it is not taken.

    >>> step_name(100)
    'step_00000100'
    """
    return f"step_{step:08d}"


def parse_step_name(name: str) -> int | None:
    """Return the step number of a directory name; None if it is no step directory's.

    >>> parse_step_name("step_00000100"), parse_step_name("step_00000100.0a1b2c3d")
    (100, 100)
    >>> parse_step_name(".tmp-step_00000100") is None
    True
    """
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


FORMAT = 1
MANIFEST_NAME = "MANIFEST.json"
MODULES = "modules"  # in `state`: the names of what is a module, the model first
LEFT_OUT = "left_out"  # in `state`: data that the state has never seen, each {"step", "epoch", "consumed", "samples"}
CONFIRMED = "confirmed"  # in `state`: the newest step that was confirmed before the save
PENDING_NAME = "MANIFEST.pending"  # sealed, of a save whose files are on the nodes' own disks yet
CHUNK_BYTES = 16 * 1024 * 1024
_NO_PARTS = frozenset(("", ".", ".."))  # of a plain path: absolute, doubled slashes, and ways out
MANIFEST_BYTES_MAX = 256 * 1024 * 1024  # of a step of 100 TB
CHUNK_BYTES_MAX = 256 * 1024 * 1024  # a reader holds a chunk in memory
_DIGEST_FIELD = re.compile(rb'("manifest_xxh3_128"\s*:\s*")([0-9a-f]{32})(")')


class ManifestError(ValueError):
    """The manifest is missing, torn, of a newer format, or names something it must not."""


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # what a file system and torch can count to


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its size and digests, of the whole and of each chunk (the last may be shorter)."""

    bytes: Count
    xxh3_128: str
    chunk_bytes: Annotated[int, msgspec.Meta(ge=0, le=CHUNK_BYTES_MAX)] = CHUNK_BYTES
    chunks: tuple[str, ...] = ()

    @property
    def lists_chunks(self) -> bool:
        """Whether there is a digest for each chunk; a file without cannot be read by chunks."""
        return self.chunk_bytes > 0 and len(self.chunks) == -(-self.bytes // self.chunk_bytes)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a step directory.  `manifest_xxh3_128` is last, so that it can seal the rest."""

    format: int = FORMAT
    step: Count
    tokens: Count
    world_size: Count
    framework: str = "torch.distributed.checkpoint"
    created_at: str
    save_id: str
    parent: str | None = None
    files: dict[str, FileEntry]
    state: dict[str, Any] = {}
    versions: dict[str, str] = {}
    conditions: dict[str, Any] = {}
    loss: float | None = None
    metrics: dict[str, float] = {}  # whatever else the best step may be chosen by
    manifest_xxh3_128: str = ""


_decoder = msgspec.json.Decoder(Manifest)


def seal(manifest: Manifest) -> bytes:
    """Return the bytes of `MANIFEST.json`: the manifest with the digest of itself filled in.

    The digest is xxh3-128 over the very bytes of the file with the digest's value empty, so a reader
    checks it without knowing how JSON was laid out.
    """
    empty = msgspec.json.encode(msgspec.structs.replace(manifest, manifest_xxh3_128=""))
    digest = xxhash.xxh3_128_hexdigest(empty).encode()
    head, field, tail = empty.rpartition(b'"manifest_xxh3_128":"')
    return head + field + digest + tail


def unseal(data: bytes, *, source: str) -> Manifest:
    """Parse and check the bytes of a `MANIFEST.json`; `source` names it in errors.  Raises ManifestError."""
    try:
        check_format(data, newest=FORMAT)  # a newer one may be sealed otherwise
    except NewerFormatError as error:
        raise ManifestError(f"{source}: {error}") from error
    except DecodeError:
        pass  # torn or damaged: said below
    last = None
    for match in _DIGEST_FIELD.finditer(data):
        last = match
    if last is None:
        raise ManifestError(f"{source}: torn: it has no digest of its own at its end")
    empty = data[: last.end(1)] + data[last.start(3) :]
    if xxhash.xxh3_128_hexdigest(empty).encode() != last.group(2):
        raise ManifestError(f"{source}: its content does not match its own digest: it was changed or is damaged")
    try:
        manifest = decode(_decoder, data)
    except DecodeError as error:
        raise ManifestError(f"{source}: not a manifest: {error}") from error
    if manifest.format != FORMAT:
        raise ManifestError(f"{source}: format {manifest.format}: there is none")
    for name in manifest.files:
        check_relative(name, source=source)
    return manifest


def read_manifest(directory: Path, *, within: Path | None = None) -> Manifest:
    """Read and check `MANIFEST.json` of a step directory, which may be known to lie `within` another one.

    Raises:
        ManifestError: it is missing, torn, of a newer format, or leads outside.
        OSError: it is there and cannot be read, or is too large.
    """
    path = directory / MANIFEST_NAME
    try:
        return unseal(read_plain(path, MANIFEST_BYTES_MAX, within=within or directory), source=str(path))
    except FileNotFoundError:
        raise ManifestError(f"{path}: missing: the save was never committed") from None


def check_relative(name: str, *, source: str) -> None:
    """Refuse a file name that could leave the step directory.

    Raises:
        ManifestError: the name is absolute, has a `..`, or is no plain relative path.
    """
    if "\0" in name or not _NO_PARTS.isdisjoint(name.split("/")):
        raise ManifestError(f"{source}: names {name!r}, which is not a plain path inside the step directory")

"""The model of a step directory as safetensors files, as model hubs keep them: no torch, no GPU, bounded memory.

Pieces of a tensor that several ranks wrote are put together block by block; every chunk is compared with the
manifest before a byte of it is used.  The output is complete or not there: it grows in a directory of its own,
is made durable, and gets its name last.

Names of Llama-family models: those of a training script's own model, and Hugging Face's.  Needs no torch.

Hugging Face's rotary embedding turns the two halves of a head against each other, Meta's turns neighbours: the rows of
the query and key projections of each head stand in another order there.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import math
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from stepkeeper_trainer.formats import safetensors
from stepkeeper_trainer.formats.durable import fsync_directory, make_directories, naming, write_all
from stepkeeper_trainer.formats.manifest import Manifest, ManifestError, read_manifest
from stepkeeper_trainer.formats.metadata import (
    METADATA_BYTES_MAX,
    METADATA_NAME,
    Contents,
    MetadataError,
    TensorEntry,
    check_coverage,
    parse_guarded,
    parse_of,
)
from stepkeeper_trainer.formats.stored import BLOCK_BYTES, PlainBytes, StepBytes, StoredError, tensor_blocks

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_COMMON = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
}


def _projections(below: str) -> dict[str, str]:
    return {f"layers.{{}}.attention.{below}w{p}.weight": f"model.layers.{{}}.self_attn.{p}_proj.weight" for p in "qkv"}


STYLES = {
    "torchtitan": {**_COMMON, **_projections("qkv_linear."), "lm_head.weight": "lm_head.weight"},
    "meta": {**_COMMON, **_projections(""), "output.weight": "lm_head.weight"},
}
"""Names of a style to Hugging Face's.  `torchtitan`: of 0.3; `meta`: Meta's, and torchtitan's before."""
_TURNED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.weight")
_COMPUTED = re.compile(r"(?:.*\.)?(?:rope\.freqs|freqs_cis|rotary_emb\.inv_freq)")  # from the configuration alone


class NamesError(ValueError):
    """A name is not of the style, or the head's size is not known."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one style, and the rows of a head."""

    style: str
    head_dim: int

    def to_hf(self, name: str) -> str | None:
        """Return Hugging Face's name; None for a value that is computed from the configuration.

        >>> Names("meta", 64).to_hf("layers.3.attention.wq.weight")
        'model.layers.3.self_attn.q_proj.weight'

        Raises:
            NamesError: the style has no such name.
        """
        return _renamed(name, STYLES[self.style], self.style)

    def from_hf(self, name: str) -> str | None:
        """Return the style's name of one of Hugging Face's; otherwise as `to_hf`.

        >>> Names("meta", 64).from_hf("lm_head.weight")
        'output.weight'
        """
        return _renamed(name, {theirs: ours for ours, theirs in STYLES[self.style].items()}, "Hugging Face's Llama")

    def rows_of(self, hf_name: str) -> int:
        """Return how many rows of a tensor are put in another order together; 0: none."""
        return self.head_dim if _TURNED.fullmatch(hf_name) else 0


def _renamed(name: str, names: dict[str, str], style: str) -> str | None:
    if _COMPUTED.fullmatch(name):
        return None
    layer = _LAYER.search(name)
    found = names.get(_LAYER.sub("{}", name, count=1))
    if found is None:
        raise NamesError(f"{name}: the {style} style has no such name: choose another --names, or --prefix")
    return found.format(layer[0]) if layer else found


def head_dim_of(config: Path) -> int:
    """Return the rows of a head, as a `config.json` of Hugging Face says.

    Raises:
        NamesError: it does not say it.
        OSError: it cannot be read.
    """
    try:
        said = json.loads(config.read_bytes())
        rows = said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"]
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise NamesError(f"{config}: has no hidden_size and num_attention_heads: name --head-dim") from error
    return check_head_dim(rows)


def check_head_dim(rows: object) -> int:
    """Return a number of rows that a rotary embedding can have.  Raises NamesError."""
    if type(rows) is not int or rows <= 0 or rows % 2:
        raise NamesError(f"a head of {rows!r} rows has no two halves: name --head-dim")
    return rows


def halves(block: bytes | bytearray, row_bytes: int, rows: int) -> bytearray:
    """Return whole heads with their rows in Hugging Face's order: the even ones first.

    >>> halves(bytes([0, 1, 2, 3, 10, 11, 12, 13]), 1, 4).hex()
    '000201030a0c0b0d'
    """
    result = bytearray(len(block))
    view, out = memoryview(block), memoryview(result)
    for head in range(0, len(block), rows * row_bytes):
        for place in range(rows):
            row = 2 * place if place < rows // 2 else 2 * (place - rows // 2) + 1
            at, to = head + row * row_bytes, head + place * row_bytes
            out[to : to + row_bytes] = view[at : at + row_bytes]
    return result


PREFIX = "model."
MODELS = ("model", "state_dict", "module")  # of FSDP scripts and Accelerate, Lightning, DDP
# what stands beside a model whose names have no prefix
TRAINING = frozenset(
    ("optimizer", "optim", "state", "param_groups", "lr_scheduler", "scheduler", "dataloader", "train_state", "rng")
)
SHARD_BYTES_MAX = 5_000_000_000  # as `save_pretrained` has it
CACHED_NUMBERS = 64 * 1024  # that are rounded at once
SPARE_BYTES = 64 * 1024 * 1024  # left free on the target
_COPY_BYTES = 1024 * 1024
_TARGETS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPES = {**_TARGETS, **{name: name for name in _TARGETS.values()}}


class ExportError(Exception):
    """What was asked for cannot be done; nothing was left at the target."""


class DamagedStepError(ExportError):
    """The step directory is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the output."""

    name: str
    entry: TensorEntry
    dtype: str  # of the output
    head_rows: int = 0  # that are put in another order together

    @property
    def bytes(self) -> int:
        """How many bytes it takes in the output."""
        return math.prod(self.entry.size) * safetensors.ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an export writes: the tensors of each file, in the order of their data."""

    directory: Path
    manifest: Manifest | None  # None: a DCP directory of another program, which has no digests
    shards: tuple[tuple[Item, ...], ...]
    tied: Mapping[str, str]  # names that are left out, each with the name that their tensor has here
    left_out: Mapping[str, int]  # what else the checkpoint holds, by the first part of its names: how many values

    def open(self) -> StepBytes:
        """Open the checkpoint.  Raises OSError."""
        return PlainBytes(self.directory) if self.manifest is None else StepBytes(self.directory, self.manifest)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(item.bytes for shard in self.shards for item in shard)


@dataclass(frozen=True, slots=True)
class Written:
    """One file of the output."""

    name: str
    bytes: int
    xxh3_128: str


def plan_export(
    directory: Path,
    *,
    prefix: str = PREFIX,
    dtype: str | None = None,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    keep_tied: bool = False,
    names: Names | None = None,
    plain: bool = False,
) -> Plan:
    """Find out what the export of a step directory writes.  Reads its manifest and `.metadata` only.

    Args:
        directory: a step directory.
        prefix: of the tensors to export; it is cut off their names.
        dtype: for floating-point tensors, by its name in `DTYPES`; None leaves each as it is.
        shard_bytes_max: of one file; a larger tensor gets a file of its own.
        keep_tied: write tensors that the model has under several names under each of them; else under the first,
            as model hubs have it.
        names: of the model, which are turned into Hugging Face's.
        plain: it is a DCP directory of another program, without a manifest; the caller has verified it.

    Raises:
        DamagedStepError: the step directory is torn or damaged.
        ExportError: there is no such tensor, or one that the format cannot hold.
        OSError: it cannot be read.
    """
    try:
        manifest = None if plain else read_manifest(directory)
        contents = _plain_contents(directory) if manifest is None else _contents(directory, manifest)
    except (ManifestError, MetadataError, StoredError) as error:
        raise DamagedStepError(str(error)) from error
    chosen = {name: entry for name, entry in contents.tensors.items() if name.startswith(prefix) and name != prefix}
    if not prefix:
        chosen = {name: entry for name, entry in chosen.items() if _first(name) not in TRAINING}
    if not chosen:
        begins = sorted({name.partition(".")[0] for name in contents.tensors})
        raise ExportError(f"{directory}: no tensor's name begins with {prefix!r}; they begin with {', '.join(begins)}")
    left_out = Counter(_first(name) for name in (*contents.tensors, *contents.objects) if name not in chosen)
    tied = {} if keep_tied or manifest is None else _tied(manifest, chosen, prefix)
    chosen = {name: entry for name, entry in chosen.items() if name.removeprefix(prefix) not in tied}
    sizes = _sizes(directory) if manifest is None else {name: file.bytes for name, file in manifest.files.items()}
    if problems := check_coverage(Contents(chosen, {}, ()), sizes):
        raise DamagedStepError(f"{directory}: {'; '.join(problems)}")
    target = DTYPES[dtype] if dtype is not None else None
    items = []
    for name, entry in chosen.items():
        if entry.dtype not in safetensors.KIND_OF:
            raise ExportError(f"{directory}: {name} is {entry.dtype}, for which safetensors has no name")
        becomes = target if target is not None and entry.dtype in safetensors.FLOATS else entry.dtype
        items += _named(name.removeprefix(prefix), entry, becomes, names)
    return Plan(directory, manifest, tuple(_shards(items, shard_bytes_max)), tied, dict(sorted(left_out.items())))


def _first(name: str) -> str:
    return name.partition(".")[0]


def _named(name: str, entry: TensorEntry, dtype: str, names: Names | None) -> list[Item]:
    """Return a tensor under its name in the output; nothing where a model computes it itself."""
    if names is None:
        return [Item(name, entry, dtype)]
    try:
        becomes = names.to_hf(name)
    except NamesError as error:
        raise ExportError(str(error)) from error
    rows = names.rows_of(becomes) if becomes is not None else 0
    if rows and (len(entry.size) != 2 or entry.size[0] % rows):  # noqa: PLR2004 - rows and columns
        raise ExportError(
            f"{name}: of shape {list(entry.size)}, which heads of {rows} rows do not fill: name --head-dim"
        )
    return [Item(becomes, entry, dtype, rows)] if becomes is not None else []


def _tied(manifest: Manifest, chosen: dict[str, TensorEntry], prefix: str) -> dict[str, str]:
    """Return names that can be left out, since the tensor is there under another."""
    told = manifest.state.get("tied")
    if prefix != PREFIX or not isinstance(told, dict):
        return {}
    return {
        name: first
        for name, first in told.items()
        if isinstance(first, str) and first not in told and {prefix + name, prefix + first} <= chosen.keys()
    }


def _contents(directory: Path, manifest: Manifest) -> Contents:
    entry = manifest.files.get(METADATA_NAME)
    if entry is None:
        raise StoredError(f"{directory}: has no {METADATA_NAME}: not a directory of torch.distributed.checkpoint")
    if entry.bytes > METADATA_BYTES_MAX:
        raise StoredError(f"{directory / METADATA_NAME}: {entry.bytes} bytes is more than it can have")
    with StepBytes(directory, manifest) as source:
        return parse_of(directory, source.read(METADATA_NAME, 0, entry.bytes))


def _plain_contents(directory: Path) -> Contents:
    with PlainBytes(directory) as source:
        size = source.sizes.get(METADATA_NAME)
        if size is None:
            raise StoredError(f"{directory}: has no {METADATA_NAME}: not a directory of torch.distributed.checkpoint")
        if size > METADATA_BYTES_MAX:
            raise StoredError(f"{directory / METADATA_NAME}: {size} bytes is more than it can have")
        return parse_guarded(source.read(METADATA_NAME, 0, size))


def usual_prefix(directory: Path) -> str:
    """Return what the names of a model begin with in a DCP directory of another program; empty: nothing.

    Raises:
        DamagedStepError: it is torn or damaged.
        OSError: it cannot be read.
    """
    try:
        firsts = {_first(name) for name in _plain_contents(directory).tensors}
    except (MetadataError, StoredError) as error:
        raise DamagedStepError(str(error)) from error
    return next((f"{name}." for name in MODELS if name in firsts and firsts <= {name, *TRAINING}), "")


def _sizes(directory: Path) -> dict[str, int]:
    with PlainBytes(directory) as source:
        return source.sizes


def _shards(items: list[Item], bytes_max: int) -> Iterator[tuple[Item, ...]]:
    """Fill one file after the other, in the order of the model's tensors."""
    shard: list[Item] = []
    filled = 0
    for item in items:
        if shard and filled + item.bytes > bytes_max:
            yield _aligned(shard)
            shard, filled = [], 0
        shard.append(item)
        filled += item.bytes
    yield _aligned(shard)


def _aligned(shard: list[Item]) -> tuple[Item, ...]:
    """Put wider numbers first, so that each tensor is aligned."""
    return tuple(sorted(shard, key=lambda item: (-safetensors.ITEM_BYTES[item.dtype], item.name)))


def export(
    plan: Plan,
    target: Path,
    *,
    copies: Sequence[Path] = (),
    progress: Callable[[int], None] = lambda _bytes: None,
) -> list[Written]:
    """Write the files below `target`, which must not exist (an empty directory may).

    Args:
        plan: what to write.
        target: where; it gets its name when all is written and durable.
        copies: files to put beside the tensors, such as the model's `config.json`.
        progress: called with the number of bytes each time some are written.

    Raises:
        DamagedStepError: a chunk of the step directory is not what its manifest says.
        ExportError: the target is taken, or has no room.
        OSError: it cannot be read or written.
    """
    target = Path(os.path.abspath(target))
    if os.path.lexists(target) and not (target.is_dir() and not target.is_symlink() and not os.listdir(target)):
        raise ExportError(f"{target}: is there already: name a directory that is not")
    _check_copies(plan, copies)
    make_directories(target.parent)
    _clear_leftovers(target)
    needed = plan.bytes + sum(os.path.getsize(path) for path in copies) + SPARE_BYTES
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise ExportError(f"{target.parent}: {free} bytes are free, {needed} are needed")
    with _growing(target) as directory:
        written = list(_write_files(plan, directory, progress))
        for path in copies:
            with open(path, "rb") as file:
                blocks = iter(partial(file.read, _COPY_BYTES), b"")
                written.append(_write_new(directory / path.name, blocks, progress))
        fsync_directory(directory)
        os.rename(directory, target)
    fsync_directory(target.parent)
    return written


def _check_copies(plan: Plan, copies: Sequence[Path]) -> None:
    taken = {*homes(plan), safetensors.INDEX_NAME}
    for path in copies:
        if not path.is_file():
            raise ExportError(f"{path}: is no file: name the files to copy, such as config.json")
        if path.name in taken:
            raise ExportError(f"{path}: {path.name} is there already: copy files of other names, each once")
        taken.add(path.name)


@contextmanager
def _growing(target: Path) -> Iterator[Path]:
    """Make a directory beside the target; it is removed unless it got the target's name."""
    directory = target.parent / f".{target.name}.export-{secrets.token_hex(4)}"
    os.mkdir(directory)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # no locks here: leftovers stay then, and harm nothing
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # gone already where all went well
        os.close(descriptor)


def _clear_leftovers(target: Path) -> None:
    """Remove what killed exports to the same target have left; living ones hold a lock."""
    leftover = re.compile(rf"\.{re.escape(target.name)}\.export-[0-9a-f]{{8}}")
    for path in target.parent.iterdir():
        if leftover.fullmatch(path.name) is None:
            continue
        with suppress(OSError):  # somebody writes it, or it is not ours: it stays
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _write_files(plan: Plan, directory: Path, progress: Callable[[int], None]) -> Iterator[Written]:
    count = len(plan.shards)
    about = {"format": "pt"}
    if plan.manifest is not None:
        about |= {"stepkeeper.step": str(plan.manifest.step), "stepkeeper.save_id": plan.manifest.save_id}
    homes = {}
    try:
        with plan.open() as source:
            for number, shard in enumerate(plan.shards, 1):
                name = safetensors.shard_name(number, count)
                header = safetensors.pack_header([(item.name, item.dtype, item.entry.size) for item in shard], about)
                yield _write_new(directory / name, _shard_bytes(source, header, shard), progress)
                homes.update(dict.fromkeys((item.name for item in shard), name))
    except StoredError as error:
        raise DamagedStepError(str(error)) from error
    except safetensors.SafetensorsError as error:
        raise ExportError(str(error)) from error
    if count > 1:
        index = safetensors.pack_index(homes, plan.bytes)
        yield _write_new(directory / safetensors.INDEX_NAME, [index], progress)


def _write_new(
    path: Path, blocks: Iterator[bytes | bytearray] | list[bytes], progress: Callable[[int], None]
) -> Written:
    """Write a new file front to back and make it durable."""
    digest = xxhash.xxh3_128()
    done = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for block in blocks:
            with naming(path):
                write_all(descriptor, block)  # type: ignore[arg-type]  # a bytearray serves as well
            digest.update(block)
            done += len(block)
            progress(len(block))
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(path.name, done, digest.hexdigest())


def _shard_bytes(source: StepBytes, header: bytes, shard: Sequence[Item]) -> Iterator[bytes | bytearray]:
    yield header
    for item in shard:
        convert = _converter(item.entry.dtype, item.dtype)
        row_bytes = item.entry.size[-1] * safetensors.ITEM_BYTES[item.entry.dtype] if item.head_rows else 0
        head_bytes = item.head_rows * row_bytes
        size = max(1, BLOCK_BYTES // head_bytes) * head_bytes if head_bytes else BLOCK_BYTES
        try:
            for block in tensor_blocks(source, item.entry, block_bytes=size):
                yield convert(halves(block, row_bytes, item.head_rows) if head_bytes else block)
        except StoredError as error:
            raise StoredError(f"{item.name}: {error}") from error


# Another type of numbers ---------------------------------------------------------------------------------------------


def _converter(source: str, target: str) -> Callable[[bytearray], bytes | bytearray]:
    """Return how to turn blocks of one type into another: by NumPy where it is there, which is ten times as fast."""
    if source == target:
        return lambda block: block
    if (source, target) == ("float32", "bfloat16") and importlib.util.find_spec("numpy") is not None:
        return _bfloat16_by_numpy
    return lambda block: safetensors.convert(block, source, target)


def _bfloat16_by_numpy(block: bytearray) -> bytearray:
    numpy = importlib.import_module("numpy")  # not imported above: the command line works without
    singles = numpy.frombuffer(block, dtype="<u4")
    result = bytearray(len(block) // 2)
    halves = numpy.frombuffer(result, dtype="<u2")
    for at in range(0, len(singles), CACHED_NUMBERS):
        bits = singles[at : at + CACHED_NUMBERS]
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        rounded[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0  # noqa: PLR2004 - infinity: above it is no number
        halves[at : at + CACHED_NUMBERS] = rounded
    return result


def homes(plan: Plan) -> Mapping[str, Sequence[Item]]:
    """Return the tensors of each file of a plan."""
    count = len(plan.shards)
    return {safetensors.shard_name(number, count): shard for number, shard in enumerate(plan.shards, 1)}

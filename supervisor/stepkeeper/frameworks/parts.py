"""What adapters have in common: parts of a checkpoint are required, opened, and looked into without their tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from stepkeeper.frameworks import archives, inert
from stepkeeper.frameworks.archives import ArchiveError, Record
from stepkeeper.frameworks.framework import Contents, Kind, Part, Step
from stepkeeper.frameworks.tree import ReadError
from stepkeeper_trainer.formats import metadata, safetensors
from stepkeeper_trainer.formats.metadata import Extent

NAMES_SHOWN = 5
LATER_S = 5.0  # clocks of nodes differ
METADATA_BYTES_MAX = 256 * 1024 * 1024
_DISTCP = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")
_PICKLE_BEGINS = b"\x80"  # torch.save before 1.6 or with the old format, and plain pickles
_TRANSFORMED = "is compressed: a deep verification follows its frames, and compares no bytes"


def add_plain(contents: Contents, name: str) -> bool:
    """Add a file that has no structure of its own; return whether it is there."""
    if name not in contents.tree:
        contents.problem(f"{name}: {contents.tree.why_missing(name)}")
        return False
    contents.parts.setdefault(name, Part(name, Kind.PLAIN))
    return True


def add_json(contents: Contents, name: str) -> Any:
    """Add a JSON file and return what it holds; None where it is missing or damaged, which is a problem then."""
    try:
        value = contents.tree.json(name)
    except ReadError as error:
        contents.problem(str(error))
        return None
    contents.parts.setdefault(name, Part(name, Kind.PLAIN))
    return value


def add_archive(contents: Contents, name: str) -> bool:
    """Add a file of `torch.save`, by the end and the directory of its archive; return whether it can be read."""

    def look(descriptor: int) -> bool:
        if _is_old(descriptor):
            contents.parts[name] = Part(name, Kind.PLAIN)
            contents.note(f"{name}: in a format without checksums: only its names were looked at")
            _read_old(contents, name, descriptor)
        else:
            archives.read_directory(descriptor, 0, os.fstat(descriptor).st_size)
            contents.parts[name] = Part(name, Kind.ARCHIVE)
        return True

    return bool(_read(contents, name, look))


def _read(contents: Contents, name: str, look: Callable[[int], Any]) -> Any:
    """Return what is seen in a file; None where it cannot be read, which is a problem of the checkpoint then."""
    try:
        descriptor = contents.tree.descriptor(name)
    except ReadError as error:
        contents.problem(str(error))
        return None
    try:
        return look(descriptor)
    except (ArchiveError, inert.InertError, OSError) as error:
        contents.problem(f"{name}: {error}")
        return None
    finally:
        os.close(descriptor)


def _is_old(descriptor: int) -> bool:
    return os.pread(descriptor, 1, 0) == _PICKLE_BEGINS


def _read_old(contents: Contents, name: str, descriptor: int) -> Any:
    found = inert.read_old(os.pread(descriptor, inert.PICKLE_BYTES_MAX, 0))
    report_names(contents, name, found)
    return found.value


def read_pickle(contents: Contents, name: str) -> Any:
    """Return what `data.pkl` of an archive of `torch.save` says, as inert data; None where it cannot be read.

    Names of code become notes; names that run programs become problems.
    """

    def look(descriptor: int) -> Any:
        if _is_old(descriptor):
            return _read_old(contents, name, descriptor)
        records = archives.read_directory(descriptor, 0, os.fstat(descriptor).st_size)
        found = inert.read(_data_pickle(descriptor, records))
        report_names(contents, name, found)
        return found.value

    return _read(contents, name, look)


def _data_pickle(descriptor: int, records: list[Record]) -> bytes:
    record = next((record for record in records if record.name == "data.pkl"), None)
    if record is None:
        raise ArchiveError("is an archive without data.pkl")
    if record.length > inert.PICKLE_BYTES_MAX:
        raise inert.InertError(f"its pickle has {record.length} bytes, more than {inert.PICKLE_BYTES_MAX}: not read")
    return os.pread(descriptor, record.length, record.start)


def report_names(contents: Contents, name: str, found: inert.Read) -> None:
    """Report what a pickle names besides plain data."""
    if found.hostile:
        contents.problem(
            f"{name}: names code that runs programs: {some(map(str, found.hostile))}: nothing was executed"
        )
    elif found.refused:
        contents.note(f"{name}: names classes of its own, which were not loaded: {some(map(str, found.refused))}")


def some(names: Iterable[str]) -> str:
    """Return the first of many names."""
    listed = list(names)
    shown = ", ".join(listed[:NAMES_SHOWN]) or "none"
    return shown if len(listed) <= NAMES_SHOWN else f"{shown} and {len(listed) - NAMES_SHOWN} more"


def add_dcp(contents: Contents, directory: str = "") -> frozenset[str]:
    """Add a directory that torch.distributed.checkpoint wrote; return the names of its tensors and objects.

    Every piece of every tensor must have a place in a file that is long enough, and the pieces must cover the tensor.
    """
    tree = contents.tree
    below = f"{directory}/" if directory else ""
    name = f"{below}{metadata.METADATA_NAME}"
    try:
        found = metadata.parse_guarded(tree.read(name, METADATA_BYTES_MAX))
    except ReadError as error:
        contents.problem(f"{error}; DCP writes it last" if name not in tree else str(error))
        return frozenset()
    except (metadata.MetadataError, OSError) as error:
        contents.problem(f"{name}: {error}")
        return frozenset()
    contents.parts[name] = Part(name, Kind.PLAIN)
    sizes = {file[len(below) :]: status.st_size for file, status in tree.files.items() if file.startswith(below)}
    for problem in metadata.check_coverage(found, sizes):
        contents.problem(f"{below}{problem}")
    extents = {extent for tensor in found.tensors.values() for piece in tensor.pieces if (extent := piece.extent)}
    extents.update(found.unclaimed, (extent for extent in found.objects.values() if extent))
    by_file = _ranges(contents, below, extents)
    for file, ranges in by_file.items():
        if file in sizes:
            frames = sorted((each.start, each.length) for each in extents if each.zstd and each.file == file)
            part = Part(f"{below}{file}", Kind.ITEMS, tuple(sorted(ranges)), tuple(frames))
            contents.parts[part.name] = part
    _note_younger(contents, name, [f"{below}{file}" for file in by_file if file in sizes])
    orphans = [file for file in sizes if _DISTCP.fullmatch(file) and file not in by_file]
    if orphans:
        contents.note(f"{below}{some(sorted(orphans))}: no part of this checkpoint: left from a save before it")
    writers = {int(match[1]) for file in by_file if (match := _DISTCP.fullmatch(file))}
    if writers and contents.world_size is None:
        contents.world_size = max(writers) + 1
    return frozenset((*found.tensors, *found.objects))


def _ranges(contents: Contents, below: str, extents: set[Extent]) -> dict[str, list[tuple[int, int]]]:
    """Return the items of each file; of a compressed one, none."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for extent in extents:
        ranges = by_file.setdefault(extent.file, [])
        if extent.transformed:
            contents.note(f"{below}{extent.file}: {_TRANSFORMED}")
        else:
            ranges.append((extent.start, extent.length))
    return by_file


def _note_younger(contents: Contents, metadata_name: str, files: list[str]) -> None:
    """Note files that were changed after `.metadata`: without digests of before, nothing shows what that was."""
    written_at = contents.tree.files[metadata_name].st_mtime
    younger = [file for file in files if contents.tree.files[file].st_mtime > written_at + LATER_S]
    if younger:
        contents.note(
            f"{some(sorted(younger))}: changed after {metadata_name}, which DCP writes last: copied without its times, "
            "or the rest of a save over it that died"
        )


def add_safetensors(contents: Contents, name: str) -> frozenset[str]:
    """Add a safetensors file: its header must cover it to the last byte; return the names of its tensors."""
    try:
        os.close(contents.tree.descriptor(name))  # a link or a pipe is refused with its reason
        slots, _ = safetensors.read_header(contents.tree.root / name, within=contents.tree.root)
    except (ReadError, OSError) as error:
        contents.problem(str(error))
        return frozenset()
    except safetensors.SafetensorsError as error:
        contents.problem(f"{name}: {str(error).removeprefix(f'{contents.tree.root / name}: ')}")
        return frozenset()
    contents.parts[name] = Part(name, Kind.SAFETENSORS)
    return frozenset(slots)


def add_indexed(contents: Contents, index: str) -> None:
    """Add a sharded model by its index: each file must be there and hold the weights that the index says."""
    document = add_json(contents, index)
    if document is None:
        return
    weights = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weights, dict) or not weights:
        contents.problem(f"{index}: has no weight_map")
        return
    below = index.rpartition("/")[0]
    by_file: dict[str, set[str]] = {}
    for weight, file in weights.items():
        if not isinstance(file, str) or file != os.path.basename(file) or file in {"", ".", ".."}:
            contents.problem(f"{index}: names {str(file)[:80]!r}, which is no file beside it")
            return
        by_file.setdefault(file, set()).add(weight)
    for file, wanted in sorted(by_file.items()):
        path = f"{below}/{file}" if below else file
        if not file.endswith(".safetensors"):
            add_archive(contents, path)
        elif path not in contents.tree:
            contents.problem(f"{path}: {contents.tree.why_missing(path)}, and {index} names it")
        elif (there := add_safetensors(contents, path)) and (missing := wanted - there):
            contents.problem(f"{path}: lacks {some(sorted(missing))}, which {index} says it holds")


def add_weights(contents: Contents, *, directory: str = "", stems: tuple[str, ...] = ("model",)) -> bool:
    """Add a model's weights in any of the layouts of Hugging Face; return whether there are any."""
    below = f"{directory}/" if directory else ""
    for stem in stems:
        for suffix in ("safetensors", "bin"):
            single = f"{below}{stem}.{suffix}"
            index = f"{single}.index.json"
            if index in contents.tree:
                add_indexed(contents, index)
                return True
            if single in contents.tree or single in contents.tree.odd:
                if suffix == "bin":
                    add_archive(contents, single)
                else:
                    add_safetensors(contents, single)
                return True
    return False


def names_beside(neighbour: Step | None, directory: str = "") -> frozenset[str]:
    """Return the names in the checkpoint beside one, or in its directory; none where it cannot be listed."""
    try:
        return frozenset(os.listdir(neighbour.path / directory)) if neighbour is not None else frozenset()
    except OSError:
        return frozenset()  # removed meanwhile, or of another user


def require_as_beside(contents: Contents, neighbour: Step | None, wanted: Iterable[str], found: Iterable[str]) -> None:
    """Require what the checkpoint beside has: the framework writes the same files at each save."""
    missing = sorted(set(wanted).difference(found))
    if missing and neighbour is not None:
        contents.problem(f"{some(missing)}: missing; {neighbour.path.name} beside it has it")


def require_ranks(contents: Contents, what: str, ranks: set[int], world_size: int | None) -> None:
    """Require a file of each rank: of so many ranks as are known, else of as many as the highest one shows."""
    expected = world_size if world_size is not None else max(ranks, default=-1) + 1
    missing = sorted(set(range(expected)) - ranks)
    if missing:
        shown = some(map(str, missing))
        contents.problem(f"{what}: missing of rank {shown} of {expected}")
    contents.world_size = max(expected, contents.world_size or 0) or None

"""One thread of a load: reads chunks, has them checked, and copies what is wanted out of them."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.items import ItemError
from stepkeeper_trainer.loading.planning import ChunkTask, RowsTask, Task, WholeTask
from stepkeeper_trainer.loading.sources import Source, by_chunk, open_source
from stepkeeper_trainer.loading.tensors import copy_box, copy_bytes, load_plain, strided

if TYPE_CHECKING:
    from stepkeeper_trainer.loading.shared import Load
    from stepkeeper_trainer.loading.wanted import Wanted


class Worker:
    """One thread's buffer and open file."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = bytearray()
        self._file: Source | None = None

    def close(self) -> None:
        """Close the file that was read last."""
        if self._file is not None:
            self._file.close()

    def carry_out(self, task: Task) -> None:
        """Read what a task names, and put it where it goes.

        Raises:
            DamagedError: some byte is not what the manifest says, or cannot be read.
        """
        match task:
            case ChunkTask():
                source = self._open(task.file)
                needed = source.entry.chunk_bytes
            case RowsTask(item=item):
                source = self._open(item.file)
                needed = 2 * source.entry.chunk_bytes + item.length // max(1, item.sizes[0])
            case WholeTask(item=item):
                source = self._open(item.file)
                needed = source.entry.chunk_bytes + 3 * item.length
        budget = self._load.budget
        budget.take(needed, self._load.failed)
        try:
            match task:
                case ChunkTask():
                    self._chunk_task(task, source)
                case RowsTask():
                    self._rows_task(task, source)
                case WholeTask():
                    self._whole_task(task.item, source)
        finally:
            budget.give(needed)

    def _open(self, file: str) -> Source:
        if self._file is None or self._file.name != file:
            self.close()
            self._file = None
            self._file = open_source(self._load.directory, self._load.manifest, file)
            self._file.name = file
        return self._file

    def _checked(self, source: Source, index: int) -> memoryview:
        """Read a chunk and check it; the view is good until the next one."""
        size = min(source.entry.chunk_bytes, source.entry.bytes - index * source.entry.chunk_bytes)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        source.read_chunk(index, view)
        self._load.count(size)
        return view

    def _chunk_task(self, task: ChunkTask, source: Source) -> None:
        view = self._checked(source, task.index)
        base = task.index * source.entry.chunk_bytes
        for at, expected in task.heads:
            if view[at - base : at - base + len(expected)] != expected:
                raise DamagedError(f"{source.path}: byte {at} and after changed while they were read")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        for run in task.runs:
            copy_bytes(address + run.start - base, view[run.start - base :], run.length, run.target)
        for item in task.inside:
            archive = view[item.start - base : item.end - base]
            try:
                layout = self._load.layouts.of(item, archive)
            except ItemError:
                copy_box(load_plain(archive, item, source.path), item)
                continue
            run_of = item.run() if layout.contiguous and item.takes_bytes() else None
            if run_of is not None:
                at = layout.head_bytes + run_of[0]
                copy_bytes(address + item.start - base + at, archive[at:], run_of[1], item.target)
            else:
                data = archive[layout.head_bytes : layout.head_bytes + layout.storage_bytes]
                copy_box(strided(bytearray(data), layout, item), item)

    def _rows_task(self, task: RowsTask, source: Source) -> None:
        """Go through the rows that are wanted, chunk by chunk; what is left of a row waits for the next chunk."""
        item, chunk_bytes = task.item, source.entry.chunk_bytes
        rows = math.prod(item.sizes[1:])
        row_bytes = rows * item.dtype.itemsize
        data_at = item.start + task.layout.head_bytes
        begin = data_at + item.box_offsets[0] * row_bytes
        end = begin + item.box_sizes[0] * row_bytes
        heads = {index for index, _, _ in by_chunk(item.start, data_at, chunk_bytes)}
        data = {index: (lo, hi) for index, lo, hi in by_chunk(begin, end, chunk_bytes)}
        rest, done = bytearray(), 0
        for index in sorted(heads | data.keys()):
            view, base = self._checked(source, index), index * chunk_bytes
            for at, stop in ((lo, hi) for i, lo, hi in by_chunk(item.start, data_at, chunk_bytes) if i == index):
                if view[at - base : stop - base] != task.head[at - item.start : stop - item.start]:
                    raise DamagedError(f"{source.path}: byte {at} and after changed while they were read")
            if index not in data:
                continue
            lo, hi = data[index]
            rest += view[lo - base : hi - base]
            count = len(rest) // row_bytes
            if not count:
                continue
            numbers = torch.frombuffer(rest, dtype=item.dtype, count=count * rows).view(count, *item.sizes[1:])
            for dim in range(1, len(item.sizes)):
                numbers = numbers.narrow(dim, item.box_offsets[dim], item.box_sizes[dim])
            item.target.narrow(0, done, count).copy_(numbers)
            done += count
            rest = rest[count * row_bytes :]

    def _whole_task(self, item: Wanted, source: Source) -> None:
        archive = bytearray()
        for index, lo, hi in by_chunk(item.start, item.end, source.entry.chunk_bytes):
            base = index * source.entry.chunk_bytes
            archive += self._checked(source, index)[lo - base : hi - base]
        try:
            layout = self._load.layouts.of(item, archive)
        except ItemError:
            copy_box(load_plain(archive, item, source.path), item)
            return
        data = archive[layout.head_bytes : layout.head_bytes + layout.storage_bytes]
        copy_box(strided(data, layout, item), item)

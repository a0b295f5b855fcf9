"""`StepkeeperWriter`: `torch.distributed.checkpoint.save` into a step directory that is committed as ours are.

torch's planner says who writes what.  Each rank writes its files and its report into a save in flight; rank 0 completes
and commits it by the code that every save uses: until its one rename nothing counts.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import time
import weakref
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stepkeeper_trainer.buffers import crc32, put_crc, view_bytes
from stepkeeper_trainer.coordinate import groups
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.errors import ResumeError, RunDirectoryError, SaveError, StateError, UsageError
from stepkeeper_trainer.formats import lease as leases
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.steps import StepDirectory, current_lineage, list_steps, open_step
from stepkeeper_trainer.link import Link
from stepkeeper_trainer.load.dcp_reader import check_inert
from stepkeeper_trainer.save.commit import CHECKPOINTS_NAME, Commits, Completer
from stepkeeper_trainer.save.persist import split_evenly
from stepkeeper_trainer.save.planner import Share
from stepkeeper_trainer.save.replicas import Replicas
from stepkeeper_trainer.save.report import Item, RankReport, encode_items, publish
from stepkeeper_trainer.save.save import Save, Summary
from stepkeeper_trainer.save.serialise import frame
from stepkeeper_trainer.save.writer import HashingFile, in_threads
from stepkeeper_trainer.store import run_directory
from stepkeeper_trainer.store.run_directory import lives, record_start
from stepkeeper_trainer.tiers.uploader import Upload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from stepkeeper_trainer.environment import Environment
    from stepkeeper_trainer.formats.manifest import FileEntry

REPORTED_WITHIN_S = 1.0  # that a commit may take to go out to the watcher
COMPLETE_WITHIN_S = 600.0  # from the last rank's word to the commit: shared storage may show reports late
PARTS_MAX = 100  # names in a manifest

_held: dict[Path, Commits] = {}  # run directories that this process saves into, on the rank that commits


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one rank writes: rank 0 tells it to the others with their plans."""

    directory: Path
    save_id: str
    rank: int


class StepkeeperWriter(StorageWriter):
    """Give it to `torch.distributed.checkpoint.save(state_dict, storage_writer=...)`: one writer for each save."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        tokens: int = 0,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Hold the run directory, on rank 0.

        Args:
            directory: the run directory, or its `checkpoints` directory.
            step: optimizer steps that are done.
            tokens: seen by all ranks together.
            loss: of this step.
            metrics: by which the best step may be chosen.

        Raises:
            RunDirectoryError: it cannot be made or written, or another training holds it.
            SupersededError: a newer attempt holds it.
            UsageError: torch.distributed is not initialised, and this is one of several ranks.
        """
        path = Path(directory).absolute()
        self._run_directory = path.parent if path.name == CHECKPOINTS_NAME else path
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: give the number of optimizer steps that are done")
        self._step, self._tokens, self._loss, self._metrics = step, tokens, loss, dict(metrics or {})
        self._environment = read_environment()
        self._commits = self._hold() if groups.find_rank()[0] == 0 else None
        self._place: _Place | None = None
        self._began_at = time.time()  # of the save

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse another place than the one that the writer was made for.  Raises UsageError."""
        places = (self._run_directory, self._run_directory / CHECKPOINTS_NAME)
        if checkpoint_id is not None and Path(checkpoint_id).absolute() not in places:
            raise UsageError(
                f"checkpoint_id={str(checkpoint_id)!r}: leave it out; StepkeeperWriter names the step directory itself"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether its parent directory is there."""
        return Path(checkpoint_id).absolute().parent.is_dir()

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Hold the run directory, where this rank is to commit.

        Raises:
            UsageError: the save has no collectives, or the writer was used before.
        """
        if not kwargs.get("use_collectives", True):
            raise UsageError("use_collectives=False makes no whole step directory: leave it out")
        if self._place is not None:
            raise UsageError("a StepkeeperWriter saves once: make one for each save, with its step")
        self._began_at = time.time()
        if is_coordinator and self._commits is None:
            self._commits = self._hold()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the save in flight, and tell all ranks where it is.

        Raises:
            SupersededError: a newer attempt holds the run.
            OSError: the disk refuses.
        """
        commits = self._commits
        assert commits is not None, "the coordinator holds the run directory"
        commits.check_fence()
        save_id = secrets.token_hex(16)
        directory = commits.in_flight(self._step, save_id)
        directory.mkdir()
        commits.claim(directory)
        weakref.finalize(self, _remove_leftover, directory, os.getpid())
        return [replace(plan, storage_data=_Place(directory, save_id, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, make them durable, and report them.

        Raises:
            StateError: a value is neither a tensor nor plain data.
            SaveError: the plan is that of another save.
            OSError: the disk refuses.
        """
        place = plan.storage_data
        if not isinstance(place, _Place) or not place.directory.is_dir():
            raise SaveError(
                "the plan is that of an earlier save: StepkeeperWriter needs a planner without plan caching "
                "(enable_plan_caching=False)"
            )
        self._place = place
        sizes = {str(number): _size(item) for number, item in enumerate(plan.items)}
        groups = split_evenly(list(sizes), sizes.__getitem__)
        jobs = [
            partial(_write_file, place, number, [plan.items[int(name)] for name in group], planner)
            for number, group in enumerate(groups)
        ]
        written = in_threads(jobs)
        report = RankReport(
            rank=place.rank,
            save_id=place.save_id,
            items=encode_items(tuple(item for one in written for item in one.items)),
            files={one.name: one.entry for one in written},
        )
        publish(place.directory, report)
        results = [
            WriteResult(plan.items[int(name)].index, item.length, None)
            for group, one in zip(groups, written, strict=True)
            for name, item in zip(group, one.items, strict=True)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator, once all ranks have reported; the supervisor hears of it, if there is one.

        Raises:
            SaveError: what was written is not what was planned.
            SupersededError: a newer attempt holds the run.
            OSError: the disk refuses.
        """
        commits, place = self._commits, self._place
        assert commits is not None
        assert place is not None, "the coordinator has written its own share"
        now = time.time()
        link = Link(self._environment.socket, self._environment.launch_name)
        save = Save(
            sequence=1,
            save_id=place.save_id,
            summary=Summary(
                step=self._step,
                tokens=self._tokens,
                loss=self._loss,
                parts=dict.fromkeys(
                    sorted({name.split(".")[0] for name in metadata.state_dict_metadata})[:PARTS_MAX], True
                ),
                metrics=self._metrics,
            ),
            emergency=False,
            requested_at=self._began_at,
            limit_at=now + COMPLETE_WITHIN_S,
            directory=place.directory,
        )
        before = _find_before(commits, self._step)
        completer = Completer(
            commits=commits,
            world_size=len(results),
            link=link,
            parent=before.manifest.save_id if before is not None and before.manifest is not None else None,
            before_commit=lambda _limit_at, _unwanted: None,
            on_committed=lambda _save: None,
            uploader=None,
            before_line=lambda: _go_back(commits, before),
        )
        upload = Upload(step=self._step, save_id=place.save_id, directory=place.directory, files={}, is_local=False)
        completer.complete(save, Share((), Replicas(()), metadata), lambda _ranks: None, upload)
        link.flush(REPORTED_WITHIN_S)

    def _hold(self) -> Commits:
        """Make and hold the run directory: once a process, however many writers it makes."""
        commits = _held.get(self._run_directory)
        if commits is not None:
            return commits
        own = _own_epoch(self._run_directory, self._environment)
        epoch = own or run_directory.prepare(self._run_directory, self._environment)
        commits = Commits(self._run_directory, replace(self._environment, epoch=epoch))
        try:
            _go_on(commits)
        except OSError as error:
            raise RunDirectoryError(f"{error.filename}: the lineage cannot be written: {error.strerror}") from error
        _held[self._run_directory] = commits
        return commits


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is durable."""

    name: str
    entry: FileEntry
    items: tuple[Item, ...]


def _size(item: WriteItem) -> int:
    """Return about how many bytes an item takes."""
    data = item.tensor_data
    if data is None:
        return 1024
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _write_file(place: _Place, number: int, items: list[WriteItem], planner: SavePlanner) -> _File:
    name = f"__{place.rank}_{number}.distcp"
    written: list[Item] = []
    at = 0
    with HashingFile(place.directory / name) as file:
        for item in items:
            length = _write_item(file, item, planner.resolve_data(item))
            written.append(Item.of(item.index, name, at, length))
            at += length
    return _File(name, file.entry, tuple(written))


def _write_item(file: HashingFile, item: WriteItem, value: torch.Tensor | io.BytesIO) -> int:
    """Write one value as `torch.save` does; return how many bytes it took."""
    if item.type is WriteItemType.BYTE_IO:
        assert isinstance(value, io.BytesIO)
        data = value.getvalue()
        check_inert(item.index.fqn, data, error=StateError)
        return file.write(data)
    assert isinstance(value, torch.Tensor)
    tensor = value.detach().cpu()
    if (
        type(tensor) not in {torch.Tensor, torch.nn.Parameter}
        or tensor.layout is not torch.strided
        or tensor.is_quantized
    ):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        check_inert(item.index.fqn, buffer.getvalue(), error=StateError)
        return file.write(buffer.getvalue())
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    around = frame(tensor.dtype, tuple(tensor.shape))
    view, tail = view_bytes(tensor), bytearray(around.tail)
    put_crc(memoryview(tail), *around.crc_at, crc32(view))
    return file.write(around.head) + file.write(view) + file.write(tail)


def _own_epoch(run_directory: Path, environment: Environment) -> tuple[int, int] | None:
    """Return the epoch of the lease that this process holds already, by a manager of the same run; else None."""
    if environment.epoch is not None or environment.socket is not None:
        return None
    try:
        held = leases.read(run_directory)
    except (leases.LeaseError, OSError):
        return None  # said where the lease is taken
    ours = held is not None and held.node == environment.node and held.pid == os.getpid()
    return held.epoch if ours and held is not None and lives(held) else None


def _go_on(commits: Commits) -> None:
    """Record where this launch goes on from, where its supervisor has said so.  Raises OSError."""
    environment = commits.environment
    told = environment.resume_from
    if told is None:
        if environment.socket is not None:
            record_start(commits.checkpoints, None, None, environment.attempt, goes_back=environment.goes_back)
        return
    directory = Path(told).absolute()
    if directory.parent != commits.checkpoints.absolute():
        return
    step = open_step(directory)
    if step.manifest is None:
        raise ResumeError(f"{step.problem}; give another step directory, or none")
    record_start(commits.checkpoints, directory, step.manifest, environment.attempt, goes_back=environment.goes_back)


def _find_before(commits: Commits, step: int) -> StepDirectory | None:
    """Return the save that this one follows: the newest of an earlier step, by the lineage."""
    checkpoints = commits.checkpoints
    known = current_lineage(list_steps(checkpoints), lineage.read(checkpoints))
    return next((each for each in known if each.step < step and each.manifest is not None), None)


def _go_back(commits: Commits, before: StepDirectory | None) -> None:
    """Record a rollback where the lineage has gone beyond: when this save is whole, and its attempt still counts."""
    checkpoints, attempt = commits.checkpoints, commits.environment.attempt
    if before is None:
        record_start(checkpoints, None, None, attempt)
    else:
        record_start(checkpoints, before.path, before.manifest, attempt)


def _remove_leftover(directory: Path, pid: int) -> None:
    """Remove a save that came to nothing: a committed one has another name."""
    if os.getpid() == pid:  # a forked worker has a copy of the writer
        shutil.rmtree(directory, ignore_errors=True)

"""Finding, checking and loading what a launch resumes from."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepkeeper_trainer.errors import DamagedError, ResumeError, StepkeeperError, UsageError
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.manifest import Manifest, ManifestError, read_manifest
from stepkeeper_trainer.formats.steps import Choice, StepDirectory, current_lineage, list_steps, newest_verified
from stepkeeper_trainer.formats.verify import Cache, join_shards, known_right, verify_shard
from stepkeeper_trainer.load.from_memory import MemoryReader
from stepkeeper_trainer.load.initial import is_initial, is_training_step, load_initial
from stepkeeper_trainer.load.reader import CheckedReader, load, open_manifest
from stepkeeper_trainer.load.worker import Limits
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.save.save import warn_of_changes
from stepkeeper_trainer.store import space
from stepkeeper_trainer.store.run_directory import record_left_out, record_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stepkeeper_trainer.coordinate.agreement import Agreement
    from stepkeeper_trainer.save.commit import Commits
    from stepkeeper_trainer.state import TrainingState
    from stepkeeper_trainer.tiers.search import Load, Newer
    from stepkeeper_trainer.tiers.tiering import Tiering


LATEST = "latest"
STORAGE_TEST_WITHIN_S = 30.0
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training goes on; all None for a start from the very beginning."""

    step: int | None
    saved: tuple[int, str] | None  # step and save_id of what is on disk already; None of a snapshot
    parent: str | None  # of the next commit; known on rank 0 only
    manifest: Manifest | None = None
    directory: Path | None = None
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # conditions of then and now that differ

    @property
    def is_saved(self) -> bool:
        """Whether shared storage has what training goes on from; the very start needs no save."""
        return self.step is None or self.saved is not None


def resume(
    resume_from: str | None,
    *,
    commits: Commits,
    state: TrainingState,
    agreement: Agreement,
    world_size: int,
    tiering: Tiering | None = None,
    limits: Limits | None = None,
    strict: bool = True,
    with_optimizer: bool = False,
) -> Resumed:
    """Load a step of this run into `state`, else `resume_from`, on all ranks together, and record it in the lineage.

    Ranks wait for the slowest as they do in the agreement: a load may take far longer than a save ever does.

    Raises:
        ResumeError: it is not there, or does not fit.
        DamagedError: its bytes are not what its manifest says.
    """
    memory = _FromMemory(state, agreement, limits)
    search = partial(_newer_in_tiers, tiering, memory.load) if tiering is not None else None
    own, foreign = _find(Wanted.of(resume_from, commits), commits, state, agreement, search)
    if own is None and memory.failed and tiering is not None:
        tiering.forget_snapshots()
        raise DamagedError(
            f"{memory.failed}; parts of that snapshot may be in the model already, and no step directory is whole: the "
            "snapshot is removed, start the training again"
        )
    if isinstance(own, Loaded):
        return _continue(own, commits, state, world_size)
    if own is None and foreign is None:
        return _begin(commits, state)
    directory = Path(own or foreign or "")
    manifest = None
    if own is not None or not is_initial(directory):
        others = f"give one below checkpoints/, or `{LATEST}`", f"give another step directory, or `{LATEST}`"
        manifest = open_manifest(directory, *others)
    reader = CheckedReader(directory, manifest) if manifest is not None else None
    if manifest is None or reader is None or not _is_training_step(reader, directory):
        if directory.parent.resolve() == commits.checkpoints.resolve():
            raise ResumeError(
                f"{directory}: was not saved by this library's manager, which cannot resume from it: load it with "
                "torch.distributed.checkpoint and StepkeeperReader, or use another run directory"
            )
        load_initial(
            directory,
            state,
            agreement,
            strict=strict,
            with_optimizer=with_optimizer,
            limits=limits,
            manifest=manifest,
        )
        return _begin(commits, state)
    changes = warn_of_changes(manifest, world_size)
    _load(reader, directory, state, agreement, limits)
    parent = _record(commits, directory, manifest, state) if state.rank == 0 else None
    if state.rank == 0:
        say("resumed", step=manifest.step, directory=directory, save_id=manifest.save_id)
    return Resumed(manifest.step, (manifest.step, manifest.save_id), parent, manifest, directory, changes)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A snapshot that was loaded from the nodes' memory."""

    newer: Newer
    parent: str | None  # save_id of the commit that it follows


def _continue(loaded: Loaded, commits: Commits, state: TrainingState, world_size: int) -> Resumed:
    """Go on from a snapshot, which is no commit: the next one follows the one before it."""
    directory, manifest = loaded.newer.directory, loaded.newer.manifest
    if state.rank == 0:
        _record_left_out(commits, manifest, state)
        say("resumed", step=manifest.step, directory=directory, save_id=manifest.save_id)
    return Resumed(manifest.step, None, loaded.parent, manifest, directory, warn_of_changes(manifest, world_size))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a launch is to begin with: a step of this run, the newest one, or what lies elsewhere if it has none."""

    own: str | None = None
    newest: bool = False
    foreign: str | None = None

    @staticmethod
    def of(argument: str | None, commits: Commits) -> Wanted:
        """Weigh what the script says against `STEPKEEPER_RESUME_FROM`.

        A step of the run comes first.  A script that begins with another run's step, or with initial weights, names
        that again after each requeue.  A supervisor knows which step of the run counts; without one the newest is
        looked for.
        """
        told, supervised = commits.environment.resume_from, commits.environment.socket is not None

        def is_own(path: str) -> bool:
            return Path(path).absolute().parent.resolve() == commits.checkpoints.resolve()

        first = told if told is not None and (supervised or told == LATEST or is_own(told)) else argument or told
        if first is None:
            return Wanted()
        if first == LATEST:
            return Wanted(newest=True, foreign=argument if argument not in {None, LATEST} else None)
        if is_own(first) or (supervised and first == told):
            return Wanted(own=first)
        return Wanted(newest=not supervised, foreign=first)


def _find(
    wanted: Wanted,
    commits: Commits,
    state: TrainingState,
    agreement: Agreement,
    search: Callable[[str | None], str | Loaded | None] | None,
) -> tuple[str | Loaded | None, str | None]:
    """Return the step of this run that counts, and what lies elsewhere where there is none.

    `search` looks for a newer step in other tiers.
    """
    shared = wanted.own
    if wanted.newest:
        shared = _newest_together(commits.checkpoints, agreement, state.rank, state.world_size)
    own: str | Loaded | None = shared
    if search is not None and (wanted.newest or commits.environment.resume_newest):
        own = search(shared)
    if state.rank == 0 and own is None and wanted.newest and wanted.foreign is None:
        say("started_anew", why="no verified step directory")
    if state.rank == 0 and own is not None and wanted.foreign is not None:
        warn(
            "own_step_counts",
            step=own.newer.directory if isinstance(own, Loaded) else own,
            instead_of=wanted.foreign,
            why="to start from the beginning, use another run directory",
        )
    return own, wanted.foreign if own is None else None


class _FromMemory:
    """Loads snapshots from the nodes' memory, on all ranks together."""

    def __init__(self, state: TrainingState, agreement: Agreement, limits: Limits | None) -> None:
        self._state, self._agreement, self._limits = state, agreement, limits
        self.failed = ""  # why one was not loaded, or in part only: something else has to be loaded over it

    def load(self, directory: Path, manifest: Manifest, here: frozenset[str]) -> bool:
        """Load one; false on all ranks where that fails."""
        try:
            reader = MemoryReader.begin(directory, manifest, here, self._agreement.idle_group)
            _load(reader, directory, self._state, self._agreement, self._limits)
        except DamagedError as error:
            if self._state.rank == 0:
                say("snapshot_not_loaded", step=manifest.step, why=error, instead="it is copied to shared storage")
            self.failed = str(error)
            return False
        self.failed = ""
        return True


def _load(
    reader: CheckedReader, directory: Path, state: TrainingState, agreement: Agreement, limits: Limits | None
) -> None:
    """Load the whole state of a step."""
    try:
        metadata = reader.read_metadata()
        blobs = state.blobs(metadata)
    except OSError as error:
        raise DamagedError(f"{error.filename or directory}: cannot be read: {error.strerror}") from error
    load(reader, blobs, agreement.idle_group, limits=limits)
    refusal: StepkeeperError | None = None
    try:
        tensors = state.targets(metadata, blobs)
    except StepkeeperError as error:
        refusal = error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        refusal = DamagedError(f"{directory}: its description of the state cannot be used: {error!r}")
        refusal.__cause__ = error
    agreement.raise_together(refusal)
    load(reader, tensors, agreement.idle_group, limits=limits)
    try:
        state.apply(tensors)
    except StepkeeperError as error:
        refusal = error
    agreement.raise_together(refusal)


def _begin(commits: Commits, state: TrainingState) -> Resumed:
    parent = _record(commits, None, None, state) if state.rank == 0 else None
    return Resumed(None, None, parent)


def _is_training_step(reader: CheckedReader, directory: Path) -> bool:
    try:
        return is_training_step(reader.contents)
    except OSError as error:
        raise DamagedError(f"{error.filename or directory}: cannot be read: {error.strerror}") from error


def choose_limits(gib: float | None, *, ranks: int) -> Limits:
    """Return what loading may take on one of so many ranks of a node.

    Raises:
        UsageError: it is no size.
    """
    if gib is None:
        return Limits()
    if not 0 < gib < math.inf:
        raise UsageError(f"load_memory_gib={gib!r}: give a number of GiB above 0")
    return Limits(memory_bytes=int(gib * GIB / ranks))


def _newest_together(checkpoints: Path, agreement: Agreement, rank: int, world_size: int) -> str | None:
    """Choose the newest step directory that is whole; all ranks read a shard of its bytes."""
    group = agreement.idle_group
    if group is None:
        choice = newest_verified(checkpoints)
        for passed, problems in choice.skipped:
            _say_skipped(passed, problems)
        return _say_chosen(choice, checkpoints)
    steps = current_lineage(list_steps(checkpoints), lineage.read(checkpoints)) if rank == 0 else []
    cache = Cache(checkpoints)
    skipped: list[tuple[StepDirectory, tuple[str, ...]]] = []
    for at in range(agreement.share(len(steps))):
        step = steps[at] if rank == 0 else None
        if step is not None and step.manifest is None:
            skipped.append((step, (step.problem or "no manifest",)))
            _say_skipped(*skipped[-1])
        readable = step is not None and step.manifest is not None
        known = step is not None and readable and known_right(step.path, cache)
        path, needs_reading = agreement.share((step.path if step is not None and readable else None, not known))
        if path is None:
            continue
        wrong: tuple[str, ...] = ()
        if needs_reading:
            own = verify_shard(path, rank, world_size)
            shards = group.gather(own)
            if shards is not None:
                wrong = join_shards(path, shards, cache=cache).problems
        if step is not None and wrong:
            skipped.append((step, wrong))
            _say_skipped(step, wrong)
        if not agreement.share(bool(wrong)):
            return _say_chosen(Choice(step, tuple(skipped)), checkpoints) if rank == 0 else str(path)
    return _say_chosen(Choice(None, tuple(skipped)), checkpoints) if rank == 0 else None


def _newer_in_tiers(tiering: Tiering, load: Load, resume_from: str | None) -> str | Loaded | None:
    """Bring what another tier has newer than what shared storage has, or load it there, and resume from that."""
    chosen = None
    if resume_from is not None:
        with contextlib.suppress(ManifestError, OSError):  # then anything whole is better
            chosen = read_manifest(Path(resume_from))
    newer = tiering.newer_than(chosen, load)
    if newer is None:
        return resume_from
    return Loaded(newer, chosen.save_id if chosen is not None else None) if newer.loaded else str(newer.directory)


def _say_skipped(step: StepDirectory, problems: tuple[str, ...]) -> None:
    warn("step_skipped", directory=step.path.name, why="; ".join(problems))


def _say_chosen(choice: Choice, checkpoints: Path) -> str | None:
    if why := space.suspicion(choice):
        found = space.storage_test(checkpoints, limit_s=STORAGE_TEST_WITHIN_S)
        warn("storage_suspect", why=why, test=found.problem or "bytes written now come back as they were")
    return str(choice.chosen.path) if choice.chosen is not None else None


def _record(commits: Commits, directory: Path | None, manifest: Manifest | None, state: TrainingState) -> str | None:
    environment = commits.environment
    with _writing_lineage():
        parent = record_start(
            commits.checkpoints, directory, manifest, environment.attempt, goes_back=environment.goes_back
        )
    _record_left_out(commits, manifest, state)
    return parent


def _record_left_out(commits: Commits, manifest: Manifest | None, state: TrainingState) -> None:
    environment, done = commits.environment, manifest.step if manifest is not None else 0
    with _writing_lineage():
        record_left_out(
            commits.checkpoints,
            state.others.get("sampler"),
            environment.skip_data,
            done=done,
            attempt=environment.attempt,
        )


@contextlib.contextmanager
def _writing_lineage() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StepkeeperError(f"{error.filename}: the lineage cannot be written: {error.strerror}") from error

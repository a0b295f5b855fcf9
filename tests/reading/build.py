"""Small run directories, made with the writers that real runs use."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.run_store import journal, lines
from stepkeeper.run_store.journal import Record
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, seal
from tests import dcp_files
from tests.reasons import in_words

CHUNK = 64
START = 1_790_000_000.0
DATA = bytes(range(200))
METADATA = dcp_files.metadata({"weights": [dcp_files.Piece((0,), (200,), "__0_0.distcp", 0, 200)]})


def make_run(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    (path / "checkpoints").mkdir(parents=True)
    return run


def entry(data: bytes) -> FileEntry:
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    return FileEntry(
        bytes=len(data),
        xxh3_128=xxhash.xxh3_128_hexdigest(data),
        chunk_bytes=CHUNK,
        chunks=tuple(xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks),
    )


def make_step(
    run: RunDirectory,
    step: int,
    *,
    save_id: str,
    parent: str | None = None,
    name: str | None = None,
    recorded: bool = True,
    loss: float | None = 2.5,
    files: dict[str, FileEntry] | None = None,
) -> Path:
    directory = run.checkpoints / (name or f"step_{step:08d}")
    directory.mkdir()
    for each, data in {"__0_0.distcp": DATA, ".metadata": METADATA}.items():
        (directory / each).write_bytes(data)
    manifest = Manifest(
        step=step,
        tokens=step * 1000,
        world_size=2,
        created_at=f"2026-09-21T00:{step // 100:02d}:00Z",
        save_id=save_id,
        parent=parent,
        loss=loss,
        files=files if files is not None else {"__0_0.distcp": entry(DATA), ".metadata": entry(METADATA)},
    )
    (directory / "MANIFEST.json").write_bytes(seal(manifest))
    if recorded:
        commit = lineage.Commit(
            at=START, step=step, save_id=save_id, parent=parent, directory=directory.name, attempt=0
        )
        lineage.append(run.checkpoints, commit)
    return directory


def make_steps(run: RunDirectory, count: int = 3) -> list[Path]:
    ids = [f"{i:08x}-save" for i in range(count)]
    return [make_step(run, 100 * (i + 1), save_id=ids[i], parent=ids[i - 1] if i else None) for i in range(count)]


def write_status(run: RunDirectory, **changes: object) -> None:
    fields: dict[str, object] = {
        "run_id": run.run_id,
        "job_id": 12,
        "restart_count": 1,
        "attempt": 1,
        "launch": 0,
        "phase": "training",
        "nodes": ("n1", "n2"),
        "step": 250,
        "tokens": 250_000,
        "loss": 2.125,
        "step_seconds": 0.5,
        "checkpoint_step": 200,
        "resumed_from": str(run.checkpoints / "step_00000100"),
        "why": "step 200 is committed",
        "started_at": START,
        "updated_at": START + 60,
        **changes,
    }
    write_atomically(run.status, lines.encode(Status(**fields)), mode=0o644)  # type: ignore[arg-type]


def record(event: on.Event, *, phase: Phase = Phase.TRAINING, attempt: int = 1, **more: object) -> Record:
    fields = {"launch": 0, **more}
    return Record(
        v=journal.VERSION,
        job_id=12,
        restart_count=attempt,
        attempt=attempt,
        phase=phase,
        event=event,
        **fields,
    )  # type: ignore[arg-type]


def story(run: RunDirectory) -> list[Record]:
    """Attempt 0 is preempted, attempt 1 trains and commits step 200."""
    started = on.AttemptStarted(
        at=START, job_id=12, restart_count=0, attempt=0, nodes=("n1", "n2"), batch_node="n1", kill_wait_s=30.0
    )
    skipped = (on.Skipped(directory="step_00000300", problem="torn"),)
    return [
        record(started, phase=Phase.STARTING, attempt=0, why="the attempt starts", effects=(do.StartBus(bus=1),)),
        record(
            on.SignalReceived(at=START + 5, signal="TERM"),
            attempt=0,
            why="got SIGTERM",
            effects=(do.AskSlurm(reasons=in_words("got SIGTERM")),),
        ),
        record(
            on.RequeueAnswered(at=START + 9, ok=True),
            phase=Phase.DONE,
            attempt=0,
            why="preempted",
            effects=(do.Exit(code=10, reasons=in_words("preempted")),),
        ),
        record(
            on.CheckpointChosen(
                at=START + 20,
                directory=str(run.checkpoints / "step_00000100"),
                step=100,
                skipped=skipped,
            ),
            phase=Phase.STARTING,
            why="newest verified step directory",
        ),
        record(on.Progressed(at=START + 30, launch=0, step=150, tokens=150_000, loss=2.25)),
        record(
            on.CheckpointCommitted(
                at=START + 40,
                launch=0,
                step=200,
                save_id="00000001-save",
                directory="step_00000200",
                bytes=400,
                seconds=0.25,
            ),
            why="step 200 is committed",
        ),
    ]


def write_journal(run: RunDirectory, records: list[Record]) -> None:
    writer = journal.JournalWriter(run.journal)
    for each in records:
        writer.append(each)
    assert writer.flush(90.0)


def write_log(run: RunDirectory, name: str, data: bytes, attempt: int = 0, launch: int = 0) -> Path:
    directory = run.logs(attempt, launch)
    os.makedirs(directory, exist_ok=True)
    path = directory / f"{name}.log"
    path.write_bytes(data)
    return path

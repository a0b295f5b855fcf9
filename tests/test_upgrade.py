"""An upgrade between two attempts: what an earlier release left is read, resumed from, and requeued; and what a later
one will add to it is passed over.

`tests/fixtures/run-*` are run directories of releases, made by `tests/fixtures/make_run.py`; never change one.
"""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store import journal
from stepkeeper.run_store import lease as run_store_lease
from stepkeeper.run_store import status as status_file
from stepkeeper_trainer.formats import lease, records, steps
from tests.lab import Lab
from tests.training import Training

RELEASES = sorted(Path(__file__).parent.glob("fixtures/run-*"))
READING = (
    ("status",), ("events",), ("logs",), ("explain",), ("report", "--output", "-"), ("checkpoints", "ls"),
    ("checkpoints", "verify"), ("checkpoints", "latest"),
)  # fmt: skip


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a release's run directory."""
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def stepkeeper(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepkeeper", *words], capture_output=True, text=True, timeout=120, check=False
    )


def newest_step(run: Path) -> int:
    """Return the step of the one step directory that a fixture has."""
    [only] = (run / "checkpoints").glob("step_*")
    return int(only.name.removeprefix("step_"))


def test_there_are_fixtures_with_more_than_half_of_what_a_journal_can_hold() -> None:
    held = {
        line.record.event.__class__
        for run in RELEASES
        for line in journal.read_lines(run / "journal.jsonl")
        if line.record
    }

    assert len(RELEASES) > 1
    assert {on.Requested, on.Judged, on.Replayed, on.WatcherLost, on.RankExited, on.CheckpointVerified} <= held
    assert len(held) >= len(typing.get_args(on.Event)) / 2


def test_every_line_and_file_of_an_earlier_release_is_read(old: Path) -> None:
    found = list(journal.read_lines(old / "journal.jsonl"))

    assert len(found) > 20
    assert [line.data for line in found if line.record is None] == []
    assert len({line.record.attempt for line in found if line.record}) == 2
    carried = journal.reconstruct(old / "journal.jsonl")
    assert carried.attempt == 2
    assert carried.ended
    assert status_file.read(old / "status.json") is not None
    held, said = lease.read(old), records.read_outcome(old)
    assert held is not None
    assert held.attempt == 1
    assert said is None or said.outcome == "stopped"


def test_its_checkpoint_is_chosen_and_every_byte_right(old: Path) -> None:
    choice = steps.newest_verified(old / "checkpoints")

    assert choice.chosen is not None
    assert choice.chosen.step == newest_step(old)
    assert choice.skipped == ()


def test_its_lease_is_taken_by_a_newer_job(old: Path) -> None:
    wanted = lease.Lease(job_id=99, restart_count=0, attempt=2, node="n1", pid=1, taken_at=1.0)

    assert run_store_lease.take(old, wanted, job_runs=lambda _: False).attempt == 2


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_every_reading_command_reads_it(old: Path, command: tuple[str, ...]) -> None:
    of_steps = command[:2] == ("checkpoints", "verify")
    target = next((old / "checkpoints").glob("step_*")) if of_steps else old

    done = stepkeeper(*command, str(target))

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip()


def test_what_the_next_minor_version_adds_is_passed_over(old: Path) -> None:
    """Unknown fields of known records, and unknown kinds of events and effects."""
    path = old / "journal.jsonl"
    before = list(journal.read(path))
    changed = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        record["added_later"] = {"x": [1]}
        record["event"]["added_later"] = 1
        changed.append(json.dumps(record))
    unknown = json.loads(changed[-1])
    unknown["event"] = {**unknown["event"], "event": "SomethingNew"}
    path.write_text("\n".join([*changed[:-1], json.dumps(unknown), changed[-1]]) + "\n")
    for name in ("status.json", "lease.json"):
        file = old / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "added_later": 1}))

    assert list(journal.read(path)) == before
    assert journal.reconstruct(path).attempt == 2
    assert status_file.read(old / "status.json") is not None
    assert lease.read(old) is not None
    assert stepkeeper("events", old).returncode == 0
    assert stepkeeper("status", old).returncode == 0


@pytest.mark.slurm
@pytest.mark.campaign
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_run_of_an_earlier_release_goes_on_is_requeued_and_ends(lab_factory, release: Path) -> None:
    """The losses are those of an uninterrupted run, but for what another torch may round otherwise."""
    lab: Lab = lab_factory(grace_time_s=20, kill_wait_s=10)
    reference = Training(lab, name=f"reference-{release.name}", step_seconds=0.0).submit()
    reference.wait_end()
    training = Training(lab, name=release.name, steps=40, every=3, step_seconds=0.3)
    shutil.copytree(release, training.run_dir)
    account = training.work.stat()
    for path in (training.run_dir, *training.run_dir.rglob("*")):
        os.chown(path, account.st_uid, account.st_gid)
    training.run_dir.chmod(0o700)
    training.submit()
    step = newest_step(release)
    training.wait_step(step + 3)
    lab.requeue(training.job_id)
    training.wait_end()

    assert training.exits()[-1] == ExitCode.FINISHED, training.story()
    chosen = [
        r.event.directory for r in training.events(on.CheckpointChosen) if isinstance(r.event, on.CheckpointChosen)
    ]
    assert str(training.run_dir / "checkpoints" / f"step_{step:08d}") in chosen
    assert [r.attempt for r in training.events(on.AttemptStarted)] == [0, 1, 2, 3]
    losses, expected = training.losses(), reference.losses()
    assert losses.keys() == expected.keys(), training.story()
    assert all(math.isclose(float(losses[step]), float(expected[step]), rel_tol=1e-3) for step in expected)
    with (training.run_dir / "metrics.csv").open(newline="") as file:
        assert {row["attempt"] for row in csv.DictReader(file)} == {"0", "1", "2", "3"}

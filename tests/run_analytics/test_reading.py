from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepkeeper.run_analytics import reading
from stepkeeper.run_analytics.model import Ending
from stepkeeper.run_analytics.timeline import RunState
from stepkeeper.run_store import journal
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build
from tests.run_analytics.build import START, Journal, killed

HEADER = "step,loss,tokens,lr,grad_norm,time,attempt,launch\n"


def write(run: RunDirectory, told: Journal) -> None:
    build.write_journal(run, told.records)
    rows = "".join(
        f"{step},{loss},{step * 100},,,{at / 1e6},{attempt},{launch}\n"
        for (attempt, launch), known in told.rows.items()
        for step, loss, at in zip(known.step, known.loss, known.at, strict=True)
    )
    (run.path / "metrics.csv").write_text(HEADER + rows)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return build.make_run(tmp_path / "run")


def test_who_requeued_a_run_whose_supervisor_was_killed_is_told(run: RunDirectory) -> None:
    write(run, killed())
    rescue = {"at": START + 60, "job_id": 7, "restart_count": 0, "node": "n2"}
    other = {**rescue, "job_id": 8}
    (run.path / "rescues.jsonl").write_text(f"{json.dumps(other)}\n{json.dumps(rescue)}\n{{torn")

    seen = reading.see(run, now=START + 116)

    first = next(seen.launches())
    assert (first.ending, first.decided) == (Ending.NO_UPDATE, "requeued by the watcher on n2")
    assert [(each.kind, each.node) for each in seen.incidents] == [("supervisor lost", "n2")]
    assert seen.run_state is RunState.RUNNING


def test_torn_lines_and_nonsense_cost_nothing_else(run: RunDirectory) -> None:
    told = killed()
    write(run, told)
    whole = reading.see(run, now=START + 116)
    nonsense = b"31,nan,1,,,1e400,0,0\n-5,1,1,,,1,0,0\n\xff\xfe,1\n99999999999999999999,1,1,,,1,0,0\n"
    nonsense += b"step,loss\n,,,,,,,\n12,1.0,3"
    with (run.path / "metrics.csv").open("ab") as file:
        file.write(nonsense)
    with run.journal.open("ab") as file:
        file.write(b'{"v":1,"event":{"event":"of_a_newer_version"}}\n{"v":1,\n')
    run.status.write_text("{")

    seen = reading.see(run, now=START + 116)

    assert seen.accounts == whole.accounts
    assert seen.rows.keys() == whole.rows.keys()


def test_a_link_in_place_of_a_file_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    build.write_journal(run, killed().records)
    (tmp_path / "secret").write_text(HEADER)
    (run.path / "metrics.csv").symlink_to(tmp_path / "secret")

    with pytest.raises(OSError, match="symbolic"):
        reading.see(run)


def test_the_status_tells_how_long_a_quiet_run_lived(run: RunDirectory) -> None:
    told = killed()
    write(run, told)
    build.write_status(run, updated_at=START + 400)

    assert reading.see(run, now=START + 401).until / 1e6 == START + 400
    assert len(list(journal.read(run.journal))) == len(told.records)

"""Nothing secret reaches journal or status, whoever's words it stands in; and they stay what they are."""

from pathlib import Path

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.run_store import journal, lines
from stepkeeper.run_store.status import Status

SECRET = "S3cr3tValueThatNobodyMaySee42"  # noqa: S105 - what the tests look for


def record(why: str) -> journal.Record:
    return journal.Record(
        v=1, job_id=1, restart_count=0, attempt=0, launch=0, phase=Phase.TRAINING,
        event=on.LaunchRefused(at=1.0, launch=0, error=f"https://me:{SECRET}@host"), why=why,
    )  # fmt: skip


def test_the_journal_hides_secrets_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = journal.JournalWriter(path)

    writer.append(record(f'the script said {{"api_key": "{SECRET}"}} and HF_TOKEN={SECRET}'))
    writer.append(record("nothing to hide"))

    assert writer.flush(60)
    assert SECRET not in path.read_text()
    hidden, plain = journal.read(path)
    assert hidden.why == 'the script said {"api_key": "***"} and HF_TOKEN=***'
    assert hidden.event == on.LaunchRefused(at=1.0, launch=0, error="https://me:***@host")
    assert plain.why == "nothing to hide"


def test_a_status_that_counts_no_tokens_yet_stays_a_status() -> None:
    """`"tokens":null` looks like a name and a value."""
    status = Status(
        run_id="r", job_id=1, restart_count=0, attempt=0, launch=0, phase="training", nodes=("n1",),
        why=f"password={SECRET}", started_at=0.0, updated_at=0.0,
    )  # fmt: skip

    written = lines.encode(status)

    assert SECRET.encode() not in written
    assert msgspec.json.decode(written, type=Status) == msgspec.structs.replace(status, why="password=***")

"""How far a run is, when it will be done, and that nothing is claimed which nobody knows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import events as on
from stepkeeper.core.decide import decide
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Launch, Ranks, Resume, State
from stepkeeper.run_analytics import follow
from stepkeeper.run_analytics.glance import Glance, glance, line, pace
from stepkeeper.run_analytics.model import Rows, Use
from stepkeeper.run_analytics.queue import Queued
from stepkeeper.run_analytics.screen import screen
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status
from stepkeeper_trainer.formats import messages
from tests.reading import build
from tests.reading.conftest import Command, command
from tests.run_analytics.build import Journal

__all__ = ["command"]  # a fixture
NOW = build.START + 90


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = build.make_run(tmp_path / "run")
    build.write_journal(run, build.story(run))
    return run


def drawn(run: RunDirectory, *, now: float = NOW, queued: Queued | None = None) -> str:
    seen = msgspec.structs.replace(glance(run), queued=queued)
    return "\n".join(screen("my-run", seen, None, now=now, width=100, height=24, plain=True))


def steps(*at: float) -> Rows:
    rows = Rows()
    for index, each in enumerate(at):
        rows.add(build.START + each, 1 + index, 1.0)
    return rows


# --- pace and ETA ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        (steps(), None),
        (steps(5), None),
        (steps(0, 2, 4, 6), 2.0),
        (steps(0, 2, 4, 64, 66, 68), 2.0),  # a pause of a minute
        (steps(0, 1, 3, 4, 6, 7), 1.4),  # long and short steps alternate: no pause
        (steps(5, 4), None),  # a clock that was set back
    ],
)
def test_the_pace_is_that_of_recent_steps_without_pauses(rows: Rows, seconds: float | None) -> None:
    assert pace(rows) == (None if seconds is None else pytest.approx(seconds))


def test_the_pace_is_that_of_the_newest_launch() -> None:
    seen = Glance(status=None, rows={(1, 0): steps(0, 9, 18), (1, 1): steps(100, 101, 102)})
    assert seen.pace == pytest.approx(1.0)


def test_a_bar_and_the_time_of_its_end_stand_there_where_the_number_of_steps_is_known(
    command: Command, run: RunDirectory
) -> None:
    now = time.time()
    build.write_status(run, updated_at=now, alive_at=now, total_steps=1000)
    rows = "".join(f"{step},2,0,,,{now - 500 + 2 * step},1,0\n" for step in range(100, 251))
    (run.path / "metrics.csv").write_text("step,loss,tokens,lr,grad_norm,time,attempt,launch\n" + rows)

    said = drawn(run, now=now)
    assert "250 of 1,000, loss 2.125, 250,000 tokens, 2 s a step" in said
    assert "##########....." in said
    assert "25.0 %, ETA 25 min (" in said
    said = command("status", run.path).out
    assert "25.0 %, ETA 25 min (" in said
    document = json.loads(command("status", run.path, "--json").out)
    assert (document["progress"], document["pace_s"], document["seconds_left"]) == pytest.approx((0.25, 2.0, 1500.0))
    assert document["done_at"] == pytest.approx(time.time() + 1500, abs=60)
    assert "step 250 of 1,000 loss 2.125 ETA 25 min" in line(glance(run), now)


def test_no_end_is_foretold_where_nothing_trains_or_nobody_knows(command: Command, run: RunDirectory) -> None:
    now = time.time()
    build.write_status(run, updated_at=now, alive_at=now, total_steps=1000, phase="starting")
    assert "ETA" not in drawn(run, now=now)
    assert "6 min of training left" in drawn(run, now=now)
    assert json.loads(command("status", run.path, "--json").out)["done_at"] is None

    build.write_status(run, updated_at=now, alive_at=now)
    assert "ETA" not in drawn(run, now=now)
    assert "\ndone" not in drawn(run, now=now)


def test_the_number_of_steps_comes_from_the_script_by_way_of_the_bus() -> None:
    hello = messages.decode_from_rank(
        messages.encode(messages.Hello(rank=0, world_size=1, pid=1, version="9", total_steps=1000))
    )
    assert isinstance(hello, messages.Hello)
    assert hello.total_steps == 1000
    older = messages.decode_from_rank(b'{"type":"hello","rank":0,"world_size":1,"pid":1,"version":"0"}')
    newer = messages.decode_from_rank(b'{"type":"hello","rank":0,"world_size":1,"pid":1,"version":"9","more":1}')
    assert [each.total_steps for each in (older, newer) if isinstance(each, messages.Hello)] == [None, None]

    event = on.RankHello(at=1.0, launch=0, rank=0, node="n1", total_steps=1000)
    assert changed(all_tasks_started(), event)["total_steps"] == 1000
    assert "total_steps" not in changed(all_tasks_started(), msgspec.structs.replace(event, total_steps=None)), (
        "what was told stays"
    )


# --- what is claimed ------------------------------------------------------------------------------


def all_tasks_started() -> Status:
    return Status(
        run_id="r", job_id=7, restart_count=0, attempt=0, launch=0, launched=False, phase="starting", nodes=("n1",),
        started_at=0.0, updated_at=0.0,
    )  # fmt: skip


def changed(status: Status, event: on.Event) -> dict[str, object]:
    found = status_file.changes(status, event, State(), State())
    return {key: value for key, value in found.items() if key != "waits_for"}


def test_a_launch_has_a_number_only_when_it_was_started() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.rank_dies(5)
    seen: list[tuple[str, bool, int]] = []
    state, status = State(), all_tasks_started()
    for record in told.records:
        after = decide(state, record.event, Policy()).state
        status = msgspec.structs.replace(status, **status_file.changes(status, record.event, state, after))
        state = after
        if not seen or seen[-1] != (status.phase, status.launched, status.launch):
            seen.append((status.phase, status.launched, status.launch))

    assert state.launch.number == 1, "the next one is being prepared"
    assert seen == [("starting", False, 0), ("training", True, 0), ("stopping", True, 0), ("starting", True, 0)]


def test_a_launch_begins_at_the_step_that_it_goes_on_from() -> None:
    preparing, running = (
        State(launch=Launch(number=1), resume=Resume(step=100)),
        State(launch=Launch(number=1, ranks=Ranks.RUNNING), resume=Resume(step=100)),
    )
    cleared = on.NodesCleared(at=2.0, launch=1, address="n1", port=1, nodes=("n1",))
    before = msgspec.structs.replace(all_tasks_started(), launched=True, step=130, tokens=9, loss=0.5)

    assert "step" not in status_file.changes(before, cleared, preparing, preparing), "how far the last launch came"
    now = msgspec.structs.replace(before, **status_file.changes(before, cleared, preparing, running))
    assert (now.launch, now.step, now.tokens, now.loss) == (1, 100, None, None)
    later = msgspec.structs.replace(now, step=104, loss=0.4)
    assert "step" not in status_file.changes(later, cleared, running, running)


def test_a_launch_that_is_prepared_is_not_shown_as_one(command: Command, run: RunDirectory) -> None:
    build.write_status(run, phase="starting", launched=False)
    assert "attempt 1, no launch yet" in drawn(run)
    assert "attempt 1, no launch yet" in command("status", run.path).out

    build.write_status(run, phase="starting")
    assert "launch 0 over, the next is prepared" in drawn(run)


def test_a_supervisor_that_is_gone_trains_no_longer(command: Command, run: RunDirectory) -> None:
    build.write_status(run, updated_at=NOW - 60, alive_at=NOW - 40)
    seen = glance(run)

    assert seen.asks_slurm(NOW) == "12"
    said = drawn(run, queued=Queued(job="12", state="FAILED"))
    assert "unknown, no word for 40 s; it was training" in said
    assert "job 12 is FAILED: it does not continue without you" in said
    assert "training, for" not in said
    assert "no word for 40 s" in line(seen, NOW)
    now = time.time()
    build.write_status(run, updated_at=now - 60, alive_at=now - 40)
    assert "unknown, no word for 40 s; it was training" in command("status", run.path).out
    assert "the supervisor wrote 40 s ago" in command("status", run.path).out


def test_a_supervisor_that_waits_for_a_long_step_is_alive(run: RunDirectory) -> None:
    build.write_status(run, updated_at=NOW - 3600, alive_at=NOW - 4)

    assert glance(run).asks_slurm(NOW) is None
    assert "no word" not in drawn(run)


def test_a_requeued_run_waits_and_has_not_ended(run: RunDirectory) -> None:
    build.write_status(run, phase="done", exit_code=10, updated_at=NOW - 12)
    pending = Queued(job="12", state="PENDING", reason="BeginTime", expected_at=NOW + 100)
    seen = msgspec.structs.replace(glance(run), queued=pending)

    said = drawn(run, queued=pending)
    assert "pending, for 12 s (requeued " in said
    assert "job 12 is requeued after attempt 1" in said.replace("\n" + 15 * " ", " ")
    assert "job 12 is PENDING (BeginTime): expected to start in 100 s" in said
    assert "ended" not in said
    assert not seen.is_over
    assert msgspec.structs.replace(seen, queued=Queued(job="12", state="CANCELLED")).is_over
    assert not msgspec.structs.replace(seen, queued=Queued(job="12", error="no answer")).is_over
    assert "pending  job 12 is PENDING (BeginTime)" in line(seen, NOW)


def test_a_loss_that_is_no_number_is_told_and_not_left_out(command: Command, run: RunDirectory) -> None:
    event = on.Progressed(at=1.0, launch=0, step=5, tokens=0, not_finite=True)
    assert changed(all_tasks_started(), event) == {
        "phase": "starting", "step": 5, "tokens": 0, "loss": None, "step_seconds": None, "loss_not_finite": True,
        "snapshot_step": None,
    }  # fmt: skip
    build.write_status(run, loss=None, loss_not_finite=True)

    assert "loss NaN or infinite" in command("status", run.path).out
    assert "NaN or infinite" in drawn(run)
    assert "loss NaN or infinite" in line(glance(run), NOW)


def test_a_status_of_an_older_version_is_read(run: RunDirectory) -> None:
    build.write_status(run)
    new = ("alive_at", "launched", "total_steps", "loss_not_finite")
    document = {name: value for name, value in json.loads(run.status.read_bytes()).items() if name not in new}
    run.status.write_text(json.dumps(document))

    assert "training, for" in drawn(run)
    assert glance(run).status is not None
    assert not glance(run).is_over


def test_the_time_in_the_queue_counts_while_it_passes(run: RunDirectory) -> None:
    build.write_status(run, phase="done", exit_code=10, updated_at=build.START + 40)
    accounts = follow._Accounts(run)
    accounts.look()
    seen = glance(run)
    shown = [accounts.as_of(seen, build.START + after) for after in (100, 152)]

    assert [each.wall[Use.QUEUE] for each in shown if each is not None] == [*range(71_000_000, 124_000_000, 52_000_000)]
    assert all(each is not None and sum(each.wall.values()) == each.wall_total for each in shown)
    gone = msgspec.structs.replace(seen, queued=Queued(job="12", state="CANCELLED"))
    assert accounts.as_of(gone, build.START + 152) is accounts.newest

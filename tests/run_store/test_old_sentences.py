"""Journals of release 0.1 hold sentences only: they are read as typed reasons, and decided again as then."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stepkeeper.cli.dev import recorded_policies
from stepkeeper.core import effects as do
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Notice
from stepkeeper.core.faults import was_lost
from stepkeeper.run_analytics import history, timeline
from stepkeeper.run_store import journal, old_journals
from stepkeeper.simulate.replay import replay

TESTS = Path(__file__).parents[1]
BROKEN = "the loss is 1.2.3, and was 2, since step 7"
STORED = [TESTS / "fixtures/run-0.1", TESTS / "fixtures/run-0.1-failures", TESTS / "run_analytics/recorded"]


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("preempted (Slurm says RUNNING)", (because.SlurmSaid(notice=Notice.PREEMPTED, slurm_state="RUNNING"),)),
        ("time limit (Slurm says A+B)", (because.SlurmSaid(notice=Notice.TIME_LIMIT, slurm_state="A+B"),)),
        ("requeued by Slurm or an admin", (because.SlurmSaid(notice=Notice.REQUEUED, slurm_state=""),)),
        ("cancelled meanwhile (X)", (because.SlurmSaid(notice=Notice.CANCELLED, slurm_state="X"),)),
        ("Slurm could not be asked (no answer)", (because.SlurmUnreachable(error="no answer"),)),
        (
            "no watcher answers on a, b: taken for lost (srun: error: a: Killed)",
            (because.NodesLost(nodes=("a", "b"), error="srun: error: a: Killed"),),
        ),
        ("the command ended with 0 (it has no trainer library to say more)", (because.CommandEnded(),)),
        ("it was lost", (because.LostRecently(),)),
        ("the loss is no finite number since step 21", (because.LossWrong(rule="loss-not-finite", step=21),)),
        (
            "this launch is slow; the loss is 9.5, and was 2, since step 7",
            (
                because.Sentence(text="this launch is slow"),
                because.LossWrong(rule="loss-spike", step=7, loss=9.5, baseline=2.0),
            ),
        ),
        (
            "the loss is 7 after the resume, and was 3.25 before it, since step 251",
            (because.LossWrong(rule="loss-discontinuity", step=251, loss=7.0, baseline=3.25),),
        ),
        (BROKEN, (because.Sentence(text=BROKEN),)),
        ("relaunch: rank 1 failed", (because.Relaunch(), because.Sentence(text="rank 1 failed"))),
        ("", ()),
    ],
)  # fmt: skip
def test_what_something_depends_on_is_typed(text: str, reasons: because.Why) -> None:
    assert old_journals.typed(text) == reasons


@pytest.mark.parametrize("stored", STORED[:2], ids=lambda path: path.name)
def test_a_stored_journal_is_decided_again_as_then(stored: Path) -> None:
    found = replay(journal.read_lines(stored / "journal.jsonl"), recorded_policies(stored), stop_after=100)

    # 0.1 forgave lost nodes at a commit that nobody had verified
    assert [each for each in found.differences if each.then.keys() != {"node_losses"}] == []
    assert (found.unreadable, found.unknown) == (0, 0)
    assert found.records > 20


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.name)
def test_a_stored_journal_tells_what_it_told(stored: Path) -> None:
    records = list(journal.read(stored / "journal.jsonl"))
    endings = [launch.ending.value for launch in timeline.build(history.read_history(records), {}).launches()]

    assert all(record.reasons for record in records if record.why)
    assert (
        endings
        == {
            "run-0.1": ["requeued", "cancelled"],
            "run-0.1-failures": ["failure", "failure", "requeued", "cancelled"],
            "recorded": ["failure", "preempted", "finished"],
        }[stored.name]
    )


def test_effects_exclusions_and_changes_of_the_state_are_read_too() -> None:
    old = {
        "v": 1, "job_id": 7, "restart_count": 0, "attempt": 0, "launch": 0, "phase": "stopping",
        "event": {"event": "tick", "at": 1.0}, "why": "the deadline has passed",
        "effects": [
            {"effect": "exit", "code": 10, "reason": "preempted (Slurm says RUNNING)"},
            {"effect": "answer_request", "name": "a", "said": "refused: no rank", "ok": False},
            {"effect": "judge_launch", "launch": 0, "found": {"cause": "hang", "rule": "r", "text": "stands still"}},
        ],
        "excluded": [{"node": "n1", "why": "it was lost", "until": 9.0}, {"node": "n2", "why": "XID 79", "until": 9.0}],
        "missed": {
            "plan": {"set": {"next": "relaunch", "why": "rank 1 failed"}}, "first_failure": "rank 1 failed",
            "excluded": [{"node": "n1", "why": "it was lost", "until": 9.0}],
        },
    }  # fmt: skip

    record = msgspec.convert(old_journals.record(old), journal.Record)

    ended, _, judged = record.effects
    assert isinstance(ended, do.Exit)
    assert ended.reasons == (because.SlurmSaid(notice=Notice.PREEMPTED, slurm_state="RUNNING"),)
    assert isinstance(judged, do.JudgeLaunch)
    assert judged.found is not None
    assert judged.found.reasons == (because.Sentence(text="stands still"),)
    assert [was_lost(each) for each in record.excluded] == [True, False]
    failed = [{"reason": "sentence", "text": "rank 1 failed"}]
    assert record.missed["plan"] == {"set": {"next": "relaunch", "why": failed}}
    assert record.missed["first_failure"] == failed
    assert record.missed["excluded"][0]["reasons"] == [{"reason": "lost_recently"}]

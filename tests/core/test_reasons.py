"""Reasons are types: each has its sentence, and no sentence decides anything.

After a change of wording, `STEPKEEPER_REWRITE=1 pytest tests/core/test_reasons.py` writes `reasons.txt`; the diff is
what to review.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType

import msgspec
import pytest

from stepkeeper import reason_text
from stepkeeper.core import events as on
from stepkeeper.core.losses import DISCONTINUITY
from stepkeeper.core.reasons import (
    Fact,
    FaultyNodesGiven,
    Late,
    LaunchSlow,
    LossWrong,
    Plain,
    Reason,
    ReplayDiffers,
    Sentence,
)
from stepkeeper.diagnosis import collect
from stepkeeper.diagnosis.classify import classify
from stepkeeper.run_analytics.metrics import Tally
from stepkeeper.run_analytics.timeline import Timeline
from stepkeeper.run_store import journal
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.simulate.scenario import play
from tests.core.test_scenarios import SCENARIOS
from tests.run_analytics.build import START, Journal, see, wrong_loss

TRANSCRIPT = Path(__file__).parent / "reasons.txt"
WORDS_MAX = 20
KINDS = typing.get_args(Reason)
GARBAGE = "lorem ipsum; the loss is no finite number since step 3; it was lost: taken for lost (Slurm says X)"


def value(hint: object) -> object:
    """Return a value of a type."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return list(hint)[-1]
    if typing.get_origin(hint) is tuple:
        inside = [each for each in typing.get_args(hint) if each is not Ellipsis]
        return (value(inside[0]),) if len(inside) == 1 else tuple(value(each) for each in inside)
    if isinstance(hint, UnionType):
        return value(next(each for each in typing.get_args(hint) if each is not NoneType))
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)[-1]
    samples: dict[object, object] = {str: "WORD", int: 7, float: 2.5, bool: True}
    return samples[hint]


def samples(kind: type[msgspec.Struct]) -> Iterator[msgspec.Struct]:
    """Yield a reason with as few facts as it needs, and with all; both of a flag."""
    hints = typing.get_type_hints(kind)
    fields = msgspec.structs.fields(kind)
    least = {field.name: value(hints[field.name]) for field in fields if field.required}
    most = {field.name: value(hints[field.name]) for field in fields}
    flags = [field.name for field in fields if hints[field.name] is bool]
    found = [least, most, *({**most, name: False} for name in flags)]
    tags = {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is typing.Literal}
    tags |= {"timer": tuple(reason_text.LATE)} if kind is Late else {}
    tags |= {"fact": tuple(Fact)} if kind is Plain else {}
    found += [{**most, name: tag} for name, each in tags.items() for tag in each]
    for facts in [facts for index, facts in enumerate(found) if facts not in found[:index]]:
        yield kind(**facts)


def test_what_has_no_words_is_a_mistake_that_says_which() -> None:
    with pytest.raises(LookupError, match="Tick"):
        reason_text.clause(on.Tick(at=0.0))  # type: ignore[arg-type]


def test_each_reason_has_a_sentence_that_somebody_has_read() -> None:
    lines = [
        f"{reason_text.tag((each,)):<22} {reason_text.text((each,))}"  # type: ignore[arg-type]
        for kind in KINDS
        for each in samples(kind)
    ]
    written = "\n".join(lines) + "\n"

    if os.environ.get("STEPKEEPER_REWRITE"):
        TRANSCRIPT.write_text(written)
    assert written == TRANSCRIPT.read_text()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_sentence_is_short_and_a_reason_survives_the_journal(kind: type[msgspec.Struct]) -> None:
    for each in samples(kind):
        said = reason_text.text((each,))  # type: ignore[arg-type]
        assert said.strip()
        assert all(len(sentence.split()) <= WORDS_MAX for sentence in said.replace(": ", "; ").split("; ")), said
        assert msgspec.json.decode(msgspec.json.encode(each), type=Reason) == each  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            LossWrong(rule=DISCONTINUITY, step=5, loss=7.0, baseline=3.25),
            "after the resume is 7 since step 5, and was 3.25",
        ),
        (LaunchSlow(seconds=1.4, baseline=1.0, launches=2, slowest="b", factor=1.4, rank=3), "node is b: 1.40 times"),
        (LaunchSlow(seconds=1.4, baseline=1.0, launches=2, all_new=True), "all its nodes are new"),
        (ReplayDiffers(step=3, then=1.0, now=1.5, deterministic=True), "its nodes are the same"),
        (FaultyNodesGiven(nodes=("a", "b", "c", "d", "e", "f"), used=False), "(a, b, c, d and 2 others)"),
    ],
)
def test_facts_change_the_sentence(reason: Reason, said: str) -> None:
    assert said in reason_text.text((reason,))


# --- sentences decide nothing ---------------------------------------------------------------------


def failed() -> Journal:
    """A run with a loss that goes wrong, a rank that dies, a lost node, a preemption and a command that ends with 0."""
    told = wrong_loss()
    told.tell(on.LaunchEnded(at=START + 31, launch=0, code=137))
    told.begin(100)
    told.launch(105, resume=10)
    told.rank_dies(106)
    told.launch(110, resume=10)
    told.tell(on.WatcherLost(at=START + 111, node="n2", bus=told.state.watchers.bus, why="silent"))
    told.tell(on.WatcherReady(at=START + 112, node="n1", bus=told.state.watchers.bus), on.Tick(at=START + 200))
    told.begin(300)
    told.launch(305, resume=10)
    told.steps(11, 10, at=305)
    told.tell(on.SignalReceived(at=START + 320, signal="TERM"))
    job = on.JobFacts(state=on.JobState.COMPLETING, slurm_state="COMPLETING", restarts=2, reason="TimeLimit")
    told.tell(on.SlurmAnswered(at=START + 320, job=job))
    told.tell(on.LaunchEnded(at=START + 330, launch=0, code=75, stopped=True))
    told.begin(400)
    told.launch(405, resume=20)
    told.tell(on.Requested(at=START + 406, name="stop-1", kind="stop", by="ada"))
    told.tell(on.LaunchEnded(at=START + 407, launch=0, code=75, stopped=True))
    told.begin(500, wrapped=False)
    told.tell(*[on.WatcherReady(at=START + 501, node=node, bus=1) for node in ("n1", "n2")])
    told.tell(on.CheckpointChosen(at=START + 501, directory=None, step=None))
    told.tell(on.NodesCleared(at=START + 501, launch=0, address="n1", port=1))
    told.tell(on.LaunchEnded(at=START + 502, launch=0, code=0))
    return told


def facts_of(seen: Timeline) -> object:
    """Return what a report says, without its sentences."""
    launches = [(each.ending, each.reason, each.decided, each.cause) for each in seen.launches()]
    incidents = [(each.at, each.kind, each.node) for each in seen.incidents]
    return launches, incidents, seen.run_state, seen.accounts


def all_facts(path: Path) -> object:
    """Write a journal, read it back, and return all that is concluded from it."""
    told = failed()
    run = RunDirectory(path)
    (path / "logs").mkdir(parents=True)
    writer = journal.JournalWriter(run.journal)
    tally = Tally()
    for record in told.records:
        writer.append(record)
        tally.take(record)
    assert writer.flush(20.0)
    records = list(journal.read(run.journal))
    verdicts = [
        [(each.rule, each.cause, each.role) for each in collect.of_journal(launch)]
        + [classify(collect.of_journal(launch)).cause]
        for launch in collect.launches(run)
    ]
    carried = msgspec.structs.replace(journal.reconstruct(run.journal), previous="")
    decided = [(record.reasons, record.phase, record.effects) for record in records]
    return decided, facts_of(see(records, told.rows)), tally._values, verdicts, carried


def test_sentences_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules, the journal, the report, the metrics and the verdicts come to the same when all words are garbage."""
    known = all_facts(tmp_path / "known")
    monkeypatch.setattr(reason_text, "clause", lambda _: GARBAGE)

    assert all_facts(tmp_path / "garbage") == known
    for path in SCENARIOS:
        assert play(path.read_text()) == path.read_text()
    records = list(journal.read(tmp_path / "garbage" / "journal.jsonl"))
    assert all(GARBAGE in record.why for record in records if record.reasons), "the words were replaced"


def test_a_reason_of_today_is_never_a_sentence_alone() -> None:
    reasons = [reason for record in failed().records for reason in record.reasons]

    assert len({type(each) for each in reasons}) > 15
    assert not [each for each in reasons if isinstance(each, Sentence)]

"""Runs that never were: journals that the real `decide` made of a small script of what happens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.decide import decide
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from stepkeeper.reason_text import text
from stepkeeper.run_analytics import history, timeline
from stepkeeper.run_analytics.model import Key, Rows, RowTable
from stepkeeper.run_analytics.timeline import Timeline
from stepkeeper.run_store.journal import VERSION, Record

START = 1_790_000_000.0


class Journal:
    """Writes records as the supervisor does: an attempt is begun, events are told, `at` counts from `START`."""

    def __init__(self, nodes: tuple[str, ...] = ("n1", "n2"), policy: Policy | None = None) -> None:
        self.nodes = nodes
        self.policy = policy or Policy()
        self.records: list[Record] = []
        self.rows: dict[Key, Rows] = {}
        self.state = State()
        self.attempt = -1

    def begin(self, at: float, **more: object) -> None:
        self.attempt += 1
        self.state = State()
        fields = {"nodes": self.nodes, "batch_node": self.nodes[0], "kill_wait_s": 30.0, **more}
        started = {"job_id": 7, "restart_count": self.attempt, "attempt": self.attempt}
        self.tell(on.AttemptStarted(at=START + at, **started, **fields))  # type: ignore[arg-type]

    def tell(self, *events: on.Event) -> None:
        for event in events:
            decision = decide(self.state, event, self.policy)
            state = self.state = decision.state
            self.records.append(
                Record(
                    v=VERSION,
                    job_id=7,
                    restart_count=self.attempt,
                    attempt=self.attempt,
                    launch=state.launch.number,
                    phase=state.phase,
                    event=event,
                    why=text(decision.why),
                    reasons=decision.why,
                    effects=decision.effects,
                    failures=state.budgets.failures,
                    node_losses=state.budgets.node_losses,
                    best_step=state.budgets.best_step,
                    nodes=state.nodes.usable,
                    excluded=state.nodes.excluded,
                )
            )

    def launch(self, at: float, resume: int = 0) -> None:
        """Let everything be ready: the ranks start at `at`."""
        ready = [node for node in self.state.nodes.usable if node not in self.state.watchers.ready]
        self.tell(*[on.WatcherReady(at=START + at, node=node, bus=self.state.watchers.bus) for node in ready])
        directory = f"/runs/r/checkpoints/step_{resume:08d}" if resume else None
        self.tell(on.CheckpointChosen(at=START + at, directory=directory, step=resume or None))
        self.tell(on.NodesCleared(at=START + at, launch=self.state.launch.number, address="n1", port=1))
        self.tell(on.RankHello(at=START + at, launch=self.state.launch.number, rank=0, node=self.state.nodes.usable[0]))

    def steps(self, first: int, count: int, at: float, seconds: float = 1.0) -> None:
        """Complete steps; the first one ends `seconds` after `at`."""
        rows = self.rows.setdefault((self.attempt, self.state.launch.number), Rows())
        for index in range(count):
            step = first + index
            rows.add(START + at + (index + 1) * seconds, step, 4.0 - 0.01 * step, step * 100)
        ended_at = START + at + count * seconds
        self.tell(on.Progressed(at=ended_at, launch=self.state.launch.number, step=first + count - 1, tokens=0))

    def commit(self, step: int, at: float, seconds: float = 1.0, *, emergency: bool = False) -> None:
        launch, save_id = self.state.launch.number, f"s{step}"
        began = START + at - seconds
        self.tell(on.SaveBegan(at=began, launch=launch, step=step, save_id=save_id, emergency=emergency))
        self.tell(
            on.CheckpointCommitted(
                at=START + at,
                launch=launch,
                step=step,
                save_id=save_id,
                directory=f"step_{step:08d}",
                bytes=10**9,
                seconds=seconds,
                emergency=emergency,
            )
        )

    def rank_dies(self, at: float, left: float = 0.0) -> None:
        """A rank ends with 1; the launch is over `left` seconds later."""
        launch = self.state.launch.number
        self.tell(on.RankExited(at=START + at, launch=launch, rank=1, node="n2", code=1))
        self.tell(on.LaunchEnded(at=START + at + left, launch=launch, code=1))
        if any(isinstance(effect, do.JudgeLaunch) for effect in self.records[-1].effects):
            said = {"cause": Cause.EXCEPTION, "rule": "python", "confidence": 0.9, "text": "ValueError: bad shape"}
            self.tell(on.Judged(at=START + at + left, launch=launch, **said))

    def see(self, **more: object) -> Timeline:
        return see(self.records, self.rows, **more)


def see(records: Iterable[Record], rows: dict[Key, Rows], **more: object) -> Timeline:
    return timeline.build(history.read_history(records), rows, **more)  # type: ignore[arg-type]


def killed() -> Journal:
    """A run whose supervisor was killed, and that went on from step 10."""
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 30, at=0)
    told.commit(10, at=10, seconds=0)
    told.begin(100)
    told.launch(105, resume=10)
    told.steps(11, 10, at=105)
    return told


def wrong_loss() -> Journal:
    """A run whose loss is no number from step 21 on; the launch is ended for it."""
    told = Journal()
    told.begin(0)
    told.launch(0)
    told.steps(1, 20, at=0)
    rows = told.rows[0, 0]
    for step in range(21, 30):
        rows.add(START + step, step, float("nan"))
        word = {"launch": 0, "step": step, "tokens": 0, "not_finite": True, "step_seconds": 1.0}
        told.tell(on.Progressed(at=START + step, **word))  # type: ignore[arg-type]
    return told


def read_rows(path: Path) -> dict[Key, Rows]:
    """Return what a file of metrics holds of each launch."""
    table = RowTable()
    for line in path.read_bytes().splitlines():
        table.take(line)
    return table.rows

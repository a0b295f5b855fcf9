"""A run of 16,384 GPUs over 54 days, as records and rows: 2,048 nodes, 419 interruptions, a million steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.run_analytics.model import Rows
from stepkeeper.run_store.journal import VERSION, Record
from tests.reasons import in_words

START = 1_790_000_000.0
DAY_S = 86_400.0


class Big:
    """Made once; `records` are yielded in their order."""

    def __init__(self, *, nodes: int = 2048, spares: int = 16, interruptions: int = 419, step_s: float = 4.5) -> None:
        self.random = random.Random(5)  # noqa: S311 - the same run each time
        self.names = tuple(f"gpu{index:05d}" for index in range(nodes + spares))
        self.wanted = nodes
        self.gap_s = 54 * DAY_S / interruptions
        self.count = interruptions
        self.step_s = step_s
        self.rows: dict[tuple[int, int], Rows] = {}
        self.attempt = self.launch = 0
        self.durable = 0

    def record(self, event: on.Event, phase: Phase, why: str = "", effects: tuple[do.Effect, ...] = ()) -> Record:
        return Record(
            v=VERSION, job_id=9, restart_count=self.attempt, attempt=self.attempt, launch=self.launch, phase=phase,
            event=event, why=why, effects=effects, nodes=self.held,
        )  # fmt: skip

    def records(self) -> Iterator[Record]:
        at = START
        for index in range(self.count):
            if index % 20 == 0:
                self.attempt, self.launch, self.held = index // 20, 0, self.names
                started = {"job_id": 9, "restart_count": self.attempt, "attempt": self.attempt, "kill_wait_s": 30.0}
                yield self.record(
                    on.AttemptStarted(at=at, nodes=self.names, batch_node=self.names[0], **started), Phase.STARTING
                )
            else:
                self.launch += 1
            step = self.durable
            yield self.record(
                on.CheckpointChosen(at=at + 5, directory=f"step_{step:08d}" if step else None, step=step or None),
                Phase.STARTING,
            )
            used = self.held[: self.wanted]
            start = do.StartLaunch(launch=self.launch, resume_from=None, address="a", port=1, nodes=used)
            cleared = on.NodesCleared(at=at + 20, launch=self.launch, address="a", port=1)
            yield self.record(cleared, Phase.TRAINING, "the nodes are clear and fit", (start,))
            yield self.record(on.RankHello(at=at + 60, launch=self.launch, rank=0, node=used[0]), Phase.TRAINING)
            end = at + self.random.expovariate(1 / self.gap_s) + 200
            yield from self.train(at + 120, end, step)
            victim = self.random.choice(used)
            self.held = tuple(node for node in self.held if node != victim)
            fault = {"incident": f"i{index}", "name": "XID 79", "action": "drain", "leave": True, "why": "it left"}
            yield self.record(on.NodeFaulted(at=end, node=victim, **fault), Phase.STOPPING, f"XID 79 on {victim}")
            ended = on.LaunchEnded(at=end + 2, launch=self.launch, code=137)
            yield self.record(ended, Phase.STARTING, "relaunch: XID 79", (do.ChooseCheckpoint(),))
            at = end + 2
            if index % 20 == 19:
                over = do.Exit(code=10, reasons=in_words("requeued"))
                yield self.record(on.RequeueAnswered(at=at, ok=True), Phase.DONE, "requeued", (over,))
                at += 900

    def train(self, at: float, end: float, step: int) -> Iterator[Record]:
        rows = self.rows[self.attempt, self.launch] = Rows()
        saved_at = at
        while at + self.step_s < end:
            at += self.step_s
            step += 1
            loss = 12 * (step + 10) ** -0.1 + self.random.gauss(0, 0.03)
            rows.add(at, step, loss + (30 if step % 50_021 == 0 else 0), step * 16_000_000)
            if at - saved_at > 1800:
                saved_at, self.durable = at, step
                saved = {"save_id": f"{step:x}", "directory": f"step_{step:08d}", "bytes": 10**13, "seconds": 40.0}
                yield self.record(on.CheckpointCommitted(at=at, launch=self.launch, step=step, **saved), Phase.TRAINING)

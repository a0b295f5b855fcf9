"""What one event changes in a run's status."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepkeeper.core import events as on
from stepkeeper.core.state import State
from stepkeeper.run_store.status import Status, changes


@pytest.mark.parametrize(("in_memory", "kind"), [(True, "snapshot_step"), (False, "checkpoint_step")])
def test_a_step_that_only_the_nodes_memory_has_is_no_checkpoint(status: Status, *, in_memory: bool, kind: str) -> None:
    before = State()
    after = replace(before, resume=replace(before.resume, step=16))
    hello = on.RankHello(at=1.0, launch=0, rank=0, node="a", resumed_step=16, in_memory=in_memory)

    found = changes(status, hello, before, after)

    assert {name: found.get(name) for name in ("snapshot_step", "checkpoint_step", "step")} == {
        "snapshot_step": None, "checkpoint_step": None, kind: 16, "step": 16,
    }  # fmt: skip


@pytest.fixture
def status() -> Status:
    fields = {"run_id": "r", "job_id": 7, "restart_count": 0, "attempt": 0, "launch": 0, "phase": "training"}
    return Status(**fields, nodes=("a",), started_at=0.0, updated_at=1.0)  # type: ignore[arg-type]

"""When a step is committed, every byte and every name of it is on disk: read off the system calls."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.trainer.durability import replay, trace
from tests.trainer.ranks import ROOT

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

OURS = """
import sys, time, torch
sys.path[:0] = [sys.argv[2] + "/trainer", sys.argv[2]]
from stepkeeper_trainer import Keeper, incremental, persist
incremental.COLD_BYTES_MIN = persist.FILE_BYTES_MIN = 1000
model = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, 1))
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
keeper = Keeper(model=model, optimizer=optimizer, run_dir=sys.argv[1])
keeper.resume()
for step in range(5):
    model(torch.rand(2, 60)).sum().backward()
    optimizer.step()
    keeper.step_done(loss=1.0)
    keeper.save()
    assert keeper._saver.wait(time.time() + 30)
"""

STOCK = """
import sys, torch
import torch.distributed.checkpoint as dcp
dcp.save({"a": torch.rand(1000)}, checkpoint_id=sys.argv[1] + "/step_00000001", no_dist=True)
"""


def test_nothing_of_a_committed_step_could_be_lost_in_a_power_cut(tmp_path: Path) -> None:
    run = tmp_path / "run"

    calls = trace(OURS, str(run), str(ROOT), log=tmp_path / "log")
    commits, after = replay(calls, re.compile(r'"([^"]+/\.tmp-step_[^"/]+)", "[^"]+/step_\d+"'))

    assert commits == [[]] * 5
    assert after.lost(str(run / "checkpoints")) == [], "renames and the lineage are durable too"
    linked = [rest for call, rest in calls if call.startswith("link") and ".distcp" in rest]
    assert linked, "the frozen layer was linked, and its name is as durable"


def test_stock_dcp_commits_before_its_bytes_are_on_disk(tmp_path: Path) -> None:
    """The same check, on torch's own writer: it syncs `.metadata` before it is written, and no directory."""
    calls = trace(STOCK, str(tmp_path), log=tmp_path / "log")

    [lost], _ = replay(calls, re.compile(r'"([^"]+)/\.metadata\.tmp", "[^"]+/\.metadata"'))

    assert f"bytes of {tmp_path}/step_00000001/.metadata.tmp" in lost
    assert any(text.startswith("name ") for text in lost)

"""Ranks that end while the others wait for them in `manager.finish`: scenes for `test_endings`."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from stepkeeper_trainer import CheckpointManager, StepkeeperError
from stepkeeper_trainer.coordinate import connections
from stepkeeper_trainer.coordinate import ending as outcomes
from stepkeeper_trainer.coordinate import ending as rollcall
from stepkeeper_trainer.tiers.tier import Tiers
from tests.trainer.scenes import loopback

SAVE_WITHIN_S = 600.0  # far beyond the limit of a scene
STEPS = 2


def finishes(
    rank: int, directory: Path, *, hit: str, who: int, how: str = "kill", slow: int | None = None, local: str = ""
) -> int:
    """Train two steps and finish; rank `who` is hit there, and rank `slow` takes its time to write."""
    rollcall.GRACE_S = 0.5
    connections.IDLE_S, connections.ASK_EVERY_S, connections.QUESTIONS, connections.LOST_AFTER_S = 1, 1, 2, 3
    if how == "power":
        outcomes.TOGETHER_WITHIN_S = 3.0  # nobody comes any more
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer},
        every=None,
        run_dir=directory,
        total_steps=STEPS,
        save_within_s=SAVE_WITHIN_S,
        retention="all",
        storage_test="off",
        tiers=Tiers(local=f"{local}/%N") if local else None,
    )
    manager.resume()
    while not manager.finished:
        model(torch.rand(4, 64)).sum().backward()
        optimizer.step()
        manager.step_done(loss=1.0)
    if rank == who:
        _arm(hit, lambda: _fall(how))
    if rank == slow:
        _arm("report.publish", lambda: time.sleep(2.0))
    if local:
        manager.save()  # the last one of a launch goes past the local disk; one in flight does not
        assert manager._saver is not None
        assert manager._saver.wait(time.time() + SAVE_WITHIN_S)  # on the local disk; `wait_saved` waits for all ranks
    try:
        return manager.finish()
    except StepkeeperError as error:
        print(f"[{rank}] {error}", flush=True)
        return error.exit_code


def _fall(how: str) -> None:
    if how == "power":  # its node says nothing any more, and closes nothing
        loopback(up=False)
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def _arm(hit: str, act: Any) -> None:
    """Have `act` called where this rank's part of a save comes to a point."""
    from stepkeeper_trainer.save import persist  # noqa: PLC0415
    from stepkeeper_trainer.tiers import uploader  # noqa: PLC0415

    holder: Any = {"report.publish": persist, "reported": persist, "uploader.push": uploader}[hit]
    name = hit.rpartition(".")[2] if hit != "reported" else "publish"
    original = getattr(holder, name)

    def hooked(*arguments: Any, **options: Any) -> Any:
        if hit != "reported":
            act()
        result = original(*arguments, **options)
        if hit == "reported":
            act()
        return result

    setattr(holder, name, hooked)

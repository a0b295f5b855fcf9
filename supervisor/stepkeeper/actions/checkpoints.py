"""Choosing and verifying step directories, on threads of their own."""

from __future__ import annotations

import time
from pathlib import Path

from stepkeeper.core import events as on
from stepkeeper.sources.inbox import Inbox
from stepkeeper_trainer.formats import steps
from stepkeeper_trainer.formats.cache import Cache

PROBLEM_CHARACTERS_MAX = 500


def choose(checkpoints: Path, *, inbox: Inbox) -> None:
    """Find the newest verified step directory; `CheckpointChosen` or `ChoiceFailed` comes."""

    def work() -> None:
        try:
            choice = steps.newest_verified(checkpoints)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            inbox.put(on.ChoiceFailed(at=inbox.clock.now(), error=why))
            return
        skipped = tuple(
            on.Skipped(directory=step.path.name, problem="; ".join(problems)[:PROBLEM_CHARACTERS_MAX])
            for step, problems in choice.skipped
        )
        chosen = choice.chosen
        inbox.put(
            on.CheckpointChosen(
                at=inbox.clock.now(),
                directory=str(chosen.path) if chosen else None,
                step=chosen.step if chosen else None,
                skipped=skipped,
            )
        )

    inbox.run_thread("choose-checkpoint", work)


def verify(checkpoints: Path, name: str, *, inbox: Inbox) -> None:
    """Read back one step directory; `CheckpointVerified` comes."""

    def work() -> None:
        started = time.monotonic()
        verdict = steps.verify(checkpoints / name, cache=Cache(checkpoints, knows=False))
        inbox.put(
            on.CheckpointVerified(
                at=inbox.clock.now(),
                directory=name,
                ok=verdict.ok,
                problem="; ".join(verdict.problems)[:PROBLEM_CHARACTERS_MAX],
                seconds=time.monotonic() - started,
            )
        )

    inbox.run_thread("verify-checkpoint", work)

"""Have Python write all threads' stacks when the node's watcher asks for them, and where the collectives are."""

from __future__ import annotations

import faulthandler
from typing import IO, TYPE_CHECKING

from stepkeeper_trainer.formats import stacks
from stepkeeper_trainer.observe import collectives

if TYPE_CHECKING:
    from pathlib import Path

    from stepkeeper_trainer.environment import Environment


_opened: list[IO[str]] = []  # faulthandler keeps the descriptor only


def listen(environment: Environment, run_directory: Path, rank: int) -> None:
    """Answer the watcher's signal from now on; where the logs cannot be written, /proc is left to it."""
    if environment.socket is None:
        return
    path = stacks.file(run_directory, environment.attempt, environment.launch, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError:
        return  # the run goes on without: the watcher sees that the signal is not caught
    _opened.append(file)
    faulthandler.register(stacks.SIGNAL, file=file, all_threads=True, chain=False)
    collectives.listen(path.parent.parent, rank)

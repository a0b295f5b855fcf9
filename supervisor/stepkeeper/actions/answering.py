"""Answering what a person asked, on a thread: the storage may hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core.reason_text import text
from stepkeeper.sources.inbox import Inbox, Part
from stepkeeper.store import asks


def answer(run_directory: Path, effect: do.AnswerRequest, *, inbox: Inbox, on_error: Callable[[OSError], None]) -> None:
    """Write the answer beside the ask."""

    def work() -> None:
        answered = asks.Answer(said=text(effect.reasons), ok=effect.ok, at=inbox.clock.now())
        try:
            asks.answer(run_directory, effect.name, answered)
        except OSError as error:
            on_error(error)  # the asker waits in vain, and says so

    inbox.run(Part.ANSWER, work)

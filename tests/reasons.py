"""Reasons that a test needs, whatever they say."""

from __future__ import annotations

from stepkeeper.core.reasons import Sentence, Why


def in_words(text: str) -> Why:
    """Return a reason of which only the words count."""
    return (Sentence(text=text),)

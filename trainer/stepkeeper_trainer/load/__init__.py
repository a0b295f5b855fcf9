"""Filling tensors from a step directory: on threads, each chunk checked before a byte of it is copied.

    what is wanted (wanted) -> tasks, a chunk each (planning) -> threads (filling) -> read and check a chunk (sources)
    -> its bytes to their places (working, tensors)

Chunks of which nothing is needed are not read.  Nothing is unpickled into code, and memory beyond the tensors is
bounded.
"""

from __future__ import annotations

from stepkeeper_trainer.load.fill import Limits, fill
from stepkeeper_trainer.load.plan import Wanted

__all__ = ["Limits", "Wanted", "fill"]

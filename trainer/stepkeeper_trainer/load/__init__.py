"""Filling tensors from a step directory: on threads, each chunk checked before a byte of it is copied.

    what is wanted -> tasks, a chunk each (plan) -> threads (worker) -> read and check a chunk (plan)
    -> its bytes to their places (worker)

Chunks of which nothing is needed are not read.  Nothing is unpickled into code, and memory beyond the tensors is
bounded.
"""

from __future__ import annotations

from stepkeeper_trainer.load.worker import Limits, Wanted, fill

__all__ = ["Limits", "Wanted", "fill"]

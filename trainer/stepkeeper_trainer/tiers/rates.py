"""Where an urgent save is written first: pure, from measured rates."""

from __future__ import annotations

from typing import Literal

SURE_FACTOR = 1.5  # a write may take so much longer than those before
First = Literal["local", "shared"]


def first_tier(*, leaving: bool, left_s: float | None, size: int, shared_bytes_per_s: float | None) -> First:
    """Say which tier a save goes to first.

    Training that goes on waits for the faster disk only.  A rank that leaves must see its bytes on shared storage,
    and writes them there at once where its time suffices: by way of the local disk they would be written twice.
    Where it does not suffice, the local disk has them at least, and the copy goes as far as it gets.

    Args:
        leaving: the processes end after this save.
        left_s: until the deadline; None: there is none.
        size: bytes of this rank; 0: unknown.
        shared_bytes_per_s: measured in this launch; None: not yet.

    >>> first_tier(leaving=False, left_s=None, size=10**9, shared_bytes_per_s=1e9)
    'local'
    >>> first_tier(leaving=True, left_s=60.0, size=10**9, shared_bytes_per_s=1e9)
    'shared'
    >>> first_tier(leaving=True, left_s=60.0, size=10**11, shared_bytes_per_s=1e9)
    'local'
    >>> first_tier(leaving=True, left_s=60.0, size=10**11, shared_bytes_per_s=None)  # nobody knows: the old way
    'shared'
    """
    if not leaving:
        return "local"
    if left_s is None or shared_bytes_per_s is None:
        return "shared"
    return "shared" if SURE_FACTOR * size / shared_bytes_per_s <= left_s else "local"


class Rate:
    """Bytes per second, of the newest measurements more than of old ones."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.bytes_per_s: float | None = None

    def measured(self, size: int, seconds: float) -> None:
        """Take in one measurement; too small a one says nothing."""
        if size < 1 or seconds <= 0:
            return
        now = size / seconds
        self.bytes_per_s = now if self.bytes_per_s is None else (self.bytes_per_s + now) / 2

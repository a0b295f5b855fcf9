"""Whether all ranks attach: decided once, by the store of the job, before any of them makes a process group.

A rank without the library would never come to the collective that makes the group, and the others would hang in it.
The first verdict in the store counts, so all ranks act alike, however late one of them is.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import LateError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

JOIN_WITHIN_S = 60.0
_ALL, _NOT_ALL = "all", "not all"


def join(store: Store, name: str, world_size: int, *, within_s: float = JOIN_WITHIN_S) -> None:
    """Return when all ranks are there; each calls it once with the same `name`.

    Raises:
        LateError: one of them did not come, on every rank.
        RuntimeError: the store is gone.
    """
    verdict = f"{name}/verdict"
    if store.add(f"{name}/ranks", 1) == world_size:
        store.compare_set(verdict, "", _ALL)
    with suppress(RuntimeError):  # nobody has decided in time: we do
        store.wait([verdict], timedelta(seconds=within_s))
    if store.compare_set(verdict, "", _NOT_ALL) != _ALL.encode():
        raise LateError(
            f"not all of the {world_size} ranks attached within {within_s:.0f} s: "
            "install stepkeeper in the environment of each rank, or set --attach off"
        )

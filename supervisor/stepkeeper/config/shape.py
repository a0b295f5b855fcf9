"""Do the settings fit the allocation and the command?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepkeeper.config.resolve import Config
from stepkeeper.core.placement import largest
from stepkeeper.errors import UsageError
from stepkeeper.slurm.cmd import is_own_srun, nodes_range, require_startable

_CHOOSE_NODES = ("spares", "min_nodes", "micro_batches")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes launches have."""

    wanted: int  # the others of the allocation are spares
    least: int  # when others fail; 0: never fewer
    counts: tuple[int, ...] = ()  # one of these; empty: any


def nodes_wanted(config: Config, nodes: int, command: Sequence[str]) -> int:
    """Return how many of so many nodes a launch shall have, whatever its ranks; raises as `of`."""
    return of(config, nodes, command).wanted


def of(config: Config, nodes: int, command: Sequence[str], ranks_per_node: int | None = None) -> Shape:
    """Return how many of an allocation's nodes a launch shall have, and how many it may have.

    Args:
        config: resolved.
        nodes: of the allocation.
        command: CMD; the range of an elastic torchrun's line counts where the settings name none.
        ranks_per_node: None where it is not known yet, as before a job is submitted.

    Raises:
        StepkeeperError: the settings do not fit the allocation, each other, or CMD.
    """
    settings = config.settings
    require_startable(command, torchrun=settings.torchrun)
    if is_own_srun(command):
        _require_none(config)
        return Shape(wanted=nodes, least=0)
    fewest, most = nodes_range(command) or (0, nodes)
    if fewest > most:
        raise UsageError(f"CMD: --nnodes={fewest}:{most}: the first is the smaller one")
    available = nodes - settings.spares
    if available < 1:
        raise UsageError(f"{config.described('spares')}: the allocation has {nodes} nodes, and at least one must train")
    wanted = min(available, most)
    spare = nodes - wanted
    if settings.min_nodes > wanted:
        raise UsageError(
            f"{config.described('min_nodes')}: a launch has {wanted} nodes ({nodes} of the allocation, {spare} of them "
            f"spares{f'; CMD: --nnodes up to {most}' if most < nodes else ''})"
        )
    if fewest > wanted or 0 < settings.min_nodes < fewest:
        said = config.described("min_nodes") if 0 < settings.min_nodes < fewest else f"a launch has {wanted} nodes"
        raise UsageError(f"CMD wants at least {fewest} nodes (--nnodes): {said}")
    shape = Shape(wanted=wanted, least=settings.min_nodes or fewest)
    return shape if ranks_per_node is None or not settings.micro_batches else _evenly(config, shape, ranks_per_node)


def _require_none(config: Config) -> None:
    """Refuse settings that choose nodes beside a line that does so itself."""
    said = [config.described(key) for key in _CHOOSE_NODES if config.values[key].value]
    if said:
        raise UsageError(
            f"{' and '.join(said)}: {', '.join(_CHOOSE_NODES)} choose the nodes of a launch, which an own srun line "
            "does itself: leave out `srun` and its options, and one task a GPU is started"
        )


def _evenly(config: Config, shape: Shape, ranks_per_node: int) -> Shape:
    """Leave the numbers of nodes whose ranks share the micro-batches of a step evenly."""
    micro_batches = config.settings.micro_batches
    fitting = tuple(
        n for n in range(1, micro_batches // ranks_per_node + 1) if micro_batches % (n * ranks_per_node) == 0
    )
    counts = tuple(n for n in fitting if n <= shape.wanted)
    wanted = largest(counts, shape.least, shape.wanted) if counts else 0
    if not wanted:
        raise UsageError(
            f"{config.described('micro_batches')}: ranks of {shape.least or 1} to {shape.wanted} nodes, "
            f"{ranks_per_node} on each, do not share {micro_batches} micro-batches evenly; "
            + (
                f"these numbers of nodes would: {', '.join(map(str, fitting))}"
                if fitting
                else "no number of nodes would"
            )
        )
    return Shape(wanted=wanted, least=shape.least, counts=counts)

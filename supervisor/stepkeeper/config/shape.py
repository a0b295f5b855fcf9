"""Do the settings fit the allocation and the command?"""

from __future__ import annotations

from collections.abc import Sequence

from stepkeeper.config.resolve import Config
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm.cmd import is_own_srun, require_startable


def nodes_wanted(config: Config, nodes: int, command: Sequence[str]) -> int:
    """Return how many of so many nodes a launch shall have.

    Raises:
        StepkeeperError: the settings do not fit the allocation, or the user's own srun line.
    """
    settings = config.settings
    require_startable(command, torchrun=settings.torchrun)
    if is_own_srun(command) and (settings.spares or settings.min_nodes):
        said = " and ".join(config.told(key) for key in ("spares", "min_nodes") if config.values[key].value)
        raise StepkeeperError(
            f"{said}: spares and min_nodes choose the nodes of a launch, which an own srun line does itself: "
            "leave out `srun` and its options, and one task a GPU is started",
            ExitCode.USAGE,
        )
    wanted = nodes - settings.spares
    if wanted < 1:
        raise StepkeeperError(
            f"{config.told('spares')}: the allocation has {nodes} nodes, and at least one must train",
            ExitCode.USAGE,
        )
    if settings.min_nodes > wanted:
        raise StepkeeperError(
            f"{config.told('min_nodes')}: a launch has {wanted} nodes "
            f"({nodes} of the allocation, {settings.spares} of them spares)",
            ExitCode.USAGE,
        )
    return wanted

"""Whether the node is fit for jobs again, by one fresh look at its GPUs.

By the very rules that drain it: a node that is returned must not be drained at the next reading.
"""

from __future__ import annotations

import msgspec

from stepkeeper.node.core.events import Looked
from stepkeeper.node.sensors import nvml
from stepkeeper.node.sensors.evidence import Roots, gpu_addresses
from stepkeeper.node.sensors.readings import NvmlState
from stepkeeper.node.xid import health
from stepkeeper.node.xid.catalogue import Catalogue
from stepkeeper.node.xid.model import Action

LOOK_WITHIN_S = 30.0


class Fitness(msgspec.Struct, frozen=True, kw_only=True):
    """What a look has found."""

    unfit: str = ""  # why the node is not fit; "" where every GPU answers and asks for nothing
    looked: Looked | None = None  # None: NVML is not there


def look(catalogue: Catalogue, expected_gpus: int, within_s: float = LOOK_WITHIN_S) -> Fitness:
    """Look at all GPUs, once."""
    look = nvml.once(within_s)
    status = look.status
    if status.state is not NvmlState.READY:
        stuck = Looked(answers=False) if status.state is NvmlState.STUCK else None
        return Fitness(unfit=f"NVML is {status.state.value}: {status.detail}", looked=stuck)
    problems = []
    answering, well = [], []
    listed, on_the_bus = {gpu.pci for gpu in status.gpus}, gpu_addresses(Roots())
    away = [address for address in on_the_bus if address not in listed]
    gone = health.missing(expected_gpus, len(status.gpus), at=status.at, catalogue=catalogue, gone=away)
    if gone is not None:
        problems.append(gone.why)
    if len(look.health) < len(status.gpus):
        problems.append(f"only {len(look.health)} of {len(status.gpus)} GPUs told how they are")
    for each in look.health:
        if each.silent:
            problems.append(f"GPU {each.pci} does not answer: {'; '.join(each.errors)}")
        found = health.judge_health(each, None, catalogue=catalogue)
        asks = [f"GPU {each.pci}: {fault.why}" for fault in found if fault.action is not Action.LOG]
        problems += asks
        if not (each.silent or each.lost):
            answering.append(each.pci)
            if not asks:
                well.append(each)
    looked = Looked(
        answering=tuple(answering),
        well=tuple(each.pci for each in well),
        vouched=tuple(each.pci for each in well if each.recovery_action is not None),
        here=tuple(sorted(listed.union(on_the_bus))),
    )
    return Fitness(unfit="; ".join(problems), looked=looked)

"""Whether the node is fit for jobs again, by one fresh look at its GPUs.

By the very rules that drain it: a node that is returned must not be drained at the next reading.
"""

from __future__ import annotations

from stepkeeper.node.sensors import nvml
from stepkeeper.node.sensors.evidence import Roots, gpu_addresses
from stepkeeper.node.sensors.readings import NvmlState
from stepkeeper.node.xid import health
from stepkeeper.node.xid.catalogue import Catalogue
from stepkeeper.node.xid.model import Action

LOOK_WITHIN_S = 30.0


def unfit(catalogue: Catalogue, expected_gpus: int, within_s: float = LOOK_WITHIN_S) -> str:
    """Return why the node is not fit; "" where every GPU answers and asks for nothing."""
    look = nvml.once(within_s)
    status = look.status
    if status.state is not NvmlState.READY:
        return f"NVML is {status.state.value}: {status.detail}"
    problems = []
    listed = {gpu.pci for gpu in status.gpus}
    away = [address for address in gpu_addresses(Roots()) if address not in listed]
    gone = health.missing(expected_gpus, len(status.gpus), at=status.at, catalogue=catalogue, gone=away)
    if gone is not None:
        problems.append(gone.why)
    if len(look.health) < len(status.gpus):
        problems.append(f"only {len(look.health)} of {len(status.gpus)} GPUs told how they are")
    for each in look.health:
        if each.silent:
            problems.append(f"GPU {each.pci} does not answer: {'; '.join(each.errors)}")
        found = health.judge_health(each, None, catalogue=catalogue)
        problems += [f"GPU {each.pci}: {fault.why}" for fault in found if fault.action is not Action.LOG]
    return "; ".join(problems)

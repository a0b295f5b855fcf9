"""What to do: the only output of the agent's `decide` besides the next state.

Those with a `call` are answered, always, by `NodesAnswered` or `CallAnswered` with the same number.
"""

from __future__ import annotations

import msgspec

from stepkeeper.node_agent.core.state import Drain, Incident


class _Effect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="effect"):
    pass


class Record(_Effect, frozen=True, kw_only=True, tag="record"):
    """Write an incident to the ledger: a later line of the same id replaces the earlier one."""

    incident: Incident


class RecordDrain(_Effect, frozen=True, kw_only=True, tag="record_drain"):
    """Write to the ledger which drain we hold; None: none any more."""

    drain: Drain | None


class Tell(_Effect, frozen=True, kw_only=True, tag="tell"):
    """Say an incident to the jobs on the node."""

    incident: Incident
    drained: bool


class ListJobs(_Effect, frozen=True, kw_only=True, tag="list_jobs"):
    """Ask this node itself which jobs run on it; no call to the controller."""

    incident: str


class AskNodes(_Effect, frozen=True, kw_only=True, tag="ask_nodes"):
    """Ask Slurm about the node and its peers, in one call."""

    call: int
    alone: bool = False  # about the node only: Slurm answers that without packing all nodes
    crowded_s: float = 0.0  # where that takes so long, the size of the cluster is wanted too


class SetDrain(_Effect, frozen=True, kw_only=True, tag="set_drain"):
    """Drain our node."""

    call: int
    reason: str


class Resume(_Effect, frozen=True, kw_only=True, tag="resume"):
    """Return our node to service."""

    call: int


class Reboot(_Effect, frozen=True, kw_only=True, tag="reboot"):
    """Have Slurm reboot our node."""

    call: int
    reason: str


class ResetGpus(_Effect, frozen=True, kw_only=True, tag="reset_gpus"):
    """Reset GPUs that nobody uses."""

    call: int
    pcis: tuple[str, ...]


class CheckNode(_Effect, frozen=True, kw_only=True, tag="check_node"):
    """Look whether the node is fit for jobs."""

    call: int


class Alarm(_Effect, frozen=True, kw_only=True, tag="alarm"):
    """Say loudly what a person has to know."""

    text: str
    incident: str = ""


Effect = Record | RecordDrain | Tell | ListJobs | AskNodes | SetDrain | Resume | Reboot | ResetGpus | CheckNode | Alarm

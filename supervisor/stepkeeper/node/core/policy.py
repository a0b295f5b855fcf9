"""The numbers that the agent's decisions depend on, each named, with its unit and a reason for its default."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """Whether the agent does what it decides."""

    OBSERVE = "observe"  # it says what it would do
    ACT = "act"


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the administrator allows, and every limit that `decide` compares with."""

    mode: Mode = Mode.OBSERVE

    undrain: bool = False
    """Return a node that we drained, once it was reset or rebooted and has passed its checks."""

    reset_gpus: bool = False
    """Remedy: `nvidia-smi --gpu-reset`, on a node that we drained and that no job uses any more."""

    reset_within_s: float = 300.0
    """For all GPUs together; then a reset counts as failed."""

    reboot: bool = False
    """Remedy: `scontrol reboot`, where a reset cannot help or has failed.  Asks for `undrain` too: Slurm itself
    returns a node that it has rebooted, and the checks then follow."""

    nodes_min: int = 2
    """Circuit breaker: so many nodes of a partition may be drained by us in any case."""

    nodes_share: float = 0.05
    """Circuit breaker: above that, this share of a partition's nodes."""

    drains_per_hour: int = 4
    """Circuit breaker: what hits more nodes in an hour is the fabric, the driver or a job."""

    gather_s: float = 5.0
    """A fault's burst: what an uncertain fault asks for is settled after this; certain ones do not wait."""

    join_s: float = 30.0
    """What a GPU reports this soon after an incident's last word belongs to it."""

    repeat_within_s: float = 7 * 86400.0
    """The same GPU in need of a reset or reboot a second time within this is broken."""

    restarts_within_s: float = 86400.0
    """Faults that cost a GPU's job its life count together for this long."""

    restarts_max: int = 3
    """So many of those in one place of a GPU, with no job and no user there each time, and the GPU is checked."""

    agreement: bool = True
    """What only the kernel log says drains the node once NVML, where it is there, does not find the GPU well."""

    keep_s: float = 8 * 86400.0
    """Incidents are remembered this long: longer than anything above looks back."""

    incidents_max: int = 500
    """Remembered at most; unresolved ones count first."""

    retry_s: float = 1.0
    """After the first call to Slurm that failed; doubled from try to try."""

    retry_max_s: float = 60.0
    """The longest pause between two tries: a drain is never given up."""

    answer_within_s: float = 120.0
    """A call is always answered; one that was not by then is made again."""

    crowded_s: float = 0.2
    """Slurm takes this long to tell of our own node alone: many agents ask, or it is busy.  Then the count of all
    nodes, which costs slurmctld a thousand times as much on a large cluster, waits."""

    crowd_spread: float = 1800.0
    """That wait is spread by node over so many times as long as Slurm took."""

    crowd_spread_max_s: float = 3600.0
    """No longer: of a crowd, the breaker lets a few nodes an hour be drained."""

    watch_s: float = 300.0
    """While we hold a drain: how often Slurm is asked whether a person has taken it away.  Else never."""

    idle_poll_s: float = 60.0
    """While a remedy waits for the last job to leave."""

    check_again_s: float = 60.0
    """After checks that failed."""

"""What a watcher is told at its start, in one environment variable.

Not on its command line: other users of a node read command lines, and must not know the ranks' address before it
is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import xxhash

from stepkeeper.slurm.environment import WATCHER_VARIABLE

VARIABLE = WATCHER_VARIABLE


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a watcher serves."""

    run_directory: str
    run_id: str
    job_id: int
    slurm_name: str  # of the job, as Slurm's commands want it
    restart_count: int
    attempt: int
    nodes: tuple[str, ...]
    kill_wait_s: float
    nonce: str  # nobody can guess it: another user could take the ranks' address first
    started_at: float = 0.0  # of the attempt, Unix seconds
    resubmit: bool = False  # submit the job again where Slurm may not requeue it
    words: tuple[str, ...] = ()  # the supervisor's own command line
    batch: bool = True  # false: nothing of the job can be requeued or submitted again
    stop_signal: str = "TERM"  # for ranks without the trainer library
    bus: int = 0  # the higher one takes over from the lower

    @property
    def epoch(self) -> tuple[int, int, int, int]:
        """What decides between two watchers of a run on one node."""
        return (self.job_id, self.restart_count, self.attempt, self.bus)

    def socket_name(self, node: str = "%N") -> str:
        """Return the ranks' address: an abstract socket, which reaches into containers by itself.

        `%N` stands for the node's name, filled in on the node.
        """
        of_attempt = f"{self.run_id}/{self.job_id}.{self.restart_count}/{self.nonce}"
        return f"@stepkeeper-{xxhash.xxh3_64_hexdigest(of_attempt.encode())}/{node}"

    def environment(self) -> dict[str, str]:
        """Return what the watcher finds in its environment."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def read(environment: Mapping[str, str]) -> Assignment:
    """Parse what `environment` made.  Raises KeyError, msgspec.MsgspecError."""
    return msgspec.json.decode(environment[VARIABLE], type=Assignment)

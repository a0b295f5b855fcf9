"""What a watcher is told at its start: one JSON argument on its command line."""

from __future__ import annotations

import os

import msgspec


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a watcher serves."""

    run_directory: str
    run_id: str
    job_id: int
    restart_count: int
    attempt: int
    nodes: tuple[str, ...]
    kill_wait_s: float

    def socket_name(self, node: str = "%N") -> str:
        """Return the ranks' address: an abstract socket, which reaches into containers by itself.

        `%N` stands for the node's name, filled in on the node.
        """
        return f"@stepkeeper/{self.run_id}/{self.job_id}.{self.restart_count}/{node}"

    def encode(self) -> str:
        """Return the argument."""
        return msgspec.json.encode(self).decode()


def decode(argument: str) -> Assignment:
    """Parse the argument.  Raises msgspec.MsgspecError."""
    return msgspec.json.decode(argument, type=Assignment)


def node_name() -> str:
    """Return the name by which Slurm knows this node."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]

"""A Slurm client in a process of an ordinary user, for the contract tests: a call comes in, its answer goes out.

`python driver.py commands|pyslurm [PYTHON]`; a line of standard input is `[method, [arguments]]`.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands


def main() -> None:
    client = _client(*sys.argv[1:])
    for line in sys.stdin:
        method, arguments = msgspec.json.decode(line)
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(client, method)(*arguments)}
        except SlurmError as error:
            answer = {"error": str(error), "unreachable": error.unreachable}
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _client(kind: str, python: str = "") -> SlurmCommands:
    if kind == "commands":
        return SlurmCommands()
    from stepkeeper.slurm.pyslurm_client import PyslurmClient  # noqa: PLC0415 - of no use to the others

    return PyslurmClient(python=python)


if __name__ == "__main__":
    main()

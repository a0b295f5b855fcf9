"""A process that serves the agent's socket before a Slurm of its own making: attacked, measured and killed by tests.

    python -m tests.node_agent.socket.agent PATH LIMITS_JSON

Reads one command a line: `jobs`, `hangs`, `publish`.  Prints one JSON object a line: the log, looks and calls.
"""

import json
import sys
import threading
from typing import Any

import msgspec
import structlog

from stepkeeper.node_agent.connections import Limits
from stepkeeper.node_agent.protocol import Seen
from stepkeeper.node_agent.server import AgentSocket
from stepkeeper.slurm.client import NodeFacts, OwnedJob, SlurmError

NODE = "n1"
HANGS_S = 200.0


class SmallSlurm:
    """Keeps jobs in memory; answers nobody as long as it hangs."""

    def __init__(self) -> None:
        self.jobs: dict[int, OwnedJob] = {}
        self.answers = threading.Event()
        self.answers.set()

    def owned_job(self, job_id: int) -> OwnedJob:
        say(call="owned_job", job=job_id)
        self.answers.wait(HANGS_S)
        if job_id not in self.jobs:
            raise SlurmError(f"slurm_load_jobs error: Invalid job id specified: {job_id}")
        return self.jobs[job_id]

    def expedite(self, job: OwnedJob, exclude: str, after_s: int) -> None:
        say(call="hasten", job=job.job_id, exclude=exclude, after_s=after_s)

    def requeue(self, job: OwnedJob) -> None:
        say(call="requeue", job=job.job_id)

    def node(self, name: str) -> NodeFacts:
        raise AssertionError(f"the socket asked about node {name}")

    def peers(self, name: str) -> tuple[NodeFacts, ...]:
        raise AssertionError(f"the socket asked about the peers of {name}")

    def cluster_size(self) -> int:
        raise AssertionError("the socket asked for the size of the cluster")

    def drain(self, name: str, reason: str) -> None:
        raise AssertionError(f"the socket drained {name}: {reason}")

    def resume(self, name: str) -> None:
        raise AssertionError(f"the socket resumed {name}")

    def reboot(self, name: str, reason: str) -> None:
        raise AssertionError(f"the socket rebooted {name}: {reason}")


def say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")  # at once: other threads write too
    sys.stdout.flush()


def main() -> int:
    path, limits = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Limits)
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
    )
    slurm = SmallSlurm()
    open_incidents: list[Seen] = []

    agent = AgentSocket(
        path,
        node=NODE,
        acts=True,
        client=slurm,
        on_look=lambda: say(look=True),
        open_incidents=lambda: open_incidents,
        log=structlog.get_logger(),
        limits=limits,
        version="1",
    )
    agent.start()
    for line in sys.stdin:
        command = json.loads(line)
        for job in command.get("jobs", ()):
            slurm.jobs[job["job_id"]] = msgspec.convert(job, OwnedJob)
        if "hangs" in command:
            (slurm.answers.clear if command["hangs"] else slurm.answers.set)()
        if "publish" in command:
            seen = msgspec.convert(command["publish"], Seen)
            open_incidents.append(seen)
            agent.publish(seen)
        say(done=command["number"], alive=agent.alive)
    agent.close()
    say(closed=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

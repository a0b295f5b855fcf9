"""A script below submitit, as its documentation has it; prints the job's number.

DIRECTORY SECONDS NAME MINUTES PORT COMMAND...
"""

import os
import subprocess
import sys

import submitit


class Train:
    def __init__(self, port: str, command: list[str]) -> None:
        self.port, self.command = port, command

    def __call__(self) -> int:
        place = submitit.JobEnvironment()
        ranks = {"RANK": place.global_rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": place.num_tasks}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        environment = {name: str(value) for name, value in (ranks | meeting).items()}
        return subprocess.run(self.command, check=True, env={**os.environ, **environment}).returncode

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)  # the script finds its last checkpoint


directory, seconds, name, minutes, port, *command = sys.argv[1:]
executor = submitit.SlurmExecutor(folder=directory, python=sys.executable)
executor.update_parameters(
    job_name=name,
    nodes=2,
    ntasks_per_node=1,
    cpus_per_task=1,
    mem="2000",
    gpus_per_node=1,
    time=int(minutes),
    signal_delay_s=int(seconds),
)
print(executor.submit(Train(port, command)).job_id)

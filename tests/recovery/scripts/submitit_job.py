"""The training as submitit's checkpointable callable; `python submitit_job.py FOLDER SECONDS OPTIONS` submits it."""

import os
import sys

import submitit


class Training:
    """Called in every task of the job, again after a requeue."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv

    def __call__(self) -> None:
        import plain  # noqa: PLC0415 - imports torch, which who submits does not need

        job = int(os.environ["SLURM_JOB_ID"]) * 16 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(12_000 + job % 7000)
        plain.main(self.argv)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called in rank 0 by the signal: what is sharded cannot be collected there; the file goes on from the last."""
        return submitit.helpers.DelayedSubmission(Training(self.argv))


def main() -> None:
    """Submit, and print the job's id."""
    folder, signal_before_s, *argv = sys.argv[1:]
    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(
        nodes=2,
        ntasks_per_node=1,
        gpus_per_node=1,
        cpus_per_task=1,
        mem="2000",
        time=60,
        partition="train",
        signal_delay_s=int(signal_before_s),
        job_name="submitit",
    )
    from submitit_job import Training as Importable  # noqa: PLC0415 - pickled by its name, not by value

    print(executor.submit(Importable(argv)).job_id)


if __name__ == "__main__":
    main()

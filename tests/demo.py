"""`make demo`: a real training job on a real Slurm is preempted, resumes, and loses nothing.

python -m tests.demo [--steps N] [--keep]
"""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.journal import Record
from tests.lab import Lab, LabOptions
from tests.lab.jobs import ENDED
from tests.lab.looking import holds_within
from tests.lab.requirements import missing
from tests.training import Training

PROGRESS_EVERY_S = 2.0
DEMO_S = 480.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Show a training that survives a preemption.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the job (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up, to look around")
    options = parser.parse_args()
    if problems := missing():
        sys.stderr.write("the demo needs a Slurm of its own on this machine:\n  " + "\n  ".join(problems) + "\n")
        return 1
    say("starting a Slurm cluster of 4 nodes on this machine")
    lab = Lab(LabOptions(nodes=4, grace_time_s=30), owned=not options.keep).up()
    with contextlib.nullcontext() if options.keep else contextlib.closing(_Closing(lab)):
        say(f"the cluster is up after {lab.up_s:.1f} s: {', '.join(lab.node_names)}")
        return play(lab, options.steps)


class _Closing:
    def __init__(self, lab: Lab) -> None:
        self.close = lab.down


def play(lab: Lab, steps: int) -> int:
    reference = Training(lab, name="uninterrupted", steps=steps, step_seconds=0.0).submit()
    say(f"job {reference.job_id}: the uninterrupted run, for comparison")
    follow(reference)

    training = Training(lab, name="preempted", steps=steps, step_seconds=0.2).submit()
    say(f"job {training.job_id}: sbatch -N2 sbatch/stepkeeper.sbatch python -m stepkeeper_trainer.examples.train_lm")
    follow(training, until=lambda: training.step() >= steps // 3)
    urgent = lab.preempt(training.job_id)
    say(f"job {urgent}: an urgent job takes both nodes: Slurm preempts job {training.job_id}")
    lab.wait_job(urgent, "RUNNING")
    say(f"job {urgent} runs, on the nodes that job {training.job_id} gave back")
    training.until(lambda: not lab.job(training.job_id).nodes or training.events(on.AttemptStarted)[1:], "the requeue")
    lab.release(urgent)
    follow(training)

    timeline(training)
    return prove(training, reference)


def follow(training: Training, until=lambda: False) -> None:
    """Print step, loss and state until the job is over, or a condition holds."""
    limit, shown = time.monotonic() + DEMO_S, None
    while not until():
        state = training.lab.job(training.job_id).state
        found = status_file.read(training.run_dir / "status.json") if training.run_dir.exists() else None
        line = f"job {training.job_id} {state.lower():10}"
        if found is not None:
            line += f" attempt {found.attempt}  {found.phase:10}"
            line += f" step {found.step}/{training.steps}  loss {found.loss:.4f}" if found.step and found.loss else ""
        if line != shown:
            say(line)
            shown = line
        if state in ENDED:
            return
        if time.monotonic() > limit:
            raise SystemExit(f"the job did not end in {DEMO_S:g} s\n{training.story()}")
        holds_within(until, PROGRESS_EVERY_S)  # what is to happen next comes as soon as it may


def told(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the decisions of a story, each once: of those in a row that say the same, the last one."""
    decisions = [
        record
        for record in records
        if record.why and not isinstance(record.event, on.CheckpointCommitted | on.WatcherReady)
    ]
    seen = set()
    for _, alike in itertools.groupby(decisions, lambda record: (record.attempt, record.why)):
        *_, record = alike
        key = (record.attempt, record.phase, record.why)
        if key not in seen:
            seen.add(key)
            yield record


def timeline(training: Training) -> None:
    """Tell the story from the journal."""
    print(f"\nThe story, from {training.run_dir.name}/journal.jsonl:")
    records = training.records()
    for record in told(records):
        seconds = record.event.at - records[0].event.at
        print(f"  {seconds:7.2f} s  attempt {record.attempt}  {record.phase.value:10}  {record.why}")
    saves = training.events(on.CheckpointCommitted)
    print(f"  {len(saves)} checkpoints committed: steps {', '.join(str(save.event.step) for save in saves)}")
    notices = [r.event.at for r in records if any(isinstance(e, do.RequestSave) for e in r.effects)]
    commits = [save.event.at for save in saves if save.event.emergency]
    if notices and commits:
        print(f"  from the notice to the verified emergency checkpoint: {commits[0] - notices[0]:.2f} s")


def prove(training: Training, reference: Training) -> int:
    found, expected = training.losses(), reference.losses()
    equal = sum(found.get(step) == loss for step, loss in expected.items())
    launches = {(row["attempt"], row["launch"]) for row in training.rows().values()}
    print(f"\n{equal} of {len(expected)} losses are equal to the last bit, over {len(launches)} launches.")
    if equal != len(expected) or len(found) != len(expected):
        print(training.story())
        return 1
    last = max(expected)
    print(f"Last step {last}: {found[last]} after a preemption, {expected[last]} without.")
    return 0


def say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S}  {text}", flush=True)  # noqa: DTZ005 - the user's own clock


if __name__ == "__main__":
    sys.exit(main())

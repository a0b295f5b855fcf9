"""`make bench-frameworks`: unmodified scripts of four frameworks, alone and under Stepkeeper (root, Slurm).

Each fault meets each script in each way, one job each.  It writes docs/frameworks-recovery.md.

    python -m tests.bench_frameworks [--scripts huggingface,lightning] [--ways alone,stepkeeper] [--page PATH]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.frameworks import environments
from tests.lab import Lab, LabOptions
from tests.lab.jobs import ENDED
from tests.lab.looking import holds_within
from tests.ports import reserve
from tests.stories import framework_jobs as jobs
from tests.stories.framework_jobs import Job, Script
from tests.stories.test_campaign import release_urgent_jobs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "frameworks-recovery.md"
TEMPLATE = Path(__file__).with_name("stories") / "frameworks-recovery.md"
SUBMITIT = "submitit==1.5.4"
OPTIONS = LabOptions(nodes=8, grace_time_s=20, kill_wait_s=10, send_user_signal=True)
WITHIN_S = 300.0  # five minutes, as `shown` says
BY_HAND_MAX = 3
AT_ONCE = 2
SIGNAL_BEFORE_S = 15
ERROR_CHARACTERS = 100
LIMIT = "time limit"
NOT_PLAYED = "not run"
NOT_RUN = "*Not run*: the benchmark was stopped before these cells. It ran the cells that matter most first.\n\n"
STEPKEEPER, ALONE, SUBMITIT_WAY, LIGHTNING = "Stepkeeper", "alone", "submitit", "Lightning's requeue"


@dataclass(frozen=True)
class Fault:
    """What happens to a job."""

    name: str
    act: Callable[[Job], None] | None  # None: it runs into its time limit
    scripts: tuple[Script, ...] = jobs.ALL


# what tells most comes first: a bench that is ended has measured that
FAULTS = (
    Fault("killed in a save", jobs.killed_in_a_save),
    Fault("rank 1 killed before its part is saved", jobs.killed_before_the_last_rank_has_saved, (jobs.DEEPSPEED,)),
    Fault("preempted in training", jobs.preempted_in_training),
    Fault(LIMIT, None),
    Fault("preempted in an evaluation", jobs.preempted_in_evaluation),
    Fault("preempted in warm-up", jobs.preempted_in_warm_up),
)


@dataclass
class Outcome:
    """What became of a job."""

    script: str
    fault: str
    way: str
    again: int = 0  # steps that were done twice
    by_hand: int = 0  # how often somebody had to submit it
    failed: str = ""  # how it fails at each start
    endless: str = ""  # where it is after `WITHIN_S`
    other_losses: bool = False  # than those of a run without any fault

    def shown(self) -> str:
        """Return the cell of the table."""
        if self.failed:
            return f"**fails at each start**: `{self.failed}`"
        if self.endless:
            return f"**no end in five minutes**: {self.endless}"
        hands = {0: "", 1: ", submitted by hand"}.get(self.by_hand, f", submitted by hand {self.by_hand} times")
        other = ", **other losses**" if self.other_losses else ""
        return f"{self.again} steps again{hands}{other}"


def ways(script: Script) -> list[str]:
    found = [ALONE, STEPKEEPER]
    if script is jobs.HUGGINGFACE:
        found.insert(1, SUBMITIT_WAY)
    if script is jobs.LIGHTNING:
        found.insert(1, LIGHTNING)
    return found


class Bench:
    """One lab, and what was found on it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.outcomes: list[Outcome] = []
        self.expected: dict[str, dict[int, str]] = {}
        self.packages = ""
        self.serial = itertools.count(1)
        self.once = threading.Lock()

    def cell(self, script: Script, fault: Fault, way: str) -> Outcome:
        outcome = Outcome(script.framework, fault.name, way)
        with jobs.another_file_system() as elsewhere:
            job = self.begin(script, fault, way, elsewhere)
            if fault.act is not None:
                fault.act(job)
            release_urgent_jobs(self.lab)
            self.follow(job, way, outcome)
        outcome.again = job.done_twice()
        if not (outcome.failed or outcome.endless) and fault.name != LIMIT:
            outcome.other_losses = job.losses() != self.whole(script)
        return outcome

    def whole(self, script: Script) -> dict[int, str]:
        """Return the losses of a run without any fault: played once."""
        with self.once:
            if script.framework not in self.expected:
                self.expected[script.framework] = jobs.whole(self.lab, script)
            return self.expected[script.framework]

    def begin(self, script: Script, fault: Fault, way: str, elsewhere: dict[str, str]) -> Job:
        name = f"{script.framework}-{next(self.serial)}"
        job = Job(
            self.lab,
            name=name,
            kind=script,
            alone=way != STEPKEEPER,
        )
        if fault.name == LIMIT:
            job.length, job.step_s, job.evaluates_at = 20, 3.0, 1000
            job.arguments += script.no_evaluation
            job.sbatch_args = ("--time=1", "--signal=B:USR2@1") if way == STEPKEEPER else ("--time=1",)
        if way == LIGHTNING:
            job.sbatch_args += (f"--signal=SIGUSR1@{SIGNAL_BEFORE_S}",)
        if way == SUBMITIT_WAY:
            job.submitter = self.submitit
        return job.begin(**elsewhere)

    def submitit(self, job: Job) -> int:
        python, _ = environments.python(job.kind.environment)
        assert python is not None
        assert job.command is not None
        launch = jobs.SCRIPTS / "submitit_job.py"
        minutes = "1" if "--time=1" in job.sbatch_args else "60"
        folder = job.work / f"submitit-{job.name}"
        words = [folder, str(SIGNAL_BEFORE_S), job.name, minutes, str(reserve()), *job.command]
        environment = {**job.env, "PYTHONPATH": self.packages}
        done = self.lab.run(python, launch, *words, env=environment, cwd=job.work)
        return int(done.stdout.split()[-1])

    def follow(self, job: Job, way: str, outcome: Outcome) -> None:
        """Wait for the end of the training; where the job fails, somebody submits it again."""
        while True:
            if not holds_within(lambda: self.lab.job(job.job_id).state in ENDED, WITHIN_S):
                outcome.endless = f"{job.starts()} starts, at most {max(job.losses(), default=0)} steps"
                self.lab.run("scancel", str(job.job_id))
                return
            # gloo sometimes aborts a process that has finished, in the interpreter's exit: no fault of this bench
            completed = way != STEPKEEPER or self.lab.job(job.job_id).state == "COMPLETED"
            if completed and set(job.losses()) == set(range(1, job.length + 1)):
                return
            if outcome.by_hand == BY_HAND_MAX or way == STEPKEEPER:
                outcome.failed = last_error(job)
                return
            outcome.by_hand += 1
            job.submit_alone()


_ERROR = re.compile(r"(?:\d+: )?(?:\[rank\d+\]: )?((?:\w+\.)*(\w*(?:Error|Exception)): .*)")
_OF_THE_LAUNCHER = "CalledProcessError"  # says only that the script has failed


def last_error(job: Job) -> str:
    """Return the error that a start of the script ends with, else how the job ends."""
    logs = [job.log, *(job.work / f"submitit-{job.name}").glob(f"{job.job_id}*.err")]
    lines = "\n".join(path.read_text(errors="replace") for path in logs if path.exists()).splitlines()
    found = [match for line in lines if (match := _ERROR.fullmatch(line.strip())) and match[2] != _OF_THE_LAUNCHER]
    if not found:
        return f"the job ends as {job.lab.job(job.job_id).state}"
    return found[-1][1].replace(str(job.out), "OUT")[:ERROR_CHARACTERS].replace("|", " ")


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the page: a table for each script."""
    parts = []
    for script in jobs.ALL:
        mine = [each for each in outcomes if each.script == script.framework]
        if not mine:
            continue
        columns = ways(script)
        parts.append(f"## {script.framework}\n")
        rows = [f"| {' | '.join(['fault', *columns])} |", f"|{'---|' * (len(columns) + 1)}"]
        for fault in FAULTS:
            found = {each.way: each.shown() for each in mine if each.fault == fault.name}
            if found:
                rows.append(f"| {' | '.join([fault.name, *(found.get(way, NOT_PLAYED) for way in columns)])} |")
        parts.append("\n".join(rows) + "\n")
    tables = "\n".join(parts)
    text = filled(TEMPLATE.read_text()).replace("{tables}\n", tables)
    return text.replace("{not_run}", NOT_RUN if f"| {NOT_PLAYED} |" in tables else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", default=",".join(each.framework for each in jobs.ALL))
    parser.add_argument("--ways", default="")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--found", type=Path, help="of calls before, which this one adds to")
    chosen = parser.parse_args()
    scripts = [each for each in jobs.ALL if each.framework in chosen.scripts.split(",")]
    found = json.loads(chosen.found.read_text()) if chosen.found and chosen.found.exists() else {}
    outcomes = [Outcome(**each) for each in found.get("outcomes", ())]
    cells = [
        (script, fault, way)
        for fault in FAULTS
        for script in scripts
        if script in fault.scripts
        for way in ways(script)
        if (not chosen.ways or way in chosen.ways.split(","))
        and not any((each.script, each.fault, each.way) == (script.framework, fault.name, way) for each in outcomes)
    ]
    with Lab(OPTIONS) as lab:
        bench = Bench(lab)
        whole = found.get("whole", {})
        bench.expected = {name: {int(step): loss for step, loss in losses.items()} for name, losses in whole.items()}
        bench.packages = install(environments.cache() / SUBMITIT.replace("==", "-"))

        def one(cell: tuple[Script, Fault, str]) -> None:
            script, fault, way = cell
            began = time.monotonic()
            try:
                outcome = bench.cell(script, fault, way)
            except Exception as error:  # noqa: BLE001 - one cell must not cost the others; it is told, and not kept
                print(f"{script.framework} {fault.name} {way}: {error}", file=sys.stderr, flush=True)
                return
            outcomes.append(outcome)
            print(
                f"{script.framework} {fault.name} {way}: {outcome.shown()} in {time.monotonic() - began:.0f} s",
                flush=True,
            )
            if chosen.found:
                kept = {"outcomes": [asdict(each) for each in outcomes], "whole": bench.expected}
                chosen.found.write_text(json.dumps(kept))
            chosen.page.write_text(page(outcomes))

        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            list(pool.map(one, cells))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def filled(template: str) -> str:
    """Return the page's text, with where and how it was measured."""
    versions = [f"torch {version('huggingface', 'torch')}", f"submitit {SUBMITIT.partition('==')[2]}"]
    for name, package in (("huggingface", "transformers"), ("huggingface", "accelerate"), ("lightning", "lightning")):
        versions.append(f"{package} {version(name, package)}")
    versions.append(f"deepspeed {version('deepspeed', 'deepspeed')}")
    facts = {
        "{cores}": str(os.cpu_count()), "{versions}": ", ".join(versions), "{by_hand}": str(BY_HAND_MAX),
        "{signal}": str(SIGNAL_BEFORE_S), "{grace}": str(OPTIONS.grace_time_s),
    }  # fmt: skip
    return functools.reduce(lambda text, fact: text.replace(*fact), facts.items(), template)


def version(name: str, package: str) -> str:
    python, why = environments.python(name)
    if python is None:
        return why
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def install(place: Path) -> str:
    """Install submitit in a directory of its own, once; return the directory."""
    if not place.exists():
        python, why = environments.python("huggingface")
        assert python is not None, why
        argv = [python, "-m", "pip", "install", "--quiet", "--target", place, SUBMITIT]
        subprocess.run([str(word) for word in argv], check=True)
    return str(place)


if __name__ == "__main__":
    main()

"""A save of an older attempt that goes on when a newer one has trained meanwhile:
`python -m tests.trainer.crash.attempts SCRATCH STRIDE`.

At each call of the older attempt that changes the run directory it is stopped; a newer attempt takes the lease, resumes
and saves two steps; then the older one goes on.  Whatever it still does, `latest` is the newer one's step.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from stepkeeper_trainer.formats import lease as leases
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.steps import list_steps, newest_verified
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.crash.campaign import Report, place, points_of, warm_up
from tests.trainer.crash.gates import Point, steady_names
from tests.trainer.crash.playing import Meanwhile, Played, Tell, play
from tests.trainer.crash.training import train

NAME = "a newer attempt"
SAVING = "stepkeeper-save"  # the thread that commits
UPTO = 3  # steps of the older one
MORE = 2  # of the newer one, beyond what it resumes from


def attempt(root: Path, number: int, upto: int, _rank: int, tell: Tell) -> None:
    """Train as the attempt of this number, once its supervisor holds the lease."""
    steady_names(number)
    os.environ |= {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": str(number), "STEPKEEPER_ATTEMPT": str(number)}
    run = root / "run"
    run.mkdir(exist_ok=True)
    mine = leases.Lease(
        job_id=1, restart_count=number, attempt=number, pid=os.getpid(), node="here", taken_at=time.time()
    )
    leases.write(run, mine)
    train(run, upto, tell)


def newer(root: Path, words: list[dict[str, Any]]) -> None:
    """Train as the next attempt, from what is there."""
    before = newest_verified(root / "run/checkpoints", cached=False).chosen
    done = before.step if before else 0
    played = play(partial(attempt, root, 1, done + MORE), 1)
    words.append({"codes": played.codes, "resumed": done, "output": played.output})


def wrong(root: Path, words: list[dict[str, Any]]) -> list[str]:
    """Say what is wrong when both have ended."""
    if not words:
        return ["it was never stopped"]
    if words[0]["codes"] != [0]:
        return [f"the newer attempt ended with {words[0]['codes']}: {words[0]['output']}"]
    checkpoints = root / "run/checkpoints"
    wanted = words[0]["resumed"] + MORE
    chosen = newest_verified(checkpoints, cached=False).chosen
    told = lineage.read(checkpoints)
    steps = {step.manifest.save_id: step for step in list_steps(checkpoints) if step.manifest is not None}
    head = steps.get(told.head) if told is not None and told.head is not None else None
    problems = [] if chosen is not None and chosen.step == wanted else [f"latest is {chosen}, not step {wanted}"]
    if head is None or head.step != wanted:
        problems.append(f"the lineage ends at {head}, not at step {wanted}")
    return problems + [f"{s.path.name} is there in part" for s in steps.values() if not verify(s.path).ok]


def main(scratch: Path, stride: int) -> None:
    warm_up()
    began = time.monotonic()
    report = Report(NAME)
    with place(scratch) as where:
        root = where / "root"
        watched = play(partial(attempt, _fresh(root), 0, UPTO), 1, watch=True)
        assert watched.codes == [0], watched.output
        points = [point for point in points_of(watched, root) if point.role.startswith(SAVING)]
        report.points = [str(point) for point in points]
        for point in points[::stride]:
            _play(point, root, report)
    report.seconds = round(time.monotonic() - began, 1)
    print(json.dumps(asdict(report)), flush=True)


def _fresh(root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return root


def _play(point: Point, root: Path, report: Report) -> None:
    words: list[dict[str, Any]] = []
    meanwhile = Meanwhile(stopped=lambda: newer(root, words))
    played: Played = play(
        partial(attempt, _fresh(root), 0, UPTO), 1, at=point, what="signal=SIGSTOP", meanwhile=meanwhile
    )
    if not words:
        report.elsewhere += 1  # the call did not come again
        return
    report.played += 1
    if problems := wrong(root, words):
        report.problems.append(f"{point}: {'; '.join(problems)}\n{played.output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

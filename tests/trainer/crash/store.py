"""Killed at every request that changes an object store: `python -m tests.trainer.crash.store SCRATCH STRIDE`.

A run with one step, and a copy of it in the store, saves the next one, which goes to the store too; then the older
copy is removed.  The process is killed before each request arrives, when half of what it brings has, and before it
is answered.  Prints one line of JSON, as `campaign` does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.tiers.tier import Tiers
from tests.trainer.crash.between import AFTER, BEFORE, HALF, arm, between, seen
from tests.trainer.crash.campaign import STEPS, Report, place, warm_up
from tests.trainer.crash.gates import steady_names
from tests.trainer.crash.objects import copy, look, url_of
from tests.trainer.crash.playing import Played, Tell, play
from tests.trainer.crash.scenes import age, latest_step, leftovers, wrong_next, wrong_steps
from tests.trainer.crash.training import digests, train
from tests.trainer.s3_server import s3_server, variables

NAME = "copy to an object store"
BEFORE_ALL = "before"  # prefix in the store
TRIES = 8


@dataclass(frozen=True)
class Point:
    """A request, and how far it gets."""

    request: str
    when: str

    def __str__(self) -> str:
        return f"{self.request}: killed {self.when}"


def main(scratch: Path, stride: int) -> None:
    began = time.monotonic()
    report = Report(NAME)
    with s3_server() as endpoint, between(endpoint) as address, place(scratch) as where:
        os.environ |= variables(endpoint)
        warm_up()
        _Campaign(where, endpoint, address, report).run(stride)
    report.seconds = round(time.monotonic() - began, 1)
    print(json.dumps(asdict(report)), flush=True)


class _Campaign:
    def __init__(self, scratch: Path, endpoint: str, address: str, report: Report) -> None:
        self._before, self._root = scratch / "before", scratch / "root"
        self._endpoint, self._address, self._report = endpoint, address, report
        self._wanted = digests(STEPS)
        self._plays = 0
        self._prefix = BEFORE_ALL
        self._said: list[dict[str, Any]] = []

    def run(self, stride: int) -> None:
        self._before.mkdir(parents=True)
        self._said = self._must(lambda _rank, tell: self._train("run", 1, tell, root=self._before)).said
        points = self._points()
        self._report.points = [str(point) for point in points]
        for number, point in enumerate(points):
            if number % stride == 0 or number == len(points) - 1:
                self._play(point)

    def _must(self, act: Callable[[int, Tell], None]) -> Played:
        played = play(act, 1)
        assert played.codes == [0], played.output
        return played

    def _fresh(self) -> None:
        self._plays += 1
        self._prefix = f"play-{self._plays}"
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._before, self._root)
        copy(self._endpoint, BEFORE_ALL, self._prefix)

    def _points(self) -> list[Point]:
        self._fresh()
        watched = self._must(partial(self._act, Point("", "")))
        assert (problems := self._wrong(watched)) == [], problems
        requests, _ = seen(self._address)
        names = [name for name, _ in requests]
        [manifest] = [name for name in names if name.startswith("PUT step_00000002") and MANIFEST_NAME in name]
        data = [name for name in names if "step_00000002" in name and name != manifest]
        assert max(map(names.index, data)) < names.index(manifest), "the manifest is sent last"
        gone = [name for name in names if "step_00000001" in name]
        assert MANIFEST_NAME in gone[0], "and is removed first"
        points = []
        for name, size in dict(requests).items():
            whens = [BEFORE, HALF, AFTER] if name.startswith("PUT") and size > 1 else [BEFORE, AFTER]
            points += [Point(name, when) for when in whens]
        return points

    def _act(self, point: Point, _rank: int, tell: Tell) -> None:
        steady_names()
        arm(self._address, pid=os.getpid(), at=point.request, when=point.when)
        os.environ |= variables(self._address)
        self._train("run", 2, tell)

    def _train(self, name: str, upto: int, tell: Tell, root: Path | None = None) -> None:
        train((root or self._root) / name, upto, tell, tiers=Tiers(cold=url_of(self._prefix), cold_keep=1))

    def _play(self, point: Point) -> None:
        for _ in range(TRIES):
            self._fresh()
            played = play(partial(self._act, point), 1)
            if played.codes == [-signal.SIGKILL] and seen(self._address)[1]:
                break
        else:
            self._report.problems.append(f"{point}: did not fire: {played.codes} {played.output}")
            return
        self._report.played += 1
        self._report.torn += point.when == HALF
        if problems := self._wrong(played):
            self._report.problems.append(f"{point}: {'; '.join(problems)}\n{played.output}")

    def _wrong(self, played: Played) -> list[str]:
        said = self._said + played.said
        checkpoints = self._root / "run/checkpoints"
        problems = wrong_steps(checkpoints, said)
        latest = latest_step(checkpoints)
        after = play(self._go_on, 1)
        if after.codes != [0]:
            return [*problems, f"the next process ended with {after.codes}: {after.output}"]
        before, then = (words for words in after.said if "store" in words)
        if not before["store"] or any(before["store"].values()):
            problems.append(f"the store had {before['store']}")
        problems += wrong_next(after.said, latest, self._wanted, 2) + wrong_steps(checkpoints, said + after.said)
        problems += [f"{name} is left over" for name in leftovers(self._root / "run")]
        if then["store"] != {"2": []} or len(then["manifests"]) != 1:
            problems.append(f"the next start ended with {then} in the store")
        problems += [f"{key} is left over in the store" for key in then["orphans"]]
        alone = play(lambda _rank, tell: self._train("again", 3, tell), 1)
        problems += wrong_next(alone.said, 2, self._wanted, 3)
        return [*problems, after.output, alone.output] if problems else []

    def _go_on(self, _rank: int, tell: Tell) -> None:
        tell(**look(self._prefix))
        age(self._root / "run")
        self._train("run", 2, tell)
        tell(**look(self._prefix))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""The campaign: `python -m tests.trainer.crash.campaign SCRATCH STRIDE SCENE…` prints one line of JSON a scene.

A watched play finds the points; then each is played on a copy of what was there before, judged, and gone on from.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from stepkeeper_trainer.formats import verify
from tests.trainer.crash import scenes, tier_scenes
from tests.trainer.crash.calls import Call
from tests.trainer.crash.gates import Point, steady_names
from tests.trainer.crash.playing import Played, play
from tests.trainer.crash.scenes import Scene
from tests.trainer.crash.training import digests
from tests.trainer.s3_server import s3_server, variables

SCENES: dict[str, Scene] = {
    scene.name: scene
    for scene in (
        scenes.Save(),
        scenes.SaveOfTwo(),
        scenes.SkewedSave(),
        scenes.LargeSave(),
        tier_scenes.TieredSave(),
        scenes.Replay(),
        scenes.Retention(),
        tier_scenes.TierCopy(),
        tier_scenes.BringHome(),
        tier_scenes.FromStore(),
        scenes.Export(),
    )
}
STEPS = 10
ROOM_BYTES = 512 * 1024 * 1024
TRIES = (0, 0, 0, -1, 1, -2, 2, 0)  # of a point: how many rows are written at once, say, is a matter of luck


@dataclass
class Report:
    """What became of a scene."""

    scene: str
    points: list[str] = field(default_factory=list)  # all there are
    played: int = 0
    elsewhere: int = 0  # directories that another rank made first, each time: it was killed there
    torn: int = 0  # writes of which half was made to arrive
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main(scratch: Path, stride: int, names: list[str]) -> None:
    wanted = {rows: digests(STEPS, rows) for rows in {SCENES[name].rows for name in names or SCENES}}
    warm_up()
    for name in names or SCENES:
        began = time.monotonic()
        scene = SCENES[name]
        with _store() if scene.needs_store else nullcontext(), place(scratch, on_disk=bool(scene.rows)) as where:
            report = _Campaign(scene, where / name.replace(" ", "-"), wanted[scene.rows]).run(stride)
        report.seconds = round(time.monotonic() - began, 1)
        print(json.dumps(asdict(report)), flush=True)


@contextmanager
def place(scratch: Path, *, on_disk: bool = False) -> Iterator[Path]:
    """Give a place in memory where there is one with room: a kill takes nothing of a page cache, and syncs cost time.

    What is written past the page cache wants a disk.
    """
    memory = Path("/dev/shm")
    if on_disk or not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < ROOM_BYTES:
        yield scratch
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="stepkeeper-crash-") as found:
        yield Path(found)


def warm_up() -> None:
    """Have forks share what is there now: a collector that looks at it would copy its pages."""
    gc.collect()
    gc.freeze()


@contextmanager
def _store() -> Iterator[None]:
    with s3_server() as endpoint:
        os.environ |= variables(endpoint)
        yield


class _Campaign:
    def __init__(self, scene: Scene, scratch: Path, wanted: dict[int, str]) -> None:
        self._scene, self._scratch, self._wanted = scene, scratch, wanted
        self._before = scratch / "before"
        self._said: list[dict[str, Any]] = []  # by `prepare`
        self._report = Report(scene.name)
        self._met: set[str] = set()

    def run(self, stride: int) -> Report:
        self._before.mkdir(parents=True)
        made = play(lambda _rank, tell: self._scene.prepare(self._before, tell), 1)
        assert made.codes == [0], made.output
        self._said = [words | {"prepared": True} for words in made.said]
        points = self._points()
        self._report.points = [str(point) for point in points]
        if stride > 1:  # one of those by which several ranks make it may be all that is met
            made = Counter(point.about for point in points if point.call == "mkdir")
            self._met = {about for about, count in made.items() if count > 1}
        for number, point in enumerate(points):
            # a stride that is no divisor of a save's calls: other calls of each save are taken
            if number % stride == 0 or number == len(points) - 1:
                self._play(point)
        return self._report

    def _root(self) -> Path:
        root = self._scratch / "root"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self._before, root)
        self._scene.fresh()
        return root

    def _points(self) -> list[Point]:
        root = self._root()
        watched = play(partial(self._act, root), self._scene.world_size, watch=True)
        assert watched.codes == [0] * self._scene.world_size, watched.output
        assert (problems := self._wrong(root, watched)) == [], problems
        points = points_of(watched, root)
        assert points, "nothing was changed"
        return points

    def _act(self, root: Path, rank: int, tell: Any) -> None:
        steady_names()
        verify.SETTLED_S = math.inf  # whether files count as settled, and are remembered, is a matter of how slow it is
        self._scene.act(rank, root, tell)

    def _play(self, point: Point) -> None:
        for aimed in self._aims(point):
            root = self._root()
            played = play(partial(self._act, root), self._scene.world_size, at=aimed)
            hit = _hit(played, aimed, root)
            if hit is not None:
                break
        else:
            if point.call == "mkdir" and (point.about in self._met or self._scene.world_size > 1):
                # whoever is watched is slower, and may come second each time: another rank has made it
                self._report.elsewhere += 1
                return
            last = [call.about(root) for _, call in played.calls[aimed.rank][-3:]]
            ended = f"ranks ended with {played.codes}; the last calls were {last}"
            self._report.problems.append(f"{point}: did not fire: {ended}\n{played.output}")
            return
        self._report.played += 1
        self._met.add(point.about)
        aside = self._scratch / "aside"
        if hit.name == "write":
            shutil.copytree(root, aside)
        self._judge(str(point), root, played)
        if hit.name == "write":
            shutil.rmtree(root)
            aside.rename(root)
            self._scene.fresh()
            _tear(hit)
            self._report.torn += 1
            self._judge(f"{point}, half written", root, played)

    def _aims(self, point: Point) -> Iterator[Point]:
        """Yield where the call may be met: who comes later finds a directory made, so any rank may be the one."""
        for shift in TRIES:
            if point.number + shift > 0:
                yield replace(point, number=point.number + shift)
        if point.call == "mkdir":
            for shift in (0, 1, -1, 2, -2):
                for rank in range(self._scene.world_size):
                    if point.number + shift > 0:
                        yield replace(point, rank=rank, number=point.number + shift)

    def _judge(self, what: str, root: Path, played: Played) -> None:
        problems = self._wrong(root, played)
        if problems:
            self._report.problems.append(f"{what}: {'; '.join(problems)}\n{played.output}")

    def _wrong(self, root: Path, played: Played) -> list[str]:
        problems = self._scene.judge(root, self._said + played.said)
        if problems:
            return problems
        after = play(lambda _rank, tell: self._scene.go_on(root, tell), 1)
        if after.codes != [0]:
            return [f"the next process ended with {after.codes}: {after.output}"]
        return self._scene.judge_next(root, self._said + played.said, after.said, self._wanted)


def points_of(watched: Played, root: Path) -> list[Point]:
    """Return all calls that have changed something below `root`, in the order in which they were made."""
    points = []
    for rank, calls in enumerate(watched.calls):
        counts: Counter[tuple[str, str, str]] = Counter()
        for role, call in calls:
            counts.update((role, call.name, path) for path in call.matches())
            if call.changes(root):
                assert role != "other", f"a thread that no gate has seen: {call}"
                path = call.matches()[0]
                number = counts[role, call.name, path]
                points.append(Point(rank, role, call.name, path, number, call.about(root)))
    return points


def _tear(hit: Call) -> None:
    """A kill can leave a part of what was being written: half of it arrives."""
    data = hit.data()
    with Path(hit.paths()[0]).open("ab") as file:
        file.write(data[: len(data) // 2])


def _hit(played: Played, point: Point, root: Path) -> Call | None:
    """Return the call at which the rank was killed, if it is the one that was meant."""
    calls = [call for _, call in played.calls[point.rank]]
    if played.codes[point.rank] != -signal.SIGKILL or len(calls) != point.number:
        return None
    return calls[-1] if calls[-1].about(root) == point.about else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

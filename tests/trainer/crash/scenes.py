"""What is killed: a save, a retention, an export; and what must be true afterwards.  `tier_scenes` has the tiers."""

# ruff: noqa: ARG002  # each scene uses what it needs

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.safetensors import find_files
from stepkeeper_trainer.formats.steps import list_steps, newest_verified
from stepkeeper_trainer.formats.verify import CACHE_NAME, verify
from stepkeeper_trainer.store import export
from stepkeeper_trainer.store.retention import Policy, empty_trash, prune
from stepkeeper_trainer.tiers.tier import IDENTITY_NAME
from tests.trainer.crash.playing import Tell
from tests.trainer.crash.training import train

Words = list[dict[str, Any]]
OLD_S = 2 * 3600.0


class Scene(ABC):
    """One operation.  `root` is a directory of its own, of which nothing outside is changed."""

    name: ClassVar[str]
    world_size: ClassVar[int] = 1
    rows: ClassVar[int] = 0  # of `Training`
    needs_store: ClassVar[bool] = False  # an object store: the variables of the environment say where it is

    def prepare(self, root: Path, tell: Tell) -> None:  # noqa: B027  # some begin with nothing
        """Make what is there before, once, in a process of its own; the words are known to each judgement."""

    def fresh(self) -> None:  # noqa: B027  # most have all below their root
        """Bring what is not below the root to where it was after `prepare`; before each play and judgement."""

    @abstractmethod
    def act(self, rank: int, root: Path, tell: Tell) -> None:
        """Do what is interrupted."""

    @abstractmethod
    def judge(self, root: Path, said: Words) -> list[str]:
        """Say what is wrong with what is left."""

    @abstractmethod
    def go_on(self, root: Path, tell: Tell) -> None:
        """What the next process of the run does."""

    @abstractmethod
    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        """Say what is wrong after the next process, which said `then`."""


def wrong_steps(checkpoints: Path, said: Words) -> list[str]:
    """Say what is wrong with the step directories, given which saves were reported as committed."""
    found = list_steps(checkpoints)
    problems = [f"{s.path.name} is there in part: {v.problems}" for s in found if not (v := verify(s.path)).ok]
    here = {step.manifest.save_id for step in found if step.manifest is not None}
    told = lineage.read(checkpoints)
    gone = {save_id for save_id, marks in (told.marks if told else {}).items() if lineage.PRUNED in marks}
    reported = {words["committed"]: words["step"] for words in said if "committed" in words}
    problems += [
        f"step {step} was reported as committed and is gone" for s, step in reported.items() if s not in here | gone
    ]
    chosen = newest_verified(checkpoints, cached=False).chosen
    newest = max((step for save_id, step in reported.items() if save_id not in gone), default=0)
    if (chosen.step if chosen else 0) < newest:
        problems.append(f"latest is {chosen and chosen.path.name}, and step {newest} was reported")
    remembered = newest_verified(checkpoints).chosen
    if (chosen and chosen.path) != (remembered and remembered.path):
        problems.append(f"latest is {remembered and remembered.path.name} by what is remembered")
    return problems


def age(run_dir: Path) -> None:
    """Make leftovers that name no owner old: nobody may clear them before."""
    for path in run_dir.rglob(".*"):
        status = path.stat()
        os.utime(path, (status.st_atime - OLD_S, status.st_mtime - OLD_S))


def leftovers(root: Path) -> list[str]:
    """Return what no process of the run made to last."""
    lasting = {CACHE_NAME, IDENTITY_NAME}
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if (path.name.startswith(".") and path.name not in lasting and path.name != ".metadata")
        or path.name.endswith(".part")
    )


def wrong_next(said: Words, chosen_before: int, digests: dict[int, str], upto: int) -> list[str]:
    """Say what is wrong with what the next process loaded."""
    problems = []
    resumed = next((words for words in said if "resumed" in words), None)
    if resumed is None or resumed["resumed"] != chosen_before:
        problems.append(f"the next process resumed {resumed}, latest was step {chosen_before}")
    elif chosen_before and resumed["digest"] != digests[chosen_before]:
        problems.append(f"the state of step {chosen_before} is not what it was")
    if {"finished": upto} not in [{k: v for k, v in words.items() if k == "finished"} for words in said]:
        problems.append("the next process did not finish")
    return problems


def latest_step(checkpoints: Path) -> int:
    """Return the step that `latest` names; 0 for none."""
    chosen = newest_verified(checkpoints, cached=False).chosen
    return chosen.step if chosen else 0


class Save(Scene):
    """The first saves of a run: everything is made, and one layer stays as it is."""

    name = "save"
    upto: ClassVar[int] = 5

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        train(root / "run", self.upto, tell, rank=rank, world_size=self.world_size, rows=self.rows)

    def judge(self, root: Path, said: Words) -> list[str]:
        return wrong_steps(root / "run/checkpoints", said)

    def go_on(self, root: Path, tell: Tell) -> None:
        before = latest_step(root / "run/checkpoints")
        tell(latest=before)
        age(root / "run")
        train(root / "run", before + 1, tell, rows=self.rows)

    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        before = next(words["latest"] for words in then if "latest" in words)
        problems = wrong_next(then, before, digests, before + 1)
        problems += wrong_steps(root / "run/checkpoints", said + then)
        return problems + [f"{name} is left over" for name in leftovers(root / "run")]


class SaveOfTwo(Save):
    """Two ranks, one of which is killed; the other goes on as it can."""

    name = "save of two ranks"
    world_size = 2
    upto = 3


class SkewedSave(SaveOfTwo):
    """Rank 1 comes to its part of each save when rank 0 has done its own."""

    name = "save of two ranks, one late"

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        train(root / "run", self.upto, tell, rank=rank, world_size=self.world_size, late_s=0.3 * rank)


class LargeSave(Save):
    """A file of more than 4 MiB: it is written past the page cache, in whole pages, and its end is cut."""

    name = "save past the page cache"
    upto = 2
    rows = 13_200


class Replay(Save):
    """After a rollback the same step numbers are saved again."""

    name = "save after a rollback"
    upto = 4

    def prepare(self, root: Path, tell: Tell) -> None:
        train(root / "run", 3, tell)

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        step = str(root / "run/checkpoints/step_00000001")
        train(root / "run", self.upto, tell, resume_from=step)

    def judge(self, root: Path, said: Words) -> list[str]:
        checkpoints = root / "run/checkpoints"
        told = lineage.read(checkpoints)
        assert told is not None
        before = [words["committed"] for words in said if "prepared" in words and "committed" in words]
        if told.head != before[-1]:  # the rollback is recorded: what it abandoned is there and does not count
            said = [words for words in said if words.get("committed") not in before[1:]]
        return wrong_steps(checkpoints, said)

    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        before = next(words["latest"] for words in then if "latest" in words)
        return wrong_next(then, before, digests, before + 1) + [
            f"{name} is left over" for name in leftovers(root / "run")
        ]


class Retention(Scene):
    """Three steps of five are removed; they share files with those that stay."""

    name = "retention"
    policy = Policy(keep_last=2)

    def prepare(self, root: Path, tell: Tell) -> None:
        train(root / "run", 5, tell)

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        prune(root / "run/checkpoints", self.policy)
        empty_trash(root / "run/checkpoints")

    def judge(self, root: Path, said: Words) -> list[str]:
        problems = wrong_steps(root / "run/checkpoints", said)
        here = {step.step for step in list_steps(root / "run/checkpoints")}
        return problems + [f"step {step} is gone, which is kept" for step in {4, 5} - here]

    def go_on(self, root: Path, tell: Tell) -> None:
        checkpoints = root / "run/checkpoints"
        tell(latest=latest_step(checkpoints))
        age(root / "run")
        train(root / "run", 6, tell)
        prune(checkpoints, self.policy)
        empty_trash(checkpoints)

    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        problems = wrong_next(then, 5, digests, 6) + wrong_steps(root / "run/checkpoints", said + then)
        here = {step.step for step in list_steps(root / "run/checkpoints")}
        if here != {5, 6}:
            problems.append(f"after the next pruning steps {here} are there")
        return problems + [f"{name} is left over" for name in leftovers(root / "run")]


class Export(Scene):
    """The model is exported as safetensors, in several files and an index."""

    name = "export"

    def prepare(self, root: Path, tell: Tell) -> None:
        train(root / "run", 1, tell)
        (root / "out").mkdir()
        self.act(0, root, tell)
        (root / "out/model").rename(root / "wanted")

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        plan = export.plan_export(root / "run/checkpoints/step_00000001", shard_bytes_max=7000)
        export.export(plan, root / "out/model")
        tell(exported=True)

    def judge(self, root: Path, said: Words) -> list[str]:
        problems = wrong_steps(root / "run/checkpoints", said)
        if (root / "out/model").exists():
            if _contents(root / "out/model") != _contents(root / "wanted"):
                problems.append("the export is there, and not complete")
        elif any("exported" in words and "prepared" not in words for words in said):
            problems.append("the export was reported, and is not there")
        return problems

    def go_on(self, root: Path, tell: Tell) -> None:
        if not (root / "out/model").exists():
            self.act(0, root, tell)

    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        problems = self.judge(root, said + then) + [f"{name} is left over" for name in leftovers(root)]
        if not find_files(root / "out/model"):
            problems.append("the next export is not there")
        return problems


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}

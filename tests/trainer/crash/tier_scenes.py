"""What is killed on the way from tier to tier, and what must be true afterwards."""

# ruff: noqa: ARG002  # each scene uses what it needs

from __future__ import annotations

import os
import shutil
from pathlib import Path

from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.tiers import DirectoryTier, copy_step, newest_anywhere
from stepkeeper_trainer.tiers.tier import Tiers
from tests.trainer.crash import objects
from tests.trainer.crash.playing import Tell
from tests.trainer.crash.scenes import Save, Scene, Words, age, latest_step, leftovers, wrong_next, wrong_steps
from tests.trainer.crash.training import train


class TieredSave(Save):
    """Files go to the node's own disk first, and to shared storage by a thread beside; a commit is what is shared."""

    name = "save by way of a node's disk"
    upto = 3

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        train(root / "run", self.upto, tell, tiers=Tiers(local=str(root / "nvme")))

    def go_on(self, root: Path, tell: Tell) -> None:
        tell(latest=latest_step(root / "run/checkpoints"))
        age(root / "run")
        train(root / "run", self.upto + 1, tell, tiers=Tiers(local=str(root / "nvme")))

    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        # the node's disk may have a newer step, whole, than was ever shared
        resumed = next((words["resumed"] for words in then if "resumed" in words), 0)
        older = resumed < next(words["latest"] for words in then if "latest" in words)
        return [
            *(["an older step than latest was resumed"] if older else []),
            *wrong_next(then, resumed, digests, self.upto + 1),
            *wrong_steps(root / "run/checkpoints", said + then),
            *(f"{name} is left over" for name in leftovers(root / "run")),
        ]


class TierCopy(Scene):
    """Two steps are copied from a node's own disk to shared storage."""

    name = "tier copy"

    def prepare(self, root: Path, tell: Tell) -> None:
        train(root / "run", 2, tell)
        (root / "shared").mkdir()

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        local, shared = DirectoryTier(root / "run/checkpoints"), DirectoryTier(root / "shared")
        for held in reversed(local.steps()):
            copy_step(local, held, shared)
            tell(copied=held.manifest.save_id, step=held.manifest.step)

    def judge(self, root: Path, said: Words) -> list[str]:
        arrived = [{"committed": words["copied"], "step": words["step"]} for words in said if "copied" in words]
        return wrong_steps(root / "run/checkpoints", said) + wrong_steps(root / "shared", arrived)

    def go_on(self, root: Path, tell: Tell) -> None:
        self.act(0, root, tell)
        # what is there is the very same: a run goes on from the copies alone
        shutil.rmtree(root / "run")
        (root / "run").mkdir()
        shutil.copytree(root / "shared", root / "run/checkpoints")
        train(root / "run", 3, tell)

    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        problems = wrong_next(then, 2, digests, 3) + self.judge(root, then)
        if [step.step for step in list_steps(root / "shared")] != [2, 1]:
            problems.append("the next copies did not arrive")
        return problems + [f"{name} is left over" for name in leftovers(root)]


class BringHome(Scene):
    """The only whole copy is on shared storage, and is staged back to resume from it."""

    name = "bring home"

    def prepare(self, root: Path, tell: Tell) -> None:
        train(root / "run", 2, tell)
        shutil.copytree(root / "run/checkpoints", root / "shared")
        path = next((root / "run/checkpoints/step_00000002").glob("*.distcp"))
        os.truncate(path, path.stat().st_size - 1)

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        newest_anywhere(DirectoryTier(root / "run/checkpoints"), [DirectoryTier(root / "shared")])
        tell(home=True)

    def judge(self, root: Path, said: Words) -> list[str]:
        problems = wrong_steps(root / "shared", said)
        latest = latest_step(root / "run/checkpoints")
        if latest not in (1, 2) or (latest == 1 and any("home" in words for words in said)):
            problems.append(f"latest at home is step {latest}")
        return problems

    def go_on(self, root: Path, tell: Tell) -> None:
        self.act(0, root, tell)
        train(root / "run", 3, tell)

    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        return wrong_next(then, 2, digests, 3) + [f"{name} is left over" for name in leftovers(root)]


class FromStore(Scene):
    """The newest step is in an object store only, and a start brings it home."""

    name = "bring home from an object store"
    needs_store = True
    _plays = 0
    _prefix = "home"  # in the store

    def _train(self, root: Path, upto: int, tell: Tell) -> None:
        train(root / "run", upto, tell, tiers=Tiers(cold=objects.url_of(self._prefix)))

    def prepare(self, root: Path, tell: Tell) -> None:
        self._train(root, 2, tell)
        shutil.rmtree(root / "run/checkpoints/step_00000002")

    def fresh(self) -> None:
        self._plays += 1
        self._prefix = f"home-{self._plays}"
        objects.copy(os.environ["AWS_ENDPOINT"], "home", self._prefix)

    def act(self, rank: int, root: Path, tell: Tell) -> None:
        self._train(root, 2, tell)

    def judge(self, root: Path, said: Words) -> list[str]:
        latest = latest_step(root / "run/checkpoints")
        own = [words for words in said if "prepared" not in words]  # what was lost before is no fault
        problems = wrong_steps(root / "run/checkpoints", own)
        if latest not in (1, 2) or (latest == 1 and any("resumed" in words for words in own)):
            problems.append(f"latest at home is step {latest}")
        return problems

    def go_on(self, root: Path, tell: Tell) -> None:
        age(root / "run")
        self._train(root, 3, tell)
        tell(**objects.look(self._prefix))

    def judge_next(self, root: Path, said: Words, then: Words, digests: dict[int, str]) -> list[str]:
        problems = wrong_next(then, 2, digests, 3) + [f"{name} is left over" for name in leftovers(root)]
        there = next(words["store"] for words in then if "store" in words)
        if "3" not in there or any(there.values()):
            problems.append(f"in the store is {there}")
        return problems

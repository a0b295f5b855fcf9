"""Which step to resume from, when several tiers have some, and how it comes back to where ranks read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepkeeper_trainer.tiers.copying import copy_step
from stepkeeper_trainer.tiers.pace import Pace
from stepkeeper_trainer.tiers.tier import Held, Tier, TierError


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest verified step of all tiers, in the tier from which ranks read; None where there is none."""

    directory: str | None
    held: Held | None
    came_from: str | None  # name of the tier that had it
    passed_over: tuple[str, ...] = ()  # what was wrong with newer ones, and with tiers that did not answer


def newest_anywhere(
    home: Tier,
    others: Sequence[Tier],
    *,
    counts: Callable[[Held], bool] = lambda _held: True,
    pace: Pace | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Newest:
    """Find the newest step that is whole in any tier, and bring it into `home` if it is not there.

    The same save in several tiers is one step: it is taken from the first tier where it is whole, `home` first, then
    in the order of `others`.  Every byte is checked, in place or on its way.  A damaged or unreachable copy is passed
    over and told; nothing is removed.

    Args:
        home: from which all ranks can read.
        others: where else to look, nearest first.
        counts: whether a step is on the run's lineage, where tiers do not know of a rollback.
        pace: of bytes that are brought back.
        should_stop: asked between chunks.
    """
    passed_over: list[str] = []
    damaged: set[str] = set()  # directories of `home`
    tiers = [home, *others]
    candidates: list[tuple[tuple[int, str], int, Held]] = []
    for number, tier in enumerate(tiers):
        try:
            held_here = tier.steps()
        except (TierError, OSError) as error:
            passed_over.append(f"{tier.name}: {error}")
            continue
        candidates += [
            ((held.manifest.step, held.manifest.created_at), number, held) for held in held_here if counts(held)
        ]
    candidates.sort(key=lambda candidate: (candidate[0], -candidate[1]), reverse=True)
    for _, number, held in candidates:
        try:
            if number == 0:
                problems = home.problems(held, deep=True)
                if not problems:
                    return Newest(held.directory, held, home.name, tuple(passed_over))
                damaged.add(held.directory)
                passed_over.append(f"{home.name}/{held.directory}: {problems[0]}")
                continue
            pushed = copy_step(tiers[number], held, home, pace=pace, should_stop=should_stop, despite=damaged)
        except (TierError, OSError) as error:
            passed_over.append(f"{tiers[number].name}/{held.directory}: {error}")
            if should_stop():
                break
            continue
        assert pushed.directory is not None, "a copy that is committed has a name"
        return Newest(pushed.directory, held, tiers[number].name, tuple(passed_over))
    return Newest(None, None, None, tuple(passed_over))

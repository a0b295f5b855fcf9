"""One training of a framework whose checkpoints are ours: versions, refusals, the manager, and how a rank leaves."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from stepkeeper_trainer.api import CheckpointManager
from stepkeeper_trainer.coordinate import groups
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats.records import EXIT_FINISHED
from stepkeeper_trainer.integrations import hook
from stepkeeper_trainer.integrations.leaving import leave

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

Options = dict[str, Any]
OWN_OPTIONS = frozenset({"state", "total_steps", "resume_from"})  # the framework says these


def check_options(options: Mapping[str, Any]) -> Options:
    """Return what a script gives for the manager; without `every`, the framework says when to save.

    Raises:
        UsageError: the framework gives this one.
    """
    for name in sorted(OWN_OPTIONS & options.keys()):
        raise UsageError(f"{name}=...: the framework gives this to CheckpointManager: leave it out")
    return {"every": None, **options}


def check_version(distributions: tuple[str, ...], since: tuple[int, ...], before: tuple[int, ...]) -> None:
    """Refuse a release of a framework whose inside is not known.

    Raises:
        UsageError: which is installed, and which are known.
    """
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if since <= hook.numbers(version) < before:
            return
        low, high = (".".join(map(str, each)) for each in (since, before))
        raise UsageError(
            f"{name} {version}: checkpoints can be ours with {name} from {low} to before {high}; install one of those, "
            "or let it save its own checkpoints under `stepkeeper run --attach auto`"
        )
    raise UsageError(f"{distributions[0]} is not installed as a package, so its version is not known: install it")


def check_doors(holder: Any, doors: Iterable[str]) -> None:
    """Refuse a framework that has not what our checkpoints need of its inside: nothing else would say so.

    Args:
        holder: an object of the framework.
        doors: attributes below it, with dots.

    Raises:
        UsageError: which it has not.
    """
    missing = [door for door in doors if not _has(holder, door)]
    kind = type(holder)
    release = f"{kind.__name__} of {kind.__module__.partition('.')[0]}"
    refuse([(bool(missing), f"a {release} that has no {', '.join(missing)}", "use the framework's own class")])


def _has(holder: Any, door: str) -> bool:
    for name in door.split("."):
        if not hasattr(holder, name):
            return False
        holder = getattr(holder, name)
    return True


def refuse(reasons: Iterable[tuple[bool, str, str]]) -> None:
    """Refuse a configuration that could not be kept exactly.

    Args:
        reasons: whether it is so, what it is, and what to do.

    Raises:
        UsageError: all that are so.
    """
    found = [f"{what}: {instead}" for is_so, what, instead in reasons if is_so]
    if found:
        raise UsageError("checkpoints cannot be ours with " + "; with ".join(found))


class Engine:
    """Of one rank, in one training."""

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        total_steps: int | None,
        resume_from: str | None,
        options: Options,
    ) -> None:
        """Make the manager, and load what this launch resumes from; all ranks come here at the same point.

        Args:
            state: the parts, by name; None is left out.
            total_steps: optimizer steps, when training is done; None: the framework ends by another rule.
            resume_from: a step directory or `latest`, where the script names one.
            options: further ones of the manager.

        Raises:
            StepkeeperError: what is wrong and what to do.
        """
        parts = {name: part for name, part in state.items() if part is not None}
        self.manager = CheckpointManager(parts, total_steps=total_steps, resume_from=resume_from, **options)
        self.ended = False
        self.manager.resume()

    def step_done(self, *, tokens: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """Say that an optimizer step is complete, before anything else is done; leave where the ranks are to stop.

        Raises:
            SystemExit: with 75, or 1 where the step could not be saved.
        """
        self.manager.step_done(tokens=tokens, metrics=metrics)
        if self.manager.stopping:
            self.ended = True
            leave(self.manager.finish())

    def save(self) -> None:
        """Save the state as it is now, unless the step at hand is being saved already."""
        if self.manager.saved_step != self.manager.step:
            self.manager.save()

    def alive(self) -> None:
        """Say in an evaluation that this rank is well."""
        if not self.ended:
            self.manager.alive()

    def finish(self) -> None:
        """Say that training has come to its end; the script goes on.

        Raises:
            SaveError: the last step could not be saved.
            SystemExit: the ranks were to stop, and the last step is not on disk.
        """
        if self.ended:
            return
        self.ended = True
        code = self.manager.finish()
        if code != EXIT_FINISHED:
            leave(code)


def of_rank(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor of which each rank has its own, as a part's state holds it.

    Under one name the first save would find out that the ranks' values differ, and come to nothing.  The number of the
    rank does the same for what is no tensor.
    """
    rank, _ = groups.find_rank()
    return {"rank": rank, f"of_{rank}": tensor}


def own(held: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of `of_rank`."""
    tensor: torch.Tensor = held[f"of_{held['rank']}"]
    return tensor


def numbers_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics among what a framework logs: plain numbers."""
    return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}

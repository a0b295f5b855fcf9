"""Ranks whose framework is a loop of a few lines: scenes for `test_attachment`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.integrations import joining, leaving
from stepkeeper_trainer.integrations.attachment import Asked, Attachment, Training, attach

STEPS = 12


def begin(rank: int) -> Attachment:
    os.environ |= {"SLURM_JOB_ID": "1", "RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    return attach("generic", lambda: Training(framework="generic", version="generic 1", total_steps=STEPS))


def train(rank: int, directory: str, attachment: Attachment, *, evaluates: bool = False) -> None:
    """Train as a framework does: a collective in each step, the callback behind it, its own save where it is asked."""
    for step in range(1, STEPS + 1):
        dist.all_reduce(torch.ones(1))
        say(directory, rank, step)
        asked = attachment.step_done(step)
        if asked is not Asked.NOTHING:
            save(rank, directory, step, attachment)
        if evaluates:
            evaluate(rank, directory, step, attachment)


def evaluate(rank: int, directory: str, step: int, attachment: Attachment) -> None:
    for batch in range(3):
        dist.all_reduce(torch.ones(1))
        if step == 5 and batch == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if attachment.evaluated() is Asked.STOP:
            save(rank, directory, step, attachment)


def save(rank: int, directory: str, step: int, attachment: Attachment) -> None:
    attachment.saving()
    place = Path(directory) / f"save-{step}"
    place.mkdir(exist_ok=True)
    (place / str(rank)).write_text(str(step))
    attachment.saved_to(str(place), last=step == STEPS)


def say(directory: str, rank: int, step: int) -> None:
    (Path(directory) / f"steps.{rank}").write_text(str(step))


def signalled(rank: int, directory: str, *, ranks_told: list[int], at: int) -> None:
    """A notice reaches some ranks only, after some step."""
    attachment = begin(rank)
    before = attachment.step_done

    def step_done(step: int) -> Asked:
        if step == at and rank in ranks_told:
            os.kill(os.getpid(), signal.SIGTERM)
        return before(step)

    attachment.step_done = step_done
    train(rank, directory, attachment)
    attachment.ended(STEPS)


def evaluating(rank: int, directory: str) -> None:
    """A notice reaches one rank in an evaluation."""
    train(rank, directory, begin(rank), evaluates=True)


def fails(rank: int, directory: str, *, where: str) -> None:
    """Something of ours fails on rank 1: training goes on, without us on all ranks."""
    attachment = begin(rank)
    assert attachment.open

    def broken(*_: object, **__: object) -> None:
        raise ValueError("a mistake of ours")

    def from_step_4(step: int, *_: object) -> None:
        if step == 4:
            broken()

    if rank == 1 and where == "before":
        attachment._reporter.step = from_step_4
    if rank == 1 and where == "behind":
        attachment._issue = lambda *_: broken() if attachment._step == 4 else type(attachment)._issue(attachment, *_)
    if rank == 1 and where == "saving":
        attachment._link.send = broken
    if where == "saving":
        inner = attachment.step_done
        attachment.step_done = lambda step: Asked.SAVE if inner(step) is Asked.SAVE or step == 4 else Asked.NOTHING
        attachment._note_saved = broken if rank == 1 else attachment._note_saved
    train(rank, directory, attachment)
    assert not attachment.open, "it has not withdrawn"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "its handlers are left"
    attachment.ended(STEPS)
    dist.barrier()
    leaving.at_exit()
    assert attachment._agreement.group is None, "its threads are left, which abort the exit"


def alone(rank: int, _directory: str) -> None:
    """Only rank 0 has the library."""
    joining.join.__kwdefaults__["within_s"] = 1.0
    if rank == 0:
        attachment = begin(rank)
        assert not attachment.open
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


def nested(rank: int, _directory: str) -> None:
    """A framework that another one uses is left to that one; a training after it is a new one."""
    outer = begin(rank)
    inner = attach("inner", lambda: Training(framework="inner", version="inner 1"))
    assert (outer.open, inner.open) == (True, False)
    outer.ended(3)
    again = attach("inner", lambda: Training(framework="inner", version="inner 1"))
    assert again.open
    again.ended(3)


def described_badly(_rank: int, _directory: str) -> None:
    def describe() -> Training:
        raise KeyError("a name that this version lacks")

    assert not attach("generic", describe).open
    assert leaving.current.is_anothers("inner"), "the framework around it has the training"


def with_manager(rank: int, directory: str) -> None:
    """The script's own manager answers notices; what is attached withdraws, and nothing else attaches."""
    outer = begin(rank)
    assert outer.open
    manager = CheckpointManager({"model": torch.nn.Linear(1, 1)}, run_dir=f"{directory}/run", storage_test="off")
    assert not outer.open
    outer.ended(0)
    assert not begin(rank).open
    assert manager.step == 0

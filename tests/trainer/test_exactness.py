"""What would make a resumed run another one is said while it trains: once, with the remedy, and never for nothing."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stepkeeper_trainer import CheckpointManager, GlobalSampler
from stepkeeper_trainer.observe.exactness import EVALUATIONS, RANDOM_BYTES_MAX, RANDOM_NAME

pytestmark = pytest.mark.usefixtures("one_process")
Act = Callable[["Loop"], object]
Plant = Callable[[Path], None]


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + random.random()  # noqa: S311  # draws where the step draws


class Loop:
    """A training whose every step draws random numbers: dropout, noise, data that are changed at random."""

    def __init__(
        self, run_dir: Path, *, wrap: bool = False, more: dict[str, Any] | None = None, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.model = Wrapped(self.inner) if wrap else self.inner
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.sampler = GlobalSampler(40, seed=3)
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            **({"sampler": self.sampler} if more is None else more),
        }
        self.manager = CheckpointManager(
            state,
            run_dir=run_dir,
            storage_test="off",
            **({"every": None, "attach_hooks": True} | options),
        )
        self.manager.resume()

    def train(self, x: torch.Tensor | None = None) -> None:
        x = torch.stack([Squares()[i] for i in self.sampler.micro_batch(0, 4)]) if x is None else x
        self.model.train()
        self.model(x + torch.rand(4, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sampler.advance(4)

    def evaluate(self) -> None:
        """As most do: the iterator of the loader draws from torch's generator, shuffled or not."""
        self.model.eval()
        with torch.no_grad():
            for batch in DataLoader(torch.ones(8, 4), batch_size=4):  # type: ignore[arg-type]  # it has all it takes
                self.model(batch)

    def evaluate_drawing_nothing(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(2, 4))


class Wrapped(torch.nn.Module):
    """As DistributedDataParallel wraps a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)  # type: ignore[no-any-return]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], list[str]]]:
    with caplog.at_level("INFO"):
        yield lambda event: [text for text in caplog.messages if text.startswith(event)]


Said = Callable[[str], list[str]]


def test_an_evaluation_after_the_step_that_draws_is_told_once_with_its_line(tmp_path: Path, said: Said) -> None:
    loop = Loop(tmp_path / "run", every=2)  # what a save keeps is no copy of the script's
    for _ in range(4):
        loop.train()
        loop.manager.step_done()
        if loop.manager.step % 2 == 0:
            loop.evaluate()  # the line that is named

    (line,) = said("evaluation_draws")
    text = Path(__file__).read_text().splitlines()
    number = 1 + next(at for at, each in enumerate(text) if "the line that is named" in each)
    assert f"step=2 place=test_exactness.py:{number} " in line
    assert "remedy=" in line
    assert "before step_done()" in line


@pytest.mark.parametrize("how", ["unwrapped", "average"])
def test_an_evaluation_of_what_belongs_to_the_model_is_seen(tmp_path: Path, said: Said, how: str) -> None:
    loop = Loop(tmp_path / "run", wrap=True)
    model = loop.inner if how == "unwrapped" else copy.deepcopy(loop.model)
    for _ in range(2):
        loop.train()
        loop.manager.step_done()
        with torch.inference_mode():
            model(torch.rand(2, 4))

    assert len(said("evaluation_draws")) == 1


def _before_the_step_is_done(loop: Loop) -> None:
    loop.train()
    loop.evaluate()
    loop.manager.step_done()


def _at_the_head_of_the_turn(loop: Loop) -> None:
    """A resume does it too: it begins with the turn."""
    loop.evaluate()
    loop.train()
    loop.manager.step_done()


def _with_generators_kept(loop: Loop) -> None:
    loop.train()
    loop.manager.step_done()
    with torch.random.fork_rng():
        loop.evaluate()


def _with_the_state_put_back(loop: Loop) -> None:
    loop.train()
    loop.manager.step_done()
    before = torch.get_rng_state()
    loop.evaluate()
    torch.set_rng_state(before)


def _drawing_nothing(loop: Loop) -> None:
    loop.train()
    loop.manager.step_done()
    loop.evaluate_drawing_nothing()


def _not_at_all(loop: Loop) -> None:
    loop.train()
    loop.manager.step_done()


TURNS = [
    _before_the_step_is_done,
    _at_the_head_of_the_turn,
    _with_generators_kept,
    _with_the_state_put_back,
    _drawing_nothing,
    _not_at_all,
]


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: turn.__name__.strip("_"))
def test_nothing_is_said_of_a_loop_that_resumes_exactly(tmp_path: Path, said: Said, turn: Act) -> None:
    go_back(tmp_path / "run", turn)

    for event in ("evaluation_draws", "random_numbers_differ", "data_position"):
        assert said(event) == []


def _drawing_without_a_forward(loop: Loop) -> None:
    loop.train()
    loop.manager.step_done()
    torch.rand(1)


def _drawing_in_python(loop: Loop) -> None:
    loop.train()
    loop.manager.step_done()
    random.random()  # noqa: S311


@pytest.mark.parametrize(("turn", "generator"), [(_drawing_without_a_forward, "torch"), (_drawing_in_python, "python")])
def test_a_step_that_draws_otherwise_after_a_resume_is_told(
    tmp_path: Path, said: Said, turn: Act, generator: str
) -> None:
    go_back(tmp_path / "run", turn)

    (line,) = said("random_numbers_differ")
    assert f"step={GOES_BACK_TO + 1} generators={generator} " in line
    assert "remedy=" in line


@pytest.mark.parametrize("restore", [True, False])
def test_an_iterator_that_draws_after_the_resume_is_told_unless_the_generators_are_put_back(
    tmp_path: Path, said: Said, *, restore: bool
) -> None:
    def began(loop: Loop) -> None:
        iter(DataLoader(Squares()))
        if restore:
            loop.manager.restore_random_state()

    go_back(tmp_path / "run", _not_at_all, began=began)

    assert bool(said("random_numbers_differ")) is not restore


def test_other_hardware_may_draw_otherwise(tmp_path: Path, said: Said) -> None:
    threads = torch.get_num_threads()
    try:
        go_back(tmp_path / "run", _drawing_without_a_forward, began=lambda _: torch.set_num_threads(threads))
        assert len(said("random_numbers_differ")) == 1
        torch.set_num_threads(threads + 1)
        resumed = Loop(tmp_path / "run", resume_from=step_directory(tmp_path / "run"))
        _not_at_all(resumed)
    finally:
        torch.set_num_threads(threads)

    assert len(said("condition_changed name=threads")) == 1
    assert len(said("random_numbers_differ")) == 1


@pytest.mark.parametrize("content", [b"", b"{", b'{"saves": 3}', b'{"format": 1, "saves": [{"step": "x"}]}'])
def test_a_record_that_is_none_is_not_compared_with(tmp_path: Path, said: Said, content: bytes) -> None:
    go_back(tmp_path / "run", _drawing_in_python)
    (tmp_path / "run" / RANDOM_NAME).write_bytes(content)

    _not_at_all(Loop(tmp_path / "run", resume_from=step_directory(tmp_path / "run")))

    assert len(said("random_numbers_differ")) == 1, "the first resume has"


def _nothing(path: Path) -> None:
    assert path.exists()


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _nested_too_deep(path: Path) -> None:
    path.write_bytes(b'{"x": ' + b"[" * 60_000)


def _huge(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" " * RANDOM_BYTES_MAX)


def _of_a_newer_format(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("plant", "compared"),
    [(_nothing, 2), (_a_pipe, 1), (_a_link, 1), (_nested_too_deep, 1), (_huge, 1), (_of_a_newer_format, 1)],
)
def test_a_record_that_somebody_planted_is_left_out(tmp_path: Path, said: Said, plant: Plant, compared: int) -> None:
    """The first resume has compared, and so does the second where nothing was planted."""
    go_back(tmp_path / "run", _drawing_in_python)
    plant(tmp_path / "run" / RANDOM_NAME)

    _not_at_all(Loop(tmp_path / "run", resume_from=step_directory(tmp_path / "run")))

    assert len(said("random_numbers_differ")) == compared


GOES_BACK_TO = 2


def step_directory(run_dir: Path) -> Path:
    return run_dir / f"checkpoints/step_{GOES_BACK_TO:08d}"


def go_back(run_dir: Path, turn: Act, *, began: Act = lambda _: None) -> None:
    """Train past a step that is saved, then resume from it and do one turn again."""
    first = Loop(run_dir, every=1, retention="all")
    while first.manager.step < EVALUATIONS + 2:
        turn(first)
        assert first.manager.wait_saved(60)
    limit_at = time.monotonic() + 60
    while not (run_dir / RANDOM_NAME).exists() or f'"step":{GOES_BACK_TO},' not in (run_dir / RANDOM_NAME).read_text():
        assert time.monotonic() < limit_at, "the generators were not recorded"
        time.sleep(0.01)  # a thread writes it

    resumed = Loop(run_dir, resume_from=step_directory(run_dir))
    assert resumed.manager.step == GOES_BACK_TO
    began(resumed)
    turn(resumed)


def test_a_loader_without_its_position_in_the_state_is_told_once(tmp_path: Path, said: Said) -> None:
    loop = Loop(tmp_path / "run", more={})
    for batch in DataLoader(Squares(), batch_size=4, shuffle=True):
        loop.train(batch)
        loop.manager.step_done()

    (line,) = said("data_position_not_saved")
    assert 'step=2 loader="torch\'s DataLoader"' in line
    assert "'sampler': GlobalSampler(...)" in line


def test_what_holds_no_position_does_not_hide_that_it_is_missing(tmp_path: Path, said: Said) -> None:
    model = torch.nn.Linear(4, 8)
    others = {"scaler": torch.amp.GradScaler("cpu"), "average": torch.optim.swa_utils.AveragedModel(model)}
    loop = Loop(tmp_path / "run", more=others)
    for batch in DataLoader(Squares(), batch_size=4):
        loop.train(batch)
        loop.manager.step_done()

    assert len(said("data_position_not_saved")) == 1


def test_a_schedule_a_scaler_or_an_optimizer_that_the_state_lacks_is_told(tmp_path: Path, said: Said) -> None:
    loop = Loop(tmp_path / "run")
    parts = [torch.optim.lr_scheduler.ConstantLR(loop.optimizer), torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(loop.optimizer, parts, [3])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    critic = torch.nn.Linear(4, 1)
    other = torch.optim.Adam(critic.parameters())
    for _ in range(4):
        scaler.scale(critic(torch.ones(4)).sum()).backward()
        scaler.step(other)
        scaler.update()
        loop.train()
        schedule.step()
        loop.manager.step_done()

    told = said("part_not_saved")
    assert sorted(line.split("part=")[1].split(" ")[0] for line in told) == ["Adam", "GradScaler", "SequentialLR"]
    assert all("step=2" in line and "CheckpointManager(state={...})" in line for line in told)


@pytest.mark.parametrize("which", ["given", "own", "unused", "each step"])
def test_no_part_is_told_that_is_given_or_may_be(tmp_path: Path, said: Said, which: str) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    schedule = torch.optim.lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    given = {"critic": model, "adam": optimizer, "schedule": schedule, "scaler": scaler}
    loop = Loop(tmp_path / "run", more={"given": given, "own": {"position": Position()}}.get(which, {}))
    for _ in range(3):
        if which == "each step":  # as of an attack on the inputs
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.Adam(model.parameters())
        if which != "unused":
            scaler = scaler if which != "each step" else torch.amp.GradScaler("cpu", init_scale=2.0)
            scaler.scale(model(torch.ones(4)).sum()).backward()
            scaler.step(optimizer)
            if which != "each step":
                scaler.update()
                schedule.step()
        loop.train()
        loop.manager.step_done()

    assert said("part_not_saved") == []


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_that_wait_for_a_later_step_are_told_once(
    tmp_path: Path, said: Said, micro_batches: int, *, scaled: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scaled)
    loop = Loop(tmp_path / "run")
    for number in range(1, 9):
        scaler.scale(loop.model(torch.ones(4, 4)).square().mean()).backward()
        if number % micro_batches == 0:
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
        loop.sampler.advance(4)
        loop.manager.step_done()

    (line,) = said("gradients_not_saved")
    assert "step=1 " in line
    assert "after all its micro-batches" in line


@pytest.mark.parametrize("which", ["kept", "warms up", "through data", "left out", "not finite"])
def test_gradients_that_no_later_step_takes_are_not_told(tmp_path: Path, said: Said, which: str) -> None:
    loop = Loop(tmp_path / "run")
    for _ in range(3):
        loop.optimizer.zero_grad()  # at the beginning: gradients are still there at step_done
        loss = loop.model(torch.ones(4, 4)).square().mean()
        (loss * (float("inf") if which == "not finite" else 1.0)).backward()
        if which == "warms up":
            loop.optimizer.param_groups[0]["lr"] = 0.0
        if which == "through data":
            for each in loop.model.parameters():
                each.data = each.data * 0.5
        elif which == "left out":
            loop.optimizer.zero_grad(set_to_none=False)
        elif which != "not finite":
            loop.optimizer.step()
        loop.sampler.advance(4)
        loop.manager.step_done()

    assert said("gradients_not_saved") == []


class Position:
    """A position in the data of the script's own."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take it back."""


@pytest.mark.parametrize("which", ["sampler", "own", "evaluation", "none"])
def test_nothing_is_said_where_the_position_may_be_known(tmp_path: Path, said: Said, which: str) -> None:
    more: dict[str, Any] = {"position": Position()} if which == "own" else {}
    loop = Loop(tmp_path / "run", more=None if which == "sampler" else more)
    loader = DataLoader(Squares(), batch_size=4)
    if which == "evaluation":
        loop.evaluate()  # before the first step: its iterator is gone
    for batch in [torch.ones(4, 4)] * 2 if which in ("evaluation", "none") else loader:
        loop.train(batch)
        loop.manager.step_done()

    assert said("data_position") == []


def test_a_sampler_that_does_not_move_is_told(tmp_path: Path, said: Said) -> None:
    loop = Loop(tmp_path / "run")
    loop.model(torch.rand(4, 4)).sum().backward()
    loop.manager.step_done()
    loop.sampler.advance(4)  # too late: what was saved is the position before
    loop.manager.step_done()

    (line,) = said("data_position_stands")
    assert "before step_done()" in line

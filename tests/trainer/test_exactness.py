"""What would make a resumed run another one is said while it trains: once, with the remedy, and never for nothing."""

from __future__ import annotations

import copy
import itertools
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
from stepkeeper_trainer.observe import afterwards
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


def trained(tmp_path: Path, more: dict[str, Any]) -> Callable[[torch.optim.Optimizer | None], None]:
    """Return what makes some steps of a module by an optimizer, and saves the last one."""
    loop = Loop(tmp_path / "run", more=more)

    def steps(optimizer: torch.optim.Optimizer | None) -> None:
        for _ in range(3):
            loop.train()
            if optimizer is not None:
                more["critic"](torch.ones(4)).sum().backward()
                optimizer.step()
            loop.manager.step_done()
        loop.manager.save()

    return steps


def test_an_optimizer_that_another_one_replaces_in_training_is_told_once(tmp_path: Path, said: Said) -> None:
    critic = torch.nn.Linear(4, 1)
    first = torch.optim.AdamW(critic.parameters(), lr=0.1)
    steps = trained(tmp_path, {"critic": critic, "adam": first})
    for _ in range(2):
        steps(first)
    assert said("optimizer_replaced") == []
    second = torch.optim.AdamW(critic.parameters(), lr=0.01)
    for _ in range(3):
        steps(second)

    [told] = said("optimizer_replaced")
    assert "part=adam" in told
    assert "step=12" in told, told
    assert "since step 6" in told, told


@pytest.mark.parametrize("which", ["rests", "in turns", "without moments", "its own moments", "a swap", "one save"])
def test_an_optimizer_that_may_stand_still_is_not_told(tmp_path: Path, said: Said, which: str) -> None:
    critic = torch.nn.Linear(4, 1)
    first: torch.optim.Optimizer = torch.optim.AdamW(critic.parameters(), lr=0.1)
    if which == "without moments":
        first = torch.optim.SGD(critic.parameters(), lr=0.1)
    second = torch.optim.AdamW(critic.parameters(), lr=0.01)
    steps = trained(
        tmp_path, more={"critic": critic, "adam": first} | ({"second": second} if which == "in turns" else {})
    )
    for _ in range(2):
        steps(first)
    if which == "its own moments":
        second.load_state_dict(first.state_dict())  # the same tensors, which a save of the first one has
    for _ in range(3):
        steps({"rests": None, "a swap": None, "one save": first}.get(which, second))
        if which == "a swap":  # as of an average of the weights, for an evaluation
            with torch.no_grad():
                critic.weight.copy_(critic.weight.clone())
            steps(first)
        if which == "one save":
            steps(second)

    assert said("optimizer_replaced") == []


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

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

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


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Counts as it is iterated, in the process that does so."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((4,), float(self.at))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Around(torch.utils.data.IterableDataset[torch.Tensor]):
    """Reads another one, through a function with a closure as pipelines do."""

    def __init__(self, stream: Stream) -> None:
        self.steps = [lambda: iter(stream)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.steps[0]()


class Cursor(Squares):
    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return super().__getitem__((index + self.read) % 40)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "order": torch.arange(40)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class Batches:
    """A batch sampler that counts as it is asked, or as the script says."""

    def __init__(self, *, asked: bool) -> None:
        self.asked, self.at = asked, 0

    def __iter__(self) -> Iterator[list[int]]:
        at = self.at
        while True:
            at += 4
            if self.asked:
                self.at = at
            yield [each % 40 for each in range(at, at + 4)]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def train_on(loop: Loop, loader: DataLoader[Any], each: Act = lambda _: None) -> None:
    batches = iter(loader)
    for _ in range(3):
        loop.train(next(batches))
        each(loop)
        loop.manager.step_done()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("which", ["itself", "wrapped", "map"])
def test_a_data_set_in_the_state_that_workers_read_is_told_once(
    tmp_path: Path, said: Said, which: str, workers: int
) -> None:
    part: Any = Cursor() if which == "map" else Stream()
    loop = Loop(tmp_path / "run", more={"words": part})
    data = Around(part) if which == "wrapped" else part
    train_on(loop, DataLoader(data, batch_size=4, num_workers=workers))

    (line,) = said("data_position_")
    assert line.startswith(f"data_position_stands step=2 part=words kind={type(part).__name__} ")
    assert "worker processes" in line
    assert "torchdata's StatefulDataLoader" in line


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sampler_that_counts_what_a_loader_asks_ahead_is_told_once(tmp_path: Path, said: Said, workers: int) -> None:
    sampler = Batches(asked=True)
    loop = Loop(tmp_path / "run", more={"batches": sampler})
    train_on(loop, DataLoader(Squares(), batch_sampler=sampler, num_workers=workers))

    (line,) = said("data_position_")
    assert line.startswith(f"data_position_ahead step=2 part=batches kind=Batches batches={2 * workers} ")
    assert "remedy=" in line


def _moved(position: Batches | Position) -> Act:
    def move(_: Loop) -> None:
        position.at += 4

    return move


@pytest.mark.parametrize("workers", [0, 2])
def test_a_place_in_the_data_that_moves_with_training_is_not_told(tmp_path: Path, said: Said, workers: int) -> None:
    told, counted = Batches(asked=False), Position()
    data = Cursor()
    moves: list[tuple[dict[str, Any], DataLoader[Any], Act]] = [
        ({"batches": told}, DataLoader(Squares(), batch_sampler=told, num_workers=workers), _moved(told)),  # type: ignore[arg-type]
        ({"data": data, "own": counted}, DataLoader(data, batch_size=4, num_workers=workers), _moved(counted)),
    ]
    asked, stream = Batches(asked=True), Stream()
    if not workers:
        moves.append(({"batches": asked}, DataLoader(Squares(), batch_sampler=asked), lambda _: None))  # type: ignore[arg-type]
        moves.append(({"data": stream}, DataLoader(stream, batch_size=4), lambda _: None))
    for number, (more, loader, move) in enumerate(moves):
        train_on(Loop(tmp_path / f"run{number}", more=more), loader, move)
    loop = Loop(tmp_path / "both")
    train_on(
        Loop(tmp_path / "both", more={"sampler": loop.sampler, "data": data}),
        DataLoader(data, num_workers=workers),
        lambda _: loop.sampler.advance(4),
    )

    assert said("data_position_") == []


def train_turns(loop: Loop, afterwards: Act, *, turns: int = 3) -> None:
    for step in loop.manager.steps():
        loop.train()
        loop.manager.step_done()
        if step + 1 == turns:
            break
        afterwards(loop)


def _clamp(loop: Loop) -> None:
    with torch.no_grad():
        for each in loop.model.parameters():
            each.clamp_(-0.01, 0.01)


def _slower(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.5


def _swap_and_back(loop: Loop) -> None:
    with torch.no_grad():
        for each in loop.model.parameters():
            kept = each.clone()
            each.zero_()
            each.copy_(kept)


@pytest.mark.parametrize(
    ("afterwards", "step", "part"),
    [(_clamp, 2, "model"), (_slower, 1, "optimizer"), (lambda loop: loop.sampler.advance(4), 1, "sampler")],
)
def test_what_moves_after_the_step_is_told_once(
    tmp_path: Path, said: Said, afterwards: Act, step: int, part: str
) -> None:
    train_turns(Loop(tmp_path / "run"), afterwards, turns=4)

    (line,) = said("state_moves_after_step")
    assert line.startswith(f"state_moves_after_step step={step} parts={part} ")
    assert "before step_done()" in line


def test_a_schedule_that_moves_after_a_later_step_is_told(tmp_path: Path, said: Said) -> None:
    model = torch.nn.Linear(1, 1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(model.parameters(), lr=1.0), 0.5)
    loop = Loop(tmp_path / "run", more={"schedule": schedule})
    train_turns(loop, lambda loop: schedule.step() if loop.manager.step == 5 else None, turns=8)

    (line,) = said("state_moves_after_step")
    assert line.startswith("state_moves_after_step step=5 parts=schedule ")


def _swap_for_an_evaluation(loop: Loop) -> None:
    """Swap an average in once in some steps; the next turn begins with the weights."""
    if loop.manager.step == 1:
        _clamp(loop)


@pytest.mark.parametrize(
    "afterwards", [_swap_and_back, _swap_for_an_evaluation, Loop.evaluate, lambda loop: loop.manager.save()]
)
def test_what_is_put_back_after_the_step_or_saved_there_is_not_told(
    tmp_path: Path, said: Said, afterwards: Act
) -> None:
    train_turns(Loop(tmp_path / "run"), afterwards)

    assert said("state_moves_after_step") == []


@pytest.mark.parametrize("steps", [8, 12])
def test_a_schedule_of_another_length_is_told_as_it_is_restored(tmp_path: Path, said: Said, steps: int) -> None:
    def schedule(steps: int) -> torch.optim.lr_scheduler.SequentialLR:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [2])

    first = Loop(tmp_path / "run", more={"schedule": schedule(8)}, every=1)
    first.train()
    first.manager.step_done()
    assert first.manager.wait_saved(60)

    Loop(tmp_path / "run", more={"schedule": schedule(steps)}, resume_from="latest")

    told = said("schedule_restored")
    assert len(told) == (steps == 12)
    assert all('part=schedule options="1.T_max=8 (the script has 12)"' in line for line in told)


@pytest.mark.parametrize("replace", [True, False])
def test_weights_that_are_loaded_after_the_resume_are_told(tmp_path: Path, said: Said, *, replace: bool) -> None:
    first = Loop(tmp_path / "run", every=1)
    initial = copy.deepcopy(first.model.state_dict())
    train_turns(first, lambda _: None, turns=1)
    assert first.manager.wait_saved(60)

    resumed = Loop(tmp_path / "run", resume_from="latest")
    resumed.model.load_state_dict(initial if replace else copy.deepcopy(resumed.model.state_dict()))
    train_turns(resumed, lambda _: None, turns=2)

    told = said("weights_replaced_after_resume")
    assert len(told) == replace
    assert all("step=1 parts=model " in line and "before resume()" in line for line in told)


@pytest.mark.parametrize("which", ["average", "given", "frozen"])
def test_an_average_that_the_state_lacks_is_told(tmp_path: Path, said: Said, which: str) -> None:
    torch.manual_seed(1)
    model = Wrapped(torch.nn.Linear(4, 1))
    average = torch.optim.swa_utils.AveragedModel(model)
    loop = Loop(tmp_path / "run", more={"net": model} | ({"ema": average} if which == "given" else {}))
    for _ in range(3):
        loop.train()
        with torch.no_grad():
            model.module.weight += 1.0
            if which in ("average", "given"):
                average.update_parameters(model)
        loop.manager.step_done()

    told = [line.split("part=")[1].split(" ")[0] for line in said("part_not_saved")]
    assert told == ["AveragedModel"] * (which == "average")


@pytest.mark.parametrize("how", ["own loop first", "one turn and an own loop", "again and again"])
def test_a_loop_that_steps_makes_in_part_is_not_told_of(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Weights are looked at in two steps and no more: that waits for a GPU."""
    first = Loop(tmp_path / "run", every=1)
    train_turns(first, lambda _: None, turns=1)
    assert first.manager.wait_saved(60)
    loop = Loop(tmp_path / "run", resume_from="latest")
    looks = 0
    numbers = afterwards._numbers

    def look(weight: torch.Tensor) -> object:
        nonlocal looks
        looks += 1
        return numbers(weight)

    def own_loop() -> None:
        for _ in range(4):
            loop.train()
            loop.manager.step_done()

    monkeypatch.setattr(afterwards, "_numbers", look)
    if how == "own loop first":
        own_loop()
        train_turns(loop, lambda _: None, turns=loop.manager.step + 3)
    elif how == "one turn and an own loop":
        train_turns(loop, lambda _: None, turns=2)
        own_loop()
    else:
        for _ in range(6):  # each is left after one turn
            train_turns(loop, lambda _: None, turns=loop.manager.step + 1)

    assert said("weights_replaced_after_resume") + said("state_moves_after_step") == []
    assert looks <= len(list(loop.model.parameters())) * (2 * afterwards.LOOKS + 1)


@pytest.mark.parametrize(
    "place",
    [
        "schedules:tell_restored",
        "position:Position.gathered",
        "position:Position.arrive",
        "afterwards:Afterwards.begin",
        "afterwards:Afterwards.turn",
        "afterwards:Afterwards.leave",
        "exactness:Evaluations._on_forward",
    ],
)
def test_what_goes_wrong_in_a_look_ends_no_training(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Scripts have objects of any kind: what they raise when they are looked at cannot be foreseen."""

    def fail(*_: object) -> None:
        raise ValueError("nobody knows")

    first = Loop(tmp_path / "run", every=1)
    train_turns(first, lambda _: None, turns=1)
    assert first.manager.wait_saved(60)
    module, _, name = place.partition(":")
    monkeypatch.setattr(f"stepkeeper_trainer.observe.{module}.{name}", fail)
    loop = Loop(tmp_path / "run", resume_from="latest")
    train_turns(loop, Loop.evaluate)

    (line,) = said("looks_ended")
    assert "ValueError: nobody knows" in line
    assert loop.manager.step == 3


class Waits(Position):
    """Its state comes of all ranks: a rank that asks alone waits for good."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return super().state_dict()


def test_no_part_is_asked_for_its_state_by_rank_0_alone(tmp_path: Path) -> None:
    part = Waits()
    loop = Loop(tmp_path / "run", more={"part": part}, attach_hooks=False)
    asked = [0, part.asked]
    for _ in loop.manager.steps():
        loop.train()
        loop.manager.step_done()
        asked.append(part.asked)
        if loop.manager.step == 4:
            break

    assert [after - before for before, after in itertools.pairwise(asked)] == [1, 1, 0, 0, 0]

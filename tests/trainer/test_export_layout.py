"""An export is what model hubs have: tied weights once, the model's own files beside them; and it is a start again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepkeeper.cli.main import main
from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.errors import ResumeError
from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.load.initial import load_model

pytestmark = pytest.mark.usefixtures("one_process")


class Net(nn.Module):
    """With weights under two names, and two tensors that are equal by chance."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.one, self.other = nn.LayerNorm(4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.other(self.one(self.embedding(ids))))
        return logits


def command(*argv: object) -> int:
    return main(["checkpoints", "export", *map(str, argv)])


def saved(run_dir: Path, model: nn.Module) -> Path:
    """Save a model by a manager, and return the step directory."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer}, every=None, run_dir=run_dir, storage_test="off"
    )
    manager.resume()
    manager.save()
    assert manager._saver is not None
    assert manager._saver.wait(time.time() + 90)
    [step] = list_steps(run_dir / "checkpoints")
    return step.path


def names(out: Path) -> set[str]:
    return set(safetensors.torch.load_file(out / "model.safetensors"))


def test_tied_weights_are_written_once_and_load_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    step = saved(tmp_path / "run", model)

    assert command(step, tmp_path / "out", "--json") == 0

    assert json.loads(capsys.readouterr().out)["tied"] == {"head.weight": "embedding.weight"}
    assert names(tmp_path / "out") == {name for name, _ in model.named_parameters()}
    for load in (load_model, safetensors.torch.load_model):
        source = tmp_path / "out" if load is load_model else tmp_path / "out/model.safetensors"
        fresh = Net()
        load(fresh, source)  # strict
        assert torch.equal(fresh.head.weight, model.head.weight)
        assert fresh.head.weight is fresh.embedding.weight
    with pytest.raises(ResumeError, match=r"lacks head\.weight"):
        load_model(Net(tied=False), tmp_path / "out")


def test_who_wants_each_name_gets_it(tmp_path: Path) -> None:
    model = Net()
    step = saved(tmp_path / "run", model)

    assert command(step, tmp_path / "out", "--keep-tied") == 0

    assert names(tmp_path / "out") == set(model.state_dict())
    load_model(Net(tied=False), tmp_path / "out")
    load_model(Net(), tmp_path / "out")


def test_tensors_that_are_equal_and_not_tied_are_all_written(tmp_path: Path) -> None:
    step = saved(tmp_path / "run", Net(tied=False))

    assert command(step, tmp_path / "out") == 0

    assert {"one.weight", "other.weight", "head.weight", "embedding.weight"} <= names(tmp_path / "out")


def test_files_of_the_model_are_put_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = saved(tmp_path / "run", Net())
    config, tokenizer = tmp_path / "config.json", tmp_path / "tokenizer.json"
    config.write_text('{"vocab_size": 6}')
    tokenizer.write_bytes(bytes(range(256)) * 9000)  # more than one block

    assert command(step, tmp_path / "out", "--copy", config, "--copy", tokenizer, "--json") == 0

    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert {file["name"] for file in json.loads(capsys.readouterr().out)["files"]} >= {"config.json"}


@pytest.mark.parametrize(
    ("copies", "why"),
    [
        (["nothing.json"], "is no file"),
        (["."], "is no file"),
        (["model.safetensors"], "is there already"),
        (["model.safetensors.index.json"], "is there already"),
        (["config.json", "below/config.json"], "is there already"),
    ],
)
def test_files_that_cannot_be_put_there_are_named_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], copies: list[str], why: str
) -> None:
    step = saved(tmp_path / "run", Net())
    (tmp_path / "below").mkdir()
    for name in ("model.safetensors", "model.safetensors.index.json", "config.json", "below/config.json"):
        (tmp_path / name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))

    argv = [part for name in copies for part in ("--copy", tmp_path / name)]
    assert command(step, tmp_path / "out", *argv) != 0

    assert why in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_what_wraps_a_model_leaves_no_trace_in_its_names(tmp_path: Path) -> None:
    model = Net()
    step = saved(tmp_path / "run", DistributedDataParallel(torch.compile(model)))  # type: ignore[arg-type]

    assert command(step, tmp_path / "out") == 0

    assert names(tmp_path / "out") == {name for name, _ in model.named_parameters()}


def test_a_run_starts_from_an_export_and_then_from_its_own_steps(tmp_path: Path) -> None:
    model = Net()
    assert command(saved(tmp_path / "first", model), tmp_path / "out") == 0

    def start(resume_from: str | None = None) -> tuple[Net, CheckpointManager]:
        torch.manual_seed(5)
        net = Net()
        load_model(net, tmp_path / "out")  # weights only: the optimizer, the schedule and the data begin anew
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        manager = CheckpointManager(
            {"model": net, "optimizer": optimizer}, every=None, run_dir=tmp_path / "second", resume_from=resume_from
        )
        return net, manager

    net, manager = start()
    assert manager.resume() == 0
    assert torch.equal(net.head.weight, model.head.weight)
    _step(net, manager)
    manager.save()
    assert manager._saver is not None
    assert manager._saver.wait(time.time() + 90)

    again, manager = start(resume_from="latest")
    assert manager.resume() == 1

    assert torch.equal(again.head.weight, net.head.weight)
    assert not torch.equal(again.head.weight, model.head.weight)
    assert again.head.weight is again.embedding.weight


def _step(net: Net, manager: CheckpointManager) -> None:
    net(torch.arange(6)).square().mean().backward()
    [part] = manager._state.optimizers.values()
    optimizer = part.optimizer
    optimizer.step()
    manager.step_done(loss=0.0)


def test_transformers_reads_an_export(tmp_path: Path) -> None:
    """Where that library is installed: its own model, with tied weights, in several files."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path)
    step = saved(tmp_path / "run", model)

    assert command(step, tmp_path / "out", "--copy", tmp_path / "config.json", "--max-shard-size", "8KB") == 0

    assert (tmp_path / "out/model.safetensors.index.json").exists()
    found, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    assert found.lm_head.weight is found.transformer.wte.weight

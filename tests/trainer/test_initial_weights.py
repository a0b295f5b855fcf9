"""A run that begins with another program's weights, and goes on with its own steps from then on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from stepkeeper_trainer import CheckpointManager, StepkeeperWriter
from stepkeeper_trainer.errors import DamagedError, ResumeError
from stepkeeper_trainer.load.reader import ALONE
from tests.trainer.scenes import Stage
from tests.trainer.test_keeper import Loop, save_at

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.filterwarnings("ignore")]
SCENES = "tests.trainer.initial_scenes"


class Net(nn.Module):
    def __init__(self, seed: int, *, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(6, 4)
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in range(2)})
        self.output = nn.Linear(4, 6, bias=False)
        if extra:
            self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(self.tok_embeddings(x) if x.dtype == torch.int64 else x)
        found: torch.Tensor = self.output(x)
        return found


class Run:
    """One launch."""

    def __init__(self, run_dir: Path, resume_from: object = None, *, extra: bool = False, **options: Any) -> None:
        self.model = Net(5, extra=extra)
        self.fresh = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.manager = CheckpointManager(
            {"model": self.model, "optimizer": self.optimizer},
            run_dir=run_dir,
            resume_from=resume_from,
            **({"every": None} | options),
        )

    def begun(self) -> int:
        return self.manager.resume()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(torch.arange(6)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.manager.step_done(loss=0.0)
        self.manager.finish()

    def holds(self, other: nn.Module) -> bool:
        own = self.model.state_dict()
        return all(torch.equal(own[name], value) for name, value in other.state_dict().items() if name in own)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


def torchtitan(directory: Path, model: Net) -> Path:
    """A checkpoint laid out as torchtitan's: the model's names at the top, the others behind theirs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights, optim = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    others = {"optimizer": optim, "train_state": {"step": torch.tensor(30)}, "lr_scheduler": {"last_epoch": 30}}
    dcp.save(weights | others, checkpoint_id=directory / "step-30", **ALONE)
    return directory / "step-30"


@pytest.mark.parametrize("prefix", ["model.", "", "app.model.", "state.network."])
def test_a_directory_of_plain_dcp_begins_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str) -> None:
    model = Net(1)
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    dcp.save(state | {"epoch": 3}, checkpoint_id=tmp_path / "plain", **ALONE)

    run = Run(tmp_path / "run", tmp_path / "plain")

    assert run.begun() == 0
    assert run.holds(model)
    assert not run.optimizer.state
    assert "initial_weights_unverified" in caplog.text
    assert "initial_weights_differ" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_whose_state_holds_copies_takes_them_over(tmp_path: Path, dtype: torch.dtype) -> None:
    """Asked for its state again, it would give others, with the weights of before."""
    model = torch.nn.Linear(4, 2)
    model.register_state_dict_post_hook(
        lambda _module, state, _prefix, _noted: state.update(
            {k: v.detach().to(dtype, copy=True) for k, v in state.items()}
        )
    )
    dcp.save({k: torch.ones_like(v) for k, v in model.state_dict().items()}, checkpoint_id=tmp_path / "w", **ALONE)
    manager = CheckpointManager(
        {"model": model}, run_dir=tmp_path / "run", resume_from=str(tmp_path / "w"), storage_test="off"
    )

    manager.resume()

    assert all(bool((each == 1).all()) for each in model.parameters())


def test_a_checkpoint_of_torchtitan_begins_a_run(tmp_path: Path) -> None:
    model = Net(1)

    run = Run(tmp_path / "run", torchtitan(tmp_path, model))

    assert run.begun() == 0
    assert run.holds(model)
    run.steps(1)


def test_the_optimizers_state_comes_along_where_it_is_asked_for(tmp_path: Path) -> None:
    source = torchtitan(tmp_path, Net(1))

    run = Run(tmp_path / "run", source, with_optimizer=True)

    assert run.begun() == 0
    for parameter in run.model.parameters():
        state = run.optimizer.state[parameter]
        assert state["step"] == 1
        assert torch.equal(state["exp_avg"], torch.full_like(parameter, 0.1))
    assert run.optimizer.param_groups[0]["lr"] == 0.1, "options are the script's"
    run.steps(1)
    dcp.save(Net(1).state_dict(), checkpoint_id=tmp_path / "plain", **ALONE)
    with pytest.raises(ResumeError, match="states of optimizer nowhere"):
        Run(tmp_path / "other", tmp_path / "plain", with_optimizer=True).begun()
    safetensors.torch.save_file(Net(1).state_dict(), tmp_path / "one.safetensors")
    with pytest.raises(ResumeError, match="hold no state of an optimizer"):
        Run(tmp_path / "other", tmp_path / "one.safetensors", with_optimizer=True).begun()


def test_a_parameter_without_a_state_is_refused_or_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state: dict[str, Any] = {"model": Net(1).state_dict()}
    state["optim"] = {
        "state": {
            "output.weight": {"exp_avg": torch.ones(6, 4), "exp_avg_sq": torch.ones(6, 4), "step": torch.ones(())}
        }
    }
    dcp.save(state, checkpoint_id=tmp_path / "plain", **ALONE)

    with pytest.raises(ResumeError, match=r"lacks optimizer\.state\.tok_embeddings\.weight"):
        Run(tmp_path / "run", tmp_path / "plain", with_optimizer=True).begun()
    run = Run(tmp_path / "run", tmp_path / "plain", with_optimizer=True, strict=False)

    assert run.begun() == 0
    assert len(run.optimizer.state) == 1
    assert "optimizer.state.layers.0.bias" in caplog.text


def test_safetensors_begin_a_run(tmp_path: Path) -> None:
    model = Net(1)
    one, several = tmp_path / "one.safetensors", tmp_path / "several"
    state = {name: value.to(torch.bfloat16).float() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    safetensors.torch.save_file({name: value.to(torch.bfloat16) for name, value in state.items()}, one)
    several.mkdir()
    for number, names in enumerate((list(state)[:2], list(state)[2:])):
        safetensors.torch.save_file({f"model.{name}": state[name] for name in names}, several / f"{number}.safetensors")
    places = {f"model.{name}": f"{int(number >= 2)}.safetensors" for number, name in enumerate(state)}
    (several / "model.safetensors.index.json").write_text(str({"weight_map": places}).replace("'", '"'))

    for number, source in enumerate((one, several)):
        run = Run(tmp_path / f"run{number}", source)
        assert run.begun() == 0
        assert run.holds(model)


def test_what_a_stepkeeper_writer_saved_begins_a_run_and_is_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net(1)
    dcp.save({"model": model.state_dict()}, storage_writer=StepkeeperWriter(tmp_path / "a", step=4), **ALONE)
    step = tmp_path / "a/checkpoints/step_00000004"

    run = Run(tmp_path / "run", step)
    assert run.begun() == 0
    assert run.holds(model)
    assert "unverified" not in caplog.text

    file = step / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="are wrong"):
        Run(tmp_path / "other", step).begun()
    with pytest.raises(ResumeError, match="was not saved by this library's manager"):
        Run(tmp_path / "a", tmp_path / "a/checkpoints/step_00000004").begun()


def test_missing_and_unexpected_names_are_refused_or_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net(1)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    del state["model.layers.1.bias"]
    dcp.save(state | {"model.old.weight": torch.ones(2)}, checkpoint_id=tmp_path / "plain", **ALONE)

    with pytest.raises(ResumeError, match=r"lacks model\.extra\.bias, .*model lacks model\.old\.weight"):
        Run(tmp_path / "run", tmp_path / "plain", extra=True).begun()
    run = Run(tmp_path / "run", tmp_path / "plain", extra=True, strict=False)
    assert run.begun() == 0

    assert torch.equal(run.model.output.weight, model.output.weight)
    assert torch.equal(run.model.extra.weight, run.fresh["extra.weight"])
    assert torch.equal(run.model.layers["1"].bias, run.fresh["layers.1.bias"])  # type: ignore[arg-type]
    for name in ("model.extra.weight", "model.extra.bias", "model.layers.1.bias", "model.old.weight"):
        assert name in caplog.text


@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_another_model_are_refused(tmp_path: Path, *, strict: bool) -> None:
    dcp.save({"model.output.weight": torch.ones(9, 9)}, checkpoint_id=tmp_path / "shape", **ALONE)
    dcp.save({"nothing": torch.ones(9, 9)}, checkpoint_id=tmp_path / "names", **ALONE)
    two = {f"{place}.{name}": value for place in ("ema", "live") for name, value in Net(1).state_dict().items()}
    dcp.save(two, checkpoint_id=tmp_path / "two", **ALONE)

    for name, said in (
        ("shape", r"model\.output\.weight has shape \[9, 9\], the model's \[6, 4\]"),
        ("names", "none of its tensors is the model's"),
        ("two", r"model may be any of \['ema\.', 'live\.'\]"),
        ("nothing", "no such step directory"),
    ):
        with pytest.raises(ResumeError, match=said):
            Run(tmp_path / "run", tmp_path / name, strict=strict).begun()


def test_a_torn_checkpoint_and_one_that_names_code_are_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'run-by-a-load'}",)

    state = {f"model.{name}": value for name, value in Net(1).state_dict().items()}
    dcp.save(state | {"bad": Payload()}, checkpoint_id=tmp_path / "plain", **ALONE)
    assert Run(tmp_path / "run", tmp_path / "plain").begun() == 0  # what is no tensor is not touched
    [file] = (tmp_path / "plain").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(DamagedError, match="its pieces need"):
        Run(tmp_path / "run", tmp_path / "plain").begun()
    (tmp_path / "plain/.metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(DamagedError, match="was not loaded"):
        Run(tmp_path / "run", tmp_path / "plain").begun()
    assert not (tmp_path / "run-by-a-load").exists()


def test_a_step_of_ours_without_its_manifest_is_never_initial_weights(tmp_path: Path) -> None:
    first = Run(tmp_path / "first")
    assert first.begun() == 0
    first.steps(2)
    (tmp_path / "first/checkpoints/step_00000002/MANIFEST.json").unlink()

    with pytest.raises(ResumeError, match="never committed"):
        Run(tmp_path / "second", tmp_path / "first/checkpoints/step_00000002").begun()


# Who comes first --------------------------------------------------------------------------------------------------


def test_a_step_of_the_run_counts_before_initial_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dcp.save(Net(1).state_dict(), checkpoint_id=tmp_path / "plain", **ALONE)
    run = Run(tmp_path / "run", tmp_path / "plain")
    assert run.begun() == 0
    run.steps(3)

    again = Run(tmp_path / "run", tmp_path / "plain")

    assert again.begun() == 3
    assert again.holds(run.model)
    assert "own_step_counts" in caplog.text


def test_a_requeued_run_goes_on_from_its_own_step_and_not_from_that_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_at(tmp_path / "first", 2)
    begin = tmp_path / "first/checkpoints/step_00000002"
    monkeypatch.setenv("STEPKEEPER_SOCKET", "@nobody-listens")
    loop = Loop(tmp_path / "second", resume_from=begin)
    assert loop.manager.resume() == 2
    loop.run(5)
    loop.manager.save()
    loop.saved()

    own = tmp_path / "second/checkpoints/step_00000005"
    monkeypatch.setenv("STEPKEEPER_RESUME_FROM", str(own))  # as the supervisor sets it after a requeue
    assert Loop(tmp_path / "second", resume_from=begin).manager.resume() == 5
    monkeypatch.delenv("STEPKEEPER_RESUME_FROM")
    monkeypatch.delenv("STEPKEEPER_SOCKET")
    assert Loop(tmp_path / "second", resume_from=begin).manager.resume() == 5, "without a supervisor, too"
    monkeypatch.setenv("STEPKEEPER_RESUME_FROM", "latest")
    assert Loop(tmp_path / "second", resume_from=begin).manager.resume() == 5


def test_latest_falls_back_on_what_the_script_begins_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_at(tmp_path / "first", 2)
    monkeypatch.setenv("STEPKEEPER_RESUME_FROM", "latest")

    assert Loop(tmp_path / "second", resume_from=tmp_path / "first/checkpoints/step_00000002").manager.resume() == 2


def test_a_supervisor_that_goes_back_to_the_start_has_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(Net(1).state_dict(), checkpoint_id=tmp_path / "plain", **ALONE)
    run = Run(tmp_path / "run", tmp_path / "plain")
    assert run.begun() == 0
    run.steps(3)

    monkeypatch.setenv("STEPKEEPER_SOCKET", "@nobody-listens")
    monkeypatch.setenv("STEPKEEPER_RESUME_FROM", "")
    again = Run(tmp_path / "run", tmp_path / "plain")

    assert again.begun() == 0
    assert again.holds(Net(1))


# Several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "safetensors", "writer"])
def test_each_rank_reads_its_shards(stage: Stage, tmp_path: Path, kind: str) -> None:
    ended = stage.play(f"{SCENES}:save", tmp_path, ranks=1, kind=kind)
    assert ended.codes == [0], ended.said

    ended = stage.play(f"{SCENES}:begin", tmp_path, ranks=2, kind=kind)

    assert ended.codes == [0, 0], ended.said
    assert ended.said.count("wrong: []") == 2


def test_damage_that_one_rank_meets_is_an_error_of_all(stage: Stage, tmp_path: Path) -> None:
    assert stage.play(f"{SCENES}:save", tmp_path, ranks=1, kind="plain").codes == [0]
    [file] = (tmp_path / "plain").glob("*.distcp")
    file.unlink()

    ended = stage.play(f"{SCENES}:begin", tmp_path, ranks=2, kind="plain")

    assert ended.codes == [65, 65], ended.said

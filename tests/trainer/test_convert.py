"""Checkpoints of other programs become safetensors, torch.save and DCP, and come back bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper.cli.main import main
from stepkeeper.core.exits import ExitCode
from stepkeeper.frameworks import converting
from stepkeeper_trainer.load.reader import ALONE
from stepkeeper_trainer.store import conversion, export
from tests.trainer.test_export import made_step, same

HEADS, KV_HEADS, HEAD, LAYERS = 4, 2, 8, 2
WIDTH = HEADS * HEAD


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("STEPKEEPER_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Convert in this process, which has imported torch; tests marked so start another one, as users do."""
    if "other_process" in request.fixturenames:
        return
    start = converting.start

    def call(argv: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        if argv[0] != sys.executable or argv[2] != conversion.__name__:
            return start(argv, environment)
        said = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stderr(said):
            patch.setattr(sys, "argv", argv[2:])
            code = conversion.main()
        return subprocess.CompletedProcess(argv, code, "", said.getvalue())

    monkeypatch.setattr(converting, "start", call)


@pytest.fixture
def other_process() -> None:
    pass


def command(*argv: object) -> int:
    return main(["checkpoints", "export", *map(str, argv)])


def llama(style: str) -> dict[str, torch.Tensor]:
    """Return random weights under the names of a style."""
    torch.manual_seed(1)
    shapes = {"wq": (WIDTH, WIDTH), "wk": (KV_HEADS * HEAD, WIDTH), "wv": (KV_HEADS * HEAD, WIDTH)}
    below = "qkv_linear." if style == "torchtitan" else ""
    found = {"tok_embeddings.weight": torch.randn(50, WIDTH), "norm.weight": torch.randn(WIDTH)}
    for layer in range(LAYERS):
        found |= {f"layers.{layer}.attention.{below}{name}.weight": torch.randn(size) for name, size in shapes.items()}
        found |= {
            f"layers.{layer}.attention.wo.weight": torch.randn(WIDTH, WIDTH),
            f"layers.{layer}.feed_forward.w1.weight": torch.randn(60, WIDTH).bfloat16(),
            f"layers.{layer}.feed_forward.w2.weight": torch.randn(WIDTH, 60),
            f"layers.{layer}.feed_forward.w3.weight": torch.randn(60, WIDTH),
            f"layers.{layer}.attention_norm.weight": torch.randn(WIDTH),
            f"layers.{layer}.ffn_norm.weight": torch.randn(WIDTH),
        }
    return found | {"output.weight" if style == "meta" else "lm_head.weight": torch.randn(50, WIDTH)}


def written(directory: Path, state: dict[str, object]) -> Path:
    save(state, checkpoint_id=directory, **ALONE)
    return directory


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    """Read a DCP directory with stock torch."""
    metadata = dcp.FileSystemReader(directory).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=directory, **ALONE)
    return state


def hugging_face(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Turn a projection as transformers' own conversion of Llama does."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def config(path: Path) -> Path:
    path.write_text(json.dumps({"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}))
    return path


@pytest.mark.parametrize("prefix", ["model", "state_dict", ""])
def test_a_model_in_a_dcp_directory_of_another_program_is_exported(
    tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama("torchtitan")
    training = {"optimizer": {"state": {"a": torch.ones(3)}, "lr": 0.1}, "train_state": {"step": torch.tensor(5)}}
    source = written(tmp_path / "step-5", {**({prefix: model} if prefix else model), **training})

    assert command(source, tmp_path / "out") == 0

    same(safetensors.torch.load_file(tmp_path / "out/model.safetensors"), model)
    out = capsys.readouterr().out
    assert "left out: optimizer (2), train_state (1)" in out, out


def test_in_a_checkpoint_of_a_framework_the_directory_of_the_model_is_taken(tmp_path: Path) -> None:
    written(tmp_path / "checkpoint-5/pytorch_model_fsdp_0", {"model": llama("meta")})
    written(tmp_path / "checkpoint-5/optimizer_0", {"optimizer": {"a": torch.ones(3)}})

    assert command(tmp_path / "checkpoint-5", tmp_path / "out") == 0

    same(safetensors.torch.load_file(tmp_path / "out/model.safetensors"), llama("meta"))


@pytest.mark.parametrize("style", sorted(export.STYLES))
def test_llamas_names_and_rows_become_hugging_faces_and_come_back(tmp_path: Path, style: str) -> None:
    model = llama(style)
    source = written(tmp_path / "step-5", {**model, "rope.freqs": torch.ones(4)})
    hub, back = tmp_path / "hub", tmp_path / "back"

    assert command(source, hub, "--names", style, "--copy", config(tmp_path / "config.json")) == 0

    found = safetensors.torch.load_file(hub / "model.safetensors")
    assert len(found) == len(model)
    below = "qkv_linear." if style == "torchtitan" else ""
    for layer in range(LAYERS):
        for name, heads in (("q", HEADS), ("k", KV_HEADS)):
            expected = hugging_face(model[f"layers.{layer}.attention.{below}w{name}.weight"], heads)
            assert torch.equal(found[f"model.layers.{layer}.self_attn.{name}_proj.weight"], expected)
        plain = model[f"layers.{layer}.attention.{below}wv.weight"]
        assert torch.equal(found[f"model.layers.{layer}.self_attn.v_proj.weight"], plain)
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < found.keys()
    assert command(hub, back, "--to", "dcp", "--names", style) == 0
    same(loaded(back), model)
    again = tmp_path / "again"
    assert command(back, again, "--names", style, "--head-dim", HEAD) == 0
    same(safetensors.torch.load_file(again / "model.safetensors"), found)


def test_safetensors_become_initial_weights_with_any_dtype_and_prefix(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "half": torch.randn(7).half(),
        "odd": torch.tensor([True, False, True]),
        "small": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.zeros(0, 5),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")

    assert command(tmp_path / "model.safetensors", tmp_path / "dcp", "--to", "dcp", "--prefix", "model.") == 0

    same(loaded(tmp_path / "dcp"), {f"model.{name}": tensor for name, tensor in tensors.items()})
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.usefixtures("other_process")
def test_a_dcp_directory_becomes_one_file_with_all_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moments = {"state": {"a": {"exp_avg": torch.randn(9)}}, "param_groups": [{"lr": 0.25, "params": ["a"]}]}
    source = written(tmp_path / "step-5", {"model": llama("meta"), "optimizer": moments, "epoch": 3})

    assert command(source, tmp_path / "all.pt", "--to", "torch", "--json") == 0

    found = torch.load(tmp_path / "all.pt", weights_only=True)
    same(found["model"], llama("meta"))
    assert torch.equal(found["optimizer"]["state"]["a"]["exp_avg"], moments["state"]["a"]["exp_avg"])
    assert (found["optimizer"]["param_groups"], found["epoch"]) == (moments["param_groups"], 3)
    assert json.loads(capsys.readouterr().out)["left_out"].startswith("nothing")


def test_a_step_of_ours_becomes_one_file_too(tmp_path: Path) -> None:
    tensors = {"model.a": torch.randn(4, 4), "optimizer.state.a.exp_avg": torch.randn(4, 4)}

    assert command(made_step(tmp_path, tensors), tmp_path / "all.pt", "--to", "torch") == 0

    same(torch.load(tmp_path / "all.pt", weights_only=True), tensors)


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_a_damaged_checkpoint_is_not_converted(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "step-5", {"model": llama("meta")})
    [data] = source.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[content.index(llama("meta")["norm.weight"].numpy().tobytes())] ^= 1
    data.write_bytes(content)

    assert command(source, tmp_path / "out", "--to", to) == ExitCode.NOT_VERIFIED

    assert "CRC" in capsys.readouterr().err
    assert {"home", "step-5"} >= set(os.listdir(tmp_path))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.usefixtures("other_process")
def test_a_value_that_would_run_a_program_is_not_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executed = tmp_path / "executed"
    source = written(tmp_path / "step-5", {"model": llama("meta"), "x": Evil(executed)})
    executed.unlink(missing_ok=True)

    assert command(source, tmp_path / "all.pt", "--to", "torch") == ExitCode.NOT_VERIFIED

    assert "nothing was executed" in capsys.readouterr().err
    assert not executed.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--names", "meta"), "--head-dim"),
        (("--names", "meta", "--head-dim", "7"), "two halves"),
        (("--names", "meta", "--head-dim", "48"), "do not fill"),
        (("--names", "torchtitan", "--head-dim", HEAD), "no such name"),
        (("--to", "universal"), "no ZeRO checkpoint"),
        (("--to", "torch", "--dry-run"), "--dry-run"),
        (("--to", "torch", "--python", "/nowhere/python"), "/nowhere/python"),
        (("--to", "dcp"), "neither model.safetensors"),
    ],
)
def test_what_cannot_be_converted_is_said_and_nothing_is_left(
    tmp_path: Path, options: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "step-5", {"model": llama("meta")})

    assert command(source, tmp_path / "out", *options) == ExitCode.USAGE

    assert said in capsys.readouterr().err
    assert not any(path.name.startswith((".", "out")) for path in tmp_path.iterdir())


def test_a_python_without_what_it_needs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.frameworks import layouts  # noqa: PLC0415

    source = layouts.deepspeed(2)(tmp_path, 10)

    code = command(source, tmp_path / "global_step10_universal", "--to", "universal", "--python", sys.executable)

    err = capsys.readouterr().err
    assert (code, "deepspeed" in err, "--python" in err) == (ExitCode.USAGE, True, True), err
    assert command(source, tmp_path / "other", "--to", "universal") == ExitCode.USAGE
    assert "_universal" in capsys.readouterr().err

"""Conversions against the real frameworks: DeepSpeed resumes from a Universal Checkpoint, torchtitan names as we do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch

from stepkeeper.cli.main import main
from tests.frameworks import environments, playing
from tests.trainer import test_convert
from tests.trainer.test_export import same

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)


def test_deepspeed_resumes_from_the_universal_checkpoint_that_the_export_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = environments.require("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    out, losses, again = tmp_path / "out", tmp_path / "losses", tmp_path / "again"
    with playing.warm(python, "deepspeed_script.py", ["deepspeed"], ["--variant", "2"]) as framework:
        assert framework.play(out, losses) == [0, 0]
    source, target = out / "global_step4", out / "global_step4_universal"

    words = [str(source), str(target), "--to", "universal", "--python", str(python), "--inject-missing-state"]
    code = main(["checkpoints", "export", *words])

    said = capsys.readouterr()
    assert code == 0, said.err
    assert "left out: random states" in said.out
    weights = torch.load(source / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    for name, weight in weights.items():
        assert torch.equal(torch.load(target / "zero" / name / "fp32.pt", weights_only=False)["param"], weight), name
        assert (target / "zero" / name / "exp_avg.pt").exists()
    assert main(["checkpoints", "verify", str(target)]) == 0
    shutil.rmtree(source)  # the Universal Checkpoint alone is enough
    script = "deepspeed_universal_script.py"
    with playing.warm(python, script, ["deepspeed"], ["--variant", "2"]) as framework:
        codes = framework.play(out, again, resume=str(target))
    logs = "".join(Path(f"{again}.log.{rank}").read_text()[-1500:] for rank in range(2))
    assert codes == [0, 0], logs
    for rank in range(2):
        before, after = playing.losses(losses, rank), playing.losses(again, rank)
        assert after == {step: loss for step, loss in before.items() if step > 4}


def test_torchtitan_turns_the_names_and_rows_of_llama_as_we_do(tmp_path: Path) -> None:
    python = environments.require("torchtitan")
    model = test_convert.llama("torchtitan")
    torch.save(model, tmp_path / "in.pt")
    script = playing.SCRIPTS / "torchtitan_to_hf.py"
    sizes = map(str, (test_convert.HEADS, test_convert.KV_HEADS, test_convert.WIDTH))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    argv = [python, script, tmp_path / "in.pt", tmp_path / "out.pt", *sizes]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    step = test_convert.written(tmp_path / "step-5", dict(model))

    words = ["--names", "torchtitan", "--head-dim", str(test_convert.HEAD)]
    assert main(["checkpoints", "export", str(step), str(tmp_path / "hub"), *words]) == 0

    same(safetensors.torch.load_file(tmp_path / "hub/model.safetensors"), torch.load(tmp_path / "out.pt"))

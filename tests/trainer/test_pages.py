"""The pages on the library: the tutorial's script runs as it stands, and every name has its place."""

from __future__ import annotations

import inspect
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stepkeeper_trainer
from stepkeeper_trainer import CheckpointManager, GlobalSampler
from stepkeeper_trainer.formats.steps import newest_verified
from tests.trainer.ranks import ROOT, Ranks, losses

TUTORIAL = (ROOT / "docs/tutorials/own-loop.md").read_text()
PAGE = (ROOT / "docs/trainer-api.md").read_text()
STEPS = 400


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (found,) = re.findall(r"^```python\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)
    path = tmp_path / "train.py"
    path.write_text(found)
    return path


def launch(script: Path, ranks: int, *options: str, name: str = "train", **environment: str) -> Ranks:
    """Start it as a user does: in its own directory."""
    run_dir = script.parent / "runs" / name
    run_dir.parent.mkdir(exist_ok=True)  # for the logs
    return Ranks(
        ranks, run_dir, command=[sys.executable, script.name, *options], cwd=script.parent, environment=environment
    )


@pytest.mark.campaign  # test_runs stops and resumes train_lm; the page's script runs in the next test
def test_the_script_is_stopped_by_a_signal_and_goes_on(script: Path) -> None:
    """Two ranks in a Slurm job, no supervisor, no argument: one SIGTERM to one rank saves and stops both."""
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    with launch(script, 2, name="train-7", **job) as ranks:
        ranks.until_step(5)
        ranks.processes[1].send_signal(signal.SIGTERM)
        assert ranks.wait() == [75, 75], ranks.output()
        assert "run_directory_chosen" in ranks.output()
    run_dir = script.parent / "runs/train-7"
    chosen = newest_verified(run_dir / "checkpoints").chosen
    assert chosen is not None
    assert 5 <= chosen.step < STEPS

    with launch(script, 2, name="train-7", **job, STEPKEEPER_RESUME_FROM="latest") as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
        said = ranks.output()

    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))
    for warning in ("evaluation_draws", "random_numbers_differ", "data_position"):
        assert warning not in said


def test_the_script_runs_alone(script: Path) -> None:
    with launch(script, 1, "--steps=20") as ranks:
        assert ranks.wait() == [0], ranks.output()

    assert max(losses(script.parent / "runs/train")) == 20


# what the loop of the page's diff has already
LOOP = """
import sys, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from stepkeeper_trainer import CheckpointManager, GlobalSampler
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, world_size = 0, 1
data = TensorDataset(torch.randn(64, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters())
steps = []
def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    steps.append(loss)
    return loss
import atexit
atexit.register(lambda: print(len(steps), "steps"))
"""


@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_the_loop_with_epochs_do_the_same_steps(side: str, tmp_path: Path) -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)
    code = LOOP + "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", side))
    environment = {"PYTHONPATH": str(ROOT / "trainer"), "HOME": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout == "40 steps\n"  # 20 epochs of 64 samples


def test_every_name_has_its_place_on_the_page() -> None:
    for name in set(stepkeeper_trainer.__all__) - {"__version__"}:
        assert re.search(rf"^\| `{name}` \|", PAGE, re.MULTILINE), name


@pytest.mark.parametrize("kind", [CheckpointManager, GlobalSampler])
def test_every_method_and_argument_has_its_place_on_the_page(kind: type) -> None:
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") and name != "__init__":
            continue
        if name not in ("__init__", "expect", "skip", "skipped_at"):  # what the CheckpointManager calls
            assert f"`{name}" in PAGE, name
        if inspect.isfunction(member) and name not in ("expect", "skip", "skipped_at"):
            for parameter in list(inspect.signature(member).parameters)[1:]:
                assert re.search(rf"\b{parameter}\b", PAGE), f"{name}({parameter})"


def test_every_argument_of_the_constructor_has_a_row_with_its_default() -> None:
    table = PAGE.split("\n## CheckpointManager\n")[1].split("\n| method |")[0]
    for name, parameter in list(inspect.signature(CheckpointManager.__init__).parameters.items())[1:]:
        (row,) = re.findall(rf"^\| `{name}` \| ?(.*?) ?\|", table, re.MULTILINE)
        default = parameter.default
        expected = "" if default is parameter.empty else f"{default:g}" if isinstance(default, float) else str(default)
        assert row.strip("`") == expected, name


def test_the_package_lists_its_names_and_imports_no_torch_for_that() -> None:
    code = (
        "import sys, stepkeeper_trainer as library; "
        "assert set(library.__all__) <= set(dir(library)), dir(library); "
        "assert 'torch' not in sys.modules; "
        "[getattr(library, name) for name in library.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""Each example on the pages is run: the command, the settings, the Python.  What cannot be run here has a reason.

`run` is played with `--dry-run`: it reads the whole line and finds out what would be started.  RUN is a run directory
of `tests/reading`.  Slurm's part of the other commands is played by the stories that their reasons name.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.cli import main
from stepkeeper.config import files
from tests.docs.pages import PAGES, ROOT, blocks, commands, named
from tests.doctor.test_storage import scontrol
from tests.frameworks import layouts
from tests.reading import build
from tests.report.test_web import written
from tests.run_analytics.build import Journal

EXAMPLES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # its older entries name what there was
WITHIN_S = 90.0
NOT_RUN = {
    # what the command begins with: why
    "submit": "needs sbatch: tests/submit/test_submit_on_slurm.py, tests/stories/test_quickstart.py",
    "resume": "needs sbatch: tests/submit/test_resume_on_slurm.py",
    "selftest": "needs Slurm: tests/selftest/test_selftest_on_slurm.py",
    "stop": "needs a job: tests/stories/test_requests.py",
    "logs RUN --follow": "needs a run that goes on: tests/stories/test_first_hour.py",
    "status --follow": "needs a run that goes on: tests/reading/test_status.py",
    "status --web": "serves until it is ended: tests/report/test_web.py",
    "run --framework generic": "needs a configuration: tests/docs/test_guides.py",
    "node": "needs root and changes the machine: tests/packages, tests/node_agent",
    "dev inject": "needs an agent: tests/node_agent",
    "doctor -p": "needs Slurm: tests/doctor/test_doctor_on_slurm.py",
    "checkpoints copy": "needs an object store: tests/trainer/test_tiers_command.py",
    "checkpoints tiers": "needs an object store: tests/trainer/test_tiers_command.py",
    "checkpoints export": "needs weights and torch: tests/trainer/test_export.py, tests/trainer/test_convert.py",
}
NOT_EXECUTED = {  # pages whose Python is run elsewhere, or not
    "docs/dcp.md": "tests/trainer/test_dcp_storage.py",
    "docs/tiers.md": "needs an object store: tests/trainer/test_tiers.py",
    "docs/tutorials/huggingface.md": "needs transformers: tests/frameworks/test_tutorials.py",
    "docs/tutorials/lightning.md": "needs Lightning: tests/frameworks/test_tutorials.py",
    "docs/tutorials/own-loop.md": "tests/trainer/test_pages.py, tests/stories/test_quickstart.py",
}
# what the page's reader has already: a loop's names, and fewer steps
BEFORE = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from stepkeeper_trainer import CheckpointManager, GlobalSampler
rank, world_size, STEPS, loss = 0, 1, 3, torch.tensor(1.0)
data = TensorDataset(torch.randn(2048, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters())
sampler = GlobalSampler(2048, seed=0)
actor = critic = model
one = other = optimizer
scaler = torch.amp.GradScaler("cpu")
"""
MANAGED = """
manager = CheckpointManager({"model": model, "optimizer": optimizer, "sampler": sampler}, total_steps=3)
"""


def reason(words: str) -> str | None:
    """Return why a command is not run."""
    return next((why for begin, why in NOT_RUN.items() if f"{words} ".startswith(begin)), None)


RUN = sorted({words for page in EXAMPLES for words in commands(page) if reason(words) is None})


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the commands name: a script, a run, programs that a line begins with."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("STEPKEEPER_RUN_DIR", raising=False)
    run = build.make_run(tmp_path / "RUN")
    told = Journal(nodes=("n1", "n2"))
    told.begin(0)
    told.launch(10)
    told.steps(1, 40, at=20)
    told.commit(20, at=60)
    told.rank_dies(230)
    written(told, run)
    build.write_status(run, run_id="RUN")
    build.make_steps(run)
    (tmp_path / "journal.jsonl").write_bytes(run.journal.read_bytes())
    monkeypatch.setenv("PATH", f"{scontrol(tmp_path)}:{os.environ['PATH']}")  # a cluster without settings
    (tmp_path / "outputs").mkdir()
    layouts.LAYOUTS["huggingface"].build(tmp_path / "outputs", 400)
    for name in ("train.py", "pretrain_gpt.py"):
        (tmp_path / name).write_text("import stepkeeper_trainer\n")
    return tmp_path


@pytest.mark.parametrize("words", RUN)
def test_the_command_is_run(words: str, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(there / "RUN") if word in ("RUN", "5") else word for word in shlex.split(words)]
    if argv[0] == "run" and "--print-config" not in argv and "--dry-run" not in argv:
        argv.insert(1, "--dry-run")
    if argv[:2] == ["dev", "simulate"]:
        argv += ["--days=3", "--runs=1"]  # months take minutes

    try:
        code = main.main(argv)
    except SystemExit as ended:
        code = int(ended.code or 0)

    said = capsys.readouterr()
    assert code == 0, f"{said.out}{said.err}"
    assert said.out or (there / argv[-1]).exists()


def test_what_is_not_run_is_on_a_page() -> None:
    written = {words for page in EXAMPLES for words in commands(page) if reason(words)}
    stale = [begin for begin in NOT_RUN if not any(f"{words} ".startswith(begin) for words in written)]
    assert not stale
    assert len(RUN) > len(written)
    for why in [*NOT_RUN.values(), *NOT_EXECUTED.values()]:
        for path in re.findall(r"tests/[\w/.]+", why):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", named([page for page in EXAMPLES if "```toml" in page.read_text()]))
def test_settings_are_read_as_a_file_of_settings(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "toml":
            role = files.Role.SITE if "/etc/stepkeeper" in block.body else files.Role.USER
            found = files.parse(block.body.encode(), page, role)
            assert found.entries or found.locked


@pytest.mark.parametrize(
    "page",
    named(
        [
            page
            for page in EXAMPLES
            if "```python" in page.read_text() and str(page.relative_to(ROOT)) not in NOT_EXECUTED
        ]
    ),
)
def test_python_is_executed(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(each for each in blocks(page) if each.kind == "python"):
        code = block.body
        if "import torch" not in code:
            code = BEFORE + (MANAGED if "CheckpointManager(" not in code else "") + code
        code = re.sub(r"total_steps=\d+", "total_steps=3", code)
        place = tmp_path / str(number)
        place.mkdir()
        environment = {"PYTHONPATH": f"{ROOT / 'trainer'}", "HOME": str(place), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=place, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{code}\n{done.stderr}"

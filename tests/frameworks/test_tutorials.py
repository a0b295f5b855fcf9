"""The tutorials of frameworks: their scripts and batch scripts as they stand, interrupted on a real Slurm."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from pathlib import Path

import pytest

import stepkeeper_trainer
from stepkeeper.core import events as on
from stepkeeper_trainer.formats.steps import newest_verified
from tests.docs.pages import DOCS, blocks
from tests.frameworks import environments
from tests.lab import Lab
from tests.lab.site import supervisor_python
from tests.shapes import is_shown
from tests.training import Training

pytestmark = pytest.mark.frameworks
WITHIN_S = 400.0
LIBRARY = str(Path(stepkeeper_trainer.__file__).parent.parent)


@pytest.mark.slurm
@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_the_tutorial_as_it_stands(name: str, lab: Lab) -> None:
    """Its two files; an administrator's requeue before the first periodic checkpoint; and what `status` shows."""
    python = environments.require(name)
    # as root: the Python below the cached environments may lie in a closed home directory
    training = Training(lab, user="root", name=f"tutorial-{name}")
    home = training.work / f"home-{name}"
    activate = home / "stepkeeper-env/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH={python.parent}:{supervisor_python().parent}:$PATH OMP_NUM_THREADS=1\n")
    page = blocks(DOCS / f"tutorials/{name}.md")
    for kind, file in (("python", "train.py"), ("bash", "train.sbatch")):
        (home / file).write_text(next(each.body for each in page if each.kind == kind))
    training_shown, resumed_shown = (each.body for each in page if each.kind == "text")

    submitted = lab.run("sbatch", "train.sbatch", cwd=home, env={"HOME": str(home)}).stdout
    training.job_id = int(re.findall(r"\d+", submitted)[-1])
    run_dir = home / "runs" / f"train.sbatch-{training.job_id}"
    status = [supervisor_python().parent / "stepkeeper", "status", run_dir]

    def until(shown: str) -> str:
        said: list[str] = []

        def looks_like_it() -> bool:
            said[:] = [lab.run(*status, cwd=home, check=False).stdout]
            return is_shown(shown, said[0])

        training.name = str(run_dir)  # for its story
        training.until(looks_like_it, f"what the page shows:\n{shown}", WITHIN_S)
        return said[0]

    until(training_shown)
    lab.requeue(training.job_id)
    said = until(resumed_shown)

    [saved, *_] = [record.event for record in training.events(on.CheckpointCommitted)]
    assert isinstance(saved, on.CheckpointCommitted)
    assert saved.emergency, training.story()
    assert saved.step < 500, training.story()
    assert saved.directory in said, training.story()
    lab.cancel(training.job_id)


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_the_scripts_end_as_it_is_where_our_library_saves(name: str, tmp_path: Path) -> None:
    """The page's further lines, in its script: on one rank, twice, the second time for two steps more."""
    python = environments.require(name)
    script, lines = (each.body for each in blocks(DOCS / f"tutorials/{name}.md") if each.kind == "python")
    if name == "huggingface":
        script = script[: script.index("trainer.train(")] + lines
    else:
        script = script.replace("trainer = lightning", f"{lines}\ntrainer = lightning")
        for before, after in (
            (r"callbacks=\[ModelCheckpoint.*?\],\n", "callbacks=callbacks,\n"),
            (r"plugins=.*?\n", "\n"),
            ("num_nodes=2", "num_nodes=1"),
            ("max_steps=2000", 'max_steps=int(__import__("os").environ["TEST_STEPS"])'),
        ):
            script, count = re.subn(before, after, script)
            assert count == 1, before
    (tmp_path / "train.py").write_text(script)
    run_dir = tmp_path / "run"
    for steps in (4, 6):
        words = ["--output_dir", "outputs", "--max_steps", str(steps), "--save_steps", "2", "--use_cpu", "True"]
        done = subprocess.run(
            [python, "train.py", *(words if name == "huggingface" else ())],
            check=False, capture_output=True, text=True, cwd=tmp_path, timeout=WITHIN_S,
            env={**os.environ, "PYTHONPATH": LIBRARY, "TEST_STEPS": str(steps),
                 "STEPKEEPER_RUN_DIR": str(run_dir), "STEPKEEPER_RESUME_FROM": "latest", "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        chosen = newest_verified(run_dir / "checkpoints").chosen
        assert chosen is not None
        assert chosen.step == steps, done.stderr

    with (run_dir / "metrics.csv").open() as rows:
        assert [int(row["step"]) for row in csv.DictReader(rows)] == [1, 2, 3, 4, 5, 6]
    assert not list(tmp_path.glob("outputs/checkpoint-*"))

"""The tutorials of frameworks: their scripts and batch scripts as they stand, interrupted on a real Slurm."""

from __future__ import annotations

import re

import pytest

from stepkeeper.core import events as on
from tests.docs.pages import DOCS, blocks
from tests.frameworks import environments
from tests.lab import Lab
from tests.lab.site import supervisor_python
from tests.shapes import is_shown
from tests.training import Training

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm]
WITHIN_S = 400.0


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_the_tutorial_as_it_stands(name: str, lab: Lab) -> None:
    """Its two files; an administrator's requeue before the first periodic checkpoint; and what `status` shows."""
    python, why = environments.python(name)
    if python is None:
        pytest.skip(why)
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
    assert saved.directory in said
    lab.cancel(training.job_id)

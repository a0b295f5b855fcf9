"""The quickstart and the tutorial of a loop of one's own, typed as they stand, and what they show compared.

The commands, the script and the shown outputs are read from the pages.  A new user of the cluster has a fresh clone and
a fresh environment; only the network is missing, so that what pip would download lies there already.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks
from tests.lab import Lab, site
from tests.lab.looking import holds_within
from tests.packages.building import copy_of_sources
from tests.shapes import is_shown

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
QUICKSTART, TUTORIAL = DOCS / "quickstart.md", DOCS / "tutorials/own-loop.md"
USER = "news"
SHOWN_JOB = "5"
WITHIN_S = 400.0


@dataclass
class Typist:
    """A reader who copies the pages, block by block."""

    lab: Lab
    path: str
    directory: Path
    job: str = SHOWN_JOB

    def type(self, command: str, **env: str) -> str:
        """Type a block of commands and return what they print; none may fail."""
        command = re.sub(rf"(?<= ){SHOWN_JOB}\b", self.job, command)
        done = self.lab.run(
            "bash",
            "-ec",
            f"exec 2>&1\n{command}",
            user=USER,
            env=self.env | env,
            cwd=self.directory,
            check=False,
            timeout_s=WITHIN_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": self.path, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}


def under(page: Path, heading: str) -> list[Block]:
    found = [each for each in blocks(page) if each.heading.startswith(heading)]
    assert found, f"{page}: nothing under {heading}"
    return found


def test_the_comparison_finds_what_the_page_has_and_the_command_has_not() -> None:
    printed = "phase   training, for 3 s\njob  7; attempt 0, launch 0\nstep   3 of 60\ncheckpoint   none yet\n"
    assert is_shown("phase   training, for 12 s\nstep   56 of 6,000, loss 7\n", printed)
    assert not is_shown("phase   saving, for 12 s\n", printed)
    assert not is_shown("checkpoint   none yet\nstep   3 of 60\n", printed)
    assert not is_shown("progress   none yet\n", printed)


@pytest.fixture(scope="module")
def typist(lab: Lab) -> Typist:
    """A fresh home, a fresh clone in it, and a fresh environment as the page makes it."""
    interpreter, packages = site.dependencies()
    home = lab.workdir(USER)
    clone = copy_of_sources(home / "clone")
    owner = home.stat()
    for path in (clone, *clone.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    found = Typist(lab, f"{interpreter.parent}:{lab.path}", clone)
    create, *steps = under(QUICKSTART, "2. Install")[0].body.splitlines()
    environment = home / shlex.split(create)[-1].removeprefix("~/")
    found.type(create)
    (made,) = environment.glob("lib/python3*/site-packages")
    (made / "downloaded.pth").write_text(f"{packages}\n")  # in place of what pip would fetch
    found.type("\n".join(steps))
    found.path = f"{environment}/bin:{lab.path}"
    found.directory = home
    found.type(under(QUICKSTART, "2. Install")[1].body, PIP_NO_DEPS="1")  # the layer has no build tools of torch
    (script,) = (each for each in blocks(TUTORIAL) if each.kind == "python")
    (home / "train.py").write_text(script.body)
    (home / "train.py").chmod(0o644)
    return found


def test_the_loop_of_the_tutorial_is_interrupted_and_goes_on_with_the_same_losses(typist: Typist) -> None:
    tried = under(TUTORIAL, "Try it")
    first, shown, second, shown_then = tried[:4]
    with subprocess.Popen(
        ["bash", "-c", f"exec env {first.body}"],
        env=typist.lab.environment(USER, typist.env),
        cwd=typist.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **typist.lab.identity(USER),
    ) as training:
        printed = ""
        assert training.stdout is not None
        for line in training.stdout:
            printed += line
            if line.startswith("step 150 "):
                os.killpg(training.pid, signal.SIGINT)  # as a terminal does with Ctrl-C
    assert is_shown(shown.body.replace("^C", ""), printed), printed

    printed_then = typist.type(second.body)

    assert is_shown(shown_then.body, printed_then), printed_then
    again = next(line for line in printed_then.splitlines() if line.startswith("step 150 "))
    assert again in printed
    assert "step 100 " not in printed_then


def test_the_quickstart_as_it_stands(typist: Typist) -> None:
    """The doctor, a job, its status, a requeue, its next attempt, and the looks back."""
    doctor, shown = under(QUICKSTART, "3. Ask")
    printed = typist.type(doctor.body)
    assert is_shown(shown.body, printed), printed

    submit, shown, status, training = under(QUICKSTART, "4. Submit")
    printed = typist.type(submit.body)
    assert is_shown(shown.body, printed), printed
    found = re.match(r"job (\d+) is submitted", printed)
    assert found, printed
    typist.job = found[1]

    def until(shown: str) -> None:
        seen: list[str] = []

        def looks_like_it() -> bool:
            time.sleep(1.0)  # as a person looks: each look starts a Python
            seen[:] = [typist.type(status.body)]
            return is_shown(shown, seen[0])

        assert holds_within(looks_like_it, WITHIN_S), f"the page shows\n{shown}\nand it is\n{seen[0]}"

    until(training.body)
    requeue, *states = under(QUICKSTART, "5. Interrupt")
    typist.type(requeue.body)
    for each in states:  # it waits, it goes on, it is done
        until(each.body)

    typist.type("\n".join(each.body for each in under(QUICKSTART, "6. Look")))
    assert "<html" in (typist.directory / "report.html").read_text()[:200].lower()

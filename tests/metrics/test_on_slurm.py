"""A real run on a real Slurm gives its metrics out, and afterwards tells where its time went."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepkeeper.core import events as on
from tests.lab import Lab
from tests.training import Training

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]

LAUNCHES = "stepkeeper_launches_total"
STEP_S = 0.6  # the file is written every 15 s: the training must be there when it is


def total(text: str, name: str) -> float:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


def test_a_preempted_run_is_seen_while_it_runs_and_afterwards(lab: Lab, tmp_path: Path) -> None:
    asked = ("--metrics-port=0",)
    training = Training(lab, name="seen", steps=60, every=10, step_seconds=STEP_S, run_args=asked)
    directory = training.work / "textfile"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    training.run_args = (*asked, f"--metrics-textfile={directory}")
    training.submit()
    training.wait_step(15)

    training.until(lambda: any(total(f.read_text(), LAUNCHES) for f in directory.glob("*.prom")), "the metrics")
    (file,) = directory.glob("*.prom")
    for text in (file.read_text(), scraped(training)):
        assert total(text, LAUNCHES) == 1
        assert total(text, "stepkeeper_nodes") == 2
    urgent = lab.preempt(training.job_id)
    lab.wait_job(urgent, "RUNNING")
    lab.release(urgent)
    training.wait_event(on.AttemptStarted, count=2)
    training.wait_end()

    assert not list(directory.glob("*.prom"))  # it goes with the supervisor
    document = json.loads(tell("report", training.run_dir, "--json"))
    assert document["standing"] == "finished", training.story()
    assert [launch["ending"] for launch in document["launches"]] == ["preempted", "finished"]
    assert document["steps_lost"] == 0
    assert sum(document["wall_s"].values()) == pytest.approx(document["wall_total_s"], abs=1e-6)
    assert document["wall_s"]["queue"] > 0
    least, most = 60 * STEP_S, document["wall_total_s"] - document["wall_s"]["queue"]
    assert 0.5 * least < document["wall_s"]["productive"] < most  # steps of a busy machine take longer
    tell("report", training.run_dir, "-o", tmp_path / "page.html")
    assert "Slurm preempts the job (Slurm says" in (tmp_path / "page.html").read_text()
    assert "today's rules decide the same" in tell("dev", "replay", training.run_dir)


def scraped(training: Training) -> str:
    """Ask the port that the log names."""
    number = re.search(r"metrics_served: .*\bport=(\d+)", training.output())
    assert number is not None, training.output()
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the machine has
    with directly.open(f"http://127.0.0.1:{number.group(1)}/metrics", timeout=90) as answer:
        return answer.read().decode()


def tell(*words: object) -> str:
    argv = [sys.executable, "-m", "stepkeeper", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=90, check=True).stdout

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import events as on
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase
from stepkeeper.run_analytics import history, timeline
from stepkeeper.run_analytics.model import SECOND, Rows
from stepkeeper.run_analytics.reading import Started
from stepkeeper.run_analytics.report import losses
from stepkeeper.run_analytics.report.page import About, for_programs, page
from stepkeeper.run_analytics.timeline import OnDisk, Timeline
from stepkeeper.run_store import journal
from stepkeeper_trainer.formats.lineage import Commit, Lineage
from tests.report.big import Big
from tests.run_analytics.build import START, Journal, read_rows, wrong_loss
from tests.run_analytics.test_timeline import RECORDED, assert_adds_up, failed_and_relaunched

ABOUT = About(name="run", path="/runs/run", made_at=round(START) * SECOND, version="1")
EVIL = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m\u202e"


class Page(HTMLParser):
    """What a browser would make of it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def recorded() -> Timeline:
    told = history.read_history(journal.read(RECORDED / "journal.jsonl"))
    found = timeline.checkpoints(told, None, None)
    return timeline.build(told, read_rows(RECORDED / "metrics.csv"), found)


def test_it_says_what_a_person_wants_to_know() -> None:
    said = Page(page(recorded(), ABOUT)).text

    for words in (
        "The training is finished.",
        "46.1 %",
        "Where the time went",
        "rank 1 on n2 ended with signal 9",
        "relaunch in the allocation",
        "preempted (Slurm says RUNNING)",
        "requeue",
        "step_00000053",
        "verified",
        "emergency",
        "launch 0.1 went on from step 15",
        "No fault of a node",
        "arXiv 2410.21680",
    ):
        assert words in said, words


def test_it_needs_nothing_from_anywhere() -> None:
    html = page(recorded(), ABOUT)
    parsed = Page(html)

    for tag, attributes in parsed.tags:
        assert tag not in ("img", "link", "iframe", "object", "embed", "base", "form")
        assert not {"src", "href", "srcset", "action", "xlink:href"} & set(attributes), (tag, attributes)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", html)
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    policy = next(a["content"] for t, a in parsed.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy


def hostile() -> Timeline:
    """Whatever a training script, a node or a file can be called, it is called `EVIL`."""
    told = Journal(nodes=("n1", EVIL))
    told.begin(0)
    told.launch(1)
    told.steps(1, 5, at=1)
    fault = {"incident": EVIL, "name": EVIL, "action": EVIL, "leave": False, "why": EVIL, "gpu": EVIL}
    told.tell(on.NodeFaulted(at=START + 6, node=EVIL, **fault))
    told.tell(on.SaveFailed(at=START + 6, launch=0, step=5, save_id="x", error=EVIL))
    told.tell(on.LaunchRefused(at=START + 7, launch=0, error=EVIL))
    found = timeline.checkpoints(history.read_history(told.records), None, {EVIL: OnDisk(5, problem=EVIL)})
    return timeline.build(history.read_history(told.records), told.rows, found)


def test_hostile_names_stay_words() -> None:
    html = page(hostile(), About(name=EVIL, path=EVIL, made_at=0, version=EVIL))
    parsed = Page(html)

    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in parsed.tags]
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert "onerror=alert(2)" in parsed.text
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_what_looks_like_a_secret_is_not_shown() -> None:
    told = failed_and_relaunched()
    told.tell(
        on.SaveFailed(at=START + 66, launch=1, step=25, save_id="x", error="token=hf_abcdefghijklmnopqrstuvwxyz0123")
    )

    assert "hf_abcdefghijklmnop" not in page(told.see(), ABOUT)


def test_every_column_keeps_its_spike() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    rows = told.rows[0, 0] = Rows()
    for step in range(1, 200_001):
        rows.add(START + step, step, 90.0 if step == 123_457 else 2.0 + (step % 7) / 100)
    told.rows[0, 0].loss[77_776] = float("inf")

    found = losses.curve(told.see())

    assert found is not None
    points = found.kept
    assert len(points) <= 4 * losses.COLUMNS + 4
    assert (123_457, 90.0) in points
    assert found.strange == [(77_777, 77_777)]
    picture = losses.picture(found)
    assert "step 123,457: loss 90, beyond the scale" in picture
    assert "step 77,777: the loss is not a finite number" in picture


def test_a_loss_that_went_wrong_is_in_the_headline_the_curve_and_the_incidents() -> None:
    seen = wrong_loss().see()
    html = page(seen, ABOUT)

    assert "its loss is no finite number" in html
    assert "steps 21 to 29: the loss is not a finite number" in html
    (incident,) = seen.incidents
    assert (incident.kind, incident.what) == ("loss", "the loss is no finite number since step 21")
    assert incident.decided == "the launch was ended"
    document = for_programs(seen)
    assert document["loss"] is None
    assert document["loss_not_finite"] is True
    json.dumps(document, allow_nan=False)


def test_hours_are_those_of_gpus_where_each_attempt_had_as_many() -> None:
    told = Journal()
    told.begin(0, gpus_per_node=8)
    told.launch(0)
    told.steps(1, 3600, at=0)
    told.begin(3700, gpus_per_node=8)
    seen = told.see()
    said = Page(page(seen, ABOUT)).text

    assert "of the GPU-hours became progress" in said
    assert re.search(r"productive 1 h 00 min 97.3 % 16\.0", said), said
    assert for_programs(seen)["gpus_per_node"] == 8
    told.begin(3800)
    assert "node-hours" in page(told.see(), ABOUT)


def test_of_very_many_incidents_the_newest_are_told() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0)
    record = told.records[-1]
    failed = [on.SaveFailed(at=START + n, launch=0, step=n, save_id="s", error="full") for n in range(5010)]
    seen = history.read_history([*told.records, *(msgspec.structs.replace(record, event=each) for each in failed)])

    assert seen.incidents.left_out == 10
    assert seen.incidents.found[-1].what == "step 5009: full"


def test_a_run_without_losses_and_one_without_anything_have_a_page_too() -> None:
    told = Journal()
    told.begin(0)

    assert "No step with a loss was reported" in page(told.see(), ABOUT)
    assert "No supervisor has worked on it yet" in page(timeline.build(history.read_history([]), {}), ABOUT)


@pytest.mark.campaign
def test_the_page_of_16384_gpus_over_54_days_is_small() -> None:
    big = Big(step_s=30.0)  # fewer rows, so that the test is quick: the page does not depend on them
    told = history.read_history(big.records())
    seen = timeline.build(told, big.rows, timeline.checkpoints(told, None, None))

    html = page(seen, ABOUT)

    assert_adds_up(seen)
    assert len(list(seen.launches())) == 419
    assert len(html) < 800_000
    assert "nodes: gpu0000" in html
    assert "359 older or ordinary ones" in html


def test_states_of_step_directories() -> None:
    told = Journal()
    told.begin(0)
    told.launch(0, resume=5)
    told.steps(6, 30, at=0)
    for step in (10, 20, 30):
        told.commit(step, at=step)
    commits = {
        f"s{step}": Commit(at=START, step=step, save_id=f"s{step}", parent=None, directory=f"step_{step:08d}")
        for step in (10, 20, 30)
    }
    marks = {"s10": frozenset({"pruned"}), "s20": frozenset({"pinned", "suspect"})}
    lineage = Lineage(commits, "s20", marks, has_steps=True)
    disk = {"step_00000005": OnDisk(5), "step_00000020": OnDisk(20, "s20"), "step_00000099": OnDisk(99, problem="torn")}

    found = {each.step: each for each in timeline.checkpoints(history.read_history(told.records), lineage, disk)}

    assert found[5].states == ("verified",)
    assert found[5].resumed == 1
    assert found[10].states == ("committed, not yet verified", "pruned", "rolled back")
    assert found[20].states == ("committed, not yet verified", "pinned", "suspect")
    assert found[30].states == ("committed, not yet verified", "gone", "rolled back")
    assert found[99].states == ("damaged",)
    assert found[20].bytes == 10**9
    assert found[20].seconds == 1.0


def failed_for_good() -> Timeline:
    told = Journal(policy=Policy(failures_max=2))
    told.begin(0, gpus_per_node=8)
    told.launch(0)
    told.steps(1, 20, at=0)
    told.commit(10, at=10)
    told.rank_dies(20.5)
    told.launch(30, resume=10)
    told.steps(11, 10, at=30)
    told.rank_dies(40.5)
    chosen = on.CheckpointChosen(at=START + 41, directory="/r/checkpoints/step_00000010", step=10)
    told.tell(chosen, on.BusEnded(at=START + 42, bus=1, code=0))
    tale = history.read_history(told.records)
    return timeline.build(tale, told.rows, timeline.checkpoints(tale, None, None))


RAN = Started(
    first=0,
    last=0,
    command=("python", "train.py", "--name", "two words"),
    commit="0123456789abcdef0123",
    changed=True,
    directory="/home/ada/llm",
    stepkeeper="1.2.3",
    settings={"spares": "1 (--spares)"},
)


def test_a_run_that_failed_says_how_to_go_on_and_what_ran() -> None:
    """Nobody has to find the command line, the code and the step in other places first."""
    seen = failed_for_good()
    parsed = Page(page(seen, msgspec.structs.replace(ABOUT, started=[RAN])))

    for words in (
        "How to continue",
        "Another start with the same data will most likely end in the same way",
        "stepkeeper logs /runs/run --failed",
        "It resumes from step 10 (verified).",
        "stepkeeper resume /runs/run",
        "python train.py --name 'two words'",
        "commit 0123456789ab, with changes that are not committed, in /home/ada/llm",
        "1.2.3",
        "spares = 1 (--spares)",
        "the run ends with exit code 29",
    ):
        assert words in parsed.text, words
    document = for_programs(seen, "/runs/run", [RAN])
    assert document["how_to_go_on"][-1]["type"] == "stepkeeper resume /runs/run"
    assert (document["started"][0]["commit"], document["exit_code"]) == (RAN.commit, 29)
    assert document["launches"][-1]["decided"] == "the run ends with exit code 29"
    assert "How to continue" not in page(recorded(), ABOUT), "it is finished"


def test_the_headline_is_one_short_sentence() -> None:
    html = page(failed_for_good(), ABOUT)
    match = re.search(r"<header>.*?<p>(.*?)<span", html, re.DOTALL)

    assert match is not None
    assert match[1].strip() == "The training failed for a cause that another start does not change (exit code 29)."
    assert len(match[1].split()) <= 20


def test_the_loss_is_one_line_over_all_resumes_and_the_learning_rate_stands_below() -> None:
    html = page(recorded(), ABOUT)

    assert html.count('<polyline class="kept"') == 1
    assert html.count('<polyline class="rate"') == 1
    assert re.search(r"learning rate [\d.e-]+", html)
    found = losses.curve(recorded())
    assert found is not None
    steps = [step for step, _ in found.kept]
    assert steps == list(range(1, 121)), "no step of the three launches is missing, none stands twice"
    for redone in found.lost:
        assert redone[0] in found.kept, "it branches off what counts"
    assert 'class="rate"' not in page(failed_for_good(), ABOUT), "no learning rate was reported"


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_a_real_browser_shows_it_without_a_complaint(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text(page(hostile(), About(name=EVIL, path=EVIL, made_at=0, version="1")))
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []

    done = subprocess.run(
        ["chromium", "--headless=new", *sandbox, "--disable-gpu", "--enable-logging=stderr", "--v=0",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{target}"],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip

    assert 'id="tip"' in done.stdout  # our script ran, so its digest is right
    assert "CONSOLE" not in done.stderr, done.stderr  # no error, and nothing that the policy had to refuse
    assert Phase.TRAINING.value in done.stdout or "starting" in done.stdout

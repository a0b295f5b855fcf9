"""The pages in a real browser: on a phone, in the dark, while the run goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stepkeeper.core import events as on
from stepkeeper.run_analytics import reading, web
from stepkeeper.run_analytics.report.page import About, page
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build as runs
from tests.reading.conftest import run
from tests.report import browser
from tests.report.browser import Browser
from tests.report.test_web import long_run, served, written
from tests.run_analytics.build import START, Journal

__all__ = ["run"]

pytestmark = pytest.mark.campaign
WINDOWS = [(size, scheme) for size, scheme in itertools.product(((390, 844), (1280, 900)), ("light", "dark"))]
# text and its background, blended where an element has none of its own: WCAG's contrast of each
CONTRAST = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const color = parts(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const each of document.querySelectorAll("h1,h2,p,td,th,em,small,span,b,code,time,summary,.label,footer")) {
    if (![...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    if (!each.checkVisibility()) continue;
    const [one, other] = [light(parts(getComputedStyle(each).color)), light(behind(each))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < 4.5) poor.push(`${each.tagName} ${each.className} ${each.textContent}: ${contrast.toFixed(2)}`);
  }
  return poor;
})()"""


@pytest.fixture
def looked(tmp_path: Path) -> Iterator[Browser]:
    browser.need()
    with Browser(tmp_path / "profile") as found:
        yield found


def eventful() -> Journal:
    """A run with everything that a page has a part for."""
    told = Journal(nodes=("gpu-node-0001", "gpu-node-0002", "gpu-node-0003"))
    told.begin(0, gpus_per_node=8, nodes_wanted=2)
    told.launch(10)
    told.steps(1, 200, at=20)
    for step in (50, 100, 150):
        told.commit(step, at=20 + step)
    told.rank_dies(230)
    told.launch(240, resume=150)
    told.steps(151, 300, at=250)
    fault = {"incident": "i", "name": "XID 79", "action": "drain", "leave": True, "why": "it fell off the bus"}
    told.tell(on.NodeFaulted(at=START + 560, node="gpu-node-0001", **fault))  # type: ignore[arg-type]
    told.tell(on.LaunchEnded(at=START + 561, launch=told.state.launch.number, code=137))
    told.launch(570, resume=400)
    told.steps(401, 100, at=580)
    return told


OVERLAPS = """[...document.querySelectorAll(".axis")].flatMap((axis) => {
  const shown = [...axis.children].filter((each) => each.checkVisibility());
  const places = shown.map((each) => each.getBoundingClientRect()).sort((one, other) => one.left - other.left);
  return places.slice(1).filter((place, index) => place.left < places[index].right + 6).map((place) => place.left);
})"""


def fits(seen: Browser) -> None:
    """Nothing stands out of the window, no line of a card is cut off, no label lies on another, no state is broken."""
    assert seen.run(OVERLAPS) == [], "labels of an axis overlap"
    assert seen.run("[...document.querySelectorAll('em[class^=w-]')].every((e) => e.getClientRects()[0].height < 30)")
    assert seen.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    assert seen.run("[...document.querySelectorAll('h1,h2,.card,.note')].every((e) => e.scrollWidth <= e.clientWidth)")


@pytest.mark.parametrize(("size", "scheme"), WINDOWS)
def test_the_live_page_in_a_browser(
    run: RunDirectory, looked: Browser, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], scheme: str
) -> None:
    for name in ("QUICK_EVERY_S", "WHOLE_EVERY_S", "WHOLE_TIMES"):
        monkeypatch.setattr(web, name, 0.0)
    told = eventful()
    count = written(told, run)
    fields = {"attempt": 0, "launch": told.state.launch.number, "nodes": told.state.nodes.usable, "total_steps": 1000}
    runs.write_status(run, step=500, checkpoint_step=150, **fields)
    looked.look(*size, scheme)
    with served(run) as viewer:
        looked.open(f"http://127.0.0.1:{viewer.port}/{viewer.token}/")
        fits(looked)
        assert looked.run(CONTRAST) == []
        background = looked.run("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(20, 23, 28)") == (scheme == "dark")
        looked.run("document.querySelector('details').open = true")

        told.rank_dies(690)
        written(told, run, count)
        runs.write_status(run, step=501, **fields)

        looked.until("document.body.textContent.includes('501 of 1,000')")
        looked.until("document.getElementById('p-decisions').textContent.includes('rank 1 on n2 ended')")
        assert looked.run("document.querySelector('details').open"), "what was opened stays open"
        assert looked.run("document.getElementById('p-said').getAttribute('role')") == "status"
        assert looked.run("[...document.querySelectorAll('th')].every((e) => e.scope && e.textContent.trim())")
        fits(looked)
        assert {urlsplit(url).netloc for url in looked.requests if not url.startswith("data:")} == {
            f"127.0.0.1:{viewer.port}"
        }
        assert looked.console == []
    looked.until("document.getElementById('connection').textContent.startsWith('No answer since')")


@pytest.mark.parametrize(("size", "scheme"), WINDOWS)
def test_the_report_in_a_browser(
    run: RunDirectory, looked: Browser, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    written(eventful(), run)
    target = tmp_path / "report.html"
    target.write_text(page(reading.see(run), About(name="run-4711", path="/runs/run-4711", made_at=0, version="1")))
    looked.look(*size, scheme)

    looked.open(target.as_uri())

    fits(looked)
    assert looked.run(CONTRAST) == []
    looked.run("document.querySelector('h2').style.color = document.body.style.backgroundColor = '#888'")
    assert len(looked.run(CONTRAST)) >= 1, "poor contrast is found"
    assert looked.run("document.querySelectorAll('rect title').length") > 0
    looked.run("document.querySelector('rect').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))")
    assert "attempt 0" in looked.run("document.getElementById('tip').textContent")
    assert looked.requests == [target.as_uri()]
    assert looked.console == []


SEEN = """(() => {
  const shown = performance.getEntriesByName("first-contentful-paint")[0];
  return {
    elements: document.querySelectorAll("*:not(.tiles *)").length,  // a square for each rank is apart
    characters: document.documentElement.outerHTML.length,
    height: document.documentElement.scrollHeight,
    ms: shown ? Math.round(shown.startTime) : null,
  };
})()"""


@pytest.mark.parametrize("size", [(390, 844), (1280, 900)])
def test_100000_steps_and_512_ranks_in_a_browser(run: RunDirectory, looked: Browser, size: tuple[int, int]) -> None:
    """The page of a long run on many nodes is as large as one of a short run on two, but for a bounded part."""
    seen = []
    for nodes, steps in ((2, 1000), (64, 100_000)):
        told = long_run(run, nodes=nodes, steps=steps)
        looked.look(*size, "dark")
        with served(run) as viewer:
            looked.open(f"http://127.0.0.1:{viewer.port}/{viewer.token}/")
            looked.until("performance.getEntriesByName('first-contentful-paint').length")
            seen.append(looked.run(SEEN))
            fits(looked)
            looked.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            fits(looked)
            looked.run("scrollTo(0, document.documentElement.scrollHeight)")
            fields = {"nodes": told.nodes, "attempt": 0, "launch": told.state.launch.number}
            runs.write_status(run, step=steps + 1, total_steps=2 * steps, **fields)
            looked.until(f"document.body.textContent.includes('{steps + 1:,} of {2 * steps:,}')")
        run.journal.unlink()

    short, long = seen
    print(f"first paint: {short['ms']} ms of the short run, {long['ms']} ms of the long one")
    for what, times in (("elements", 3), ("characters", 3), ("height", 2.5)):
        assert long[what] <= times * short[what], seen


def test_a_browser_that_is_not_there_is_a_failure_where_all_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "BINARY", None)
    monkeypatch.setenv("TEST_REQUIRE_SLURM", "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        browser.need()
    monkeypatch.delenv("TEST_REQUIRE_SLURM")
    with pytest.raises(pytest.skip.Exception):
        browser.need()


@pytest.mark.parametrize(("size", "scheme"), WINDOWS)
def test_512_ranks_are_shown_while_all_is_well(
    run: RunDirectory, looked: Browser, size: tuple[int, int], scheme: str
) -> None:
    long_run(run, steps=1000)
    looked.look(*size, scheme)
    with served(run) as viewer:
        looked.open(f"http://127.0.0.1:{viewer.port}/{viewer.token}/")
        fits(looked)
        assert looked.run(CONTRAST) == []
        assert looked.run("document.querySelectorAll('.tiles li').length") == 64
        squares = looked.run("[...document.querySelectorAll('.tiles i')].map((e) => e.getBoundingClientRect().width)")
        assert len(squares) == 512
        assert min(squares) >= 8
        cut_off = "[...document.querySelectorAll('.tiles code')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert looked.run(cut_off) == 0
        tall = looked.run("document.querySelector('.tiles').getBoundingClientRect().height")
        assert tall < 1.5 * size[1], "64 nodes are seen at a glance"

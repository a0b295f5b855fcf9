"""The built site in a real browser, from a directory without a server and without a network."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.report import browser
from tests.report.browser import Browser

pytestmark = pytest.mark.campaign

PACKAGES = Path("/var/tmp/stepkeeper-docs-tests")  # CI builds the site with those of `make docs` at the same time
WITHIN_S = 500.0


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = subprocess.run(
        ["make", "docs-packages", f"DOCS_PACKAGES={PACKAGES}"],
        cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"the packages of tests/requirements-docs.txt cannot be installed: {made.stderr[-300:]}")
    site = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [PACKAGES / "bin/mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False, env={"NO_MKDOCS_2_WARNING": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def test_search_works_in_a_directory(built: Path, tmp_path: Path) -> None:
    browser.need()
    with Browser(tmp_path / "profile") as seen:
        seen.look(1280, 900, "light")
        seen.open((built / "index.html").as_uri())
        seen.run("document.querySelector('.md-search__input').focus()")
        for letter in "requeue":
            seen.command("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            seen.command("Input.dispatchKeyEvent", type="keyUp", key=letter)

        seen.until("document.querySelectorAll('.md-search-result__link').length > 0")

        found = seen.run("document.querySelector('.md-search-result__link').href")
        assert found.startswith(built.as_uri()), found
        assert [url for url in seen.requests if not url.startswith(("file:", "data:", "about:"))] == []
        assert seen.console == []


def test_the_python_api_is_read_from_the_docstrings(built: Path) -> None:
    page = (built / "python-api.html").read_text()
    assert "Load what this launch resumes from" in page
    assert "how often to save" in page


# of each drawing that is shown: how wide it is, how high its smallest letters are, and its layout
DRAWN = """[...document.querySelectorAll('.drawing svg')].map(each => {
    const box = each.getBoundingClientRect(), scale = box.width / each.viewBox.baseVal.width;
    const sizes = [...each.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize));
    return {layout: each.classList[0], right: box.right, letters: scale * Math.min(...sizes)};
}).filter(each => each.right > 0)"""


def test_drawings_are_read_on_a_telephone_and_on_a_desk(built: Path, tmp_path: Path) -> None:
    browser.need()
    with Browser(tmp_path / "profile") as seen:
        for width, layout in ((390, "narrow"), (1280, "wide")):
            seen.look(width, 900, "light")
            seen.open((built / "concepts.html").as_uri())

            drawn = seen.run(DRAWN)

            assert [each["layout"] for each in drawn] == [layout] * 3
            assert all(each["right"] <= width and each["letters"] >= 10.5 for each in drawn), drawn
            assert seen.run("document.documentElement.scrollWidth <= innerWidth")


def test_no_page_is_wider_than_a_telephone(built: Path, tmp_path: Path) -> None:
    """What is wider, a table or code, scrolls by itself."""
    browser.need()
    pages = [page for page in built.rglob("*.html") if page.name != "404.html"]  # its links want a server
    with Browser(tmp_path / "profile") as seen:
        seen.look(390, 844, "light")
        wide = []
        for page in pages:
            seen.open(page.as_uri())
            if not seen.run("document.documentElement.scrollWidth <= innerWidth"):
                wide.append(page.name)
    assert len(pages) > 60
    assert wide == []


def test_the_site_follows_the_system_into_the_dark(built: Path, tmp_path: Path) -> None:
    """Also on a second visit: what the first one found is not kept."""
    browser.need()
    shade = "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)"
    with Browser(tmp_path / "profile") as seen:
        found = {}
        for scheme in ("light", "dark"):
            seen.look(1280, 900, scheme)
            seen.open((built / "index.html").as_uri())
            found[scheme] = seen.run(shade)
        assert min(found["light"]) > 200, found
        assert max(found["dark"]) < 60, found

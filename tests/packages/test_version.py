"""The version comes from the git tag, and a tree without tags or without git builds too."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from stepkeeper import __version__
from tests.packages.building import REPOSITORY, copy_of_sources, environment, run

pytestmark = pytest.mark.campaign

AUTHOR = ("-c", "user.name=test", "-c", "user.email=test@localhost")


def version(sources: Path) -> str:
    return run(environment(), "-m", "hatchling", "version", cwd=sources, errors=False).strip()


def archived(sources: Path, place: Path) -> Path:
    """Unpack what `git archive` makes of the newest commit."""
    place.mkdir()
    run("git", "archive", "-o", f"{place}.tar", "HEAD", cwd=sources)
    run("tar", "xf", f"{place}.tar", cwd=place)
    assert not (place / ".git").exists()
    return place


def test_a_tag_is_the_version_and_later_commits_are_ahead_of_it(tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path / "sources")
    assert version(sources) == "1.0.0.dev0"

    run("git", "init", "-q", cwd=sources)
    run("git", "add", "-A", cwd=sources)
    run("git", *AUTHOR, "commit", "-qm", "first", cwd=sources)
    assert re.fullmatch(r"1\.0\.0\.dev1\+g[0-9a-f]+", version(sources))

    untagged = version(archived(sources, tmp_path / "untagged"))
    assert re.match(r"1\.0\.0\.dev", untagged), untagged

    run("git", "tag", "v1.2.3", cwd=sources)
    assert version(sources) == "1.2.3"
    assert version(archived(sources, tmp_path / "tagged")) == "1.2.3"

    run("git", *AUTHOR, "commit", "-qm", "second", "--allow-empty", cwd=sources)
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]+", version(sources))


def test_a_wheel_from_an_archive_has_the_version_of_its_tag(tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path / "sources")
    run("git", "init", "-q", cwd=sources)
    run("git", "add", "-A", cwd=sources)
    run("git", *AUTHOR, "commit", "-qm", "first", cwd=sources)
    run("git", "tag", "v1.2.3", cwd=sources)
    archive = archived(sources, tmp_path / "archive")
    made = tmp_path / "made"

    run(environment(), "-m", "build", "--no-isolation", "--wheel", "--outdir", made, archive)

    [wheel] = made.glob("*.whl")
    assert wheel.name == "stepkeeper-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as parts:
        for package in ("stepkeeper", "stepkeeper_trainer"):
            assert 'version = "1.2.3"' in parts.read(f"{package}/_version.py").decode()


def test_both_packages_have_one_version() -> None:
    import stepkeeper_trainer  # noqa: PLC0415

    assert stepkeeper_trainer.__version__ == __version__


def test_packages_hold_what_the_tests_are_passed_with() -> None:
    pinned = {line for line in (REPOSITORY / "tests/requirements-dev.txt").read_text().splitlines() if "==" in line}
    held = re.findall(r"^(\S+==\S+) \\$", (REPOSITORY / "packages/requirements.txt").read_text(), re.MULTILINE)
    declared = re.search(
        r"^dependencies = \[(.*?)^\]", (REPOSITORY / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE
    )
    assert declared
    assert {line.split("==")[0] for line in held} == set(re.findall(r'^ +"([\w-]+)', declared[1], re.MULTILINE))
    assert set(held) <= pinned

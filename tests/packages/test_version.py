"""The version comes from the git tag, and a tree without tags or without git builds too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepkeeper import __version__
from tests.packages.building import REPOSITORY, copy_of_sources, environment, run

pytestmark = pytest.mark.campaign

AUTHOR = ("-c", "user.name=test", "-c", "user.email=test@localhost")


def version(sources: Path) -> str:
    return run(environment(), "-m", "hatchling", "version", cwd=sources, errors=False).strip()


def test_a_tag_is_the_version_and_later_commits_are_ahead_of_it(tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path / "sources")
    assert version(sources) == "1.0.0.dev0"

    run("git", "init", "-q", cwd=sources)
    run("git", "add", "-A", cwd=sources)
    run("git", *AUTHOR, "commit", "-qm", "first", cwd=sources)
    assert re.fullmatch(r"1\.0\.0\.dev1\+g[0-9a-f]+", version(sources))

    run("git", "tag", "v1.2.3", cwd=sources)
    assert version(sources) == "1.2.3"
    archive = tmp_path / "archive"
    archive.mkdir()
    run("git", "archive", "-o", tmp_path / "sources.tar", "HEAD", cwd=sources)
    run("tar", "xf", tmp_path / "sources.tar", cwd=archive)
    assert version(archive) == "1.2.3"

    run("git", *AUTHOR, "commit", "-qm", "second", "--allow-empty", cwd=sources)
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]+", version(sources))


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

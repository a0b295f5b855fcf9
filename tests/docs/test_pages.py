"""The generated pages are up to date, and leave nothing out."""

from __future__ import annotations

import importlib
import re
import typing
from pathlib import Path

import msgspec

import stepkeeper_trainer
from stepkeeper.core import effects, events, reasons
from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store import journal
from tests.docs.pages import names_in
from tests.pages import log, pages

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_pages_are_up_to_date() -> None:
    for name, text in pages().items():
        assert (DOCS / name).read_text() == text, "run `python -m tests.pages`"


def test_every_exit_code_is_there() -> None:
    page = pages()["exit-codes.md"]
    for code in ExitCode:
        assert f"| `{code.value}` | `{code.name}` | {code.meaning} |" in page


def test_every_log_event_says_what_it_means() -> None:
    silent = [line.name for line in log.found() if line.name not in log.MEANINGS]

    assert not silent, "say in `tests/pages/log.py` what these lines mean to a reader"


def test_the_calls_are_found_with_their_keys() -> None:
    found = {(line.program, line.name): line for line in log.found()}

    assert found["supervisor", "decision"].keys[:2] == ("why", "reason")
    assert found["supervisor", "exit"].keys == ("code", "reason")
    assert found["supervisor", "journal_not_written"].levels == ("warning",)
    assert "decision" in [name for program, name in found if program == "node agent"]
    assert len(found) > 40


def test_every_structure_in_a_record_has_a_section_with_its_keys() -> None:
    page = pages()["events.md"]
    kinds = set()

    def walk(kind: object) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in kinds:
            kinds.add(kind)
            for hint in typing.get_type_hints(kind).values():
                walk(hint)
        for part in typing.get_args(kind):
            walk(part)

    walk(journal.Record)
    assert len(kinds) > len(typing.get_args(events.Event)) + len(typing.get_args(effects.Effect))
    known = set(typing.get_args(reasons.Reason))
    assert known <= kinds
    for kind in known:
        row = re.search(rf"^\| `{kind.__struct_config__.tag}` \| (.*?) \|", page, re.MULTILINE)
        assert row, kind
        assert [f"`{key}`" for key in kind.__struct_fields__] == [each for each in row.group(1).split(", ") if each]
    for kind in kinds - known - {journal.Record}:
        tag = kind.__struct_config__.tag
        section = re.search(rf"^### {tag or kind.__name__}\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
        assert section, kind
        for key in kind.__struct_fields__:
            assert key == "at" or f"| `{key}` |" in section.group(1), (kind, key)


def test_the_python_api_has_each_name_of_the_library() -> None:
    page = (DOCS / "python-api.md").read_text()
    named = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    for place in named:
        module, _, name = place.rpartition(".")
        if ".engines." in module:
            assert name in names_in(module), place
            continue
        assert getattr(importlib.import_module(module), name) is getattr(stepkeeper_trainer, name)
    of_library = {place.rpartition(".")[2] for place in named if ".engines." not in place}
    assert of_library == set(stepkeeper_trainer.__all__) - {"__version__"}

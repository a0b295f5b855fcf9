from __future__ import annotations

import re
import typing
from pathlib import Path

from stepkeeper import docs
from stepkeeper.core import effects, events
from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store.journal import Record

ROOT = Path(__file__).parents[2]


def test_the_committed_pages_are_up_to_date() -> None:
    for name, text in docs.pages().items():
        assert (ROOT / "docs" / name).read_text() == text, "run `python -m stepkeeper.docs docs/`"


def test_every_event_effect_and_key_is_there() -> None:
    page = docs.pages()["events.md"]
    for declared in (*typing.get_args(events.Event), *typing.get_args(effects.Effect)):
        section = re.search(
            rf"^### {declared.__struct_config__.tag}\n(.*?)^##", page + "\n##", re.DOTALL | re.MULTILINE
        )
        assert section, declared
        for key in declared.__struct_fields__:
            assert key == "at" or f"| `{key}` |" in section.group(1), (declared, key)
    for key in Record.__struct_fields__:
        assert f"| `{key}` |" in page


def test_every_exit_code_is_there() -> None:
    page = docs.pages()["exit-codes.md"]
    for code in ExitCode:
        assert f"| `{code.value}` | `{code.name}` | {code.meaning} |" in page

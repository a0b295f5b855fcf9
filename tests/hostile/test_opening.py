"""Whatever stands in a run directory is opened by one function, and in no other way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = (ROOT / "supervisor" / "stepkeeper", ROOT / "trainer" / "stepkeeper_trainer")
READERS = (
    *(f"stepkeeper/{name}" for name in ("run_store", "run_analytics", "diagnosis", "submit/plan", "cli")),
    *(f"stepkeeper/supervisor/{name}" for name in ("actions", "sources")),
    *(f"stepkeeper_trainer/{name}" for name in ("formats", "tiers", "load", "save", "store")),
    *(f"stepkeeper_trainer/observe/{name}.py" for name in ("exactness", "metrics")),
    "stepkeeper_trainer/coordinate/ending.py",
)  # fmt: skip
ELSEWHERE = {  # what these open is not in a run directory, or is opened to be written
    "stepkeeper_trainer/formats/plain.py": "the one function",
    "stepkeeper_trainer/formats/durable.py": "writes",
    "stepkeeper_trainer/formats/lease.py": "/proc",
    "stepkeeper_trainer/formats/safetensors.py": "a model that a person names",
    "stepkeeper_trainer/load/initial.py": "a model that a person names",
    "stepkeeper_trainer/observe/metrics.py": "writes",
    "stepkeeper_trainer/save/serialise.py": "memory",
    "stepkeeper_trainer/save/writer.py": "writes",
    "stepkeeper_trainer/store/run_directory.py": "/proc",
    "stepkeeper_trainer/store/memory.py": "/proc, and control groups",
    "stepkeeper_trainer/store/space.py": "writes what it reads back; /proc, and directories",
    "stepkeeper_trainer/store/conversion.py": "a model that a person names, and writes",
    "stepkeeper_trainer/store/export.py": "writes, and copies files that a person names; a model that a person names",
    "stepkeeper_trainer/tiers/directory.py": "writes, and reads back its own",
    "stepkeeper_trainer/tiers/holding.py": "directories, to lock them",
    "stepkeeper_trainer/tiers/memory.py": "its own directory in memory",
    "stepkeeper_trainer/tiers/tiering.py": "memory",
    "stepkeeper/run_store/find.py": "the home",
    "stepkeeper/run_store/journal.py": "writes",
    "stepkeeper/run_store/paths.py": "directories; writes; changes permissions only",
    "stepkeeper/supervisor/sources/run_directory.py": "the run directory itself",
    "stepkeeper/supervisor/actions/launch.py": "writes",
    "stepkeeper/supervisor/actions/standbys.py": "writes",
    "stepkeeper/cli/dev.py": "/dev/kmsg",
    "stepkeeper/cli/arguments.py": "a log that a person names",
    "stepkeeper/cli/submit.py": "the user's own batch script",
    "stepkeeper/run_analytics/report/page.py": "our own resources",
    "stepkeeper/diagnosis/rules.py": "our own resources",
}


def opens(path: Path) -> Iterator[int]:
    """Yield the lines of a module that open a file by another way."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id == "open":
                yield node.lineno
            if isinstance(function, ast.Attribute) and function.attr in {"read_text", "read_bytes", "open"}:
                yield node.lineno


def found() -> dict[str, list[int]]:
    modules = {str(path.relative_to(program.parent)): path for program in PROGRAMS for path in program.rglob("*.py")}
    lines = {name: list(opens(path)) for name, path in modules.items() if name.startswith(READERS)}
    return {name: numbers for name, numbers in lines.items() if numbers}


def test_what_stands_in_a_run_directory_is_opened_by_one_function() -> None:
    others = {name: lines for name, lines in found().items() if name not in ELSEWHERE}

    assert not others, f"use stepkeeper_trainer.formats.plain, or say in ELSEWHERE what is opened: {others}"


def test_no_module_is_excepted_that_opens_nothing() -> None:
    assert ELSEWHERE.keys() <= found().keys()

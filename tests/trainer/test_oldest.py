"""What the trainer library promises on the oldest Python: it can be read, installed and imported there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.integrations import hook
from tests import torch_oldest
from tests.torch_oldest import ROOT

OLDEST = (3, 10)
NOT_IMPORTED = {f"stepkeeper_trainer.integrations.{name}" for name in (*hook.NAMES, "site.sitecustomize")}
NOT_IMPORTED |= {f"stepkeeper_trainer.engines.{name}" for name in ("huggingface", "lightning", "torchtitan")}
"""These import their frameworks, or take the place of another module."""
_POSSESSIVE = re.compile(r"\(\?>|[)\]}*+?][*+?]\+")
SHARED = [ROOT / "supervisor/stepkeeper" / name for name in ("__init__.py", "__main__.py", "entry.py", "isolation.py")]
"""What the command reads before it says that this Python is too old."""


def test_python_3_10_can_read_every_module() -> None:
    """Syntax, and regular expressions.  `make lint` has mypy check the names that are imported, as of Python 3.10."""
    newer = [found for path in [*(ROOT / "trainer").rglob("*.py"), *SHARED] for found in _newer(path)]

    assert newer == []


def _newer(path: Path) -> Iterator[str]:
    """Yield what only Python 3.11 can read."""
    try:
        tree = ast.parse(path.read_text(), feature_version=OLDEST)
    except SyntaxError as error:
        yield f"{path}:{error.lineno}: {error.msg}"
        return
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        if isinstance(text, str) and _POSSESSIVE.search(text):
            yield f"{path}:{node.lineno}: a possessive quantifier or an atomic group"  # type: ignore[attr-defined]


def test_that_test_sees_what_it_should(tmp_path: Path) -> None:
    for number, text in enumerate(("try: f()\nexcept* OSError: pass", "P = b'(a)*+'", "P = '(?>a)'")):
        path = tmp_path / f"{number}.py"
        path.write_text(text)
        assert len(list(_newer(path))) == 1, text


def test_the_page_and_the_requirements_name_the_same_torch() -> None:
    page = (ROOT / "docs/trainer-api.md").read_text()
    tried = re.search(r"^torch==(\d+\.\d+)", torch_oldest.REQUIREMENTS.read_text(), re.MULTILINE)
    newest = re.search(r"^torch==(\d+\.\d+)", (ROOT / "tests/requirements-torch.txt").read_text(), re.MULTILINE)
    assert tried is not None
    assert newest is not None

    assert f"Python {torch_oldest.OLDEST} or newer and torch {tried[1]} to {newest[1]}" in page


def test_the_command_says_on_python_3_10_what_it_needs() -> None:
    """And nothing else: an older Python cannot read the rest of it."""
    python = torch_oldest.find_python()
    if python is None:
        pytest.skip(f"no Python {torch_oldest.OLDEST} here")
    environment = {"PYTHONPATH": str(ROOT / "supervisor"), "PATH": os.defpath}
    command = [python, "-m", "stepkeeper", "status"]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"stepkeeper: the command needs Python 3.11 or newer, and {python} is Python 3.10.")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="this is no older Python")
def test_every_module_can_be_imported() -> None:
    names = [
        ".".join(path.relative_to(ROOT / "trainer").with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "trainer").rglob("*.py"))
    ]
    names = [name for name in names if name not in NOT_IMPORTED]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the tests on the oldest Python are started by a newer one")
def test_an_environment_that_cannot_be_made_in_time_is_a_loud_skip(tmp_path: Path) -> None:
    environment = os.environ | {"TORCH_OLDEST": str(tmp_path / "environment"), "TORCH_OLDEST_WITHIN_S": "0"}
    command = [sys.executable, "-m", "tests.torch_oldest", "--only-make"]

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert "SKIPPED: NOTHING IS TESTED ON THE OLDEST TORCH" in done.stderr
    assert not (tmp_path / "environment/.ready").exists()

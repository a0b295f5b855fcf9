"""What is made from the parser for the shell: completion, and the manual page."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stepkeeper.cli import COMMANDS
from tests.reading.conftest import Command

NAMES = list(COMMANDS)


def completed(script: Path, *words: str) -> list[str]:
    """Ask bash itself what it would offer for the last word."""
    program = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
        _shtab_stepkeeper; printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", program, "bash", script, *words], capture_output=True, text=True, timeout=90, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_and_their_options(command: Command, tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(command("completion", "bash").out)
    assert set(completed(script, "stepkeeper", "")) >= set(NAMES)
    assert completed(script, "stepkeeper", "doc") == ["doctor"]
    assert "--spares" in completed(script, "stepkeeper", "run", "--sp")
    assert "verify" in completed(script, "stepkeeper", "checkpoints", "ve")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_every_command(command: Command, shell: str) -> None:
    said = command("completion", shell)
    assert said.code == 0
    assert all(name in said.out for name in NAMES)


def test_an_unknown_shell_is_refused(command: Command) -> None:
    said = command("completion", "fishy")
    assert said.code == 2
    assert "fishy" in said.err


def test_the_manual_page_has_every_command_and_is_what_man_reads(command: Command, tmp_path: Path) -> None:
    page = command("man").out
    assert all(f"stepkeeper {name}" in page.replace("\\-", "-") for name in NAMES)
    if shutil.which("groff") is None:
        pytest.skip("no groff here to format the page")
    file = tmp_path / "stepkeeper.1"
    file.write_text(page)
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", file], capture_output=True, text=True, timeout=90, check=True
    )
    assert "Keeps PyTorch training on Slurm alive" in done.stdout

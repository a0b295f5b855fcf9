"""`python -m tests.second_look FILE`: tests that failed beside others, once more and alone.

A story on a real Slurm shares the machine with the others, and one of thousands may meet a moment that none of us
thought of.  What fails twice is a defect, and so is a session in which more than `MOST` failed, or in which something
was left behind or could not be set up.  What passes alone is named at the end of the output: somebody has to find out
why it failed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOST = 2
"""More than these are no chance."""
LIMIT_S = 1300.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the command line name the file (with `-p tests.second_look`)."""
    parser.addoption("--write-failed", type=Path, help="write what failed to this file, for a second look")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write what failed to the file, one test in each line; nothing where a second look could not settle it."""
    file: Path | None = terminalreporter.config.getoption("write_failed")
    if file is None:
        return
    file.unlink(missing_ok=True)
    failed: list[pytest.TestReport] = terminalreporter.stats.get("failed", [])
    if "error" not in terminalreporter.stats and all(report.when == "call" for report in failed):
        file.write_text("".join(f"{report.nodeid}\n" for report in failed))


def taken(file: Path) -> list[str]:
    """Return the tests that a file names, which is gone then: it counts for one session."""
    if not file.exists():
        return []
    names = file.read_text().splitlines()
    file.unlink()
    return names


def main(file: Path, options: list[str]) -> int:
    """Run the tests that a file names, with pytest's options; return 1 where one of them fails again."""
    names = taken(file)
    if not names:
        sys.stderr.write("no second look: the session before did not end with failed tests alone\n")
        return 1
    if len(names) > MOST:
        sys.stderr.write(f"no second look: {len(names)} tests failed, and more than {MOST} are no chance\n")
        return 1
    command = [sys.executable, "-m", "pytest", *options, *names]
    ended = subprocess.run(command, check=False, timeout=LIMIT_S)
    if ended.returncode:
        return 1
    sys.stderr.write("".join(f"UNSTEADY: {name} failed beside other tests and passed alone\n" for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

"""`python -m tests.second_look FAILED NAMED`: tests that failed beside others, once more and alone.

A story on a real Slurm shares the machine with the others, and one of thousands may meet a moment that none of us
thought of.  What fails twice is a defect, and so is a session in which more than `MOST` failed, or in which something
was left behind or could not be set up.  What passes alone is named at the end of the output: somebody has to find out
why it failed, and adds the line that is printed to the file NAMED (`unsteady.txt`).  A test that is in the last
`REMEMBERED` lines of that file has had its second look: it fails the run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOST = 2
"""More than these are no chance."""
REMEMBERED = 5
"""So many lines of the file count, from its end."""
LIMIT_S = 780.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the command line name the file (with `-p tests.second_look`)."""
    parser.addoption("--write-failed", type=Path, help="write what failed to this file, for a second look")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Write what failed to the file, one test in each line; nothing where a second look could not settle it."""
    file: Path | None = terminalreporter.config.getoption("write_failed")
    if file is None:
        return
    file.unlink(missing_ok=True)
    failed: list[pytest.TestReport] = terminalreporter.stats.get("failed", [])
    played = exitstatus == pytest.ExitCode.TESTS_FAILED  # all of them: nothing interrupted the session
    if played and "error" not in terminalreporter.stats and all(report.when == "call" for report in failed):
        file.write_text("".join(f"{report.nodeid}\n" for report in failed))


def taken(file: Path) -> list[str]:
    """Return the tests that a file names, which is gone then: it counts for one session."""
    if not file.exists():
        return []
    names = file.read_text().splitlines()
    file.unlink()
    return names


def named_lately(file: Path) -> set[str]:
    """Return the tests of the last lines of the file; each line is a date, a commit and a test."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {line.split(" ", 2)[2] for line in lines[-REMEMBERED:]}


def commit() -> str:
    """Return date and name of the commit that is played, as a line of the file begins."""
    root = Path(__file__).parents[1]
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), "log", "-1", "--format=%cs %h"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0).stdout.strip()


def main(failed: Path, named: Path, options: list[str]) -> int:
    """Run the tests that failed, with pytest's options; return 1 where one fails again, or was named lately."""
    names = taken(failed)
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
    lately = named_lately(named)
    for name in names:
        sys.stderr.write(f"UNSTEADY: {name} failed beside other tests and passed alone\n")
        if name in lately:
            sys.stderr.write(f"  it is in the last {REMEMBERED} lines of {named.name}: find out why it fails\n")
        sys.stderr.write(f"  add to the end of tests/{named.name}, and commit it: {commit()} {name}\n")
    return int(not lately.isdisjoint(names))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))

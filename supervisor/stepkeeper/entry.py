"""Where the command `stepkeeper` begins: first of all, the user's own Python modules are kept out.

Nothing but `isolation` may be imported before that.  Python 3.10 can read both: the trainer library runs on it, the
command does not.
"""

from __future__ import annotations

import sys

from stepkeeper.isolation import isolate

_USAGE = 2  # ExitCode.USAGE, which an older Python cannot import


def main() -> int:
    """Run the command line; return its exit code."""
    if sys.version_info < (3, 11):
        version = ".".join(map(str, sys.version_info[:3]))
        sys.stderr.write(
            f"stepkeeper: the command needs Python 3.11 or newer, and {sys.executable} is Python {version}: install "
            "stepkeeper with a newer Python too (it needs no torch); trainings on this one can use stepkeeper_trainer\n"
        )
        return _USAGE
    isolate("stepkeeper")
    from stepkeeper.cli.main import main as run  # noqa: PLC0415 - only now

    return run()

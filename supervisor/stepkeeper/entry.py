"""Where the command `stepkeeper` begins: first of all, the user's own Python modules are kept out.

Nothing but `isolation` may be imported before that.
"""

from __future__ import annotations

from stepkeeper.isolation import isolate


def main() -> int:
    """Run the command line; return its exit code."""
    isolate("stepkeeper")
    from stepkeeper.cli import main as run  # noqa: PLC0415 - only now

    return run()

"""The reference pages of `docs/` that are made from the code: `python -m tests.pages` writes them.

What the code declares (docstrings, fields and the comments behind them, rules) is the only source.
"""

from __future__ import annotations

from tests.pages import commands, configuration, exit_codes, journal, log, metrics, state_machine, verdicts


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    return {
        "cli.md": commands.page(),
        "configuration.md": configuration.page(),
        "events.md": journal.page(),
        "exit-codes.md": exit_codes.page(),
        "log.md": log.page(),
        "metrics.md": metrics.page(),
        "state-machine.md": state_machine.page(),
        "verdicts.md": verdicts.page(),
    }

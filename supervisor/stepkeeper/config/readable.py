"""Texts that only the ranks go by: what they could not read is refused where it is set, not hours later on every node.

Each check raises ValueError: which part is wrong, and what to write.  They import the trainer library's own parsers,
and only for a setting that is set: no other command has need of them.
"""

from __future__ import annotations


def check_cadence(text: str) -> None:
    """Check `checkpoint_every`."""
    from stepkeeper_trainer.coordinate.cadence import parse_rule  # noqa: PLC0415
    from stepkeeper_trainer.errors import UsageError  # noqa: PLC0415

    try:
        parse_rule(text)
    except UsageError as error:
        raise ValueError(str(error)) from error


def check_retention(text: str) -> None:
    """Check `retention`."""
    from stepkeeper_trainer.store.retention import parse_policy  # noqa: PLC0415

    parse_policy(text, total_steps=1)  # how many there are, the script knows


def check_local_tier(text: str) -> None:
    """Check `local_tier`."""
    _check_tier("local", text)


def check_cold_tier(text: str) -> None:
    """Check `cold_tier`; a secret in its URL is not repeated."""
    _check_tier("cold", text)


def _check_tier(kind: str, text: str) -> None:
    from stepkeeper_trainer.tiers.tier import TierError, Tiers  # noqa: PLC0415

    try:
        (Tiers(local=text) if kind == "local" else Tiers(cold=text)).check()
    except TierError as error:
        raise ValueError(str(error)) from error

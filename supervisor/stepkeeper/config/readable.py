"""Texts with a form of their own: what could not be read later, by the ranks mostly, is refused where it is set.

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


def check_slurm_client(text: str) -> None:
    """Check `slurm_client`."""
    name, colon, python = text.partition(":")
    if name not in {"commands", "pyslurm"} or (colon and (name == "commands" or not python)):
        raise ValueError("write commands, pyslurm, or pyslurm: and the interpreter that has it")


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

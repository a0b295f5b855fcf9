"""What ranks are told of saving and keeping: how often to save, which steps stay.  The trainer library reads both."""

from __future__ import annotations

from stepkeeper.config.settings import SETTINGS, RunSettings
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError

_KEYS = ("checkpoint_every", "retention")


def variables(settings: RunSettings) -> dict[str, str]:
    """Return what ranks find in their environment: it counts instead of what the script says.

    Raises:
        StepkeeperError: it cannot be read; a launch would find that out on every node.
    """
    _check(settings)
    values = {SETTINGS[key].variable: getattr(settings, key) for key in _KEYS}
    return {variable: value for variable, value in values.items() if variable and value}


def _check(settings: RunSettings) -> None:
    if settings.checkpoint_every:
        from stepkeeper_trainer.cadence import parse_rule  # noqa: PLC0415  # no supervisor needs it for its life
        from stepkeeper_trainer.errors import UsageError  # noqa: PLC0415

        try:
            parse_rule(settings.checkpoint_every)
        except UsageError as error:
            raise StepkeeperError(str(error), ExitCode.USAGE) from error
    if settings.retention:
        from stepkeeper_trainer.retention import parse_policy  # noqa: PLC0415

        try:
            parse_policy(settings.retention, total_steps=1)  # how many there are, the script knows
        except ValueError as error:
            raise StepkeeperError(str(error), ExitCode.USAGE) from error

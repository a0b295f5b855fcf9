"""One line for each decision of the library: a constant event name, then values as keys.

It goes to the standard logger `stepkeeper_trainer`, which the script configures as it likes.
"""

from __future__ import annotations

import logging

_logger = logging.getLogger("stepkeeper_trainer")


def say(event: str, **values: object) -> None:
    """Log what was done, for information."""
    _logger.info("%s", _line(event, values))


def warn(event: str, **values: object) -> None:
    """Log what somebody should look at."""
    _logger.warning("%s", _line(event, values))


def _line(event: str, values: dict[str, object]) -> str:
    return " ".join([event, *(f"{key}={_quoted(value)}" for key, value in values.items())])


def _quoted(value: object) -> str:
    text = " ".join(str(value).splitlines())
    return f'"{text}"' if " " in text or not text else text

from __future__ import annotations

import io
import tomllib
from pathlib import Path

import msgspec

from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import log_lines, logs
from stepkeeper.diagnosis.classify import Verdict, classify

HERE = Path(__file__).parent


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One log and what it should be taken for."""

    name: str
    source: str  # URL of the issue; `made` for a log that no program printed in public
    cause: Cause
    log: str
    location: str = ""
    also: tuple[Cause, ...] = ()  # a second reading that the source allows as well


def cases(name: str) -> list[Case]:
    """Return the cases of one set, such as `known`."""
    return msgspec.convert(tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["case"], list[Case])


def verdict(log: str | bytes) -> Verdict:
    """Judge one log as `stepkeeper explain --log` does."""
    data = log.encode() if isinstance(log, str) else log
    return classify(logs.log_evidence(log_lines.read_log(io.BytesIO(data))))

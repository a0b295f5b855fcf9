"""Is this value what the setting wants?  Text from flags and variables, typed values from files."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import msgspec

from stepkeeper.config import rank_settings
from stepkeeper.config.settings import SETTINGS, Setting, Value
from stepkeeper.core import causes
from stepkeeper.core.policy import Limits
from stepkeeper.errors import UsageError
from stepkeeper.printing import clean

_YES = frozenset(("1", "true", "yes", "on"))
_NO = frozenset(("0", "false", "no", "off"))
SHOWN_MAX = 80
SAID_MAX = 250
_READERS: dict[str, Callable[[str], object]] = {
    "checkpoint_every": rank_settings.check_cadence,
    "retention": rank_settings.check_retention,
    **{key: partial(rank_settings.check_tier, key) for key in ("local_tier", "cold_tier", "snapshot_dir")},
    "snapshot_every": partial(rank_settings.check_cadence, of_snapshots=True),
    "slurm_client": rank_settings.check_slurm_client,
    "metrics_port": rank_settings.parse_metrics_port,
}
_CONSTANTS: dict[str, str | float] = {f"policy.{key}": value for key, value in msgspec.structs.asdict(Limits()).items()}
# Settings of 0.1 that are none any more, and what to do instead.
REMOVED = {
    "max_nodes": "set `spares` to the number of nodes that take no part",
    "pyslurm_python": 'write slurm_client = "pyslurm:PYTHON"',
    "verify_shared_mib_min": "leave it out; nodes share a step of 1 GiB, or one that `verify_mib_per_s` makes slow",
    "load_memory_gib": "give `CheckpointManager` the argument `load_memory_gib`",
    "metrics_address": "set `metrics_port` to ADDRESS:PORT",
    "progress_log_every_s": "leave it out; the log gets a line every 10 s at most",
    "cold_zstd": "give `Tiers` of the script the argument `cold_zstd`",
    "policy.resubmit": "leave it out; a job that Slurm cannot requeue is submitted again",
    "policy.replay_differs": "leave it out; different losses in repeated steps are only reported",
    "policy.grow_ask_s": "set `policy.grow_idle_s`: Slurm is asked every half of it",
    "policy.unfit_again_s": "set `policy.grow_idle_s`: a node that failed its check rests for so long, too",
} | {
    key: f"leave it out; it is a constant since 1.0: {value if isinstance(value, str) else f'{value:g}'}"
    for key, value in _CONSTANTS.items()
}

# Values of 0.1 that have another name, by setting.
RENAMED_VALUES = {
    key: {"tell": "report"} for key in ("policy.loss_not_finite", "policy.loss_spike", "policy.slow_node")
}


class Outdated(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier release took, and a run that continues goes on without."""

    key: str
    where: str
    instead: str


def from_text(setting: Setting, text: str, where: str, outdated: list[Outdated] | None = None) -> Value:
    """Return the value that a flag or a variable gives.

    Args:
        setting: whose value it is.
        text: as it was typed.
        where: named in the error.
        outdated: as for `checked`.

    Raises:
        StepkeeperError: not of the setting's kind, or out of its range.
    """
    value: Any = text
    try:
        if setting.kind is bool:
            lower = text.strip().lower()
            value = True if lower in _YES else False if lower in _NO else text
        elif setting.kind is int:
            value = int(text)
        elif setting.kind is float:
            value = float(text)
    except ValueError:
        _refuse(setting, text, where)
    return checked(setting, value, where, outdated)


def checked(setting: Setting, value: Any, where: str, outdated: list[Outdated] | None = None) -> Value:
    """Return a typed value, a whole number as a float where that is wanted.

    Args:
        setting: whose value it is.
        value: of any type.
        where: named in the error.
        outdated: where the run continues; takes a value that has another name now.  None: such a value is refused.

    Raises:
        StepkeeperError: not of the setting's kind, or out of its range.
    """
    if type(value) is int:
        value = _from_whole(setting, value, where)
    if type(value) is not setting.kind:
        _refuse(setting, value, where)
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(setting, value, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        least, most = setting.about.least, setting.about.most
        if (least is not None and value < least) or (most is not None and value > most):
            _refuse(setting, value, where)
    if isinstance(value, str) and (not value or not value.isprintable()):
        _refuse(setting, value, where)
    if (now := value_now(setting.key, value)) != value:
        if outdated is None:
            raise UsageError(f"{where}: {setting.key} = {shown(value)}: that is no value any more: set `{now}`")
        outdated.append(Outdated(key=setting.key, where=where, instead=f"`{now}` applies; set that"))
        value = now
    if setting.about.choices and value not in setting.about.choices:
        _refuse(setting, value, where)
    _refuse_no_row(setting, value, where)
    _refuse_unreadable(setting, value, where)
    found: Value = value  # of `setting.kind`, as compared above
    return found


def _from_whole(setting: Setting, value: int, where: str) -> int | float | str:
    """Return a whole number as what the setting holds: a number, or a text that may be written as one."""
    if setting.kind is float:
        try:
            return float(value)
        except OverflowError:
            _refuse(setting, value, where)
    return str(value) if setting.about.takes_number else value


def value_now(key: str, value: Any) -> Any:
    """Return the name that a value has today, if 0.1 gave it another one.

    >>> value_now("policy.loss_spike", "tell"), value_now("policy.loss_spike", "off"), value_now("run_dir", "tell")
    ('report', 'off', 'tell')
    """
    return RENAMED_VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def _refuse_no_row(setting: Setting, value: Value, where: str) -> None:
    """Refuse a row of the ladder that is none."""
    if not setting.key.startswith("policy.on_") or not isinstance(value, str):
        return
    try:
        causes.parse_ladder(value)
    except causes.LadderError as error:
        raise UsageError(f"{where}: {setting.key} = {shown(value)}: {error}") from None


def _refuse_unreadable(setting: Setting, value: Value, where: str) -> None:
    """Refuse a text that the ranks could not read.  The value itself is not shown: a URL may hold a secret."""
    read = _READERS.get(setting.key)
    if read is None or not isinstance(value, str):
        return
    try:
        read(value)
    except ValueError as error:
        said = clean(str(error))
        said = said if len(said) <= SAID_MAX else said[:SAID_MAX] + "…"
        raise UsageError(f"{where}: {setting.key}: {said}") from None


def _refuse(setting: Setting, value: object, where: str) -> NoReturn:
    raise UsageError(f"{where}: {setting.key} = {shown(value)}: {setting.wanted} is wanted") from None


def shown(value: object) -> str:
    """Return a value as a file would hold it, for people.

    >>> shown(True), shown(4.0), shown(86400.0), shown(0.25), shown("a"), shown(None)
    ('true', '4', '86400', '0.25', 'a', 'not set')
    """
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)  # noqa: PLR2004
    text = clean(str(value)) if not isinstance(value, int) or abs(value) < 10**SHOWN_MAX else "too large a number"
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"


def known(key: str, where: str) -> Setting:
    """Return the setting of a key.

    Raises:
        StepkeeperError: there is none; the error names the nearest, or what replaces one that was removed.
    """
    if key in SETTINGS:
        return SETTINGS[key]
    refuse_removed(key, where)
    raise UsageError(
        f"{where}: `{shown(key)}` is not known{nearest(key, SETTINGS)}; `stepkeeper run --print-config` shows all"
    )


def refuse_removed(key: str, where: str) -> None:
    """Refuse a setting of an earlier version, and say what to do instead.

    Raises:
        StepkeeperError: it was one.
    """
    if key in REMOVED:
        raise UsageError(f"{where}: `{key}` is no setting any more: {REMOVED[key]}")


def passed_over(key: str, value: object, where: str, outdated: list[Outdated] | None) -> bool:
    """Tell whether a key is a removed setting that sets nothing: its value is the constant, or the run continues.

    Args:
        key: of any setting.
        value: text or typed.
        where: named in the error.
        outdated: where the run continues; takes the key.  None: the key is refused.

    Raises:
        StepkeeperError: it was a setting, its value is not the constant, and the run does not continue.
    """
    if key not in REMOVED:
        return False
    if not _is_constant(key, value):
        if outdated is None:
            refuse_removed(key, where)
        else:
            outdated.append(Outdated(key=key, where=where, instead=REMOVED[key]))
    return True


def _is_constant(key: str, value: object) -> bool:
    constant = _CONSTANTS.get(key)
    if isinstance(constant, str):
        return isinstance(value, str) and [row.strip() for row in value.split(",")] == constant.split(", ")
    try:
        return constant is not None and isinstance(value, str | int | float) and float(value) == constant
    except (ValueError, OverflowError):
        return False


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean …?` with the nearest of the known names; empty where none is near.

    >>> nearest("spare", ["spares", "policy.failures_max"]), nearest("failures-max", ["policy.failures_max"])
    ('; did you mean `spares`?', '; did you mean `policy.failures_max`?')
    """
    choices = {each.rpartition(".")[2]: each for each in names} | {each: each for each in names}
    found = difflib.get_close_matches(name[:SHOWN_MAX].replace("-", "_"), choices, n=1)
    return f"; did you mean `{choices[found[0]]}`?" if found else ""

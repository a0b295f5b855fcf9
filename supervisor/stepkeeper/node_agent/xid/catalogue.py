"""What each code means: `catalogue.csv` and `sxid.csv` beside this file, and a file of the site's that overrides rows.

The action of a row stands where neither the GPU's own recovery action nor the text of the report decides (`judge`).
"""

from __future__ import annotations

import csv
import functools
import io
import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stepkeeper.errors import UsageError

# The words of the fault plane: what should be done, whose fault it is, and one judged sighting of a fault.

TEXT_CHARACTERS_MAX = 500


class Action(StrEnum):
    """What a fault asks for, from mild to severe: `severity` compares."""

    LOG = "log"  # record and count; neither job nor node is touched
    RESTART_JOB = "restart_job"  # the job is dead or soon will be: restart it on the same nodes, count per GPU
    DEFER_RESET = "defer_reset"  # let the job run; reset this GPU when the node is next idle
    DRAIN_RESET = "drain_reset"  # drain, reset the GPU, check, resume; a reboot where the reset fails
    DRAIN_REBOOT = "drain_reboot"  # drain and reboot: no reset can help
    DRAIN_RMA = "drain_rma"  # drain and keep out: a person has to look

    @property
    def severity(self) -> int:
        """Return the place in the order above."""
        return _SEVERITIES[self]

    @property
    def drains(self) -> bool:
        """Whether the node must not be given to another job."""
        return self.severity >= Action.DRAIN_RESET.severity


_SEVERITIES = {action: place for place, action in enumerate(Action)}


class Domain(StrEnum):
    """Whose fault it is."""

    APPLICATION = "application"
    DRIVER_FIRMWARE = "driver_firmware"
    HARDWARE = "hardware"
    THERMAL_POWER = "thermal_power"
    NVLINK_FABRIC = "nvlink_fabric"
    INFO = "info"


class Source(StrEnum):
    """Who saw it."""

    KERNEL = "kernel"  # /dev/kmsg
    JOURNAL = "journal"  # only in ledgers of 0.1: the journal of the boot before
    NVML = "nvml"  # an NVML event, or what NVML says of a GPU's health


class Kind(StrEnum):
    """What was seen."""

    XID = "xid"
    SXID = "sxid"  # of an NVSwitch
    LOST = "lost"  # the GPU does not answer any more, or is missing; with or without an XID
    HEALTH = "health"  # recovery action, remapped rows, ECC: no number came with it
    STUCK = "stuck"  # NVML itself does not answer


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One judged sighting.  The same fault seen twice, by whomever, is one incident: see `node.incidents`."""

    at: float  # Unix seconds
    source: Source
    kind: Kind
    action: Action
    domain: Domain
    why: str  # one clause: which rule gave the action
    # a condition that was there at the first look: since when is not known; ledgers of 0.1 have it by this name
    present_at_start: bool = msgspec.field(default=False, name="standing")
    certain: bool = False  # nothing that follows in its burst could explain it away: do not wait for the rest
    code: int | None = None  # XID or SXID
    pci: str | None = None  # `0000:3b:00.0`, lower case, with function; of the GPU or the switch
    gpu: str = ""  # UUID, where it is known
    instance: str = ""  # of MIG: `GI 5`, `GI 5 CI 0`
    place: str = ""  # on the GPU, where the text says so: `GPC 7 TPC 7`
    cause: int | None = None  # of XID 45: the code that it says it was caused by
    text: str = ""  # the kernel's line, at most TEXT_CHARACTERS_MAX
    boot_id: str = ""
    sequence: int | None = None  # of the kernel record, within the boot

    @property
    def name(self) -> str:
        """Return what people call it: `XID 79`, `SXID 20034`, `GPU lost`."""
        if self.code is not None:
            return f"{self.kind.value.upper()} {self.code}"
        return {Kind.LOST: "GPU lost", Kind.STUCK: "NVML stuck"}.get(self.kind, "GPU health")


SITE_FILE: Final = Path("/etc/stepkeeper/xid.csv")
COLUMNS: Final = ("code", "mnemonic", "meaning", "domain", "action", "sources", "note", "date")
NEVER_DRAIN_ALONE: Final = frozenset({13, 31, 43, 45})  # programs cause them: thousands on healthy nodes
CODE_MAX: Final = 99_999
FILE_BYTES_MAX: Final = 1 << 20

_HERE = Path(__file__).parent
_Word = TypeVar("_Word", bound=StrEnum)


class CatalogueError(UsageError):
    """A catalogue file is not as it should be: the message names file and line."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one XID."""

    code: int
    mnemonic: str  # the driver's name
    meaning: str
    domain: Domain
    action: Action
    sources: str  # whose advice it rests on: docs/xid.md
    note: str
    date: str  # of the newest source
    site: bool = False  # the site's file sets this action: it stands before what the text says


class Severity(StrEnum):
    """How bad an NVSwitch's report is."""

    ALWAYS_FATAL = "always_fatal"  # the whole fabric
    FATAL = "fatal"  # a link, and the GPUs that use it
    NON_FATAL = "non_fatal"


class SwitchRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one SXID; the word in the line says whether a sighting is fatal."""

    code: int
    severity: Severity
    meaning: str


class Catalogue(msgspec.Struct, frozen=True):
    """All codes."""

    rows: Mapping[int, Row]
    switch_rows: Mapping[int, SwitchRow]


@functools.cache
def packaged() -> Catalogue:
    """Return what came with Stepkeeper."""
    rows: dict[int, Row] = {}
    path = _HERE / "catalogue.csv"
    for where, cells in _cells(path, COLUMNS):
        code = _code(where, cells)
        if code in rows:
            raise CatalogueError(f"{where}: code {code} stands there twice")
        rows[code] = _row(where, code, cells, None, site=False)
    switch_rows: dict[int, SwitchRow] = {}
    for where, cells in _cells(_HERE / "sxid.csv", ("code", "severity", "meaning")):
        code = _code(where, cells)
        severity = _word(where, "severity", cells["severity"], Severity)
        switch_rows[code] = SwitchRow(code=code, severity=severity, meaning=cells["meaning"])
    return Catalogue(rows, switch_rows)


def load(site_file: Path | None = None) -> Catalogue:
    """Return the catalogue with the site's rows: of `site_file`, else of `SITE_FILE` where that exists.

    Raises CatalogueError, which names file and line, for a file that cannot be read or is not as it should be.
    """
    if site_file is None:
        return overridden(SITE_FILE) if os.path.lexists(SITE_FILE) else packaged()
    return overridden(site_file)


def overridden(path: Path) -> Catalogue:
    """Return our catalogue with the rows of a file put over its own.  An empty cell keeps what was there."""
    base = packaged()
    rows = dict(base.rows)
    seen: set[int] = set()
    for where, cells in _cells(path, ("code",)):
        code = _code(where, cells)
        if code in seen:
            raise CatalogueError(f"{where}: code {code} stands there twice: keep one")
        seen.add(code)
        rows[code] = _row(where, code, cells, base.rows.get(code), site=bool(cells.get("action")))
    return Catalogue(rows, base.switch_rows)


def _cells(path: Path, required: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield `FILE, line N` and the cells of each row; lines that are empty or start with # are passed over."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CatalogueError(f"{path}: {error.strerror}: make it readable, or remove it") from error
    if len(data) > FILE_BYTES_MAX:
        raise CatalogueError(f"{path}: more than {FILE_BYTES_MAX} bytes: is it a catalogue?")
    try:
        lines = io.StringIO(data.decode("utf-8-sig"), newline="")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CatalogueError(f"{path}, line {line}: not UTF-8: save it as UTF-8") from error
    # a comment becomes an empty line, so that the reader's line numbers stay those of the file
    reader = csv.reader(("\n" if line.startswith("#") else line for line in lines), strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            stripped = [cell.strip() for cell in cells]
            if not any(stripped):
                continue
            if not header:
                header = _header(where, stripped, required)
                continue
            if len(stripped) > len(header):
                raise CatalogueError(f"{where}: {len(stripped)} cells below {len(header)} columns: quote commas")
            yield where, dict.fromkeys(header, "") | dict(zip(header, stripped, strict=False))
    except csv.Error as error:
        raise CatalogueError(f"{path}, line {reader.line_num}: not CSV: {error}") from error
    if not header:
        raise CatalogueError(f"{path}, line 1: no header: the first line names the columns, such as code,action")


def _header(where: str, header: list[str], required: tuple[str, ...]) -> list[str]:
    for name in header:
        if name not in COLUMNS and name not in required:
            raise CatalogueError(f"{where}: no column is called {name!r}: use {', '.join(COLUMNS)}")
        if header.count(name) > 1:
            raise CatalogueError(f"{where}: column {name} stands there twice")
    for name in required:
        if name not in header:
            raise CatalogueError(f"{where}: the column {name} is missing")
    return header


def _code(where: str, cells: dict[str, str]) -> int:
    text = cells["code"]
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(CODE_MAX)) and int(text) >= 1):
        raise CatalogueError(f"{where}: code {text[:40]!r}: a code is a number from 1 to {CODE_MAX}")
    return int(text)


def _row(where: str, code: int, cells: dict[str, str], base: Row | None, *, site: bool) -> Row:
    """Return a row: cells over those of `base`; without one, domain and action must be there."""

    def text(column: str) -> str:
        return cells.get(column, "") or (str(getattr(base, column)) if base is not None else "")

    row = Row(
        code=code,
        mnemonic=text("mnemonic"),
        meaning=text("meaning"),
        domain=_word(where, "domain", text("domain"), Domain),
        action=_word(where, "action", text("action"), Action),
        sources=text("sources"),
        note=text("note"),
        date=text("date"),
        site=site,
    )
    if code in NEVER_DRAIN_ALONE and row.action.drains:
        raise CatalogueError(
            f"{where}: code {code} comes from programs and must not drain a node on its own: use an action below "
            f"{Action.DRAIN_RESET.value}"
        )
    return row


def _word(where: str, column: str, text: str, words: type[_Word]) -> _Word:
    try:
        return words(text)
    except ValueError:
        known = ", ".join(word.value for word in words)
        raise CatalogueError(f"{where}: {column} {text[:40]!r}: use one of {known}") from None

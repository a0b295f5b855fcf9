"""PCIe errors that the kernel reports itself (AER): evidence, never a verdict.

The driver takes no part in AER, so a fatal one on a GPU's port is mostly followed by XID 79, which is the verdict.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from stepkeeper.node.xid.model import TEXT_CHARACTERS_MAX
from stepkeeper.node.xid.parse import RECORD_CHARACTERS_MAX, canonical


class Seriousness(StrEnum):
    """What PCIe calls severity."""

    CORRECTED = "corrected"
    NONFATAL = "nonfatal"
    FATAL = "fatal"  # also where the kernel could not recover the device
    UNKNOWN = "unknown"


class Aer(msgspec.Struct, frozen=True, kw_only=True):
    """One record of AER."""

    where: str  # `0000:3b:00.0`: the device that the record is about, mostly a port
    seriousness: Seriousness
    text: str
    source: str = ""  # the device that sent the error message, where it is named


_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,32} (?P<where>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]): ")
_RECEIVED = re.compile(
    r"AER: (?:Multiple )?(?P<word>Correct(?:ed|able)|Uncorrect(?:ed|able) \((?:Non-)?Fatal\))"
    r" error (?:message )?received(?: from|:) (?P<source>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])?"
)
_BUS_ERROR = re.compile(r"(?:AER: )?PCIe Bus Error: severity=(?P<word>Correct\w+|Uncorrect\w+ \((?:Non-)?Fatal\))")
_UNRECOVERED = re.compile(
    r"(?:AER: )?(?:can't recover \(no error_detected callback\)|device recovery failed|device has no AER-aware driver)"
)
_DETAIL = re.compile(r"(?:AER: )?\s*\[\s*[0-9]{1,2}\] (?P<name>[A-Za-z][\w /-]{0,40})")
# names of the status bits, in the wordings of old and new kernels
_FATAL_BITS = (
    "sdes",
    "surprise down",
    "dlp",
    "data link protocol",
    "malftlp",
    "malformed tlp",
    "rxof",
    "receiver over",
)
_NONFATAL_BITS = ("cmplt", "completion time", "completer abort", "unxcmplt", "unexpected", "unsupreq", "unsupported")
_CORRECTED_BITS = (
    "rxerr",
    "receiver error",
    "badtlp",
    "bad tlp",
    "baddllp",
    "bad dllp",
    "rollover",
    "replay",
    "timeout",
)


def parse_aer(record: str) -> Aer | None:
    """Return what a kernel record says of PCIe errors; None for all others.  Never raises."""
    device = _DEVICE.match(record) if len(record) <= RECORD_CHARACTERS_MAX else None
    if device is None:
        return None
    said = record[device.end() :]
    source = ""
    if match := _RECEIVED.match(said):
        seriousness = _of_word(match["word"])
        source = canonical(match["source"]) if match["source"] else ""
    elif match := _BUS_ERROR.match(said):
        seriousness = _of_word(match["word"])
    elif _UNRECOVERED.match(said):
        seriousness = Seriousness.FATAL
    elif match := _DETAIL.match(said):
        seriousness = _of_bit(match["name"])
        if seriousness is Seriousness.UNKNOWN:
            return None  # other drivers number their lines too
    else:
        return None
    return Aer(
        where=canonical(device["where"]),
        seriousness=seriousness,
        text=said.strip()[:TEXT_CHARACTERS_MAX],
        source=source,
    )


def _of_word(word: str) -> Seriousness:
    if word.startswith("Correct"):
        return Seriousness.CORRECTED
    return Seriousness.NONFATAL if "Non-Fatal" in word else Seriousness.FATAL


def _of_bit(name: str) -> Seriousness:
    name = name.lower()
    for bits, seriousness in (
        (_FATAL_BITS, Seriousness.FATAL),
        (_NONFATAL_BITS, Seriousness.NONFATAL),
        (_CORRECTED_BITS, Seriousness.CORRECTED),
    ):
        if name.startswith(bits):
            return seriousness
    return Seriousness.UNKNOWN

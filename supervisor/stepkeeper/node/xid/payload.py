"""What the text behind a code adds, and what a GPU's recovery action asks for.

Every function takes the driver's text alone (`Report.payload`) and returns None where the text says nothing that would
change what the catalogue says of the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stepkeeper.node.xid.model import Action, Domain
from stepkeeper.node.xid.nvlink import decode_nvlink4, decode_nvlink5


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """What the text asks for."""

    action: Action
    why: str
    certain: bool = False
    domain: Domain | None = None  # None: that of the catalogue


RECOVERY_NONE: Final = 0
_RECOVERY: Final[Mapping[int, tuple[Action, str, bool]]] = {
    1: (Action.DRAIN_RESET, "reset the GPU", True),
    2: (Action.DRAIN_REBOOT, "reboot the node", True),
    3: (Action.DRAIN_RESET, "drain peer-to-peer traffic, then look again", False),
    4: (Action.DRAIN_RESET, "drain, and reset after the job", False),
}
# From 5 on the numbers mean different things in different driver branches: bus reset, IMEX recovery, system reboot.
# A reboot does what most of them ask for, and drains in any case.
_RECOVERY_OTHER: Final = (Action.DRAIN_REBOOT, "no agreed meaning: drain, and let a person look", False)

_CHANGED = re.compile(
    r"GPU recovery action changed from 0x[0-9a-fA-F]{1,8}(?: \([^)]{0,80}\))? to 0x([0-9a-fA-F]{1,8})"
)
# Of 13: `Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): ...`; of 31: `MMU Fault: ENGINE GRAPHICS GPC2
# GPCCLIENT_T1_8 faulted ...`, where older drivers do not name the GPC: half a place is none.
_ON_PROCESSOR = re.compile(r"\(GPC (?P<gpc>[0-9]{1,3}), TPC (?P<tpc>[0-9]{1,3})(?:, SM [0-9]{1,3})?\)")
_OF_CLIENT = re.compile(r"\bGPC(?P<gpc>[0-9]{1,3}) GPCCLIENT_T[0-9]{1,3}_(?P<tpc>[0-9]{1,3})\b")
_CAUSED_BY = re.compile(r"caused by previous Xid ([0-9]{1,5})\s*\Z")
_FLAGS = re.compile(r"RST: (?P<reset>Yes|No), D-RST: (?P<drain_reset>Yes|No)")
_NO_ROWS_LEFT = ("all reserved rows", "table is full", "dram retirement failed")
_ROW_WAITS = "already pending remapping"


def recovery(value: int) -> Decoded | None:
    """Return what a GPU recovery action asks for (NVML field 230, or what XID 154 says); None where it is "none"."""
    if value == RECOVERY_NONE:
        return None
    action, meaning, certain = _RECOVERY.get(value, _RECOVERY_OTHER)
    return Decoded(action=action, why=f"GPU recovery action {value}: {meaning}", certain=certain)


def changed_recovery(text: str) -> int | None:
    """Return the new value that XID 154 tells.  Labels differ between branches, the number counts."""
    match = _CHANGED.match(text)
    return int(match[1], 16) if match else None


def cause(text: str) -> int | None:
    """Return the code that XID 45 says it was caused by."""
    match = _CAUSED_BY.search(text)
    return int(match[1]) if match else None


def place(text: str) -> str:
    """Return which processor of the GPU a text blames; "" where it names none.

    >>> place("Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Illegal Instruction Parameter")
    'GPC 7 TPC 7'
    """
    match = _ON_PROCESSOR.search(text) or _OF_CLIENT.search(text)
    return f"GPC {int(match['gpc'])} TPC {int(match['tpc'])}" if match else ""


def decode(code: int, text: str) -> Decoded | None:
    """Return what the text behind a code asks for; of 45 and 154 the functions above tell."""
    decoder = _DECODERS.get(code)
    return decoder(text) if decoder is not None else None


def _new_row(text: str) -> Decoded | None:
    if "marked for remapping" not in text.lower():
        return None
    return Decoded(action=Action.DEFER_RESET, why="63: a row waits for the next reset to be remapped")


def _failed_row(text: str) -> Decoded | None:
    said = text.lower()
    for words in _NO_ROWS_LEFT:
        if words in said:
            return Decoded(action=Action.DRAIN_RMA, why=f'64 says "{words}": no spare is left', certain=True)
    if _ROW_WAITS in said:
        return Decoded(action=Action.DEFER_RESET, why=f'64 says "{_ROW_WAITS}": the next reset remaps it')
    return None


def _contained(text: str) -> Decoded | None:
    match = _FLAGS.search(text)
    if match is None:
        return None
    if match["reset"] == "Yes":
        return Decoded(action=Action.DRAIN_RESET, why="94 says RST: Yes: contained, but the GPU needs a reset")
    if match["drain_reset"] == "Yes":
        return Decoded(action=Action.DEFER_RESET, why="94 says D-RST: Yes: reset when the node is idle")
    return Decoded(action=Action.RESTART_JOB, why="94 says RST: No: one program is lost, no reset needed")


def _uncontained(text: str) -> Decoded | None:
    match = _FLAGS.search(text)
    if match is None:
        return None
    if match["reset"] == "Yes":
        return Decoded(action=Action.DRAIN_RESET, why="95 says RST: Yes: the GPU needs a reset", certain=True)
    if match["drain_reset"] == "Yes":
        return Decoded(action=Action.DRAIN_RESET, why="95 says D-RST: Yes: drain, then reset the GPU")
    return None  # every program on the GPU is lost all the same: the catalogue decides


def _nvlink4(text: str) -> Decoded | None:
    found = decode_nvlink4(text)
    return None if found is None else Decoded(action=found.action, why=f"74 {found.why}", domain=found.domain)


def _nvlink5(code: int) -> Callable[[str], Decoded | None]:
    def decoder(text: str) -> Decoded | None:
        found = decode_nvlink5(code, text)
        return None if found is None else Decoded(action=found.action, why=f"{code} {found.why}", domain=found.domain)

    return decoder


_DECODERS: Final[Mapping[int, Callable[[str], Decoded | None]]] = {
    63: _new_row,
    64: _failed_row,
    74: _nvlink4,
    94: _contained,
    95: _uncontained,
    **{code: _nvlink5(code) for code in range(144, 151)},
}

# The mildest that the text can ask for, where that is less than the catalogue's action.  It counts where a code comes
# without text (an event of NVML, the cause that a 45 names): the kernel's line, which has the text, can only raise it.
MILDEST: Final[Mapping[int, Action]] = {64: Action.DEFER_RESET, 74: Action.LOG}

"""What the text behind a code adds, and what a GPU's recovery action asks for.

Every function takes the driver's text alone (`Report.payload`) and returns None where the text says nothing that would
change what the catalogue says of the code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stepkeeper.node_agent.xid.catalogue import Action, Domain

# The registers behind an NVLink error: XID 74 (up to NVLink 4) and 144 to 150 (NVLink 5).


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """What a text asks for."""

    action: Action
    why: str
    certain: bool = False
    domain: Domain | None = None  # None: that of the catalogue


class _Bits(msgspec.Struct, frozen=True):
    """Bits of one register that mean the same."""

    register: int  # 1 to 7, in the order of the line
    bits: frozenset[int]
    action: Action
    meaning: str


def _bits(register: int, bits: tuple[int, ...], action: Action, meaning: str) -> _Bits:
    return _Bits(register, frozenset(bits), action, meaning)


_NVLINK4: Final = (
    _bits(1, (0, 23, 30), Action.LOG, "nothing to act on"),
    _bits(1, (1, 20), Action.LOG, "echo of a fault at the other end"),
    _bits(1, (4, 5), Action.DRAIN_RESET, "ECC error in the link's hardware"),
    _bits(1, (8, 9, 12, 16, 17, 24, 28), Action.DRAIN_RESET, "check how the link is seated"),
    _bits(1, (21, 22), Action.DRAIN_RESET, "marginal signal"),
    _bits(1, (27, 29), Action.RESTART_JOB, "unexpected: report it if it comes back"),
    _bits(3, (0, 1, 2, 6), Action.DRAIN_RESET, "hardware of the link"),
    _bits(3, (13,), Action.RESTART_JOB, "known error of the driver"),
    _bits(3, (16, 19), Action.DRAIN_RMA, "wants a field diagnostic"),
    _bits(4, (16, 17), Action.LOG, "echo of a fault at the other end"),
    _bits(4, (18,), Action.DRAIN_RESET, "the fabric wants a reset"),
    _bits(5, (18, 19, 21, 22, 24, 25, 27, 28), Action.DRAIN_RESET, "hardware of the link"),
    _bits(5, (20, 23, 26, 29), Action.LOG, "a counter passed its threshold"),
)
_BIT_ACTIONS: Final[Mapping[tuple[int, int], _Bits]] = {
    (known.register, bit): known for known in _NVLINK4 for bit in known.bits
}
_LINK4 = re.compile(
    r"\blink (?P<link>-?[0-9]{1,3})\s*\((?P<registers>0x[0-9a-fA-F]{1,8}(?:, ?0x[0-9a-fA-F]{1,8}){6})\)"
)

_LINK5 = re.compile(
    r"(?P<unit>[A-Za-z][A-Za-z0-9_ ]{0,40}?)\s+(?P<word>Fatal|Non-?fatal)\s+XC[0-9]+(?:\s+i[0-9]+)?\s+(?:in\s+)?"
    r"Link\s+(?P<link>-?[0-9]{1,4})\s*\((?P<words>0x[0-9a-fA-F]{1,8}(?:[ ,]+0x[0-9a-fA-F]{1,8}){1,7})\s*\)"
)
_SAW, _RLW, _TLW, _TREX, _NVLPW, _NETIR, _MSE = range(144, 151)
_NEVER_ACTED_ON: Final = frozenset({_TREX, _NVLPW})
# code, part of the unit's name -> states (second word) that the recovery action decides on, not this line
_LEFT_TO_RECOVERY: Final = (
    (_RLW, "REMAP", frozenset({0x1, 0x2, 0x4, 0x8, 0x10, 0x20})),
    (_RLW, "SRC", frozenset({0x4, 0x8})),
)
_LINK_DOWN_SHIFT: Final = 20  # of the first word: why the link went down, six bits
_LINK_DOWN_MASK: Final = 0x3F
_IGNORED_REASONS: Final = frozenset({0b100110, 0b101000})
_BY_SOFTWARE: Final = frozenset({0b001111, 0b010001, 0b010110})
_BY_CABLE: Final = frozenset({0b101010, 0b101011})
_BY_PEER: Final = 0b100000  # the highest bit


def decode_nvlink4(text: str) -> Decoded | None:
    """Return what the seven registers of a 74 ask for; None where they, or one set bit, are not known."""
    match = _LINK4.search(text)
    if match is None:
        return None
    registers = [int(word, 16) for word in match["registers"].split(",")]
    found = [
        _BIT_ACTIONS.get((number, bit))
        for number, value in enumerate(registers, start=1)
        for bit in range(value.bit_length())
        if value >> bit & 1
    ]
    known = [each for each in found if each is not None]
    worst = max(known, key=lambda each: each.action.severity, default=None)
    if worst is None or (len(known) < len(found) and not worst.action.drains):
        return None  # an unknown bit may be the one that counts
    why = f"74 on link {int(match['link'])}, register {worst.register}: {worst.meaning}"
    driver = Domain.DRIVER_FIRMWARE if worst.meaning.endswith("of the driver") else None
    return Decoded(action=worst.action, why=why, domain=driver)


def decode_nvlink5(code: int, text: str) -> Decoded | None:
    """Return what the line of an NVLink 5 unit asks for; None where it cannot be read.

    A line that is not fatal is logged: should the GPU need more, the driver says so in a 154.
    """
    match = _LINK5.match(text)
    if match is None:
        return None
    words = [int(word, 16) for word in re.split(r"[ ,]+", match["words"])]
    unit = match["unit"].upper()
    where = f"{code} {match['unit']} on link {int(match['link'])}"
    if match["word"] != "Fatal":
        return Decoded(action=Action.LOG, why=f"{where}: not fatal; a 154 would say if more is needed")
    if code in _NEVER_ACTED_ON or (code == _NETIR and "BER" in unit) or (code == _RLW and "RXPIPE" in unit):
        return Decoded(action=Action.LOG, why=f"{where}: a state of this unit that is not acted on")
    if code == _NETIR and "LINK" in unit:
        return _link_down(where, words[0] >> _LINK_DOWN_SHIFT & _LINK_DOWN_MASK)
    for of_code, part, states in _LEFT_TO_RECOVERY:
        if code == of_code and part in unit and words[1] in states:
            why = f"{where}: fatal, state {words[1]:#x}; the recovery action decides on a reset"
            return Decoded(action=Action.RESTART_JOB, why=why)
    return Decoded(action=Action.DRAIN_RESET, why=f"{where}: fatal")


def _link_down(where: str, reason: int) -> Decoded:
    """Judge a fatal link event by why the link went down."""
    if reason in _IGNORED_REASONS:
        return Decoded(action=Action.LOG, why=f"{where}: down for reason {reason:#08b}, which is not acted on")
    if reason in _BY_SOFTWARE:
        why = f"{where}: taken down by software or a user (reason {reason:#08b})"
        return Decoded(action=Action.DRAIN_RESET, why=why, domain=Domain.DRIVER_FIRMWARE)
    if reason in _BY_CABLE:
        return Decoded(action=Action.DRAIN_RESET, why=f"{where}: down, a cable (reason {reason:#08b})")
    if reason & _BY_PEER:
        return Decoded(action=Action.DRAIN_RESET, why=f"{where}: taken down by its peer (reason {reason:#08b})")
    return Decoded(action=Action.DRAIN_RESET, why=f"{where}: fatal")


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


def recovery(value: int | None) -> Decoded | None:
    """Return what a GPU recovery action asks for (NVML field 230, or what XID 154 says); None where it asks nothing."""
    if value is None or value == RECOVERY_NONE:
        return None
    action, meaning, certain = _RECOVERY.get(value, _RECOVERY_OTHER)
    return Decoded(action=action, why=f"GPU recovery action {value}: {meaning}", certain=certain)


def changed_recovery(text: str) -> int | None:
    """Return the new value that XID 154 gives.  Labels differ between branches, the number counts."""
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
    """Return what the text behind a code asks for; for 45 and 154 see the functions above."""
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


_DECODERS: Final[Mapping[int, Callable[[str], Decoded | None]]] = {
    63: _new_row,
    64: _failed_row,
    74: decode_nvlink4,
    94: _contained,
    95: _uncontained,
    **{code: functools.partial(decode_nvlink5, code) for code in range(144, 151)},
}

# The mildest that the text can ask for, where that is less than the catalogue's action.  It counts where a code comes
# without text (an event of NVML, the cause that a 45 names): the kernel's line, which has the text, can only raise it.
MILDEST: Final[Mapping[int, Action]] = {64: Action.DEFER_RESET, 74: Action.LOG}

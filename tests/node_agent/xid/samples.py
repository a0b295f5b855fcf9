"""The kernel log lines of `samples.txt`, and what each must be read as."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("samples.txt")


class Sample(NamedTuple):
    line: str
    kind: str | None  # None: no fault
    code: int | None = None
    pci: str = ""
    action: str = ""
    injected: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.code}: {self.line[:60]}" if self.kind else f"none: {self.line[:60]}"


def samples() -> list[Sample]:
    found: list[Sample] = []
    expected: list[str] = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("> "):
            expected = line[2:].split()
        elif line and not line.startswith("#"):
            found.append(_sample(line, expected))
            expected = []
    return found


def _sample(line: str, expected: list[str]) -> Sample:
    assert expected, f"nothing is expected of {line}"
    if expected == ["none"]:
        return Sample(line, None)
    injected = expected[0] == "injected"
    kind, code, pci, action = expected[1:] if injected else expected
    return Sample(line, kind, None if code == "-" else int(code), pci, action, injected)

"""What a page shows of an output, compared with an output: the lines that all readers see alike."""

from __future__ import annotations

import re

# what differs between two readers: bars, directories and their file systems, numbers
DIFFERS = (
    (r"[█░▏▎▍▌▋▊▉]+", "BAR"),
    (r"(?<![\w/])/[\w./-]+", "PATH"),
    (r"\((ext4|xfs|btrfs|tmpfs|overlay)\)", "(FS)"),
    (r"\d[\d,.]*(?: (?:m?s|min|h)\b)?", "N"),
)
EXACT = ("phase", "before", "ended", "job")  # of `status`: lines of which the words count too, up to a comma


def shape(text: str) -> list[str]:
    """Return what is the same for all readers: of a line with two columns the first one."""
    lines = []
    for line in text.strip().splitlines():
        for pattern, word in DIFFERS:
            line = re.sub(pattern, word, line)  # noqa: PLW2901
        label = re.split(r"\s{2,}", line.strip(), maxsplit=1)[0]
        lines.append(line.partition(",")[0] if label in EXACT else label)
    return lines


def is_shown(shown: str, printed: str) -> bool:
    """Tell whether all that a page shows is printed, in that order; a line `...` stands for any lines."""
    rest = iter(shape(printed))
    return all(line == "..." or line in rest for line in shape(shown))

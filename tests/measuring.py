"""Reading what processes cost, and medians of repeats as a table: for benchmarks and stories."""

import os
import statistics
from collections.abc import Mapping, Sequence


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def print_medians(found: Mapping[str, Sequence[float]]) -> None:
    """Print one row a figure: its median, and every repeat."""
    print(medians(found))


def medians(found: Mapping[str, Sequence[float]]) -> str:
    """Return a table with one row a figure: its median, and every repeat."""
    lines = [f"| what | median of {max(map(len, found.values()))} | all |", "|---|---|---|"]
    for name, values in found.items():
        repeats = ", ".join(f"{value:.3g}" for value in values)
        lines.append(f"| {name} | {statistics.median(values):.3g} | {repeats} |")
    return "\n".join(lines)

"""How much memory is left: of the node, and below each limit of the control groups around this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_FILES = {  # limit, what is used, and in memory.stat what the kernel gives back when it is short: files' pages
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def memory_left(root: Path = _ROOT, proc: Path = Path("/proc")) -> Iterator[tuple[str, int, int]]:
    """Yield whose limit, how many bytes are left below it, and how many it is.  What cannot be read has no limit."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        node = _table((proc / "meminfo").read_bytes())
        yield "the node's memory", node["MemAvailable:"] * 1024, node["MemTotal:"] * 1024
    try:
        lines = (proc / "self/cgroup").read_text(errors="replace")
    except OSError:
        return
    for line in lines.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in set(controllers.split(",")) & _FILES.keys():
            yield from _groups_left(root / controller, path.strip("/"), _FILES[controller])


def _groups_left(root: Path, path: str, names: tuple[str, str, tuple[str, str]]) -> Iterator[tuple[str, int, int]]:
    """Yield as above for a control group and those around it."""
    limit_name, used_name, cache_names = names
    at = root / path
    while True:
        with contextlib.suppress(OSError, ValueError):  # no limit here, or none that is a number ("max")
            limit = int((at / limit_name).read_text())
            used = int((at / used_name).read_text())
            table = _table((at / "memory.stat").read_bytes())
            yield f"the memory limit of {at}", limit - used + sum(table.get(each, 0) for each in cache_names), limit
        if at == root:
            return
        at = at.parent


def _table(data: bytes) -> dict[str, int]:
    """Return the first number of each line."""
    fields = (line.split() for line in data.decode(errors="replace").splitlines())
    return {each[0]: int(each[1]) for each in fields if len(each) > 1 and each[1].isdigit()}

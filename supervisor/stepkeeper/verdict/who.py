"""Who a line is about: node, process, GPU, as far as it says.  Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_NCCL = r"^(?:[\w.-]+):"  # HOST:PROCESS:THREAD [GPU]
_NODE = re.compile(
    r"\bfailed on node ([\w.-]+)|^srun: error: ([\w.-]+): tasks? \d|^srun: error: Node failure on ([\w.-]+)"
    r"|\*\*\* (?:STEP|JOB) \S+ ON ([\w.-]+) |\bhost\s*: ([\w.-]+)$|^slurmstepd-([\w.-]+): "
    r"|^([\w.-]+):\d+:\d+ \[\d+\] "
)
_PID = re.compile(
    r"\bpid=(\d{1,9})\b|\(pids?(?:\(s\))?:? (\d{1,9})\)|\b(?:PID|pid):? (\d{1,9})\b"
    rf"|{_NCCL}(\d{{1,9}}):\d+ \[\d+\] "
    r"|\bProcess (\d{1,9}) (?:got|has|was|\()|\bKilled process (\d{1,9})\b"
)
_GPU = re.compile(rf"\bGPU (\d{{1,2}})\b|\bcuda:(\d{{1,2}})\b|{_NCCL}\d+:\d+ \[(\d{{1,2}})\] |\bXid \((PCI:[\w:.]+)\)")
_TASK = re.compile(r"^srun: error: [\w.-]+: task (\d{1,8}): ")
_WRITER_IP = re.compile(r"\bip=([\w.:]+)")
_WRITER_HOST = re.compile(r"[\w.-]+$")


class Who(NamedTuple):
    """Whom a line is about."""

    node: str = ""
    pid: int | None = None
    gpu: str = ""
    rank: int | None = None


def find(text: str, writer: str = "") -> Who:
    """Return whom a line names, or who wrote it.

    >>> find("srun: error: gpu-33: task 3: Out Of Memory")
    Who(node='gpu-33', pid=None, gpu='', rank=3)
    >>> find("ValueError: bad", "Worker pid=41, ip=10.0.0.1")
    Who(node='10.0.0.1', pid=41, gpu='', rank=None)
    """
    by_prefix = _WRITER_IP.search(writer)
    host = by_prefix[1] if by_prefix else writer if _WRITER_HOST.match(writer) and "=" not in writer else ""
    pid = _first(_PID, text) or _first(_PID, writer)
    task = _TASK.match(text)
    return Who(
        node=_first(_NODE, text) or host,
        pid=int(pid) if pid else None,
        gpu=_first(_GPU, text),
        rank=int(task[1]) if task else None,
    )


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next((group for group in match.groups() if group), "") if match else ""

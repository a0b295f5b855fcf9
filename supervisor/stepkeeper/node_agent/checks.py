"""Is this node fit for a launch?  One-shot checks that are over in time, whatever hangs.

Used by the watchers before every launch, and by `stepkeeper node check`.  What may hang (a mount, the driver) is tried
in a child process; one that cannot be killed is left behind.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepkeeper.node_agent.readings import GpuHealth, NvmlState
from stepkeeper.node_agent.xid.catalogue import Action, packaged
from stepkeeper.node_agent.xid.judge import judge_health

ANSWER_BYTES_MAX = 4096
DIES_WITHIN_S = 0.5
GRACE_S = 2.5  # what the children's deaths may take beyond the limit
GPUS = "GPUs"  # the check of them


class Wanted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a fit node has."""

    gpus: int | None = None  # so many, no more and no fewer
    gpus_min: int = 0  # at least so many: a job may see more than it was given
    gpus_held: tuple[str, ...] | None = None  # PCI addresses: no other GPU's state counts; None: all do
    nvml: bool = True  # look at the GPUs, where the library is
    nvml_required: bool = False  # its absence is a problem: for nodes that have GPUs for certain
    pending_is_problem: bool = False  # a remapped row that waits for a reset
    writable: tuple[Path, ...] = ()  # directories: reachable, and files can be made there
    free_bytes: int = 0  # at least so many on the file system of each
    reference_time: float | None = None  # what the supervisor's clock says now, Unix seconds
    clock_offset_s: float = 60.0  # how far ours may be from it; the question's way is part of that


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found.  A node with problems is unfit; warnings are for people."""

    problems: tuple[str, ...] = ()
    gpu_problems: tuple[str, ...] = ()  # those among them that are of GPUs: they are one job's, not the node's
    warnings: tuple[str, ...] = ()
    figures: dict[str, float] = {}  # `gpus`, `temperature_max_c`, `free_bytes:/scratch`, ...
    nvml: str = ""  # `ready`, `absent`, `stuck`, `ended`; "" where it was not asked
    took_s: float = 0.0

    @property
    def fit(self) -> bool:
        """Whether a launch may use the node."""
        return not self.problems


class _Findings:
    """What one check found; each has its own, filled by its own thread."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.figures: dict[str, float] = {}
        self.nvml = ""


_Check = Callable[[_Findings, float], None]


def run_checks(wanted: Wanted, within_s: float) -> Report:
    """Check all at the same time; return within that time and `GRACE_S`.  Never raises for what it finds."""
    # the clock first: the children's start takes time
    asked_at, began = time.time(), time.monotonic()
    checks: list[tuple[str, _Check]] = []
    if wanted.nvml:
        checks.append((GPUS, lambda found, left_s: _gpus(found, wanted, left_s)))
    checks += [
        (str(path), lambda found, left_s, path=path: _path(found, wanted, str(path), left_s))  # type: ignore[misc]
        for path in wanted.writable
    ]
    running = []
    for what, check in checks:
        findings = _Findings(what)
        thread = threading.Thread(target=_guarded, args=(check, findings, within_s), name=f"check {what}", daemon=True)
        thread.start()
        running.append((thread, findings))
    clock = _Findings("clock")
    if wanted.reference_time is not None:
        _clock(clock, asked_at - wanted.reference_time, wanted.clock_offset_s)
    until = began + within_s + GRACE_S
    all_findings = [clock]
    for thread, findings in running:
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():  # not even its own limits helped
            findings = _Findings(findings.what)  # noqa: PLW2901 - the thread may still write to the old one
            findings.problems.append(f"{findings.what}: the check did not end within {within_s:g} s")
        all_findings.append(findings)
    return Report(
        problems=tuple(problem for found in all_findings for problem in found.problems),
        gpu_problems=tuple(problem for found in all_findings if found.what == GPUS for problem in found.problems),
        warnings=tuple(warning for found in all_findings for warning in found.warnings),
        figures={name: value for found in all_findings for name, value in found.figures.items()},
        nvml=next((found.nvml for found in all_findings if found.nvml), ""),
        took_s=time.monotonic() - began,
    )


def _guarded(check: _Check, findings: _Findings, within_s: float) -> None:
    try:
        check(findings, within_s)
    except OSError as error:  # no processes, no descriptors, no memory: not a node to launch on
        findings.problems.append(f"{findings.what}: cannot be checked: {error}")


# --- the clock ------------------------------------------------------------------------------------


def _clock(found: _Findings, offset_s: float, limit_s: float) -> None:
    found.figures["clock_offset_s"] = offset_s
    if abs(offset_s) > limit_s:
        direction = "ahead of" if offset_s > 0 else "behind"
        found.problems.append(
            f"clock: {abs(offset_s):.1f} s {direction} the supervisor's; at most {limit_s:g} s may be"
        )


# --- storage --------------------------------------------------------------------------------------


def _path(found: _Findings, wanted: Wanted, path: str, within_s: float) -> None:
    answer = _try_path(path, within_s)
    if isinstance(answer, str):
        found.problems.append(f"{path}: {answer}")
        return
    found.figures[f"free_bytes:{path}"] = answer["free"]
    found.figures[f"write_s:{path}"] = answer["took_s"]
    if answer["free"] < wanted.free_bytes:
        gib = 1024**3
        found.problems.append(
            f"{path}: {answer['free'] / gib:.1f} GiB free; {wanted.free_bytes / gib:.1f} GiB are needed"
        )


def _try_path(path: str, within_s: float) -> dict[str, float] | str:
    """Return figures, or what is wrong."""
    from stepkeeper.node_agent import try_path  # noqa: PLC0415 - only its place is needed

    child = subprocess.Popen(
        [sys.executable, "-I", "-S", try_path.__file__, path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
    )
    assert child.stdout is not None
    data = b""
    until = time.monotonic() + within_s
    try:
        while len(data) < ANSWER_BYTES_MAX:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([child.stdout], [], [], left_s)[0]:
                return f"no answer within {within_s:g} s: the mount hangs"
            more = child.stdout.read(ANSWER_BYTES_MAX)
            if not more:
                break
            data += more
    finally:
        child.kill()
        child.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: left behind
            child.wait(DIES_WITHIN_S)
    try:
        answer = msgspec.json.decode(data, type=dict[str, float | str])
    except msgspec.DecodeError:
        return f"the try ended without an answer (exit code {child.returncode})"
    figures = {name: value for name, value in answer.items() if isinstance(value, float)}
    return figures if {"free", "took_s"} <= figures.keys() else str(answer.get("problem", "no answer"))


# --- GPUs -----------------------------------------------------------------------------------------


def _gpus(found: _Findings, wanted: Wanted, within_s: float) -> None:
    from stepkeeper.node_agent.nvml import once  # noqa: PLC0415 - a launch without GPUs needs none of it

    look = once(within_s)
    status = look.status
    found.nvml = status.state.value
    if status.state is NvmlState.ABSENT:
        if wanted.nvml_required:
            found.problems.append(f"GPUs: NVML is absent: {status.detail}")
        return
    if status.state is not NvmlState.READY:
        found.problems.append(f"GPUs: NVML is {status.state.value}: {status.detail}")
    else:
        found.figures["gpus"] = len(status.gpus)
        if wanted.gpus is not None and len(status.gpus) != wanted.gpus:
            found.problems.append(f"GPUs: {len(status.gpus)} answer, {wanted.gpus} are expected")
        if len(status.gpus) < wanted.gpus_min:
            found.problems.append(f"GPUs: {len(status.gpus)} answer, at least {wanted.gpus_min} are expected")
    for health in look.health:
        if wanted.gpus_held is None or not health.pci or health.pci in wanted.gpus_held:
            _gpu(found, health, wanted)
    temperatures = [health.temperature_c for health in look.health if health.temperature_c is not None]
    if temperatures:
        found.figures["temperature_max_c"] = max(temperatures)
    found.figures["gpus_lost"] = sum(health.lost for health in look.health)


def _gpu(found: _Findings, health: GpuHealth, wanted: Wanted) -> None:
    """Judge one GPU by the rules that have the agent drain its node."""
    name = f"GPU {health.index} {health.pci}".rstrip()
    if health.silent:
        found.problems.append(f"{name}: does not answer: {'; '.join(health.errors)}")
        return
    for fault in judge_health(health, None, catalogue=packaged()):
        if fault.action.drains or (fault.action is Action.DEFER_RESET and wanted.pending_is_problem):
            found.problems.append(f"{name}: {fault.why}")
        elif fault.action is Action.DEFER_RESET:
            found.warnings.append(f"{name}: {fault.why}")
    if not health.lost:
        found.warnings.extend(f"{name}: {error}" for error in health.errors)

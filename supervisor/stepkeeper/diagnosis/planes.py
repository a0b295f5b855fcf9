"""What ranks' exits, nodes and Slurm say, as evidence: from the events of the core.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepkeeper.core.causes import Cause
from stepkeeper.core.events import JobFacts, NodeFaulted, RankExited
from stepkeeper.core.reasons import Finding
from stepkeeper.diagnosis.classify import Evidence, Plane, Role
from stepkeeper.reason_text import text as in_words

EXIT_FINISHED, EXIT_STOPPED, EXIT_GAVE_UP = 0, 75, 93
SIGKILL, SIGTERM = 9, 15
_SIGNAL_BASE = 128  # a shell's exit code of a process that signal N ended is 128 + N

# signal -> rule, cause, role, confidence, words
SIGNALS: dict[int, tuple[str, Cause, Role, float, str]] = {
    1: ("exit-terminated", Cause.CANCELLED, Role.CASCADE, 0.3, "SIGHUP: asked to terminate"),
    2: ("exit-interrupted", Cause.CANCELLED, Role.ROOT, 0.6, "SIGINT: interrupted"),
    4: ("exit-illegal", Cause.VERSION_MISMATCH, Role.ROOT, 0.6, "SIGILL: an instruction that this CPU does not know"),
    6: ("exit-aborted", Cause.SEGFAULT, Role.CONFIRMATION, 0.45, "SIGABRT: gave up; its log says why"),
    7: ("exit-bus-error", Cause.SEGFAULT, Role.ROOT, 0.7, "SIGBUS: bus error, also of full shared memory"),
    8: ("exit-arithmetic", Cause.SEGFAULT, Role.ROOT, 0.8, "SIGFPE: an arithmetic error in native code"),
    9: ("exit-killed", Cause.HOST_MEMORY, Role.ROOT, 0.5, "SIGKILL: most often the kernel, for lack of memory"),
    11: ("exit-segfault", Cause.SEGFAULT, Role.ROOT, 0.85, "SIGSEGV: segmentation fault"),
    15: ("exit-terminated", Cause.CANCELLED, Role.CASCADE, 0.4, "SIGTERM: asked to terminate"),
    24: ("exit-cpu-limit", Cause.CONFIGURATION, Role.ROOT, 0.8, "SIGXCPU: over the limit of CPU time"),
    25: ("exit-file-limit", Cause.CONFIGURATION, Role.ROOT, 0.8, "SIGXFSZ: a file over the limit of its size"),
}
"""What a signal that ended a rank shows."""

# exit code -> the same
CODES: dict[int, tuple[str, Cause, Role, float, str]] = {
    EXIT_FINISHED: ("exit-finished", Cause.FINISHED, Role.CONFIRMATION, 0.6, "exit code 0"),
    1: ("exit-error", Cause.EXCEPTION, Role.CONFIRMATION, 0.35, "exit code 1: an error of the program"),
    2: ("exit-usage", Cause.CONFIGURATION, Role.CONFIRMATION, 0.45, "exit code 2: most often wrong arguments"),
    EXIT_STOPPED: ("exit-stopped", Cause.STOPPED, Role.CONFIRMATION, 0.5, "exit code 75: stopped on request"),
    EXIT_GAVE_UP: ("exit-gave-up", Cause.EXCEPTION, Role.CONFIRMATION, 0.4, "exit code 93: asks not to be restarted"),
    126: ("exit-not-executable", Cause.CONFIGURATION, Role.ROOT, 0.85, "exit code 126: it cannot be executed"),
    127: ("exit-not-found", Cause.CONFIGURATION, Role.ROOT, 0.85, "exit code 127: no such program"),
}
"""What an exit code of a rank shows."""


def exits(events: Iterable[RankExited], *, killed_at: float | None = None) -> list[Evidence]:
    """Return what the ranks' exits show: the first failing rank is root, those after it follow.

    An exit that was reported twice counts once; one of which nothing more is known counts as nothing.

    Args:
        events: in the order of their arrival.
        killed_at: when we ended the ranks ourselves: a signal that ended one later was ours.  An exit at this very
            instant is why we did.
    """
    known: dict[int, RankExited] = {}
    for event in sorted(events, key=lambda event: event.at):
        before = known.get(event.rank)
        if before is None or (before.code is None and before.signal is None):
            known[event.rank] = event
    ours = {
        event.rank for event in known.values() if killed_at is not None and event.at > killed_at and _is_killed(event)
    }
    known = {rank: event for rank, event in known.items() if rank not in ours}
    failed = [event for event in known.values() if _number(event) not in (None, EXIT_FINISHED, EXIT_STOPPED)]
    shown = [_of_exit(event, first=event is failed[0] if failed else True) for event in known.values()]
    if failed:
        shown = [each for each in shown if each is not None and each.rule != "exit-finished"]
    return [each for each in shown if each is not None]


def _is_killed(event: RankExited) -> bool:
    return (event.signal or (event.code or 0) - _SIGNAL_BASE) in (SIGKILL, SIGTERM)


def found(finding: Finding) -> list[Evidence]:
    """Return what the rules saw of a launch while it ran."""
    return [
        Evidence(
            plane=Plane.APPLICATION,
            rule=finding.rule,
            cause=finding.cause,
            role=Role.ROOT,
            confidence=0.9,
            text=in_words(finding.reasons),
            rank=finding.rank,
            node=finding.node,
        )
    ]


def _number(event: RankExited) -> int | None:
    return -event.signal if event.signal is not None else event.code


def _of_exit(event: RankExited, *, first: bool) -> Evidence | None:
    code, signal = event.code, event.signal
    if code is not None and code > _SIGNAL_BASE and code - _SIGNAL_BASE in SIGNALS:
        signal = code - _SIGNAL_BASE
    if signal is not None:
        unknown = ("exit-signal", Cause.UNKNOWN, Role.CONFIRMATION, 0.2, f"signal {signal}")
        rule, cause, role, confidence, text = SIGNALS.get(signal, unknown)
    elif code is not None:
        unknown = ("exit-error", Cause.EXCEPTION, Role.CONFIRMATION, 0.3, f"exit code {code}")
        rule, cause, role, confidence, text = CODES.get(code, unknown)
    else:
        return None
    if role is Role.ROOT and not first:
        role = Role.CASCADE  # Slurm and torchrun end the others once one has failed
        cause = Cause.CANCELLED if signal == SIGKILL else cause
    return Evidence(
        plane=Plane.APPLICATION,
        rule=rule,
        cause=cause,
        role=role,
        confidence=confidence,
        text=text,
        rank=event.rank,
        node=event.node,
        at=event.at,
    )


def faults(events: Iterable[NodeFaulted]) -> list[Evidence]:
    """Return what faults of nodes show; one that is no reason to leave the node supports others only."""
    newest = {(event.node, event.incident): event for event in events}
    return [
        Evidence(
            plane=Plane.NODE,
            rule="node-fault" if event.leave else "node-hint",
            cause=Cause.NODE_FAULT,
            role=Role.ROOT if event.leave else Role.CONFIRMATION,
            confidence=0.95 if event.leave else 0.4,
            text=f"{event.name} on {event.node}{f' ({event.gpu})' if event.gpu else ''}: {event.why}",
            node=event.node,
            at=event.at,
        )
        for event in newest.values()
    ]


def lost(nodes: Iterable[str], *, at: float | None, why: str) -> list[Evidence]:
    """Return what it shows that watchers stopped answering for good."""
    return [
        Evidence(
            plane=Plane.NODE,
            rule="watcher-lost",
            cause=Cause.NODE_LOST,
            role=Role.ROOT,
            confidence=0.85,
            text=why,
            node=node,
            at=at,
        )
        for node in nodes
    ]


# Slurm's word -> rule, cause, confidence, words
_STATES: tuple[tuple[tuple[str, ...], str, Cause, float, str], ...] = (
    (("OUT_OF_MEMORY",), "slurm-state-memory", Cause.HOST_MEMORY, 0.95, "Slurm: OUT_OF_MEMORY"),
    (("NODE_FAIL", "BOOT_FAIL"), "slurm-state-node", Cause.NODE_LOST, 0.95, "Slurm: a node of the job failed"),
    (("PREEMPTED",), "slurm-state-preempted", Cause.PREEMPTED, 0.97, "Slurm: PREEMPTED"),
    (("TIMEOUT", "DEADLINE"), "slurm-state-time", Cause.TIME_LIMIT, 0.97, "Slurm: the time limit was reached"),
    (("CANCELLED", "REVOKED"), "slurm-state-cancelled", Cause.CANCELLED, 0.9, "Slurm: CANCELLED"),
)


def slurm(facts: Sequence[tuple[float, JobFacts]], *, restarts: int) -> list[Evidence]:
    """Return what Slurm's answers show, each with its instant.

    Args:
        facts: the answers, oldest first.
        restarts: the job's restart count when this attempt began: Slurm's is higher once it requeued the job.
    """
    found = [each for at, job in facts if (each := _of_answer(at, job, restarts)) is not None]
    first: dict[str, Evidence] = {}
    for each in found:
        first.setdefault(each.rule, each)
    return list(first.values())


def _of_answer(at: float, job: JobFacts, restarts: int) -> Evidence | None:
    state = job.slurm_state.upper()
    chosen = next((row for row in _STATES if any(word in state for word in row[0])), None)
    if chosen is None and job.reason == "TimeLimit":
        chosen = _STATES[3]
    if chosen is None and (job.preempt_at is not None):
        chosen = ((), "slurm-preempting", Cause.PREEMPTED, 0.95, "Slurm has set a time for the preemption")
    if chosen is None and job.restarts > restarts:
        chosen = ((), "slurm-requeued", Cause.PREEMPTED, 0.8, "Slurm or an administrator requeued the job")
    if chosen is None:
        return None
    _, rule, cause, confidence, text = chosen
    return Evidence(plane=Plane.SLURM, rule=rule, cause=cause, role=Role.ROOT, confidence=confidence, text=text, at=at)

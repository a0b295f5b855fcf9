"""One training, one fault, and what it cost: the same for every way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

from tests.lab import Lab
from tests.lab.agents import Agents
from tests.lab.jobs import ENDED
from tests.recovery.environment import Peers
from tests.recovery.ways import EVERY, USER, Spot, Way

POLL_S = 0.02
LOOK_S = 0.5  # Slurm is asked no oftener
BEGIN_S = 300.0
PREEMPT_S = 150.0
OVER_S = 5.0  # a job that is over so long is not requeued any more
SETTLE_S = 90.0
WORDS_MAX = 160  # characters of a job's last error
HANG_AFTER_SAVES = 12  # 50 s: who goes by a run's own pace must have seen it
LOST_AFTER_SAVE = 17  # steps that are done since the last save when the fault comes


@dataclass(frozen=True, slots=True)
class Step:
    """One line of what rank 0 told."""

    number: int
    at: float
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls a training."""

    name: str
    what: str
    saves: int
    """How many saves are done before."""
    limit_s: float
    """Who has done no new step by then does not recover."""
    strike: Callable[[Spot, int], float]
    """Do it to a job; return when."""
    loses_node: bool = False

    @property
    def step(self) -> int:
        """After which step it comes."""
        return self.saves * EVERY + LOST_AFTER_SAVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What it cost."""

    way: str
    fault: str
    redone: int | None = None
    """Steps that were done twice."""
    seconds: float | None = None
    """From the fault to the first step that had never been done."""
    struck_at: float = 0.0
    why_not: str = ""


def kill_rank(spot: Spot, _: int) -> float:
    """SIGKILL to rank 1."""
    pid = int((spot.directory / "rank-1.pid").read_text())
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at


def lose_node(spot: Spot, job: int) -> float:
    """The node of the job that is not the batch host loses its power."""
    node = _other_node(spot, job)
    at = time.time()
    spot.lab.kill_node(node)
    if spot.agents:
        spot.agents.kill(node)
    return at


def silence_node(spot: Spot, job: int) -> float:
    """The node of the job that is not the batch host falls silent; its connections stay open."""
    node = _other_node(spot, job)
    at = time.time()
    spot.lab.freeze_node(node)
    if spot.agents:
        spot.agents.kill(node)  # nobody beyond the node is connected to it
    return at


def _other_node(spot: Spot, job: int) -> str:
    found = spot.lab.job(job)
    return next(node for node in found.nodes if node != found.batch_host)


def preempt(spot: Spot, job: int) -> float:
    """An urgent job takes the nodes, and gives them back as soon as it runs."""
    at = time.time()
    urgent = spot.lab.preempt(job)
    spot.lab.wait_job(urgent, "RUNNING", timeout_s=PREEMPT_S)
    spot.lab.release(urgent)
    return at


def hang(spot: Spot, _: int) -> float:
    """Rank 1 stands still in Python code after its next step."""
    (spot.directory / "hang").touch()
    hung = spot.directory / "hung"
    spot.lab.until(lambda: hung.exists() and hung.read_text(), "the hang", BEGIN_S)
    return float(hung.read_text())


def stop(spot: Spot, _: int) -> float:
    """SIGSTOP to rank 1."""
    at = time.time()
    os.kill(int((spot.directory / "rank-1.pid").read_text()), signal.SIGSTOP)
    return at


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="rank", what="kill -9 of a rank", saves=1, limit_s=120.0, strike=kill_rank),
        Fault(name="node", what="loss of a node", saves=1, limit_s=180.0, strike=lose_node, loses_node=True),
        Fault(name="preemption", what="preemption", saves=1, limit_s=180.0, strike=preempt),
        Fault(name="hang", what="hang of a rank", saves=HANG_AFTER_SAVES, limit_s=240.0, strike=hang),
    )
}
STOPPED = Fault(name="stopped", what="SIGSTOP to a rank", saves=HANG_AFTER_SAVES, limit_s=240.0, strike=stop)
"""In no round: `--faults stopped`."""

PRODUCTION_LIMIT_S = 900.0
IN_PRODUCTION: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        replace(FAULTS["node"], what="a node whose connections close", limit_s=PRODUCTION_LIMIT_S),
        Fault(
            name="silent",
            what="a node that falls silent",
            saves=1,
            limit_s=PRODUCTION_LIMIT_S,
            strike=silence_node,
            loses_node=True,
        ),
    )
}
"""Those with production's clocks."""


def play(
    lab: Lab,
    peers: Peers,
    way: Way,
    fault: Fault,
    name: str,
    *,
    own: Sequence[str] = (),
    turn: AbstractContextManager[object] | None = None,
) -> tuple[Outcome, Spot]:
    """Train, strike, and wait for the next new step; leave the lab as it was.

    Args:
        lab: where.
        peers: the environment of the other ways.
        way: who recovers.
        fault: from what.
        name: of a directory that is not there.
        own: the nodes that the job may have, whose feature is the way's name; empty: all.
        turn: held from the submission until the fault has come; None: nothing.
    """
    with ExitStack() as stack:
        agents = stack.enter_context(Agents(lab)) if way.agents else None
        spot = Spot(lab=lab, name=name, peers=peers, constraint=way.name if own else "", agents=agents)
        with turn or nullcontext():
            if agents is not None:
                agents.start(*own)
            spot.prepare()
            job = way.submit(spot)
            try:
                _train(spot, job, way, fault)
                held = lab.job(job).nodes
                struck_at = fault.strike(spot, job)
            except BaseException:
                _leave(lab, job)
                raise
        try:
            outcome = _wait(spot, job, way, fault, struck_at)
        finally:
            _leave(lab, job, held if fault.loses_node else ())
    return outcome, spot


def _train(spot: Spot, job: int, way: Way, fault: Fault) -> None:
    lab, name = spot.lab, spot.name
    lab.until(lambda: _begun(spot, job, fault.step), f"step {fault.step} of {name}\n{_tail(spot)}", BEGIN_S)
    if not way.is_ready(spot):
        lab.until(lambda: way.is_ready(spot), f"what {name} prepares\n{_tail(spot)}", BEGIN_S)
        saves = steps(spot)[-1].number // EVERY + 1  # as long after a save as under the others
        step = saves * EVERY + LOST_AFTER_SAVE
        lab.until(lambda: _begun(spot, job, step), f"step {step} of {name}\n{_tail(spot)}", BEGIN_S)


def _leave(lab: Lab, job: int, lost: Iterable[str] = ()) -> None:
    """End a job, and bring back its lost nodes: without them its end waits for SlurmdTimeout."""
    lab.cancel(job)
    for node in lost:
        lab.thaw_node(node)
        lab.start_node(node, SETTLE_S)
    lab.wait_ended(job, SETTLE_S)
    lab.until(lambda: _nothing_left(lab, job), f"the end of job {job}", SETTLE_S)


def _begun(spot: Spot, job: int, step: int) -> bool:
    if any(each.number >= step for each in steps(spot)):
        return True
    if spot.lab.job(job).state in ENDED:
        raise RuntimeError(f"{spot.name}: the job ended before it trained\n{_tail(spot)}")
    return False


def _wait(spot: Spot, job: int, way: Way, fault: Fault, struck_at: float) -> Outcome:
    limit = time.monotonic() + fault.limit_s - (time.time() - struck_at)
    old = next(each.pid for each in reversed(steps(spot)) if each.at <= struck_at)
    over_since: float | None = None
    looked_at = 0.0
    while time.monotonic() < limit:
        outcome = cost(steps(spot), old, struck_at)
        if outcome is not None:
            return Outcome(way=way.name, fault=fault.name, redone=outcome[0], seconds=outcome[1], struck_at=struck_at)
        if time.monotonic() - looked_at > LOOK_S:
            looked_at = time.monotonic()
            state = spot.lab.job(job).state
            over_since = None if state not in ENDED else over_since or looked_at
            if over_since is not None and looked_at - over_since > OVER_S:
                why_not = f"the job ends as {state}: {_reason(spot, way, fault)}"
                return Outcome(way=way.name, fault=fault.name, why_not=why_not)
        time.sleep(POLL_S)
    why_not = f"no new step within {fault.limit_s:g} s: {_reason(spot, way, fault)}"
    return Outcome(way=way.name, fault=fault.name, why_not=why_not)


def _reason(spot: Spot, way: Way, fault: Fault) -> str:
    """Return why it did not recover, as far as that is known; else what the job said last of an error."""
    lines = [line.strip() for line in _tail(spot).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    last = (errors or lines or ["it says nothing"])[-1]
    return way.reasons.get(fault.name, f"`{last[:WORDS_MAX]}`")


def steps(spot: Spot) -> list[Step]:
    """Return what rank 0 told so far; a line that is being written is left for later."""
    path = spot.directory / "progress"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [Step(int(number), float(at), int(pid)) for number, at, pid in (line.split() for line in lines)]


def cost(told: list[Step], old: int, struck_at: float) -> tuple[int, float] | None:
    """Return the steps redone and the seconds to the first new one; None where there is none yet.

    `old` is the process that was rank 0 when the fault came.  What it still did after the fault counts as done.
    """
    furthest = max(each.number for each in told if each.pid == old)
    later = [each for each in told if each.pid != old and each.at > struck_at]
    new = next((each for each in later if each.number > furthest), None)
    if new is None:
        return None
    return sum(each.number <= furthest for each in later if each.at < new.at), new.at - struck_at


def _nothing_left(lab: Lab, job: int) -> bool:
    return not lab.run("squeue", "--noheader", f"--jobs={job}", check=False).stdout.strip()


def _tail(spot: Spot) -> str:
    return spot.log.read_text(errors="replace")[-2000:] if spot.log.exists() else f"{spot.log}: not there, {USER}"

"""`verdict.json`: whether the node is fit for jobs, for Slurm's hooks, which read this file and ask nobody.

Unfit is only what the agent drains, or will as soon as Slurm answers: a hook that failed where the circuit breaker
forbids a drain would make Slurm itself drain the node.  For the same reason three more are fit: a node whose drain
waits because many agents ask Slurm, one that Slurm returned after the reboot that we asked for, until its checks say
otherwise, and one that has passed them, before it is returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepkeeper.node.core.plan import pending, waits_for_crowd
from stepkeeper.node.core.policy import Mode, Policy
from stepkeeper.node.core.state import Drain, Repair, State
from stepkeeper_trainer.formats.durable import write_atomically

NAME = "verdict.json"
REFRESH_S = 60.0
"""The file is written anew this often: hooks take an old one for none."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON; `fit` comes first, so that a shell can find it."""

    fit: bool
    updated_at: int  # Unix seconds
    node: str
    mode: Mode
    why: str = ""
    incident: str = ""
    format: int = 1


def verdict(state: State, at: float, policy: Policy) -> Verdict:
    """Return what the hooks shall read."""
    wanted = pending(state)
    fit, why, incident = True, "", ""
    if policy.mode is Mode.ACT:
        if wanted and not waits_for_crowd(state, at):
            why, incident = f"{wanted[0].name} {wanted[0].gpu_label}: {wanted[0].why}", wanted[0].id
            fit = False
        if state.drain is not None:
            why = state.drain.reason
            if fit and (comes_back := _comes_back(state.drain)):
                why = f"{comes_back}: {why}"
            else:
                fit = False
    return Verdict(fit=fit, updated_at=int(at), node=state.node, mode=policy.mode, why=why, incident=incident)


def _comes_back(drain: Drain) -> str:
    """Say why a node that we hold may take jobs any moment; "" where it may not."""
    if drain.passed:
        return "the checks have passed"
    if drain.slurm_returns and drain.repair is Repair.REBOOT:
        return "rebooted, and returned by Slurm itself; the checks are under way"
    return ""


class Writer:
    """Writes the newest verdict on a thread of its own: a slow disk delays no drain."""

    def __init__(
        self, path: Path, *, on_error: Callable[[OSError], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        """`on_failure` hears of a mistake of ours: the thread ends with it."""
        self._path = path
        self._on_error = on_error
        self._on_failure = on_failure
        self._changed = threading.Event()
        self._newest: Verdict | None = None
        threading.Thread(target=self._write, name="verdict", daemon=True).start()

    def show(self, verdict: Verdict) -> None:
        """Hand over the newest verdict; returns at once."""
        self._newest = verdict
        self._changed.set()

    def _write(self) -> None:
        try:
            self._write_on()
        except BaseException as error:  # noqa: BLE001 - handed to the loop, which raises it
            self._on_failure(error)

    def _write_on(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                write_atomically(self._path, msgspec.json.encode(self._newest) + b"\n", mode=0o644)
            except OSError as error:
                self._on_error(error)

"""The agent looks at its own setup when it starts, and again as long as something is wrong with it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import structlog

from stepkeeper.doctor.finding import Finding, Level
from stepkeeper.node import setup
from stepkeeper.node.config import NodeConfig
from stepkeeper.node.core.plan import fraction
from stepkeeper.node.inbox import Do, Inbox
from stepkeeper.slurm.nodes import NodeClient

SPREAD_S = 10.0  # all nodes may start at once
AGAIN_S = 15.0
AGAIN_MAX_S = 3600.0


class SetupWatch:
    """Looks on a thread of its own, and logs on the agent's loop."""

    def __init__(
        self,
        config: NodeConfig,
        client: NodeClient,
        *,
        inbox: Inbox,
        log: structlog.typing.FilteringBoundLogger,
        stopped: threading.Event,
        on_change: Callable[[], None],
    ) -> None:
        self.wrong: tuple[str, ...] = ()  # the subjects that have a problem
        self._config = config
        self._client = client
        self._inbox = inbox
        self._log = log
        self._stopped = stopped
        self._on_change = on_change

    def start(self) -> None:
        """Begin to look."""
        self._inbox.run_thread("setup", self._look)

    def _look(self) -> None:
        self._stopped.wait(SPREAD_S * fraction(self._config.name))
        pause_s, patient = AGAIN_S, True
        while not self._stopped.is_set():
            facts = setup.gather(self._config, self._client)
            found = setup.examine(self._config, facts)
            if not (facts.may_come_later and patient):  # at boot driver and Slurm come after us
                self._inbox.put(Do(functools.partial(self._note, found)))
            if not facts.may_come_later and all(each.level is not Level.PROBLEM for each in found):
                return
            self._stopped.wait(pause_s)
            pause_s, patient = min(2 * pause_s, AGAIN_MAX_S), False

    def _note(self, found: Sequence[Finding]) -> None:
        wrong = tuple(each.subject for each in found if each.level is Level.PROBLEM)
        if wrong != self.wrong or not wrong:
            for each in found:
                said = {"subject": each.subject, "found": each.found, "means": each.means, "remedy": each.remedy}
                if each.level is Level.PROBLEM:
                    self._log.error("setup_problem", **said)
                elif each.level is Level.WARNING:
                    self._log.warning("setup_warning", **said)
        self.wrong = wrong
        self._on_change()

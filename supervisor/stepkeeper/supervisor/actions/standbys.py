"""Warm standbys: one process a rank that has imported torch and waits for the next launch of the allocation.

They are of the run and no part of the training: nothing is decided by them, and a launch that finds none starts its
ranks as ever.  One Slurm step on the launch's nodes holds their keepers.

Where they are to be there always, that step stays for as long as launches are on these nodes; a spare is asked for when
a launch has done a step that is new, so that it imports beside training that works.  Else they are started where a
relaunch is likely and not yet certain: they import while the second look at a rank, or at a node, is waited for.  They
leave at the next step that is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence

import msgspec

from stepkeeper import standby as program
from stepkeeper import wrapper
from stepkeeper.core import events as on
from stepkeeper.core.placement import places, without_nodes
from stepkeeper.core.silence import only_tells
from stepkeeper.core.state import Next, Phase, State
from stepkeeper.log import Log, PatientStream
from stepkeeper.redaction import redact
from stepkeeper.run_store.lines import parsed
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm import cmd as lines
from stepkeeper.slurm.launch import own_standby_argv, standby_argv
from stepkeeper.supervisor.actions.launch import SRUN_LOG, Job, Meeting, launch_environment
from stepkeeper.supervisor.sources.process import Inbox, Part
from stepkeeper.supervisor.srun import Srun

ENDED = ((3.0, signal.SIGTERM), (10.0, signal.SIGKILL))
SUSPECTED_AGAIN_S = 600.0  # a rank that sleeps again and again must not have torch imported each time
ERROR_CHARACTERS_MAX = 300
TORCHRUN, OMP = "torchrun", "OMP_NUM_THREADS"
RANKS, AGENTS = "ranks", "agents"
LOG = "standby.log"  # beside the logs of an attempt's launches
VARIABLE, WORDS, PYTHON = "STEPKEEPER_STANDBY", "STEPKEEPER_STANDBY_WORDS", "STEPKEEPER_STANDBY_PYTHON"
_SITE = os.path.join(os.path.dirname(os.path.abspath(wrapper.__file__)), "standby_site")
_BEGINNING_CHARACTERS = 1000
_LABEL = re.compile(rb"\s*\d+: ")  # of srun, where the user's own line has `--label`
_OVER = (Phase.CLOSING, Phase.REQUEUEING, Phase.DONE)
_OOM = "oom"  # of the kernel's word on a standby's step, whose ranks are the launch's


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a keeper's."""

    standby: str  # `ready`, `gone`, `taken` or `refused`
    node: str
    slot: str
    of: int = 1  # so many keepers are in the step
    rss_mib: int = 0
    why: str = ""


_said = msgspec.json.Decoder(Said)


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How standbys stand in for the ranks of a CMD."""

    prefix: list[str] = []  # the words with which a rank is started, up to its script or -m; empty: none can be
    why_not: str = ""
    slot: str = ""  # where its own Python hands a rank over: the variable that says which of a node's ranks it is
    own: lines.OwnStandby | None = None  # of a user's own srun line
    agent: list[str] = []  # the words with which torchrun itself is started, where a standby stands in for that too
    is_script: bool = False  # its Python is named by its shebang, and not in CMD


def way(job: Job, environment: Mapping[str, str]) -> Way:
    """Return how standbys stand in for the ranks of this CMD, or why none can."""
    if not job.wrapped:
        own = lines.own_standby(job.command)
        if own is None:
            return Way(why_not="CMD is an own srun line, and not `srun OPTIONS [env NAME=VALUE] python script.py`")
        return Way(prefix=own.prefix, own=own, slot="SLURM_LOCALID")
    if job.launcher and not job.torchrun:
        python = lines.python_of(_beginning(job.command[0], environment))
        prefix = lines.torchrun_standby(job.command, python)
        if prefix is None:
            return Way(why_not="CMD starts ranks itself, and is not `torchrun OPTIONS script.py`")
        agent = lines.standby_prefix(job.command)
        return Way(prefix=prefix, slot="LOCAL_RANK", agent=agent or python, is_script=agent is None)
    prefix = lines.standby_prefix(job.command)
    if prefix is None:
        return Way(why_not="CMD is not `python script.py` or `python -m module`")
    if not job.torchrun:
        return Way(prefix=prefix)
    return Way(
        prefix=prefix, slot="LOCAL_RANK", agent=lines.python_of(_beginning(TORCHRUN, environment)), is_script=True
    )


def _beginning(name: str, environment: Mapping[str, str]) -> str:
    """Return how a program begins, which says by which Python it runs."""
    with (
        contextlib.suppress(OSError),  # the launch says that there is none
        open(shutil.which(name, path=environment.get("PATH")) or name, encoding="utf-8", errors="replace") as file,
    ):
        return file.read(_BEGINNING_CHARACTERS)
    return ""


class Standbys:
    """Those of one attempt.  All methods are for the loop and never wait."""

    def __init__(
        self,
        job: Job,
        environment: Mapping[str, str],
        *,
        always: bool,
        modules: Sequence[str] = (),
        inbox: Inbox,
        log: Log,
    ) -> None:
        """Do nothing yet.

        Args:
            job: what the ranks of the attempt have in common.
            environment: of the supervisor, which the ranks inherit.
            always: beside all training; else only where a relaunch is likely.
            modules: to import besides torch and the trainer library.
            inbox: for the threads.
            log: for what becomes of them.
        """
        self._job, self._environment, self._modules, self._always = job, environment, modules, always
        self._inbox, self._log = inbox, log
        self._way = way(job, environment)
        self._steps: list[_Step] = []  # of the ranks, and of torchrun where there is one
        self._ahead: list[_Step] = []  # the same, without nodes that may be lost
        self._former: list[_Step] = []  # which leave, and may hold the ranks that run
        self._serial = 0
        self._furthest = -1
        self._prepared: int | None = None  # the newest launch whose spares were asked for
        self._again_at = 0.0  # from then on they are started in the same launch again, where none are there
        if self._way.why_not and always:
            log.warning("standby_impossible", why=self._way.why_not)

    def look(self, event: on.Event, state: State) -> None:
        """Take in what has just been decided."""
        if self._way.why_not:
            return
        if state.phase in _OVER:
            self.close()
        elif state.leaving.plan is not None and state.leaving.plan.next is not Next.RELAUNCH:
            for step in self._all:
                step.leave()  # ranks among them come to their end
        elif isinstance(event, on.Suspected):
            self._prepare_for(event, state)
        elif isinstance(event, on.Progressed) and state.phase is Phase.TRAINING and event.launch == state.launch.number:
            is_new = event.step > self._furthest
            self._furthest = max(self._furthest, event.step)
            if not self._always:
                self._retire()
            elif is_new and self._prepared != state.launch.number:
                self._prepared = state.launch.number
                self._prepare(state.launch.number, state.launch.nodes)

    def renew(self) -> None:
        """Tell them that the supervisor lives."""
        for step in self._all:
            step.say("alive")

    def variables(self, launch: int, nodes: tuple[str, ...]) -> dict[str, str]:
        """Return what has the ranks of a launch on these nodes look for a standby; ends those of another world."""
        made = (self._steps, self._ahead)
        fitting: list[_Step] = next((each for each in made if each and each[0].runs and each[0].nodes == nodes), [])
        for step in self._all:
            if step not in fitting:
                step.close()
        self._steps, self._ahead, self._former = fitting, [], []
        if not fitting or not fitting[0].has_spares:
            return {}
        ranks, *agents = fitting
        ranks.expect(launch)
        way = self._way
        if not way.slot:
            return {VARIABLE: ranks.address, WORDS: str(len(way.prefix))}
        found = self._hook(ranks.address)
        if agents and agents[0].runs:
            agents[0].expect(launch)
            found[VARIABLE] = agents[0].address
            found |= {PYTHON: way.agent[0]} if way.is_script else {WORDS: str(len(way.agent))}
        return found

    def close(self) -> None:
        """End all."""
        for step in self._all:
            step.close()
        self._steps, self._ahead, self._former = [], [], []

    @property
    def _all(self) -> list[_Step]:
        return [*self._steps, *self._ahead, *self._former]

    def _prepare_for(self, suspected: on.Suspected, state: State) -> None:
        """Have standbys where the next launch will be if the suspicion is right; those that are there stay as well."""
        launch = state.launch
        if suspected.rank is None:
            nodes = places(without_nodes(state, suspected.nodes)) if state.phase is Phase.STARTING else ()
            if nodes and all(step.nodes != nodes for step in (*self._steps, *self._ahead)):
                for step in self._ahead:
                    step.close()
                self._ahead = self._begin(launch.number, nodes)
            return
        again = not self._steps and suspected.at >= self._again_at
        if state.phase is Phase.TRAINING and (self._prepared != launch.number or again) and not only_tells(state):
            self._prepared, self._again_at = launch.number, suspected.at + SUSPECTED_AGAIN_S
            self._prepare(launch.number, launch.nodes)

    def _retire(self) -> None:
        """Have all leave; a rank among them comes to its own end."""
        for step in self._steps:
            step.leave()
        self._former = [step for step in (*self._former, *self._steps) if step.runs]
        self._steps = []

    def _hook(self, address: str) -> dict[str, str]:
        """Return what has a rank's own Python hand over."""
        behind = self._environment.get("PYTHONPATH")
        path = _SITE if behind is None else f"{_SITE}:{behind}"
        return {wrapper.HOOK: address, wrapper.SLOT: self._way.slot, "PYTHONPATH": path}

    def _prepare(self, launch: int, nodes: tuple[str, ...]) -> None:
        if any(step.nodes != nodes or not step.runs for step in self._steps):
            self._retire()  # ranks may be in those that run
        if not self._steps:
            self._steps = self._begin(launch, nodes)
        else:
            for step in self._steps:
                step.say("prepare")

    def _begin(self, launch: int, nodes: tuple[str, ...]) -> list[_Step]:
        self._serial += 1
        steps = [self._of_ranks(launch, nodes)]
        if self._way.agent:
            steps.append(self._of_agents(launch, nodes, steps[0].address))
        for step in steps:
            step.say("prepare")
        return steps

    def _of_ranks(self, launch: int, nodes: tuple[str, ...]) -> _Step:
        job, own = self._job, self._way.own
        program = _program(self._way.prefix, self._modules)
        if own is not None:
            return self._start(launch, nodes, RANKS, own_standby_argv(own.options, own.before, program), {})
        geometry, more = job.geometry, {}
        if job.launcher:
            each = job.ranks(nodes[:1]) or geometry.tasks_per_node
            geometry = geometry.with_tasks(each)
            if each > 1 and OMP not in self._environment:
                more[OMP] = "1"  # as torchrun gives its ranks
        return self._start(launch, nodes, RANKS, standby_argv(nodes, geometry, program), more)

    def _of_agents(self, launch: int, nodes: tuple[str, ...], ranks: str) -> _Step:
        program = _program(self._way.agent, ("torch.distributed.run",))
        argv = standby_argv(nodes, self._job.geometry.with_tasks(1), program)
        return self._start(launch, nodes, AGENTS, argv, self._hook(ranks))

    def _start(self, launch: int, nodes: tuple[str, ...], what: str, argv: list[str], more: Mapping[str, str]) -> _Step:
        meeting = Meeting(launch=launch, nodes=nodes, address="", port=0, resume_from=None)
        environment = launch_environment(self._job, meeting, {**self._environment, **more})
        environment.pop("SLURMD_NODENAME", None)  # each task has its own; by the batch host's, watchers would end srun
        return _Step(
            self._job,
            nodes,
            launch,
            what=what,
            argv=argv,
            environment=environment,
            serial=self._serial,
            inbox=self._inbox,
            log=self._log,
        )


def _program(prefix: Sequence[str], modules: Sequence[str]) -> list[str]:
    return [*prefix, os.path.abspath(program.__file__), *modules, "--", *prefix]


class _Step:
    """One Slurm step of keepers."""

    def __init__(
        self,
        job: Job,
        nodes: tuple[str, ...],
        launch: int,
        *,
        what: str,
        argv: list[str],
        environment: Mapping[str, str],
        serial: int,
        inbox: Inbox,
        log: Log,
    ) -> None:
        self.nodes, self._launch, self._what = nodes, launch, what
        self.address = f"{job.socket}/standby-{serial}-{what}"  # those of a step before may still be about to leave
        self._job, self._inbox, self._log = job, inbox, log
        self._srun = Srun(
            inbox, Part.STANDBYS, "standby", on_word=self._on_word, on_line=self._hear, errors=Part.STANDBYS
        )
        self.has_spares = False
        """Whether spares were asked for since a launch was to take them."""
        self._leaving = self._closed = False
        self._ready: dict[tuple[str, str], int] = {}  # node, slot -> MiB
        self._taken = self._of = 0  # keepers that have a rank, and how many there are
        self._error = ""
        logs = RunDirectory(job.run_directory)
        self._words = PatientStream(lambda: (logs.logs(job.attempt, 0).parent / LOG).open("a", encoding="utf-8"))
        theirs = {**environment, VARIABLE: self.address}
        inbox.run(Part.STANDBYS, lambda: self._run(argv, theirs), name="standby")

    @property
    def runs(self) -> bool:
        """Tell whether the step has not ended."""
        return not self._srun.ended.is_set()

    def say(self, word: str) -> None:
        """Tell every keeper."""
        if word == "prepare":
            self.has_spares = True
            self._ready.clear()
        self._srun.say(word.encode() + b"\n")

    def expect(self, launch: int) -> None:
        """Their ranks will be those of this launch."""
        self.has_spares = False
        self._launch, self._taken = launch, 0

    def leave(self) -> None:
        """Have those leave that wait, and the others when their rank has ended."""
        if not self._leaving:
            self._leaving = True
            self.say("quit")

    def close(self) -> None:
        """Have them leave, and see to it that the step ends."""
        if not self._closed:
            self._closed = True
            self.leave()
            self._srun.say(None)
            self._inbox.run(Part.STANDBYS, lambda: self._srun.end(ENDED), name="standby-end")

    # --- threads ----------------------------------------------------------------------------------

    def _run(self, argv: list[str], environment: dict[str, str]) -> None:
        try:
            wait = self._srun.run(argv, environment)
        except OSError as failure:
            self._srun.ended.set()
            self._log.warning("standby_ended", why=f"srun: {failure.strerror}")
            return
        code = wait()
        if not self._leaving:
            self._log.warning("standby_ended", why=self._error or f"srun ended with {code}")

    def _hear(self, line: bytes) -> None:
        said = parsed(_said, _LABEL.sub(b"", line, count=1))
        if said is None:
            return  # what a module says when it is imported
        if said.standby == "ready":
            self._ready[said.node, said.slot] = said.rss_mib
            self._of = said.of
            if len(self._ready) < said.of:
                return
            mib = max(self._ready.values())
            if self._what == RANKS:
                self._log.info("standby_ready", ranks=said.of, mib=mib)
            else:
                self._log.info("standby_of_torchrun_ready", nodes=said.of, mib=mib)
        elif said.standby == "taken":
            self._taken += 1
            if self._taken == self._of and self._what == RANKS:  # the wrapper tells of torchrun itself
                self._log.info("standby_taken", launch=self._launch, ranks=self._taken)
        else:
            name = "standby_gone" if said.standby == "gone" else "standby_refused"
            self._log.warning(name, node=said.node, slot=said.slot, why=redact(said.why))

    def _on_word(self, text: str) -> None:
        """Keep what srun and the standbys say; what is of memory is the launch's, if its ranks are in this step."""
        self._words.write(text + "\n")
        self._error = text[:ERROR_CHARACTERS_MAX]
        if _OOM in text.lower() and self._taken:
            path = RunDirectory(self._job.run_directory).logs(self._job.attempt, self._launch) / SRUN_LOG
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")  # a full disk: the exit by SIGKILL is reported all the same

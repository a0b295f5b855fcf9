"""What each message of a peer gets: checked against who the peer is, never against what it says of itself."""

from __future__ import annotations

import queue
import re
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from stepkeeper.log import Log
from stepkeeper.loop_tools import RateLimiter, thread
from stepkeeper.node_agent import protocol
from stepkeeper.node_agent.connections import ROOT, BoundedLog, Connection, Limits, RateLimiters, job_of
from stepkeeper.node_agent.expedite_requeue import RequeueExpediter, RequeueRequest
from stepkeeper.node_agent.protocol import Accepted, ExpediteRequeue, Join, Joined, Look, Refused, Seen, ToAgent
from stepkeeper.slurm.client import OwnedJob, SlurmError
from stepkeeper.slurm.nodes import NodeCommands

if TYPE_CHECKING:
    from stepkeeper.node_agent.server import AgentSocket

Answer = OwnedJob | SlurmError


class Questions:
    """Asks Slurm whose job it is, on a thread of its own: a controller that is away must not stop the socket."""

    def __init__(self, client: NodeCommands, most: int, on_failure: Callable[[BaseException], None]) -> None:
        """At `most` so many wait."""
        self._client = client
        self._queue: queue.Queue[tuple[int, Callable[[Answer], None]] | None] = queue.Queue(most)
        self._thread = thread("socket-questions", self._work, on_failure)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self, job_id: int, answered: Callable[[Answer], None]) -> bool:
        """Have Slurm asked; `answered` comes on our thread.  False: too many wait."""
        try:
            self._queue.put_nowait((job_id, answered))
        except queue.Full:
            return False
        return True

    def close(self, within_s: float) -> None:
        """End the thread, after the call that it may be in."""
        try:
            self._queue.put(None, timeout=within_s)
        except queue.Full:
            return  # a daemon thread: it ends with the process
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            job_id, answered = item
            try:
                answer: Answer = self._client.owned_job(job_id)
            except SlurmError as error:
                answer = error
            answered(answer)


NUMBER_MAX = 2**32  # of job ids and restart counts
WHY_CHARACTERS_MAX = 200
_HERE = frozenset(("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"))
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")


class Requests:
    """Decides on `Join`, `Look` and `ExpediteRequeue`.  Every method runs on the serving thread."""

    def __init__(
        self,
        server: AgentSocket,
        *,
        node: str,
        acts: bool,
        version: str,
        client: NodeCommands,
        expediter: RequeueExpediter,
        on_look: Callable[[], None],
        open_incidents: Callable[[], list[Seen]],
        log: Log,
        refusals: BoundedLog,
        limits: Limits,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._server = server
        self._joined = Joined(node=node, acts=acts, version=version)
        self._not_yours = f"not a job of yours on {node}"  # whether another user's job exists is not said
        self._expediter = expediter
        self._on_look = on_look
        self._open_incidents = open_incidents
        self._log = log
        self._refusals = refusals
        self._limits = limits
        self.questions = Questions(client, limits.questions_max, on_failure)
        self._asking: Counter[int] = Counter()  # questions that wait, by uid
        self._questions = RateLimiter(*limits.questions)
        self._questions_of = RateLimiters(limits.questions_per_uid, limits.uids_max)
        self._looks = RateLimiter(*limits.looks)
        self._looks_of = RateLimiters(limits.looks_per_uid, limits.uids_max)
        self._expedites_of = RateLimiters(limits.expedites_per_uid, limits.uids_max)
        self._granted = BoundedLog(log, limits)

    def handle(self, connection: Connection, message: ToAgent, now: float) -> None:
        """Answer one message, now or later."""
        match message:
            case Join():
                self._join(connection, message, now)
            case Look():
                self._look(connection, message, now)
            case ExpediteRequeue():
                self._expedite(connection, message, now)
            case _:
                assert_never(message)

    # -- join ---------------------------------------------------------------------------------------------------

    def _join(self, connection: Connection, join: Join, now: float) -> None:
        peer = connection.peer
        if not (0 < join.job_id < NUMBER_MAX and 0 <= join.restart_count < NUMBER_MAX):
            self._refuse(connection, "join", "no such job", now)
            return
        if connection.asking:
            self._refuse(connection, "join", "busy with the one before", now)
            return
        if peer.uid == ROOT:
            self._joins(connection, join, "root", now)
            return
        member = job_of(connection.socket, peer)
        if member is not None and member.job_id == join.job_id and member.node in ("", self._joined.node):
            self._joins(connection, join, "control group", now)
            return
        if not self._ask(connection.number, peer.uid, join, now):
            self._refuse(connection, "join", "busy: ask again in a few seconds", now)
            return
        connection.asking = True
        self._asking[peer.uid] += 1

    def _ask(self, number: int, uid: int, join: Join, now: float) -> bool:
        """Have Slurm asked, where that is not too much of one user or of all."""

        def answered(answer: Answer) -> None:
            self._server.post(lambda now: self._judge(number, uid, join, answer, now))

        busy = self._asking[uid] >= self._limits.questions_per_uid_max
        if busy or not self._questions_of.take(uid, now) or not self._questions.take(now):
            return False
        return self.questions.ask(join.job_id, answered)

    def _judge(self, number: int, uid: int, join: Join, answer: Answer, now: float) -> None:
        self._asking[uid] -= 1
        self._asking += Counter()  # drops the users of whom none waits
        connection = self._server.connection(number)
        if connection is None:
            return  # it left while Slurm was asked
        connection.asking = False
        if isinstance(answer, SlurmError):
            why = "Slurm does not answer" if answer.unreachable else self._not_yours
            self._refuse(connection, "join", why, now)
        elif answer.uid != connection.peer.uid or self._joined.node not in answer.nodes or answer.state not in _HERE:
            self._refuse(connection, "join", self._not_yours, now)
        else:
            self._joins(connection, join, "Slurm", now)

    def _joins(self, connection: Connection, join: Join, by: str, now: float) -> None:
        again = connection.job_id == join.job_id
        connection.job_id, connection.restart_count = join.job_id, join.restart_count
        if not again and (left_out := self._granted.room(now, connection.peer.uid)) is not None:
            self._log.info(
                "job_joined",
                job=join.job_id,
                uid=connection.peer.uid,
                by=by,
                restart=join.restart_count,
                left_out=left_out,
            )
        self._expediter.joined(join.job_id, join.restart_count)
        self._server.send(connection.number, self._joined)
        for seen in self._open_incidents():
            self._server.send(connection.number, seen)

    # -- look ---------------------------------------------------------------------------------------------------

    def _look(self, connection: Connection, look: Look, now: float) -> None:
        uid = connection.peer.uid
        if look.job_id != connection.job_id:
            self._refuse(connection, "look", "join with this job first", now)
        elif not self._looks_of.take(uid, now) or not self._looks.take(now):
            self._refuse(connection, "look", "too often: the agent also checks on its own schedule", now)
        else:
            why = _UNPRINTABLE.sub(" ", look.why[:WHY_CHARACTERS_MAX])
            self._log.info("look_asked", job=look.job_id, uid=uid, why=why)
            self._on_look()

    # -- expedite -------------------------------------------------------------------------------------------------

    def _expedite(self, connection: Connection, expedite: ExpediteRequeue, now: float) -> None:
        uid = connection.peer.uid
        exclude = None if expedite.exclude is None else tuple(dict.fromkeys(expedite.exclude))
        job_request = RequeueRequest(
            job_id=expedite.job_id,
            uid=None if uid == ROOT else uid,
            restart_count=expedite.restart_count,
            exclude=exclude,
        )
        if expedite.job_id != connection.job_id:
            self._refuse(connection, "hasten", "join with this job first", now)
        elif not self._newest_attempt(expedite.job_id) <= expedite.restart_count < NUMBER_MAX:
            self._refuse(connection, "hasten", "a later attempt of the job has joined", now)
        elif len(expedite.exclude or ()) > protocol.EXCLUDE_MAX:
            self._refuse(connection, "hasten", f"more than {protocol.EXCLUDE_MAX} nodes to exclude", now)
        elif not all(_NODE_NAME.fullmatch(name) for name in exclude or ()):
            self._refuse(connection, "hasten", "a name in `exclude` that no node can have", now)
        elif not self._joined.acts:
            self._refuse(connection, "hasten", "the agent only observes", now)
        elif uid != ROOT and not self._expedites_of.take(uid, now):
            self._refuse(connection, "hasten", "too often: ask again in a minute", now)
        elif not self._expediter.add(job_request):
            self._refuse(connection, "hasten", "busy with other jobs", now)
        else:
            if (left_out := self._granted.room(now, uid)) is not None:
                self._log.info("expedite_accepted", job=expedite.job_id, uid=uid, exclude=exclude, left_out=left_out)
            self._server.send(connection.number, Accepted())

    def _newest_attempt(self, job_id: int) -> int:
        return max(self._server.newest_attempt(job_id), self._expediter.newest_attempt(job_id))

    def _refuse(self, connection: Connection, what: str, why: str, now: float) -> None:
        self._refusals.refused(now, uid=connection.peer.uid, what=what, why=why, pid=connection.peer.pid)
        self._server.send(connection.number, Refused(what=what, why=why))

"""What each message of a peer gets: checked against who the peer is, never against what it says of itself."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol, assert_never

import msgspec
import structlog

from stepkeeper.node_agent import protocol
from stepkeeper.node_agent.connections import ROOT, BoundedLog, Bucket, Buckets, Connection, JoinedJobs, Limits, job_of
from stepkeeper.node_agent.expedite_requeue import RequeueExpediter, RequeueRequest
from stepkeeper.node_agent.protocol import (
    Accepted,
    ExpediteRequeue,
    FromAgent,
    Join,
    Joined,
    Look,
    Looked,
    Refused,
    Seen,
    ToAgent,
)
from stepkeeper.slurm.client import NodeClient, OwnedJob, SlurmError

# Slurm is asked whose job it is on a thread of its own: a controller that is away must not stop the socket.

Answer = OwnedJob | SlurmError


class Questions:
    """Asks `owned_job`.  `ask` is called on one thread only, and `answered` comes on the asking one."""

    def __init__(self, client: NodeClient, limits: Limits, on_failure: Callable[[BaseException], None]) -> None:
        self._client = client
        self._limits = limits
        self._on_failure = on_failure
        self._queue: queue.Queue[tuple[int, int, Callable[[Answer], None]] | None] = queue.Queue(limits.questions_max)
        self._lock = threading.Lock()
        self._waiting: Counter[int] = Counter()  # by uid
        self._kept: OrderedDict[int, tuple[float, Answer]] = OrderedDict()
        self._rate = Bucket(limits.questions_per_s, limits.questions_burst, time.monotonic())
        self._rates = Buckets(limits.questions_per_uid_per_s, limits.questions_per_uid_burst, limits.uids_max)
        self._thread = threading.Thread(target=self._work, name="socket-questions", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self, job_id: int, uid: int, answered: Callable[[Answer], None]) -> bool:
        """Have Slurm asked; False: too many questions.  `answered` may come at once, or later on our thread."""
        now = time.monotonic()
        with self._lock:
            kept = self._kept.get(job_id)
            busy = self._waiting[uid] >= self._limits.questions_per_uid_max
        if kept is not None and now - kept[0] < self._limits.answers_kept_s:
            answered(kept[1])
            return True
        if busy or not self._rates.take(uid, now) or not self._rate.take(now):
            return False
        with self._lock:
            self._waiting[uid] += 1
        try:
            self._queue.put_nowait((job_id, uid, answered))
        except queue.Full:
            self._forget(uid)
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
        try:
            while (item := self._queue.get()) is not None:
                self._answer(*item)
        except BaseException as error:  # noqa: BLE001 - handed to the server that owns the socket
            self._on_failure(error)

    def _answer(self, job_id: int, uid: int, answered: Callable[[Answer], None]) -> None:
        answer: Answer
        try:
            answer = self._client.owned_job(job_id)
        except SlurmError as error:
            answer = error
        with self._lock:
            if not (isinstance(answer, SlurmError) and answer.unreachable):
                self._kept[job_id] = (time.monotonic(), answer)
                self._kept.move_to_end(job_id)
                if len(self._kept) > self._limits.answers_kept:
                    self._kept.popitem(last=False)
        self._forget(uid)
        answered(answer)

    def _forget(self, uid: int) -> None:
        with self._lock:
            self._waiting[uid] -= 1
            if self._waiting[uid] <= 0:
                del self._waiting[uid]


NUMBER_MAX = 2**32  # of job ids and restart counts
ORDINAL_MAX = 1024
WHY_CHARACTERS_MAX = 200
_HERE = frozenset(("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"))
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PCI = re.compile(r"[0-9a-fA-F:.]{0,32}")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")


class LookRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job asks the agent to look at its GPUs.  A hint where to look, never evidence."""

    connection: int
    number: int
    job_id: int
    uid: int
    pci: str = ""
    ordinal: int | None = None
    why: str = ""  # printable ASCII


class Server(Protocol):
    """What the requests need of the thread that serves the connections."""

    def send(self, number: int, message: FromAgent) -> None:
        """Send to a connection, if it is still there.  On the serving thread only."""
        ...

    def post(self, call: Callable[[float], None]) -> None:
        """Have something done on the serving thread, from any thread; it gets the time then."""
        ...

    def connection(self, number: int) -> Connection | None:
        """Return a connection that is still there."""
        ...


class Requests:
    """Decides on `Join`, `Look` and `ExpediteRequeue`.  Every method runs on the serving thread."""

    def __init__(
        self,
        server: Server,
        *,
        node: str,
        acts: bool,
        version: str,
        client: NodeClient,
        expediter: RequeueExpediter,
        on_look: Callable[[LookRequest], None],
        open_incidents: Callable[[], list[Seen]],
        log: structlog.typing.FilteringBoundLogger,
        refusals: BoundedLog,
        limits: Limits,
        on_failure: Callable[[BaseException], None],
        now: float,
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
        self.questions = Questions(client, limits, on_failure)
        self.jobs = JoinedJobs(jobs_max=limits.jobs_max, per_uid_max=limits.jobs_per_uid_max)
        self._looks = Bucket(limits.looks_per_s, limits.looks_burst, now)
        self._looks_of = Buckets(limits.looks_per_uid_per_s, limits.looks_per_uid_burst, limits.uids_max)
        self._expedites_of = Buckets(limits.expedites_per_uid_per_s, limits.expedites_per_uid_burst, limits.uids_max)
        self._granted = BoundedLog(log, limits, now)
        self._look_number = 0

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
        connection.asking = True
        number = connection.number

        def answered(answer: Answer) -> None:
            self._server.post(lambda now: self._judge(number, join, answer, now))

        if not self.questions.ask(join.job_id, peer.uid, answered):
            connection.asking = False
            self._refuse(connection, "join", "busy: ask again in a few seconds", now)

    def _judge(self, number: int, join: Join, answer: Answer, now: float) -> None:
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
        connection.job_id = join.job_id
        self.jobs.add(join.job_id, connection.peer.uid, join.restart_count)
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
        if connection.job_id is None or look.job_id != connection.job_id:
            self._refuse(connection, "look", "join with this job first", now)
            return
        wrong_ordinal = look.ordinal is not None and not 0 <= look.ordinal < ORDINAL_MAX
        if wrong_ordinal or not _PCI.fullmatch(look.pci):
            self._refuse(connection, "look", "no such GPU", now)
            return
        full = len(connection.looks) >= self._limits.looks_waiting_max
        if full or not self._looks_of.take(uid, now) or not self._looks.take(now):
            self._refuse(connection, "look", "too often: the agent also checks on its own schedule", now)
            return
        self._look_number += 1
        connection.looks[self._look_number] = now + self._limits.look_within_s
        why = _UNPRINTABLE.sub(" ", look.why[:WHY_CHARACTERS_MAX])
        self._log.info("look_asked", job=look.job_id, uid=uid, pci=look.pci, ordinal=look.ordinal, why=why)
        self._on_look(
            LookRequest(
                connection=connection.number,
                number=self._look_number,
                job_id=look.job_id,
                uid=uid,
                pci=look.pci.lower(),
                ordinal=look.ordinal,
                why=why,
            )
        )

    def looked(self, request: LookRequest, found: int) -> None:
        """Tell the asker what the agent found."""
        connection = self._server.connection(request.connection)
        if connection is not None and connection.looks.pop(request.number, None) is not None:
            self._server.send(connection.number, Looked(found=found))

    def give_up_looks(self, connection: Connection, now: float) -> None:
        """Answer looks that the agent did not get to."""
        for number, until in list(connection.looks.items()):
            if now > until:
                del connection.looks[number]
                self._refuse(connection, "look", "the agent did not get to it in time", now)

    # -- expedite -------------------------------------------------------------------------------------------------

    def _expedite(self, connection: Connection, expedite: ExpediteRequeue, now: float) -> None:
        uid = connection.peer.uid
        job = self.jobs.joined_by(expedite.job_id, uid)
        if job is None:
            self._refuse(connection, "hasten", "join with this job first", now)
        elif not job.restart_count <= expedite.restart_count < NUMBER_MAX:
            self._refuse(connection, "hasten", "a later attempt of the job has joined", now)
        elif len(expedite.exclude or ()) > protocol.EXCLUDE_MAX:
            self._refuse(connection, "hasten", f"more than {protocol.EXCLUDE_MAX} nodes to exclude", now)
        elif not all(_NODE_NAME.fullmatch(name) for name in expedite.exclude or ()):
            self._refuse(connection, "hasten", "a name in `exclude` that no node can have", now)
        elif not self._joined.acts:
            self._refuse(connection, "hasten", "the agent only observes", now)
        else:
            job_request = RequeueRequest(
                job_id=expedite.job_id,
                uid=None if uid == ROOT else uid,
                restart_count=expedite.restart_count,
                exclude=None if expedite.exclude is None else tuple(dict.fromkeys(expedite.exclude)),
            )
            if uid != ROOT and not self._expediter.knows(job_request) and not self._expedites_of.take(uid, now):
                self._refuse(connection, "hasten", "too often: ask again in a minute", now)
                return
            if not self._expediter.add(job_request):
                self._refuse(connection, "hasten", "busy with other jobs", now)
                return
            if (left_out := self._granted.room(now, uid)) is not None:
                self._log.info(
                    "expedite_accepted", job=expedite.job_id, uid=uid, exclude=job_request.exclude, left_out=left_out
                )
            self._server.send(connection.number, Accepted())

    def _refuse(self, connection: Connection, what: str, why: str, now: float) -> None:
        self._refusals.refused(now, uid=connection.peer.uid, what=what, why=why, pid=connection.peer.pid)
        self._server.send(connection.number, Refused(what=what, why=why))

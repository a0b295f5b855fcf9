"""Slurm is asked whose job it is on a thread of its own: a controller that is away must not stop the socket."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from stepkeeper.node.socket.limits import Bucket, Buckets, Limits
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.nodes import NodeClient, OwnedJob

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
        except BaseException as error:  # noqa: BLE001 - handed to whoever watches over the socket
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

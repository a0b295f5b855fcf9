"""A thread of the library, and a script that ends while it works."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from stepkeeper_trainer.coordinate.agreement import Agreement, Call, Message
from stepkeeper_trainer.errors import LateError
from stepkeeper_trainer.worker import Worker
from tests.trainer import warm
from tests.trainer.ranks import LIMIT_S, ROOT

ENDS = """
import sys, threading
sys.path[:0] = [sys.argv[1] + "/trainer", sys.argv[1]]
import torch
from stepkeeper_trainer.worker import Worker

worker, begun = Worker("some"), threading.Event()

def works():
    a = torch.rand(1024, 1024)
    begun.set()
    while not worker.leaving:  # in torch's code, without the interpreter's lock
        a = torch.mm(a, a) / 1024
    for _ in range(2):
        a = torch.mm(a, a) / 1024

worker.do(works)
worker.do(lambda: print("another has begun", flush=True))
begun.wait()
sys.exit(3)
"""


def test_jobs_are_done_one_after_the_other() -> None:
    worker, done, found = Worker("some"), threading.Event(), []
    for number in range(100):
        worker.do(lambda number=number: found.append(number))
    worker.do(done.set)

    assert worker.wait(LIMIT_S)
    assert done.is_set()
    assert found == list(range(100))


def test_a_script_that_ends_while_its_save_works_ends_with_its_own_code() -> None:
    """Without a wait the process is aborted: Python ends the thread in the middle of torch's code."""
    for _ in range(3):
        done = warm.run([sys.executable, "-c", ENDS, str(ROOT)], timeout=LIMIT_S)
        assert (done.returncode, done.stdout) == (3, ""), done.stderr


def test_nobody_waits_for_a_thread_that_rests() -> None:
    """At the end of the process no job begins any more."""
    idle, worker = Worker("idle"), Worker("some")
    worker.do(lambda: None)
    assert worker.wait(LIMIT_S)
    worker._rest()
    began = time.monotonic()

    assert idle.wait(LIMIT_S)
    assert not worker.wait(LIMIT_S)
    assert time.monotonic() - began < LIMIT_S / 2


@pytest.mark.parametrize(("after_s", "within_s"), [(1.3, LIMIT_S), (LIMIT_S, 0.2)])
def test_an_all_reduce_that_starts_late_is_waited_for_as_long_as_ranks_are(
    after_s: float, within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL its start waits for all ranks."""
    agreement, message = Agreement(None, within_s=within_s), Message(Call.STEP)
    monkeypatch.setattr(agreement, "_missing", lambda: "rank 1")
    timer = threading.Timer(after_s, lambda: message.started.put((None, ValueError("as torch says"))))
    timer.start()

    with pytest.raises(ValueError if after_s < within_s else LateError, match=r"as torch says|rank 1 did not come"):
        agreement._receive(message, within_s)
    timer.cancel()

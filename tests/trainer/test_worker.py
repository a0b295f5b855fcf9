"""A thread of the library, and a script that ends while it works."""

from __future__ import annotations

import sys
import threading

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
    while not worker._leaving:  # in torch's code, without the interpreter's lock
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

"""The thread of the saves, and a script that ends while it works."""

from __future__ import annotations

import subprocess
import sys
import threading

from stepkeeper_trainer.save.save import Worker
from tests.trainer.ranks import LIMIT_S, ROOT

ENDS = """
import sys, threading
sys.path[:0] = [sys.argv[1] + "/trainer", sys.argv[1]]
import torch
from stepkeeper_trainer.save.save import Worker

worker, begun = Worker(), threading.Event()

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
    worker, done, found = Worker(), threading.Event(), []
    for number in range(100):
        worker.do(lambda number=number: found.append(number))
    worker.do(done.set)

    assert done.wait(LIMIT_S)
    assert found == list(range(100))


def test_a_script_that_ends_while_its_save_works_ends_with_its_own_code() -> None:
    """Without a wait the process is aborted: Python ends the thread in the middle of torch's code."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", ENDS, str(ROOT)], timeout=LIMIT_S, check=False, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (3, ""), done.stderr

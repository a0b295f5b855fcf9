"""Time in which a process did not run is noticed, and is nobody's silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from stepkeeper.loop_tools import LATE_S, Stalls

# what a loop of ours does, with a wait of a tenth of a second
LOOP = """
import sys, time
from stepkeeper.loop_tools import Stalls
stalls = Stalls(time.monotonic())
print("begun", flush=True)
while True:
    stalls.waits(0.1)
    time.sleep(0.1)
    if away := stalls.look(time.monotonic()):
        print(away, flush=True)
        sys.exit()
"""


def test_a_loop_that_waits_as_long_as_it_said_has_not_stood_still():
    stalls = Stalls(100.0)

    stalls.waits(30.0)

    assert stalls.look(131.0) == 0.0
    assert stalls.look(131.0 + LATE_S / 2) == 0.0, "busy, not away"


def test_a_wait_that_was_cut_short_is_none_either():
    stalls = Stalls(100.0)

    stalls.waits(30.0)

    assert stalls.look(101.0) == 0.0
    assert stalls.look(101.0 + 2 * LATE_S) == 2 * LATE_S, "what was allowed for one wait is not for the next"


def test_the_time_away_is_told_once():
    stalls = Stalls(100.0)

    stalls.waits(5.0)

    assert stalls.look(700.0) == 600.0
    assert stalls.look(700.0) == 0.0


def test_a_process_that_was_stopped_sees_for_how_long():
    looping = subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, text=True)
    try:
        assert looping.stdout is not None
        assert looping.stdout.readline() == "begun\n"
        os.kill(looping.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, looping.pid, os.WSTOPPED)
        subprocess.run(["sleep", str(LATE_S + 1)], check=True, timeout=60)
        os.kill(looping.pid, signal.SIGCONT)

        away = float(looping.communicate(timeout=60)[0])
    finally:
        looping.kill()
        looping.wait(10)

    assert away >= LATE_S + 1

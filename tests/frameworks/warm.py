"""Runs in the environment of a framework: imports it once, then forks the ranks of each run from there.

Each line on stdin is a request, each line on stdout its answer, both JSON.  A rank waits at its gate until both are
there.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback

LEFT = {0, 75}  # ended, or left as it was asked to: the others do the same in a moment


def begin(request: dict) -> dict:
    """Fork one rank; it waits until its gate is opened."""
    gate, opener = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(opener)
        _rank(request, gate)
    os.close(gate)
    _gates[pid] = opener
    return {"pid": pid}


def _rank(request: dict, gate: int) -> None:
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for to, where in ((0, nothing), (1, log), (2, log)):
            os.dup2(where, to)
        os.environ.update(request["environment"])
        os.read(gate, 1)
        sys.argv = [request["script"], *request["arguments"]]
        runpy.run_path(request["script"], run_name="__main__")
        atexit._run_exitfuncs()  # as at the end of an interpreter
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(request: dict) -> dict:
    """Wait for ranks; as soon as one ends badly, all are killed, as with a node that is lost."""
    pids, until = set(request["pids"]), time.monotonic() + request["seconds"]
    for pid in pids:
        os.write(_gates[pid], b"g")
        os.close(_gates.pop(pid))
    codes: dict[int, int] = {}
    while pids:
        for pid in list(pids):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _end_group(pid)  # its number is taken until it is waited for
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                pids.discard(pid)
        late = time.monotonic() > until
        if late or set(codes.values()) - LEFT:
            for pid in pids:
                _end_group(pid)
        time.sleep(0.01)
    return {"codes": [codes[pid] for pid in request["pids"]]}


def _end_group(pid: int) -> None:
    """Kill a rank, and the processes that it has started: some outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # some frameworks print while they are imported
    for name in sys.argv[1:]:
        importlib.import_module(name)
    answers.write(json.dumps({"ready": True}) + "\n")
    while line := sys.stdin.readline():
        request = json.loads(line)
        answers.write(json.dumps(begin(request) if request["do"] == "begin" else wait(request)) + "\n")


_gates: dict[int, int] = {}
if __name__ == "__main__":
    main()

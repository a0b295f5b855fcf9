"""Whether the nodes of a job see what another node has written, and how soon: the lease and every commit need it.

`python -m stepkeeper.doctor.visible FILE FIRST SECOND` is what runs on each node.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepkeeper import isolation
from stepkeeper.doctor.site import Finding, Level
from stepkeeper.slurm.launch import watcher_argv
from stepkeeper_trainer.formats.durable import write_atomically

START_WITHIN_S = 60.0
SEEN_WITHIN_S = 90.0  # attribute caches of NFS live up to a minute
SLOW_S = 10.0  # the lease is renewed within it
LOOK_EVERY_S = 0.05
ENDS_WITHIN_S = 10.0
SAID_CHARACTERS_MAX = 300


def examine(directory: Path, nodes: Sequence[str]) -> Iterator[Finding]:
    """Have each node of our job look at a file that this one replaces."""
    subject = f"storage {directory} on {len(nodes)} nodes"
    with tempfile.TemporaryDirectory(prefix=".stepkeeper-doctor-", dir=directory) as place:
        file = Path(place, "token")
        write_atomically(file, b"first")
        program = [sys.executable, *isolation.flags(), "-m", "stepkeeper.doctor.visible", str(file), "first", "second"]
        srun = subprocess.Popen(
            watcher_argv(nodes, program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            started = _wait(srun, "first", len(nodes), START_WITHIN_S)
            if len(started) == len(nodes):
                write_atomically(file, b"second")
                seen = _wait(srun, "second", len(nodes), SEEN_WITHIN_S)
        finally:
            said = _end(srun)
    if len(started) < len(nodes):
        yield Finding(
            level=Level.PROBLEM,
            subject=subject,
            found=f"{len(started)} of {len(nodes)} nodes see a new file; not: {_others(nodes, started)}"
            + (f"; {said[-SAID_CHARACTERS_MAX:]}" if said else ""),
            means="the watchers of a run would not start there, or a node does not see the run directory",
            remedy=f"install stepkeeper where every node has it (here: {sys.prefix}); run directory on shared storage",
        )
        return
    slowest = max(seen.values(), default=0.0)
    late = len(seen) < len(nodes)
    yield Finding(
        level=Level.PROBLEM if late else Level.WARNING if slowest > SLOW_S else Level.OK,
        subject=subject,
        found=f"a replaced file is not seen in {SEEN_WITHIN_S:g} s on {_others(nodes, seen)}"
        if late
        else f"a replaced file is seen everywhere after {slowest:.2f} s",
        means="two attempts could both believe to hold the lease, and a committed step be missed"
        if late or slowest > SLOW_S
        else "lease and commits are seen in time",
        remedy="mount with a shorter attribute cache (NFS: actimeo=3), or use another file system"
        if late or slowest > SLOW_S
        else "",
    )


def _others(nodes: Sequence[str], seen: dict[str, float]) -> str:
    return ", ".join(node for node in nodes if node not in seen)


def _end(srun: subprocess.Popen[bytes]) -> str:
    """End the Slurm step; return what srun has said on stderr."""
    srun.terminate()
    try:
        said = srun.communicate(timeout=ENDS_WITHIN_S)[1]
    except subprocess.TimeoutExpired:
        os.killpg(srun.pid, signal.SIGKILL)  # with the child that every srun has, which holds our end of the pipe
        said = srun.communicate(timeout=ENDS_WITHIN_S)[1]
    return said.decode(errors="replace").strip()


def _wait(srun: subprocess.Popen[bytes], word: str, wanted: int, within_s: float) -> dict[str, float]:
    """Return after how many seconds each node answered; those that did not in time are missing."""
    assert srun.stdout is not None, "it is a pipe"
    began = time.monotonic()
    said: dict[str, float] = {}
    descriptor = srun.stdout.fileno()
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(said) < wanted and (left := began + within_s - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            if not (chunk := os.read(descriptor, 65536)):
                return said  # srun has ended
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                node, _, seen = line.decode(errors="replace").partition(" ")
                if seen == word:
                    said[node] = time.monotonic() - began
    return said


def look(file: Path, words: Sequence[str]) -> int:
    """Say this node's name and each word as soon as the file holds it."""
    give_up_at = time.monotonic() + START_WITHIN_S + SEEN_WITHIN_S
    node = os.environ.get("SLURMD_NODENAME", "?")
    for word in words:
        while _content(file) != word:
            if time.monotonic() > give_up_at:
                return 1
            time.sleep(LOOK_EVERY_S)
        os.write(1, f"{node} {word}\n".encode())
    return 0


def _content(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""  # not seen here yet
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return ""  # this node still takes the name for the file that was replaced


if __name__ == "__main__":
    sys.exit(look(Path(sys.argv[1]), sys.argv[2:]))

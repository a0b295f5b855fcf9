"""Looking into a run directory in a child process, with limits of time and memory, as a person's commands do."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stepkeeper.cli import main as cli_main
from stepkeeper.cli.main import main
from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store import find, journal, lines, requests, submission
from stepkeeper.run_store import lease as run_store_lease
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.formats import lease, lineage, records, steps
from stepkeeper_trainer.formats.plain import DecodeError
from stepkeeper_trainer.observe.exactness import recorded_losses
from stepkeeper_trainer.save.commit import Commits
from stepkeeper_trainer.tiers.directory import DirectoryTier, LocalTier
from stepkeeper_trainer.tiers.survey import on_the_way

cli_main.parser()  # loads all commands, and not each child again
importlib.import_module("stepkeeper.run_analytics.report.page")
importlib.import_module("stepkeeper.simulate.replay")
CPU_S = 30  # more than looks at so small a run take, on a busy machine too
WALL_S = 120.0
MEMORY_BYTES = 1500 * 1024 * 1024
DOCUMENTED = frozenset(ExitCode) - {ExitCode.INTERNAL}
ENDS_WITH_ONE = ("checkpoints latest", "dev replay")  # a contract of theirs


NEWEST = lease.Lease(job_id=10**9, restart_count=0, attempt=0, node="", pid=1, taken_at=0.0)


class Ended(NamedTuple):
    """How a look ended; `wrong` is empty where it is as it should be."""

    what: str
    wrong: str
    said: str


def commands(run: Path, step: Path, target: Path) -> list[list[str]]:
    """Return every command that looks into a run."""
    here, there = str(run), str(step)
    words = [
        *(f"{each} {here}{more}" for each in ("status", "events", "report", "plan") for more in (" --json", "")),
        f"events {here} --last 3",
        f"report {here} -o {target}/report.html",
        *(f"logs {here}{more}" for more in ("", " --failed", " --json --tail 2", " --rank 0", " --node srun")),
        *(f"explain {here}{more}" for more in ("", " --json")),
        *(f"checkpoints ls {here}{more}" for more in ("", " --json")),
        *(f"checkpoints verify {there}{more}" for more in ("", " --shallow", " --json", " --cached")),
        *(f"checkpoints latest {here}{more}" for more in ("", " --json --no-cache")),
        *(f"checkpoints tiers {here}{more}" for more in ("", " --json")),
        *(f"checkpoints prune {here} --dry-run{more}" for more in ("", " --json")),
        f"checkpoints export {there} {target}/model --dry-run",
        f"checkpoints export {there} {target}/model",
        f"checkpoints copy {here} --to {target}/copy",
        f"checkpoints pin {there}",
        f"save {here} --within 0.01 --no-wait",
        f"stop {here} --within 0.01 --json",
        f"dev replay {here}",
    ]
    found = [each.split(" ") for each in words]
    found.append(["checkpoints", "prune", here, "--dry-run", "--retention", "best loss 1"])
    return [[word for word in each if word] for each in found]


def readers(run: Path) -> dict[str, tuple[Callable[[], object], tuple[type[Exception], ...]]]:
    """Return what supervisors and ranks read by themselves, with the errors that each may raise."""
    checkpoints = run / "checkpoints"
    found = RunDirectory(run)
    return {
        "lease": (lambda: lease.read(run), (OSError, lease.LeaseError)),
        "lineage": (lambda: lineage.read(checkpoints), (OSError,)),
        "outcome": (lambda: records.read_outcome(run), (OSError, records.RecordError)),
        "keeping": (lambda: records.read_keeping(run), (OSError, records.RecordError)),
        "trackers": (lambda: records.read_tracker_ids(run), ()),
        "reconstruct": (lambda: journal.reconstruct(found.journal), (OSError,)),
        "rescues": (lambda: list(run_store_lease.read_rescues(run)), (OSError,)),
        "ended_at": (lambda: lines.ended_at(run, 1, 0), (OSError,)),
        "losses": (lambda: lines.losses_before(run), ()),
        "recorded losses": (lambda: recorded_losses(run, 3), ()),
        "code": (lambda: submission.newest_code_before(run, 3), ()),
        "asks": (lambda: requests.waiting(run, 7), (OSError,)),
        "answer": (lambda: requests.read_answer(run, "save-1"), (OSError, DecodeError)),
        "runs": (lambda: find.registered(dict(os.environ)), ()),
        "superseded": (lambda: run_store_lease.superseded(run, NEWEST), (OSError, lease.LeaseError)),
        "leftovers": (lambda: Commits(run, read_environment()).clear_leftovers(), (OSError,)),
        "tier": (lambda: DirectoryTier(checkpoints).steps(), (OSError,)),
        "local": (lambda: LocalTier(checkpoints, keep=1).steps(), (OSError,)),
        "on the way": (lambda: on_the_way(checkpoints), (OSError,)),
        "newest": (lambda: steps.newest_verified(checkpoints), (OSError,)),
    }  # fmt: skip


def look(calls: Mapping[str, Callable[[], str]], *, home: Path) -> list[Ended]:
    """Do several things, one after the other, in a child process; it has ended when this returns."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(readable)
            _limit(home)
            for what, act in calls.items():
                os.write(writable, json.dumps([what]).encode() + b"\n")
                os.write(writable, json.dumps([what, *_done(act)]).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writable)
    said, status = _wait(child, readable)
    words = [json.loads(line) for line in said.splitlines()]
    ended = [Ended(*each) for each in words if len(each) == len(Ended._fields)]
    if status is None or os.WIFSIGNALED(status) or len(ended) < len(calls):
        why = f"not within {WALL_S:g} s" if status is None else f"ended with status {status}: time or memory"
        ended.append(Ended(words[-1][0] if words else "nothing", why, ""))
    return ended


def _wait(child: int, readable: int) -> tuple[str, int | None]:
    """Return what a child says and how it ended; None where it was too late, and was killed."""
    limit_at, data = time.monotonic() + WALL_S, b""
    with os.fdopen(readable, "rb", buffering=0) as pipe:
        while (left_s := limit_at - time.monotonic()) > 0 and select.select([pipe], [], [], left_s)[0]:
            more = pipe.read(1 << 16)
            if not more:
                return data.decode(), os.waitpid(child, 0)[1]
            data += more
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return data[: data.rfind(b"\n") + 1].decode(), None


def _limit(home: Path) -> None:
    os.environ["HOME"] = str(home)
    os.environ.pop("XDG_STATE_HOME", None)
    os.chdir(home)
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + CPU_S,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _done(act: Callable[[], str]) -> tuple[str, str]:
    """Return what is wrong with how something ended, and the end of what it said."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            wrong = act()
    except BaseException:  # noqa: BLE001 - it is what is looked for
        wrong = traceback.format_exc()[-3000:]
    raw = output.buffer.getvalue()  # type: ignore[attr-defined]
    return wrong, raw[-500:].decode(errors="replace")


def command(argv: Sequence[str]) -> Callable[[], str]:
    """Return a call of a command, which says what is wrong with how it ended."""

    def act() -> str:
        try:
            ended = main(argv)
        except SystemExit as error:
            ended = int(error.code or 0)
        fine = ended in DOCUMENTED or (ended == 1 and " ".join(argv[:2]) in ENDS_WITH_ONE)
        return "" if fine else f"exit code {ended} is not documented"

    return act


def reader(read: Callable[[], object], errors: tuple[type[Exception], ...]) -> Callable[[], str]:
    """Return a call of a reader, whose documented errors are fine."""

    def act() -> str:
        with contextlib.suppress(*errors):
            read()
        return ""

    return act

"""Ranks forked from one process that has torch already: many small stories in the time of one start.

    python -m tests.trainer.forked < stories.json

Each story is a `Story` in JSON; for each a line of JSON with how its ranks ended is printed.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.trainer import warm

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0  # of a story
# Where a save can be hit, in the order in which it gets there.
POINTS = ("staged", "made", "planned", "written", "reporting", "reported")
POINTS_OF_RANK_0 = ("gathered", "manifest", "renaming", "renamed", "recorded")


@dataclass(frozen=True, kw_only=True)
class Story:
    """What ranks do, and what befalls one of them in its first save."""

    run_dir: str
    world_size: int = 2
    steps: int = 6
    every: int | str | None = 2
    save_within_s: float = 20.0
    resume_from: str | None = None
    hit: str | None = None  # a point
    rank: int = 0  # that is hit
    how: str = "kill"  # or `stop`, for `stop_s` seconds
    stop_s: float = 0.0
    drift_at: int | None = None  # step at which rank 1 gets a bit wrong
    outputs: int = 1  # of the model, and with it the size of a tensor that all ranks hold
    options: dict[str, Any] = field(default_factory=dict)  # of CheckpointManager
    environment: dict[str, str] = field(default_factory=dict)
    epoch: int = 0  # steps of an epoch; 0: there are none
    full_until: int = 0  # the disk takes nothing of rank `rank` before that step is done
    step_s: float = 0.02
    loader: bool = False  # each rank has a position of its own in the data
    save_on: str = ""  # environment


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended: exit codes, negative for signals; and what they said."""

    codes: list[int]
    said: str
    stopped: list[int] = field(default_factory=list)  # ranks that stood still


def play(stories: list[Story], *, limit_s: float = LIMIT_S, at_once: int = 1) -> list[Ended]:
    """Play stories in a process of their own, some beside each other: ranks that lost one mostly wait."""
    path = os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "STEPKEEPER_", "RANK", "WORLD"))}
    done = warm.run(
        [sys.executable, "-m", "tests.trainer.forked", str(at_once)],
        text="\n".join(json.dumps(asdict(story)) for story in stories),
        cwd=ROOT,
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=LIMIT_S + limit_s * len(stories),
    )
    assert done.returncode == 0, done.stderr
    return [Ended(**json.loads(line)) for line in done.stdout.splitlines()]


def warm_up() -> None:
    """Import once, for all that are forked, what a rank comes to need: a thousand modules, two seconds of a core."""
    import torch  # noqa: PLC0415
    import torch.distributed.fsdp  # noqa: PLC0415

    from stepkeeper_trainer import CheckpointManager  # noqa: F401, PLC0415

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)  # no backward: its threads would not survive a fork
    torch.optim.AdamW([parameter]).step()
    gc.collect()
    gc.freeze()  # a collector that looks at these would copy their pages


def main() -> None:
    warm_up()
    waiting = [Story(**json.loads(line)) for line in sys.stdin.read().splitlines()]
    plays: list[_Play] = []
    while waiting or plays:
        while waiting and len(plays) < int(sys.argv[1]):
            plays.append(_Play(waiting.pop(0)))
        for each in plays:
            each.look()
        while plays and (ended := plays[0].ended()) is not None:
            print(json.dumps(asdict(ended)), flush=True)
            plays.pop(0)
        time.sleep(0.01)


def _play(story: Story) -> Ended:
    play = _Play(story)
    while (ended := play.ended()) is None:
        play.look()
        time.sleep(0.01)
    return ended


class _Play:
    """A story that is being played."""

    def __init__(self, story: Story) -> None:
        Path(story.run_dir).parent.mkdir(exist_ok=True, parents=True)
        self._story = story
        self._scratch = Path(tempfile.mkdtemp())  # removed here only: a fork that leaves through its end comes by too
        self._codes: dict[int, int] = {}
        self._stopped: list[int] = []
        self._going_on_at: float | None = None
        self._pids = [_fork(rank, story, self._scratch) for rank in range(story.world_size)]
        self._limit_at = time.monotonic() + LIMIT_S

    def look(self) -> None:
        """See who has ended or stands still, and who is to go on."""
        for rank, pid in enumerate(self._pids):
            if rank in self._codes:
                continue
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                self._stopped.append(rank)
                self._going_on_at = time.monotonic() + self._story.stop_s
            elif found:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > self._limit_at:
                os.kill(pid, signal.SIGKILL)
        if self._going_on_at is not None and time.monotonic() > self._going_on_at:
            self._going_on_at = None
            os.kill(self._pids[self._story.rank], signal.SIGCONT)

    def ended(self) -> Ended | None:
        """Return how it ended, if it has."""
        if len(self._codes) < len(self._pids):
            return None
        ranks = range(len(self._pids))
        said = "".join((self._scratch / f"{rank}.log").read_text(errors="replace") for rank in ranks)
        shutil.rmtree(self._scratch)
        return Ended(codes=[self._codes[rank] for rank in ranks], said=said, stopped=self._stopped)


def _fork(rank: int, story: Story, scratch: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        log = os.open(scratch / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(format=f"[{rank}] %(message)s", level=logging.INFO, stream=sys.stderr, force=True)
        code = _rank(rank, story, scratch)
    except BaseException:  # noqa: BLE001  # a fork must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _rank(rank: int, story: Story, scratch: Path) -> int:
    from datetime import timedelta  # noqa: PLC0415

    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    from stepkeeper_trainer import CheckpointManager, StepkeeperError  # noqa: PLC0415

    if story.world_size > 1:
        store = dist.FileStore(str(scratch / "store"), story.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=story.world_size, timeout=timedelta(seconds=30)
        )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.environ.update(story.environment)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, story.outputs))
    if story.world_size > 1:
        fully_shard(model[0])  # one half sharded, the other held by all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if story.hit is not None and story.rank == rank:
        _arm(story.hit, story.how)
    loader = _Position(20 * rank)
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer, **({"loader": loader} if story.loader else {})},
        every=story.every,
        run_dir=story.run_dir,
        resume_from=story.resume_from,
        total_steps=story.steps,
        save_within_s=story.save_within_s,
        **story.options,
    )
    if story.full_until and rank == story.rank:
        _fill(lambda: manager.step < story.full_until)
    try:
        manager.resume()
        manager.listeners.add(_Hearing())
        done = manager.finished
        while not done:
            torch.manual_seed(manager.step)
            loss = model(torch.rand(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if story.drift_at == manager.step and rank == 1:
                with torch.no_grad():
                    model[1].weight.view(-1)[3] += 1
            loader.at += 2
            if story.loader:
                logging.getLogger("loader").info("loader at %s", loader.at)
            time.sleep(story.step_s)
            at_end = bool(story.epoch) and (manager.step + 1) % story.epoch == 0
            done = manager.step_done(loss=loss.detach(), epoch_end=at_end)
        return manager.finish()
    except StepkeeperError as error:
        print(f"[{rank}] {error}", file=sys.stderr)
        return error.exit_code
    except RuntimeError as error:  # another rank died
        print(f"[{rank}] left alone: {str(error).splitlines()[0]}", file=sys.stderr)
        manager._last_seconds()
        return 1


class _Position:
    """A loader of which each rank has its own state."""

    per_rank = True

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class _Hearing:
    """Says what a listener hears."""

    def committed(self, step: Any) -> None:
        whole = (step.directory / "MANIFEST.json").is_file()
        logging.getLogger("heard").info("heard step=%s whole=%s", step.step, whole)

    def close(self, _limit_at: float) -> None:
        logging.getLogger("heard").info("closed")


def _fill(full: Callable[[], bool]) -> None:
    """Have the disk refuse what a save writes, as long as `full` says so."""
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if full() and ".tmp-step" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    os.fsync = refuse


def _arm(point: str, how: str) -> None:
    """Have this process killed or stopped where its first save comes to a point."""
    from stepkeeper_trainer.save import commit, persist, planner, saver, snapshot, writer  # noqa: PLC0415

    places = {
        "staged": (snapshot.Copier, "copy", True),
        "made": (saver.Saver, "_make_directory", True),
        "planned": (planner.Planner, "agree", True),
        "written": (writer.HashingFile, "close", True),
        "reporting": (persist, "publish", False),
        "reported": (persist, "publish", True),
        "gathered": (commit, "gather", True),
        "manifest": (commit, "_write_new", True),
        "renaming": (commit.Commits, "check_fence", True),
        "renamed": (commit.lineage, "append", False),
        "recorded": (commit.lineage, "append", True),
    }
    owner, name, after = places[point]
    original = getattr(owner, name)
    hits = 0

    def hit(*args: Any, **options: Any) -> Any:
        nonlocal hits
        hits += 1
        # `prepare` plans too, before the first save does; the lease is looked at when a run begins
        mine = hits == (2 if point in ("planned", "renaming") else 1)
        if mine and not after:
            _fall(how)
        result = original(*args, **options)
        if mine and after:
            _fall(how)
        return result

    setattr(owner, name, hit)


def _fall(how: str) -> None:
    # to this very thread: a stop that another one is to take leaves this one going on for a while
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    main()

"""A run directory that somebody filled to hurt: every command and every reader ends in time, by a documented code.

The few of `make test` are the same each time; `make campaign` plays many, from a number that
`STEPKEEPER_FUZZ_FIRST` moves.  A case is played again alone by its number: `case(NUMBER, ...)`.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from stepkeeper.run_store import requests
from stepkeeper.run_store.status import Status
from tests.hostile.looking import Ended, command, commands, look, reader, readers
from tests.hostile.planting import OWNER, plant

RUN = Path(__file__).parent.parent / "fixtures" / "run-0.1-failures"
FEW, IN_ONE = 20, 20
MANY = int(os.environ.get("STEPKEEPER_FUZZ_CASES", "4000"))
FIRST = int(os.environ.get("STEPKEEPER_FUZZ_FIRST", "1000"))
LOOKS = 15  # at each case


@functools.cache
def seed(place: Path) -> Path:
    """Return a run with all that a run may have: that of a real one, and what that one did without."""
    run = place / "seed"
    shutil.copytree(RUN, run)
    kept = {"format": 1, "launch": "1.0", "at": 1.0, "retention": {"keep_last": 3}}
    (run / "keeping.json").write_text(json.dumps(kept))
    (run / "trackers.json").write_text('{"mlflow_run_id": "abc123"}')
    (run / "rescues.jsonl").write_text('{"at":1.0,"job_id":2,"restart_count":0,"node":"n1"}\n')
    (run / "checkpoints" / ".tiers-id").write_text("0123456789abcdef")
    (run / "config.toml").write_text('checkpoint_every = "10min"\n')
    stacks = run / "logs" / "attempt-001" / "launch-000"
    (stacks / "errors").mkdir()
    (stacks / "errors" / "rank-0.json").write_text('{"message": {"message": "boom", "extraInfo": {"timestamp": "1"}}}')
    other = run / "checkpoints" / ".tmp-step_00000020.cafe"
    other.mkdir()
    (other / "owner.json").write_text('{"node":"n1","pid":1,"epoch":[1,0],"launch":[0,0]}')
    (other / "MANIFEST.pending").write_bytes((run / "checkpoints" / "step_00000012" / "MANIFEST.json").read_bytes())
    requests.write(run, requests.Request(kind="save", job_id=7, at=1.0))
    answered = run / "asks" / "save-1.answer"
    answered.write_text('{"said":"done","ok":true,"at":1.0}')
    status = msgspec.json.decode((run / "status.json").read_bytes(), type=Status)
    alive = msgspec.structs.replace(status, phase="training", exit_code=None)
    (run / "status.json").write_bytes(msgspec.json.encode(alive))
    return run


def contents(directory: Path) -> dict[str, object]:
    """Return all that stands in a directory, with inodes and times: who writes through a link changes one of them."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns)
    return found


def case(number: int, place: Path) -> list[Ended]:
    """Plant something, and look; return what went wrong."""
    dice = random.Random(number)  # noqa: S311
    where = place / f"case-{number}"
    run, outside, target = where / "run", where / "outside", where / "target"
    shutil.copytree(seed(place), run, symlinks=True)
    shutil.copytree(run, outside / "run")  # a link to another run leads to files that can be read
    (outside / "victims").mkdir()
    (outside / "victims" / "step_00000012").mkdir()
    (outside / "secret").write_text("precious\n")
    target.mkdir()
    if os.getuid() == 0 and number % 4:  # mostly root looks at what a user has, and else at its own
        for path in (run, *run.rglob("*")):
            os.chown(path, OWNER, OWNER)
    planted = [plant(run, outside, dice) for _ in range(dice.randrange(1, 4))]
    before = contents(outside)
    step = run / "checkpoints" / "step_00000012"
    calls = {" ".join(argv): command(argv) for argv in commands(run, step, target)}
    calls |= {f"reader {name}": reader(*each) for name, each in readers(run).items()}
    chosen = dice.sample(sorted(calls), LOOKS)
    wrong = [each for each in look({what: calls[what] for what in chosen}, home=target) if each.wrong]
    if contents(outside) != before:
        wrong.append(Ended("all of them", "something outside of the run directory was changed", ""))
    shutil.rmtree(where)
    return [each._replace(what=f"case {number}, {', '.join(planted)}: {each.what}") for each in wrong]


def play(first: int, count: int, place: Path) -> None:
    found = [each for number in range(first, first + count) for each in case(number, place)]
    assert not found, "\n\n".join(f"{each.what}\n{each.wrong}\n{each.said}" for each in found[:20])


def test_nothing_is_wrong_with_the_run_that_is_changed(tmp_path: Path) -> None:
    """Else it would be refused before a reader is reached."""
    run = seed(tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    step = run / "checkpoints" / "step_00000012"
    calls = {" ".join(argv): command(argv) for argv in commands(run, step, target)}
    ended = look(calls, home=target)

    assert not [each for each in ended if each.wrong]
    refused = [each.what.split()[0] for each in ended if "stepkeeper: " in each.said]
    assert sorted(refused) == ["save", "stop"], "nobody answers those"


@pytest.mark.parametrize("first", range(0, FEW, IN_ONE))
def test_what_is_planted_hurts_nobody_who_looks(first: int, tmp_path: Path) -> None:
    play(first, IN_ONE, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(FIRST, FIRST + MANY, 10 * IN_ONE))
def test_whatever_is_planted_hurts_nobody_who_looks(first: int, tmp_path: Path) -> None:
    play(first, 10 * IN_ONE, tmp_path)

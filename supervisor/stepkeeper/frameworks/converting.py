"""ZeRO checkpoints for another number of ranks: DeepSpeed's own tool makes a Universal Checkpoint of one.

`python -m stepkeeper.frameworks.converting` does that in a process of its own, before a launch: one JSON document on
stdin, one on stdout.  A conversion is made in a directory of ours, verified, and gets its name by one rename: a tag
`..._universal` is whole, or somebody else's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepkeeper.frameworks import recognise
from stepkeeper.frameworks.asking import serve
from stepkeeper.frameworks.choosing import How, Judged, State, judge
from stepkeeper.frameworks.framework import Step
from stepkeeper.slurm.launch import without_python
from stepkeeper_trainer.formats.reading import Reading

FRAMEWORK = "deepspeed"
ENDING = "_universal"
_HIDDEN = ".stepkeeper-converting-"
_PLAIN = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_\d+_)?mp_rank_00_(?:model|optim)_states\.pt")
_STATES = re.compile(r".*_states\.pt")
_LOOK_WITHIN_S = 30.0
_SAID_CHARACTERS_MAX = 300
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"


class ConversionError(Exception):
    """A checkpoint was not converted, and why."""


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint is to be converted, and by which Python."""

    source: str
    python: str


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """The Universal Checkpoint."""

    directory: str
    made: bool  # false: it was there already


def convertible(path: Path) -> bool:
    """Tell whether we convert a checkpoint by ourselves: data parallel ranks only, no pipeline, no experts.

    Of others a model must say which parameters are replicated, and how they are split.
    """
    try:
        names = [name for name in os.listdir(path) if _STATES.fullmatch(name)]
    except OSError:
        return False
    return bool(names) and all(map(_PLAIN.fullmatch, names))


def python_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the Python of a training: the command's own, that beside its launcher, or the first one of PATH."""
    path = environment.get("PATH")
    program = shutil.which(command[0], path=path) if command else None
    if program is not None:
        beside = Path(os.path.abspath(program)).with_name("python")
        if os.path.basename(program).startswith("python"):
            return os.path.abspath(program)
        if os.access(beside, os.X_OK):
            return str(beside)
    return shutil.which("python", path=path) or "python3"


def has_tool(python: str, environment: Mapping[str, str]) -> bool:
    """Tell whether a Python has DeepSpeed; it is not imported."""
    argv, environment = [python, "-c", _FIND], without_python(environment)
    try:
        done = subprocess.run(argv, capture_output=True, check=False, env=environment, timeout=_LOOK_WITHIN_S, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def tool(python: str, source: Path, target: Path, *, inject_missing_state: bool) -> list[str]:
    """Return the command line of DeepSpeed's tool."""
    words = ["--input_folder", str(source), "--output_folder", str(target)]
    words += ["--inject_missing_state"] if inject_missing_state else []
    return [python, "-m", "deepspeed.checkpoint.ds_to_universal", *words]


def convert(wanted: Conversion) -> Converted:
    """Return a whole Universal Checkpoint beside a ZeRO checkpoint, made now or before.

    Raises:
        ConversionError: why not; nothing has a checkpoint's name then.
        OSError: the directory cannot be read or written.
    """
    source = Path(wanted.source)
    target, made = _place(source)
    if made:
        return Converted(directory=str(target), made=False)
    for left in source.parent.glob(f"{_HIDDEN}*"):  # of a conversion that died: one attempt at a time has the run
        shutil.rmtree(left, ignore_errors=True)
    away = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=source.parent))
    try:
        hidden = away / target.name  # the tool names it in `latest_universal` beside it
        call(tool(wanted.python, source, hidden, inject_missing_state=True))
        judged = _judge(hidden)
        if judged.state is not State.VERIFIED:
            raise ConversionError(f"{hidden.name}: {judged.state.value}: {'; '.join(judged.problems[:3])}")
        hidden.chmod(source.stat().st_mode & 0o777)
        hidden.rename(target)
    finally:
        shutil.rmtree(away, ignore_errors=True)
    return Converted(directory=str(target), made=True)


def _place(source: Path) -> tuple[Path, bool]:
    """Return the name of a conversion, and whether it is there: whole, and younger than what it was made of."""
    base, count = source.name.removesuffix(ENDING), 1
    while True:
        place = source.with_name(f"{base}{ENDING}" if count == 1 else f"{base}-{count}{ENDING}")
        if not os.path.lexists(place):
            return place, False
        judged = _judge(place) if place.is_dir() and not place.is_symlink() else None
        younger = judged is not None and place.stat().st_ctime >= _changed_at(source)
        if judged is not None and younger and judged.state is State.VERIFIED:
            return place, True
        count += 1


def _changed_at(path: Path) -> float:
    with os.scandir(path) as entries:
        return max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=0.0)


def _judge(path: Path) -> Judged:
    how = How(environment=os.environ, deep=True, cached=True, world_size=None, reading=Reading())
    return judge(recognise.known()[FRAMEWORK], Step(path, None), how)


def start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.  Raises OSError."""
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)


def call(argv: Sequence[str]) -> None:
    """Have another Python convert, by `-m MODULE`.  Raises ConversionError with the last line that it said."""
    try:
        done = start(argv, {**without_python(os.environ), "PYTHONSAFEPATH": "1"})  # nothing of the working directory
    except OSError as error:
        raise ConversionError(f"{argv[0]}: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise ConversionError(f"{argv[2]}: {said[:_SAID_CHARACTERS_MAX]}")


if __name__ == "__main__":
    sys.exit(serve(Conversion, convert, ConversionError))

"""`stepkeeper checkpoints export --to torch|dcp|universal`: by torch and by DeepSpeed, in a process of their own."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepkeeper.cli import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.frameworks import converting, recognise
from stepkeeper.frameworks.choosing import How, State, judge
from stepkeeper.frameworks.converting import ENDING
from stepkeeper.frameworks.framework import Step
from stepkeeper.slurm.launch import without_python
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.formats.metadata import METADATA_NAME
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.store.export import Names

TORCH, DCP, UNIVERSAL = "torch", "dcp", "universal"
TARGETS = (TORCH, DCP, UNIVERSAL)
_BELOW = ("pytorch_model_fsdp_0", "model", "weights")  # of Hugging Face and Accelerate, Automodel, NeMo 2
_LEFT_OUT = {
    TORCH: "nothing: all tensors and values are in the file",
    DCP: "there is no optimizer, step, schedule or data position: these are initial weights",
    UNIVERSAL: "random states of the ranks, and whatever the script saved on single ranks",
}


def execute(arguments: argparse.Namespace, names: Names | None) -> int:
    """Convert a checkpoint.

    Raises:
        StepkeeperError: why not; nothing is at OUT then.
    """
    source, target = Path(os.path.abspath(arguments.where)), Path(os.path.abspath(arguments.target))
    if os.path.lexists(target):
        raise StepkeeperError(f"{arguments.target}: is there already: name one that is not", ExitCode.USAGE)
    if not target.parent.is_dir():
        raise StepkeeperError(f"{target.parent}: no such directory: make it first", ExitCode.USAGE)
    if not os.path.lexists(source):
        raise StepkeeperError(f"{arguments.where}: no such file or directory", ExitCode.NOTHING_FOUND)
    if arguments.dry_run:
        raise StepkeeperError(f"--dry-run goes with --to safetensors, not with --to {arguments.to}", ExitCode.USAGE)
    began = time.monotonic()
    if arguments.to == UNIVERSAL:
        _to_universal(arguments, source, target)
    else:
        if arguments.to == TORCH:
            source = _verified(source)
        words = ["-m", "stepkeeper_trainer.store.conversion", arguments.to, str(source), str(target)]
        words += ["--prefix", arguments.prefix or ""]
        words += ["--names", names.style, "--head-dim", str(names.head_dim)] if names is not None else []
        _call([arguments.python, *words], "torch and stepkeeper")
    seconds = time.monotonic() - began
    left_out = _LEFT_OUT[arguments.to]
    if arguments.json:
        document = {"source": str(source), "target": str(target), "to": arguments.to, "left_out": left_out}
        printing.say_json({**document, "seconds": round(seconds, 3)}, indent=2)
    else:
        printing.say(f"{arguments.target}: converted in {printing.duration(seconds)}")
        printing.say(f"left out: {left_out}")
    return ExitCode.FINISHED


def dcp_below(directory: Path) -> Path | None:
    """Return the DCP directory that is meant: itself, or the one in a checkpoint of a framework."""
    candidates = (directory, *(directory / name for name in _BELOW))
    return next((each for each in candidates if os.path.lexists(each / METADATA_NAME)), None)


def verified_dcp(directory: Path) -> Path:
    """Return the DCP directory of another program, once it is verified.

    Raises:
        StepkeeperError: there is none, or it is damaged.
        OSError: it cannot be read.
    """
    found = dcp_below(directory)
    if found is None:
        raise StepkeeperError(
            f"{directory}: holds no {METADATA_NAME}: name a step directory, or a directory of "
            "torch.distributed.checkpoint (a ZeRO checkpoint: --to universal)",
            ExitCode.USAGE,
        )
    _require_whole("dcp", found)
    return found


def _verified(source: Path) -> Path:
    """Return what is to be read: a step directory of ours, or a DCP directory; each was read and compared."""
    if not os.path.lexists(source / MANIFEST_NAME):
        return verified_dcp(source)
    verdict = verify(source)
    if verdict.problems:
        raise StepkeeperError(f"{source}: {'; '.join(verdict.problems[:3])}", ExitCode.NOT_VERIFIED)
    return source


def _require_whole(framework: str, path: Path) -> None:
    how = How(environment=os.environ, deep=True, cached=False, world_size=None, reading=Reading())
    judged = judge(recognise.known()[framework], Step(path, None), how)
    if not (judged.state.chosen_from or judged.state is State.NOT_RESUMABLE):
        problems = "; ".join(judged.problems[:3])
        raise StepkeeperError(f"{path}: {judged.state.value}: {problems}", ExitCode.NOT_VERIFIED)


def _to_universal(arguments: argparse.Namespace, source: Path, target: Path) -> None:
    framework = recognise.known()["deepspeed"]
    if not framework.is_step(source) or (source / "zero").is_dir():
        raise StepkeeperError(
            f"{arguments.where}: no ZeRO checkpoint of DeepSpeed: name the directory of a tag, such as "
            "outputs/global_step400",
            ExitCode.USAGE,
        )
    if not target.name.endswith(ENDING):
        raise StepkeeperError(
            f"{arguments.target}: the name of a Universal Checkpoint ends in {ENDING}", ExitCode.USAGE
        )
    _require_whole("deepspeed", source)
    inject = arguments.inject_missing_state
    try:
        _call(converting.tool(arguments.python, source, target, inject_missing_state=inject), "deepspeed")
        _require_whole("deepspeed", target)
    except StepkeeperError:
        shutil.rmtree(target, ignore_errors=True)
        raise


def start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.  Raises OSError."""
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)


def _call(argv: Sequence[str], needs: str) -> None:
    """Have another Python convert.  Raises StepkeeperError with the end of what it said."""
    environment = {**without_python(os.environ), "PYTHONSAFEPATH": "1"}  # nothing of the working directory
    try:
        done = start(argv, environment)
    except OSError as error:
        raise StepkeeperError(f"--python {argv[0]}: {error.strerror}", ExitCode.USAGE) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        hint = f"; name a Python with {needs} by --python" if "No module named" in said else ""
        raise StepkeeperError(f"{argv[0]} {argv[1]} {argv[2]}: {said}{hint}", ExitCode.USAGE)

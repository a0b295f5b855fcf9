"""`stepkeeper checkpoints export SOURCE OUT`: a model as safetensors files, and other conversions of checkpoints.

Torch and DeepSpeed convert in a process of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepkeeper import printing
from stepkeeper.cli.arguments import size
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import NotFoundError, StepkeeperError, UsageError
from stepkeeper.frameworks import converting, recognise
from stepkeeper.frameworks.choosing import How, State, judge
from stepkeeper.frameworks.converting import ENDING
from stepkeeper.frameworks.framework import Step
from stepkeeper.run_store import find
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.formats.metadata import METADATA_NAME
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.store import export
from stepkeeper_trainer.store.export import STYLES, Names, NamesError, check_head_dim, head_dim_of

# `--to torch|dcp|universal`: by torch and by DeepSpeed, in a process of their own.

TORCH, DCP, UNIVERSAL = "torch", "dcp", "universal"
TARGETS = (TORCH, DCP, UNIVERSAL)
_BELOW = ("pytorch_model_fsdp_0", "model", "weights")  # of Hugging Face and Accelerate, Automodel, NeMo 2
_LEFT_OUT = {
    TORCH: "nothing: all tensors and values are in the file",
    DCP: "there is no optimizer, step, schedule or data position: these are initial weights",
    UNIVERSAL: "random states of the ranks, and whatever the script saved on single ranks",
}


def convert(arguments: argparse.Namespace, names: Names | None) -> None:
    """Convert a checkpoint.

    Raises:
        StepkeeperError: why not; nothing is at OUT then.
    """
    source, target = Path(os.path.abspath(arguments.where)), Path(os.path.abspath(arguments.target))
    if os.path.lexists(target):
        raise UsageError(f"{arguments.target}: is there already: name one that is not")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such directory: make it first")
    if not os.path.lexists(source):
        raise NotFoundError(f"{arguments.where}: no such file or directory")
    if arguments.dry_run:
        raise UsageError(f"--dry-run goes with --to safetensors, not with --to {arguments.to}")
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
        printing.say_json({**document, "seconds": round(seconds, 3)})
    else:
        printing.say(f"{arguments.target}: converted in {printing.duration(seconds)}")
        printing.say(f"left out: {left_out}")


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
        raise UsageError(
            f"{directory}: holds no {METADATA_NAME}: name a step directory, or a directory of "
            "torch.distributed.checkpoint (a ZeRO checkpoint: --to universal)"
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
        raise UsageError(
            f"{arguments.where}: no ZeRO checkpoint of DeepSpeed: name the directory of a tag, such as "
            "outputs/global_step400"
        )
    if not target.name.endswith(ENDING):
        raise UsageError(f"{arguments.target}: the name of a Universal Checkpoint ends in {ENDING}")
    _require_whole("deepspeed", source)
    inject = arguments.inject_missing_state
    try:
        _call(converting.tool(arguments.python, source, target, inject_missing_state=inject), "deepspeed")
        _require_whole("deepspeed", target)
    except StepkeeperError:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _call(argv: Sequence[str], needs: str) -> None:
    """Have another Python convert.  Raises StepkeeperError with the end of what it said."""
    try:
        converting.call(argv)
    except converting.ConversionError as error:
        hint = f"; name a Python with {needs} by --python" if "No module named" in str(error) else ""
        raise UsageError(f"--python {argv[0]}: {error}{hint}") from error


# `--to safetensors`, and the command itself.

SHOWN_EVERY_S = 1.0
SAFETENSORS = "safetensors"
CONFIG = "config.json"


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "export",
        help="write the model of a checkpoint as safetensors files, or convert a checkpoint",
        description="Write the model of a checkpoint as safetensors files, as model hubs keep them.  Needs "
        "neither torch nor a GPU, and little memory; every byte is compared with the manifest before it is used.  A "
        "DCP directory of another program is verified first.  With --to, write another format.  OUT is complete or not "
        "there.  What is left out is printed.",
    )
    command.add_argument("where", metavar="SOURCE", help="a step directory, or what --to says")
    command.add_argument("target", metavar="OUT", help="a directory that is not there yet; --to torch: a file")
    command.add_argument(
        "--to",
        choices=(SAFETENSORS, *TARGETS),
        default=SAFETENSORS,
        help="safetensors (default), or torch: one file of torch.save, from a step directory or DCP; dcp: from "
        "safetensors; universal: by DeepSpeed, from a ZeRO checkpoint",
    )
    command.add_argument(
        "--prefix",
        help=f"export only tensors with this prefix, and strip it (default {export.PREFIX}, if any name has it); "
        "--to dcp: add it to the names (default: none)",
    )
    command.add_argument(
        "--names",
        choices=sorted(STYLES),
        help="turn Llama-family names of this style into Hugging Face's; --to dcp: the other way round",
    )
    command.add_argument(
        "--head-dim",
        type=int,
        metavar="N",
        help="rows of an attention head, for --names (default: of config.json, by --copy or in SOURCE)",
    )
    command.add_argument(
        "--python",
        metavar="PYTHON",
        default=sys.executable,
        help="which has torch (--to torch, --to dcp) or deepspeed (--to universal); default: the one that runs this",
    )
    command.add_argument(
        "--inject-missing-state", action="store_true", help="--to universal: the model does not describe itself"
    )
    command.add_argument(
        "--dtype", choices=sorted(export.DTYPES), help="of floating-point tensors; default: as they are"
    )
    command.add_argument(
        "--max-shard-size", metavar="SIZE", type=size, default=export.SHARD_BYTES_MAX, help="of one file; default 5GB"
    )
    command.add_argument(
        "--copy",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="put this file beside the tensors, such as the model's config.json or tokenizer.json; may be repeated",
    )
    command.add_argument(
        "--keep-tied",
        action="store_true",
        help="write a tied tensor under each of its names; default: under the first, as model hubs have it",
    )
    command.add_argument("--dry-run", action="store_true", help="show what would be written")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> None:
    """Export a model."""
    if arguments.to != SAFETENSORS:
        convert(arguments, names_of(arguments))
        return
    directory = find.step_directory(arguments.where)
    plain = not os.path.lexists(directory / MANIFEST_NAME) and dcp_below(directory) is not None
    if plain:
        directory = verified_dcp(directory)
    began = time.monotonic()
    names = names_of(arguments)
    prefix = arguments.prefix
    if prefix is None:  # a DCP directory's model may have none
        prefix = export.usual_prefix(directory) if plain else export.PREFIX
    try:
        plan = export.plan_export(
            directory,
            prefix=prefix,
            dtype=arguments.dtype,
            shard_bytes_max=arguments.max_shard_size,
            keep_tied=arguments.keep_tied,
            names=names,
            plain=plain,
        )
        written = []
        if not arguments.dry_run:
            written = export.export(
                plan, Path(arguments.target), copies=arguments.copy, progress=_Progress(plan.bytes).add
            )
    except export.DamagedStepError as error:
        raise StepkeeperError(str(error), ExitCode.NOT_VERIFIED) from error
    except export.ExportError as error:
        raise UsageError(str(error)) from error
    seconds = time.monotonic() - began
    if arguments.json:
        printing.say_json(_document(plan, written, arguments.target, seconds))
    elif arguments.dry_run:
        _show(plan)
    else:
        count = sum(map(len, plan.shards))
        of = "" if plan.manifest is None else f" of step {plan.manifest.step}"
        checked = "it was verified before" if plan.manifest is None else "every byte was checked"
        printing.say(
            f"{arguments.target}: {count} tensors{of}, {printing.size(plan.bytes)} "
            f"in {len(plan.shards)} files, {printing.duration(seconds)}; {checked}"
        )
        if plan.left_out:
            printing.say(f"left out: {', '.join(f'{name} ({count})' for name, count in plan.left_out.items())}")


def names_of(arguments: argparse.Namespace) -> Names | None:
    """Return the names of the model.  Raises StepkeeperError where the rows of a head are not known."""
    if arguments.names is None:
        return None
    source = Path(arguments.where)
    configs = [path for path in arguments.copy if path.name == CONFIG]
    configs += [each for each in (source / CONFIG, source.parent / CONFIG) if each.is_file()]
    try:
        if arguments.head_dim is not None:
            return Names(arguments.names, check_head_dim(arguments.head_dim))
        if configs:
            return Names(arguments.names, head_dim_of(configs[0]))
    except OSError as error:
        raise UsageError(f"{configs[0]}: {error.strerror}") from error
    except NamesError as error:
        raise UsageError(str(error)) from error
    raise UsageError(f"--names needs the rows of an attention head: --head-dim N, or --copy {CONFIG} of the model")


class _Progress:
    """Tells a person at a terminal how far it is; nobody else."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._said_at = time.monotonic()
        self._shown = sys.stderr.isatty()

    def add(self, count: int) -> None:
        """Count bytes that were written."""
        self._done += count
        now = time.monotonic()
        if self._shown and now - self._said_at >= SHOWN_EVERY_S:
            self._said_at = now
            printing.warn(f"{self._done / max(1, self._total):.0%} of {printing.size(self._total)}")


def _document(plan: export.Plan, written: list[export.Written], target: str, seconds: float) -> dict[str, Any]:
    return {
        "directory": str(plan.directory),
        "step": None if plan.manifest is None else plan.manifest.step,
        "save_id": None if plan.manifest is None else plan.manifest.save_id,
        "target": os.path.abspath(target),
        "bytes": plan.bytes,
        "files": [{"name": file.name, "bytes": file.bytes, "xxh3_128": file.xxh3_128} for file in written],
        "tensors": {
            name: {item.name: {"dtype": item.dtype, "shape": list(item.entry.size)} for item in shard}
            for name, shard in export.homes(plan).items()
        },
        "tied": dict(plan.tied),
        "left_out": dict(plan.left_out),
        "seconds": round(seconds, 3),
    }


def _show(plan: export.Plan) -> None:
    rows = [("FILE", "TENSOR", "DTYPE", "SHAPE", "SIZE")]
    for name, shard in export.homes(plan).items():
        rows += [
            (name, item.name, item.dtype, "x".join(map(str, item.entry.size)) or "-", printing.size(item.bytes))
            for item in shard
        ]
    printing.say_table(rows)
    for name, first in plan.tied.items():
        printing.say(f"{name} is {first}, and is not written again")
    printing.say(f"{len(rows) - 1} tensors, {printing.size(plan.bytes)} in {len(plan.shards)} files; nothing written")

"""`stepkeeper checkpoints export STEPDIR OUT`: the model as safetensors files."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.store import find
from stepkeeper_trainer.store import export

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
SHOWN_EVERY_S = 1.0


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "export",
        help="write the model of a step directory as safetensors files",
        description="Write the model of a step directory as safetensors files, as model hubs keep them.  Needs "
        "neither torch nor a GPU, and little memory; every byte is compared with the manifest before it is used.  "
        "OUT is complete or not there.",
        allow_abbrev=False,
    )
    command.add_argument("where", metavar="STEPDIR", help="a step directory")
    command.add_argument("target", metavar="OUT", help="a directory that is not there yet")
    command.add_argument(
        "--prefix",
        default=export.PREFIX,
        help=f"export the tensors whose names begin so, without it; default {export.PREFIX}",
    )
    command.add_argument(
        "--dtype", choices=sorted(export.DTYPES), help="of floating-point tensors; default: as they are"
    )
    command.add_argument(
        "--max-shard-size", metavar="SIZE", type=_size, default=export.SHARD_BYTES_MAX, help="of one file; default 5GB"
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
        help="write a tensor that the model has under several names under each of them; default: under the first, "
        "as model hubs have it",
    )
    command.add_argument("--dry-run", action="store_true", help="show what would be written")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    unit = (match.group(2) or "").lower() if match else ""
    size = int(float(match.group(1)) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[:1]]) if match else 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 5GB, 500MB or 2GiB")
    return size


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Export a model."""
    directory = find.step_directory(arguments.where)
    began = time.monotonic()
    try:
        plan = export.plan_export(
            directory,
            prefix=arguments.prefix,
            dtype=arguments.dtype,
            shard_bytes_max=arguments.max_shard_size,
            keep_tied=arguments.keep_tied,
        )
        written = []
        if not arguments.dry_run:
            written = export.export(
                plan, Path(arguments.target), copies=arguments.copy, progress=_Progress(plan.bytes).add
            )
    except export.DamagedStepError as error:
        raise StepkeeperError(str(error), ExitCode.NOT_VERIFIED) from error
    except export.ExportError as error:
        raise StepkeeperError(str(error), ExitCode.USAGE) from error
    seconds = time.monotonic() - began
    if arguments.json:
        printing.say_json(_document(plan, written, arguments.target, seconds), indent=2)
    elif arguments.dry_run:
        _show(plan)
    else:
        count = sum(map(len, plan.shards))
        printing.say(
            f"{arguments.target}: {count} tensors of step {plan.manifest.step}, {printing.size(plan.bytes)} "
            f"in {len(plan.shards)} files, {printing.duration(seconds)}; every byte was checked"
        )
    return ExitCode.FINISHED


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
        "step": plan.manifest.step,
        "save_id": plan.manifest.save_id,
        "target": os.path.abspath(target),
        "bytes": plan.bytes,
        "files": [{"name": file.name, "bytes": file.bytes, "xxh3_128": file.xxh3_128} for file in written],
        "tensors": {
            name: {item.name: {"dtype": item.dtype, "shape": list(item.entry.size)} for item in shard}
            for name, shard in export.homes(plan).items()
        },
        "tied": dict(plan.tied),
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

"""`stepkeeper checkpoints export SOURCE OUT`: a model as safetensors files, and other conversions of checkpoints."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from stepkeeper.cli import checkpoints_convert, printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import find
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.store import export
from stepkeeper_trainer.store.export import STYLES, Names, NamesError, check_head_dim, head_dim_of

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
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
        allow_abbrev=False,
    )
    command.add_argument("where", metavar="SOURCE", help="a step directory, or what --to says")
    command.add_argument("target", metavar="OUT", help="a directory that is not there yet; --to torch: a file")
    command.add_argument(
        "--to",
        choices=(SAFETENSORS, *checkpoints_convert.TARGETS),
        default=SAFETENSORS,
        help="safetensors (default): from a step directory or a DCP directory; torch: the same into one file of "
        "torch.save; dcp: from safetensors; universal: from a ZeRO checkpoint, by DeepSpeed's own tool",
    )
    command.add_argument(
        "--prefix",
        help=f"export the tensors whose names begin so, without it (default {export.PREFIX}, or none where nothing "
        "begins so); --to dcp: put it before the names (default: nothing)",
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
    if arguments.to != SAFETENSORS:
        return checkpoints_convert.execute(arguments, names_of(arguments))
    directory = find.step_directory(arguments.where)
    plain = not os.path.lexists(directory / MANIFEST_NAME) and checkpoints_convert.dcp_below(directory) is not None
    if plain:
        directory = checkpoints_convert.verified_dcp(directory)
    began = time.monotonic()
    names = names_of(arguments)
    try:
        plan = export.plan_export(
            directory,
            prefix=_prefix(arguments, directory, plain=plain),
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
        raise StepkeeperError(str(error), ExitCode.USAGE) from error
    seconds = time.monotonic() - began
    if arguments.json:
        printing.say_json(_document(plan, written, arguments.target, seconds), indent=2)
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
    return ExitCode.FINISHED


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
        raise StepkeeperError(f"{configs[0]}: {error.strerror}", ExitCode.USAGE) from error
    except NamesError as error:
        raise StepkeeperError(str(error), ExitCode.USAGE) from error
    raise StepkeeperError(
        f"--names needs the rows of an attention head: --head-dim N, or --copy {CONFIG} of the model", ExitCode.USAGE
    )


def _prefix(arguments: argparse.Namespace, directory: Path, *, plain: bool) -> str:
    """Return the prefix that was asked for; of a DCP directory whose model has none, none."""
    if arguments.prefix is not None or not plain:
        return export.PREFIX if arguments.prefix is None else str(arguments.prefix)
    return export.usual_prefix(directory)


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

"""`stepkeeper checkpoints tiers|copy`: which step is where, and copies by hand."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from stepkeeper import printing
from stepkeeper.config import resolve
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import NotFoundError, StepkeeperError, UsageError
from stepkeeper.run_store import find
from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.formats.steps import COMMITTED
from stepkeeper_trainer.tiers.copying import Pace, copy_step
from stepkeeper_trainer.tiers.directory import DirectoryTier, open_tier
from stepkeeper_trainer.tiers.search import counts
from stepkeeper_trainer.tiers.survey import Surveyed, newest_anywhere, on_the_way, survey
from stepkeeper_trainer.tiers.tier import (
    SNAPSHOT_DIRECTORY,
    DamagedCopyError,
    Held,
    Tier,
    TierError,
    Tiers,
    check_place,
    read_identity,
)

_STATES = {"complete": COMMITTED}  # what JSON calls it, and what people read


def add(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    tiers = below.add_parser(
        "tiers",
        help="say which tier has which step, and how far copies lag",
        description="Say which tier has which step: this node's disk, the run directory, the cold tier.  The places "
        "are those that the newest attempt's settings name, else those that its ranks have recorded.",
    )
    tiers.add_argument("where", metavar="RUN", help="run directory or job id")
    tiers.add_argument("--cold", metavar="URL", help="look there instead")
    tiers.add_argument("--local", metavar="DIR", help="look there instead, on this node")
    tiers.add_argument("--deep", action="store_true", help="read every byte")
    tiers.add_argument("--json", action="store_true", help="one JSON document")
    tiers.set_defaults(execute=show)
    copy = below.add_parser(
        "copy",
        help="copy steps to another tier, or back",
        description="Copy a step to another place, or the newest verified one back from there.  Each chunk is compared "
        "with the manifest on its way, and what was written is read back.  An interrupted copy resumes.",
    )
    copy.add_argument("where", metavar="RUN", help="run directory, its checkpoints/, or job id")
    way = copy.add_mutually_exclusive_group(required=True)
    way.add_argument("--to", metavar="URL", help="a directory, or the URL of an object store")
    way.add_argument(
        "--from", dest="source", metavar="URL", help="bring the newest undamaged step of the run from there"
    )
    which = copy.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="this step (default: the newest verified one)")
    which.add_argument("--all", action="store_true", help="all steps of the current lineage, newest first")
    copy.add_argument("--zstd", type=int, metavar="LEVEL", help="compress files, in an object store")
    copy.add_argument("--max-rate", type=float, metavar="MB/S", help="no faster than this")
    copy.add_argument("--json", action="store_true", help="one JSON document")
    copy.set_defaults(execute=copy_steps)


def show(arguments: argparse.Namespace) -> None:
    """Print a table of steps and tiers."""
    run = find.find(arguments.where, os.environ)
    tiers, earlier = _tiers_of(run.path)
    cold = arguments.cold or tiers.cold
    places = _on_this_node(run.path, tiers, arguments.local or tiers.local)
    found = [survey(kind, DirectoryTier(place), deep=arguments.deep) for kind, place in places]
    shared = survey("shared", DirectoryTier(run.checkpoints), deep=arguments.deep)
    found.append(shared)
    if cold is not None:
        found.append(survey("cold", _open(cold), deep=arguments.deep))
    going = on_the_way(run.checkpoints)
    if arguments.json:
        printing.say_json(
            {
                "run": str(run.path),
                "tiers": [
                    {"newest": each.newest, "lag_steps": _lag(each, shared), **dataclasses.asdict(each)}
                    for each in found
                ],
                "on_the_way": going,
                "used_earlier": [{"kind": each.kind, "where": each.where, "launch": each.launch} for each in earlier],
            }
        )
    else:
        _say(found, shared)
        for what, names in (("shared storage", going.to_shared), ("the cold tier", going.to_cold)):
            for name in names:
                printing.say(f"on the way to {what}: {name}")
        for each in earlier:
            printing.say(f"used by launch {each.launch}: {each.where}; look there with --{each.kind}")


def _lag(tier: Surveyed, shared: Surveyed) -> int | None:
    """Return by how many steps a tier is behind shared storage; negative: it is ahead."""
    return shared.newest - tier.newest if shared.newest is not None and tier.newest is not None else None


def _say(found: list[Surveyed], shared: Surveyed) -> None:
    for tier in found:
        lag = _lag(tier, shared)
        behind = f", {lag} steps behind" if lag is not None and lag > 0 else ""
        newest = f"newest step {tier.newest}{behind}" if tier.newest is not None else "no step, or damaged ones only"
        printing.say(f"{tier.kind:7} {tier.name}: {tier.error or newest}")
    saves = {(copy.step, copy.save_id) for tier in found for copy in tier.steps}
    if not saves:
        return
    table = [("STEP", "SAVE", *(tier.kind.upper() for tier in found))]
    for step, save_id in sorted(saves, reverse=True):
        table.append((str(step), save_id[:8], *(_words(tier, save_id) for tier in found)))
    printing.say()
    printing.say_table(table, right=frozenset({0}))


def _words(tier: Surveyed, save_id: str) -> str:
    copy = next((each for each in tier.steps if each.save_id == save_id), None)
    if copy is None:
        return "-"
    return f"{copy.files} of {copy.of} files" if copy.state == "part" else _STATES.get(copy.state, copy.state)


def copy_steps(arguments: argparse.Namespace) -> None:
    """Copy steps to a place, or the newest one back."""
    checkpoints = find.checkpoints(arguments.where, os.environ)
    rate = arguments.max_rate
    if rate is not None and rate <= 0:
        raise UsageError(f"--max-rate {rate:g}: more than 0 is wanted, in MB/s")
    pace = Pace(rate * 1e6 if rate is not None else None)
    shared = DirectoryTier(checkpoints)
    if arguments.source is not None:
        _bring(arguments, shared, _open(arguments.source), pace)
        return
    target = _open(arguments.to, arguments.zstd)
    copied = [_copy(shared, held, target, pace) for held in _wanted(arguments, shared)]
    if arguments.json:
        printing.say_json({"target": target.name, "steps": copied})
    else:
        for each in copied:
            printing.say(
                f"{target.name}/{each['directory']}: {printing.size(each['bytes_copied'])} copied, "
                f"{printing.size(each['bytes_there'])} were there, {printing.duration(each['seconds'])}"
            )


def _wanted(arguments: argparse.Namespace, shared: DirectoryTier) -> list[Held]:
    steps = shared.steps()
    if arguments.step is not None:
        steps = [held for held in steps if held.manifest.step == arguments.step]
    if not steps:
        what = f"step {arguments.step}" if arguments.step is not None else "a step"
        raise NotFoundError(f"{shared.name}: {what} of the current lineage is not there")
    if arguments.all:
        return steps
    if arguments.step is not None:
        return steps[:1]
    for held in steps:
        problems = shared.problems(held, deep=True)
        if not problems:
            return [held]
        printing.warn(f"{held.directory} is passed over: {problems[0]}")
    raise StepkeeperError(f"{shared.name}: every step is damaged", ExitCode.NOT_VERIFIED)


def _copy(shared: DirectoryTier, held: Held, target: Tier, pace: Pace) -> dict[str, Any]:
    began = time.monotonic()
    try:
        pushed = copy_step(shared, held, target, pace=pace)
    except DamagedCopyError as error:
        raise StepkeeperError(str(error), ExitCode.NOT_VERIFIED) from error
    except TierError as error:
        raise StepkeeperError(str(error), ExitCode.STORAGE) from error
    return {
        "step": held.manifest.step,
        "save_id": held.manifest.save_id,
        "directory": pushed.directory,
        "bytes_copied": pushed.bytes_copied,
        "bytes_there": pushed.bytes_there,
        "seconds": round(time.monotonic() - began, 3),
    }


def _bring(arguments: argparse.Namespace, shared: DirectoryTier, source: Tier, pace: Pace) -> None:
    lineage = lineages.read(shared.checkpoints)

    def wanted(held: Held) -> bool:
        step = arguments.step
        return counts(held.manifest, lineage) and (step is None or held.manifest.step == step)

    found = newest_anywhere(shared, [source], counts=wanted, pace=pace)
    for problem in found.passed_over:
        printing.warn(f"passed over: {problem}")
    if found.directory is None or found.held is None:
        raise NotFoundError(f"{source.name}: no step of this run, or damaged ones only")
    if arguments.json:
        step = found.held.manifest.step
        printing.say_json({"directory": found.directory, "step": step, "came_from": found.came_from})
    else:
        printing.say(f"{shared.checkpoints / found.directory}: from {found.came_from}, every byte was checked")


def _open(where: str, zstd: int | None = None) -> Tier:
    place = where if "://" in where else os.path.abspath(os.path.expanduser(where))
    if zstd is not None and "://" not in place:
        raise UsageError(f"{place}: files are compressed in object stores only: leave out --zstd")
    try:
        check_place(place)
        return open_tier(place, **({"zstd_level": zstd} if zstd is not None else {}))
    except TierError as error:
        raise UsageError(str(error)) from error


def _tiers_of(run: Path) -> tuple[Tiers, list[records.Place]]:
    """Return the tiers in use, and those that launches have used earlier.

    What the settings of the newest attempt name counts, as it does for the ranks; else what the ranks have recorded.
    """
    chosen = _settings_of(run)
    try:
        kept = records.read_keeping(run)
    except (OSError, records.RecordError) as error:
        printing.warn(f"what the ranks have recorded cannot be read: {error}")
        kept = None
    places = kept.places if kept is not None else ()
    if not chosen.any and kept is not None:
        local, cold = kept.now("local"), kept.now("cold")
        chosen = Tiers(local=local.where if local else None, cold=cold.where if cold else None)
    owner = run.stat().st_uid
    if chosen.any and owner != os.geteuid():  # or our credentials would go wherever somebody else's file says
        printing.warn(
            f"{run} belongs to user id {owner}, and the places that it names are not visited in your name: "
            "to look there, name them with --local and --cold"
        )
        chosen = Tiers()
    in_use = {("local", chosen.local), ("cold", chosen.cold)}
    return chosen, [place for place in places if (place.kind, place.where) not in in_use]


def _settings_of(run: Path) -> Tiers:
    """Return the tiers of the newest attempt that recorded its settings; none where nothing is recorded."""
    attempts = (run / "attempts").glob("attempt-*")
    numbers = (path.name.removeprefix("attempt-") for path in attempts)
    for number in sorted((int(each) for each in numbers if each.isdecimal()), reverse=True):
        settings = resolve.read_record(run, number).settings
        if "local_tier" not in settings:
            continue  # not recorded, or of a version without tiers
        keys = ("local_tier", "cold_tier", "snapshot_every", "snapshot_dir")
        values = [settings.get(key, {}).get("value") for key in keys]
        local, cold, every, directory = (value if isinstance(value, str) else None for value in values)
        return Tiers(local=local, cold=cold, snapshot_every=every, snapshot_directory=directory or SNAPSHOT_DIRECTORY)
    return Tiers()


def _on_this_node(run: Path, tiers: Tiers, local: str | None) -> Iterator[tuple[Literal["memory", "local"], Path]]:
    """Yield the places of a run on this node: in its memory, and on its own disk."""
    try:
        identity = read_identity(run / "checkpoints")
    except (OSError, TierError):
        return  # no rank has ever had a place on a node
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    if tiers.snapshot_every is not None:
        yield "memory", tiers.snapshots_of(run, identity, node)
    if local is not None:
        there = Tiers(local=os.path.abspath(os.path.expanduser(local))).local_checkpoints(run, identity, node)
        if there is not None:
            yield "local", there

"""Megatron-core: `torch_dist`, and the legacy format with a file for each model parallel rank."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepkeeper.frameworks import inert, parts
from stepkeeper.frameworks.framework import (
    Contents,
    Framework,
    Kind,
    Part,
    Resume,
    Step,
    WorldChange,
    Writes,
)
from stepkeeper.frameworks.script import Script

_LEGACY = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_RANKS_MAX = 1_000_000
_COMMON_KEY = "common_state"  # in DCP, in place of `common.pt`, since 2026
TRACKER = "latest_checkpointed_iteration.txt"
METADATA, COMMON, INTEGRITY = "metadata.json", "common.pt", "integrity.json"


class Megatron(Framework):
    """`iter_NNNNNNN/`; the tracker `latest_checkpointed_iteration.txt` is a hint and no marker."""

    name = "megatron"
    title = "Megatron-core (torch_dist, legacy)"
    imports = ("megatron.core", "megatron.training", "megatron")
    step_name = re.compile(r"iter_(\d{7,18})")  # `release` is a model to begin from
    commands = ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "pretrain_vlm.py")
    step_line = r"iteration\s+(\d+)/\s*\d+ \|"
    how_to_save = "`--exit-signal-handler`: SIGTERM saves and exits, also `--exit-duration-in-mins`"

    writes = Writes(("--save",))
    target_options = ("--train-iters",)
    notice_options = ("--exit-signal-handler",)
    ends_at_target = True  # it saves there; a malformed tracker ends it with 0, too

    def takes_resume(self, script: Script) -> bool:
        """Look for its own parser."""
        ours = any(word.rpartition("/")[2] in self.commands for word in script.words)
        return ours or any(name.startswith("megatron.training") for name in script.modules)

    def look(self, contents: Contents) -> None:
        """Tell the format by the directories, and require what it needs."""
        legacy = sorted(name for name in contents.tree.directories if _LEGACY.fullmatch(name))
        if legacy:
            contents.world_change = WorldChange.NO  # of model parallel ranks; for others nobody has tried it
            add_legacy(contents, legacy)
        else:
            add_torch_dist(contents)

    def pointers(self, step: Step) -> Mapping[Path, bytes]:
        """Return the tracker, which holds the step."""
        return {step.path.parent / TRACKER: str(step.number).encode()}

    def resume(self, contents: Contents) -> Resume:
        """Name the step, and have a missing checkpoint end the run: it would begin with random weights."""
        return Resume(
            (
                "--load",
                os.path.abspath(contents.step.path.parent),
                "--ckpt-step",
                str(contents.step.number),
                "--exit-on-missing-checkpoint",
            ),
            "a malformed tracker ends Megatron with exit code 0: finished means that the step was reached",
        )


def add_torch_dist(contents: Contents, directory: str = "", *, or_dcp: bool = False) -> None:
    """Add what `dist_checkpointing.save` wrote, in a directory of the checkpoint.

    Args:
        contents: of the checkpoint.
        directory: in it; empty: the checkpoint itself.
        or_dcp: plain DCP counts too, where nothing shows that Megatron wrote it.
    """
    below = f"{directory}/" if directory else ""
    tree = contents.tree
    common, said = f"{below}{COMMON}", None
    contents.keys = parts.add_dcp(contents, directory)
    in_dcp = any(key == _COMMON_KEY or key.startswith(f"{_COMMON_KEY}/") for key in contents.keys)
    plain = or_dcp and f"{below}{METADATA}" not in tree and common not in tree and not in_dcp
    if plain:
        pass
    elif f"{below}{METADATA}" not in tree:
        contents.problem(
            f"{below}{METADATA}: {tree.why_missing(f'{below}{METADATA}')}; Megatron writes it after the data (the "
            "formats torch_dcp and fsdp_dtensor have none and are not supported)"
        )
    else:
        said = parts.add_json(contents, f"{below}{METADATA}")
        backend = said.get("sharded_backend") if isinstance(said, dict) else None
        if backend != "torch_dist" and isinstance(said, dict):
            contents.problem(f"{below}{METADATA}: of the format {str(backend)[:40]!r}, which is not supported")
    if common in tree:
        if parts.add_archive(contents, common):
            _common(contents, parts.read_pickle(contents, common), common)
    elif isinstance(said, dict) and said.get("common_backend") and not in_dcp:
        contents.problem(f"{common}: {tree.why_missing(common)}, and {below}{METADATA} names its backend")
    _integrity(contents, below)
    if not contents.problems and not any("optim" in key for key in contents.keys):
        contents.not_resumable = "holds no optimizer state (--no-save-optim)"


def _common(contents: Contents, state: Any, name: str) -> None:
    number = inert.whole_number(state, "iteration")
    if number is not None and contents.number is not None and number != contents.number:
        contents.problem(f"{name}: is of step {number}")
    contents.number = contents.number if contents.number is not None else number
    contents.target = inert.whole_number(state, "args", "train_iters") or contents.target
    contents.world_size = inert.whole_number(state, "args", "world_size") or contents.world_size


def _integrity(contents: Contents, below: str) -> None:
    """Take the SHA-256s of `integrity.json`: names and digests, at the top or under `files`."""
    name = f"{below}{INTEGRITY}"
    if name not in contents.tree:
        return
    document = parts.add_json(contents, name)
    files = document.get("files", document) if isinstance(document, dict) else None
    found: dict[str, str] = {}
    for file, value in files.items() if isinstance(files, dict) else ():
        digest = value.get("sha256") if isinstance(value, dict) else value
        if isinstance(file, str) and isinstance(digest, str) and _SHA256.fullmatch(digest):
            found[file] = digest.lower()
    if not found:
        contents.problem(f"{name}: holds no SHA-256 of a file")
    for file, digest in found.items():
        path = f"{below}{file}"
        part = contents.parts.get(path)
        if path not in contents.tree:
            contents.problem(f"{path[:200]}: {contents.tree.why_missing(path)}, and {name} names it")
        else:
            contents.parts[path] = dataclasses.replace(part or Part(path, Kind.PLAIN), sha256=digest)


def add_legacy(contents: Contents, directories: list[str]) -> None:
    """Add one file for each model parallel rank; rank 0's arguments say how many there are."""
    arguments = _legacy_files(contents, directories)
    if arguments is not None:
        _require_legacy(contents, directories, arguments)


def _legacy_files(contents: Contents, directories: list[str]) -> Any:
    """Add the files that are there; return the state of the first model parallel rank."""
    tree = contents.tree
    first: Any = None
    for directory in directories:
        files = [name for name in ("model_optim_rng.pt", "model_rng.pt") if f"{directory}/{name}" in tree]
        if not files:
            contents.problem(f"{directory}/model_optim_rng.pt: missing")
            continue
        path = f"{directory}/{files[0]}"
        if parts.add_archive(contents, path):
            state = parts.read_pickle(contents, path)
            if first is None:
                first = state
                _common(contents, state, path)
        for name in ("distrib_optim.pt", "optim.pt"):
            if f"{directory}/{name}" in tree:
                parts.add_archive(contents, f"{directory}/{name}")
        if (
            files[0] == "model_rng.pt"
            and not {f"{directory}/distrib_optim.pt", f"{directory}/optim.pt"} & tree.files.keys()
        ):
            contents.problem(f"{directory}/optim.pt: missing")
    return first


def _require_legacy(contents: Contents, directories: list[str], arguments: Any) -> None:
    """Require the directory of each model parallel rank, by the arguments of the job."""
    tree = contents.tree
    tensor = inert.whole_number(arguments, "args", "tensor_model_parallel_size") or 1
    pipeline = inert.whole_number(arguments, "args", "pipeline_model_parallel_size") or 1
    expert = inert.whole_number(arguments, "args", "expert_model_parallel_size") or 1
    if tensor * pipeline * expert > _RANKS_MAX:
        contents.problem(f"{directories[0]}: says {tensor * pipeline * expert} model parallel ranks, which no job has")
        return
    wanted = {
        _legacy_name(t, p if pipeline > 1 else None, e if expert > 1 else None)
        for t in range(tensor)
        for p in range(pipeline)
        for e in range(expert)
    }
    if missing := sorted(wanted.difference(directories)):
        contents.problem(f"{parts.some(missing)}: missing: {len(wanted)} model parallel ranks saved it")
    if inert.field_of(arguments, "args", "use_distributed_optimizer") is True:
        lacking = [name for name in sorted(wanted) if f"{name}/distrib_optim.pt" not in tree]
        if lacking:
            contents.problem(f"{parts.some(lacking)}: distrib_optim.pt is missing")
    if inert.field_of(arguments, "optimizer") is None and not any(name.endswith("optim.pt") for name in tree.files):
        contents.not_resumable = "holds no optimizer state (--no-save-optim)"


def _legacy_name(tensor: int, pipeline: int | None, expert: int | None) -> str:
    name = f"mp_rank_{tensor:02d}"
    if pipeline is not None:
        name += f"_{pipeline:03d}"
    return name if expert is None else f"{name}_{expert:03d}"


FRAMEWORK = Megatron()

"""Lightning: single files, and directories of FSDP, ModelParallel and DeepSpeed strategies."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from stepkeeper.frameworks import inert, parts
from stepkeeper.frameworks.adapters import deepspeed
from stepkeeper.frameworks.framework import Contents, Framework, Resume, Step, Writes
from stepkeeper.frameworks.script import Script, last_name

_SUFFIX = ".ckpt"
_NUMBER = re.compile(r"step[=_](\d{1,18})")
_DEPTH_MAX = 5
_DIRECTORIES_MAX = 2000
_NEEDED = ("state_dict", "optimizer_states", "loops", "global_step")
_META = "meta.pt"


class Lightning(Framework):
    """`*.ckpt`, whose step stands inside: names are free, and `last.ckpt` says nothing."""

    name = "lightning"
    title = "Lightning (file and sharded)"
    imports = ("lightning", "pytorch_lightning", "lightning_fabric")
    commands = ("lightning",)
    how_to_save = "a Callback that calls `trainer.save_checkpoint`, at the end of a batch"

    writes = Writes(
        ("--trainer.default_root_dir", "--default_root_dir"),
        ("dirpath", "default_root_dir"),
        ("ModelCheckpoint",),
        "lightning_logs",
    )
    resume_option = "--ckpt_path"
    resume_keyword = "ckpt_path"
    target_options = ("--trainer.max_steps",)
    target_keywords = (("max_steps", "Trainer"),)
    attach_takes = "trainer.fit(...)"
    finds = re.compile(r"ckpt_")  # `hpc_ckpt_N.ckpt`

    def directory(self, script: Script) -> tuple[str | None, str] | None:
        """Look at the Trainer's logger: without a `dirpath`, its directory comes before `default_root_dir`."""
        if script.given("dirpath", ("ModelCheckpoint",)):
            return None
        rooted = bool(script.given("default_root_dir")) or script.has_option(self.writes.options)
        loggers, saves = (_of_trainer(script, name) for name in ("logger", "enable_checkpointing"))
        if loggers - {"None", "True", "False"} or len(loggers) > 1:
            return None, f"the logger decides where the Trainer of {script.name} saves: name it with --checkpoint-dir"
        if rooted:
            return None
        if saves - {"None", "True"}:
            return (
                None,
                f"the Trainer of {script.name} never saves, or not always: name it with --checkpoint-dir",
            )
        return ("checkpoints", "logger=False without default_root_dir") if loggers == {"False"} else None

    def takes_resume(self, script: Script) -> bool:
        """Look for LightningCLI and its subcommand."""
        return "fit" in script.words and any(
            isinstance(node, ast.Name) and node.id == "LightningCLI" for node in script.nodes
        )

    def list_steps(self, root: Path) -> list[Step]:
        """Return `*.ckpt` below a directory, as `lightning_logs/version_0/checkpoints/` has them."""
        found: list[Step] = []
        for seen, (at, directories, files) in enumerate(os.walk(root), start=1):
            depth = len(Path(at).relative_to(root).parts)
            checkpoints = [name for name in directories if name.endswith(_SUFFIX)]
            directories[:] = sorted(set(directories).difference(checkpoints)) if depth < _DEPTH_MAX else []
            for name in (*checkpoints, *(each for each in files if each.endswith(_SUFFIX))):
                path = Path(at, name)
                if not path.is_symlink():
                    found.append(Step(path, _number(name)))
            if seen >= _DIRECTORIES_MAX:
                break
        return found

    def is_step(self, path: Path) -> bool:
        """Go by the suffix."""
        return path.name.endswith(_SUFFIX) and (path.is_dir() or path.is_file())

    def look(self, contents: Contents) -> None:
        """Read the state without its tensors."""
        world_size = contents.world_size
        tree, path = contents.tree, contents.step.path
        if path.name in tree.files and tree.root == path.parent:
            state = parts.read_pickle(contents, path.name) if parts.add_archive(contents, path.name) else None
            keys = inert.plain(state)
            if isinstance(keys, dict):
                self._state(contents, state, missing=[key for key in _NEEDED if key not in keys])
            elif not contents.problems:
                contents.problem(f"{path.name}: holds no state of a Trainer")
        elif "checkpoint" in tree.directories and deepspeed.is_engine(tree, "checkpoint"):
            deepspeed.add_engine(contents, "checkpoint", world_size)
            deepspeed.require_latest(contents, "checkpoint")
        else:
            keys = parts.add_dcp(contents)
            if _META not in tree:
                contents.problem(f"{_META}: {tree.why_missing(_META)}; Lightning writes it last")
            elif parts.add_archive(contents, _META):
                state = parts.read_pickle(contents, _META)
                sharded = any(key.startswith("optimizer") for key in keys)
                self._state(contents, state, missing=[] if sharded else ["optimizer states"])

    @staticmethod
    def _state(contents: Contents, state: object, *, missing: list[str]) -> None:
        number = inert.whole_number(state, "global_step")
        if number is None:
            contents.problem("says no global_step: it is no checkpoint of a Trainer")
        contents.number = number
        if missing:
            contents.not_resumable = f"holds the weights alone (save_weights_only): no {', '.join(missing)}"

    def resume(self, contents: Contents) -> Resume:
        """Name the file: "last" goes by the time of change."""
        path = os.path.abspath(contents.step.path)
        return Resume(("--ckpt_path", path), "trainer.fit(..., ckpt_path=PATH); LightningCLI: `fit --ckpt_path PATH`")


def _of_trainer(script: Script, name: str) -> set[str]:
    """Return what Trainers are given by a keyword: constants as they are written, `...` for anything else."""
    found: set[str] = set()
    for node in script.nodes:
        if isinstance(node, ast.Call) and last_name(node.func) == "Trainer":
            given = [each.value for each in node.keywords if each.arg in (name, None)]  # None: `**settings`
            found |= {str(each.value) if isinstance(each, ast.Constant) else "..." for each in given}
    option = f"--trainer.{name}"
    if said := script.option((option,)):
        found.add({"false": "False", "true": "True", "null": "None"}.get(said[0].lower(), "..."))
    elif any(word.startswith(option) for word in script.words):
        found.add("...")
    return found


def _number(name: str) -> int | None:
    found = _NUMBER.search(name)
    return int(found[1]) if found else None


FRAMEWORK = Lightning()

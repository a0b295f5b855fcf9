"""Megatron-Bridge: Megatron's `torch_dist` with files of its own beside it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from stepkeeper.frameworks import parts
from stepkeeper.frameworks.adapters import megatron
from stepkeeper.frameworks.framework import POINTER_BYTES_MAX, Contents, Framework, Resume, Step, Writes
from stepkeeper.frameworks.script import Script
from stepkeeper_trainer.formats.plain import read_plain

_STEP = re.compile(r"iter_(\d{7,18})")
_STATE, _LATEST_STATE = "train_state.pt", "latest_train_state.pt"
_OWN = (_STATE, "run_config.yaml")


class MegatronBridge(Framework):
    """As Megatron; `run_config.yaml` is written after the tracker names the directory."""

    name = "megatron-bridge"
    title = "Megatron-Bridge"
    imports = ("megatron.bridge",)
    step_name = _STEP
    commands = ()
    step_line = r"iteration\s+(\d+)/\s*\d+ \|"
    how_to_save = "`train.exit_signal_handler=True`: SIGTERM saves and exits"

    notice_options = ("train.exit_signal_handler=True",)
    target_options = ("train.train_iters",)
    writes = Writes(("checkpoint.save",))

    def takes_resume(self, script: Script) -> bool:
        """Look whether the command overrides the configuration in this way already."""
        return any(word.startswith("checkpoint.") for word in script.words)

    def is_step(self, path: Path) -> bool:
        """Go by the name and by what only Bridge writes."""
        return (
            _STEP.fullmatch(path.name) is not None
            and path.is_dir()
            and any((place / name).exists() for place, name in self._signs(path))
        )

    @staticmethod
    def _signs(path: Path) -> list[tuple[Path, str]]:
        return [*((path, name) for name in _OWN), (path.parent, _LATEST_STATE)]

    def look(self, contents: Contents) -> None:
        """Require Bridge's own files too."""
        megatron.add_torch_dist(contents)
        parts.add_archive(contents, _STATE)
        parts.add_plain(contents, "run_config.yaml")

    def pointers(self, step: Step) -> Mapping[Path, bytes]:
        """Return Megatron's tracker, and the copy of `train_state.pt` that Bridge reads first."""
        found = {step.path.parent / megatron.TRACKER: str(step.number).encode()}
        with contextlib.suppress(OSError):  # without it the checkpoint is torn, and nothing is to name it
            state = read_plain(step.path / _STATE, POINTER_BYTES_MAX, within=step.path)
            found[step.path.parent / _LATEST_STATE] = state
        return found

    def resume(self, contents: Contents) -> Resume:
        """Name directory and step."""
        root = os.path.abspath(contents.step.path.parent)
        return Resume(
            (f"checkpoint.load={root}", f"checkpoint.ckpt_step={contents.step.number}"),
            "CheckpointConfig(load=..., ckpt_step=...)",
        )


FRAMEWORK = MegatronBridge()

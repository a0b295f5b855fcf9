"""Hugging Face Trainer, and what is built on it: TRL, axolotl, LLaMA-Factory."""

from __future__ import annotations

import ast
import itertools
import os
import re

from stepkeeper.frameworks import parts
from stepkeeper.frameworks.adapters import deepspeed
from stepkeeper.frameworks.framework import Contents, Framework, Resume, Writes
from stepkeeper.frameworks.script import Script, last_name

_RNG = re.compile(r"rng_state_(\d{1,6})\.pth")
_DEEPSPEED = re.compile(r"global_step\d+")
_PARSERS = ("HfArgumentParser", "TrlParser")
_CONFIGS = ("SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig", "ORPOConfig", "RewardConfig", "PPOConfig")
_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", *_CONFIGS)
_AS_BEFORE = ("scheduler.pt", "scaler.pt")  # with DeepSpeed the first, and in half precision the second
_AXOLOTL = "axolotl"
_SENTINEL = "checkpoint-is-incomplete.txt"  # of its own handler of SIGTERM, and nothing of it reads that


class HuggingFace(Framework):
    """`checkpoint-N/`, whose `trainer_state.json` is written last by rank 0, without a barrier."""

    name = "huggingface"
    title = "Hugging Face Trainer (TRL, axolotl, LLaMA-Factory)"
    imports = (
        "transformers.Trainer",
        "transformers.TrainingArguments",
        "transformers.Seq2SeqTrainer",
        "transformers.Seq2SeqTrainingArguments",
        "transformers.trainer",
        "transformers.training_args",
        "trl",
        "axolotl",
        "llamafactory",
    )
    step_name = re.compile(r"checkpoint-(\d+)")
    commands = ("axolotl", "axolotl.cli.train", "llamafactory-cli", "trl")
    step_line = r"\b(\d+)/{total} \["
    total_options = ("--max_steps",)  # else the bar of an evaluation looks the same
    how_to_save = "a TrainerCallback that sets `control.should_save`; `--enable_jit_checkpoint` has no agreement"

    writes = Writes(("--output_dir", "output_dir"), ("output_dir",), _ARGUMENTS, "trainer_output")
    resume_option = "--resume_from_checkpoint"
    resume_keyword = "resume_from_checkpoint"
    attach_takes = "trainer.train()"

    def directory(self, script: Script) -> tuple[str | None, str] | None:
        """Look into the YAML file of axolotl and LLaMA-Factory."""
        program = _program(script)
        if not program or not script.settings_name or script.has_option(self.writes.options):
            return None
        if (said := script.setting("output_dir")) is not None:
            return said, f"output_dir in {script.settings_name}"
        if program == _AXOLOTL and "output_dir" not in script.settings:
            return "model-out", "the default of axolotl"
        return None, f"{script.settings_name} does not say output_dir as a text: name it with --checkpoint-dir"

    def own_resume(self, script: Script) -> tuple[str, str] | None:
        """Return the option of axolotl and LLaMA-Factory; behind `--` come words for another launcher."""
        program = _program(script)
        if not program or "--" in script.words:
            return None
        if program == _AXOLOTL:
            return "--resume-from-checkpoint", "axolotl takes it"
        return (
            "resume_from_checkpoint=" if script.settings_name else "--resume_from_checkpoint"
        ), f"{program} takes it"

    def takes_resume(self, script: Script) -> bool:
        """Look for a parser that makes options of the fields of TrainingArguments, and for a use of that field.

        `trainer.train()` alone does not read it.  With a file of arguments, scripts of the examples take no option.
        """
        if not script.reads(self.resume_keyword) or script.has_positional((".json", ".yaml", ".yml")):
            return False
        derived = {
            node.name
            for node in script.nodes
            if isinstance(node, ast.ClassDef) and any(map(_is_arguments, map(last_name, node.bases)))
        }
        return any(
            _is_arguments(name) or name in derived
            for node in script.nodes
            if isinstance(node, ast.Call) and last_name(node.func) in _PARSERS
            for argument in (*node.args, *(each.value for each in node.keywords))
            for name in map(last_name, ast.walk(argument))
        )

    def look(self, contents: Contents) -> None:
        """Require what a resume loads."""
        world_size = contents.world_size
        names = contents.tree.files
        if _SENTINEL in names:
            contents.problem(f"{_SENTINEL} is there: the save on SIGTERM did not end")
        state = parts.add_json(contents, "trainer_state.json")
        if isinstance(state, dict):
            self._state(contents, state, contents.step.number)
        elif "trainer_state.json" in contents.parts:
            contents.problem("trainer_state.json: is no state of a Trainer")
        engines = sorted(name for name in contents.tree.directories if _DEEPSPEED.fullmatch(name))
        for engine in engines[-1:]:
            deepspeed.add_engine(contents, engine, world_size)
            deepspeed.require_latest(contents, engine)
        self._weights(contents, engine=bool(engines))
        self._training(contents, world_size, engine=bool(engines))
        for name in ("training_args.bin", *_AS_BEFORE):
            if name in names:
                parts.add_archive(contents, name)
                parts.read_pickle(contents, name)
        neighbour = self.beside(contents.step)
        if not contents.not_resumable and neighbour is not None:
            as_beside = parts.names_beside(neighbour).intersection(_AS_BEFORE)
            parts.require_as_beside(contents, neighbour, as_beside, names)

    @staticmethod
    def _state(contents: Contents, state: dict[str, object], number: int | None) -> None:
        reached, target = state.get("global_step"), state.get("max_steps")
        if type(reached) is not int:
            contents.problem("trainer_state.json: has no global_step")
        elif number is not None and reached != number:
            contents.problem(f"trainer_state.json: is of step {reached}")
        if type(target) is int and target > 0:
            contents.target = target

    @staticmethod
    def _weights(contents: Contents, *, engine: bool) -> None:
        found = parts.add_weights(contents, stems=("model", "pytorch_model", "adapter_model"))
        if "pytorch_model_fsdp_0" in contents.tree.directories:
            parts.add_dcp(contents, "pytorch_model_fsdp_0")
            found = True
        elif "pytorch_model_fsdp.bin" in contents.tree:
            found = parts.add_archive(contents, "pytorch_model_fsdp.bin") or found
        if not found and not engine:
            contents.problem("no weights: neither model.safetensors nor an index, pytorch_model.bin or FSDP shards")

    @staticmethod
    def _training(contents: Contents, world_size: int | None, *, engine: bool) -> None:
        tree = contents.tree
        ranks = {int(match[1]) for name in tree.files if (match := _RNG.fullmatch(name))}
        optimizer = [name for name in ("optimizer.pt", "optimizer.bin") if name in tree]
        sharded = "optimizer_0" in tree.directories
        alone = "rng_state.pth" in tree
        if not (optimizer or sharded or engine or "scheduler.pt" in tree or ranks or alone):
            contents.not_resumable = "holds the model alone (save_only_model): no optimizer, scheduler or RNG state"
            return
        for name in optimizer:
            parts.add_archive(contents, name)
        if sharded:
            parts.add_dcp(contents, "optimizer_0")
        elif not optimizer and not engine:
            contents.problem("no optimizer state: neither optimizer.pt nor optimizer_0/")
        if "scheduler.pt" in tree or not engine:
            parts.add_archive(contents, "scheduler.pt")
        if alone and not ranks:  # of a process that trained by itself, as each rank does that found no GPU
            parts.add_archive(contents, "rng_state.pth")
            contents.world_size = contents.world_size or 1
            return
        # one process writes `rng_state.pth`: a numbered file is of a world of two at least
        known = world_size or max(contents.world_size or 0, max(ranks, default=0) + 1, 2)
        parts.require_ranks(contents, "rng_state_R.pth", ranks, known)
        for rank in sorted(ranks):
            parts.add_archive(contents, f"rng_state_{rank}.pth")

    def resume(self, contents: Contents) -> Resume:
        """Name the directory: `True` would take the highest number, whole or not."""
        path = os.path.abspath(contents.step.path)
        return Resume(
            ("--resume_from_checkpoint", path),
            "trainer.train(resume_from_checkpoint=PATH); axolotl: --resume-from-checkpoint PATH; LLaMA-Factory, behind "
            "its YAML file: resume_from_checkpoint=PATH",
        )


def _program(script: Script) -> str:
    """Return which program of those that have their arguments in a YAML file a command starts; empty: none."""
    names = [word.rpartition("/")[2] for word in script.words]
    if "axolotl.cli.train" in script.words or ("axolotl", "train") in itertools.pairwise(names):
        return _AXOLOTL
    pairs = set(itertools.pairwise(names))
    return "LLaMA-Factory" if {("llamafactory-cli", "train"), ("lmf", "train")} & pairs else ""


def _is_arguments(name: str) -> bool:
    return name.endswith("TrainingArguments") or name in _CONFIGS


FRAMEWORK = HuggingFace()

"""What a command and its script show: the framework, where its checkpoints go, and how it is told to resume."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stepkeeper.frameworks import selection
from stepkeeper.frameworks.adapters.generic import Patterns
from stepkeeper.frameworks.asking import Newest
from stepkeeper.frameworks.following import Following, follow
from stepkeeper.submit import own_script

TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
PARSED = f"{TRAINER}(arguments,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()\n"
PARSED += "Trainer(args=arguments).train(resume_from_checkpoint=arguments.resume_from_checkpoint)\n"
OWN_NAMES = f"""{TRAINER}
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--out", default="results")
parser.add_argument("--from-here")
parser.add_argument("--lr")
args = parser.parse_args()
Trainer(args=TrainingArguments(output_dir=args.out)).train(resume_from_checkpoint=args.from_here or None)
"""


def seen(tmp_path: Path, text: str, command: str, directory: str | None = None) -> Following | None:
    (tmp_path / "train.py").write_text(text)
    script = own_script.training(shlex.split(command), tmp_path)
    return follow(script, tmp_path, selection.known(None), directory=directory)


@pytest.mark.parametrize(
    ("text", "command", "expected"),
    [
        (PARSED, "python train.py --output_dir out", ("huggingface", "out", True)),
        (PARSED, "torchrun --nproc-per-node 2 train.py --output-dir=a --output_dir b", ("huggingface", "b", True)),
        (PARSED, "bash -c 'python train.py --output_dir out | tee log'", ("huggingface", "out", True)),
        (PARSED, "deepspeed train.py --output_dir out", ("huggingface", "out", True)),
        (PARSED, "python train.py", ("huggingface", "trainer_output", True)),
        (PARSED, "python train.py --data output_dir", ("huggingface", "trainer_output", True)),
        (PARSED, "bash -c 'python train.py --output_dir $OUT'", ("huggingface", None, True)),
        (f"{TRAINER}Trainer(args=TrainingArguments(output_dir='here')).train()", "python train.py",
         ("huggingface", "here", False)),
        (f"{TRAINER}TrainingArguments(output_dir='a')\nTrainingArguments(output_dir='b')", "python train.py",
         ("huggingface", None, False)),
        (f"{TRAINER}Trainer(args=TrainingArguments('first')).train()", "python train.py",
         ("huggingface", "first", False)),
        (f"{TRAINER}TrainingArguments(output_dir=f'{{x}}/a')", "python train.py", ("huggingface", None, False)),
        ("import lightning as L\nModelCheckpoint('ck')\nL.Trainer(default_root_dir='runs')", "python train.py",
         ("lightning", "ck", False)),
        (OWN_NAMES, "python train.py", ("huggingface", "results", True)),
        (OWN_NAMES, "python train.py --out=there", ("huggingface", "there", True)),
        ("import transformers as t\nt.Trainer(args=t.TrainingArguments('x'))", "python train.py --output_dir=o",
         ("huggingface", "o", False)),
        ("import transformers\nimport accelerate\n", "accelerate launch train.py --output_dir o",
         ("accelerate", "o", False)),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI()", "python train.py fit",
         ("lightning", "lightning_logs", True)),
        ("import lightning as L\nL.Trainer(default_root_dir='runs').fit(m)", "python train.py",
         ("lightning", "runs", False)),
        ("import lightning as L\nL.Trainer(logger=False).fit(m)", "python train.py",
         ("lightning", "checkpoints", False)),
        ("import lightning as L\nL.Trainer(logger=None).fit(m)", "python train.py",
         ("lightning", "lightning_logs", False)),
        ("import lightning as L\nL.Trainer(logger=CSVLogger('logs')).fit(m)", "python train.py",
         ("lightning", None, False)),
        ("import lightning as L\nL.Trainer(logger=wandb, default_root_dir='runs').fit(m)", "python train.py",
         ("lightning", None, False)),
        ("import lightning as L\nL.Trainer(logger=wandb, callbacks=[ModelCheckpoint('ck')]).fit(m)", "python train.py",
         ("lightning", "ck", False)),
        ("import lightning as L\nL.Trainer(**settings).fit(m)", "python train.py", ("lightning", None, False)),
        ("import lightning as L\nL.Trainer(enable_checkpointing=False).fit(m)", "python train.py",
         ("lightning", None, False)),
        ("import lightning as L\nL.Trainer(enable_checkpointing=False, default_root_dir='runs').fit(m)",
         "python train.py", ("lightning", "runs", False)),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI()", "python train.py fit --trainer.logger=false",
         ("lightning", "checkpoints", True)),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI()",
         "python train.py fit --trainer.logger.class_path=x.Y", ("lightning", None, True)),
        ("from megatron.training import pretrain", "python train.py --save /ck", ("megatron", "/ck", True)),
        ("", "torchrun -m torchtitan.train --dump_folder=/d", ("torchtitan", "/d", True)),
        ("from megatron.bridge import x", "python train.py checkpoint.save=/b", ("megatron-bridge", "/b", True)),
        ("import torch.distributed.checkpoint as dcp\nimport argparse\n", "python train.py --ckpt-dir c",
         ("dcp", "c", False)),
        ("import deepspeed", "deepspeed train.py --data /data/nemo --save_dir=s", ("deepspeed", "s", False)),
    ],
)  # fmt: skip
def test_framework_directory_and_resume_argument_are_found(
    tmp_path: Path, text: str, command: str, expected: tuple[str, str | None, bool]
) -> None:
    found = seen(tmp_path, text, command)

    framework, directory, appended = expected
    assert found is not None
    assert (found.framework, found.appended) == (framework, appended), found
    assert found.directory == (None if directory is None else tmp_path / directory), found
    assert found.why
    assert found.where


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n",
        "import transformers\ntransformers.AutoModel.from_pretrained('x')\n",
        "from stepkeeper_trainer import CheckpointManager\nfrom transformers import Trainer\n",
        "def (:\n",
        "(" * 5000,
    ],
)
def test_nothing_is_followed_without_a_framework_and_with_our_own_library(tmp_path: Path, text: str) -> None:
    assert seen(tmp_path, text, "python train.py --output_dir out") is None


def test_a_callback_of_ours_leaves_the_checkpoints_the_frameworks(tmp_path: Path) -> None:
    found = seen(tmp_path, f"{PARSED}from stepkeeper_trainer.integrations import anything\n", "python train.py")

    assert found is not None
    assert found.framework == "huggingface"


def test_an_option_of_another_name_is_used_and_a_switch_is_none(tmp_path: Path) -> None:
    found = seen(tmp_path, OWN_NAMES.replace("from-here", "from_here"), "python train.py")
    assert found is not None
    assert (found.appended, found.option) == (True, "--from_here")

    switch = OWN_NAMES.replace('"--from-here"', '"--from_here", action="store_true"')
    found = seen(tmp_path, switch, "python train.py")
    assert found is not None
    assert (found.appended, found.option, found.resume) == (False, "", "")


@pytest.mark.parametrize(
    ("given", "command", "expected"),
    [
        ("output_dir=f'{args.base}/{args.name}'", "--base /ckpts --name run7", None),
        ("output_dir=os.path.join(args.base, 'x')", "--base /ckpts", None),
        ("output_dir=f'{args.output_dir}/{args.name}'", "--output_dir /ckpts", None),
        ("output_dir=str(args.base)", "--base /ckpts", "/ckpts"),
        ("output_dir=Path(args.base)", "--base /ckpts", "/ckpts"),
        ("output_dir=computed", "--base /ckpts", None),
        ("output_dir=changed", "--base /ckpts", None),
        ("output_dir=through", "--base /ckpts", None),
        ("output_dir=plain", "--base /ckpts", "/ckpts"),
        ("output_dir=word", "", "results"),
        ("output_dir=sometimes", "", None),
    ],
)
def test_a_directory_that_the_script_computes_from_an_option_is_not_known(
    tmp_path: Path, given: str, command: str, expected: str | None
) -> None:
    declared = "".join(f"parser.add_argument('--{name}')\n" for name in ("base", "name", "output_dir"))
    declared += (
        "computed = os.path.join(args.base, args.name)\n"
        "changed = args.base\nchanged += '/run7'\n"
        "base = args.base\nthrough = f'{base}/run7'\n"
        "plain = str(args.base)\nword = 'results'\n"
        "sometimes = 'results'\nsometimes = os.path.join(sometimes, 'run7')\n"
    )

    found = seen(tmp_path, f"{TRAINER}{declared}TrainingArguments({given})", f"python train.py {command}")

    assert found is not None
    assert found.directory == (None if expected is None else tmp_path / expected), found.where


@pytest.mark.parametrize(
    ("text", "option"),
    [
        (f"{TRAINER}t.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))", ""),
        (f"{TRAINER}t.train(resume_from_checkpoint=args.output_dir)", ""),
        (f"{TRAINER}t.train(resume_from_checkpoint=str(args.out))", "--out"),
        ("import lightning\nt.fit(m, ckpt_path=os.path.join(args.out, 'last.ckpt'))", ""),
        ("import lightning\nModelCheckpoint(args.out)\nt.fit(m, ckpt_path=args.out)", ""),
    ],
)
def test_only_an_option_that_is_passed_on_as_it_is_is_the_resume_option(tmp_path: Path, text: str, option: str) -> None:
    declared = "parser.add_argument('--output_dir')\nparser.add_argument('--out')\n"

    found = seen(tmp_path, f"{text}\n{declared}", "python train.py --output_dir o")

    assert found is not None
    assert (found.appended, found.option) == (bool(option), option), found.resume


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (TRAINER, "python train.py --output_dir runs/trl"),
        (TRAINER, "conda run -n trl python train.py"),
        ("", "trl sft --output_dir o"),
        (PARSED, "python train.py arguments.json"),
        (PARSED, "torchrun --nproc-per-node 2 train.py arguments.yaml"),
        (PARSED.replace("resume_from_checkpoint=arguments.resume_from_checkpoint", ""), "python train.py"),
        *(
            (f"{PARSED}parser.add_argument('--resume_from_checkpoint', type={name})", f"python train.py {more}")
            for name in ("int", "float", "bool", "str2bool")
            for more in ("", "--resume_from_checkpoint 1")
        ),
    ],
)
def test_a_resume_argument_that_the_script_would_not_read_is_not_appended(
    tmp_path: Path, text: str, command: str
) -> None:
    found = seen(tmp_path, text, command)

    assert found is not None
    assert (found.appended, found.resume) == (False, ""), found.resume


@pytest.mark.parametrize(
    "command",
    [
        "conda run -n trl python train.py",
        "conda run -n trl torchrun --nproc-per-node 2 train.py",
        "conda run --name trl accelerate launch train.py",
        "srun --job-name axolotl python train.py",
        "srun -J deepspeed accelerate launch train.py",
        "docker run trl python train.py",
    ],
)
def test_the_name_of_an_environment_is_no_framework(tmp_path: Path, command: str) -> None:
    found = seen(tmp_path, "import lightning\n", command)

    assert found is not None
    assert found.framework == "lightning", found.why


@pytest.mark.parametrize(
    ("text", "command", "expected"),
    [
        ("import deepspeed\n", "deepspeed train.py", (False, "", False)),
        ("import deepspeed\nconfig = {'checkpoint': {'load_universal': True}}\n", "deepspeed train.py",
         (True, "", False)),
        ("import deepspeed\np.add_argument('--universal-checkpoint', action='store_true')\n", "deepspeed train.py",
         (True, "--universal-checkpoint", True)),
        ("import deepspeed\np.add_argument('--universal-checkpoint', action='store_true')\n",
         "deepspeed train.py --universal-checkpoint", (True, "", False)),
    ],
)  # fmt: skip
def test_a_script_that_loads_universal_checkpoints_is_found(
    tmp_path: Path, text: str, command: str, expected: tuple[bool, str, bool]
) -> None:
    found = seen(tmp_path, text, command)

    assert found is not None
    assert (found.converted, found.converted_option, found.appended) == expected
    assert found.resume == ""


def test_the_bar_of_a_trainer_is_known_by_its_last_step(tmp_path: Path) -> None:
    found = seen(tmp_path, PARSED, "python train.py --output_dir o --max_steps 300")
    assert found is not None
    assert r"/300 \[" in found.step_line
    found = seen(tmp_path, PARSED, "python train.py --output_dir o")
    assert found is not None
    assert found.step_line == ""


def test_the_setting_names_the_directory_and_what_is_in_it_shows_the_framework(tmp_path: Path) -> None:
    (tmp_path / "mine" / "checkpoint-10").mkdir(parents=True)

    found = seen(tmp_path, "import torch\n", "python train.py", directory="mine")

    assert found is not None
    assert (found.framework, found.directory) == ("huggingface", tmp_path / "mine")


def test_a_script_behind_a_shell_script_is_found(tmp_path: Path) -> None:
    (tmp_path / "go.sh").write_text('#!/bin/bash\nmodule load x\npython train.py --output_dir out "$@"\n')

    found = seen(tmp_path, PARSED, "bash go.sh")

    assert found is not None
    assert (found.framework, found.directory) == ("huggingface", tmp_path / "out")


def test_patterns_of_ones_own_take_what_they_say(tmp_path: Path) -> None:
    patterns = Patterns(steps="ckpt-{step}", resume=("--from", "{path}"))
    frameworks = selection.known(patterns)
    named = selection.named("generic", "--framework", frameworks, patterns)
    script = own_script.training(["python", "train.py"], tmp_path)

    found = follow(script, tmp_path, frameworks, named=named, directory="ck", patterns=patterns)

    assert found is not None
    assert (found.framework, found.directory, found.appended) == ("generic", tmp_path / "ck", True)
    assert found.patterns == patterns


AXOLOTL = "base_model: x\noutput_dir: ./outputs/lora-out  # below\n"


@pytest.mark.parametrize(
    ("yaml", "command", "expected"),
    [
        (AXOLOTL, "axolotl train c.yml", ("outputs/lora-out", ("--resume-from-checkpoint", "/p"))),
        (AXOLOTL, "accelerate launch -m axolotl.cli.train c.yml",
         ("outputs/lora-out", ("--resume-from-checkpoint", "/p"))),
        (AXOLOTL, "axolotl train c.yml --output-dir b", ("b", ("--resume-from-checkpoint", "/p"))),
        ("base_model: x\n", "axolotl train c.yml", ("model-out", ("--resume-from-checkpoint", "/p"))),
        ("output_dir: *out\n", "axolotl train c.yml", (None, ("--resume-from-checkpoint", "/p"))),
        ("a:\n  output_dir: x\n", "axolotl train c.yml", (None, ("--resume-from-checkpoint", "/p"))),
        (AXOLOTL, "axolotl train c.yml --launcher torchrun -- --nproc_per_node=4", ("outputs/lora-out", None)),
        (AXOLOTL, "axolotl preprocess c.yml", ("trainer_output", None)),
        ("output_dir: 'saves/a b'\n", "llamafactory-cli train c.yml", ("saves/a b", ("resume_from_checkpoint=/p",))),
        ("output_dir: saves\n", "llamafactory-cli train c.yml output_dir=other",
         ("other", ("resume_from_checkpoint=/p",))),
        ("stage: sft\n", "llamafactory-cli train c.yml", (None, ("resume_from_checkpoint=/p",))),
        ("", "llamafactory-cli train --output_dir o", ("o", ("--resume_from_checkpoint", "/p"))),
    ],
)  # fmt: skip
def test_programs_with_their_arguments_in_a_yaml_file_are_resumed_by_their_own_option(
    tmp_path: Path, yaml: str, command: str, expected: tuple[str | None, tuple[str, ...] | None]
) -> None:
    if yaml:
        (tmp_path / "c.yml").write_text(yaml)
    directory, arguments = expected

    found = seen(tmp_path, "", command)

    assert found is not None
    assert found.directory == (None if directory is None else tmp_path / directory), found
    assert found.appended == (arguments is not None)
    newest = Newest(
        directory="/p", step=1, target=None, finished=None, how="", bytes_read=0,
        arguments=("--resume_from_checkpoint", "/p"),
    )  # fmt: skip
    if arguments is not None:
        assert found.arguments(newest) == arguments


LIGHTNING = "import lightning as L\n"


@pytest.mark.parametrize(
    ("text", "command", "target"),
    [
        (LIGHTNING, "python train.py fit --trainer.max_steps 500", 500),
        (LIGHTNING, "python train.py fit --trainer.max_steps=$STEPS", None),
        (f"{LIGHTNING}L.Trainer(max_steps=300).fit(m)", "python train.py", 300),
        (f"{LIGHTNING}L.Trainer(max_steps=300).fit(m)", "python train.py --trainer.max_steps 500", 500),
        (f"{LIGHTNING}L.Trainer(max_steps=-1).fit(m)", "python train.py", None),
        (f"{LIGHTNING}L.Trainer(max_steps=n).fit(m)", "python train.py", None),
        (f"{LIGHTNING}L.Trainer(max_steps=3)\nL.Trainer(max_steps=4)", "python train.py", None),
        (f"{LIGHTNING}other(max_steps=3)", "python train.py", None),
        ("", "torchrun -m torchtitan.train --training.steps=1000", 1000),
        ("import deepspeed", "deepspeed train.py --max-train-steps 40", 40),
        ("import accelerate", "accelerate launch train.py --max_train_steps 40", 40),
        ("from megatron.bridge import x", "python train.py train.train_iters=70", 70),
        ("from megatron.training import x", "python train.py --train-iters 70", 70),
        ("import torch.distributed.checkpoint", "python train.py --max_steps 4", None),
    ],
)
def test_the_last_step_is_known_where_command_or_script_say_it(
    tmp_path: Path, text: str, command: str, target: int | None
) -> None:
    found = seen(tmp_path, text, command)

    assert found is not None
    assert found.target == target


@pytest.mark.parametrize(
    ("target", "command", "expected"), [(500, "run", 500), ("--n", "run --n 7", 7), ("--n", "run", None)]
)
def test_patterns_of_ones_own_know_a_line_of_a_step_and_the_last_one(
    tmp_path: Path, target: int | str, command: str, expected: int | None
) -> None:
    patterns = Patterns(steps="ckpt-{step}", step_line="[step {step}/*] loss", target=target)
    known = selection.known(patterns)
    named = selection.named("generic", "test", known, patterns)

    found = follow(own_script.training(shlex.split(command), tmp_path), tmp_path, known, named=named, directory="out")

    assert found is not None
    assert found.target == expected
    line = re.search(found.step_line, "rank 0 [step 12/500] loss 3.1")
    assert line is not None
    assert line[1] == "12"
    assert re.search(found.step_line, "step 12 loss") is None

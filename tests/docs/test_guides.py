"""The guides of frameworks: their command lines are recognised, and the doctor says of them what the guides say."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from stepkeeper.cli import main
from tests.doctor.alone import alone  # noqa: F401 - a fixture for all tests here
from tests.frameworks import layouts

GUIDES = Path(__file__).parents[2] / "docs/guides"
TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
SCRIPTS = {
    "huggingface": f"{TRAINER}[a] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    "Trainer(args=a).train(resume_from_checkpoint=a.resume_from_checkpoint)\n",
    "lightning": "import lightning\np.add_argument('--ckpt_path')\n"
    "t.fit(m, ckpt_path=args.ckpt_path)\nModelCheckpoint(dirpath='outputs')\n",
    "accelerate": "import accelerate\np.add_argument('--output_dir')\np.add_argument('--resume_from_checkpoint')\n",
    "deepspeed": "import os\nimport deepspeed\npath = os.environ.get('STEPKEEPER_RESUME_FROM')\n",
    "megatron": "",
    "torchtitan": "",
    "dcp": "import os\nimport torch.distributed.checkpoint as dcp\npath = os.environ.get('STEPKEEPER_RESUME_FROM')\n",
    "nemo": "import os\nfrom nemo import lightning as nl\npath = os.environ.get('STEPKEEPER_RESUME_FROM')\n",
    "megatron-bridge": "from megatron.bridge.training.pretrain import pretrain\n",
    "automodel": "",
    "torch-checkpointing": "import os\nimport torch_checkpointing\npath = os.environ.get('STEPKEEPER_RESUME_FROM')\n",
    "generic": "import torch\n",
}
ARGUMENTS = {
    "huggingface": "--resume_from_checkpoint {path}",
    "lightning": "--ckpt_path {path}",
    "accelerate": "--resume_from_checkpoint {path}",
    "deepspeed": "",
    "megatron": "--load {directory} --ckpt-step 200 --exit-on-missing-checkpoint",
    "torchtitan": "--checkpoint.load_step=200",
    "dcp": "",
    "nemo": "",
    "megatron-bridge": "checkpoint.load={directory} checkpoint.ckpt_step=200",
    "automodel": "--checkpoint.restore_from={path}",
    "torch-checkpointing": "",
    "generic": "--from {path}",
}
SUBJECTS = ("framework", "save on notice", "resume argument", "ranks of a resume")


def build(name: str, root: Path) -> Path:
    """Write a checkpoint of step 200."""
    if name != "generic":
        return layouts.LAYOUTS["deepspeed-3" if name == "deepspeed" else name].build(root, 200)
    path = root / "ckpt-200"
    layouts.save(path / "model.pt", {"a": layouts.tensor()})
    (path / "DONE").touch()
    return path


def configure(text: str) -> None:
    """Write the configuration that a guide shows, where it shows one."""
    found = re.search(r"^    \[framework\.generic\]\n(?:    .*\n)+", text, re.MULTILINE)
    if found:
        path = Path.home() / ".config/stepkeeper/config.toml"
        path.parent.mkdir(parents=True)
        path.write_text(textwrap.dedent(found[0]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_line_of_a_guide_is_recognised_and_the_doctor_says_what_the_guide_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (GUIDES / f"{name}.md").read_text()
    line = re.search(r"^    exec stepkeeper run (.*)$", text, re.MULTILINE)
    assert line
    words = shlex.split(line[1])
    options, command = words[: words.index("--")], words[words.index("--") + 1 :]
    for script in ("train.py", "pretrain_gpt.py"):
        Path(script).write_text(SCRIPTS[name])
    Path("config.yaml").write_text("step_scheduler: {}\n")
    Path("outputs").mkdir()
    configure(text)
    capsys.readouterr()

    assert main.main(["run", "--dry-run", "--json", *options, "--", *command]) == 0

    plan = json.loads(capsys.readouterr().out)
    assert f"checkpoints in {Path.cwd()}/outputs" in plan["framework"], plan
    assert plan["doubts"] == []
    assert (plan["resume_from"], plan["training"][-len(command) :]) == (None, command)
    path = build(name, Path("outputs").absolute())
    assert main.main(["run", "--dry-run", "--json", *options, "--", *command]) == 0
    plan = json.loads(capsys.readouterr().out)
    appended = ARGUMENTS[name].format(path=path, directory=path.parent).split()
    assert plan["resume_from"] == str(path)
    assert plan["training"][-len(command) - len(appended) :] == [*command, *appended]
    for option in ("attach", "checkpoint-dir", "framework"):
        if f"--{option}" in options:
            variable = f"STEPKEEPER_{option.upper().replace('-', '_')}"
            monkeypatch.setenv(variable, options[options.index(f"--{option}") + 1])
    main.main(["doctor", "--json", "--command", *command])
    said = {f"{each['subject']}: {each['found']}" for each in json.loads(capsys.readouterr().out)["findings"]}
    claimed = [row.strip() for row in text.splitlines() if row.startswith(tuple(f"    {each}: " for each in SUBJECTS))]
    assert len(claimed) >= 3
    assert not set(claimed) - said, said


def test_each_guide_is_named_in_the_page_of_frameworks() -> None:
    page = (GUIDES.parent / "frameworks.md").read_text()
    assert [name for name in SCRIPTS if f"(guides/{name}.md)" not in page] == []

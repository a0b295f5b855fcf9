"""The Python that converts, and which checkpoints are converted without a word of the script's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stepkeeper.frameworks import converting


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_python_is_that_of_the_command(tmp_path: Path) -> None:
    python, torchrun = program(tmp_path / "venv/bin/python"), program(tmp_path / "venv/bin/torchrun")
    own, first = program(tmp_path / "venv/bin/python3.11"), program(tmp_path / "path/python")
    alone = program(tmp_path / "bin/launch")
    environment = {"PATH": str(first.parent)}

    assert converting.python_of([str(own), "train.py"], environment) == str(own)
    assert converting.python_of([str(torchrun), "train.py"], environment) == str(python)
    assert converting.python_of(["torchrun", "train.py"], {"PATH": str(torchrun.parent)}) == str(python)
    assert converting.python_of([str(alone), "train.py"], environment) == str(first)
    assert converting.python_of([], environment) == str(first)
    assert converting.python_of(["not-there"], {"PATH": "/nowhere"}) == "python3"


def test_a_python_without_the_package_is_none_that_converts(tmp_path: Path) -> None:
    assert not converting.has_tool(str(tmp_path / "python"), {})
    hung = program(tmp_path / "python")
    assert converting.has_tool(str(hung), {}), "it ends with 0"
    assert not converting.has_tool(sys.executable, {}), "DeepSpeed is not in this environment"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"), True),
        (("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"), True),
        (("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"), False),
        (("mp_rank_00_model_states.pt", "layer_01-model_states.pt"), False),
        (("mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"), False),
        (("mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"), False),
        ((), False),
    ],
)
def test_only_plain_data_parallel_checkpoints_are_converted(
    tmp_path: Path, names: tuple[str, ...], wanted: object
) -> None:
    for name in (*names, "latest"):
        (tmp_path / name).touch()
    assert converting.convertible(tmp_path) is wanted
    assert not converting.convertible(tmp_path / "gone")


def test_a_conversion_goes_before_the_supervisor_where_memory_runs_out(tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    tool = program(tmp_path / "python")
    tool.write_text(f"#!/bin/sh\ncat /proc/self/oom_score_adj >{tmp_path}/adj\necho no room >&2\nexit 1\n")
    wanted = converting.Conversion(source=str(tmp_path / "global_step1"), python=str(tool))

    argv = [sys.executable, "-m", "stepkeeper.frameworks.converting"]
    done = subprocess.run(argv, input=msgspec.json.encode(wanted), capture_output=True, check=False)

    assert (tmp_path / "adj").read_text() == "1000\n"
    assert (done.returncode, done.stderr) == (1, b"deepspeed.checkpoint.ds_to_universal: no room\n")

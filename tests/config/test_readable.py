"""What only the ranks go by is refused where it is set: by any command, before a job waits in a queue for it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from stepkeeper.config import files, resolve
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError

WRONG = {
    "checkpoint_every": ("sometimes", "'sometimes' cannot be read; write `500 steps`"),
    "retention": ("newest three", "'newest three' cannot be read; write `all`"),
    "local_tier": ("nvme", "an absolute path is wanted"),
    "cold_tier": ("archive/run", "an absolute path or a URL"),
    "snapshot_every": ("auto", "`auto` is for saves; write `5 steps` or `30 s`"),
}
RIGHT = {
    "checkpoint_every": "auto or 500 steps",
    "retention": "newest 2, every 10 percent",
    "local_tier": "/nvme/%N",
    "cold_tier": "s3://bucket/run",
    "snapshot_every": "30 s or 20 steps",
}


def of_flags(*words: str) -> dict[str, files.Entry]:
    command = argparse.ArgumentParser()
    resolve.declare_flags(command)
    return resolve.read_flags(command.parse_args(words))


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_is_refused_with_the_place_wherever_it_stands(key: str, tmp_path: Path) -> None:
    value, problem = WRONG[key]
    flag = "--" + key.replace("_", "-")
    with pytest.raises(StepkeeperError, match=f"^{flag}: {key}: .*{problem}") as refused:
        of_flags(flag, value)
    assert refused.value.code is ExitCode.USAGE
    with pytest.raises(StepkeeperError, match=f"^--set: {key}: .*{problem}"):
        of_flags("--set", f"{key}={value}")
    variable = f"STEPKEEPER_{key.upper()}"
    with pytest.raises(StepkeeperError, match=f"^{variable}: {key}: .*{problem}"):
        resolve.read_environment({variable: value})
    file = tmp_path / "config.toml"
    with pytest.raises(StepkeeperError, match=f"config.toml, line 2: {key}: .*{problem}"):
        files.parse(f'spares = 1\n{key} = "{value}"\n'.encode(), file, files.Role.USER)


@pytest.mark.parametrize("key", RIGHT)
def test_what_the_ranks_can_read_is_taken(key: str) -> None:
    assert resolve.read_environment({f"STEPKEEPER_{key.upper()}": RIGHT[key]})[key].value == RIGHT[key]


@pytest.mark.parametrize("wrong", ["pyslurm:", "commands:/usr/bin/python", "scontrol"])
def test_a_client_that_there_is_not_is_refused(wrong: str) -> None:
    with pytest.raises(StepkeeperError, match="STEPKEEPER_SLURM_CLIENT: slurm_client: write commands, pyslurm"):
        resolve.read_environment({"STEPKEEPER_SLURM_CLIENT": wrong})
    for right in ("commands", "pyslurm", "pyslurm:/opt/pyslurm/bin/python"):
        assert resolve.read_environment({"STEPKEEPER_SLURM_CLIENT": right})["slurm_client"].value == right


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/run", "https://host/run?sig=secret", "gs://b/r#secret"])
def test_a_secret_in_a_url_is_not_repeated(url: str) -> None:
    for words in (("--cold-tier", url), ("--set", f"cold_tier={url}")):
        with pytest.raises(StepkeeperError, match="holds no credentials") as refused:
            of_flags(*words)
        assert "secret" not in str(refused.value)


def test_copies_on_other_nodes_need_a_local_tier(tmp_path: Path) -> None:
    def resolved(*words: str) -> resolve.Config:
        nowhere = tmp_path / "none"
        return resolve.gather(of_flags(*words), {"HOME": str(tmp_path)}, site=nowhere, user=nowhere).resolve()

    with pytest.raises(StepkeeperError, match=r"--peer-copies: .* set local_tier too"):
        resolved("--peer-copies")
    assert resolved("--peer-copies", "--local-tier=/nvme").settings.peer_copies
    assert resolved("--peer-copies", "--snapshot-every=5 steps").settings.peer_copies
    with pytest.raises(StepkeeperError, match=r"--peer-interface: .* set peer_copies too"):
        resolved("--local-tier=/nvme", "--peer-interface=ib0")

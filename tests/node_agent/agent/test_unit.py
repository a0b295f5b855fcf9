"""The unit file, as systemd reads it, and the hooks, as Slurm runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepkeeper.node_agent.config import NodeConfig, load, parse

SYSTEMD = Path(__file__).resolve().parents[3] / "systemd"
UNIT = SYSTEMD / "stepkeeper-node-agent.service"
EXPOSURE_MAX = 2.5
WITHIN_S = 60

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


def systemd_analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    argv = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=WITHIN_S, check=False)


@analyze
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "stepkeeper"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/stepkeeper/bin/stepkeeper", str(program)))

    done = systemd_analyze("verify", unit)

    assert (done.returncode, done.stderr.strip()) == (0, "")


@analyze
def test_the_unit_gives_little_away() -> None:
    done = systemd_analyze("security", "--offline=true", UNIT)

    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= EXPOSURE_MAX


def test_the_unit_leaves_the_agent_what_it_needs() -> None:
    lines = UNIT.read_text().splitlines()

    assert "CapabilityBoundingSet=CAP_SYSLOG" in lines
    assert "DeviceAllow=/dev/kmsg r" in lines
    assert "DeviceAllow=char-195 rw" in lines  # a name is known only once the driver is loaded
    assert not [line for line in lines if line.startswith(("PrivateDevices", "ProtectKernelLogs"))]


def test_the_example_configuration_shows_every_default() -> None:
    """A file that says something else than the program does is worse than none."""
    text = (SYSTEMD / "node.toml").read_text()

    assert parse(text.encode(), "node.toml") == NodeConfig()

    # what is commented out is a key too
    shown: dict[str, Any] = tomllib.loads(re.sub(r"(?m)^# (\w+ = )", r"\1", text))
    fields = {field.name: field for field in msgspec.structs.fields(NodeConfig)}
    assert set(shown) == set(fields) - {"test"}
    for name in ("breaker", "remedies"):
        assert set(shown[name]) == {each.name for each in msgspec.structs.fields(fields[name].type)}


def test_the_recipe_for_pip_puts_in_place_what_systemd_and_the_agent_read(tmp_path: Path) -> None:
    text = (SYSTEMD / "README.md").read_text()
    recipe = re.findall(r"(?m)^    (install -D -m 644 \S+ \S+)", text)
    virtual_environment = re.findall(r"(?m)^    python3 -m venv (\S+)", text)

    for line in recipe:
        subprocess.run(line.replace(" /etc/", f" {tmp_path}/etc/").split(), cwd=SYSTEMD, timeout=WITHIN_S, check=True)

    assert load(tmp_path / "etc/stepkeeper/node.toml") == NodeConfig()
    unit = (tmp_path / "etc/systemd/system" / UNIT.name).read_text()
    assert [f"ExecStart={each}/bin/stepkeeper node agent" in unit for each in virtual_environment] == [True]


# --- the hooks ------------------------------------------------------------------------------------


def hook(name: str, verdict: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", SYSTEMD / "slurm" / f"{name}.sh"],
        env={"STEPKEEPER_VERDICT": str(verdict), "PATH": "/nowhere"},  # slurmd sets none
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def written(tmp_path: Path, *, fit: bool, age_s: float = 0.0, why: str = "stepkeeper: XID 79 GPU 0000:3b:00.0") -> Path:
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps({"fit": fit, "updated_at": int(time.time() - age_s), "why": why}, separators=(",", ":")))
    return path


@pytest.mark.parametrize(("name", "code"), [("prolog", 1), ("health", 1), ("epilog", 0)])
def test_a_hook_says_that_the_node_is_not_fit(tmp_path: Path, name: str, code: int) -> None:
    done = hook(name, written(tmp_path, fit=False))

    assert (done.returncode, done.stderr) == (code, "stepkeeper: not fit: XID 79 GPU 0000:3b:00.0\n")


@pytest.mark.parametrize("name", ["prolog", "health", "epilog"])
def test_a_hook_lets_a_fit_node_work(tmp_path: Path, name: str) -> None:
    done = hook(name, written(tmp_path, fit=True))

    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_verdict_counts_for_nothing(tmp_path: Path) -> None:
    """The agent is gone, or hangs: jobs must not suffer from that."""
    assert hook("prolog", written(tmp_path, fit=False, age_s=400)).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"fit":false}',
        '{"fit":false,"updated_at":x}',
        '{"fit":false,"updated_at":99999999999999999999}',
        pytest.param("\0" * 99, id="zeros"),
    ],
)
def test_what_cannot_be_read_counts_for_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "verdict.json"
    path.write_text(text)

    assert hook("prolog", path).returncode == 0


def test_no_agent_counts_for_nothing(tmp_path: Path) -> None:
    assert hook("prolog", tmp_path / "none").returncode == 0
    assert hook("prolog", tmp_path).returncode == 0


def test_a_verdict_that_hangs_counts_for_nothing(tmp_path: Path) -> None:
    """A pipe in the file's place is no file; a missing or late program counts for nothing either."""
    os.mkfifo(tmp_path / "pipe")
    assert hook("prolog", tmp_path / "pipe").returncode == 0

    alone = tmp_path / "prolog.sh"
    alone.write_bytes((SYSTEMD / "slurm" / "prolog.sh").read_bytes())
    done = subprocess.run(["/bin/sh", alone], env={}, capture_output=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0

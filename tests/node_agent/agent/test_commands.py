"""`stepkeeper node incidents` and `stepkeeper dev inject`, as a person calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepkeeper.cli.dev import record
from stepkeeper.errors import StepkeeperError
from stepkeeper.node_agent import ledger
from stepkeeper.node_agent.core.state import Drain, Outcome, Policy
from stepkeeper.node_agent.xid.catalogue import Action
from stepkeeper.node_agent.xid.parse import parse
from tests.fake_nvml import FakeNvml
from tests.node_agent.agent.test_parts import incident

WITHIN_S = 90


def stepkeeper(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepkeeper", *map(str, arguments)],
        env={**os.environ, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def configured(tmp_path: Path, text: str = "") -> Path:
    path = tmp_path / "node.toml"
    path.write_text(f'state_dir = "{tmp_path}"\n[test]\nkernel_log = "{tmp_path}/kmsg"\n{text}')
    path.chmod(0o644)
    (tmp_path / "kmsg").touch()
    return path


def recorded(tmp_path: Path) -> None:
    now = time.time()
    book = ledger.Ledger(tmp_path / ledger.NAME, ledger.Book(), Policy())
    drained = incident(1, first_at=now - 60, last_at=now, outcome=Outcome.DRAINED, why="\x1b[31mgone")
    book.append(ledger.IncidentLine(incident=drained))
    old = {"first_at": now - 30 * 86400, "last_at": now - 30 * 86400}
    book.append(ledger.IncidentLine(incident=incident(2, name="XID 48", outcome=Outcome.RESOLVED, **old)))
    book.append(ledger.DrainLine(drain=Drain(reason="stepkeeper: r", action=Action.DRAIN_REBOOT, at=now, boot_id="b1")))
    assert book.flush(WITHIN_S)


def test_incidents_are_shown_without_the_agent(tmp_path: Path) -> None:
    recorded(tmp_path)

    done = stepkeeper("node", "incidents", "--config", configured(tmp_path))

    assert done.returncode == 0, done.stderr
    assert "XID 79" in done.stdout
    assert "XID 48" not in done.stdout
    assert "drained since" in done.stdout
    assert "\x1b" not in done.stdout


def test_all_incidents_are_one_document_each(tmp_path: Path) -> None:
    recorded(tmp_path)

    done = stepkeeper("node", "incidents", "--all", "--json", "--config", configured(tmp_path))

    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["name"], each["outcome"], each["count"]) for each in found] == [
        ("XID 48", "resolved", 1),
        ("XID 79", "drained", 1),
    ]
    assert all("checked" in each for each in found), "a key of the ledger has another name"


def test_a_node_without_a_ledger_says_so(tmp_path: Path) -> None:
    done = stepkeeper("node", "incidents", "--config", configured(tmp_path))

    assert done.returncode == 40
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "allow_injected = false\n"])
def test_nothing_is_injected_where_that_is_not_allowed(tmp_path: Path, text: str) -> None:
    done = stepkeeper("dev", "inject", "xid", "79", "--gpu", "0000:3b:00.0", "--config", configured(tmp_path, text))

    assert done.returncode == 2
    assert "not allowed here" in done.stderr
    assert (tmp_path / "kmsg").read_text() == ""


def test_a_gpu_is_named_by_its_index(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path / "nvml", gpus=2)
    nvml.place(1, pci="0009:5e:00", uuid="GPU-1")
    config = configured(tmp_path, "allow_injected = true\n")

    done = stepkeeper("dev", "inject", "xid", "79", "--gpu", "1", "--config", config, **nvml.environment())

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kmsg").read_text() == "<4>NVRM: Xid (PCI:0009:5e:00): 79, GPU has fallen off the bus.\n"
    missing = stepkeeper("dev", "inject", "xid", "79", "--gpu", "7", "--config", config, **nvml.environment())
    assert missing.returncode == 40
    assert "1 (0009:5e:00.0)" in missing.stderr


@pytest.mark.parametrize("code", [13, 31, 43, 45, 48, 79, 94, 120])
def test_what_is_injected_is_what_the_parser_reads(code: int) -> None:
    report = parse(record(code, "0000:3b:00.0"))

    assert report is not None
    assert (report.code, report.pci) == (code, "0000:3b:00.0")


@pytest.mark.parametrize(("code", "text"), [(0, ""), (10_000, ""), (79, "a\nb"), (79, "x" * 400)])
def test_only_a_line_is_injected(code: int, text: str) -> None:
    with pytest.raises(StepkeeperError):
        record(code, "0000:3b:00.0", text)

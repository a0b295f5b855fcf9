"""`stepkeeper node install`: the unit and the configuration come from the installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.node_agent import config, ledger
from stepkeeper.node_agent.core.state import Drain
from stepkeeper.node_agent.xid.catalogue import Action

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it installs for root")


def stepkeeper(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepkeeper", "node", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_dry_run_shows_unit_and_configuration_and_writes_nothing(tmp_path: Path) -> None:
    done = stepkeeper("install", "--dry-run", "--root", tmp_path)

    assert done.returncode == 0, done.stderr
    assert f"ExecStart={Path(sys.executable).with_name('stepkeeper')} node agent" in done.stdout
    assert f"would write {tmp_path}/etc/stepkeeper/node.toml" in done.stdout
    assert not list(tmp_path.iterdir())


@needs_root
def test_what_was_installed_is_read_by_the_agent_and_removed_again(tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/stepkeeper-node-agent.service"
    settings = tmp_path / "etc/stepkeeper/node.toml"
    assert stepkeeper("install", "--root", tmp_path).returncode == 0
    assert config.load(settings) == config.NodeConfig()
    assert "/opt/stepkeeper" not in unit.read_text()

    settings.write_text('mode = "act"\n')
    assert "stays as it is" in stepkeeper("install", "--root", tmp_path).stdout
    assert settings.read_text() == 'mode = "act"\n'
    state = tmp_path / "var/lib/stepkeeper"
    state.mkdir(parents=True)
    drain = Drain(reason="stepkeeper: XID 79 [n1.1]", action=Action.DRAIN_REBOOT, at=1.0, boot_id="b")
    book = ledger.Ledger(state / ledger.NAME, ledger.Book(), config.NodeConfig().policy)
    book.append(ledger.DrainLine(drain=drain))
    assert book.flush(30.0)

    kept = stepkeeper("uninstall", "--root", tmp_path)
    assert not unit.exists()
    assert settings.exists()
    assert "the node stays drained: stepkeeper: XID 79 [n1.1]" in kept.stdout
    assert stepkeeper("uninstall", "--purge", "--root", tmp_path).returncode == 0
    assert not settings.exists()
    assert not state.exists()


def test_only_root_installs(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("needs an ordinary user")
    assert stepkeeper("install", "--root", tmp_path).returncode == ExitCode.USAGE

"""What the doctor finds out about storage: each by trying it, on file systems made for that."""

from __future__ import annotations

import os
import stat
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.cli import main
from stepkeeper.core.exits import ExitCode
from stepkeeper.doctor import site, visible
from stepkeeper.doctor.site import Finding, Level

MOUNT_WITHIN_S = 90.0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB in memory."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place],
        capture_output=True, text=True, timeout=MOUNT_WITHIN_S, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], timeout=MOUNT_WITHIN_S, check=True)


def levels(found: list[Finding]) -> list[Level]:
    return [finding.level for finding in found]


def test_storage_that_takes_a_save_is_in_order_and_left_as_it_was(tmp_path: Path) -> None:
    found = [each for each in site.examine_storage(tmp_path) if each.level is not Level.WARNING]  # tmp may be in memory
    assert levels(found) == [Level.OK]
    assert "write, fsync, rename and read back work" in found[0].means
    assert not list(tmp_path.iterdir())


def test_storage_without_room_is_a_problem_and_memory_a_warning(small: Path) -> None:
    local, full = site.examine_storage(small)
    assert (local.level, local.found) == (Level.WARNING, "tmpfs")
    assert "--run-dir" in local.remedy
    assert full.level is Level.PROBLEM
    assert "No space left" in full.found
    assert "write, fsync, rename, read back" in full.means
    assert not list(small.iterdir())


def test_the_command_says_so_and_its_exit_code_too(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(scontrol(tmp_path)))
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert main.main(["doctor", "--run-dir", str(small)]) == ExitCode.SITE_UNFIT
    said = capsys.readouterr().out
    assert f"PROBLEM  storage {small}: " in said
    assert "-> choose another --run-dir" in said
    assert main.main(["doctor", "--run-dir", str(tmp_path / "none")]) == ExitCode.RUN_DIRECTORY
    assert "make it first" in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "hint"), [("APPTAINER_CONTAINER", "apptainer"), ("ENROOT_PID", "enroot")])
def test_in_a_container_without_slurm_it_says_where_to_look_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, hint: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main.main(["doctor"]) == ExitCode.NO_SLURM
    assert "container" not in capsys.readouterr().err
    monkeypatch.setenv(variable, "/image.sif")
    assert main.main(["doctor"]) == ExitCode.NO_SLURM
    said = capsys.readouterr().err
    assert "are Slurm's commands on PATH?" in said
    assert f"this is a container ({hint}): look from the host" in said


def test_slurms_commands_without_a_cluster_are_told_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What 22.05 says where it is installed and nothing else is."""
    program(
        scontrol(tmp_path) / "scontrol",
        """
        echo 'scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2
        echo 'scontrol: fatal: Could not establish a configuration source' >&2
        exit 1
        """,
    )
    monkeypatch.setenv("PATH", str(tmp_path / "commands"))
    for words in (["doctor"], ["submit", "--", "true"]):
        assert main.main(words) == ExitCode.NO_SLURM
        said = capsys.readouterr().err
        assert "no cluster is configured on this machine" in said
        assert "go to a login node, or set SLURM_CONF" in said
        assert "res_nsearch" not in said


def scontrol(tmp_path: Path) -> Path:
    """Return a directory with a `scontrol` of a cluster without settings."""
    commands = tmp_path / "commands"
    commands.mkdir()
    return program(commands / "scontrol", "exit 0").parent


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{textwrap.dedent(script)}\n")
    path.chmod(stat.S_IRWXU)
    return path


# --- what other nodes see ----------------------------------------------------------------------------------------

# an srun whose two nodes are this one: each runs the words from `python` on, under its own name
NODES = """
while [ "${1#-}" != "$1" ]; do shift; done
"""
# like srun, it ends its tasks when it is told to end
BOTH_SEE = (
    NODES
    + """
    trap 'kill $tasks' TERM
    SLURMD_NODENAME=n1 "$@" & tasks=$!
    SLURMD_NODENAME=n2 "$@" & tasks="$tasks $!"
    wait
    """
)
ONE_STARTS = 'echo "n1 first"; echo "slurmstepd: error: execve(): python: No such file" >&2'
# the second node has a copy of the directory, which nobody renews: a cache that is never looked at again
ONE_IS_BLIND = (
    NODES
    + """
    SLURMD_NODENAME=n1 "$@" &
    for word; do case $word in */token) cp "$word" "$STALE"; old=$word ;; esac; done
    set -- $(printf '%s\\n' "$@" | sed "s|^$old\\$|$STALE|")
    SLURMD_NODENAME=n2 "$@" & wait
    """
)


def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str) -> Finding:
    commands = tmp_path / "commands"
    commands.mkdir()
    program(commands / "srun", srun)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setattr(visible, "ENDS_WITHIN_S", 3.0)
    monkeypatch.setenv("STALE", str(tmp_path / "stale"))
    shared = tmp_path / "shared"
    shared.mkdir()
    (found,) = visible.examine(shared, ("n1", "n2"))
    assert not list(shared.iterdir()), "it cleans up"
    return found


def test_nodes_that_see_what_this_one_writes_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, BOTH_SEE)
    assert found.level is Level.OK, found
    assert "seen everywhere" in found.found


def test_a_node_on_which_stepkeeper_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, ONE_STARTS)
    assert found.level is Level.PROBLEM
    assert "1 of 2 nodes see a new file; not: n2; slurmstepd" in found.found
    assert "execve(): python" in found.found, "what Slurm says of it"
    assert "install stepkeeper where every node has it" in found.remedy


def test_a_node_that_does_not_see_a_replaced_file_endangers_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "SEEN_WITHIN_S", 2.0)
    found = look(tmp_path, monkeypatch, ONE_IS_BLIND)
    assert found.level is Level.PROBLEM, found
    assert found.found.endswith("n2")
    assert "believe to hold the lease" in found.means
    assert "actimeo" in found.remedy

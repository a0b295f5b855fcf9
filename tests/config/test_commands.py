"""`stepkeeper run --print-config` and `--dry-run`, as a user sees them: outside a job and inside one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.config import files
from stepkeeper.config.settings import SETTINGS
from stepkeeper.core.exits import ExitCode
from stepkeeper_trainer.formats import records
from tests.reading import build

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def stepkeeper(tmp_path: Path, home: Path) -> Run:
    """Run the command as from a login shell, with nothing of Slurm."""

    def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stepkeeper", "run", *argv],
            env={"PATH": "/nowhere", "HOME": str(home), "USER": "ada", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    return run


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == ExitCode.FINISHED, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == ExitCode.USAGE, done
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not done.stdout
    for word in words:
        assert word in done.stderr


def in_a_job(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job, with an `scontrol` that expands node lists; `srun` would be noticed."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames gpu[1-3]" ] && printf "gpu1\\ngpu2\\ngpu3\\n"\n'
    )
    (commands / "srun").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    for each in commands.iterdir():
        each.chmod(0o755)
    return {
        "PATH": f"{commands}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[1-3]",
        "SLURM_JOB_NAME": "train",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_CPUS_PER_NODE": "16(x3)",
    }


def test_print_config_shows_every_setting_its_unit_and_its_origin(stepkeeper: Run, user_file: Path) -> None:
    user_file.write_text("[policy]\nfailures_max = 9\n")

    done = stepkeeper("--print-config", "--spares", "2", "--set", "policy.leave_within_s=7", STEPKEEPER_MIN_NODES="3")

    assert done.returncode == ExitCode.FINISHED, done.stderr
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}
    assert rows["spares"] == "2 nodes flag: --spares"
    assert rows["min_nodes"] == "3 nodes environment: STEPKEEPER_MIN_NODES"
    assert rows["policy.failures_max"] == f"9 launches user: {user_file}, line 2"
    assert rows["policy.leave_within_s"] == "7 s flag: --set"
    assert rows["policy.hang_least_s"] == "120 s default"
    assert rows["tasks_per_node"] == "not set ranks a node default"
    assert list(rows) == ["KEY", *SETTINGS]
    assert "%x stands for SLURM_JOB_NAME" in done.stderr


def test_print_config_reads_the_run_directorys_file(stepkeeper: Run, run_directory: Path) -> None:
    (run_directory / "config.toml").write_text("spares = 4")

    found = said(stepkeeper("--print-config", "--json", "--run-dir", str(run_directory)))

    spares = found["settings"]["spares"]
    assert (spares["value"], spares["unit"], spares["origin"]) == (4, "nodes", "run directory")
    assert spares["where"] == f"{run_directory}/config.toml, line 1"
    assert found["run_directory_unknown"] is None
    assert list(found["settings"]) == list(SETTINGS)


def test_print_config_creates_nothing(stepkeeper: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))

    stepkeeper("--print-config", "--run-dir", str(tmp_path / "new"))
    stepkeeper("--dry-run", "--run-dir", str(tmp_path / "new"), "--", "true")

    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_wrong_is_one_line_and_exit_code_2(stepkeeper: Run, user_file: Path) -> None:
    refused(stepkeeper("--print-config", STEPKEEPER_SPARE="1"), "STEPKEEPER_SPARE:", "STEPKEEPER_SPARES")
    refused(stepkeeper("--print-config", "--spares", "-1"), "--spares", "from 0 to")
    refused(stepkeeper("--print-config", "--no-such-option"), "--no-such-option")
    refused(stepkeeper("--json", "--", "true"), "--print-config or --dry-run")
    refused(stepkeeper("--dry-run"), "no CMD")
    user_file.write_text("\nspare = 1")
    refused(stepkeeper("--print-config"), f"{user_file}, line 2", "`spares`")


def test_an_option_can_undo_what_a_file_switches_on(stepkeeper: Run, user_file: Path) -> None:
    user_file.write_text("torchrun = true")

    with_file = said(stepkeeper("--dry-run", "--json", "--", "python", "train.py"))
    undone = said(stepkeeper("--dry-run", "--json", "--no-torchrun", "--", "python", "train.py"))

    assert "torchrun" in with_file["training"]
    assert "torchrun" not in undone["training"]


def test_a_dry_run_outside_a_job_says_what_it_assumes(stepkeeper: Run, tmp_path: Path) -> None:
    done = stepkeeper(
        "--dry-run", "--spares", "1", "--min-nodes", "2", "--", "python", "train.py", "--api-key=sk-12345678"
    )

    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert f"run directory  {tmp_path}/runs/%x-%j\n" in done.stdout
    assert "nodes          node1 node2 (spare: node3)\n" in done.stdout
    for word in ("not inside a job: 3 nodes", "one rank a node", "%j of the run directory is the job's"):
        assert word in done.stdout
    assert "resume from    the beginning" in done.stdout
    assert "12345678" not in done.stdout
    watchers, training = (line for line in done.stdout.splitlines() if line.startswith(("watchers:", "training:")))
    assert "--nodelist=node[1-3]' " in watchers
    assert watchers.endswith("-m stepkeeper.watcher.main")
    assert "--nodelist=node[1-2]' " in training
    assert training.endswith("-- python train.py '--api-key=***'")


def test_a_dry_run_in_a_job_shows_the_lines_of_the_start_and_starts_nothing(stepkeeper: Run, tmp_path: Path) -> None:
    done = stepkeeper("--dry-run", "--json", "--spares", "1", "--", "python", "t.py", **in_a_job(tmp_path))

    plan = said(done)
    directory = tmp_path / "runs" / "train-7"
    assert plan["run_directory"] == str(directory)
    assert (plan["nodes"], plan["spares"]) == (["gpu1", "gpu2"], ["gpu3"])
    assert plan["training"][:6] == [
        "srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--nodelist=gpu[1-2]", "--cpus-per-task=8",
    ]  # fmt: skip
    assert f"--output={directory}/logs/attempt-000/launch-000/%N.log" in plan["training"]
    assert plan["training"][-3:] == ["--", "python", "t.py"]
    assert plan["watchers"][:5] == [
        "srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--nodelist=gpu[1-3]",
    ]  # fmt: skip
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_from_what_it_would_resume(stepkeeper: Run, tmp_path: Path) -> None:
    """The newest step directory is torn: the one before is used; `{resume}` is where the argument goes."""
    run = build.make_run(tmp_path / "run")
    *_, whole, torn = build.make_steps(run)
    (torn / "__0_0.distcp").write_bytes(b"short")

    plan = said(
        stepkeeper("--dry-run", "--json", "--run-dir", str(run.path), "--", "srun", "-n2", "t.py", "{resume}", "--fast")
    )

    assert plan["resume_from"] == str(whole)
    assert plan["training"][-5:] == ["-n2", "t.py", "--resume-from", str(whole), "--fast"]
    assert [each.partition(":")[0] for each in plan["passed_over"]] == [torn.name]


def test_a_dry_run_of_a_finished_run_would_start_nothing(stepkeeper: Run, tmp_path: Path) -> None:
    run = build.make_run(tmp_path / "run")
    records.write_outcome(
        run.path, records.Outcome(outcome="finished", step=60, tokens=1, save_id=None, launch="0.0", at=1.0)
    )

    done = stepkeeper("--dry-run", "--run-dir", str(run.path), "--", "t.py")

    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert "finished at step 60: nothing would be started" in done.stdout
    assert "srun" not in done.stdout


def test_a_dry_run_that_would_be_refused_is_refused(stepkeeper: Run, user_file: Path, tmp_path: Path) -> None:
    user_file.write_text("spares = 3")

    refused(stepkeeper("--dry-run", "--", "t.py", **in_a_job(tmp_path)), f"{user_file}, line 1", "3 nodes")


def test_the_file_in_etc_locks(tmp_path: Path, home: Path) -> None:
    """In a mount namespace of the test's own, with a copy of /etc: the place is not to be chosen by a user."""
    etc = tmp_path / "etc"
    site = etc / "stepkeeper" / "config.toml"
    site.parent.mkdir(parents=True)
    for name in ("passwd", "group", "nsswitch.conf", "localtime", "ld.so.cache"):
        if os.path.exists(f"/etc/{name}"):
            shutil.copyfile(f"/etc/{name}", etc / name)
    site.write_text("[locked]\nspares = 0\n")
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() != 0 else [])]
    script = f'mount --bind {etc} /etc || exit 77; exec {sys.executable} -m stepkeeper run --print-config "$@"'

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*unshare, "sh", "-c", script, "sh", *argv],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    locked = run("--json")
    if locked.returncode == 77 or "unshare" in locked.stderr:
        pytest.skip(f"no mount namespace here: {locked.stderr.strip()}")
    spares = said(locked)["settings"]["spares"]
    assert (spares["origin"], spares["locked"]) == ("site", f"{files.SITE}, line 2")
    refused(run("--spares", "1"), "--spares: `spares` is locked", f"{files.SITE}, line 2", "at 0")


def test_a_dry_run_shows_the_framework_of_the_script_and_its_resume_argument(
    stepkeeper: Run, tmp_path: Path, user_file: Path
) -> None:
    user_file.write_text(
        '[framework]\nname = "generic"\n[framework.generic]\nsteps = "ckpt-{step}"\ncomplete = ["DONE"]\n'
        'resume = ["--from", "{path}"]\n'
    )
    for name in ("ckpt-10", "ckpt-20"):
        (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / "ckpt-10" / "DONE").touch()
    line = ("--dry-run", "--json", "--run-dir", str(tmp_path / "run"), "--checkpoint-dir", "out")

    found = said(stepkeeper(*line, "--", "python", "train.py"))
    assert found["resume_from"] == str(tmp_path / "out" / "ckpt-10")
    assert found["training"][-4:] == ["python", "train.py", "--from", str(tmp_path / "out" / "ckpt-10")]
    assert "--checkpoint-dir" in found["framework"]
    assert any("ckpt-20" in each for each in found["passed_over"])

    found = said(stepkeeper(*line, "--framework", "none", "--", "python", "train.py"))
    assert (found["resume_from"], found["framework"]) == (None, "")
    refused(stepkeeper(*line, "--framework", "nanotron", "--", "python", "train.py"), "--framework", "nanotron")

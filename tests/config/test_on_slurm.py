"""A real run goes by the files, and keeps by what it went."""

from __future__ import annotations

import json
import pwd
import shutil
import stat

import pytest

from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.training import Training

pytestmark = pytest.mark.slurm


@pytest.mark.campaign
def test_an_attempt_goes_by_the_file_in_its_run_directory_and_records_it(lab: Lab) -> None:
    training = Training(lab, name="configured", steps=5, step_seconds=0.0, env={"STEPKEEPER_POLICY_FAILURES_MAX": "2"})
    training.run_dir.mkdir(mode=0o700)
    file = training.run_dir / "config.toml"
    file.write_text("group_readable = true\npolicy.leave_within_s = 14\n")
    user = pwd.getpwnam(training.user)
    for path in (training.run_dir, file):
        shutil.chown(path, user.pw_uid, user.pw_gid)

    training.submit()
    training.wait_end()

    assert training.exits() == [ExitCode.FINISHED], training.story()
    assert stat.S_IMODE((training.run_dir / "checkpoints").stat().st_mode) == 0o750
    recorded = json.loads((training.run_dir / "attempts" / "attempt-000" / "config.json").read_text())["settings"]
    changed = {key: (each["value"], each["origin"]) for key, each in recorded.items() if each["origin"] != "default"}
    assert changed == {
        "run_dir": (str(training.run_dir), "environment"),
        "group_readable": (True, "run directory"),
        "policy.failures_max": (2, "environment"),
        "policy.leave_within_s": (14.0, "run directory"),
    }
    assert f"14 ({file}, line 2)" in training.output()


def test_a_mistake_in_a_setting_ends_the_job_before_anything_starts(lab: Lab) -> None:
    training = Training(lab, name="misspelt", env={"STEPKEEPER_SPARE": "1"}).submit()
    training.wait_end()

    assert lab.job(training.job_id).exit_code == f"{int(ExitCode.USAGE)}:0"
    assert "STEPKEEPER_SPARE: no such setting; did you mean `STEPKEEPER_SPARES`" in training.output()
    assert not training.run_dir.exists()

"""What the doctor says of each setting."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stepkeeper.cli import doctor
from stepkeeper.core.exits import ExitCode
from stepkeeper.doctor import rules
from stepkeeper.doctor.site import Finding, Level, Partition, Site, parse_partitions, read_cgroup_conf

GOOD = {
    "SLURM_VERSION": "24.11.5",
    "JobRequeue": "1",
    "JobFileAppend": "1",
    "KillWait": "30 sec",
    "AuthInfo": "socket=/run/munge/munge.socket.2,cred_expire=5",
    "ProctrackType": "proctrack/cgroup",
    "UnkillableStepTimeout": "180 sec",
    "SlurmdTimeout": "300 sec",
    "InactiveLimit": "0 sec",
    "SrunPortRange": "0-0",
    "RequeueExit": "(null)",
    "JobSubmitPlugins": "(null)",
    "SlurmctldParameters": "(null)",
}
PARTITION = Partition(
    name="train",
    default=True,
    up=True,
    root_only=False,
    grace_s=60.0,
    max_time_s=None,
    preempt_mode="REQUEUE",
    preemptible=True,
    nodes=4,
    forced_sharing=False,
)


def site(partition: Partition = PARTITION, *, save_s: float | None = None, **settings: str) -> Site:
    return Site(
        settings={**GOOD, **settings}, partitions=(partition,), python="3.11", python_file_system="nfs4", save_s=save_s
    )


def graver_than_ok(found: list[Finding]) -> list[tuple[Level, str]]:
    return [(finding.level, finding.subject) for finding in found if finding.level is not Level.OK]


def test_a_site_in_order_has_no_finding_that_needs_an_eye() -> None:
    assert graver_than_ok(rules.examine(site(save_s=20.0))) == []


def test_a_kernel_log_that_any_user_may_write_into_is_named() -> None:
    (finding,) = [
        each for each in rules.examine(msgspec.structs.replace(site(), users_log=True)) if "net" in each.subject
    ]

    assert (finding.level, finding.subject) == (Level.WARNING, "net.netfilter.nf_log_all_netns")
    assert "sysctl -w net.netfilter.nf_log_all_netns=0" in finding.remedy


@pytest.mark.parametrize(
    ("settings", "level", "subject", "remedy"),
    [
        ({"JobRequeue": "0"}, Level.WARNING, "JobRequeue", "#SBATCH --requeue"),
        ({"JobFileAppend": "0"}, Level.NOTE, "JobFileAppend", "--open-mode=append"),
        ({"AuthInfo": "(null)"}, Level.NOTE, "requeue delay", "node agent"),
        ({"RequeueExit": "9-11,77"}, Level.PROBLEM, "RequeueExit", "take 10, 11 out of RequeueExit"),
        ({"RequeueExitHold": "20"}, Level.PROBLEM, "RequeueExitHold", "take 20 out"),
        ({"ProctrackType": "proctrack/linuxproc"}, Level.WARNING, "ProctrackType", "proctrack/cgroup"),
        ({"SignalChildrenProcesses": "yes"}, Level.WARNING, "SignalChildrenProcesses", "cgroup.conf"),
        ({"UnkillableStepTimeout": "60 sec"}, Level.NOTE, "UnkillableStepTimeout", "120"),
        ({"SlurmdTimeout": "0 sec"}, Level.WARNING, "SlurmdTimeout", "300"),
        ({"SlurmctldParameters": "preempt_send_user_signal"}, Level.NOTE, "send_user_signal", "B:USR1@120"),
        (
            {"SlurmctldParameters": "enable_configless,enable_expedited_requeue"},
            Level.NOTE,
            "enable_expedited_requeue",
            "scontrol release",
        ),
        ({"JobSubmitPlugins": "lua"}, Level.NOTE, "JobSubmitPlugins", "scontrol show job"),
        ({"InactiveLimit": "600 sec"}, Level.NOTE, "InactiveLimit", ""),
        ({"SrunPortRange": "60001-60100"}, Level.NOTE, "SrunPortRange", ""),
        ({"MaxBatchRequeue": "5"}, Level.NOTE, "MaxBatchRequeue", ""),
        ({"SLURM_VERSION": "20.11.9"}, Level.WARNING, "SLURM_VERSION", "selftest"),
        ({"ProctrackType": "(null)"}, Level.WARNING, "ProctrackType", "ProctrackType=proctrack/cgroup in slurm.conf"),
        ({"SlurmdTimeout": "1800 sec"}, Level.NOTE, "SlurmdTimeout", ""),
        ({"PreemptParameters": "send_user_signal"}, Level.NOTE, "send_user_signal", "B:USR1@120"),
        (
            {"SLURM_VERSION": "25.11.1", "SchedulerParameters": "bf_window=60,requeue_delay=90"},
            Level.NOTE,
            "requeue delay",
            "SchedulerParameters=requeue_delay=5",
        ),
    ],
)
def test_each_bad_setting_is_named_with_its_remedy(
    settings: dict[str, str], level: Level, subject: str, remedy: str
) -> None:
    found = [finding for finding in rules.examine(site(**settings)) if finding.level is not Level.OK]
    assert [(finding.level, finding.subject) for finding in found] == [(level, subject)]
    assert remedy in found[0].remedy


def test_before_25_11_the_credential_and_not_the_option_makes_a_requeued_job_wait() -> None:
    (found,) = graver_than_ok(rules.examine(site(AuthInfo="cred_expire=90", SchedulerParameters="requeue_delay=5")))
    assert found == (Level.NOTE, "requeue delay")
    newer = site(SLURM_VERSION="26.05.0", AuthInfo="cred_expire=90", SchedulerParameters="requeue_delay=5")
    assert graver_than_ok(rules.examine(newer)) == []


def test_slurms_commands_that_are_missing_are_named() -> None:
    here = msgspec.structs.replace(site(), missing_commands=("scontrol", "squeue"))
    (found,) = [each for each in rules.examine(here) if each.level is not Level.OK]
    assert (found.level, found.subject) == (Level.PROBLEM, "Slurm's commands")
    assert "scontrol, squeue" in found.found
    assert "on PATH in the batch script" in found.remedy


@pytest.mark.parametrize(("kind", "told"), [("apptainer", True), ("enroot", True), ("docker", False), ("", False)])
def test_a_supervisor_in_a_users_container_is_told_to_stay_outside(kind: str, told: bool) -> None:  # noqa: FBT001
    """A node itself may be a docker container: there it is outside."""
    found = [
        each for each in rules.examine(msgspec.structs.replace(site(), container=kind)) if each.level is not Level.OK
    ]
    assert [each.subject for each in found] == (["container"] if told else [])
    if told:
        assert "exec stepkeeper run -- apptainer exec IMAGE" in found[0].remedy


def test_an_environment_on_a_local_disk_must_be_on_every_node() -> None:
    here = msgspec.structs.replace(site(), python_file_system="ext4")
    (found,) = [each for each in rules.examine(here) if each.level is not Level.OK]
    assert (found.level, found.subject) == (Level.NOTE, "stepkeeper's Python")
    assert "same path on every node" in found.remedy


@pytest.mark.parametrize(
    ("kill_wait", "grace_s", "save_s", "remedies"),
    [
        ("30 sec", 0.0, 40.0, {"KillWait": "KillWait=46", "GraceTime": "GraceTime=50"}),
        ("30 sec", 20.0, 100.0, {"GraceTime": "GraceTime=110"}),
        ("300 sec", 0.0, 40.0, {"GraceTime": "GraceTime=50"}),
    ],
)
def test_a_remedy_names_the_very_number(
    kill_wait: str, grace_s: float, save_s: float, remedies: dict[str, str]
) -> None:
    here = site(msgspec.structs.replace(PARTITION, grace_s=grace_s), save_s=save_s, KillWait=kill_wait)
    found = {each.subject: each.remedy for each in rules.examine(here) if each.level is not Level.OK}
    assert found.keys() == remedies.keys()
    assert all(number in found[subject] for subject, number in remedies.items()), found
    better = msgspec.structs.replace(PARTITION, grace_s=float(remedies["GraceTime"].partition("=")[2]))
    assert not graver_than_ok(rules.examine(site(better, save_s=save_s))), "what it says is what helps"


@pytest.mark.parametrize(
    ("changes", "save_s", "expected"),
    [
        ({"grace_s": 20.0}, 100.0, (Level.PROBLEM, "GraceTime")),
        ({"grace_s": 0.0}, 40.0, (Level.PROBLEM, "KillWait")),
        ({"grace_s": 0.0}, None, (Level.NOTE, "KillWait")),
        ({"preempt_mode": "GANG,SUSPEND"}, 10.0, (Level.WARNING, "PreemptMode")),
        ({"preempt_mode": "CANCEL"}, 10.0, (Level.NOTE, "PreemptMode")),
        ({"up": False}, 10.0, (Level.PROBLEM, "partition")),
        ({"root_only": True}, 10.0, (Level.PROBLEM, "partition")),
        ({"forced_sharing": True}, 10.0, (Level.WARNING, "OverSubscribe")),
    ],
)
def test_a_partition_that_leaves_too_little_time_or_takes_turns_is_named(
    changes: dict[str, object], save_s: float | None, expected: tuple[Level, str]
) -> None:
    partition = msgspec.structs.replace(PARTITION, **changes)
    assert expected in graver_than_ok(rules.examine(site(partition, save_s=save_s)))


def test_the_gravest_finding_comes_first() -> None:
    found = rules.examine(site(JobFileAppend="0", RequeueExit="20", ProctrackType="proctrack/pgid"))
    weights = [finding.level.weight for finding in found]
    assert weights == sorted(weights, reverse=True)


def test_every_exit_code_of_the_supervisor_clashes_with_a_site_that_requeues_on_all() -> None:
    (clash,) = [each for each in rules.examine(site(RequeueExit="1-255")) if each.subject == "RequeueExit"]
    assert all(f"{int(code)}" in clash.means for code in ExitCode if code)


def test_who_preempts_whom_is_told_from_priority_tiers() -> None:
    rows = (
        "PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 State=UP Default=YES MaxTime=7-00:00:00\n"
        "PartitionName=high PriorityTier=9 PreemptMode=OFF GraceTime=0 State=UP MaxTime=UNLIMITED\n"
    )
    low, high = parse_partitions(rows, {"PreemptType": "preempt/partition_prio"})
    assert (low.preemptible, high.preemptible) == (True, False)
    assert (low.max_time_s, high.max_time_s) == (7 * 86400.0, None)
    low, high = parse_partitions(rows, {"PreemptType": "preempt/none"})
    assert not low.preemptible


def test_what_only_stands_in_cgroup_conf_is_read_there(tmp_path: Path) -> None:
    """`scontrol show config` of 22.05 does not tell it."""
    (tmp_path / "cgroup.conf").write_text("# ours\nConstrainCores=yes\nSignalChildrenProcesses = yes # why not\n")
    read = read_cgroup_conf(str(tmp_path / "slurm.conf"))
    assert read == {"ConstrainCores": "yes", "SignalChildrenProcesses": "yes"}
    assert graver_than_ok(rules.examine(site(**read))) == [(Level.WARNING, "SignalChildrenProcesses")]
    assert read_cgroup_conf("") == {}
    assert read_cgroup_conf(str(tmp_path / "none" / "slurm.conf")) == {}


def test_the_last_line_counts_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    levels = (Level.OK, Level.OK, Level.NOTE, Level.NOTE, Level.WARNING)
    doctor.show([Finding(level=each, subject="s", found="f", means="m") for each in levels], show_all=False)
    assert capsys.readouterr().out.splitlines()[-1] == "1 warning, 2 notes, 2 ok (--all shows what is in order)"

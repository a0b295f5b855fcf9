"""Small rules: control group paths, rates, the weight of the client."""

import subprocess
import sys

import pytest
import structlog
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.loop_tools import RateLimiter
from stepkeeper.node_agent.connections import (
    BoundedLog,
    Limits,
    Membership,
    Rate,
    RateLimiters,
    parse_cgroup,
)

GENERATE = (Phase.explicit, Phase.generate)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9:freezer:/slurm_n1/uid_5/job_7/step_0/task_0", Membership(job_id=7, uid=5, node="n1")),
        ("9:freezer:/slurm/uid_5/job_7/step_batch", Membership(job_id=7, uid=5, node="")),
        ("9:memory:/slurm/uid_5/job_7/step_extern/task_special", Membership(job_id=7, uid=5, node="")),
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
            Membership(job_id=7, uid=None, node=""),
        ),
        (
            "0::/system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_0",
            Membership(job_id=7, uid=None, node="n1"),
        ),
        (
            "9:freezer:/slurm_n1/uid_5/job_7/step_0\n3:cpuset:/slurm_n1/uid_5/job_7/step_0\n0::/user.slice",
            Membership(job_id=7, uid=5, node="n1"),
        ),
    ],
)
def test_the_job_of_a_process_is_read_from_slurms_own_groups(text: str, expected: Membership) -> None:
    assert parse_cgroup(text + "\n") == expected


@pytest.mark.parametrize(
    "text",
    [
        # groups that a user may make below what systemd hands to him
        "0::/user.slice/user-5.slice/user@5.service/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        "0::/user.slice/user-5.slice/user@5.service/slurm_n1/uid_5/job_7/step_0",
        "1:name=systemd:/slurm_n1/uid_5/job_7/step_0/task_0",
        "1:name=systemd:/user.slice/user-5.slice/user@5.service/slurm/uid_5/job_7/step_0",
        "9:freezer:/x/slurm/uid_5/job_7/step_0",
        "0::/slurm_n1/uid_5/job_7/step_0/task_0",
        "9:freezer:/../slurm/uid_5/job_7/step_0",
        "9:freezer:/slurm/uid_5/job_7",
        "9:freezer:/slurm/uid_5/job_-7/step_0",
        "0::/system.slice/slurmstepd.scope/system",
        # two jobs at once
        "9:freezer:/slurm/uid_5/job_7/step_0\n8:memory:/slurm/uid_5/job_8/step_0",
        "9:freezer:/slurm/uid_5/job_7/step_0\n8:memory:/slurm/uid_6/job_7/step_0",
        "",
    ],
)
def test_no_group_that_a_user_can_make_is_taken_for_slurms(text: str) -> None:
    assert parse_cgroup(text + "\n") is None


@settings(max_examples=200, phases=GENERATE, deadline=None)
@given(st.text(alphabet="0:/slurm_uidjobtep7.cfr zn\n", max_size=80).map(lambda text: f"0::/user.slice/{text}"))
def test_nothing_below_the_slice_of_users_names_a_job(text: str) -> None:
    assert parse_cgroup(text.partition("\n")[0]) is None


@settings(max_examples=200, phases=GENERATE, deadline=None)
@given(rate=st.floats(0.1, 100), burst=st.floats(1, 50), gaps=st.lists(st.floats(0, 5), max_size=60))
def test_a_limiter_gives_no_more_than_its_rate_and_burst(rate: float, burst: float, gaps: list[float]) -> None:
    limiter, now, taken = RateLimiter(rate, burst), 0.0, 0
    for gap in gaps:
        now += gap
        taken += limiter.take(now)

    assert taken <= burst + rate * now + 1e-6


def test_users_without_end_are_forgotten_oldest_first() -> None:
    limiters = RateLimiters(Rate(0.0, 1.0), uids_max=10)

    assert all(limiters.take(uid, 0.0) for uid in range(1000))
    assert not limiters.take(990, 0.0), "the ten newest are still known"
    assert limiters.take(989, 0.0), "no other is"


def test_refusals_are_logged_at_a_bounded_rate_and_the_others_counted() -> None:
    lines = []

    def keep(_: object, __: str, event: structlog.typing.EventDict) -> str:
        lines.append(event)
        raise structlog.DropEvent

    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[keep])
    refusals = BoundedLog(log, Limits())

    for index in range(10_000):
        refusals.refused(index / 1000, uid=index % 50, what="join", why="no")
    refusals.refused(100.0, uid=7, what="join", why="no")

    assert len(lines) <= 20 + 10 + 1
    assert sum(line["left_out"] for line in lines) + len(lines) == 10_001


def test_the_client_is_light_to_import() -> None:
    script = (
        "import sys; from stepkeeper.node_agent import protocol; "
        "rss = int(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1]); "
        "print(rss, *[m for m in ('structlog', 'subprocess', 'asyncio', 'stepkeeper.slurm') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=90).stdout

    rss_kib, *heavy = said.split()
    assert not heavy
    assert int(rss_kib) < 24 * 1024, f"{rss_kib} KiB"

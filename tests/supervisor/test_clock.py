"""Clocks that are set: by how much, and how Slurm's times stand among ours after it."""

from __future__ import annotations

import msgspec
import pytest

from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock

HOUR = 3600.0
JOB = on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0)


class Host:
    """A host whose wall clock and whose controller's clock are set at will."""

    def __init__(self, *, wall: float = 0.0, slurm: float = 0.0) -> None:
        self.ran, self.wall_by, self.slurm_by = 0.0, wall, slurm
        self.clock = Clock(lambda: 1e9 + self.ran + self.wall_by, lambda: 50.0 + self.ran)
        self.clock.follow_slurm(self.clock.slurm_set(self.slurm_now))

    @property
    def slurm_now(self) -> float:
        return float(int(1e9 + self.ran + self.slurm_by))

    def left_s(self, seconds: float) -> float:
        """Return what the supervisor takes for the rest of a job that Slurm ends in so many seconds."""
        job = msgspec.structs.replace(JOB, end_at=self.slurm_now + seconds, preempt_at=self.slurm_now)
        found = self.clock.from_slurm(job)
        assert found.end_at is not None
        return found.end_at - self.clock.now()

    def looks(self, *, answered: bool = True) -> None:
        """What the loop does every turn."""
        if self.clock.was_set():
            self.clock.follow_slurm(self.clock.slurm_set(self.slurm_now if answered else None))


def test_a_host_whose_clock_is_wrong_from_the_start_reads_slurms_times_right() -> None:
    host = Host(wall=-120.0)
    assert host.left_s(60.0) == pytest.approx(60.0, abs=2.0)

    host.ran, host.wall_by = 10.0, 0.0  # NTP corrects it
    host.looks()

    assert host.left_s(60.0) == pytest.approx(60.0, abs=2.0)
    assert host.clock.now() == 1e9 + 10.0 - 120.0, "our own deadlines go on"


@pytest.mark.parametrize("by", [-HOUR, -5.0, 5.0, HOUR])
def test_clocks_of_a_whole_site_that_are_set(by: float) -> None:
    host = Host()
    host.ran, host.wall_by, host.slurm_by = 100.0, by, by

    host.looks()

    assert host.left_s(60.0) == pytest.approx(60.0, abs=2.0)


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_a_clock_of_one_host_that_is_set_wrong_changes_nothing(by: float) -> None:
    host = Host()
    host.ran, host.wall_by = 100.0, by

    host.looks()

    assert host.left_s(60.0) == pytest.approx(60.0, abs=2.0)


def test_where_slurm_does_not_say_the_wall_clock_is_believed() -> None:
    host = Host()
    host.ran, host.wall_by, host.slurm_by = 100.0, HOUR, HOUR

    host.looks(answered=False)

    assert host.left_s(60.0) == pytest.approx(60.0, abs=2.0)


def test_a_clock_that_nobody_sets_is_asked_about_once() -> None:
    host = Host()
    host.ran, host.wall_by = 100.0, HOUR

    assert [host.clock.was_set() for _ in range(3)] == [True, False, False]
    host.wall_by += 1.0
    assert not host.clock.was_set()


def test_what_slurm_told_of_one_instant_stays_equal() -> None:
    """The end of a preemption is told by two equal times."""
    host = Host(slurm=7.3)
    job = host.clock.from_slurm(msgspec.structs.replace(JOB, end_at=5e8, preempt_at=5e8))

    assert job.end_at == job.preempt_at


def test_what_others_compare_with_the_wall_clock_follows_it() -> None:
    host = Host()
    host.ran, host.wall_by = 100.0, HOUR

    assert host.clock.to_wall(host.clock.now()) == 1e9 + 100.0 + HOUR

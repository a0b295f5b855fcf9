"""NVML by the real pynvml over our own libnvidia-ml.so.1, in the real child process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper.node_agent.nvml import NvmlProcess, Patience, once
from stepkeeper.node_agent.nvml_child import addresses_of_silent
from stepkeeper.node_agent.readings import Evidence, GpuHealth, NvmlState, NvmlStatus, NvmlXid
from stepkeeper.node_agent.xid.catalogue import Action, packaged
from stepkeeper.node_agent.xid.judge import judge_health
from stepkeeper.watcher.kernel import state_of
from tests import fake_nvml
from tests.fake_nvml import FakeNvml, wait_until
from tests.node_agent.sensors.collect import Collected

QUICK = Patience(
    stuck_after_s=0.3,
    stuck_again_s=0.2,
    restart_after_s=0.05,
    restart_after_max_s=0.2,
)


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return _used(FakeNvml(tmp_path / "nvml", gpus=4), monkeypatch)


def _used(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    for name, value in nvml.environment().items():
        monkeypatch.setenv(name, value)
    return nvml


class Watch:
    """A process, and what it has told."""

    def __init__(self, **options: object) -> None:
        self.seen = Collected()
        options.setdefault("health_every_s", 0.1)
        options.setdefault("patience", QUICK)
        options.setdefault("on_failure", print)
        self.process = NvmlProcess(self.seen, **options)  # type: ignore[arg-type]
        self.process.start()

    def status(self, state: NvmlState) -> NvmlStatus:
        return self.seen.wait_for(NvmlStatus, lambda status: status.state is state)

    def count(self, state: NvmlState) -> int:
        return sum(status.state is state for status in self.seen.of(NvmlStatus))


Start = Callable[..., Watch]


def is_there(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has waited for yet does not."""
    return state_of(pid) not in ("", "Z")


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a watch; it is stopped at the end, and must leave no process."""
    watches: list[Watch] = []

    def begin(**options: object) -> Watch:
        watches.append(Watch(**options))
        return watches[-1]

    yield begin
    for watch in watches:
        pid = watch.process.pid
        assert watch.process.stop(90.0)
        assert pid is None or not is_there(pid)


# --- what there is --------------------------------------------------------------------------------


def test_the_gpus_are_listed_with_their_addresses_and_the_driver(nvml: FakeNvml, start: Start) -> None:
    nvml.place(2, pci="0009:01:00", uuid="GPU-abc")
    status = start().status(NvmlState.READY)
    assert status.driver == "580.95.05"
    assert [gpu.index for gpu in status.gpus] == [0, 1, 2, 3]
    assert status.gpus[2].pci == "0009:01:00.0"
    assert status.gpus[2].uuid == "GPU-abc"
    assert status.gpus[3].pci == "0000:13:00.0"


def test_a_node_without_the_library_says_so_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    watch = start(patience=Patience(restart_after_s=0.05, restart_after_max_s=0.05))
    assert "nvmlInit" in watch.status(NvmlState.ABSENT).detail
    first = watch.process.pid
    wait_until(lambda: watch.process.pid not in {None, first}, "it looks again")
    wait_until(lambda: watch.process.pid is None, "and ends again")
    assert len(watch.seen) == 1


def test_an_absence_that_lasts_is_told_once_more_with_its_length(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    watch = start(patience=Patience(restart_after_s=0.05, restart_after_max_s=0.05, absent_lasts_s=0.5))
    wait_until(lambda: len(watch.seen) == 2, "it is told again")
    assert [each.stuck_s >= 0.5 for each in watch.seen.of(NvmlStatus)] == [False, True]
    last = watch.process.pid
    wait_until(lambda: watch.process.pid not in {None, last}, "it looks again")
    wait_until(lambda: watch.process.pid is None, "and ends again")
    assert len(watch.seen) == 2


def test_a_missing_driver_is_looked_for_seldom_and_a_crash_is_followed_at_once(nvml: FakeNvml, start: Start) -> None:
    """A watcher's own sensors leave the processors to ranks that import."""
    patience = Patience(restart_after_s=0.05, restart_after_max_s=0.05, absent_again_s=3600.0)
    watch = start(patience=patience)
    for times in (1, 2):
        wait_until(lambda times=times: watch.count(NvmlState.READY) == times, f"ready {times} times")
        if times == 2:
            nvml.answer("nvmlInitWithFlags", fake_nvml.DRIVER_NOT_LOADED)
        assert watch.process.pid is not None
        os.kill(watch.process.pid, signal.SIGKILL)
    watch.status(NvmlState.ABSENT)
    nvml.answer("nvmlInitWithFlags", fake_nvml.OK)

    time.sleep(20 * patience.restart_after_s)

    assert watch.count(NvmlState.READY) == 2


def test_a_driver_that_is_not_loaded_is_absent_and_noticed_when_it_comes(nvml: FakeNvml, start: Start) -> None:
    nvml.answer("nvmlInitWithFlags", fake_nvml.DRIVER_NOT_LOADED)
    watch = start()
    assert "Driver Not Loaded" in watch.status(NvmlState.ABSENT).detail
    nvml.answer("nvmlInitWithFlags", fake_nvml.OK)
    watch.status(NvmlState.READY)


def test_a_gpu_that_is_lost_when_listed_is_reported_by_its_index(nvml: FakeNvml, start: Start) -> None:
    nvml.lose(1)
    watch = start()
    assert len(watch.status(NvmlState.READY).gpus) == 3
    health = watch.seen.wait_for(GpuHealth, lambda health: health.lost)
    assert health.index == 1
    nvml.find(1)
    watch.seen.wait_for(NvmlStatus, lambda status: len(status.gpus) == 4)


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetTemperature"])
def test_a_gpu_that_wants_a_reset_before_it_answers_says_so(nvml: FakeNvml, start: Start, function: str) -> None:
    reset_required = 16
    nvml.answer(function, reset_required, gpu=1)
    watch = start()
    health = watch.seen.wait_for(GpuHealth, lambda health: health.index == 1)
    assert (health.recovery_action, health.lost, health.silent) == (1, False, False)
    assert health.errors


def test_a_gpu_that_this_process_may_not_see_is_none_of_ours(nvml: FakeNvml, start: Start) -> None:
    nvml.answer("nvmlDeviceGetHandleByIndex_v2", fake_nvml.NO_PERMISSION, gpu=0)
    watch = start()
    assert [gpu.index for gpu in watch.status(NvmlState.READY).gpus] == [1, 2, 3]
    watch.seen.wait_for(GpuHealth, lambda health: health.index == 3)
    assert not [health for health in watch.seen.of(GpuHealth) if health.index == 0]


def test_another_number_of_gpus_is_noticed(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    watch.status(NvmlState.READY)
    nvml.count(3)
    watch.seen.wait_for(NvmlStatus, lambda status: len(status.gpus) == 3)
    assert watch.count(NvmlState.ENDED) == 0  # a new process, but no accident


def test_the_address_of_a_gpu_that_cannot_be_listed_is_found_by_leaving_out_the_others() -> None:
    known = ["0000:3b:00.0", "0000:86:00.0", "0000:af:00.0"]
    assert addresses_of_silent(3, {0: known[0], 2: known[2]}, reversed(known)) == {1: known[1]}
    assert addresses_of_silent(3, {0: known[0], 1: known[2]}, known) == {}  # not in NVML's order
    assert addresses_of_silent(2, {0: known[0]}, known) == {}  # NVML hides one
    assert addresses_of_silent(3, {0: known[0]}, []) == {}


# --- events ---------------------------------------------------------------------------------------


def test_an_xid_event_names_its_gpu(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.xid(2, 79)
    xid = watch.seen.wait_for(NvmlXid)
    assert (xid.code, xid.pci, xid.uuid) == (79, "0000:12:00.0", "GPU-00000000-0000-4000-8000-000000000002")
    assert (xid.gpu_instance, xid.compute_instance) == (None, None)


def test_an_xid_event_of_a_mig_instance_names_the_instance(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.xid(0, 43, gi=5, ci=0)
    xid = watch.seen.wait_for(NvmlXid)
    assert (xid.code, xid.gpu_instance, xid.compute_instance) == (43, 5, 0)


def test_a_burst_of_events_arrives_whole_and_in_order(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    codes = [1 + number % 150 for number in range(500)]
    for code in codes:
        nvml.xid(1, code)
    wait_until(lambda: len(watch.seen.of(NvmlXid)) == len(codes), "all events")
    assert [xid.code for xid in watch.seen.of(NvmlXid)] == codes


def test_after_an_event_the_gpus_are_looked_at_at_once(nvml: FakeNvml, start: Start) -> None:
    watch = start(health_every_s=3600)
    nvml.wait_for_call("nvmlEventSetWait_v2")
    watch.seen.wait_for(GpuHealth, lambda health: health.index == 3)
    nvml.field(3, 230, 2)
    nvml.event(3, fake_nvml.RECOVERY_ACTION)
    health = watch.seen.wait_for(GpuHealth, lambda health: health.recovery_action == 2)
    assert health.pci == "0000:13:00.0"
    assert watch.seen.wait_for(Evidence).text == "recovery action changed"


@pytest.mark.parametrize("events", [0x8, 0xF])
def test_a_driver_that_knows_fewer_events_still_tells_xids(nvml: FakeNvml, start: Start, events: int) -> None:
    for gpu in range(4):
        nvml.set(gpu, events=events)
    watch = start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.xid(0, 48)
    assert watch.seen.wait_for(NvmlXid).code == 48


def test_gpus_without_any_events_are_watched_by_looking(nvml: FakeNvml, start: Start) -> None:
    for gpu in range(4):
        nvml.set(gpu, events=0)
    watch = start()
    watch.status(NvmlState.READY)
    nvml.field(0, 230, 1)
    watch.seen.wait_for(GpuHealth, lambda health: health.recovery_action == 1)
    assert not [call for call in nvml.calls() if call[1] == "nvmlEventSetWait_v2"]


def test_several_processes_hear_the_same_event(nvml: FakeNvml, start: Start) -> None:
    watches = [start() for _ in range(3)]
    for watch in watches:
        watch.status(NvmlState.READY)
        nvml.wait_for_call("nvmlEventSetWait_v2", pid=watch.process.pid)
    nvml.xid(1, 94)
    assert {watch.seen.wait_for(NvmlXid).code for watch in watches} == {94}
    assert len({pid for pid, *_ in nvml.calls()}) == 3


# --- health ---------------------------------------------------------------------------------------


def test_health_holds_all_that_nvml_tells(nvml: FakeNvml, start: Start) -> None:
    nvml.field(1, 230, 4)
    nvml.set(1, rows_pending=1, rows_failed=1, ecc_uncorrected=7)
    nvml.set(1, sram_threshold=1, temperature=91)
    health = start().seen.wait_for(GpuHealth, lambda health: health.index == 1)
    assert health == GpuHealth(
        at=health.at,
        pci="0000:11:00.0",
        uuid="GPU-00000000-0000-4000-8000-000000000001",
        index=1,
        recovery_action=4,
        rows_pending=True,
        rows_failed=True,
        ecc_uncorrected=7,
        sram_threshold_exceeded=True,
        temperature_c=91,
    )


def test_an_old_library_leaves_out_what_it_cannot_tell(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = _used(FakeNvml(tmp_path / "old", gpus=1, old=True), monkeypatch)
    nvml.field(0, 230, None)
    watch = start()
    health = watch.seen.wait_for(GpuHealth)
    assert (health.rows_pending, health.sram_threshold_exceeded, health.recovery_action) == (None, None, None)
    assert (health.temperature_c, health.ecc_uncorrected, health.errors, health.lost) == (40, 0, (), False)
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.xid(0, 13)
    assert watch.seen.wait_for(NvmlXid).code == 13


def test_what_a_gpu_does_not_support_is_left_out(nvml: FakeNvml, start: Start) -> None:
    for function in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues"):
        nvml.answer(function, fake_nvml.NOT_SUPPORTED, gpu=0)
    health = start().seen.wait_for(GpuHealth, lambda health: health.index == 0)
    assert (health.ecc_uncorrected, health.rows_pending, health.recovery_action) == (None, None, None)
    assert health.errors == ()
    assert health.temperature_c == 40


def test_a_gpu_from_before_ampere_tells_of_a_retired_page_that_waits(nvml: FakeNvml, start: Start) -> None:
    nvml.answer("nvmlDeviceGetRemappedRows", fake_nvml.NOT_SUPPORTED, gpu=0)
    nvml.set(0, pages_pending=1)
    health = start().seen.wait_for(GpuHealth, lambda health: health.index == 0)
    assert (health.rows_pending, health.pages_pending, health.errors) == (None, True, ())
    (fault,) = judge_health(health, None, catalogue=packaged())
    assert (fault.action, fault.gpu) == (Action.DEFER_RESET, health.uuid)
    assert "retired" in fault.why


def test_a_call_that_fails_is_told_and_the_others_still_answer(nvml: FakeNvml, start: Start) -> None:
    nvml.answer("nvmlDeviceGetRemappedRows", fake_nvml.UNKNOWN, gpu=0)
    health = start().seen.wait_for(GpuHealth, lambda health: health.index == 0)
    assert health.errors == ("remapped_rows: Unknown Error",)
    assert health.temperature_c == 40


def test_a_gpu_lost_on_the_way_is_reported_and_the_others_are_still_watched(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.lose(1)
    health = watch.seen.wait_for(GpuHealth, lambda health: health.lost)
    assert (health.index, health.pci) == (1, "0000:11:00.0")
    nvml.xid(0, 45)
    assert watch.seen.wait_for(NvmlXid).code == 45


def test_a_wait_that_fails_because_of_a_lost_gpu_goes_on_without_it(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.lose(1)
    nvml.answer("nvmlEventSetWait_v2", fake_nvml.GPU_IS_LOST)
    nvml.xid(0, 1)  # ends the wait under way
    nvml.wait_for_call("nvmlEventSetCreate", times=2)
    nvml.answer("nvmlEventSetWait_v2", fake_nvml.OK)
    waits = sum(function == "nvmlEventSetWait_v2" for _, function, _ in nvml.calls())
    nvml.wait_for_call("nvmlEventSetWait_v2", times=waits + 1)
    nvml.xid(0, 94)
    watch.seen.wait_for(NvmlXid, lambda xid: xid.code == 94)
    assert waits < 20  # no busy loop while it failed


def test_a_link_that_goes_down_or_comes_back_is_evidence(nvml: FakeNvml, start: Start) -> None:
    nvml.set(1, links=18)
    watch = start()
    nvml.wait_for_call("nvmlDeviceGetNvLinkState", times=3 * 18)
    nvml.delay("nvmlDeviceGetTemperature", 3600, gpu=1)  # ahead of the links: both go down between two looks
    held = "nvmlDeviceGetTemperature of 0000:11:00.0"
    watch.seen.wait_for(NvmlStatus, lambda status: status.state is NvmlState.STUCK and status.call == held)
    nvml.set(1, links_down=0b101)
    nvml.delay("nvmlDeviceGetTemperature", 0, gpu=1)
    down = watch.seen.wait_for(Evidence)
    assert (down.what, down.where, down.text) == ("nvlink", "0000:11:00.0", "link 0, 2 went down")
    assert down.values == {"links": 18, "up": 16}
    nvml.set(1, links_down=0b001)
    assert watch.seen.wait_for(Evidence, lambda evidence: evidence is not down).text == "link 2 went up"
    assert len(watch.seen.of(Evidence)) == 2


# --- calls that hang, children that die -----------------------------------------------------------


def test_a_call_that_hangs_is_named_again_and_again_and_its_end_is_told(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    watch.status(NvmlState.READY)
    nvml.delay("nvmlDeviceGetRemappedRows", 3600, gpu=2)
    call = "nvmlDeviceGetRemappedRows of 0000:12:00.0"

    def told() -> list[NvmlStatus]:
        return [status for status in watch.seen.of(NvmlStatus) if status.call == call]

    wait_until(lambda: len(told()) >= 3, "it is stuck, told three times")
    stuck = told()
    assert {status.state for status in stuck} == {NvmlState.STUCK}
    assert [status.stuck_s for status in stuck] == sorted({status.stuck_s for status in stuck})
    ready = watch.count(NvmlState.READY)
    nvml.delay("nvmlDeviceGetRemappedRows", 0, gpu=2)
    wait_until(lambda: watch.count(NvmlState.READY) > ready, "it answers again")
    # a busy machine may have it told as stuck once more since
    assert len([each for each in watch.seen.of(NvmlStatus) if each.state is NvmlState.READY][-1].gpus) == 4


def test_events_still_arrive_while_a_health_call_hangs(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.delay("nvmlDeviceGetTemperature", 3600)
    watch.status(NvmlState.STUCK)
    nvml.xid(3, 119)
    assert watch.seen.wait_for(NvmlXid).code == 119


def test_an_initialisation_that_hangs_is_reported_and_ended_by_stop(nvml: FakeNvml, start: Start) -> None:
    nvml.delay("nvmlInitWithFlags", 3600)
    assert start().status(NvmlState.STUCK).call == "nvmlInit"  # the fixture stops it, and finds nothing left


def test_a_child_that_is_stuck_for_too_long_is_replaced(nvml: FakeNvml, start: Start) -> None:
    nvml.delay("nvmlDeviceGetTemperature", 3600)
    watch = start(patience=Patience(stuck_after_s=0.1, abandon_after_s=0.3, restart_after_s=0.05))
    watch.status(NvmlState.STUCK)
    first = watch.process.pid
    wait_until(lambda: watch.process.pid not in {None, first}, "another child")
    nvml.delay("nvmlDeviceGetTemperature", 0)
    watch.seen.wait_for(GpuHealth)


def test_processes_that_hang_one_after_the_other_are_one_silence(nvml: FakeNvml, start: Start) -> None:
    """A hang that a kill does end is as long as all of them: else it would never last long enough to be believed."""
    nvml.delay("nvmlDeviceGetTemperature", 3600)
    watch = start(patience=Patience(stuck_after_s=0.1, stuck_again_s=0.1, abandon_after_s=0.3, restart_after_s=0.05))
    watch.seen.wait_for(NvmlStatus, lambda status: status.stuck_s > 3.0)
    nvml.delay("nvmlDeviceGetTemperature", 0)
    looks = len(watch.seen.of(GpuHealth))
    wait_until(lambda: len(watch.seen.of(GpuHealth)) > looks + 4, "every GPU was asked")
    told = watch.count(NvmlState.STUCK)
    nvml.delay("nvmlDeviceGetTemperature", 3600)
    wait_until(lambda: watch.count(NvmlState.STUCK) > told, "it is stuck again")
    assert [each for each in watch.seen.of(NvmlStatus) if each.state is NvmlState.STUCK][told].stuck_s < 3.0


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_thread_that_waits_for_no_events_is_not_stuck(nvml: FakeNvml, start: Start, gpus: int) -> None:
    nvml.count(gpus)
    for gpu in range(gpus):
        nvml.set(gpu, events=0)
    watch = start()
    nvml.wait_for_call("nvmlEventSetCreate")
    nvml.wait_for_call("nvmlDeviceGetCount_v2", times=10)  # ten rounds of looks: a second and more
    # a busy machine may stop it for a moment, after which it answers again; that thread never would
    wait_until(lambda: watch.seen.of(NvmlStatus)[-1].state is NvmlState.READY, "nothing is stuck")


def test_a_stopped_process_counts_as_stuck(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    assert watch.process.pid is not None
    os.kill(watch.process.pid, signal.SIGSTOP)
    watch.status(NvmlState.STUCK)


def test_a_killed_child_is_told_and_started_again(nvml: FakeNvml, start: Start) -> None:
    watch = start()
    killed: set[int | None] = {None}
    for deaths in (1, 2):
        nvml.wait_for_call("nvmlEventSetWait_v2", times=deaths)
        wait_until(lambda: watch.process.pid not in killed, "it runs")
        pid = watch.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
        wait_until(lambda deaths=deaths: watch.count(NvmlState.ENDED) == deaths, "its death is told")
    assert "signal 9" in watch.status(NvmlState.ENDED).detail
    wait_until(lambda: watch.process.pid not in killed, "it runs again")
    nvml.wait_for_call("nvmlEventSetWait_v2", pid=watch.process.pid)
    nvml.xid(0, 48)
    assert watch.seen.wait_for(NvmlXid).code == 48


def test_the_child_ends_when_its_parent_is_killed(nvml: FakeNvml) -> None:
    script = (
        "import time\nfrom stepkeeper.node_agent.nvml import NvmlProcess\n"
        "process = NvmlProcess(lambda reading: None, on_failure=print)\nprocess.start()\n"
        "while process.pid is None: time.sleep(0.01)\nprint(process.pid, flush=True)\ntime.sleep(1000)\n"
    )
    nvml.delay("nvmlDeviceGetTemperature", 3600)  # even while a call hangs
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        nvml.wait_for_call("nvmlDeviceGetTemperature")
        parent.kill()
    wait_until(lambda: not is_there(child), "the child is gone")


def test_stop_returns_at_once_in_every_state(nvml: FakeNvml, start: Start) -> None:
    start()  # just begun
    ready = start()
    ready.status(NvmlState.READY)
    nvml.delay("*", 3600)
    start().status(NvmlState.STUCK)


def test_the_users_own_modules_are_not_imported(
    nvml: FakeNvml, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("raise SystemExit('the user owns the agent')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    start().status(NvmlState.READY)
    assert nvml.calls()


# --- one look -------------------------------------------------------------------------------------


def test_one_look_tells_all_gpus(nvml: FakeNvml) -> None:
    nvml.field(2, 230, 1)
    result = once(within_s=90)
    assert result.status.state is NvmlState.READY
    assert [health.recovery_action for health in result.health] == [0, 0, 1, 0]


def test_one_look_without_a_library_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert once(within_s=90).status.state is NvmlState.ABSENT


def test_one_look_that_hangs_is_stuck_and_names_the_call(nvml: FakeNvml) -> None:
    nvml.delay("nvmlDeviceGetTotalEccErrors", 3600, gpu=1)
    began, call = time.monotonic(), "nvmlDeviceGetTotalEccErrors of 0000:11:00.0"
    for within_s in (2.0, 10.0, 50.0):
        result = once(within_s=within_s)
        if result.status.call == call:
            break  # else a busy machine has not come to it yet
    assert time.monotonic() - began < 1000  # of the 3600 that the call takes
    assert result.status.state is NvmlState.STUCK
    assert result.status.call == call
    assert [health.index for health in result.health] == [0]

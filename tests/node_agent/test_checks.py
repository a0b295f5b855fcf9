"""The checks before a launch, and `stepkeeper node check`: with the real pynvml, and with a mount that really hangs."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepkeeper.node_agent.checks import Wanted, run_checks
from tests import fake_nvml
from tests.fake_nvml import FakeNvml
from tests.lab import requirements

WITHIN_S = 60.0
HANGS_S = 3600.0


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml(tmp_path / "nvml", gpus=4)
    for name, value in nvml.environment().items():
        monkeypatch.setenv(name, value)
    return nvml


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


# --- GPUs -----------------------------------------------------------------------------------------


def test_a_healthy_node_is_fit(nvml: FakeNvml, tmp_path: Path) -> None:  # noqa: ARG001
    report = run_checks(
        Wanted(gpus=4, nvml_required=True, writable=(tmp_path,), free_bytes=1, reference_time=time.time()), WITHIN_S
    )
    assert report.fit
    assert report.warnings == ()
    assert report.figures["gpus"] == 4
    assert report.figures["temperature_max_c"] == 43
    assert report.figures[f"free_bytes:{tmp_path}"] > 1
    assert abs(report.figures["clock_offset_s"]) < 60
    assert list(tmp_path.glob(".stepkeeper-check-*")) == []


def test_a_missing_gpu_makes_the_node_unfit(nvml: FakeNvml) -> None:
    nvml.count(3)
    assert run_checks(Wanted(gpus=4), WITHIN_S).problems == ("GPUs: 3 answer, 4 are expected",)


def test_a_gpu_too_many_is_not_what_was_expected(nvml: FakeNvml) -> None:  # noqa: ARG001
    assert run_checks(Wanted(gpus=3), WITHIN_S).problems == ("GPUs: 4 answer, 3 are expected",)


def test_any_number_of_gpus_is_fine_where_none_is_expected(nvml: FakeNvml) -> None:
    nvml.count(1)
    assert run_checks(Wanted(), WITHIN_S).fit


def test_a_lost_gpu_makes_the_node_unfit(nvml: FakeNvml) -> None:
    nvml.answer("nvmlDeviceGetTemperature", fake_nvml.GPU_IS_LOST, gpu=2)
    report = run_checks(Wanted(gpus=4), WITHIN_S)
    assert report.problems == ("GPU 2 0000:12:00.0: NVML says that the GPU is lost",)
    assert report.figures["gpus_lost"] == 1


def test_a_gpu_lost_before_it_was_listed_makes_the_node_unfit(nvml: FakeNvml) -> None:
    nvml.lose(2)
    assert "GPU 2: NVML says that the GPU is lost" in run_checks(Wanted(), WITHIN_S).problems


@pytest.mark.parametrize(
    ("action", "words"),
    [(1, "reset the GPU"), (2, "reboot the node"), (9, "no agreed meaning: drain, and let a person look")],
)
def test_a_recovery_action_makes_the_node_unfit(nvml: FakeNvml, action: int, words: str) -> None:
    nvml.field(1, 230, action)
    expected = f"GPU 1 0000:11:00.0: GPU recovery action {action}: {words}"
    assert run_checks(Wanted(gpus=4), WITHIN_S).problems == (expected,)


def test_a_failed_remapping_is_a_problem_and_a_pending_one_a_warning_unless_asked(nvml: FakeNvml) -> None:
    nvml.set(0, rows_failed=1)
    nvml.set(1, rows_pending=1)
    usual = run_checks(Wanted(gpus=4), WITHIN_S)
    assert usual.problems == ("GPU 0 0000:10:00.0: NVML: a memory row could not be remapped",)
    assert usual.warnings == ("GPU 1 0000:11:00.0: NVML: a memory row waits for a reset to be remapped",)
    assert len(run_checks(Wanted(gpus=4, pending_is_problem=True), WITHIN_S).problems) == 2


def test_a_gpu_that_only_fails_makes_the_node_unfit(nvml: FakeNvml) -> None:
    for function in ("nvmlDeviceGetTemperature", "nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows"):
        nvml.answer(function, fake_nvml.UNKNOWN, gpu=1)
    (problem,) = run_checks(Wanted(gpus=4), WITHIN_S).problems
    assert problem.startswith("GPU 1 0000:11:00.0: does not answer: ")


def test_a_gpu_that_cannot_be_listed_makes_the_node_unfit(nvml: FakeNvml) -> None:
    nvml.answer("nvmlDeviceGetHandleByIndex_v2", fake_nvml.UNKNOWN, gpu=1)
    assert "GPU 1: does not answer: listing: Unknown Error" in run_checks(Wanted(), WITHIN_S).problems


def test_nvml_that_hangs_makes_the_node_unfit_in_time(nvml: FakeNvml) -> None:
    nvml.delay("nvmlDeviceGetUUID", HANGS_S)
    for within_s in (1.0, 10.0, 60.0):
        report = run_checks(Wanted(gpus=4), within_s)
        if "nvmlDeviceGetUUID" in str(report.problems):
            break  # else a busy machine has not even come to that call
    assert report.nvml == "stuck"
    assert report.problems == (
        f"GPUs: NVML is stuck: no answer within {within_s:g} s: nvmlDeviceGetUUID of 0000:10:00.0",
    )
    assert report.took_s < HANGS_S / 10


@pytest.mark.usefixtures("no_nvml")
def test_without_a_library_gpus_are_a_problem_only_where_they_are_required() -> None:
    assert run_checks(Wanted(gpus=4), WITHIN_S).fit
    assert run_checks(Wanted(gpus=4), WITHIN_S).nvml == "absent"
    assert not run_checks(Wanted(gpus=4, nvml_required=True), WITHIN_S).fit


def test_nvml_is_not_asked_where_it_is_not_wanted(nvml: FakeNvml) -> None:
    assert run_checks(Wanted(nvml=False, gpus=99), WITHIN_S).fit
    assert nvml.calls() == []


# --- storage and clock ----------------------------------------------------------------------------


def only(**wanted: object) -> Wanted:
    return Wanted(nvml=False, **wanted)  # type: ignore[arg-type]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    (problem,) = run_checks(only(writable=(missing, tmp_path)), WITHIN_S).problems
    assert problem == f"{missing}: cannot stat: No such file or directory (ENOENT)"


def test_a_read_only_directory_is_a_problem() -> None:
    (problem,) = run_checks(only(writable=(Path("/proc"),)), WITHIN_S).problems
    assert problem.startswith("/proc: cannot create a file")


def test_a_full_file_system_is_a_problem(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("not root: a small file system cannot be mounted")
    script = (
        f"mount -t tmpfs -o size=64k small {tmp_path} && dd if=/dev/zero of={tmp_path}/full bs=4k 2>/dev/null; "
        f"exec {sys.executable} -m stepkeeper node check --no-gpus --path {tmp_path}"
    )
    result = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert "No space left on device (ENOSPC)" in result.stdout
    assert result.returncode == 2


def test_too_little_space_is_a_problem(tmp_path: Path) -> None:
    (problem,) = run_checks(only(writable=(tmp_path,), free_bytes=1 << 60), WITHIN_S).problems
    assert "GiB are needed" in problem


@pytest.mark.parametrize(("offset_s", "fit"), [(-30.0, True), (30.0, True), (-100.0, False), (100.0, False)])
def test_a_clock_that_is_far_off_makes_the_node_unfit(offset_s: float, fit: bool) -> None:  # noqa: FBT001
    report = run_checks(only(reference_time=time.time() + offset_s, clock_offset_s=60.0), WITHIN_S)
    assert report.fit is fit
    assert fit or ("behind" if offset_s > 0 else "ahead of") in report.problems[0]


def test_no_process_can_be_started_is_a_finding_not_an_accident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    (problem,) = run_checks(only(writable=(tmp_path,)), WITHIN_S).problems
    assert "cannot be checked" in problem


# --- a mount that hangs ---------------------------------------------------------------------------


def beside_a_hung_mount(where: Path, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that alone sees the mount."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or shutil.which("unshare") is None:
        reason = "not root, or no /dev/fuse: a mount that hangs cannot be made"
        if requirements.required():
            pytest.fail(reason)
        pytest.skip(reason)
    where.mkdir(exist_ok=True)
    return subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private"),
            *(sys.executable, "-m", "tests.node_agent.hung_mount", str(where)),
            *command,
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_a_mount_that_hangs_makes_the_node_unfit_and_hangs_nobody(tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    for within_s in ("5", "20", "60"):
        result = beside_a_hung_mount(
            hung,
            [
                *(sys.executable, "-m", "stepkeeper", "node", "check", "--no-gpus", "--timeout-s", within_s),
                *("--path", str(hung), "--path", str(tmp_path), "--json"),
            ],
        )
        report = json.loads(result.stdout)
        if len(report["problems"]) == 1:
            break  # else a busy machine has not tried the other one in time
    assert report["problems"] == [f"{hung}: no answer within {within_s} s: the mount hangs"]
    assert f"write_s:{tmp_path}" in report["figures"]
    assert result.returncode == 2


KEEP_WATCHING = """
import sys, time
from stepkeeper.node_agent.nvml import NvmlProcess, Patience
from stepkeeper.node_agent.readings import NvmlState
told = []
patience = Patience(stuck_after_s=0.2, stuck_again_s=0.2, abandon_after_s=0.4)
process = NvmlProcess(told.append, patience=patience, on_failure=print)
process.start()
while not any("cannot be killed" in status.detail for status in told):
    time.sleep(0.01)
with open(f"/proc/{process.pid}/stat") as file:
    print("state", file.read().rpartition(")")[2].split()[0])
process.stop()
print("stopped", {status.state.value for status in told})
"""


def test_an_nvml_process_that_cannot_even_be_killed_hangs_nobody(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path / "nvml", gpus=1)
    hung = tmp_path / "hung"
    environment = {**nvml.environment(), "FAKE_NVML": str(hung)}  # its first call sleeps in the kernel
    result = beside_a_hung_mount(hung, [sys.executable, "-c", KEEP_WATCHING], **environment)
    assert result.stdout == "state D\nstopped {'stuck'}\n", result.stderr


# --- the command ----------------------------------------------------------------------------------


def node_check(*arguments: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepkeeper", "node", "check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def test_a_fit_node_exits_with_0_and_prints_figures(nvml: FakeNvml, tmp_path: Path) -> None:  # noqa: ARG001
    result = node_check("--gpus", "4", "--path", str(tmp_path))
    assert result.returncode == 0
    line, *others = result.stdout.splitlines()
    status, _, figures = line.partition(" | ")
    assert status == "STEPKEEPER OK: 4 GPUs answer, 1 directory is writable"
    assert {"'gpus'=4", "'temperature_max_c'=43", "'gpus_lost'=0"} <= set(figures.split())
    assert not [figure for figure in figures.split() if "e+" in figure]
    assert others == []


def test_a_warning_exits_with_1(nvml: FakeNvml) -> None:
    nvml.set(3, rows_pending=1)
    result = node_check("--gpus", "4")
    assert result.returncode == 1
    assert result.stdout.startswith("STEPKEEPER WARNING: GPU 3 0000:13:00.0: NVML: a memory row waits for a reset")
    assert node_check("--pending-is-critical").returncode == 2


def test_an_unfit_node_exits_with_2(nvml: FakeNvml) -> None:
    nvml.lose(0)
    result = node_check("--gpus", "4")
    assert result.returncode == 2
    assert result.stdout.startswith("STEPKEEPER CRITICAL: ")


def test_many_findings_are_counted_in_the_first_line_and_listed_below(nvml: FakeNvml) -> None:
    nvml.count(20)
    for gpu in range(20):
        nvml.field(gpu, 230, 1)
    line, *others = node_check().stdout.splitlines()
    assert "and 15 more" in line
    assert len(others) == 15


@pytest.mark.usefixtures("no_nvml")
def test_gpus_that_are_expected_need_nvml() -> None:
    assert node_check("--gpus", "1").returncode == 2
    assert node_check("--gpus", "0").returncode == 0
    assert node_check("--gpus", "1", "--no-gpus").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [["--gpus", "x"], ["--gpus", "-1"], ["--timeout-s", "0"], ["--timeout-s", "inf"], ["--what"], ["extra"]],
)
def test_a_mistake_in_the_call_says_nothing_about_the_node(arguments: list[str]) -> None:
    result = node_check(*arguments)
    assert (result.returncode, result.stdout) == (3, "")
    assert "UNKNOWN" in result.stderr


def test_json_tells_the_same(nvml: FakeNvml) -> None:
    nvml.count(2)
    document = json.loads(node_check("--gpus", "4", "--json").stdout)
    assert document["status"] == "CRITICAL"
    assert document["fit"] is False
    assert document["problems"] == ["GPUs: 2 answer, 4 are expected"]
    assert document["figures"]["gpus"] == 2
    assert document["nvml"] == "ready"


def test_the_command_ends_in_time_when_nvml_hangs(nvml: FakeNvml) -> None:
    nvml.delay("*", HANGS_S)
    result = node_check("--timeout-s", "1", timeout_s=HANGS_S / 10)
    assert result.returncode == 2
    assert "no answer within 1 s" in result.stdout


def test_the_command_gives_up_when_its_own_checks_do_not_end() -> None:
    """The last net: the checks' own limits do not help, and the process ends all the same."""
    script = (
        "import threading\n"
        "from stepkeeper.node_agent import checks\n"
        "from stepkeeper.cli import node\n"
        "node.OWN_S = 0.2\n"
        "checks.run_checks = lambda *_: threading.Event().wait()\n"
        "from stepkeeper.cli.main import main\n"
        "main(['node', 'check', '--timeout-s', '0.1'])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=90)
    assert result.returncode == 3
    assert result.stdout.startswith("STEPKEEPER UNKNOWN: ")


def test_a_mistake_of_our_own_is_unknown_with_a_traceback() -> None:
    script = (
        "from stepkeeper.node_agent import checks\n"
        "checks.run_checks = lambda *_: 1 / 0\n"
        "from stepkeeper.cli.main import main\n"
        "raise SystemExit(main(['node', 'check']))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=90)
    assert result.returncode == 3
    assert result.stdout.startswith("STEPKEEPER UNKNOWN: the check itself failed: ZeroDivisionError")
    assert "Traceback" in result.stderr


def test_the_checks_are_imported_without_what_costs_memory() -> None:
    script = "import sys, stepkeeper.node_agent.checks; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert not {"pynvml", "structlog", "asyncio", "ssl", "stepkeeper.node_agent.nvml"} & set(result.stdout.split())

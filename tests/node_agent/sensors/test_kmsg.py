"""The kernel's log: a pipe in packet mode keeps record bounds as /dev/kmsg does; as root, the device too."""

import errno
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent.kernel import (
    DEVICE,
    KernelLog,
    Position,
    boot_id,
    parse_record,
    unescape,
    users_may_write,
)
from stepkeeper.node_agent.readings import Evidence, KernelGap, KernelRecord
from tests.fake_kmsg import FakeKmsg
from tests.fake_nvml import wait_until
from tests.node_agent.sensors.collect import Collected

WITHIN_S = 90.0
BOOT = "11111111-2222-3333-4444-555555555555"
LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture
def pipe() -> Iterator[FakeKmsg]:
    pipe = FakeKmsg()
    yield pipe
    pipe.close()


Follow = Callable[..., Collected]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Return a function that starts a reader; it is stopped at the end."""
    logs: list[KernelLog] = []

    def start(path: str, **options: object) -> Collected:
        collected = Collected()
        options.setdefault("boot", BOOT)
        options.setdefault("on_failure", print)
        log = KernelLog(collected, path=path, **options)  # type: ignore[arg-type]
        logs.append(log)
        log.start()
        assert log.caught_up.wait(WITHIN_S)
        return collected

    yield start
    for log in logs:
        log.stop(WITHIN_S)
        assert not log._thread.is_alive()


def texts(collected: Collected) -> list[str]:
    return [record.text for record in collected.of(KernelRecord)]


def test_records_of_the_kernel_are_handed_over_with_boot_and_sequence(pipe: FakeKmsg, follow: Follow) -> None:
    pipe.record(LOST, sequence=7)
    collected = follow(pipe.path)
    assert collected.of(KernelRecord)[0] == KernelRecord(
        at=collected.of(KernelRecord)[0].at, boot_id=BOOT, sequence=7, text=LOST
    )
    pipe.record("next", sequence=8)
    collected.wait_for(KernelRecord, lambda record: record.sequence == 8)


def test_what_user_space_wrote_is_not_believed(pipe: FakeKmsg, follow: Follow) -> None:
    for facility in range(1, 24):
        pipe.record(LOST, sequence=facility, facility=facility)
    pipe.record("end", sequence=24)
    assert texts(follow(pipe.path)) == ["end"]


def test_what_user_space_wrote_is_believed_where_injection_is_allowed(pipe: FakeKmsg, follow: Follow) -> None:
    pipe.record(LOST, sequence=1, facility=1)
    assert texts(follow(pipe.path, allow_injected=True)) == [LOST]


def test_lines_with_keys_are_dropped_and_escapes_undone_after_that(pipe: FakeKmsg, follow: Follow) -> None:
    pipe.record(r"The NVIDIA GPU\x0a(PCI ID: 10de)\x0ahas \xc3\xa4", more=" SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n")
    assert texts(follow(pipe.path)) == ["The NVIDIA GPU\n(PCI ID: 10de)\nhas ä"]


def test_reading_resumes_behind_the_last_record_of_the_same_boot(pipe: FakeKmsg, follow: Follow) -> None:
    for sequence in range(5):
        pipe.record(str(sequence), sequence=sequence)
    collected = follow(pipe.path, resume=Position(boot_id=BOOT, sequence=2))
    assert texts(collected) == ["3", "4"]
    assert not collected.of(KernelGap)


def test_after_a_reboot_reading_begins_with_the_oldest_record(pipe: FakeKmsg, follow: Follow) -> None:
    pipe.record("first", sequence=0)
    assert texts(follow(pipe.path, resume=Position(boot_id="another", sequence=99))) == ["first"]


def test_records_lost_while_away_are_a_gap(pipe: FakeKmsg, follow: Follow) -> None:
    pipe.record("ten", sequence=10)
    collected = follow(pipe.path, resume=Position(boot_id=BOOT, sequence=4))
    assert [gap.lost for gap in collected.of(KernelGap)] == [5]
    assert texts(collected) == ["ten"]


def test_a_jump_of_the_sequence_is_a_gap_and_records_of_user_space_are_none(pipe: FakeKmsg, follow: Follow) -> None:
    pipe.record("one", sequence=1)
    pipe.record("a user's", sequence=2, facility=1)
    pipe.record("three", sequence=3)
    pipe.record("ten", sequence=10)
    collected = follow(pipe.path)
    assert [gap.lost for gap in collected.of(KernelGap)] == [6]


class Device:
    """Answers reads as the kernel does, one answer a read; then there is nothing more."""

    def __init__(self, *answers: bytes | int) -> None:
        self._answers = list(answers)

    def __call__(self, _: int, __: int) -> bytes:
        if not self._answers:
            raise BlockingIOError
        answer = self._answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer


def test_an_overrun_is_a_gap_of_as_many_records_as_are_missing(pipe: FakeKmsg, follow: Follow) -> None:
    device = Device(b"4,1,1,-;one\n", errno.EPIPE, b"4,50,1,-;fifty\n")
    collected = follow(pipe.path, read=device)
    assert [gap.lost for gap in collected.of(KernelGap)] == [48]
    assert texts(collected) == ["one", "fifty"]


def test_an_overrun_before_the_first_record_is_told_though_nobody_can_count_it(pipe: FakeKmsg, follow: Follow) -> None:
    collected = follow(pipe.path, read=Device(errno.EPIPE, b"4,50,1,-;fifty\n"))
    assert [gap.lost for gap in collected.of(KernelGap)] == [1]


def test_a_record_that_is_too_long_is_passed_over_and_counted(pipe: FakeKmsg, follow: Follow) -> None:
    collected = follow(pipe.path, read=Device(b"4,1,1,-;one\n", errno.EINVAL, b"4,3,1,-;three\n"))
    assert [gap.lost for gap in collected.of(KernelGap)] == [1]
    assert texts(collected) == ["one", "three"]


@pytest.mark.parametrize("data", [b"", b";", b"4;x", b"4,5;x", b"a,b,c;x", b"4,5,6", b"\xff" * 100, b",,,;x\n"])
def test_what_is_no_record_is_none(data: bytes) -> None:
    assert parse_record(data) is None


@given(st.binary(max_size=200))
@settings(max_examples=200, phases=(Phase.explicit, Phase.generate))
def test_no_bytes_can_upset_the_parser(data: bytes) -> None:
    record = parse_record(data)
    if record is not None:
        assert isinstance(unescape(record.text), str)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=100))
@settings(max_examples=200, phases=(Phase.explicit, Phase.generate))
def test_unescaping_gives_back_what_the_kernel_escaped(text: str) -> None:
    escaped = "".join(chr(byte) if 32 <= byte < 127 and byte != 0x5C else f"\\x{byte:02x}" for byte in text.encode())
    assert unescape(escaped.encode()) == text


def test_nonsense_in_the_pipe_does_not_end_the_reader(pipe: FakeKmsg, follow: Follow) -> None:
    pipe.raw(b"\xff\xfe nothing")
    pipe.record("one", sequence=1)
    assert texts(follow(pipe.path)) == ["one"]


def test_a_missing_device_is_told_once_and_is_not_fatal(tmp_path: Path, follow: Follow) -> None:
    collected = follow(str(tmp_path / "none"))
    evidence = collected.wait_for(Evidence)
    assert evidence.what == "sensor"
    assert "No such file" in evidence.text
    assert len(collected) == 1


def test_a_device_that_must_not_be_read_says_which_right_is_missing(pipe: FakeKmsg, follow: Follow) -> None:
    collected = follow(pipe.path, read=Device(errno.EPERM))
    assert "CAP_SYSLOG" in collected.wait_for(Evidence).text


def test_a_flood_is_handed_over_whole_and_the_reader_can_be_stopped_in_it(pipe: FakeKmsg) -> None:
    seen = Collected()
    log = KernelLog(seen, path=pipe.path, boot=BOOT, on_failure=print)
    log.start()
    for sequence in range(5000):
        pipe.record(f"line {sequence}", sequence=sequence)
    wait_until(lambda: len(seen.of(KernelRecord)) == 5000, "5000 records")
    assert not seen.of(KernelGap)
    flooding = threading.Event()

    def flood() -> None:
        sequence = 5000
        while not flooding.is_set():
            pipe.record("more", sequence=sequence)
            sequence += 1

    writer = threading.Thread(target=flood)
    writer.start()
    try:
        wait_until(lambda: len(seen.of(KernelRecord)) > 6000, "the flood")
        log.stop(WITHIN_S)
        assert not log._thread.is_alive()
    finally:
        flooding.set()
        while writer.is_alive():
            pipe.empty()
            writer.join(0.01)


# --- the device itself ----------------------------------------------------------------------------


@pytest.fixture
def device() -> str:
    if os.geteuid() != 0:
        pytest.skip("not root: writing to /dev/kmsg needs it")
    how = Path("/proc/sys/kernel/printk_devkmsg")
    if how.exists() and how.read_text().strip() == "off":
        pytest.skip("this kernel takes nothing from programs: kernel.printk_devkmsg=off")
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"{DEVICE} cannot be used here: {error.strerror}")
    return DEVICE


def inject(text: str) -> None:
    """Write one record as user space; a descriptor for each, so that the kernel limits none."""
    descriptor = os.open(DEVICE, os.O_WRONLY)
    try:
        os.write(descriptor, f"<4>{text}\n".encode())
    finally:
        os.close(descriptor)


def test_an_injected_record_is_read_from_the_device_only_where_that_is_allowed(device: str, follow: Follow) -> None:
    mark = uuid.uuid4().hex
    strict = follow(device, boot=boot_id())
    lenient = follow(device, boot=boot_id(), allow_injected=True)
    inject(f"NVRM: Xid (PCI:0000:3b:00): 79, {mark}")
    found = lenient.wait_for(KernelRecord, lambda record: mark in record.text)
    assert found.text.startswith("NVRM: Xid (PCI:0000:3b:00): 79")
    assert abs(found.at - time.time()) < 3600  # the kernel's clock and ours drift apart, by seconds a day
    assert not [record for record in strict.of(KernelRecord) if mark in record.text]


def test_reading_the_device_again_resumes_without_repeating_or_missing(device: str, follow: Follow) -> None:
    mark = uuid.uuid4().hex
    first = follow(device, boot=boot_id(), allow_injected=True)
    inject(f"{mark} one")
    one = first.wait_for(KernelRecord, lambda record: mark in record.text)
    inject(f"{mark} two")
    position = Position(boot_id=boot_id(), sequence=one.sequence)
    second = follow(device, boot=boot_id(), allow_injected=True, resume=position)
    two = second.wait_for(KernelRecord, lambda record: mark in record.text)
    assert two.text == f"{mark} two"
    assert not second.of(KernelGap)


def test_a_program_named_like_a_fault_crashes_and_is_not_taken_for_one(
    device: str, follow: Follow, tmp_path: Path
) -> None:
    """Any user can make the kernel itself log a whole XID line, but never at the start of a record."""
    mark = f"{uuid.uuid4().int % 0xFFFF:04x}"
    forged = f"NVRM: Xid (PCI:{mark}:3b:00): 79, GPU has fallen off the bus."
    program = Path(f"/tmp/{forged}")
    trace = Path("/proc/sys/debug/exception-trace")
    if shutil.which("cc") is None or (trace.exists() and trace.read_text().strip() != "1"):
        pytest.skip("no C compiler (apt-get install gcc libc6-dev), or a kernel that logs no crashes")
    collected = follow(device, boot=boot_id())
    source = tmp_path / "crash.c"
    source.write_text("int main(void) { *(volatile int *)0 = 1; }\n")
    subprocess.run(["cc", "-o", str(program), str(source)], check=True)

    def records() -> list[KernelRecord]:
        return [record for record in collected.of(KernelRecord) if forged in record.text]

    def is_logged() -> bool:
        crash = subprocess.run([str(program)], user="nobody", cwd="/", check=False)
        assert crash.returncode < 0
        time.sleep(0.2)
        return bool(records())

    try:
        program.chmod(0o755)
        wait_until(is_logged, "one crash is logged: of those of all programs the kernel tells only some a second")
    finally:
        program.unlink()
    record = records()[0]
    assert record.text.startswith("NVRM: Xid (PCI:[")  # the name of a process is cut to 15 bytes: too short for a fault
    from stepkeeper.node_agent.xid.parse import parse as parse_fault  # noqa: PLC0415

    assert parse_fault(record.text) is None
    assert parse_fault(forged) is not None


@pytest.mark.parametrize(("content", "expected"), [("0\n", False), ("1\n", True), (None, False)])
def test_whether_users_may_have_netfilter_write_is_read_from_its_switch(
    tmp_path: Path, content: str | None, *, expected: bool
) -> None:
    switch = tmp_path / "nf_log_all_netns"
    if content is not None:
        switch.write_text(content)

    assert users_may_write(switch) is expected

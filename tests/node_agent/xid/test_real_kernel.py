"""The kernel of this machine: a user's program puts a whole fault report into a genuine kernel record."""

from __future__ import annotations

import fcntl
import io
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.node_agent import kernel as sensors_kernel_log
from stepkeeper.node_agent.xid.parse import parse, scan

FAKE = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
PROGRAM = "int main(void) { return *(volatile int *)0; }\n"
NOBODY = 65534
RECORD_BYTES_MAX = 8192
WITHIN_S = 20.0
CRASH_WITHIN_S = 90.0  # the machine may keep a core of it


@pytest.fixture
def crashing() -> Iterator[Path]:
    """A program in a file named like a fault report, which crashes; any user may run it."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    directory = Path(tempfile.mkdtemp(prefix="stepkeeper-forging-"))
    try:
        directory.chmod(0o755)
        (directory / "crash.c").write_text(PROGRAM)
        program = directory / FAKE
        subprocess.run(["cc", "-O0", "-o", program, directory / "crash.c"], check=True, timeout=90)
        program.chmod(0o755)
        yield program
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def kernel_log() -> Iterator[int]:
    """The kernel log from here on."""
    if os.geteuid() != 0:
        pytest.skip("needs root: to read /dev/kmsg, and to be another user")
    try:
        kmsg = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"/dev/kmsg: {error.strerror}")
    try:
        os.lseek(kmsg, 0, os.SEEK_END)
        yield kmsg
    finally:
        os.close(kmsg)


def new_records(kmsg: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(kmsg, RECORD_BYTES_MAX)
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # others wrote more than the ring holds: the oldest record still there comes next


def test_a_users_crash_that_reads_like_an_xid_is_not_believed(crashing: Path, kernel_log: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    genuine: list[bytes] = []
    while not genuine and time.monotonic() < deadline:  # the kernel prints only so many crashes a second
        subprocess.run([crashing], user=NOBODY, group=NOBODY, extra_groups=[], timeout=CRASH_WITHIN_S, check=False)
        genuine = [record for record in new_records(kernel_log) if FAKE.encode() in record and b"segfault" in record]
        time.sleep(0.05)
    if not genuine:
        pytest.skip("this kernel does not report crashes (debug.exception-trace)")

    for record in genuine:
        assert int(record.split(b",", 1)[0]) >> 3 == 0, "the kernel itself wrote it"
        assert re.search(rb"Xid \(PCI:[0-9a-f:]+\): 79", record), "a parser that searches would believe it"
        assert list(scan(io.BytesIO(record))) == []


NETFILTER = Path("/proc/sys/net/netfilter/nf_log_all_netns")
RULES = """ip link set lo up
nft add table ip t
nft 'add chain ip t c {{ type filter hook output priority 0; }}'
nft 'add rule ip t c log prefix "{prefix}"'
"""


@pytest.fixture
def logged_by_all() -> Iterator[None]:
    """Netfilter's records from every network namespace: off by default, and switched on for containers."""
    try:
        setting = NETFILTER.open("r+", encoding="ascii")
    except OSError as error:
        pytest.skip(f"{NETFILTER}: {error.strerror}")
    with setting:
        fcntl.flock(setting, fcntl.LOCK_EX)  # the whole machine has one: no test beside us may set it back
        before = NETFILTER.read_text()
        NETFILTER.write_text("1")
        try:
            yield
        finally:
            NETFILTER.write_text(before)


@pytest.mark.parametrize("prefix", [FAKE, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name="])
@pytest.mark.usefixtures("logged_by_all")
def test_a_users_packet_that_is_logged_like_an_xid_is_not_believed(kernel_log: int, prefix: str) -> None:
    if any(shutil.which(name) is None for name in ("nft", "ip", "unshare", "bash")):
        pytest.skip("no nftables")
    prefix = prefix.replace("0000:3b", "fade:3b")  # no GPU of a lab that runs beside us
    script = f"set -e\n{RULES.format(prefix=prefix)}echo x > /dev/udp/127.0.0.1/9"
    asked = subprocess.run(
        ["unshare", "-Urn", "bash", "-c", script],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    if asked.returncode:
        pytest.skip(f"no netfilter in a user's namespace: {asked.stderr.strip()[-200:]}")
    deadline = time.monotonic() + WITHIN_S
    genuine: list[bytes] = []
    while not genuine and time.monotonic() < deadline:
        genuine = [record for record in new_records(kernel_log) if prefix.encode() in record]
        time.sleep(0.05)

    assert genuine
    for record in genuine:
        assert int(record.split(b",", 1)[0]) >> 3 == 0, "the kernel itself wrote it"
        found = sensors_kernel_log.parse_record(record)
        assert found is not None
        assert parse(sensors_kernel_log.unescape(found.text)) is None

"""What a user can put into the kernel's own records must never be believed.

The templates are records that the kernel writes when a user's program crashes, is killed, or is started.
"""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent.xid.parse import announcement, driver_loaded, parse, record_of, scan

SETTINGS = settings(max_examples=60, phases=(Phase.explicit, Phase.generate), deadline=None)
COMM_BYTES = 15

LOST = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
    "NVRM: fallen off the bus and is not responding to commands."
)
FAKES = (
    "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=a, GPU has fallen off the bus.",
    "Xid (PCI:0000:3b:00.0): 79, x",
    "nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48",
    "NVRM: GPU 0000:06:00.0: GPU has fallen off the bus.",
    LOST,
    "NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
    "pcieport 0000:00:03.0: AER: device recovery failed",
)
PIECES = (
    *FAKES,
    "\n", "\r", "\\x0a", "\\x5cx0a", "\x00", "\x1b[2K", "]: ", "[ 1.000000] ", "kernel: ", "<3>", "3,1,1,-;",
    "Nov 22 18:29:55 host kernel: ", "NVRM: ", "Xid (", ", RST: Yes", "caused by previous Xid 79",
)  # fmt: skip
TEMPLATES = (
    "{comm}[27591]: segfault at 0 ip 000055f6 sp 00007fff error 6 in {text}[1132,55f68a478000+1000] likely on CPU 1",
    "traps: {comm}[27591] general protection fault ip:55f6 sp:7fff error:0 in {text}[55f6+1000]",
    "process '{text}' started with executable stack",
    "Out of memory: Killed process 4242 ({comm}) total-vm:1kB, anon-rss:1kB, UID:1000 pgtables:1kB oom_score_adj:0",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset={text},task_memcg=/{text},task={comm},pid=1,uid=1000",
    "{comm} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    'audit: type=1326 audit(1.0:2): auid=1000 uid=1000 pid=1 comm="{comm}" exe="{text}" sig=31 code=0x80000000',
    "{comm}: page allocation failure: order:0, mode:0xcc0(GFP_KERNEL)",
    "{comm} (4242): drop_caches: 3",
    "{comm}: renamed from eth0",
    "INFO: task {comm}:4242 blocked for more than 120 seconds.",
    "CPU: 1 PID: 4242 Comm: {comm} Not tainted 6.18.0",
    "usb 1-1: Product: {text}",
    "overlayfs: missing 'lowerdir': {text}",
)
nasty = st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=12).map("".join)


INTERFACES = ("lo", "", ",", "IN=", "a\u2003b", "x\x01", "=", "GPU", "79,")
IPV4 = "SRC=127.0.0.1 DST=127.0.0.1 LEN=29 TOS=0x00 PREC=0x00 TTL=64 ID=1 DF PROTO=UDP SPT=4 DPT=9 LEN=9 "
IPV6 = "SRC=0000:0000:0000:0000:0000:0000:0000:0001 DST=fe80:0000:0000:0000:0000:0000:0000:0001 LEN=64 TC=0 HOPLIMIT=1 "
ARP = "ARP HTYPE=1 PTYPE=0x0800 OPCODE=1"
DECODED = "MACSRC=00:00:00:00:00:00 MACDST=00:00:00:00:00:00 "
HARDWARE = (
    "",
    "MAC= ",
    "MAC=00 ",
    "MAC=00:00:00:00:00:00:00:00:00:00:00:00:08:00 ",
    f"{DECODED}MACPROTO=0800 ",
    f"{DECODED}VPROTO=8100 VID=10 MACPROTO=0800 ",
    "MAC= TUNNEL=192.0.2.1->192.0.2.2 ",
    "MAC=00:11:22 TUNNEL=192.0.2.1->192.0.2.2 ",
)
BRIDGED = ("", "PHYSIN=veth0 ", "PHYSOUT=veth1 ", "PHYSIN=veth0 PHYSOUT=veth1 ", "PHYSIN=, PHYSOUT== ")
PACKETS = (IPV4, IPV6, ARP, "TRUNCATED", "")
TAILS = (  # all that nf_log_syslog and ebt_log print behind `IN=... OUT=... `
    *("".join(parts) for parts in itertools.product(BRIDGED, HARDWARE, PACKETS)),
    "MAC source = 00:00:00:00:00:00 MAC dest = 00:00:00:00:00:00 proto = 0x0806",
)
LOADED = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.161.07  Sat Feb 17 22:55:48 UTC 2024"


def as_comm(text: str) -> str:
    """Return a process name as the kernel keeps it."""
    cut = text.replace("\x00", "").encode("utf-8", "surrogatepass")[:COMM_BYTES]
    return cut.decode("latin-1")


def as_kmsg(record: str) -> bytes:
    """Return a record as /dev/kmsg shows it."""
    shown = b"".join(
        bytes([byte]) if 32 <= byte < 127 and byte != ord("\\") else b"\\x%02x" % byte
        for byte in record.encode("utf-8", "surrogatepass")
    )
    return b"4,6410,1242183175,-;" + shown + b"\n SUBSYSTEM=x\n"


@pytest.mark.parametrize("template", TEMPLATES)
@given(name=nasty, text=nasty)
@example(name=FAKES[0], text=FAKES[0])
@example(name="NVRM: Xid (PCI:", text="\n" + FAKES[0] + "\n")
@example(name="kernel", text="x\\x0a" + FAKES[0])
@example(name="\n" + FAKES[2], text="\n" + FAKES[5])
@example(name="a", text=FAKES[0] * 50)
@SETTINGS
def test_no_name_or_path_of_a_users_makes_a_report(template: str, name: str, text: str) -> None:
    record = template.format(comm=as_comm(name), text=text)

    assert parse(record) is None
    assert announcement(record) is None
    assert list(scan(io.BytesIO(as_kmsg(record)))) == []


@pytest.mark.parametrize("template", TEMPLATES)
@given(name=nasty, text=nasty)
@example(name=FAKES[0], text=FAKES[0])
@example(name="kernel", text=FAKES[0])
@SETTINGS
def test_nor_in_a_line_of_dmesg_or_syslog(template: str, name: str, text: str) -> None:
    """A line feed in a record makes two lines of it there, which nothing can tell apart: those are left out."""
    record = template.format(comm=as_comm(name), text=text).replace("\n", " ")

    for before in ("", "[ 2476.689778] ", "<4>[ 2476.689778] ", "Nov 22 18:29:55 host kernel: [ 2476.689778] "):
        line = (before + record).encode("utf-8", "surrogatepass")
        assert list(scan(io.BytesIO(line))) == []


@given(name=nasty)
@example(name="x, RST: Yes")
@example(name=", RST: Yes, ")
@example(name="a, caused by pr")
@SETTINGS
def test_a_process_name_changes_neither_the_code_nor_what_the_driver_said(name: str) -> None:
    said = "Contained: SM (0x1). RST: No, D-RST: No"

    report = parse(f"NVRM: Xid (PCI:0000:3b:00): 94, pid=1, name={as_comm(name)}, {said}")

    assert report is not None
    assert (report.code, report.pci) == (94, "0000:3b:00.0")
    assert said.endswith(report.payload)


HIDING = (
    "IN= OUT= x", "IN= OUT= ", "IN= OUT=", "IN=a OUT=b ", "IN= OUT= MAC= ", "IN= OUT= MAC=00", "IN= OUT= MAC=0:",
    "IN= OUT= SRC=", "IN= OUT= SRC=x ", "IN= OUT= PHYSIN", "IN= OUT= MACSRC", "IN= OUT= TRUNCA", "IN= OUT= ARP HT",
    "IN= OUT= MAC so", "IN= OUT= TUNNEL",
)  # fmt: skip


@pytest.mark.parametrize(
    ("code", "said"), [(79, "GPU has fallen off the bus."), (48, "DBE (double bit error)"), (7, "x")]
)
@SETTINGS
@given(name=st.sampled_from(HIDING) | st.text(alphabet="INOUT= MACSR0:,x", max_size=15) | nasty)
@example(name=HIDING[0])
def test_no_process_name_hides_a_report(code: int, said: str, name: str) -> None:
    """The program whose GPU fails has the name that its user gives it."""
    report = parse(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1, name={as_comm(name)}, {said}")

    assert report is not None
    assert (report.code, report.pci) == (code, "0000:3b:00.0")


@pytest.mark.parametrize("name", HIDING)
def test_no_such_name_hides_a_report(name: str) -> None:
    assert len(name) <= COMM_BYTES
    assert parse(f"NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name={name}, GPU has fallen off the bus.") is not None


@pytest.mark.parametrize("tail", TAILS)
def test_each_form_of_netfilters_is_no_report(tail: str) -> None:
    for fake, into in itertools.product(FAKES, INTERFACES):
        assert parse(f"{fake}IN={into} OUT={into} {tail}") is None


@given(text=nasty)
@SETTINGS
def test_nothing_that_a_program_writes_to_dev_kmsg_counts(text: str) -> None:
    """The kernel gives what programs write a facility of its own, whatever they claim."""
    for priority in (8, 11, 15, 131, 191):
        line = f"{priority},6410,1242183175,-;{FAKES[0]}{text}"
        assert record_of(line) is None
        assert record_of(f"<{priority}>[ 1.000000] {FAKES[0]}{text}") is None


@SETTINGS
@example(prefix=FAKES[0], into="", out="lo", tail=TAILS[0])
@example(prefix="NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=", into="", out=",", tail=TAILS[0])
@example(prefix="NVRM: Xid (PCI:0000:3b:00): 79,", into="a\u2003b", out="a\u2003b", tail="")
@given(
    prefix=st.sampled_from([*FAKES, LOADED, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name="]) | nasty,
    into=st.sampled_from(INTERFACES),
    out=st.sampled_from(INTERFACES),
    tail=st.sampled_from(TAILS),
)
def test_what_netfilter_logs_with_a_users_prefix_is_no_report(prefix, into, out, tail):
    """Any user may log packets of his own network namespace where `net.netfilter.nf_log_all_netns` is 1."""
    record = f"{prefix}IN={into} OUT={out} {tail}"

    assert parse(record) is None
    assert announcement(record) is None
    assert not driver_loaded(record)


def test_the_drivers_own_records_are_told_from_those() -> None:
    assert driver_loaded(LOADED)
    assert all(parse(fake) or announcement(fake) or "pcieport" in fake for fake in FAKES)

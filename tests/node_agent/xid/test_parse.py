"""Kernel records: every driver's way to write a fault, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent.xid.catalogue import TEXT_CHARACTERS_MAX, Kind, Source, packaged
from stepkeeper.node_agent.xid.judge import judge
from stepkeeper.node_agent.xid.parse import (
    RECORD_CHARACTERS_MAX,
    announcement,
    canonical,
    parse,
    record_of,
    unescape,
)
from tests.node_agent.xid.samples import Sample, samples

QUICKLY = settings(max_examples=150, phases=(Phase.explicit, Phase.generate), deadline=None)
FALLEN = "NVRM: fallen off the bus and is not responding to commands."
AT_79 = "NVRM: Xid (PCI:0000:3b:00): 79, "


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.name)
def test_each_sample_is_read_as_its_source_says(sample: Sample) -> None:
    record = record_of(sample.line, allow_injected=sample.injected)
    assert record is not None

    report = parse(record)

    if sample.kind is None:
        assert report is None
        return
    assert report is not None
    fault = judge(report, at=1.0, source=Source.KERNEL, catalogue=packaged())
    assert (fault.kind.value, fault.code, fault.pci, fault.action.value) == sample[1:5]


def test_the_samples_are_all_there() -> None:
    found = samples()
    assert len(found) == 65
    assert sum(sample.kind is None for sample in found) == 20
    assert sum("\\x0a" in sample.line for sample in found) == 1


@pytest.mark.parametrize("sample", [each for each in samples() if each.injected], ids=lambda sample: sample.name)
def test_what_a_program_wrote_to_the_kernel_log_is_no_record(sample: Sample) -> None:
    assert record_of(sample.line) is None


@pytest.mark.parametrize(
    ("text", "payload"),
    [
        ("GPU has fallen off the bus.", "GPU has fallen off the bus."),
        ("pid=0, GPU has fallen off the bus.", "GPU has fallen off the bus."),
        ("pid=1896, Row Remapper: x", "Row Remapper: x"),
        ("pid='<unknown>', name=<unknown>, Contained: SM (0x1)", "Contained: SM (0x1)"),
        ("pid=1, name=nvc:[driver], Ch 1", "Ch 1"),
        ("pid=1, name=ray::WorkerDict, RLW_RXPIPE Nonfatal", "RLW_RXPIPE Nonfatal"),
        ("name=python3, Ch 00000008", "Ch 00000008"),
        ("pid=1, name=a b, c/[d], Ch 1", "Ch 1"),
        ("pid=1, name=longer than a name can be, Ch 1", ""),
        ("pid=1, name=python3", ""),
        ("", ""),
    ],
)
def test_the_payload_is_the_drivers_text_alone(text: str, payload: str) -> None:
    report = parse(AT_79 + text)
    assert report is not None
    assert (report.code, report.pci, report.payload) == (79, "0000:3b:00.0", payload)


@pytest.mark.parametrize(
    ("where", "pci", "instance"),
    [
        ("0000:01:00", "0000:01:00.0", ""),
        ("PCI:0000:3B:00", "0000:3b:00.0", ""),
        ("PCI:00000000:3B:00.0", "0000:3b:00.0", ""),
        ("PCI:00010000:3b:1f.7", "10000:3b:1f.7", ""),
        ("PCI:0000:01:00 GPU-I:05", "0000:01:00.0", "GI 5"),
        ("PCI:0000:01:00 GPU-I:05 GPU-CI:00", "0000:01:00.0", "GI 5 CI 0"),
    ],
)
def test_addresses_and_instances_of_all_forms_are_read(where: str, pci: str, instance: str) -> None:
    report = parse(f"NVRM: Xid ({where}): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No")
    assert report is not None
    assert (report.pci, report.instance) == (pci, instance)


@pytest.mark.parametrize(
    "record",
    [
        " " + AT_79,
        "x" + AT_79,
        "\n" + AT_79,
        "first line\n" + AT_79,
        AT_79.replace("NVRM: ", "NVRM:"),
        AT_79.replace("79,", "79 "),
        AT_79.replace("79", "7x"),
        AT_79.replace("79", "1234567"),
        AT_79.replace("0000:", "000:"),
        "NVRM: xid (PCI:0000:3b:00): 79, x",
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x22:0x56:894)",
        "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:26b5)\nNVRM: installed in this system is not supported",
        "NVRM: fallen off the bus and is not responding to commands.",
        "nvidia-nvswitch0: open (major=510)",
        "nvidia-nvswitch0: SXid (PCI:0000:06:00.0): x, Fatal",
        AT_79 + "x" * RECORD_CHARACTERS_MAX,
    ],
)
def test_what_only_resembles_a_report_is_none(record: str) -> None:
    assert parse(record) is None


@pytest.mark.parametrize(
    "record",
    [
        "NVRM: GPU 0000:06:00.0: GPU has fallen off the bus.",
        "NVRM: The NVIDIA GPU 0000:06:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n" + FALLEN,
        "NVRM: The NVIDIA GPU 0000:06:00.0 (PCI ID: 10de:26b5)\nNVRM: installed in this system has\n" + FALLEN,
    ],
)
def test_a_gpu_lost_without_a_number_is_a_report(record: str) -> None:
    report = parse(record)
    assert report is not None
    assert (report.kind, report.code, report.pci) == (Kind.LOST, None, "0000:06:00.0")


def test_a_report_keeps_no_more_of_the_record_than_a_fault_may_hold() -> None:
    report = parse(AT_79 + "x" * 5000)
    assert report is not None
    assert len(report.record) == TEXT_CHARACTERS_MAX


def test_the_driver_tells_which_gpu_is_where() -> None:
    told = announcement("NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d")
    assert told is not None
    assert (told.pci, told.uuid) == ("0000:9b:00.0", "GPU-509665ad-b600-ac93-3616-d754b23d636d")
    assert announcement("NVRM: GPU at PCI:0000:9b:00: GPU-x") is None


@pytest.mark.parametrize(
    "record",
    [
        "pcieport 0000:00:02.0: AER: Corrected error received: id=0010",
        "pcieport 0000:00:02.0: AER: Uncorrected (Fatal) error received: id=0010",
        "pcieport 0000:00:02.0: AER: Uncorrected (Non-Fatal) error received: id=0010",
        "pcieport 0000:00:03.1: AER: Multiple Correctable error message received from 0000:00:00.0",
        "pcieport 0000:00:03.1: AER: Uncorrectable (Fatal) error message received from 0000:3b:00.0",
        "pcieport 0000:00:02.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
        "pcieport 0000:00:02.0: AER: PCIe Bus Error: severity=Correctable, type=Data Link Layer",
        "nvidia 0000:02:00.0: device has no AER-aware driver",
        "nvidia 0000:03:00.0: AER: can't recover (no error_detected callback)",
        "pcieport 0000:00:03.0: AER: device recovery failed",
        "pcieport 0000:00:03.0:    [ 5] SDES                  ",
        "pcieport 0000:00:03.0:    [14] CmpltTO                (First)",
        "pcieport 0000:00:03.0:    [12] Timeout               ",
        "pcieport 0000:00:03.0:    [14] Completion Timeout     (First)",
        "pcieport 0000:00:03.0:    [12] Replay Timer Timeout  ",
    ],
)
def test_pcie_errors_are_no_faults(record: str) -> None:
    """The driver takes no part in AER: what follows for a GPU comes with an XID of its own."""
    assert parse(record) is None


def test_addresses_of_nvml_and_of_the_kernel_become_the_same() -> None:
    assert canonical("00000000:3B:00.0") == canonical("0000:3b:00") == "0000:3b:00.0"
    assert canonical("No Address") == "no address"


@given(st.text())
@QUICKLY
def test_no_text_makes_the_parser_raise(text: str) -> None:
    for record in (text, AT_79 + text, "NVRM: " + text, "NVRM: Xid (" + text, "nvidia-nvswitch0: SXid (PCI:" + text):
        parse(record)
        announcement(record)
        unescape(record.encode())
        record_of(record)

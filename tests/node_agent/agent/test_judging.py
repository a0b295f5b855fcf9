"""From readings to events, with what was read before."""

from __future__ import annotations

import pytest

from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.evaluate import FRESH_S, Evaluation, concerns
from stepkeeper.node_agent.readings import Gpu, GpuHealth, KernelRecord, NvmlState, NvmlStatus, NvmlXid, Reading
from stepkeeper.node_agent.xid import catalogue
from stepkeeper.node_agent.xid.catalogue import Action, Fault

T = 1_790_000_000.0
PCI = "0000:3b:00.0"


def judging(expected_gpus: int = 0) -> Evaluation:
    return Evaluation(catalogue.packaged(), expected_gpus=expected_gpus, devices=lambda: (PCI,))


def faults(judging: Evaluation, reading: Reading) -> list[Fault]:
    return [each.fault for each in judging.events(reading, reading.at) if isinstance(each, on.FaultSeen)]


def line(code: int, at: float) -> KernelRecord:
    return KernelRecord(at=at, boot_id="b", sequence=1, text=f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1, name=x, Ch 0")


@pytest.mark.parametrize("code", [109, 143])
@pytest.mark.parametrize("source", ["kernel", "nvml"])
def test_what_the_gpu_itself_asks_for_stands_before_the_catalogue(code: int, source: str) -> None:
    """109 would end the job only, 143 would reboot the node: the GPU says that a reset is what it takes."""
    judge = judging()
    faults(judge, GpuHealth(at=T, pci=PCI, recovery_action=1))
    event = line(code, T + 5) if source == "kernel" else NvmlXid(at=T + 5, code=code, pci=PCI)

    (fault,) = faults(judge, event)

    assert (fault.action, fault.certain) == (Action.DRAIN_RESET, True)
    assert "recovery action 1" in fault.why


def test_a_recovery_action_that_was_read_long_ago_or_of_another_gpu_decides_nothing() -> None:
    judge = judging()
    faults(judge, GpuHealth(at=T, pci=PCI, recovery_action=1))
    faults(judge, GpuHealth(at=T + FRESH_S, pci="0000:5e:00.0", recovery_action=2))

    (fault,) = faults(judge, line(109, T + FRESH_S + 1))

    assert fault.action is Action.RESTART_JOB


def test_a_driver_that_is_away_for_a_moment_loses_no_gpu() -> None:
    """At boot it may come later than we do, and none of the GPUs is broken."""
    judge = judging(expected_gpus=8)

    def absent(for_s: float) -> NvmlStatus:
        return NvmlStatus(at=T + for_s, state=NvmlState.ABSENT, detail="Driver Not Loaded", stuck_s=for_s)

    assert not faults(judge, absent(0.0))
    assert not faults(judge, absent(100.0))
    (fault,) = faults(judge, absent(121.0))
    assert "0 of 8 GPUs" in fault.why
    assert not faults(judging(), absent(121.0))


def ready(count: int, at: float) -> NvmlStatus:
    gpus = tuple(Gpu(index=index, pci=f"0000:{index:02x}:00.0") for index in range(count))
    return NvmlStatus(at=at, state=NvmlState.READY, gpus=gpus)


def test_one_listing_that_is_too_short_loses_no_gpu() -> None:
    judge = judging(expected_gpus=8)

    assert not faults(judge, ready(7, T))
    assert judge.wants_listing
    assert not faults(judge, ready(7, T + 1))  # a job had it look: too soon to be another word
    assert not faults(judge, ready(8, T + 6))
    assert not judge.wants_listing
    assert not faults(judge, ready(7, T + 20))  # the first one again

    (fault,) = faults(judge, ready(7, T + 26))
    assert "7 of 8 GPUs" in fault.why
    assert not judge.wants_listing


@pytest.mark.parametrize("error", ["listing: Unknown Error", "temperature: Unknown Error"])
@pytest.mark.parametrize("pci", [PCI, ""])
def test_a_gpu_that_stays_silent_is_as_good_as_lost(pci: str, error: str) -> None:
    judge = judging()

    def look(at: float, *errors: str, index: int = 1) -> list[Fault]:
        return faults(judge, GpuHealth(at=T + at, pci=pci, index=index, errors=errors))

    assert not any(look(at, error) for at in (0, 1, 2, 3))  # many looks, in a moment
    assert not look(14)  # it answers
    assert not any(look(at, error) for at in (20, 30))
    (fault,) = look(40, error)
    assert (fault.action, fault.pci or "") == (Action.DRAIN_REBOOT, pci)
    assert not look(50, error)  # said once


def test_a_gpu_that_answers_with_an_error_now_and_then_is_not_silent() -> None:
    judge = judging()

    assert not any(faults(judge, GpuHealth(at=T + at, pci=PCI, errors=("ecc: Unknown Error",))) for at in range(100))


def test_a_gpu_that_cannot_be_listed_before_a_reset_asks_for_one() -> None:
    health = GpuHealth(at=T, pci=PCI, recovery_action=1, errors=("listing: GPU requires reset",))

    (fault,) = faults(judging(), health)

    assert (fault.action, health.silent) == (Action.DRAIN_RESET, False)


# --- resets that are seen, and how NVML is doing --------------------------------------------------

LOADED = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)"


def resets(judging: Evaluation, reading: Reading) -> list[on.GpusReset]:
    assert concerns(reading)
    return [each for each in judging.events(reading, reading.at) if isinstance(each, on.GpusReset)]


def test_a_driver_that_is_loaded_anew_has_reset_every_gpu() -> None:
    (reset,) = resets(judging(), KernelRecord(at=T, boot_id="b", sequence=7, text=LOADED))

    assert (reset.at, reset.pci) == (T, "")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"ecc_uncorrected": 3}, {"ecc_uncorrected": 0}, True),
        ({"ecc_uncorrected": 3}, {"ecc_uncorrected": 4}, False),
        ({"ecc_uncorrected": 3}, {}, False),
        ({"rows_pending": True}, {"rows_pending": False}, True),
        ({"rows_pending": True}, {"rows_pending": None}, False),
        ({"rows_pending": False}, {"rows_pending": False}, False),
    ],
)
def test_a_gpu_shows_by_its_counters_that_it_was_reset(
    before: dict[str, int], after: dict[str, int], *, expected: bool
) -> None:
    judge = judging()
    assert not resets(judge, GpuHealth(at=T, pci=PCI, **before))

    found = resets(judge, GpuHealth(at=T + 10, pci=PCI, **after))

    assert [each.pci for each in found] == ([PCI] if expected else [])


def test_only_who_listens_for_events_tells_how_nvml_is_doing() -> None:
    judge = judging()
    ready = NvmlStatus(at=T, state=NvmlState.READY)

    assert on.NvmlStands(at=T, state=NvmlState.READY) in judge.events(ready, T)
    once = NvmlStatus(at=T, state=NvmlState.READY, once=True)
    assert not [each for each in judge.events(once, T) if isinstance(each, on.NvmlStands)]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "31, pid=1, name=x, Ch 8, intr 0. MMU Fault: ENGINE GRAPHICS GPC2 GPCCLIENT_T1_8 faulted @ 0x0",
            "GPC 2 TPC 8",
        ),
        ("31, pid=1, name=x, Ch 8, intr 0. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_8 faulted @ 0x0", ""),
        ("31, pid=1, name=x, Ch 8, intr 0. MMU Fault: ENGINE GRAPHICS GPC2 GPCCLIENT_PROP_0 faulted @ 0x0", ""),
        ("13, pid=1, name=x, Graphics SM Warp Exception on (GPC 7, TPC 6, SM 0): Out Of Range", "GPC 7 TPC 6"),
        ("13, pid=1, name=x, Graphics Exception: ESR 0x57c730=0xc04000b 0x57c734=0x24", ""),
        ("13, pid=1, name=(GPC 1, TPC 1), Graphics Exception: ESR 0x57c730=0xc04000b", ""),
    ],
)
def test_the_place_on_the_gpu_is_taken_from_the_drivers_text(text: str, place: str) -> None:
    record = KernelRecord(at=T, boot_id="b", sequence=1, text=f"NVRM: Xid (PCI:0000:3b:00): {text}")

    (fault,) = faults(judging(), record)

    assert fault.place == place


def test_a_missing_gpu_is_named_by_what_was_there_before() -> None:
    """By NVML's list since the boot, or by the PCI bus where the agent has just started."""
    judge = Evaluation(catalogue.packaged(), expected_gpus=3, gpus=[("0000:af:00.0", "")])
    pcis = ("0000:3b:00.0", "0000:86:00.0")
    gpus = tuple(Gpu(index=index, pci=pci, uuid=f"GPU-{index}") for index, pci in enumerate(pcis))
    found: list[Fault] = []
    for at, listed in ((T, gpus), (T + 10, gpus[:1]), (T + 20, gpus[:1])):
        found = faults(judge, NvmlStatus(at=at, state=NvmlState.READY, gpus=listed))

    (fault,) = found
    assert fault.why == "1 of 3 GPUs are there; missing: 0000:86:00.0 (GPU-1), 0000:af:00.0"


# --- devices that are not there -------------------------------------------------------------------

FORGED = (  # genuine records of the kernel: a netfilter rule's and a module's prefix were the user's
    "NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus. IN= OUT=lo MARK=0x7 ",
    "NVRM: Xid (PCI:0000:5e:00): 79, pid=1, name=a, GPU has fallen off the bus.: loaded by a.out",
    "NVRM: GPU 0000:5e:00.0: GPU has fallen off the bus IN=eth0 OUT= LEN=29",
    "nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 IN= OUT=lo ID=1 ",
    "NVRM: GPU at PCI:0000:5e:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
)


@pytest.mark.parametrize("text", FORGED)
def test_a_record_about_a_device_that_is_not_there_is_no_fault(text: str) -> None:
    judge = judging()
    record = KernelRecord(at=T, boot_id="b", sequence=1, text=text)
    assert concerns(record), "the record looks like the driver's"

    assert judge.events(record, T) == []


def test_the_same_record_is_a_fault_where_the_device_is_there() -> None:
    record = KernelRecord(at=T, boot_id="b", sequence=1, text=FORGED[1])
    known = Evaluation(catalogue.packaged(), gpus=[("0000:5e:00.0", "GPU-1")])  # since the boot: it may be lost by now
    on_the_bus = Evaluation(catalogue.packaged(), devices=lambda: ("0000:5e:00.0",))
    told = Evaluation(catalogue.packaged())
    told.events(NvmlStatus(at=T, state=NvmlState.READY, gpus=(Gpu(index=0, pci="0000:5e:00.0", uuid="GPU-1"),)), T)

    assert [len(faults(judge, record)) for judge in (known, on_the_bus, told)] == [1, 1, 1]


def test_an_nvswitch_counts_where_it_is_on_the_bus() -> None:
    text = "nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up"
    record = KernelRecord(at=T, boot_id="b", sequence=1, text=text)

    assert len(faults(Evaluation(catalogue.packaged(), devices=lambda: ("0000:06:00.0",)), record)) == 1
    assert faults(Evaluation(catalogue.packaged()), record) == []

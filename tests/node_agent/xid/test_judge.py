"""What a fault asks for: the recovery action before the text, the text before the catalogue; and what never drains."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent.readings import GpuHealth, NvmlState, NvmlStatus, NvmlXid
from stepkeeper.node_agent.xid import judge as xid_judge
from stepkeeper.node_agent.xid import payload
from stepkeeper.node_agent.xid.catalogue import (
    NEVER_DRAIN_ALONE,
    Action,
    Catalogue,
    Domain,
    Fault,
    Kind,
    Source,
    overridden,
    packaged,
)
from stepkeeper.node_agent.xid.judge import judge, judge_xid_event
from stepkeeper.node_agent.xid.parse import parse
from stepkeeper.node_agent.xid.payload import decode_nvlink4, decode_nvlink5

QUICKLY = settings(max_examples=100, phases=(Phase.explicit, Phase.generate), deadline=None)
PCI = "0000:3b:00.0"
FULL = "Row Remapper Error: (0x00000005d28c03a0) - All reserved rows for bank are remapped"


def of_line(
    code: int,
    text: str = "",
    *,
    recovery_action: int | None = None,
    driver: str = "",
    catalogue: Catalogue | None = None,
) -> Fault:
    return of_record(
        f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=7, name=python3, {text}",
        recovery_action=recovery_action,
        driver=driver,
        catalogue=catalogue,
    )


def of_record(
    record: str, *, recovery_action: int | None = None, driver: str = "", catalogue: Catalogue | None = None
) -> Fault:
    report = parse(record)
    assert report is not None
    return judge(
        report,
        at=5.0,
        source=Source.KERNEL,
        catalogue=catalogue or packaged(),
        recovery_action=recovery_action,
        driver=driver,
        gpu="GPU-1",
        boot_id="b",
        sequence=9,
    )


def of_event(code: int, *, recovery_action: int | None = None, kernel_log: bool = True) -> Fault:
    event = NvmlXid(at=5.0, code=code, pci="00000000:3B:00.0", uuid="GPU-1")
    return judge_xid_event(event, catalogue=packaged(), recovery_action=recovery_action, kernel_log=kernel_log)


def site(tmp_path: Path, text: str) -> Catalogue:
    path = tmp_path / "xid.csv"
    path.write_text(text, encoding="utf-8")
    return overridden(path)


def test_a_fault_tells_where_and_when_it_was_seen() -> None:
    fault = of_line(79, "GPU has fallen off the bus.")

    assert (fault.at, fault.source, fault.kind, fault.code, fault.pci) == (5.0, Source.KERNEL, Kind.XID, 79, PCI)
    assert (fault.gpu, fault.boot_id, fault.sequence) == ("GPU-1", "b", 9)
    assert fault.text.startswith("NVRM: Xid")


@pytest.mark.parametrize(
    ("code", "text", "action", "certain"),
    [
        (79, "GPU has fallen off the bus.", "drain_reboot", True),
        (63, "Row Remapper: New row marked for remapping, reset gpu to activate.", "defer_reset", False),
        (64, FULL, "drain_rma", True),
        (64, "Dynamic Page Retirement: the table is full", "drain_rma", True),
        (64, "DRAM Retirement failed", "drain_rma", True),
        (64, "Row Remapper Error: (0x1) - row is already pending remapping", "defer_reset", False),
        (64, "a text of a driver to come", "drain_rma", False),
        (94, "Contained: SM (0x1). RST: No, D-RST: No", "restart_job", False),
        (94, "Contained: SM (0x1). RST: No, D-RST: Yes", "defer_reset", False),
        (94, "Contained: SM (0x1). RST: Yes, D-RST: No", "drain_reset", False),
        (94, "Ch 00000008", "restart_job", False),
        (95, "Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No", "drain_reset", True),
        (95, "Uncontained: LTC TAG (0x2,0x1). RST: No, D-RST: Yes", "drain_reset", False),
        (95, "Uncontained: LTC TAG (0x2,0x1). RST: No, D-RST: No", "drain_reset", False),
        (45, "Ch 00000001", "log", False),
        (45, "Ch 00000001 caused by previous Xid 31", "restart_job", False),
        (45, "Ch 00000001 caused by previous Xid 119", "drain_reset", False),
        (45, "Ch 00000001 caused by previous Xid 79", "drain_reboot", True),
        (45, "Ch 00000001 caused by previous Xid 149", "restart_job", False),
        (45, "Ch 00000001 caused by previous Xid 45", "log", False),
        (45, "Ch 00000001 caused by previous Xid 31999", "log", False),
        (154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)", "log", False),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", "drain_reset", True),
        (154, "GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", "drain_reboot", True),
        (154, "GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "drain_reset", False),
        (154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "drain_reset", False),
        (154, "GPU recovery action changed from 0x0 (None) to 0x5 (Reset Bus)", "drain_reboot", False),
        (154, "GPU recovery action changed from 0x0 to 0x2", "drain_reboot", True),
        (154, "a text of a driver to come", "log", False),
        (54, "", "drain_rma", True),
        (119, "Timeout after 6s of waiting for RPC response from GPU4 GSP!", "drain_reset", False),
        (9999, "never heard of", "log", False),
    ],
)
def test_the_text_is_read_before_the_catalogue(code: int, text: str, action: str, *, certain: bool) -> None:
    fault = of_line(code, text)

    assert (fault.action, fault.certain) == (Action(action), certain), fault.why


def test_a_45_names_its_cause_and_takes_its_domain() -> None:
    fault = of_line(45, "Ch 00000001 caused by previous Xid 149")
    assert (fault.code, fault.cause, fault.domain) == (45, 149, Domain.NVLINK_FABRIC)


def test_the_recovery_action_comes_before_text_and_catalogue() -> None:
    assert of_line(109, "Ch 1", recovery_action=1).action is Action.DRAIN_RESET
    assert of_line(119, recovery_action=2).action is Action.DRAIN_REBOOT
    assert of_line(143, recovery_action=1).action is Action.DRAIN_RESET  # lowers what the catalogue says
    assert of_line(94, "Contained: SM (0x1). RST: No, D-RST: No", recovery_action=2).action is Action.DRAIN_REBOOT
    assert of_line(12345, recovery_action=1).action is Action.DRAIN_RESET
    assert "recovery action 1" in of_line(109, "Ch 1", recovery_action=1).why


def test_no_recovery_action_lowers_nothing_for_it_may_be_older_than_the_fault() -> None:
    assert of_line(119, recovery_action=0).action is Action.DRAIN_RESET
    assert of_line(95, recovery_action=0).action is Action.DRAIN_RESET


def test_what_only_a_person_can_mend_stays_that() -> None:
    fault = of_line(64, FULL, recovery_action=1)
    assert (fault.action, fault.certain) == (Action.DRAIN_RMA, True)


def test_a_gpu_that_is_gone_cannot_be_reset_whatever_nvml_said_before() -> None:
    assert of_line(79, recovery_action=1).action is Action.DRAIN_REBOOT
    assert of_event(79, recovery_action=1).action is Action.DRAIN_REBOOT
    fault = of_record("NVRM: GPU 0000:06:00.0: GPU has fallen off the bus.", recovery_action=1)
    assert (fault.kind, fault.action, fault.certain) == (Kind.LOST, Action.DRAIN_REBOOT, True)


def test_of_a_154_and_nvml_the_more_severe_counts() -> None:
    to_4 = "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
    to_0 = "GPU recovery action changed from 0x2 (x) to 0x0 (None)"
    assert of_line(154, to_4, recovery_action=2).action is Action.DRAIN_REBOOT
    assert of_line(154, to_4, recovery_action=0).action is Action.DRAIN_RESET
    assert of_line(154, to_0, recovery_action=1).action is Action.DRAIN_RESET


def test_a_gpu_that_asks_for_recovery_is_not_the_programs_fault() -> None:
    assert of_line(31, "MMU Fault").domain is Domain.APPLICATION
    assert of_line(31, "MMU Fault", recovery_action=1).domain is Domain.HARDWARE


@given(st.sampled_from(sorted(NEVER_DRAIN_ALONE)), st.text(max_size=80), st.sampled_from([None, 0]))
@QUICKLY
def test_what_programs_cause_never_drains_alone(code: int, text: str, recovery_action: int | None) -> None:
    report = parse(f"NVRM: Xid (PCI:0000:3b:00): {code}, {text}")
    assert report is not None
    fault = judge(report, at=0.0, source=Source.KERNEL, catalogue=packaged(), recovery_action=recovery_action)
    if fault.cause is None:
        assert not fault.action.drains
    assert not of_event(code).action.drains


@given(st.integers(1, 99_999), st.text(max_size=80))
@QUICKLY
def test_unknown_codes_are_logged_whatever_their_text(code: int, text: str) -> None:
    if code not in packaged().rows:
        fault = of_record(f"NVRM: Xid (PCI:0000:3b:00): {code}, {text}")
        assert (fault.action, fault.certain) == (Action.LOG, False)


@given(st.sampled_from(sorted(packaged().rows)), st.text(max_size=200), st.integers(0, 300))
@QUICKLY
def test_any_text_behind_any_code_is_judged(code: int, text: str, recovery_action: int) -> None:
    fault = of_record(f"NVRM: Xid (PCI:0000:3b:00): {code}, {text}", recovery_action=recovery_action)
    assert fault.why
    if fault.certain:
        assert fault.action.drains


# --- switches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text", "action", "certain"),
    [
        (12020, "Fatal, Link 00 x", "drain_reboot", True),
        (23009, "Fatal, x", "drain_reboot", True),
        (20034, "Fatal, Link 48 LTSSM Fault Up", "drain_reset", False),
        (12028, "Fatal, Link 04 x", "drain_reset", False),
        (12028, "Non-fatal, Link 04 x", "log", False),
        (22003, "x", "drain_reboot", False),
        (22013, "x", "log", False),
        (33333, "Fatal, x", "drain_reset", False),
        (33333, "Non-fatal, x", "log", False),
        (33333, "Fatality, x", "log", False),
    ],
)
def test_the_word_in_the_line_says_how_bad_a_switchs_report_is(
    code: int, text: str, action: str, *, certain: bool
) -> None:
    fault = of_record(f"nvidia-nvswitch1: SXid (PCI:0000:06:00.0): {code}, {text}", recovery_action=2)

    assert (fault.kind, fault.code, fault.domain) == (Kind.SXID, code, Domain.NVLINK_FABRIC)
    assert (fault.action, fault.certain) == (Action(action), certain)


# --- NVLink registers -------------------------------------------------------------------------------------


def registers(**values: int) -> str:
    words = ", ".join(hex(values.get(f"r{number}", 0)) for number in range(1, 8))
    return f"NVLink: fatal error detected on link 14({words})"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (registers(r1=1 << 0), "log"),
        (registers(r1=1 << 20), "log"),
        (registers(r4=1 << 16 | 1 << 17), "log"),
        (registers(r5=1 << 20), "log"),
        (registers(r1=1 << 27), "restart_job"),
        (registers(r3=1 << 13), "restart_job"),
        (registers(r1=1 << 4), "drain_reset"),
        (registers(r1=1 << 20, r5=1 << 18), "drain_reset"),
        (registers(r4=1 << 18), "drain_reset"),
        (registers(r3=1 << 16), "drain_rma"),
        (registers(r1=1 << 4, r3=1 << 19), "drain_rma"),
    ],
)
def test_the_worst_known_bit_of_a_74_decides(text: str, action: str) -> None:
    found = decode_nvlink4(text)
    assert found is not None
    assert found.action is Action(action)
    assert of_line(74, text).action is Action(action)


@pytest.mark.parametrize("text", [registers(), registers(r2=1), registers(r1=1 << 20, r7=4), "NVLink: link 1(0x0)", ""])
def test_a_74_that_is_not_understood_leaves_it_to_the_catalogue(text: str) -> None:
    assert decode_nvlink4(text) is None
    assert of_line(74, text).action is packaged().rows[74].action is Action.DRAIN_RESET


def nvlink5(unit: str, word: str, *words: int, link: str = "01") -> str:
    six = [*words, *[0] * (6 - len(words))]
    return f"{unit}  {word}   XC0 i0 Link {link} ({' '.join(f'0x{value:08x}' for value in six)})"


@pytest.mark.parametrize(
    ("code", "text", "action"),
    [
        (144, nvlink5("SAW_MVB", "Fatal", 0, 0x2), "drain_reset"),
        (144, nvlink5("SAW_MVB", "Nonfatal", 0, 0x2), "log"),
        (145, nvlink5("RLW_REMAP", "Fatal", 0, 0x40), "drain_reset"),
        (145, nvlink5("RLW_REMAP", "Fatal", 0, 0x10), "restart_job"),
        (145, nvlink5("RLW_SRC_TRACK", "Fatal", 0, 0x4), "restart_job"),
        (145, nvlink5("RLW_SRC_TRACK", "Fatal", 0, 0x20), "drain_reset"),
        (145, nvlink5("RLW_RXPIPE", "Fatal", 0, 0x8), "log"),
        (146, nvlink5("TLW_CTRL", "Fatal", 0, 0x4), "drain_reset"),
        (147, nvlink5("TREX", "Fatal", 0, 0x4), "log"),
        (148, nvlink5("NVLPW_CTRL", "Fatal"), "log"),
        (149, nvlink5("NETIR_LINK_EVT", "Fatal", 0x021425C6), "drain_reset"),
        (149, nvlink5("NETIR", "Fatal", 0x000FE406, link="-1"), "drain_reset"),
        (149, nvlink5("NETIR_LINK_EVT", "Fatal", 0b100110 << 20), "log"),
        (149, nvlink5("NETIR_LINK_EVT", "Fatal", 0b101000 << 20), "log"),
        (149, nvlink5("NETIR_LINK_EVT", "Fatal", 0b101010 << 20), "drain_reset"),
        (149, nvlink5("NETIR_BER_EVENT", "Fatal"), "log"),
        (149, nvlink5("NETIR_LINK_EVT", "Nonfatal", 0x021425C6), "log"),
        (150, nvlink5("MSE degraded", "Fatal"), "drain_reset"),
        (150, nvlink5("MSE_WATCHDOG", "Nonfatal"), "log"),
        (150, "MSE Fatal XC1 in Link 17 (0x1 0x2 0x3 0x4)", "drain_reset"),
    ],
)
def test_nvlink_5_units_are_decoded(code: int, text: str, action: str) -> None:
    found = decode_nvlink5(code, text)
    assert found is not None
    assert found.action is Action(action), found.why
    assert of_line(code, text).action is Action(action)


def test_a_link_that_software_took_down_is_not_called_hardware() -> None:
    fault = of_line(149, nvlink5("NETIR_LINK_EVT", "Fatal", 0b010001 << 20))
    assert fault.domain is Domain.DRIVER_FIRMWARE


def test_an_nvlink_5_line_that_cannot_be_read_waits_for_the_recovery_action() -> None:
    assert of_line(149, "a text of a driver to come").action is Action.LOG
    assert of_line(149, "a text of a driver to come", recovery_action=1).action is Action.DRAIN_RESET


def test_144_was_a_key_rotation_in_older_drivers() -> None:
    text = nvlink5("SAW_MVB", "Fatal")
    assert of_line(144, text, driver="550.54.15").action is Action.LOG
    assert of_line(144, text, driver="570.86.15").action is Action.DRAIN_RESET
    assert of_line(144, text, driver="unknown").action is Action.DRAIN_RESET


# --- events of NVML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(payload.MILDEST))
def test_without_text_the_mildest_reading_counts_as_long_as_the_kernel_log_is_read(code: int) -> None:
    assert of_event(code).action is payload.MILDEST[code]
    assert of_event(code, kernel_log=False).action is packaged().rows[code].action
    assert not of_event(code).certain


@pytest.mark.parametrize("code", sorted(packaged().rows))
def test_no_line_asks_for_less_than_its_event_did(code: int) -> None:
    """Later members of a burst can only raise the action: an event must not overtake what its line would deny."""
    mildest = {
        64: "already pending remapping",
        74: registers(r1=1),
        94: "Contained: x. RST: No, D-RST: No",
        149: nvlink5("NETIR_LINK_EVT", "Nonfatal"),
    }
    assert of_line(code, mildest.get(code, "")).action.severity >= of_event(code).action.severity


def test_events_join_the_kernels_address_and_know_instances() -> None:
    plain = of_event(43)
    assert (plain.pci, plain.gpu, plain.source, plain.instance, plain.text) == (PCI, "GPU-1", Source.NVML, "", "")
    for gi, ci, expected in ((5, 0, "GI 5 CI 0"), (5, None, "GI 5"), (None, None, ""), (None, 3, "")):
        event = NvmlXid(at=0.0, code=43, pci=PCI, gpu_instance=gi, compute_instance=ci)
        assert judge_xid_event(event, catalogue=packaged()).instance == expected


def test_a_code_that_nvml_has_no_name_for_is_logged() -> None:
    assert of_event(999).action is Action.LOG
    assert of_event(4711).action is Action.LOG
    assert of_event(999, recovery_action=2).action is Action.DRAIN_REBOOT


# --- health -----------------------------------------------------------------------------------------------

WELL = GpuHealth(
    at=1.0,
    pci="00000000:3B:00.0",
    uuid="GPU-1",
    recovery_action=0,
    rows_pending=False,
    rows_failed=False,
    ecc_uncorrected=0,
    sram_threshold_exceeded=False,
)


def worse(**values: object) -> GpuHealth:
    return GpuHealth(**{name: getattr(WELL, name) for name in WELL.__struct_fields__} | values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reading", "kind", "action", "certain"),
    [
        (worse(lost=True), Kind.LOST, "drain_reboot", True),
        (worse(recovery_action=1), Kind.HEALTH, "drain_reset", True),
        (worse(recovery_action=2), Kind.HEALTH, "drain_reboot", True),
        (worse(recovery_action=4), Kind.HEALTH, "drain_reset", False),
        (worse(rows_pending=True), Kind.HEALTH, "defer_reset", False),
        (worse(rows_failed=True), Kind.HEALTH, "drain_rma", True),
        (worse(sram_threshold_exceeded=True), Kind.HEALTH, "drain_rma", True),
        (worse(ecc_uncorrected=3), Kind.HEALTH, "log", False),
    ],
)
def test_health_that_gets_worse_makes_one_fault(reading: GpuHealth, kind: Kind, action: str, *, certain: bool) -> None:
    for before in (None, WELL):
        (fault,) = xid_judge.judge_health(reading, before, catalogue=packaged())
        assert (fault.kind, fault.action, fault.certain, fault.pci, fault.gpu) == (
            kind,
            Action(action),
            certain,
            PCI,
            "GPU-1",
        )
    assert xid_judge.judge_health(reading, reading, catalogue=packaged()) == []
    assert xid_judge.judge_health(WELL, reading, catalogue=packaged()) == []


def test_a_gpu_that_is_well_or_says_nothing_makes_no_fault() -> None:
    silent = GpuHealth(at=1.0, pci=PCI)
    for now in (WELL, silent):
        for before in (None, WELL, silent):
            assert xid_judge.judge_health(now, before, catalogue=packaged()) == []


def test_several_things_that_got_worse_are_all_told_and_a_lost_gpu_tells_only_that() -> None:
    everything = {"recovery_action": 1, "rows_failed": True, "rows_pending": True, "ecc_uncorrected": 1}
    assert len(xid_judge.judge_health(worse(**everything), WELL, catalogue=packaged())) == 4
    assert len(xid_judge.judge_health(worse(**everything, lost=True), WELL, catalogue=packaged())) == 1


def test_ecc_counts_only_what_is_new() -> None:
    (fault,) = xid_judge.judge_health(worse(ecc_uncorrected=5), worse(ecc_uncorrected=3), catalogue=packaged())
    assert "2 new" in fault.why
    assert xid_judge.judge_health(worse(ecc_uncorrected=1), worse(ecc_uncorrected=3), catalogue=packaged()) == []


def test_a_missing_gpu_is_a_lost_one() -> None:
    assert xid_judge.missing(8, 8, at=1.0, catalogue=packaged()) is None
    assert xid_judge.missing(8, 9, at=1.0, catalogue=packaged()) is None
    fault = xid_judge.missing(8, 7, at=1.0, catalogue=packaged())
    assert fault is not None
    assert (fault.kind, fault.action, fault.pci) == (Kind.LOST, Action.DRAIN_REBOOT, None)
    assert "7 of 8" in fault.why


def test_a_silent_nvml_drains_only_after_longer_than_any_passing_cause_takes() -> None:
    def after(seconds: float, state: NvmlState = NvmlState.STUCK) -> Fault | None:
        return xid_judge.stuck(NvmlStatus(at=1.0, state=state, stuck_s=seconds, call="nvmlDeviceGetTemperature"))

    assert after(45.0) is None
    early, late = after(xid_judge.STUCK_LOG_AFTER_S), after(xid_judge.STUCK_DRAIN_AFTER_S)
    assert early is not None
    assert late is not None
    assert (early.kind, early.action, late.action) == (Kind.STUCK, Action.LOG, Action.DRAIN_RESET)
    assert not late.certain
    assert "nvmlDeviceGetTemperature" in late.why
    assert after(9e9, NvmlState.READY) is None
    assert after(9e9, NvmlState.ENDED) is None


# --- the site's word --------------------------------------------------------------------------------------


def test_the_sites_action_stands_before_the_text_but_not_before_the_recovery_action(tmp_path: Path) -> None:
    ours = site(tmp_path, "code,action\n74,log\n154,log\n119,drain_reboot\n")

    assert of_line(74, registers(r3=1 << 16), catalogue=ours).action is Action.LOG
    assert of_line(74, registers(r3=1 << 16), catalogue=ours, recovery_action=1).action is Action.DRAIN_RESET
    assert of_line(154, "GPU recovery action changed from 0x0 (x) to 0x2 (y)", catalogue=ours).action is Action.LOG
    assert of_line(119, catalogue=ours).action is Action.DRAIN_REBOOT
    assert "site" in of_line(119, catalogue=ours).why


def test_a_lost_gpu_is_judged_as_the_site_judges_a_79(tmp_path: Path) -> None:
    ours = site(tmp_path, "code,action\n79,drain_rma\n")
    fault = of_record("NVRM: GPU 0000:06:00.0: GPU has fallen off the bus.", catalogue=ours)
    assert fault.action is Action.DRAIN_RMA

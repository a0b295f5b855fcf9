"""The catalogue: every row is sound, and a site's file changes exactly what it says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.core.exits import ExitCode
from stepkeeper.node_agent.xid.catalogue import (
    FILE_BYTES_MAX,
    NEVER_DRAIN_ALONE,
    Action,
    CatalogueError,
    Domain,
    Severity,
    load,
    overridden,
    packaged,
)


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "xid.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_row_that_comes_with_us_is_sound() -> None:
    rows = packaged().rows
    assert len(rows) == 179
    for code, row in rows.items():
        assert row.code == code
        assert row.meaning, code
        assert row.mnemonic, code
        assert row.sources, code
        assert len(row.date) == 10, code
        assert not row.site, code
        if row.domain is Domain.APPLICATION or code in NEVER_DRAIN_ALONE:
            assert not row.action.drains, code
    assert set(range(1, 179)) <= set(rows)


def test_the_rows_that_matter_most_say_what_they_should() -> None:
    actions = {code: row.action.value for code, row in packaged().rows.items()}
    assert actions | {
        13: "restart_job", 31: "restart_job", 43: "restart_job", 45: "log", 48: "drain_reset", 63: "defer_reset",
        64: "drain_rma", 74: "drain_reset", 79: "drain_reboot", 94: "restart_job", 95: "drain_reset",
        119: "drain_reset", 120: "drain_reset", 999: "log",
    } == actions  # fmt: skip


def test_the_switches_codes_are_sound() -> None:
    rows = packaged().switch_rows
    assert all(row.meaning and row.code == code for code, row in rows.items())
    always = {code for code, row in rows.items() if row.severity is Severity.ALWAYS_FATAL}
    assert always == {10003, 12020, 22003, 22011, *range(23001, 23018)}


def test_a_sites_row_changes_only_the_cells_that_it_fills(tmp_path: Path) -> None:
    path = written(tmp_path, "# our own\ncode,action,note\n\n119,drain_reboot,\n92,,watched by us\n")

    ours = overridden(path)

    before, after = packaged().rows[119], ours.rows[119]
    assert (after.action, after.site) == (Action.DRAIN_REBOOT, True)
    assert (after.meaning, after.note, after.domain) == (before.meaning, before.note, before.domain)
    assert (ours.rows[92].note, ours.rows[92].action, ours.rows[92].site) == (
        "watched by us",
        packaged().rows[92].action,
        False,
    )
    assert {code for code in ours.rows if ours.rows[code] != packaged().rows[code]} == {92, 119}


def test_a_site_may_add_a_code(tmp_path: Path) -> None:
    ours = overridden(written(tmp_path, "code,action,domain,meaning\n4711,drain_reset,hardware,new one\n"))
    assert (ours.rows[4711].action, ours.rows[4711].meaning) == (Action.DRAIN_RESET, "new one")


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    ours = overridden(written(tmp_path, b"\xef\xbb\xbfcode,action\r\n119,log\r\n"))
    assert ours.rows[119].action is Action.LOG


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("code,action\n119,reboot\n", 2, "action 'reboot'"),
        ("code,action\n\n# x\n119,log\nxx,log\n", 5, "code 'xx'"),
        ("code,action\n0,log\n", 2, "code '0'"),
        ("code,action\n-5,log\n", 2, "code '-5'"),
        ("code,domain\n119,mine\n", 2, "domain 'mine'"),
        ("code,action\n119,log\n119,log\n", 3, "twice"),
        ("code,action\n119,log,more\n", 2, "3 cells"),
        ("code,colour\n119,red\n", 1, "'colour'"),
        ("code,code\n119,119\n", 1, "twice"),
        ("action\nlog\n", 1, "code is missing"),
        ("119,log\n", 1, "'119'"),
        ("", 1, "no header"),
        ("code,action\n4711,log\n", 2, "domain ''"),
        ("code,action\n43,drain_reset\n", 2, "must not drain"),
        ('code,note\n119,"never closed\n', 2, "not CSV"),
        (b"code,note\n119,ok\n92,\xff\n", 3, "UTF-8"),
    ],
)  # fmt: skip
def test_a_bad_file_of_the_site_is_refused_with_file_and_line(
    tmp_path: Path, text: str | bytes, line: int, says: str
) -> None:
    path = written(tmp_path, text)

    with pytest.raises(CatalogueError) as caught:
        overridden(path)

    assert f"{path}, line {line}: " in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.code is ExitCode.USAGE


def test_a_file_that_is_not_there_or_far_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="No such file"):
        load(tmp_path / "xid.csv")
    with pytest.raises(CatalogueError, match="more than"):
        load(written(tmp_path, b"code\n" + b"#" * FILE_BYTES_MAX))
    with pytest.raises(CatalogueError, match="directory"):
        load(tmp_path)


@given(data=st.binary(max_size=200) | st.text(alphabet='code,ation19log"\n#\r', max_size=120).map(str.encode))
@settings(
    max_examples=150,
    phases=(Phase.generate,),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_file_makes_it_fail_otherwise(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, data)
    with contextlib.suppress(CatalogueError):  # the one error that it may raise
        assert set(packaged().rows) <= set(overridden(path).rows)


@pytest.mark.parametrize("code", [157, 161])
def test_what_nvidia_ignores_at_first_stops_no_running_job(code: int) -> None:
    row = packaged().rows[code]

    assert "NVCAT[IGNORE" in row.sources
    assert row.action is Action.DEFER_RESET

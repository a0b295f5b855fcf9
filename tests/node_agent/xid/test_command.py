"""`stepkeeper xid` as a process: words, JSON, exit codes, and any input at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.core.exits import ExitCode
from tests.node_agent.xid import samples

WITHIN_S = 90.0
RECORD = "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=7, name=python3, Contained: SM (0x1). RST: No, D-RST: No"


def stepkeeper(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "stepkeeper", "xid", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )


def found(*arguments: str | Path, stdin: bytes = b"") -> list[dict[str, Any]]:
    ended = stepkeeper("--parse", *arguments, "--json", stdin=stdin)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == b""
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_every_fault_of_a_log_is_one_json_line() -> None:
    expected = [each for each in samples.samples() if each.kind is not None and not each.injected]

    documents = found(samples.FILE)

    assert [each["line"] for each in documents] == [each.line for each in expected]
    for document, sample in zip(documents, expected, strict=True):
        number = document["sxid"] if sample.kind == "sxid" else document["xid"]
        assert (document["kind"], number, document["pci"], document["action"]) == sample[1:5]
        assert document["domain"]
        assert document["why"]
        assert ("sxid" in document) != ("xid" in document)
    assert [each["cause"] for each in documents if "cause" in each] == [149]
    assert [each["instance"] for each in documents if "instance" in each] == ["GI 5"]
    lost = [each for each in documents if each["kind"] == "lost"]
    assert [(each["xid"], each["pci"]) for each in lost] == [(None, "0000:b3:00.0")]


def test_a_log_comes_through_a_pipe_too() -> None:
    (document,) = found("-", stdin=RECORD.encode())
    assert (document["xid"], document["instance"], document["mnemonic"]) == (
        94,
        "GI 5",
        "ROBUST_CHANNEL_CONTAINED_ERROR",
    )


def test_faults_of_a_log_that_still_grows_are_shown_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stepkeeper", "xid", "--parse", "-", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(RECORD.encode() + b"\n")
        process.stdin.flush()
        first = process.stdout.readline()  # the test's own time limit ends a wait for ever
        process.stdin.close()
        assert json.loads(first)["xid"] == 94
        assert process.wait(WITHIN_S) == 0
    finally:
        process.kill()
        process.wait(WITHIN_S)
        process.stdout.close()


def test_people_see_columns_without_anything_that_acts_on_a_terminal() -> None:
    ended = stepkeeper("--parse", "-", stdin=RECORD.encode() + b"\x1b[31m\n")
    header, line = ended.stdout.decode().splitlines()
    assert header.split()[:3] == ["FAULT", "PCI", "ACTION"]
    assert line.startswith("XID 94")
    assert "GI 5" in line
    assert "\x1b" not in line


def test_what_programs_injected_is_shown_only_when_asked_for() -> None:
    line = b"11,1,1,-;" + RECORD.encode()
    assert found("-", stdin=line) == []
    assert [each["xid"] for each in found("-", "--allow-injected", stdin=line)] == [94]


def test_no_input_makes_it_fail() -> None:
    """One process for all: each start of Python costs more than the test."""
    odd = (b"\x00", b"\xff" * 100_000, b"Xid (" * 50_000, os.urandom(300_000), b"\\x", RECORD.encode(), b"")
    assert [each["xid"] for each in found("-", stdin=b"\n".join(odd))] == [94]
    assert found("-", stdin=b"") == []


def test_a_code_is_explained_in_words_and_as_json() -> None:
    words = stepkeeper("79").stdout.decode()
    assert "fell off the bus" in words
    assert "drain_reboot" in words
    document = json.loads(stepkeeper("79", "--json").stdout)
    assert (document["xid"], document["action"], document["domain"]) == (79, "drain_reboot", "hardware")
    switch = json.loads(stepkeeper("12020", "--json").stdout)
    assert (switch["sxid"], switch["severity"]) == (12020, "always_fatal")
    assert "NVSwitch" in stepkeeper("12020").stdout.decode()


def test_all_codes_are_listed() -> None:
    document = json.loads(stepkeeper("--json").stdout)
    assert len(document["xids"]) == 179
    assert len(document["sxids"]) == 47
    assert len(stepkeeper().stdout.splitlines()) == 1 + 179 + 47


def test_the_sites_rows_override_ours(tmp_path: Path) -> None:
    rows = tmp_path / "xid.csv"
    rows.write_text("code,action\n94,drain_rma\n")

    words = stepkeeper("94", "--catalogue", rows).stdout.decode()

    assert "drain_rma (set by this site)" in words
    assert [each["action"] for each in found("-", "--catalogue", rows, stdin=RECORD.encode())] == ["drain_rma"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["12345"], ExitCode.NOTHING_FOUND, "not in the catalogue"),
        (["seventy"], ExitCode.USAGE, "CODE"),
        (["79", "--parse", "-"], ExitCode.USAGE, "one of them"),
        (["--allow-injected"], ExitCode.USAGE, "--parse"),
        (["--parse", "/nowhere/x"], ExitCode.NOTHING_FOUND, "/nowhere/x: No such file"),
        (["--parse", "/"], ExitCode.NOTHING_FOUND, "directory"),
        (["79", "--catalogue", "/nowhere/x"], ExitCode.USAGE, "/nowhere/x: No such file"),
    ],
)
def test_each_way_to_fail_has_its_code_and_one_line(arguments: list[str], code: ExitCode, says: str) -> None:
    ended = stepkeeper(*arguments)

    assert ended.returncode == code
    assert says in ended.stderr.decode()
    assert ended.stderr.count(b"\n") == 1


def test_a_standard_input_that_is_closed_is_told() -> None:
    shell = f"{sys.executable} -m stepkeeper xid --parse - <&-"
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=WITHIN_S, check=False)
    assert ended.returncode == ExitCode.NOTHING_FOUND
    assert ended.stderr.count(b"\n") == 1


def test_a_bad_file_of_the_site_is_named_with_its_line(tmp_path: Path) -> None:
    rows = tmp_path / "xid.csv"
    rows.write_text("code,action\n94,explode\n")

    ended = stepkeeper("--parse", "-", "--catalogue", rows)

    assert ended.returncode == ExitCode.USAGE
    assert f"{rows}, line 2: action 'explode'" in ended.stderr.decode()


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text((RECORD + "\n") * 5000)
    shell = f"{sys.executable} -m stepkeeper xid --parse {log} --json | head -1"
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, timeout=WITHIN_S, check=False
    )
    assert ended.returncode == 0
    assert ended.stderr == b""

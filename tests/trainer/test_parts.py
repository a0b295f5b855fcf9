"""The parts of the library, each by itself."""
# ruff: noqa: S311, NPY002, FBT001

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stepkeeper_trainer.coordinate.agreement import Agreement, Proposal, Want
from stepkeeper_trainer.coordinate.requests import ALONE_AFTER_S, SIGNAL_COUNTS_S, Requests
from stepkeeper_trainer.environment import Environment, find_place, read_environment
from stepkeeper_trainer.errors import ResumeError, SaveError, StateError, SupersededError, UsageError
from stepkeeper_trainer.formats import lease, messages
from stepkeeper_trainer.formats.manifest import CHUNK_BYTES, FileEntry, Manifest
from stepkeeper_trainer.formats.stored import StepBytes, StoredError
from stepkeeper_trainer.link import Link
from stepkeeper_trainer.observe.metrics import HEADER, Metrics
from stepkeeper_trainer.save import report
from stepkeeper_trainer.save.commit import Commits
from stepkeeper_trainer.save.report import RankReport, gather, publish, publish_failure
from stepkeeper_trainer.save.writer import HashingFile
from stepkeeper_trainer.state import random_state
from stepkeeper_trainer.state.tree import StatefulPart, from_blob, join, split, to_blob
from tests.trainer.ranks import losses, watcher_socket

HUNG_S = 60.0  # what hangs; nobody waits so long

# --- state as tensors and JSON ---------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(value=values)
@settings(deadline=None)
def test_python_state_comes_back_as_it_was(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}

    blob = to_blob(split(value, "x", tensors))

    assert blob.dtype == torch.uint8
    assert blob.numel() % 4096 == 0
    assert join(from_blob(blob, name="x"), tensors) == value


def test_tensors_are_taken_out_and_put_back() -> None:
    value = {"a": [torch.arange(3), (torch.ones(2), 1)], 7: torch.zeros(1)}
    tensors: dict[str, torch.Tensor] = {}

    back = join(from_blob(to_blob(split(value, "x", tensors)), name="x"), tensors)

    assert len(tensors) == 3
    assert back["a"][0] is tensors["x.a.0"]
    assert back["a"][1][1] == 1
    assert torch.equal(back[7], torch.zeros(1))


class Point(NamedTuple):
    x: float
    y: torch.Tensor


class Loader:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_named_tuple_comes_back_as_one() -> None:
    value = {"at": [Point(0.5, torch.ones(2)), (1, 2)]}
    tensors: dict[str, torch.Tensor] = {}

    skeleton = from_blob(to_blob(split(value, "x", tensors)), name="x")
    back = join(skeleton, tensors)

    [point, pair] = back["at"]
    assert type(point) is Point
    assert (point.x, point.y.tolist()) == (0.5, [1.0, 1.0])
    assert type(pair) is tuple
    assert type(join(skeleton, tensors, named=False)["at"][0]) is tuple


def test_what_is_loaded_without_tensors_is_not_asked_for_its_state_before() -> None:
    """A `torchdata.nodes.Loader` that was asked begins its iterator, and a state that is loaded then is not used."""

    class Asked(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("it has begun")

    part = StatefulPart("loader", Asked({}))

    part.apply({"at": 3}, part.targets({"at": 3}, {}))

    assert part.value.state == {"at": 3}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gone.Point", "gone.Point, which the script has not imported"),
        (f"{__name__}.Point", "of 1 fields"),
        ("os.system", "has not imported"),
    ],
)
def test_a_named_tuple_that_the_script_lacks_is_named_before_anything_is_loaded(kind: str, told: str) -> None:
    part = StatefulPart("loader", Loader({"at": (1,)}))

    with pytest.raises(ResumeError, match=told):
        part.targets({"at": {"$tuple": [1], "$of": kind}}, {})


def test_keys_that_make_one_name_keep_their_values() -> None:
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}
    tensors: dict[str, torch.Tensor] = {}

    back = join(from_blob(to_blob(split(value, "x", tensors)), name="x"), tensors)

    assert len(tensors) == 4
    assert [float(back["a.b"]), float(back["a"]["b"]), float(back[1]), float(back["1"])] == [0.0, 1.0, 2.0, 3.0]


def test_what_is_neither_tensor_nor_json_is_named() -> None:
    with pytest.raises(StateError, match=r"others.scaler.table.1 is a range"):
        split({"table": [1, range(2)]}, "others.scaler", {})


def test_every_generator_is_restored() -> None:
    import random  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415

    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(1)),
        ]

    draw()
    saved = random_state.collect()
    expected = [draw(), draw()]

    random_state.restore(saved)

    assert [draw(), draw()] == expected
    random_state.derive(1, 2, 3)
    derived = draw()
    random_state.derive(1, 2, 3)
    assert draw() == derived
    random_state.derive(1, 2, 4)
    assert draw() != derived


# --- bytes ---------------------------------------------------------------------------------------


def test_a_file_whose_disk_fails_as_it_is_opened_is_not_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refused(descriptor: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    with pytest.raises(OSError, match="Input/output error"):
        HashingFile(tmp_path / "a", direct=True)

    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by whomever
            assert os.readlink(f"/proc/self/fd/{descriptor}") != str(tmp_path / "a")


def test_what_is_written_is_hashed_by_chunk_and_never_over_another_file(tmp_path: Path) -> None:
    data = os.urandom(CHUNK_BYTES + 5)
    with HashingFile(tmp_path / "a") as file:
        for start in range(0, len(data), 3_000_001):
            file.write(data[start : start + 3_000_001])

    assert (tmp_path / "a").read_bytes() == data
    assert file.entry == FileEntry(
        bytes=len(data),
        xxh3_128=xxhash.xxh3_128_hexdigest(data),
        chunks=(xxhash.xxh3_128_hexdigest(data[:CHUNK_BYTES]), xxhash.xxh3_128_hexdigest(data[CHUNK_BYTES:])),
    )
    with pytest.raises(FileExistsError):
        HashingFile(tmp_path / "a")


def _entry(data: bytes, chunk_bytes: int) -> FileEntry:
    chunks = tuple(xxhash.xxh3_128_hexdigest(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes))
    return FileEntry(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data), chunk_bytes=chunk_bytes, chunks=chunks)


def _of_one_file(entry: FileEntry) -> Manifest:
    return Manifest(step=1, tokens=0, world_size=1, created_at="", save_id="", files={"f": entry})


@given(
    data=st.binary(min_size=1, max_size=100),
    chunk_bytes=st.integers(1, 20),
    reads=st.lists(st.tuples(st.integers(0, 110), st.integers(0, 40)), max_size=10),
    flip=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_bytes_of_a_step_are_right_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    data: bytes,
    chunk_bytes: int,
    reads: list[tuple[int, int]],
    flip: int,
) -> None:
    directory = tmp_path_factory.mktemp("checked")
    damaged = bytearray(data)
    damaged[flip % len(data)] ^= 1
    for content, whole in ((data, True), (bytes(damaged), False)):
        (directory / "f").write_bytes(content)
        with StepBytes(directory, _of_one_file(_entry(data, chunk_bytes))) as source:
            for start, count in reads:
                try:
                    got = source.read("f", start, count)
                except StoredError:
                    assert not whole or start + count > len(data)
                else:
                    assert got == data[start : start + count]


@pytest.mark.parametrize(
    ("content", "entry"),
    [(b"12345", _entry(b"1234", 4)), (b"1234", FileEntry(bytes=4, xxh3_128="", chunk_bytes=0))],
)
def test_a_file_of_another_size_or_without_its_chunks_is_refused(
    tmp_path: Path, content: bytes, entry: FileEntry
) -> None:
    (tmp_path / "f").write_bytes(content)

    with StepBytes(tmp_path, _of_one_file(entry)) as source, pytest.raises(StoredError, match="the manifest says 4"):
        source.read("f", 0, 1)


# --- reports and commits -----------------------------------------------------------------------------


def environment(epoch: tuple[int, int] | None = None, attempt: int = 0, launch: int = 0) -> Environment:
    return Environment(
        socket=None,
        run_directory=None,
        run_id="",
        attempt=attempt,
        launch=launch,
        resume_from=None,
        epoch=epoch,
        node=socket.gethostname(),
    )


def _gather(directory: Path, *, given_up: str | None = None, limit_s: float = HUNG_S) -> list[RankReport]:
    return gather(directory, save_id="s", world_size=2, limit_at=time.time() + limit_s, given_up=lambda _: given_up)


def test_a_commit_waits_for_all_reports_and_no_longer_than_its_limit(tmp_path: Path) -> None:
    publish(tmp_path, RankReport(rank=0, save_id="s"))
    with pytest.raises(SaveError, match=r"rank 1 .*in time"):
        _gather(tmp_path, limit_s=0.2)
    with pytest.raises(SaveError, match="elsewhere"):
        _gather(tmp_path, given_up="failed elsewhere")

    publish(tmp_path, RankReport(rank=1, save_id="s"))

    assert [report.rank for report in _gather(tmp_path)] == [0, 1]
    publish_failure(tmp_path, RankReport(rank=1, save_id="s", error="disk full"))
    with pytest.raises(SaveError, match="rank 1: disk full"):
        _gather(tmp_path)


def test_a_report_of_another_save_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, RankReport(rank=0, save_id="another"))

    with pytest.raises(SaveError, match="another save"):
        _gather(tmp_path)


def test_a_report_that_is_something_else_is_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_bytes(b'{"rank":"0"}')

    with pytest.raises(SaveError, match="not a report"):
        _gather(tmp_path)


def test_a_report_that_is_written_still_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs one new file, and no rename: rank 0 may see any part of it."""
    publish(tmp_path, RankReport(rank=1, save_id="s"))
    written: list[int] = []

    def write_more(_pause_s: float) -> None:
        data = msgspec.json.encode(RankReport(rank=0, save_id="s"))
        with (tmp_path / "rank-0.json").open("ab") as file:
            file.write(data[len(written) : len(written) + 1])
        written.append(len(data))

    monkeypatch.setattr(report, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 0.0, sleep=write_more))

    found = gather(tmp_path, save_id="s", world_size=2, limit_at=1.0, given_up=lambda _: None)

    assert [each.rank for each in found] == [0, 1]
    assert len(written) == written[0], "read when it was complete, and not before"


@pytest.mark.parametrize("data", [b"", b'{"rank":0,"save_id":"s"', b'{"rank":0,"save_id":"\xff"}'])
def test_a_report_that_stays_torn_never_counts(tmp_path: Path, data: bytes) -> None:
    publish(tmp_path, RankReport(rank=1, save_id="s"))
    (tmp_path / "rank-0.json").write_bytes(data)

    with pytest.raises(SaveError, match=r"rank 0 .*in time; rank-0.json is not a report"):
        _gather(tmp_path, limit_s=0.2)
    with pytest.raises(SaveError, match="rank 0 has ended"):
        _gather(tmp_path, given_up="rank 0 has ended")
    publish_failure(tmp_path, RankReport(rank=0, save_id="s", error="disk full"))
    with pytest.raises(SaveError, match="rank 0: disk full"):
        _gather(tmp_path)


def test_waiting_for_many_reports_costs_one_listing_a_look_and_looks_grow_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, RankReport(rank=0, save_id="s"))
    opened: list[str] = []
    looks: list[float] = []
    slept: list[float] = []
    clock = SimpleNamespace(time=lambda: 1000.0 + sum(slept), monotonic=lambda: sum(slept), sleep=slept.append)
    scan, read = os.scandir, report.read_plain
    monkeypatch.setattr(report, "time", clock)
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(clock.time()) or scan(path))  # type: ignore[func-returns-value]

    def note(path: Path, *limits: int, within: Path) -> bytes:
        opened.append(path.name)
        return read(path, *limits, within=within)

    monkeypatch.setattr(report, "read_plain", note)

    with pytest.raises(SaveError, match=r"rank 1 .*in time"):
        gather(tmp_path, save_id="s", world_size=1000, limit_at=1010.0, given_up=lambda _: None)

    assert opened == ["rank-0.json"], "what is not there is not opened"
    assert looks[-1] == pytest.approx(1010.0)
    pauses = [(before - 1000.0, after - before) for before, after in itertools.pairwise(looks)][:-1]
    assert 20 <= len(pauses) <= 50
    for waited, pause in pauses:
        assert pause == pytest.approx(min(0.5, max(0.05, waited / 10))), "no report is seen late by more than a tenth"


def _lease(job_id: int, restart_count: int) -> lease.Lease:
    return lease.Lease(job_id=job_id, restart_count=restart_count, attempt=0, node="n", pid=1, taken_at=0.0)


@pytest.mark.parametrize(
    ("own", "holder", "fenced"),
    [
        ((5, 0), (5, 1), True),
        ((5, 1), (5, 0), False),
        ((5, 9), (6, 0), True),
        ((5, 0), (5, 0), False),
        (None, (9, 9), False),
    ],
)
def test_the_higher_epoch_fences_off_the_lower(
    tmp_path: Path, own: tuple[int, int] | None, holder: tuple[int, int], fenced: bool
) -> None:
    lease.write(tmp_path, _lease(*holder))
    commits = Commits(tmp_path, environment(own))

    if fenced:
        with pytest.raises(SupersededError, match="must stop"):
            commits.check_fence()
    else:
        commits.check_fence()


def _complete(commits: Commits, step: int) -> tuple[Path, Manifest]:
    """Return a save in flight that is ready to be committed."""
    directory = commits.in_flight(step, f"save{step}")
    directory.mkdir(parents=True)
    commits.claim(directory)
    (directory / "__0_0.distcp").write_bytes(b"data")
    publish(directory, RankReport(rank=0, save_id=f"save{step}"))
    files = {"__0_0.distcp": _entry(b"data", 4)}
    return directory, Manifest(step=step, tokens=0, world_size=1, created_at="", save_id=f"save{step}", files=files)


def test_an_attempt_that_is_fenced_off_in_its_commit_writes_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence is looked at before the rename; until the line is written, a newer attempt may have come."""
    lease.write(tmp_path, _lease(5, 0))
    commits = Commits(tmp_path, environment((5, 0)))
    directory, manifest = _complete(commits, 105)
    rename = os.rename

    def slow(source: Path, target: Path, **places: int) -> None:
        rename(source, target, **places)
        if "lease" not in str(target):
            lease.write(tmp_path, _lease(5, 1))

    monkeypatch.setattr(os, "rename", slow)
    with pytest.raises(SupersededError):
        commits.commit(directory, manifest, 1, after=None)

    assert not (commits.checkpoints / "lineage.jsonl").exists()


def test_nothing_that_the_manifest_does_not_name_stays_in_a_committed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that writes at that very moment must not have the step refused for ever after."""
    commits = Commits(tmp_path, environment((5, 0)))
    directory, manifest = _complete(commits, 105)
    rename = os.rename

    def late_rank(source: Path, target: Path, **places: int) -> None:
        if source == directory:
            publish_failure(directory, RankReport(rank=0, save_id="save105", error="late"))
        rename(source, target, **places)

    monkeypatch.setattr(os, "rename", late_rank)
    final = commits.commit(directory, manifest, 1, after=None)

    assert sorted(os.listdir(final)) == ["MANIFEST.json", "__0_0.distcp"]


def test_a_report_that_failed_never_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may commit at once what it sees, and a rank that reports a failure then would do so into that step."""
    publish(tmp_path, RankReport(rank=1, save_id="s"))
    write, taken = os.write, 5

    def full(descriptor: int, data: bytes) -> int:
        nonlocal taken
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count, taken = write(descriptor, data[:taken]), 0
        return count

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left.*rank-0\.json"):
        publish(tmp_path, RankReport(rank=0, save_id="s"))

    with pytest.raises(SaveError, match=r"rank 0 .*in time"):
        _gather(tmp_path, limit_s=0.1)


@pytest.mark.parametrize("change", ["missing", "more"])
def test_names_that_the_manifest_does_not_have_or_has_alone_are_a_failed_save(tmp_path: Path, change: str) -> None:
    commits = Commits(tmp_path, environment((5, 0)))
    directory, manifest = _complete(commits, 105)
    if change == "missing":
        (directory / "__0_0.distcp").unlink()
    else:
        (directory / "__1_0.distcp").touch()

    with pytest.raises(SaveError, match=r"not what was written: \['__[01]_0\.distcp'\]"):
        commits.commit(directory, manifest, 1, after=None)


def test_a_file_that_has_another_size_than_was_written_is_an_error_of_its_writer(tmp_path: Path) -> None:
    """Rank 0 does not look at the sizes of all ranks' files."""
    file = HashingFile(tmp_path / "a")
    file.write(b"1234")
    os.truncate(tmp_path / "a", 3)

    with pytest.raises(OSError, match="3 bytes are there, and 4 were written"):
        file.close()


def test_only_saves_of_the_dead_are_cleared(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    old = Commits(tmp_path, environment((5, 0), attempt=0))
    now = Commits(tmp_path, environment((5, 1), attempt=1))
    newer = Commits(tmp_path, environment((5, 2), attempt=2))
    for commits, name in ((old, "old"), (now, "now"), (newer, "newer")):
        directory = commits.in_flight(1, name)
        directory.mkdir(parents=True)
        commits.claim(directory)
    (checkpoints / ".tmp-step_00000001.unknown").mkdir()

    now.clear_leftovers()

    left = sorted(path.name.partition(".tmp-step_00000001.")[2] for path in checkpoints.iterdir())
    assert left == ["newer", "now", "unknown"]


# --- agreement and requests ----------------------------------------------------------------------------


@given(
    want=st.sampled_from(Want),
    deadline_at=st.none() | st.integers(0, 2**40).map(lambda ms: ms / 1000),
    request_id=st.integers(-1, 2**40),
    busy=st.booleans(),
)
def test_a_wish_survives_packing(want: Want, deadline_at: float | None, request_id: int, busy: bool) -> None:
    proposal = Proposal(want=want, deadline_at=deadline_at, request_id=request_id, busy=busy, failed_save=3, sequence=4)

    back = Proposal.unpack(proposal.pack())

    assert replace(back, deadline_at=deadline_at) == proposal
    if deadline_at is None:
        assert back.deadline_at is None
    else:
        assert deadline_at - 0.0011 <= back.deadline_at <= deadline_at, "never later than it is"


def test_the_earliest_deadline_wins() -> None:
    packed = [Proposal(deadline_at=when).pack() for when in (30.0, None, 20.0)]

    reduced = Proposal.unpack([max(column) for column in zip(*packed, strict=True)])

    assert reduced.deadline_at == 20.0


@pytest.mark.usefixtures("one_process")
def test_a_late_copy_of_a_request_is_no_second_request() -> None:
    """Each node's watcher sends it; one arrives after all ranks have agreed already."""
    with watcher_socket(f"late-{time.monotonic_ns()}") as sock:
        link = Link("@" + sock.getsockname()[1:].decode(), "0.0")
        link.send(messages.Progress(rank=0, step=1, tokens=1))
        _, address = sock.recvfrom(2048)
        requests = Requests(link)

        def ask(request_id: int) -> None:
            sock.sendto(messages.encode(messages.SaveRequest(request_id=request_id, stop=False)), address)
            requests.receive()
            requests.agree(Agreement(None, within_s=1.0).read(lambda: requests.propose(Proposal())))

        ask(4)
        assert requests.save_agreed
        requests.served()
        ask(4)
        assert not requests.save_agreed
        ask(5)
        assert requests.save_agreed
        assert not requests.stop_agreed


class _Clock:
    """The clock of link, requests and signals: it stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def _step(link: Link, requests: Requests) -> bool:
    """Do what a rank does at a boundary; true if it wants to stop."""
    link.send(messages.Progress(rank=0, step=1, tokens=1))
    requests.receive()
    return requests.propose(Proposal()).want is Want.STOP


@pytest.mark.usefixtures("one_process")
def test_a_signal_is_left_to_the_supervisor_while_its_watcher_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scancel -s TERM`, and much later a watcher dies and is restarted."""
    name = f"restarts-{time.monotonic_ns()}"
    clock = _Clock(monkeypatch)
    link = Link(f"@{name}", "0.0")
    requests = Requests(link)
    with watcher_socket(name):
        assert not _step(link, requests)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not _step(link, requests)
    clock.now += ALONE_AFTER_S - 1
    assert not _step(link, requests), "the watcher is away for the first time now"
    clock.now += ALONE_AFTER_S - 1
    assert not _step(link, requests)
    with watcher_socket(name):
        clock.now += 1.1
        assert not _step(link, requests), "it is back: the signal is forgotten"
    clock.now += 1.1
    assert not _step(link, requests)
    clock.now += 2 * ALONE_AFTER_S
    assert not _step(link, requests)

    os.kill(os.getpid(), signal.SIGTERM)

    assert _step(link, requests), "another signal, and the watcher has been away for long"


@pytest.mark.usefixtures("one_process")
def test_a_signal_is_obeyed_once_the_watcher_has_been_away_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"away-{time.monotonic_ns()}"
    clock = _Clock(monkeypatch)
    link = Link(f"@{name}", "0.0")
    requests = Requests(link)
    with watcher_socket(name):
        assert not _step(link, requests)
    assert not _step(link, requests)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not _step(link, requests)
    clock.now += ALONE_AFTER_S

    assert _step(link, requests)


@pytest.mark.usefixtures("one_process")
def test_a_signal_that_the_supervisor_did_not_act_upon_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"old-{time.monotonic_ns()}"
    clock = _Clock(monkeypatch)
    link = Link(f"@{name}", "0.0")
    requests = Requests(link)
    caplog.set_level(logging.INFO)
    with watcher_socket(name):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            assert not _step(link, requests)
        clock.now += SIGNAL_COUNTS_S + 1
        assert not _step(link, requests)
    for _ in range(2):
        clock.now += ALONE_AFTER_S + 1
        assert not _step(link, requests)

    assert [text.split()[0] for text in caplog.messages] == ["signal_heard", "signal_forgotten", "watcher_lost"]


@pytest.mark.usefixtures("one_process")
def test_a_repeated_request_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with watcher_socket(f"repeated-{time.monotonic_ns()}") as sock:
        link = Link("@" + sock.getsockname()[1:].decode(), "0.0")
        link.send(messages.Progress(rank=0, step=1, tokens=1))
        _, address = sock.recvfrom(2048)
        requests = Requests(link)
        for deadline_at in (None, None, 9.0, 9.0):
            request = messages.SaveRequest(request_id=4, stop=True, deadline_at=deadline_at)
            sock.sendto(messages.encode(request), address)
            requests.receive()

    assert [text.split()[0] for text in caplog.messages] == ["request_heard"] * 2, "its deadline was news"


# --- the socket ------------------------------------------------------------------------------------


def test_a_missing_or_full_socket_never_blocks() -> None:
    link = Link("@nobody-is-there", "0.0")
    started_at = time.monotonic()
    for step in range(1000):
        assert not link.send(messages.Progress(rank=0, step=step, tokens=0))
    assert link.dead
    with watcher_socket(f"full-{time.monotonic_ns()}") as sock:
        full = Link("@" + sock.getsockname()[1:].decode(), "0.0")
        sent = 0  # how much a socket takes is a matter of the machine's settings
        while full.send(messages.Progress(rank=0, step=sent, tokens=0)):
            sent += 1
        assert sent
        assert not full.dead
    assert time.monotonic() - started_at < HUNG_S  # one that blocked would wait for ever


def test_a_word_that_must_arrive_waits_for_the_watcher() -> None:
    name = f"kept-{time.monotonic_ns()}"
    link = Link(f"@{name}", "2.1")
    link.greet(messages.Hello(rank=0, world_size=1, pid=1, version="0"))
    link.send(messages.Finished(step=9), keep=True)
    with watcher_socket(name) as sock:
        assert link.flush(1.0)
        message = messages.decode_from_rank(sock.recv(2048))

    assert message == messages.Finished(step=9, launch="2.1")


def test_a_word_that_was_kept_goes_out_before_a_later_one() -> None:
    """By whichever thread: a save's end is told by the saves' thread, and its begin was kept by the main one."""
    with watcher_socket(f"in-order-{time.monotonic_ns()}") as sock:
        link = Link("@" + sock.getsockname()[1:].decode(), "0.0")
        while link.send(messages.Progress(rank=0, step=1, tokens=0)):
            pass  # the watcher is slow: its socket is full
        assert not link.dead
        assert not link.send(messages.SaveStarted(step=1, save_id="a", emergency=False), keep=True)
        with contextlib.suppress(TimeoutError):  # it has read all there is
            while True:
                assert isinstance(messages.decode_from_rank(sock.recv(2048)), messages.Progress)
        committed = messages.Committed(step=1, save_id="a", directory="step_00000001", bytes=1, seconds=0.1)
        assert link.send(committed, keep=True)
        assert link.flush(1.0)

        kinds = [type(messages.decode_from_rank(sock.recv(2048))) for _ in range(2)]

    assert kinds == [messages.SaveStarted, messages.Committed]


def test_nonsense_and_words_for_another_launch_are_skipped() -> None:
    with watcher_socket(f"nonsense-{time.monotonic_ns()}") as sock:
        link = Link("@" + sock.getsockname()[1:].decode(), "2.1")
        link.send(messages.Progress(rank=0, step=1, tokens=1))
        _, address = sock.recvfrom(2048)
        for data in (b"", b"\xff", b"[]", b'{"type":"dance"}', b'{"type":"save_request","request_id":"x"}'):
            sock.sendto(data, address)
        for launch in ("2.0", "2.1"):
            sock.sendto(messages.encode(messages.SaveRequest(launch=launch, request_id=1, stop=True)), address)

        assert [request.launch for request in link.receive()] == ["2.1"]
        assert link.receive() == []


# --- environment and metrics ---------------------------------------------------------------------------


def test_the_place_is_found_under_torchrun_srun_and_alone() -> None:
    assert find_place({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "7"}
    place = find_place(torchrun)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.master_address, place.master_port) == (
        3,
        4,
        1,
        "n1",
        7,
    )
    srun = {
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "9",
        "SLURM_STEP_ID": "1",
    }
    srun |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}
    place = find_place(srun)
    assert place is not None
    assert (place.rank, place.world_size, place.master_address, place.master_port) == (2, 4, "gpu07", 20280)
    batch_script = {name: value for name, value in srun.items() if name != "SLURM_STEP_ID"}
    assert find_place(batch_script) is None
    with pytest.raises(UsageError, match="belong together"):
        find_place({"RANK": "0"})
    with pytest.raises(UsageError, match="whole number"):
        find_place({"RANK": "zero", "WORLD_SIZE": "1"})


def test_the_environment_of_a_requeued_job() -> None:
    read = read_environment(
        {
            "SLURM_JOB_ID": "8",
            "SLURM_RESTART_COUNT": "2",
            "STEPKEEPER_SOCKET": "@s.%N",
            "SLURMD_NODENAME": "n3",
            "STEPKEEPER_RESUME_FROM": "",
        }
    )

    assert (read.epoch, read.attempt, read.launch_name, read.socket) == ((8, 2), 2, "2.0", "@s.n3")
    assert read.resume_from is None
    assert read_environment({}).epoch is None


def test_metrics_close_a_torn_line_and_read_back_exactly(tmp_path: Path) -> None:
    first = Metrics(tmp_path, 0, 0)
    first.row(1, 0.1 + 0.2, 10, 1e-3, None)
    assert first.finish()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,0.5,2")
    second = Metrics(tmp_path, 1, 2)
    second.row(2, 1 / 3, 20, 1e-3, 2.0)
    assert second.finish()

    lines = (tmp_path / "metrics.csv").read_text().splitlines()

    assert lines[0] == HEADER
    assert lines[2] == "2,0.5,2"
    assert float(lines[1].split(",")[1]) == 0.1 + 0.2
    assert float(lines[3].split(",")[1]) == 1 / 3
    assert lines[3].endswith(",1,2")


def test_metrics_on_a_hung_disk_block_nobody_and_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, works = os.write, threading.Event()

    def hung(descriptor: int, data: bytes) -> int:
        if "metrics" in os.readlink(f"/proc/self/fd/{descriptor}"):
            works.wait(HUNG_S)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", hung)
    metrics = Metrics(tmp_path, 0, 0)
    started_at = time.monotonic()
    for step in range(1000):
        metrics.row(step, float(step), step, None, None)
    assert not metrics.sync(time.time() + 0.4), "a save waits no longer than it can"
    assert time.monotonic() - started_at < HUNG_S / 2

    cancelled = threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    assert not metrics.sync(time.time() + HUNG_S, cancelled.is_set), "a snapshot that gives way waits no more"
    assert time.monotonic() - started_at < HUNG_S / 2

    works.set()

    assert metrics.sync()
    assert list(losses(tmp_path)) == list(range(1000))


@pytest.mark.parametrize("moved_away", [False, True])
def test_metrics_whose_file_went_stale_are_written_once_it_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved_away: bool
) -> None:
    metrics = Metrics(tmp_path, 0, 0)
    metrics.row(1, 1.0, 1, None, None)
    assert metrics.sync()
    path = tmp_path / "metrics.csv"
    inode, stale = path.stat().st_ino, set[int]()
    if moved_away:
        path.rename(tmp_path / "old.csv")
    write = os.write

    def of_a_restarted_server(descriptor: int, data: bytes) -> int:
        if os.fstat(descriptor).st_ino == inode:
            stale.update([] if stale else [descriptor])  # the one that was open as it restarted
            if descriptor in stale:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", of_a_restarted_server)
    metrics.row(2, 2.0, 2, None, None)

    assert metrics.sync()
    assert list(losses(tmp_path)) == ([2] if moved_away else [1, 2])


def test_rows_that_are_synced_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, synced = os.fsync, []

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.append(list(losses(tmp_path)))

    monkeypatch.setattr(os, "fsync", noted)
    metrics = Metrics(tmp_path, 0, 0)
    for step in range(1, 6):
        metrics.row(step, 1.0, step, None, None)
        assert metrics.sync()
        assert synced[-1] == list(range(1, step + 1))

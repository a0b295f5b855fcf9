"""The files and messages that ranks and supervisor share."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stepkeeper_trainer.formats import durable, lease, lineage, messages, records
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, ManifestError, read_manifest, seal, unseal
from stepkeeper_trainer.formats.steps import current_lineage, list_steps, newest_verified
from stepkeeper_trainer.formats.verify import verify
from tests import dcp_files

CHUNK = 8


def make_step(
    checkpoints: Path,
    step: int,
    save_id: str | None = None,
    parent: str | None = None,
    name: str | None = None,
) -> Path:
    """Commit a step directory by hand, of files with chunks of eight bytes."""
    directory = checkpoints / (name or f"step_{step:08d}")
    directory.mkdir(parents=True)
    files = {}
    weights = b"weights and moments " * 3
    plan = dcp_files.metadata({"weights": [dcp_files.Piece((0,), (60,), "__0_0.distcp", 0, 60)]})
    for file, data in {"__0_0.distcp": weights, ".metadata": plan}.items():
        (directory / file).write_bytes(data)
        chunks = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
        files[file] = FileEntry(
            bytes=len(data),
            xxh3_128=xxhash.xxh3_128_hexdigest(data),
            chunk_bytes=CHUNK,
            chunks=tuple(xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks),
        )
    manifest = Manifest(
        step=step,
        tokens=step * 10,
        world_size=1,
        created_at=f"2026-01-01T00:00:{len(list(checkpoints.iterdir())):02d}+00:00",
        save_id=save_id or f"{step:032x}",
        parent=parent,
        files=files,
    )
    (directory / "MANIFEST.json").write_bytes(seal(manifest))
    return directory


def replace_metadata(step: Path, data: bytes) -> None:
    """Put another `.metadata` into a step directory, and into its manifest."""
    (step / ".metadata").write_bytes(data)
    digest = xxhash.xxh3_128_hexdigest(data)
    entry = FileEntry(bytes=len(data), xxh3_128=digest, chunk_bytes=len(data), chunks=(digest,))
    manifest = read_manifest(step)
    files = {**manifest.files, ".metadata": entry}
    (step / "MANIFEST.json").write_bytes(seal(msgspec.structs.replace(manifest, files=files)))


def chosen(checkpoints: Path) -> str | None:
    found = newest_verified(checkpoints).chosen
    return found.path.name if found else None


def test_the_formats_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, stepkeeper_trainer.formats.steps, stepkeeper_trainer.formats.messages\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=90)


def test_a_replaced_file_is_old_or_new_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    durable.write_atomically(tmp_path / "a", b"old")
    durable.write_atomically(tmp_path / "a", b"new", mode=0o640)

    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["a"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable.write_atomically(tmp_path / "a", b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="No space"):
        durable.write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_torn_line_is_closed_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"whole": 1}\n{"torn"')

    durable.append_line(path, b'{"next": 1}')

    assert path.read_bytes() == b'{"whole": 1}\n{"torn"\n{"next": 1}\n'


def test_lineage_skips_torn_and_unknown_lines_and_follows_parents(tmp_path: Path) -> None:
    def commit(step: int, save_id: str, parent: str | None) -> None:
        lineage.append(
            tmp_path,
            lineage.Commit(at=1.0, step=step, save_id=save_id, parent=parent, directory=f"step_{step:08d}"),
        )

    commit(1, "a", None)
    with (tmp_path / "lineage.jsonl").open("ab") as file:
        file.write(b'{"record":"of the future","x":1}\n[3]\n{"record":"commit","st')
    commit(2, "b", "a")
    lineage.append(tmp_path, lineage.Rollback(at=2.0, save_id="a", why="poison"))
    commit(2, "c", "a")
    lineage.append(tmp_path, lineage.Mark(at=3.0, save_id="c", mark="suspect"))
    lineage.append(tmp_path, lineage.Mark(at=3.0, save_id="c", mark="pinned"))
    lineage.append(tmp_path, lineage.Mark(at=4.0, save_id="c", mark="suspect", value=False))

    found = lineage.read(tmp_path)

    assert found is not None
    assert found.chain() == ["c", "a"]
    assert found.marks == {"c": frozenset({"pinned"})}
    assert set(found.commits) == {"a", "b", "c"}


def _committed(checkpoints: Path, step: int, parent: int | None, attempt: int) -> None:
    before = f"s{parent}" if parent is not None else None
    name = f"step_{step:08d}"
    lineage.append(
        checkpoints,
        lineage.Commit(at=1.0, attempt=attempt, step=step, save_id=f"s{step}", parent=before, directory=name),
    )


def _chain(checkpoints: Path) -> list[str]:
    found = lineage.read(checkpoints)
    assert found is not None
    return found.chain()


def test_a_late_commit_of_a_fenced_attempt_is_beside_the_state(tmp_path: Path) -> None:
    """It checks the fence, renames and writes its line: the newer attempt may commit between any two of these."""
    _committed(tmp_path, 100, None, 0)
    _committed(tmp_path, 110, 100, 1)
    _committed(tmp_path, 105, 100, 0)

    assert _chain(tmp_path) == ["s110", "s100"]
    _committed(tmp_path, 106, 105, 0)
    assert _chain(tmp_path) == ["s110", "s100"], "nor what came after it"
    _committed(tmp_path, 120, 110, 1)
    assert _chain(tmp_path) == ["s120", "s110", "s100"]


def test_a_late_commit_takes_back_no_rollback(tmp_path: Path) -> None:
    _committed(tmp_path, 100, None, 0)
    _committed(tmp_path, 110, 100, 1)
    lineage.append(tmp_path, lineage.Rollback(at=2.0, attempt=1, save_id="s100", why="loss"))
    _committed(tmp_path, 112, 111, 0)

    found = lineage.read(tmp_path)
    assert found is not None
    assert found.head == "s100"
    assert found.rolled_back_at == 2.0


def test_a_commit_that_a_rollback_has_left_out_does_not_come_back_late(tmp_path: Path) -> None:
    """Its line took long: meanwhile a newer attempt went back to the very step that it follows on."""
    _committed(tmp_path, 100, None, 0)
    lineage.append(tmp_path, lineage.Rollback(at=2.0, attempt=1, save_id="s100", why="loss"))
    _committed(tmp_path, 105, 100, 0)

    found = lineage.read(tmp_path)
    assert found is not None
    assert (found.head, found.rolled_back_at) == ("s100", 2.0)
    lineage.append(tmp_path, lineage.Commit(at=3.0, step=103, save_id="s103", parent="s100", directory="step_103"))
    assert _chain(tmp_path) == ["s103", "s100"], "a second job without a supervisor counts from 0"


def test_attempts_that_are_counted_anew_go_on_from_the_head(tmp_path: Path) -> None:
    """Without a supervisor, an attempt is a restart of its job: a second job begins with 0."""
    _committed(tmp_path, 100, None, 2)
    _committed(tmp_path, 110, 100, 0)
    _committed(tmp_path, 120, 110, 0)

    assert _chain(tmp_path) == ["s120", "s110", "s100"]


def test_what_was_pruned_takes_no_memory_where_nobody_asks_for_it(tmp_path: Path) -> None:
    """Rank 0 reads the lineage after each save of a run of weeks: what it holds is that of the steps that are there."""

    def grow(first: int, count: int) -> int:
        lines = []
        for step in range(first, first + count):
            save_id, parent = f"{step:032x}", f"{step - 1:032x}" if step else None
            name = f"step_{step:08d}"
            commit = lineage.Commit(at=1.0, step=step, save_id=save_id, parent=parent, directory=name)
            lines.append(lineage._summed(msgspec.json.encode(commit)[:-1]))
            if step >= 3 and step % 1000:
                mark = lineage.Mark(at=1.0, save_id=f"{step - 3:032x}", mark=lineage.PRUNED)
                lines.append(lineage._summed(msgspec.json.encode(mark)[:-1]))
        with (tmp_path / lineage.LINEAGE_NAME).open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))
        peaks = []
        for _ in range(3):  # threads of tests before may allocate at the same time
            tracemalloc.start()
            found = lineage.read(tmp_path, pruned=False)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert found is not None
        assert len(found.commits) < 100
        whole = lineage.read(tmp_path)
        assert whole is not None
        assert found.chain() == [save_id for save_id in whole.chain() if save_id in found.commits]
        return min(peaks)

    short = grow(0, 4000)
    long = grow(4000, 12_000)

    assert long < 1.2 * short
    assert long < 2_000_000


def test_no_lineage_file_is_no_lineage(tmp_path: Path) -> None:
    assert lineage.read(tmp_path) is None


def test_messages_of_another_version_are_understood_or_skipped() -> None:
    newer = b'{"type":"progress","rank":1,"step":2,"tokens":3,"colour":"green"}'

    assert messages.decode_from_rank(newer) == messages.Progress(rank=1, step=2, tokens=3)
    assert messages.decode_from_rank(b'{"type":"of the future"}') is None
    assert messages.decode_from_rank(b'{"type":"progress","rank":"one"}') is None
    assert messages.decode_to_rank(b'{"type":"dance"}') is None
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_to_rank(b"\xff\x00")


@given(text=st.text())
def test_any_text_fits_a_message(text: str) -> None:
    """Also one whose characters take many bytes."""
    message = messages.SaveFailed(launch="1.1", step=1, save_id="f" * 32, error=messages.shorten(text))

    assert len(messages.encode(message)) <= messages.MESSAGE_BYTES_MAX


def test_a_message_of_the_widest_characters_fits() -> None:
    for character in ("\U0001f600", "\x01", '"', "\\", "\udfff"):
        text = messages.shorten(character * 1000)
        message = messages.SaveFailed(launch="1.1", step=1, save_id="f" * 32, error=text)
        assert len(messages.encode(message)) <= messages.MESSAGE_BYTES_MAX


def test_a_manifest_reads_back_and_one_changed_byte_is_seen() -> None:
    manifest = Manifest(
        step=1,
        tokens=2,
        world_size=1,
        created_at="now",
        save_id="a" * 32,
        files={},
        loss=0.1,
        state={"model": True},
    )
    data = seal(manifest)

    read = unseal(data, source="x")

    assert (read.step, read.loss, read.state) == (1, 0.1, {"model": True})
    for index in range(len(data)):
        damaged = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        with pytest.raises(ManifestError):
            unseal(damaged, source="x")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a/./b", "a\0b"])
def test_a_manifest_that_leads_outside_is_refused(name: str, tmp_path: Path) -> None:
    entry = FileEntry(bytes=0, xxh3_128=xxhash.xxh3_128_hexdigest(b""))
    manifest = Manifest(step=2, tokens=0, world_size=1, created_at="", save_id="b" * 32, files={name: entry})
    make_step(tmp_path, 1)
    bad = tmp_path / "step_00000002"
    bad.mkdir()
    (bad / "MANIFEST.json").write_bytes(seal(manifest))

    with pytest.raises(ManifestError, match="inside the step directory"):
        unseal(seal(manifest), source="x")
    assert chosen(tmp_path) == "step_00000001"
    assert bad.is_dir()


def _flip(step: Path) -> None:
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[30] ^= 0x10
    (step / "__0_0.distcp").write_bytes(data)


def _link(step: Path) -> None:
    (step / "__0_0.distcp").rename(step.parent / "elsewhere")
    (step / "__0_0.distcp").symlink_to(step.parent / "elsewhere")


DAMAGE = {
    "manifest-less": lambda step: (step / "MANIFEST.json").unlink(),
    "torn manifest": lambda step: os.truncate(step / "MANIFEST.json", 100),
    "empty manifest": lambda step: os.truncate(step / "MANIFEST.json", 0),
    "truncated": lambda step: os.truncate(step / "__0_0.distcp", 10),
    "bit-flipped": _flip,
    "missing file": lambda step: (step / ".metadata").unlink(),
    "extra file": lambda step: (step / "__1_0.distcp").write_bytes(b"orphan"),
    "link": _link,
    "of another step": lambda step: step.rename(step.parent / "step_00000003"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_step_is_skipped_and_kept(damage: str, tmp_path: Path) -> None:
    make_step(tmp_path, 1)
    DAMAGE[damage](make_step(tmp_path, 2))

    choice = newest_verified(tmp_path)

    assert choice.chosen is not None
    assert choice.chosen.step == 1
    [(skipped, problems)] = choice.skipped
    assert problems
    assert skipped.path.is_dir()


def test_a_save_in_flight_is_no_step(tmp_path: Path) -> None:
    make_step(tmp_path, 1, name=".tmp-step_00000001.abc")

    assert list_steps(tmp_path) == []
    assert chosen(tmp_path) is None


def test_only_the_current_lineage_counts(tmp_path: Path) -> None:
    """After a rollback from 3 to 1 and a replay to 2, step 3 is of the past that did not happen."""
    ids = {"1": "a" * 32, "2": "b" * 32, "3": "c" * 32, "2 again": "d" * 32}
    make_step(tmp_path, 1, ids["1"])
    make_step(tmp_path, 2, ids["2"], parent=ids["1"])
    make_step(tmp_path, 3, ids["3"], parent=ids["2"])
    assert chosen(tmp_path) == "step_00000003", "without a lineage every directory counts"
    for step, key, parent in ((1, "1", None), (2, "2", "1"), (3, "3", "2")):
        lineage.append(
            tmp_path,
            lineage.Commit(
                at=1.0,
                step=step,
                save_id=ids[key],
                parent=ids.get(parent or ""),
                directory=f"step_{step:08d}",
            ),
        )
    lineage.append(tmp_path, lineage.Rollback(at=2.0, save_id=ids["1"], why="poison"))
    assert chosen(tmp_path) == "step_00000001"

    make_step(tmp_path, 2, ids["2 again"], parent=ids["1"], name="step_00000002.dddddddd")

    assert chosen(tmp_path) == "step_00000002.dddddddd", "renamed, and its writer died before the lineage line"
    kept = current_lineage(list_steps(tmp_path), lineage.read(tmp_path))
    assert [step.path.name for step in kept] == ["step_00000002.dddddddd", "step_00000001"]


def test_a_shallow_look_reads_no_data(tmp_path: Path) -> None:
    step = make_step(tmp_path, 1)
    _flip(step)

    assert verify(step, deep=False).ok
    assert verify(step, deep=False).bytes_read == 0
    assert not verify(step).ok


def test_lease_and_outcome_read_back(tmp_path: Path) -> None:
    assert lease.read(tmp_path) is None
    assert records.read_outcome(tmp_path) is None
    held = lease.Lease(job_id=7, restart_count=2, attempt=2, node="n1", pid=3, taken_at=1.0)
    said = records.Outcome(outcome="stopped", step=3, tokens=4, save_id=None, launch="2.0", at=1.0)
    lease.write(tmp_path, held)
    records.write_outcome(tmp_path, said)

    assert lease.read(tmp_path) == held
    assert held.epoch == (7, 2)
    assert records.read_outcome(tmp_path) == said
    (tmp_path / "lease.json").write_text("{}")
    with pytest.raises(lease.LeaseError, match="remove the file"):
        lease.read(tmp_path)


NOT_UTF_8 = b'"\xff"'
TOO_DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("bad", [NOT_UTF_8, TOO_DEEP], ids=["not UTF-8", "nested too deep"])
def test_bytes_that_are_no_text_are_refused_like_any_other_damage(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "lease.json").write_bytes(
        b'{"job_id":1,"restart_count":0,"attempt":0,"pid":1,"taken_at":1.0,"node":%b}' % bad
    )
    with pytest.raises(lease.LeaseError, match="not a lease"):
        lease.read(tmp_path)
    (tmp_path / "outcome.json").write_bytes(b'{"outcome":"stopped","step":1,"tokens":1,"save_id":%b}' % bad)
    with pytest.raises(records.RecordError, match="not an outcome") as caught:
        records.read_outcome(tmp_path)
    assert isinstance(caught.value, msgspec.MsgspecError), "what the supervisor catches"
    for read in (messages.decode_from_rank, messages.decode_to_rank):
        with pytest.raises(msgspec.MsgspecError):
            read(b'{"type":%b}' % bad)

    lineage.append(tmp_path, lineage.Commit(at=1.0, step=1, save_id="a", parent=None, directory="step_00000001"))
    with (tmp_path / "lineage.jsonl").open("ab") as file:
        file.write(b'{"record":"rollback","at":1,"save_id":null,"why":%b}\n' % bad)
    found = lineage.read(tmp_path)
    assert found is not None
    assert found.chain() == ["a"]

    sealed = seal(Manifest(step=2, tokens=0, world_size=1, created_at="WHEN", save_id="b" * 32, files={}))
    data = _sealed_again(sealed.replace(b'"WHEN"', bad))
    with pytest.raises(ManifestError, match="not a manifest"):
        unseal(data, source="x")
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / "MANIFEST.json").write_bytes(data)
    assert chosen(tmp_path) is None


def _sealed_again(data: bytes) -> bytes:
    """Put the right digest into a manifest that was changed."""
    head, field, _ = data.rpartition(b'"manifest_xxh3_128":"')
    digest = xxhash.xxh3_128_hexdigest(head + field + b'"}').encode()
    return head + field + digest + b'"}'


def test_a_newer_format_is_named_whatever_else_has_changed(tmp_path: Path) -> None:
    newer = b'{"format":2,"epoch":[7,2],"step":"3"}'
    (tmp_path / "lease.json").write_bytes(newer)
    (tmp_path / "outcome.json").write_bytes(newer)

    with pytest.raises(lease.LeaseError, match=r"lease.json: format 2 is newer .* upgrade Stepkeeper$"):
        lease.read(tmp_path)
    with pytest.raises(records.RecordError, match=r"outcome.json: format 2 is newer .* upgrade Stepkeeper$"):
        records.read_outcome(tmp_path)
    with pytest.raises(ManifestError, match=r"x: format 2 is newer .* upgrade Stepkeeper$"):
        unseal(newer, source="x")
    sealed = seal(Manifest(format=2, step=2, tokens=0, world_size=1, created_at="", save_id="b" * 32, files={}))
    with pytest.raises(ManifestError, match="upgrade Stepkeeper"):
        unseal(sealed, source="x")


@pytest.mark.parametrize("format_", [b"0", b'"two"'])
def test_a_format_that_never_was_is_damage(tmp_path: Path, format_: bytes) -> None:
    (tmp_path / "lease.json").write_bytes(
        b'{"format":%b,"job_id":1,"restart_count":0,"attempt":0,"pid":1,"taken_at":1.0,"node":"n"}' % format_
    )
    (tmp_path / "outcome.json").write_bytes(
        b'{"format":%b,"outcome":"stopped","step":1,"tokens":1,"save_id":null,"launch":"","at":1}' % format_
    )
    sealed = seal(Manifest(step=2, tokens=0, world_size=1, created_at="", save_id="b" * 32, files={}))

    with pytest.raises(lease.LeaseError, match="not a lease"):
        lease.read(tmp_path)
    with pytest.raises(records.RecordError, match="not an outcome"):
        records.read_outcome(tmp_path)
    with pytest.raises(ManifestError, match="format"):
        unseal(_sealed_again(sealed.replace(b'"format":1', b'"format":%b' % format_)), source="x")

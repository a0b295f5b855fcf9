"""Pointer files are put right by one rename, torn checkpoints are put aside; what is not ours or not sure is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.frameworks import recognise
from stepkeeper_trainer.formats import durable
from tests.frameworks import layouts
from tests.frameworks.layouts import LAYOUTS
from tests.frameworks.test_layouts import Command, built, command, copied, home

__all__ = ["built", "command", "home"]

TRACKER, STATE = "latest_checkpointed_iteration.txt", "latest_train_state.pt"
POINTED = {
    "deepspeed-0": ("latest",),
    "deepspeed-1": ("latest",),
    "deepspeed-3": ("latest",),
    "deepspeed-pipeline": ("latest",),
    "deepspeed-pipeline-0": ("latest",),
    "deepspeed-pipeline-tensor": ("latest",),
    "deepspeed-experts": ("latest",),
    "deepspeed-experts-0": ("latest",),
    "deepspeed-universal": ("latest_universal",),
    "megatron": (TRACKER,),
    "megatron-common-in-dcp": (TRACKER,),
    "megatron-integrity": (TRACKER,),
    "megatron-legacy": (TRACKER,),
    "megatron-bridge": (TRACKER, STATE),
}
STRANGER = 12345


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let all files be of an hour ago; a test that is about a run in progress takes that back."""
    real = time.time
    monkeypatch.setattr("stepkeeper.frameworks.repair.time.time", lambda: real() + 3600)
    return lambda: monkeypatch.setattr("stepkeeper.frameworks.repair.time.time", real)


@pytest.fixture
def megatron(built: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a directory whose newest checkpoint is torn, and its tracker names it."""
    root = copied(built("megatron"), tmp_path)
    (root / "iter_0000200/metadata.json").unlink()
    return root


def repaired(command: Command, root: Path, *options: str) -> tuple[int, dict]:
    code, out, err = command("repair", root, "--json", *options)
    assert out, err
    return code, json.loads(out)


def everything(root: Path) -> dict[str, object]:
    return {
        str(path.relative_to(root)): (os.lstat(path).st_ino, path.is_file() and path.read_bytes())
        for path in sorted(root.rglob("*"))
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_directory_that_is_right_is_left_alone(
    name: str, built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built(name), tmp_path)
    for path in POINTED.get(name, ()):
        if not (root / path).exists():  # the layout has none
            (root / path).write_text("200" if path == TRACKER else "global_step200")
    before = everything(root)

    code, found = repaired(command, root, "--apply", "--quarantine")

    assert (code, found["torn"]) == (0, []), found
    assert {row["path"]: row["state"] for row in found["pointers"]} == dict.fromkeys(POINTED.get(name, ()), "right")
    assert everything(root) == before


@pytest.mark.parametrize("name", POINTED)
def test_a_pointer_to_a_torn_checkpoint_is_rewritten_to_the_newest_verified_one(
    name: str, built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built(name), tmp_path)
    layouts_of = {step: next(root.glob(f"*{step}*")) for step in (100, 200)}
    framework = recognise.known()[LAYOUTS[name].framework]
    steps = {each.path: each for each in framework.list_steps(root)}
    for path, data in framework.pointers(steps[layouts_of[200]]).items():
        path.write_bytes(data)
    wanted = framework.pointers(steps[layouts_of[100]])
    shards = [path for path in layouts_of[200].rglob("*") if path.suffix in {".pt", ".distcp"}]
    torn = max(shards, key=lambda path: path.stat().st_size)
    torn.write_bytes(torn.read_bytes()[:-100])
    before = everything(root)

    code, found = repaired(command, root)

    assert code == ExitCode.NOT_VERIFIED
    assert everything(root) == before, "dry by default"
    assert {row["path"]: (row["state"], row["action"]) for row in found["pointers"]} == dict.fromkeys(
        POINTED[name], ("torn", "would")
    )
    code, found = repaired(command, root, "--apply")
    assert (code, [row["action"] for row in found["pointers"]]) == (0, ["done"] * len(POINTED[name])), found
    assert {path: path.read_bytes() for path in wanted} == dict(wanted)
    assert layouts_of[200].exists(), "renamed only with --quarantine"
    assert repaired(command, root)[0] == 0


@pytest.mark.parametrize(
    ("text", "state"),
    [("100", "older"), ("300", "unknown"), ("", "unknown"), ("x\n\x1b[31m", "unknown"), (None, "missing")],
)
def test_what_else_a_pointer_may_hold(
    text: str | None, state: str, built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("megatron"), tmp_path)
    (root / TRACKER).unlink()
    if text is not None:
        (root / TRACKER).write_text(text)
        (root / TRACKER).chmod(0o640)

    code, found = repaired(command, root, "--apply")

    assert (code, found["pointers"][0]["state"]) == (0, state)
    assert (root / TRACKER).read_text() == "200"
    assert (root / TRACKER).stat().st_mode & 0o777 == (0o640 if text is not None else 0o644)


def test_damaged_bytes_count_and_the_checkpoint_is_put_aside(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("deepspeed-1"), tmp_path)
    path = root / "global_step200/mp_rank_00_model_states.pt"
    data = bytearray(path.read_bytes())
    data[data.find(layouts.tensor().numpy().tobytes()[:64]) + 5] ^= 4
    path.write_bytes(data)

    code, found = repaired(command, root, "--apply", "--quarantine")

    assert (code, (root / "latest").read_text()) == (0, "global_step100"), found
    assert [row["to"] for row in found["torn"]] == [".corrupt-damaged-global_step200"]
    assert (root / ".corrupt-damaged-global_step200").is_dir()
    assert [row["checkpoint"] for row in json.loads(command("ls", root, "--json")[1])["steps"]] == ["global_step100"]
    assert repaired(command, root, "--apply", "--quarantine")[0] == 0


def test_both_pointers_of_deepspeed_are_of_checkpoints_of_their_kind(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("deepspeed-1"), tmp_path)
    layouts.deepspeed_universal(root, 150)
    (root / "latest").write_text("global_step300")
    (root / "latest_universal").write_text("global_step300_universal")

    assert repaired(command, root, "--apply")[0] == 0

    assert (root / "latest").read_text() == "global_step200"
    assert (root / "latest_universal").read_text() == "global_step150_universal"


def test_nothing_is_changed_where_no_checkpoint_is_whole(megatron: Path, command: Command) -> None:
    (megatron / "iter_0000100/metadata.json").unlink()  # as a format that is not supported looks
    before = everything(megatron)

    code, found = repaired(command, megatron, "--apply", "--quarantine")

    assert (code, found["newest"]) == (1, None)
    assert everything(megatron) == before


def test_a_run_in_progress_is_left_alone_unless_asked(
    megatron: Path, command: Command, later: Callable[[], None]
) -> None:
    later()
    before = everything(megatron)
    for _ in range(2):
        code, found = repaired(command, megatron, "--apply")
        assert (code, found["pointers"][0]["action"]) == (ExitCode.NOT_VERIFIED, "refused")
        assert "--allow-recent" in found["pointers"][0]["words"]
        assert everything(megatron) == before

    code, found = repaired(command, megatron, "--apply", "--quarantine", "--allow-recent")

    assert (megatron / TRACKER).read_text() == "100"
    assert (found["torn"], (megatron / "iter_0000200").is_dir()) == ([], True), "perhaps still being written"


@pytest.mark.parametrize("name", ["torchtitan", "accelerate"])
def test_a_new_name_that_the_framework_would_find_is_refused(
    name: str, built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built(name), tmp_path)
    newest = next(path for path in root.rglob("*200") if path.is_dir())
    next(path for path in newest.iterdir() if path.name in {".metadata", "optimizer.bin"}).unlink()

    code, found = repaired(command, root, "--apply", "--quarantine")

    assert (code, found["torn"][0]["action"], newest.is_dir()) == (ExitCode.NOT_VERIFIED, "refused", True)
    assert "by a part of the name" in found["torn"][0]["words"]


def test_a_single_file_is_put_aside_too(built: Callable[[str], Path], command: Command, tmp_path: Path) -> None:
    root = copied(built("lightning"), tmp_path)
    newest = next(root.rglob("*200.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-100])

    code, found = repaired(command, root, "--apply", "--quarantine")

    assert (code, found["pointers"]) == (0, [])
    assert newest.with_name(f".corrupt-incomplete-{newest.name}").is_file()


def _link(root: Path) -> None:
    (root / "elsewhere").write_text("200")
    (root / TRACKER).unlink()
    (root / TRACKER).symlink_to("elsewhere")


def _hard_link(root: Path) -> None:
    os.link(root / TRACKER, root / "elsewhere")


def _directory(root: Path) -> None:
    (root / TRACKER).unlink()
    (root / TRACKER).mkdir()


def _pipe(root: Path) -> None:
    (root / TRACKER).unlink()
    os.mkfifo(root / TRACKER)


def _huge(root: Path) -> None:
    os.truncate(root / TRACKER, 2**30)


def _strangers(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(root / TRACKER, STRANGER, STRANGER)


@pytest.mark.parametrize("spoil", [_link, _hard_link, _directory, _pipe, _huge, _strangers])
def test_a_pointer_that_is_no_plain_file_of_ours_is_refused_and_nothing_is_put_aside(
    spoil: Callable[[Path], None], megatron: Path, command: Command
) -> None:
    spoil(megatron)

    code, found = repaired(command, megatron, "--apply", "--quarantine")

    assert (code, found["pointers"][0]["action"]) == (ExitCode.NOT_VERIFIED, "refused"), found
    assert (found["torn"][0]["action"], (megatron / "iter_0000200").is_dir()) == ("refused", True)
    if spoil is _link:
        assert (megatron / "elsewhere").read_text() == "200"
        assert (megatron / TRACKER).is_symlink()


def test_the_owner_of_a_pointer_stays_the_owner(megatron: Path, command: Command) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for path in (megatron, *megatron.rglob("*")):
        os.chown(path, STRANGER, STRANGER + 1)

    assert repaired(command, megatron, "--apply", "--quarantine")[0] == 0

    status = (megatron / TRACKER).stat()
    assert (status.st_uid, status.st_gid) == (STRANGER, STRANGER + 1)


def test_a_directory_that_may_not_be_written_is_refused(
    megatron: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:  # another user may not enter tmp_path
        monkeypatch.setenv("HOME", place)
        root = Path(place) / "out"
        shutil.copytree(megatron, root)
        os.chown(root / TRACKER, STRANGER, STRANGER)
        Path(place).chmod(0o755)
        root.chmod(0o755)
        os.seteuid(STRANGER)
        try:
            code, found = repaired(command, root, "--apply", "--quarantine")
        finally:
            os.seteuid(0)
        assert (code, "Permission denied" in found["pointers"][0]["words"]) == (ExitCode.NOT_VERIFIED, True), found
        assert ((root / TRACKER).read_text(), (root / "iter_0000200").is_dir()) == ("200", True)


def test_a_checkpoint_with_a_link_in_it_is_not_put_aside(megatron: Path, command: Command) -> None:
    (megatron / "iter_0000200/metadata.json").symlink_to("/tmp/nothing")

    code, found = repaired(command, megatron, "--apply", "--quarantine")

    assert (code, (megatron / TRACKER).read_text()) == (ExitCode.NOT_VERIFIED, "100")
    assert (found["torn"][0]["action"], (megatron / "iter_0000200").is_dir()) == ("refused", True)


@pytest.mark.parametrize("changed", ["iter_0000100/common.pt", TRACKER, "iter_0000200/common.pt"])
def test_what_changed_after_it_was_judged_is_not_touched(
    changed: str, megatron: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepkeeper.frameworks import repair  # noqa: PLC0415

    look = repair.look

    def and_change(*arguments: object) -> repair.Findings:
        found = look(*arguments)  # type: ignore[arg-type]
        with (megatron / changed).open("ab") as file:
            file.write(b" ")
        return found

    monkeypatch.setattr(repair, "look", and_change)
    code, found = repaired(command, megatron, "--apply", "--quarantine")

    assert code == ExitCode.NOT_VERIFIED
    assert "was changed since it was" in json.dumps(found)
    assert (megatron / "iter_0000200").is_dir()
    assert (megatron / TRACKER).read_text().strip() == ("100" if changed.startswith("iter_0000200") else "200")


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_killed_before_the_rename_leaves_the_old_pointer(call: str, megatron: Path, command: Command) -> None:
    child = os.fork()
    if child == 0:
        setattr(durable.os, call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            command("repair", megatron, "--apply")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    assert (megatron / TRACKER).read_text() == "200"
    assert repaired(command, megatron, "--apply")[0] == 0
    assert (megatron / TRACKER).read_text() == "100"


def test_our_own_directories_have_no_pointers(command: Command, tmp_path: Path) -> None:
    from tests.reading import build  # noqa: PLC0415

    code, _, err = command("repair", build.make_run(tmp_path / "my-run").path, "--apply")

    assert (code, "--framework" in err) == (ExitCode.USAGE, True)
    shutil.rmtree(tmp_path / "my-run")
    assert command("repair", tmp_path / "my-run")[0] == ExitCode.USAGE

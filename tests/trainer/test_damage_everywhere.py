"""What `test_damage` proves of the checks, as people and programs meet it: a step of real ranks, every reader of it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.verify import ShardReader
from stepkeeper_trainer.formats.manifest import FileEntry, read_manifest, seal
from stepkeeper_trainer.formats.steps import newest_verified
from stepkeeper_trainer.formats.verify import join_shards, verify, verify_shard
from stepkeeper_trainer.tiers import DirectoryTier, copy_step
from tests.trainer.ranks import ROOT, Ranks
from tests.trainer.steps_by_dcp import entry
from tests.trainer.test_verify_metadata import ATTACKS

NOT_VERIFIED = 41
LIMIT_S = 150.0


@pytest.fixture
def checkpoints(uninterrupted: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    """The checkpoints of a run of two ranks."""
    return Path(shutil.copytree(uninterrupted[0], tmp_path / "run")) / "checkpoints"


def two_newest(checkpoints: Path) -> tuple[Path, Path]:
    newer, older = sorted(checkpoints.glob("step_*"))[:-3:-1]
    return newer, older


def stepkeeper(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from stepkeeper.entry import main; sys.exit(main())", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "trainer"), str(ROOT / "supervisor")])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [value] = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ bit]))


@pytest.mark.campaign
def test_a_flip_anywhere_in_a_step_of_two_ranks_is_found(checkpoints: Path) -> None:
    step, older = two_newest(checkpoints)
    dice = random.Random(7)  # noqa: S311  # the same places each time
    kinds = {re.sub(r"\d+", "N", name) for name in os.listdir(step)}
    assert kinds == {".metadata", "MANIFEST.json", "__N_N.distcp", "values.bin"}
    for name in sorted(os.listdir(step)):
        size = os.path.getsize(step / name)
        for at in {0, size - 1, *(dice.randrange(size) for _ in range(25))}:
            bit = 1 << dice.randrange(8)
            flip(step / name, at, bit)

            assert not verify(step).ok, f"byte {at} of {name}"

            flip(step / name, at, bit)
        flip(step / name, size // 2, 0x20)
        said = stepkeeper("checkpoints", "verify", step)
        assert said.returncode == NOT_VERIFIED, said.stderr
        assert name in said.stdout
        assert newest_verified(checkpoints).chosen.path == older  # type: ignore[union-attr]
        flip(step / name, size // 2, 0x20)
    assert stepkeeper("checkpoints", "verify", step).returncode == 0


# Files ------------------------------------------------------------------------------------------------------------


def truncated(step: Path, _older: Path) -> str:
    os.truncate(step / "__1_0.distcp", os.path.getsize(step / "__1_0.distcp") - 1)
    return "__1_0.distcp"


def missing(step: Path, _older: Path) -> str:
    (step / "__1_0.distcp").unlink()
    return "__1_0.distcp"


def extra(step: Path, _older: Path) -> str:
    (step / "__2_0.distcp").write_bytes(b"of another world size")
    return "__2_0.distcp"


def swapped(step: Path, _older: Path) -> str:
    (step / "__0_0.distcp").rename(step / "aside")
    (step / "__1_0.distcp").rename(step / "__0_0.distcp")
    (step / "aside").rename(step / "__1_0.distcp")
    return "__0_0.distcp"


def chimera(step: Path, older: Path) -> str:
    """Rank 1's bytes are of another save; names, sizes and the plan fit."""
    shutil.copyfile(older / "__1_0.distcp", step / "__1_0.distcp")
    return "__1_0.distcp"


def stale_manifest(step: Path, older: Path) -> str:
    shutil.copyfile(older / "MANIFEST.json", step / "MANIFEST.json")
    return "distcp"


def stale_plan(step: Path, older: Path) -> str:
    shutil.copyfile(older / ".metadata", step / ".metadata")
    return ".metadata"


def pipe(step: Path, _older: Path) -> str:
    """Whoever opens it without a thought waits for ever."""
    (step / "__1_0.distcp").unlink()
    os.mkfifo(step / "__1_0.distcp")
    return "__1_0.distcp"


def pipe_for_the_manifest(step: Path, _older: Path) -> str:
    (step / "MANIFEST.json").unlink()
    os.mkfifo(step / "MANIFEST.json")
    return "MANIFEST.json"


def link(step: Path, older: Path) -> str:
    """The bytes are right, and are those of a file outside that anybody may change or remove."""
    shutil.move(step / "__1_0.distcp", older.parent / "aside")
    (step / "__1_0.distcp").symlink_to("../aside")
    return "__1_0.distcp"


DAMAGES = [truncated, missing, extra, swapped, chimera, stale_manifest, stale_plan, pipe, pipe_for_the_manifest, link]


@pytest.mark.campaign
def test_the_command_names_the_file_whatever_happened_to_it(checkpoints: Path, tmp_path: Path) -> None:
    step, older = two_newest(checkpoints)
    for damage in DAMAGES:
        shutil.copytree(step, tmp_path / "whole")

        name = damage(step, older)

        said = stepkeeper("checkpoints", "verify", step)
        assert said.returncode == NOT_VERIFIED, f"{damage.__name__}: {said.stdout}{said.stderr}"
        assert name in said.stdout, f"{damage.__name__}: {said.stdout}"
        assert newest_verified(checkpoints).chosen.path == older, damage.__name__  # type: ignore[union-attr]
        shutil.rmtree(step)
        (tmp_path / "whole").rename(step)


# Code in a plan ---------------------------------------------------------------------------------------------------


def reseal(step: Path, metadata: bytes) -> None:
    """Change the plan as somebody would who may write everything: the manifest fits."""
    (step / ".metadata").write_bytes(metadata)
    files: dict[str, FileEntry] = dict(read_manifest(step).files)
    files[".metadata"] = entry(step / ".metadata", files[".metadata"].chunk_bytes)
    manifest = msgspec.structs.replace(read_manifest(step), files=files, manifest_xxh3_128="")
    (step / "MANIFEST.json").unlink()
    (step / "MANIFEST.json").write_bytes(seal(manifest))


def by_commands(step: Path, tmp_path: Path) -> None:
    for command in (["verify", step], ["verify", "--shallow", step], ["ls", step.parent], ["latest", step.parent]):
        stepkeeper("checkpoints", *command)
    exported = stepkeeper("checkpoints", "export", step, tmp_path / "exported")
    assert exported.returncode not in (0, 1), exported.stderr
    assert "Traceback" not in exported.stderr


def by_watchers(step: Path, _tmp_path: Path) -> None:
    """Each reads its share of the bytes, which are as the manifest has them; who joins the shares looks at the plan."""
    said: list[bus.FromWatcher] = []
    reader = ShardReader(step.parent, "node", said.append)
    for index in range(2):
        reader.read(bus.Read(node="node", number=1, directory=step.name, index=index, of=2))
    wait_until(lambda: sum(isinstance(word, bus.ShardRead) and word.done for word in said) == 2)
    joined = join_shards(step, [verify_shard(step, index, 2) for index in range(2)])
    assert any(".metadata" in problem for problem in joined.problems)


def by_a_tier(step: Path, tmp_path: Path) -> None:
    local, shared = DirectoryTier(step.parent), DirectoryTier(tmp_path / "shared")
    [held] = [held for held in local.steps() if held.directory == step.name]
    try:
        copy_step(local, held, shared)
    except Exception as error:  # noqa: BLE001  # it may refuse, in words
        assert "step_" in str(error)  # noqa: PT017


def by_ranks(step: Path, _tmp_path: Path) -> None:
    with Ranks(1, step.parent.parent, f"--resume-from={step}") as ranks:
        assert ranks.wait() != [0]
        assert ".metadata" in ranks.output()


def wait_until(condition: Callable[[], bool]) -> None:
    limit_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit_at
        time.sleep(0.01)


@pytest.mark.parametrize("reader", [by_commands, by_watchers, by_a_tier, by_ranks], ids=lambda reader: reader.__name__)
def test_code_in_a_plan_that_is_sealed_is_never_run(
    checkpoints: Path, tmp_path: Path, reader: Callable[[Path, Path], None]
) -> None:
    step, _ = two_newest(checkpoints)
    flag = tmp_path / "executed"
    reseal(step, ATTACKS["os.system"](flag))

    reader(step, tmp_path)

    assert not flag.exists()

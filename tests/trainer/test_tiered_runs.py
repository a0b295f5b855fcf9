"""Real ranks with tiers: two processes as two nodes, each with a disk of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper_trainer.formats import steps
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.tiers import DirectoryTier
from tests.trainer.ranks import Ranks, finish, losses

NODES = 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return finish(NODES, tmp_path_factory.mktemp("undisturbed") / "run")


def nodes(tmp_path: Path, **more: str) -> Callable[[int], dict[str, str]]:
    """Each rank is a node."""

    def of_rank(rank: int) -> dict[str, str]:
        disk = tmp_path / f"disk{rank}"
        disk.mkdir(exist_ok=True)
        return {"SLURMD_NODENAME": f"n{rank}", "STEPKEEPER_LOCAL_TIER": str(disk), **more}

    return of_rank


def parts(tmp_path: Path, rank: int) -> dict[str, list[str]]:
    """Return the files of each step on a node's disk."""
    return {path.name: sorted(os.listdir(path)) for path in (tmp_path / f"disk{rank}").glob("run.*/checkpoints/step_*")}


def newest(run_dir: Path) -> str | None:
    chosen = steps.newest_verified(run_dir / "checkpoints").chosen
    return chosen.path.name if chosen else None


def test_steps_go_by_the_nodes_disks_to_shared_storage_and_the_cold_tier(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    run, cold = tmp_path / "run", tmp_path / "cold"
    with Ranks(NODES, run, of_rank=nodes(tmp_path, STEPKEEPER_COLD_TIER=str(cold))) as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
        said = ranks.output()
    assert losses(run) == undisturbed
    assert newest(run) == "step_00000024"
    assert {path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")} <= {
        ".tiers-id",
        ".verified.json",
    }, said
    for rank in range(NODES):
        held = parts(tmp_path, rank)
        assert len(held) <= 3, "the newest ones"
        for files in held.values():
            assert f"__{rank}_0.distcp" in files
            assert f"__{1 - rank}_0.distcp" not in files, "each disk has the files of its own ranks"
    in_cold = DirectoryTier(cold).steps()
    assert in_cold[0].manifest.step == 24, said
    assert verify(cold / in_cold[0].directory).ok

"""Each rank gets back exactly what it had, whatever the parallelism: nothing but content says what ranks share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.steps import list_steps, read_manifest, verify
from tests.trainer.any_state import SCENES, Play, Played, play

ON_FOUR = {"local_experts", "hsdp", "tensor_parallel", "stages_that_are_sharded"}
REFUSED = {"fsdp1"}
STEPS, STOP = 6, 3


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Played]]:
    """Every scene without an interruption, interrupted, and resumed."""
    root = tmp_path_factory.mktemp("any-state")
    plays: list[Play] = []
    for name in sorted(SCENES.keys() - REFUSED):
        ranks = 4 if name in ON_FOUR else 2
        plays += [
            Play(scene=name, run_dir=str(root / f"{name}-whole"), steps=STEPS, world_size=ranks, every=100),
            Play(scene=name, run_dir=str(root / name), steps=STOP, world_size=ranks),
            Play(scene=name, run_dir=str(root / name), steps=STEPS, world_size=ranks, resume=True),
        ]
    found = play(plays)
    return {plays[at].scene: found[at : at + 3] for at in range(0, len(plays), 3)}


@pytest.mark.parametrize("name", sorted(SCENES.keys() - REFUSED))
def test_a_resume_goes_on_to_the_last_bit(played: dict[str, list[Played]], name: str) -> None:
    whole, first, second = played[name]
    for each in (whole, first, second):
        assert set(each.codes) == {0}, each.said

    for rank, expected in enumerate(whole.prints):
        assert first.prints[rank] == {step: expected[step] for step in map(str, range(1, STOP + 1))}, first.said
        assert second.prints[rank] == {step: expected[step] for step in map(str, range(STOP, STEPS + 1))}, second.said

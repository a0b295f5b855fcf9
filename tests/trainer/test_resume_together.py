"""All ranks resume together, however much slower one of them reads."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.scenes import Stage


def test_a_rank_that_reads_for_longer_than_a_save_may_take_fails_no_resume(tmp_path: Path) -> None:
    with Stage() as stage:
        saved = stage.play("tests.trainer.worlds:save", tmp_path / "run", ranks=2)
        assert saved.codes == [0, 0], saved.said

        resumed = stage.play("tests.trainer.resume_scenes:slow_rank", tmp_path / "run", ranks=2, limit_s=80.0)

    assert resumed.codes == [0, 0], resumed.said
    assert resumed.said.count("wrong: []") == 2

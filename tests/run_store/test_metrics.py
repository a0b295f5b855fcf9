"""What an attempt takes over from `metrics.csv`."""

from __future__ import annotations

from pathlib import Path

from stepkeeper.run_store import lines

HEADER = "step,loss,tokens,lr,grad_norm,time,attempt,launch\n"


def written(run: Path, rows: list[str]) -> Path:
    (run / lines.METRICS_NAME).write_text(HEADER + "".join(f"{row},0,,,1.0,0,0\n" for row in rows))
    return run


def test_steps_that_were_done_again_count_once_as_they_were_done_last(tmp_path: Path) -> None:
    first = [f"{step},9.0" for step in range(1, 31)]
    again = [f"{step},2.0" for step in range(21, 26)]

    found = lines.losses_before(written(tmp_path, [*first, *again]))

    assert found == (*((step, 9.0) for step in range(1, 21)), *((step, 2.0) for step in range(21, 26)))


def test_of_many_steps_a_few_are_kept_over_all_that_is_read(tmp_path: Path) -> None:
    found = lines.losses_before(written(tmp_path, [f"{step},{step}.5" for step in range(1, 1001)]))

    assert len(found) <= lines.LOSSES_MAX
    assert found[-1] == (1000, 1000.5)
    assert found[0][0] < 20
    assert all(loss == step + 0.5 for step, loss in found)


def test_of_a_long_file_the_end_is_read(tmp_path: Path) -> None:
    found = lines.losses_before(written(tmp_path, [f"{step},1.0" for step in range(1, 100_001)]))

    assert found[-1][0] == 100_000
    assert found[0][0] > 50_000


def test_what_is_no_loss_tells_nothing(tmp_path: Path) -> None:
    assert lines.losses_before(tmp_path) == ()
    assert lines.losses_before(written(tmp_path, ["1,nan", "2,", "x,1.0", "2.5,1.0", "3,inf", "4,1.0"])) == ((4, 1.0),)
    (tmp_path / lines.METRICS_NAME).unlink()
    (tmp_path / lines.METRICS_NAME).symlink_to("/etc/hostname")
    assert lines.losses_before(tmp_path) == ()

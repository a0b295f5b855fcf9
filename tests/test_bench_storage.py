"""What `make bench-storage` makes of a log of strace, and of counts."""

from __future__ import annotations

import pytest

from tests.bench_storage import FIRST_SAVES, SAVES, Layout, count, count_saves, fit

LOG = """
7 openat(AT_FDCWD</work>, "/run/a", O_WRONLY|O_CREAT|O_EXCL|O_CLOEXEC, 0666) = 3</run/a>
7 write(3</run/a>, "/run/b", 6) = 6
8 fsync(3</run/a> <unfinished ...>
7 newfstatat(3</run/a>, "", {st_mode=S_IFREG|0644, st_size=6, ...}, AT_EMPTY_PATH) = 0
8 <... fsync resumed>) = 0
7 openat(AT_FDCWD</work>, "/run", O_RDONLY|O_DIRECTORY|O_CLOEXEC) = 4</run>
7 getdents64(4</run>, 0x55 /* 3 entries */, 32768) = 72
7 getdents64(4</run>, 0x55 /* 0 entries */, 32768) = 0
7 fsync(4</run>) = 0
7 openat(4</run>, "a", O_RDONLY|O_NOFOLLOW|O_CLOEXEC) = 5</run/a>
7 openat(AT_FDCWD</work>, "/proc/self/fd/4/lease.json", O_RDONLY) = 6</run/lease.json>
7 openat(AT_FDCWD</work>, "/run", O_RDONLY|O_DIRECTORY|O_PATH) = 7</run>
7 newfstatat(AT_FDCWD</work>, "/run/missing", 0x7ff, 0) = -1 ENOENT (No such file or directory)
7 renameat(4</run>, "a", 4</run>, "b") = 0
7 unlink("/run/b") = 0
7 newfstatat(AT_FDCWD</work>, "/runs/other", {st_mode=S_IFREG|0644, ...}, 0) = 0
7 write(1</elsewhere>, "/run/a", 6) = 6
8 <... openat resumed>) = 9</run/c>
7 unlinkat(4</run/checkpoints/.trash-step_00000002.0>, "__0_0.distcp", 0) = 0
7 newfstatat(AT_FDCWD</work>, "/run/checkpoints/step_00000004/a", {st_mode=S_IFREG|0644, ...}, 0) = 0
7 unlink("/run/checkpoints/.tmp-step_00000006.f/rank-0.json") = 0
7 +++ exited with 0 +++
""".strip().splitlines()


def test_calls_are_counted_by_kind_and_only_below_the_directory() -> None:
    assert count(LOG, "/run") == {
        "files made": 1,
        "writes": 1,
        "fsync of a file": 1,
        "listings": 1,
        "fsync of a directory": 1,
        "files opened": 2,
        "look-ups": 2,
        "renames": 1,
        "removals": 2,
        "older steps: removals": 1,
        "older steps: look-ups": 1,
    }


def test_only_saves_between_the_marks_are_counted() -> None:
    marks = [f'7 newfstatat(AT_FDCWD</work>, "/bench-storage-mark-{number}", 0x7ff, 0) = -1 ENOENT (No such file)'
             for number in range(FIRST_SAVES + SAVES)]  # fmt: skip
    log = [line for mark in marks for line in (*LOG, mark)]

    assert count_saves(log, "/run")["renames"] == SAVES


def test_what_is_done_once_by_each_rank_and_by_each_node_is_told_apart() -> None:
    layouts = [Layout(2, 1), Layout(4, 1), Layout(4, 2), Layout(8, 4)]

    assert fit(layouts, [5.0 + 3 * each.ranks + 2 * each.nodes for each in layouts]) == pytest.approx((5, 3, 2))
    assert [Layout(4, 2).role(rank) for rank in range(4)] == [
        "rank 0", "another rank", "first of its node", "another rank",
    ]  # fmt: skip

"""A file that another node has replaced a moment ago is read again, until this node's cache has heard of it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest

from stepkeeper_trainer.formats import plain


class Stale:
    """Reads as a network file system does while its cache is behind."""

    def __init__(self, times: int, number: int = errno.ESTALE) -> None:
        self.left, self._number = times, number

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise OSError(self._number, "Stale file handle")
        return "fresh"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tries, without the pauses."""
    assert sum(plain.STALE_PAUSES_S) > 5.0, "a cache may be some seconds behind"
    monkeypatch.setattr(plain, "STALE_PAUSES_S", (0.0,) * len(plain.STALE_PAUSES_S))


@pytest.mark.parametrize("times", [0, 1, 6])
def test_a_file_that_was_replaced_is_read_once_it_can_be(times: int) -> None:
    assert plain.fresh(Stale(times)) == "fresh"


def test_one_that_stays_stale_or_fails_otherwise_is_an_error() -> None:
    with pytest.raises(OSError, match="Stale"):
        plain.fresh(Stale(7))
    other = Stale(2, errno.EIO)
    with pytest.raises(OSError, match="Stale"):
        plain.fresh(other)
    assert other.left == 1, "it is not read again"


def test_small_files_are_read_like_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lease.json").write_text("{}")
    stale, opened = Stale(3), plain.open_plain

    def behind(path: Path, *, within: Path | None) -> BinaryIO:
        stale()
        return opened(path, within=within)

    monkeypatch.setattr(plain, "open_plain", behind)
    assert plain.read_plain(tmp_path / "lease.json") == b"{}"
    assert stale.left == 0

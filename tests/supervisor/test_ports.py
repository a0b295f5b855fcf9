"""Where the ranks of a launch meet."""

from pathlib import Path

import pytest

from stepkeeper.watcher import ranks


def test_the_ranks_meet_at_a_port_that_the_kernel_gives_to_nobody_who_asks_for_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first <= ranks.PORT_MIN:
        pytest.skip("this kernel gives low ports to everybody")
    assert all(ranks.PORT_MIN <= ranks.free_port() < first for _ in range(50))

    monkeypatch.setattr(ranks, "_EPHEMERAL", str(tmp_path / "range"))
    (tmp_path / "range").write_text("1024\t65535\n")
    assert 1024 <= ranks.free_port() <= 65535

"""The benchmark of a GPU, as far as it goes without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench_gpu import Row, table


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench_gpu", "--json", str(tmp_path / "figures.json")]

    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert "bench-gpu measures nothing here: " in done.stdout
    assert not (tmp_path / "figures.json").exists()


def test_each_figure_is_shown_beside_what_it_is_compared_with() -> None:
    rows = [Row("save() blocks", 0.25, "s", 2.5, "dcp.async_save", "8 GiB"), Row("step_done", 55.0, "us")]

    found = table(rows, {"gpu": "NVIDIA H200", "torch": "2.13.0", "cuda": "13.0"})

    assert "| save() blocks | 0.25 s | 2.5 s: dcp.async_save | 0.10 | 8 GiB |" in found
    assert "| step_done | 55 us |  |  |  |" in found

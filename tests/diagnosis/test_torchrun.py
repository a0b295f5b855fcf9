"""What torch itself writes when a rank fails under torchrun: the words that the rules are about, from the source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import logs as diagnosis_logs
from tests.diagnosis.corpus import verdict

pytest.importorskip("torch")
WITHIN_S = 300.0
SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def read_batch():
    raise ValueError("bad batch 17")

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(1)
        return index

@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        how = sys.argv[1]
        if how == "raise":
            read_batch()
        elif how == "beside-loaders":
            time.sleep(5)
            read_batch()
        elif how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif how == "memory":
            torch.empty(2**60, dtype=torch.uint8)
        elif how == "load":
            torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 3).state_dict())
    if sys.argv[1] == "beside-loaders":  # as a script does that saves on SIGTERM: it outlives its workers
        signal.signal(signal.SIGTERM, lambda *_: None)
        for batch in torch.utils.data.DataLoader(Slow(), num_workers=2):
            pass
    dist.all_reduce(torch.ones(1))
    time.sleep(60)

main()
"""


def torchrun(tmp_path: Path, how: str) -> tuple[str, list[bytes]]:
    """Run two ranks, of which rank 1 fails; return what they printed, and their error files."""
    (tmp_path / "train.py").write_text(SCRIPT)
    logs = tmp_path / "logs"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--log-dir={logs}"]
    line.append("--local-addr=127.0.0.1")  # the name of this machine need not mean anything to anybody
    ended = subprocess.run(
        [*line, str(tmp_path / "train.py"), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=WITHIN_S,
        check=False,
    )
    assert ended.returncode != 0
    return ended.stdout.decode(errors="replace"), [path.read_bytes() for path in sorted(logs.rglob("error.json"))]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", Cause.EXCEPTION),
        pytest.param("beside-loaders", Cause.EXCEPTION, marks=pytest.mark.campaign),
        pytest.param("segfault", Cause.SEGFAULT, marks=pytest.mark.campaign),
        pytest.param("memory", Cause.HOST_MEMORY, marks=pytest.mark.campaign),
        pytest.param("load", Cause.CHECKPOINT, marks=pytest.mark.campaign),
    ],
)
def test_the_rank_that_failed_is_told_from_those_that_lost_their_peer(tmp_path: Path, how: str, cause: Cause) -> None:
    printed, error_files = torchrun(tmp_path, how)

    judged = verdict(printed)

    assert judged.cause is cause, printed
    if how in ("raise", "beside-loaders"):
        where = f"ValueError at {tmp_path / 'train.py'}:8 in read_batch"
        assert judged.location == where
        assert where in {said.location for data in error_files if (said := diagnosis_logs.error_file_evidence(data))}

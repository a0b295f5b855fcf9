"""Which processes a watcher ends: real ones, with real parents."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys

WITHIN_S = 60.0
# Started with a rank's environment; starts a rank and, below two more processes, the one that ends all ranks.
PARENT = """\
import json, subprocess, sys
rank = subprocess.Popen(["sleep", "600"])
try:
    killer = [sys.executable, "-c", sys.argv[1], *sys.argv[2:]]
    shell = ["sh", "-c", '"$@"; exit $?', "a name) with 1 2 3", *killer]
    said = subprocess.run(shell, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    print(json.dumps({"killed": int(said), "rank": rank.wait(60)}))
finally:
    rank.kill()
"""
KILLER = """\
import sys
from stepkeeper.watcher.processes import kill_ranks
print(kill_ranks(sys.argv[1], sys.argv[2], attempt_max=0))
"""


def test_no_process_that_a_watcher_descends_from_is_taken_for_a_rank() -> None:
    run_id, node = secrets.token_hex(6), "n1"
    environment = {**os.environ, "STEPKEEPER_RUN_ID": run_id, "SLURMD_NODENAME": node, "STEPKEEPER_ATTEMPT": "0"}

    ended = subprocess.run(
        [sys.executable, "-c", PARENT, KILLER, run_id, node],
        env=environment, capture_output=True, text=True, timeout=2 * WITHIN_S, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    assert json.loads(ended.stdout) == {"killed": 1, "rank": -9}

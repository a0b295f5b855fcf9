"""When a step is committed, every byte and every name of it is on disk: read off the system calls."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from stepkeeper_trainer.formats import lineage
from tests.trainer.durability import replay, replay_apart, trace, trace_all
from tests.trainer.ranks import ROOT
from tests.trainer.steps_by_dcp import save
from tests.trainer.test_staging import has_direct

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

OURS = """
import os, sys, time, torch
sys.path[:0] = [sys.argv[2] + "/trainer", sys.argv[2]]
from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.save import persist, writer
persist.FILE_BYTES_MIN = 1000
width, late, close = int(sys.argv[3]), len(sys.argv) > 4, writer.HashingFile.close
if width > 60:  # two moments and a weight: one file that is written past the page cache, in several pieces
    persist.FILE_BYTES_MIN, writer.WRITE_BYTES = 1 << 30, 1 << 20
def close_and_cut(file):
    close(file)
    if file._path.suffix == ".distcp":
        os.truncate(file._path, file.entry.bytes)
if late:
    writer.HashingFile.cut, writer.HashingFile.close = (lambda _file: None), close_and_cut
    writer._require_size = lambda _descriptor, _size: None
model = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, width))
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
manager = CheckpointManager({"model": model, "optimizer": optimizer}, every=None, run_dir=sys.argv[1])
manager.resume()
for step in range(5 if width == 1 else 2):
    model(torch.rand(2, 60)).sum().backward()
    optimizer.step()
    manager.step_done(loss=1.0)
    manager.save()
    assert manager.wait_saved(180)
"""

# Two ranks, each a node; with a disk of its own, if the fourth argument says so.  The second is a sync to leave out.
TWO_NODES = """
import os, stat, sys, time
sys.path[:0] = [sys.argv[3] + "/trainer", sys.argv[3]]
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.tiers import uploader
from stepkeeper_trainer.tiers.tier import Tiers
root, left_out = Path(sys.argv[1]), sys.argv[2]
if left_out:
    uploader.fsync_directory = lambda _path: None
torch.set_num_threads(1)
other = os.fork()
rank = int(other == 0)
os.environ["SLURMD_NODENAME"] = f"n{rank}"
(root / f"disk{rank}").mkdir()
dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 2), rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
tiers = Tiers(local=str(root / f"disk{rank}")) if sys.argv[4] == "disks" else None
state = {"model": model, "optimizer": optimizer}
manager = CheckpointManager(state, every=None, run_dir=root / "run", tiers=tiers, storage_test="off")
manager.resume()
for step in range(2):
    manager.step_done(loss=1.0)
    manager.save()
    assert manager.wait_saved(180)
    dist.barrier()
sys.stdout.flush()
if rank:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
os._exit(0)
"""

COMMIT = re.compile(r'"([^"]+/\.tmp-step_[^"/]+)", "[^"]+/step_\d+"')

STOCK = """
import sys, torch
import torch.distributed.checkpoint as dcp
dcp.save({"a": torch.rand(1000)}, checkpoint_id=sys.argv[1] + "/step_00000001")
"""


def test_nothing_of_a_committed_step_could_be_lost_in_a_power_cut(tmp_path: Path) -> None:
    run = tmp_path / "run"

    calls = trace(OURS, str(run), str(ROOT), "1", log=tmp_path / "log")
    commits, after = replay(calls, COMMIT)

    assert commits == [[]] * 5
    found = [text for text in after.lost(str(tmp_path)) if "metrics.csv" not in text]  # rows since the last save
    assert found == [], "renames, the lineage and the run directory's own name are durable too"


@pytest.mark.parametrize("left_out", ["", pytest.param("the ranks' own", marks=pytest.mark.campaign)])
def test_what_each_node_has_copied_to_shared_storage_it_has_made_durable_itself(tmp_path: Path, left_out: str) -> None:
    """A sync by rank 0, on another node, need not make durable what a node has renamed."""
    root = tmp_path / "root"
    root.mkdir()
    calls = trace_all(TWO_NODES, str(root), left_out, str(ROOT), "disks", log=tmp_path / "log")

    commits = replay_apart(calls, re.compile(rf'"({root}/run/checkpoints/\.tmp-step_[^"/]+)", "[^"]+/step_\d+"'))

    assert len(commits) == 2
    lost = {Path(text.removeprefix("name ")).name for commit in commits for text in commit}
    assert lost == ({"__1_0.distcp"} if left_out else set())


def test_each_rank_syncs_its_own_files_and_rank_0_alone_the_directory(tmp_path: Path) -> None:
    """A file that is new and synced has its name, too; then one sync of the directory comes after all names."""
    root = tmp_path / "root"
    root.mkdir()
    calls = trace_all(TWO_NODES, str(root), "", str(ROOT), "shared storage", log=tmp_path / "log")

    commit = re.compile(rf'"({root}/run/checkpoints/\.tmp-step_[^"/]+)", "[^"]+/step_\d+"')
    commits, _ = replay([call for _, call in calls], commit)
    apart = replay_apart(calls, commit)

    assert commits == [[]] * 2
    assert [{text.split("/")[-1] for text in lost} for lost in apart] == [{"__1_0.distcp"}] * 2
    assert all(text.startswith("name ") for lost in apart for text in lost), "who writes bytes syncs them"


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_the_end_of_a_file_that_is_written_in_whole_pages_is_cut_before_it_is_synced(
    tmp_path: Path, *, late: bool
) -> None:
    """Past the page cache files are written in whole pages; a cut after the sync is found, if it is only that."""
    if not has_direct(tmp_path):
        pytest.skip("this file system takes nothing past the page cache")
    calls = trace(OURS, str(tmp_path / "run"), str(ROOT), "7000", *["late"] * late, log=tmp_path / "log")
    commits, after = replay(calls, COMMIT)

    cuts = [rest for call, rest in calls if call in ("ftruncate", "truncate") and ".distcp" in rest]
    assert len(cuts) >= 2
    wrote = [re.match(r"\(\d+<[^>]+\.distcp>, .*, (\d+)(?:\)| <unf)", rest) for call, rest in calls if call == "write"]
    sizes = [int(match[1]) for match in wrote if match is not None]
    assert len(sizes) >= 2 * 2
    assert all(size % 4096 == 0 for size in sizes), "files are written in whole pages"
    lost = [text for commit in [*commits, after.lost(f"{tmp_path}/run/checkpoints")] for text in commit]
    assert len(commits) == 2
    assert bool(lost) == late
    assert all(re.fullmatch(r"bytes of .*\.distcp", text) for text in lost), lost


# What is done to one file, before it gets its name in a directory that is synced.
ORDERS = {
    "written, cut, synced": ("write ftruncate fsync", []),
    "written, synced, cut": ("write fsync ftruncate", ["bytes of /d/tmp/a"]),
    "cut by its name after the sync": ("write fsync truncate", ["bytes of /d/tmp/a"]),
    "opened again and emptied": ("write fsync open", ["bytes of /d/tmp/a"]),
    "cut and synced again": ("write fsync ftruncate fdatasync", []),
    "written while it is synced": ("write begins write ends", ["bytes of /d/tmp/a"]),
    "written before it is synced": ("write write begins ends", []),
    "a sync that fails": ("write failed", ["bytes of /d/tmp/a"]),
    "never synced": ("write", ["bytes of /d/tmp/a"]),
}
ACTS = {
    "write": ("write", '(3</d/tmp/a>, "x", 1) = 1'),
    "ftruncate": ("ftruncate", "(3</d/tmp/a>, 10) = 0"),
    "truncate": ("truncate", '("/d/tmp/a", 10) = 0'),
    "open": ("openat", '(AT_FDCWD</>, "/d/tmp/a", O_WRONLY|O_TRUNC|O_CLOEXEC) = 3</d/tmp/a>'),
    "fsync": ("fsync", "(3</d/tmp/a>) = 0"),
    "fdatasync": ("fdatasync", "(3</d/tmp/a>) = 0"),
    "begins": ("fsync begins", "(3</d/tmp/a> <unfinished ...>"),
    "ends": ("fsync", "(3</d/tmp/a> <unfinished ...> resumed>) = 0"),
    "failed": ("fsync", "(3</d/tmp/a>) = -1 EIO (Input/output error)"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_checker_goes_by_what_comes_before_and_after_a_sync(order: str) -> None:
    acts, lost = ORDERS[order]
    made = [("mkdir", '("/d/tmp", 0777) = 0'), ("openat", '(AT_FDCWD</>, "/d/tmp/a", O_WRONLY|O_CREAT) = 3</d/tmp/a>')]
    synced = [("fsync", "(4</d/tmp>) = 0"), ("rename", '("/d/tmp", "/d/step_1") = 0')]

    [found], disk = replay(made + [ACTS[act] for act in acts.split()] + synced, re.compile(r'"(/d/tmp)", "/d/step_1"'))

    assert found == lost
    assert disk.lost("/d") == [text.replace("tmp", "step_1") for text in lost] + ["name /d/step_1"]


@pytest.mark.parametrize("synced", [True, False])
def test_a_name_that_was_removed_and_made_again_is_as_new(*, synced: bool) -> None:
    calls = [
        ("unlink", '("/d/a") = 0'),
        ("openat", '(5</d>, "a", O_WRONLY|O_CREAT) = 3</d/a>'),
        *[("fsync", "(5</d>) = 0")] * synced,
        ("rename", '("/d", "/e") = 0'),
    ]

    [found], _ = replay(calls, re.compile(r'"(/d)", "/e"'), there=["/d", "/d/a"])

    assert found == [] if synced else ["name /d/a"]


@pytest.mark.campaign
def test_stock_dcp_commits_before_its_bytes_are_on_disk(tmp_path: Path) -> None:
    """The same check, on torch's own writer: it syncs `.metadata` before it is written, and no directory."""
    calls = trace(STOCK, str(tmp_path), log=tmp_path / "log")

    [lost], _ = replay(calls, re.compile(r'"([^"]+)/\.metadata\.tmp", "[^"]+/\.metadata"'))

    assert f"bytes of {tmp_path}/step_00000001/.metadata.tmp" in lost
    assert any(text.startswith("name ") for text in lost)


# Beside the save --------------------------------------------------------------------------------------------------

# Each does its part below a directory that is given; the second argument names an fsync to leave out.
BEGIN = """
import os, stat, sys
from pathlib import Path
sys.path[:0] = [sys.argv[3] + "/trainer", sys.argv[3]]
from stepkeeper_trainer.store import export, retention
from stepkeeper_trainer.tiers import DirectoryTier, copy_step
root, left_out, fsync = Path(sys.argv[1]), sys.argv[2], os.fsync
def lazy(descriptor):
    if left_out != ("directories" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "files"):
        fsync(descriptor)
os.fsync = lazy
"""

COPY = (
    BEGIN
    + """
local, shared = DirectoryTier(root / "local"), DirectoryTier(root / "shared")
for held in reversed(local.steps()):
    copy_step(local, held, shared)
"""
)

PRUNE = (
    BEGIN
    + """
retention.prune(root / "local", retention.Policy(keep_last=1))
retention.empty_trash(root / "local")
"""
)

EXPORT = (
    BEGIN
    + """
export.export(export.plan_export(root / "local/step_00000001", prefix="", shard_bytes_max=2000), root / "out")
"""
)


def losses(tmp_path: Path, script: str, commit: str, by: str = "rename", left_out: str = "nothing") -> list[list[str]]:
    """Return what a power cut at each commit would take, and at last what one after the end would."""
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for step in range(1, 4):
        at, save_id = root / f"local/step_{step:08d}", f"{step:032x}"
        parent = f"{step - 1:032x}" if step > 1 else None
        save(at, {f"layer.{n}": torch.rand(400) for n in range(3)}, step=step, save_id=save_id, parent=parent)
        record = lineage.Commit(at=1.0, step=step, save_id=save_id, parent=parent, directory=at.name)
        lineage.append(root / "local", record)
    there = [str(path) for path in root.rglob("*")]
    calls = trace(script, str(root), left_out, str(ROOT), log=tmp_path / "log")
    commits, after = replay(calls, re.compile(commit), by, there=there)
    assert commits, "nothing was committed"
    return [*commits, after.lost(str(root))]


OPERATIONS = {
    "a tier copy's files": (COPY, r'"([^"]+/\.copy-step_[^"/]+)", "[^"]+/step_\d+"', "rename"),
    "the export's files": (EXPORT, r'"([^"]+/\.out\.export-[^"/]+)", "[^"]+/out"', "rename"),
    # a step is told as pruned before it goes, and has lost its name before its files go
    "a pruned step's mark": (PRUNE, r'"([^"]+)/step_\d+", "[^"]+/\.trash-', "rename"),
    "a pruned step's new name": (PRUNE, r"<([^<>]+)/\.trash-[^<>]+>", "unlinkat"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_that_another_operation_rests_on_could_be_lost(tmp_path: Path, operation: str) -> None:
    whole = losses(tmp_path, *OPERATIONS[operation])

    assert whole == [[]] * len(whole), "and nothing is open at its end"


@pytest.mark.parametrize("left_out", ["files", "directories"])
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "mark" not in name])
def test_an_fsync_that_is_left_out_is_found(tmp_path: Path, operation: str, left_out: str) -> None:
    """The checker's own proof: stock DCP is not the only one that it finds out."""
    found = losses(tmp_path, *OPERATIONS[operation], left_out=left_out)

    assert any(found[:-1]), "something would be lost at the moment that counts"

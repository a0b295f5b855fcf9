"""Checkpoints of every framework are recognised, listed, verified and chosen; what is torn or rotten is passed over."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

from stepkeeper.cli.main import main
from stepkeeper.core.exits import ExitCode
from stepkeeper.frameworks import recognise
from stepkeeper.frameworks.choosing import How, Judged, State, judge
from stepkeeper.frameworks.script import Script
from stepkeeper_trainer.formats.reading import Reading
from tests.frameworks import layouts
from tests.frameworks.layouts import LAYOUTS, Layout

Said = tuple[int, str, str]
RANKS = 2  # that save the layouts, where they do not say it themselves
Command = Callable[..., Said]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in [name for name in os.environ if name.startswith(("STEPKEEPER_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def execute(*argv: object) -> Said:
        capsys.readouterr()
        try:
            code = main(["checkpoints", *map(str, argv)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return execute


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return each layout, built once; tests copy what they change."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("layout") / name
            layouts.build(name, made[name])
        return made[name]

    return get


def copied(source: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


def step_200(root: Path, command: Command) -> Path:
    rows = json.loads(command("ls", root, "--json")[1])["steps"]
    [row] = [row for row in rows if row["step"] == 200]
    return Path(row["directory"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_recognised_and_its_newest_checkpoint_is_verified(
    name: str, built: Callable[[str], Path], command: Command
) -> None:
    root, layout = built(name), LAYOUTS[name]

    code, out, err = command("latest", root, "--json")

    assert code == 0, out + err
    found = json.loads(out)
    assert found["framework"] == layout.framework
    assert (found["chosen"]["step"], found["chosen"]["state"], found["skipped"]) == (200, "verified", [])
    assert layout.argument in " ".join(found["chosen"]["resume"]["arguments"])
    assert found["chosen"]["bytes_read"] > 0
    code, out, _ = command("verify", found["directory"])
    assert (code, "verified" in out) == (0, True)
    code, out, _ = command("ls", root)
    assert code == 0
    assert out.count("complete, not yet verified") == 2


SAME_WORLD = {
    "huggingface-deepspeed",
    "deepspeed-1",
    "deepspeed-3",
    "lightning-deepspeed",
    "deepspeed-pipeline",
    "deepspeed-pipeline-0",
    "deepspeed-pipeline-tensor",
    "deepspeed-experts",
    "megatron-legacy",
    "automodel",
    "automodel-global-ranks",
    "automodel-safetensors",
    "torch-checkpointing",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_checkpoint_says_which_numbers_of_ranks_can_resume_from_it(
    name: str, built: Callable[[str], Path], command: Command
) -> None:
    expected = "no" if name in SAME_WORLD else "yes"

    rows = json.loads(command("ls", built(name), "--json")[1])["steps"]

    assert [row["may_change_world"] for row in rows] == [expected] * 2
    assert rows[0]["world_size"] is None or "pipeline" not in name, "a pipeline's stages are not counted"
    _, out, _ = command("ls", "-v", built(name))
    assert out.count("as many ranks as saved it" if expected == "no" else "any number of ranks") == 2


def test_the_loader_of_torchtitan_needs_as_many_ranks(command: Command, tmp_path: Path) -> None:
    state = {"model": {"a": layouts.tensor()}, "optimizer": {"a": layouts.tensor()}, "train_state": {"step": 1}}
    loader = {"dp_rank_0": b"state", "dp_rank_1": b"state", "world_size": 2}
    layouts.save_dcp(tmp_path / "step-1", {**state, "dataloader": loader})

    [row] = json.loads(command("ls", tmp_path, "--json")[1])["steps"]

    assert (row["state"], row["may_change_world"]) == ("complete", "no")


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_any_one_of_its_files_the_checkpoint_before_is_chosen(
    name: str, built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root, layout = copied(built(name), tmp_path), LAYOUTS[name]
    newest = step_200(root, command)
    if newest.is_file():
        newest.write_bytes(newest.read_bytes()[:-100])
        found = judged(layout, newest)
        assert found is not None
        assert found.state is State.UNSETTLED
        return
    cut: set[tuple[Path, str]] = set()
    for path in sorted(each for each in newest.rglob("*") if each.is_file()):
        for damage in ("lost", "cut"):
            relative = str(path.relative_to(newest))
            kind = (path.parent, path.suffix)
            if damage == "cut" and (relative in layout.exempt or kind in cut or path.suffix == ".yaml"):
                continue
            cut |= {kind} if damage == "cut" else set()
            kept = path.read_bytes()
            if damage == "lost":
                path.unlink()
            else:
                path.write_bytes(kept[: len(kept) * 2 // 3])
            found = judged(layout, newest, world_size=RANKS)
            path.write_bytes(kept)
            if relative in layout.exempt:
                assert found is not None
                assert found.state is State.COMPLETE, f"{relative} has no reason to be exempt"
            else:
                assert found is None or found.state is State.UNSETTLED, (relative, damage)  # it was changed just now
    required = next(
        each
        for each in sorted(newest.rglob("*"))
        if each.is_file() and str(each.relative_to(newest)) not in layout.exempt
    )
    required.unlink()
    assert json.loads(command("latest", root, "--shallow", "--json")[1])["chosen"]["step"] == 100


ONLY_BESIDE = {
    "accelerate": {"scheduler.bin"},
    "deepspeed-pipeline": {"layer_00-model_states.pt", "layer_03-model_states.pt"},
    "deepspeed-pipeline-0": {f"layer_{layer:02d}-model_states.pt" for layer in (0, 3, 4)},
    "deepspeed-pipeline-tensor": set(),
    "huggingface-deepspeed": {"model.safetensors", "scheduler.pt"},
    "automodel": {"config.yaml", "step_scheduler.pt"},
    "automodel-global-ranks": {"config.yaml", "step_scheduler.pt", "dataloader/dataloader_dp_rank_1.pt"},
    "automodel-safetensors": {
        "config.yaml",
        "step_scheduler.pt",
        "model/shard-00002-model-00001-of-00001.safetensors",
    },
}
"""Files whose loss nothing but the checkpoint beside shows, in a directory with one checkpoint."""


@pytest.mark.parametrize("name", ONLY_BESIDE)
def test_a_checkpoint_that_is_alone_says_itself_what_it_lacks(
    name: str, built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root, layout = copied(built(name), tmp_path), LAYOUTS[name]
    newest = step_200(root, command)
    for each in recognise.known()[layout.framework].list_steps(newest.parent):
        if each.path != newest:
            shutil.rmtree(each.path)
    whole = set()
    for path in sorted(each for each in newest.rglob("*") if each.is_file()):
        kept = path.read_bytes()
        path.unlink()
        found = judged(layout, newest, world_size=RANKS)
        path.write_bytes(kept)
        if found is not None and found.state is State.COMPLETE:
            whole.add(str(path.relative_to(newest)))
    assert judged(layout, newest, world_size=RANKS) is not None
    assert whole == ONLY_BESIDE[name]


def test_files_that_a_script_saves_no_more_are_missed_once(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root, layout = copied(built("accelerate"), tmp_path), LAYOUTS["accelerate"]
    step_200(root, command)
    for step in (300, 400):
        path = layout.build(root, step)
        (path / "scheduler.bin").unlink()

    states = {step: judged(layout, root / f"checkpoint_{step}") for step in (200, 300, 400)}

    assert {step: each.state.chosen_from for step, each in states.items() if each is not None} == {
        200: True,
        300: False,
        400: True,
    }


def judged(layout: Layout, path: Path, *, deep: bool = False, world_size: int | None = None) -> Judged | None:
    """Judge one checkpoint; None where it is no longer listed."""
    framework = recognise.known()[layout.framework]
    step = next((step for step in framework.list_steps(path.parent) if step.path == path), None)
    if step is None:
        return None
    how = How(environment=os.environ, deep=deep, cached=False, world_size=world_size, reading=Reading(threads=1))
    return judge(framework, step, how)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_flipped_bit_is_found_by_the_checksum_that_torch_never_compares(
    name: str, built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built(name), tmp_path)
    newest = step_200(root, command)
    files = [newest] if newest.is_file() else sorted(newest.rglob("*"))
    for path in (each for each in files if each.suffix in {".pt", ".pth", ".bin", ".pkl", ".ckpt", ".distcp"}):
        kept = bytearray(path.read_bytes())
        at = kept.find(bytes(layouts.tensor().numpy().tobytes()[:64]))
        if at < 0:
            continue
        kept[at + 5] ^= 4
        path.write_bytes(kept)
        found = judged(LAYOUTS[name], newest, deep=True)
        kept[at + 5] ^= 4
        path.write_bytes(kept)
        assert found is not None
        assert not found.state.chosen_from, path
        assert "CRC32" in found.problems[0], (path, found.problems)
        assert path.name in found.problems[0]


def test_a_directory_that_is_quiet_is_called_torn(
    built: Callable[[str], Path], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copied(built("torchtitan"), tmp_path)
    (step_200(root, command) / ".metadata").unlink()
    now = time.time()

    assert "perhaps still being written" in command("ls", root)[1]
    monkeypatch.setattr("stepkeeper.frameworks.tree.time.time", lambda: now + 3600)
    assert "damaged or incomplete" in command("ls", root)[1]


def test_what_is_right_and_unchanged_is_not_read_again_unless_asked(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("dcp"), tmp_path)
    time.sleep(2.1)  # younger files may change again within a tick of the clock
    first = json.loads(command("latest", root, "--json")[1])["chosen"]
    second = json.loads(command("latest", root, "--json")[1])["chosen"]
    third = json.loads(command("latest", root, "--no-cache", "--json")[1])["chosen"]

    assert (first["bytes_known"], second["bytes_read"]) == (0, 0)
    assert second["bytes_known"] == first["bytes_read"] == third["bytes_read"] > 0


def test_bytes_that_the_storage_lost_are_found_where_the_format_has_no_checksum(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("accelerate"), tmp_path)
    path = step_200(root, command)
    assert command("verify", path)[0] == 0
    weights = path / "model.safetensors"
    status, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # as rot leaves it

    code, out, _ = command("verify", path)

    assert code == ExitCode.NOT_VERIFIED
    assert "model.safetensors: its bytes are not those of" in out
    assert "nobody wrote to it since" in out


def test_a_mixture_of_two_saves_is_found_by_the_digests_of_the_first_sight(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("torch-checkpointing"), tmp_path)
    path = step_200(root, command)
    assert command("verify", path)[0] == 0
    layouts.save(path / "model_1.pt", {"a": layouts.tensor() * 2})  # a save over it that died after one file

    code, out, _ = command("verify", path)

    assert code == ExitCode.NOT_VERIFIED
    assert "a mixture of two saves" in out


def test_a_checkpoint_that_was_written_anew_as_a_whole_is_accepted(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("torch-checkpointing"), tmp_path)
    path = step_200(root, command)
    assert command("verify", path)[0] == 0
    for each in path.iterdir():
        layouts.save(each, {"a": layouts.tensor() * 2})

    code, out, _ = command("verify", path)

    assert (code, "was written again since its first verification" in out) == (0, True)
    assert "written again" not in command("verify", path)[1]


def test_nothing_is_written_beside_the_checkpoint_and_the_records_are_the_users_alone(
    built: Callable[[str], Path], command: Command, tmp_path: Path, home: Path
) -> None:
    root = copied(built("huggingface"), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}

    command("latest", root)

    assert {path: path.stat().st_mtime_ns for path in sorted(root.rglob("*"))} == before
    records = home / ".local/state/stepkeeper/first-sight"
    assert records.stat().st_mode & 0o777 == 0o700
    assert len(list(records.iterdir())) == 1
    assert "torch" not in {name for name in sys.modules if name.startswith("stepkeeper.")}


def test_model_only_checkpoints_are_whole_and_not_chosen(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("torchtitan"), tmp_path)
    newest = step_200(root, command)
    shutil.rmtree(newest)
    layouts.save_dcp(newest, {"a": layouts.tensor()})

    found = json.loads(command("latest", root, "--json")[1])

    assert found["chosen"]["step"] == 100
    assert found["skipped"][0]["state"] == "not_resumable"
    assert command("verify", newest)[0] == 0


def test_a_world_that_the_caller_knows_finds_a_rank_without_a_file(
    built: Callable[[str], Path], command: Command
) -> None:
    root = built("accelerate")

    assert command("latest", root, "--world-size", 2)[0] == 0
    code, _, err = command("latest", root, "--world-size", 3)

    assert code == 1
    assert "random_states_R.pkl: missing of rank 2 of 3" in err


def test_one_numbered_random_state_is_of_a_world_of_two(
    built: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    root = copied(built("huggingface"), tmp_path)
    (step_200(root, command) / "rng_state_1.pth").unlink()

    assert "missing of rank 1 of 2" in command("latest", root)[2]


def test_finished_is_what_the_checkpoint_says(built: Callable[[str], Path], command: Command) -> None:
    for name in ("huggingface", "megatron"):
        rows = json.loads(command("ls", built(name), "--json")[1])["steps"]
        assert {row["step"]: row["finished"] for row in rows} == {100: False, 200: True}
    rows = json.loads(command("ls", built("dcp"), "--json")[1])["steps"]
    assert {row["finished"] for row in rows} == {None}


def test_a_layout_of_ones_own_is_described_in_the_configuration(command: Command, tmp_path: Path, home: Path) -> None:
    root = tmp_path / "out"
    for step in (100, 200):
        for rank in range(2):
            layouts.save(root / f"ckpt-{step}/rank{rank}.pt", {"a": layouts.tensor()})
        layouts.write(root / f"ckpt-{step}/DONE", "")
    layouts.write(
        home / ".config/stepkeeper/config.toml",
        '[framework.generic]\nsteps = "ckpt-{step}"\ncomplete = ["DONE"]\nevery_rank = ["rank{rank}.pt"]\n'
        'resume = ["--from", "{path}"]\n',
    )

    found = json.loads(command("latest", root, "--json")[1])
    assert (found["framework"], found["chosen"]["step"]) == ("generic", 200)
    assert found["chosen"]["resume"]["arguments"] == ["--from", str(root / "ckpt-200")]
    (root / "ckpt-200/DONE").unlink()
    assert json.loads(command("latest", root, "--json")[1])["chosen"]["step"] == 100
    layouts.write(root / "ckpt-200/DONE", "")
    (root / "ckpt-200/rank0.pt").unlink()
    assert json.loads(command("latest", root, "--framework", "generic", "--json")[1])["chosen"]["step"] == 100


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[framework.generic]\nsteps = 'x'\n", "is no name with {step} once in it"),
        ("[framework.generic]\nstep = 'x-{step}'\n", "[framework.generic]"),
        ("[framework.generic]\nsteps = 'x-{step}'\nstep_line = 'loss'\n", "is no line with {step} once in it"),
        ("[framework.generic]\nsteps = 'x-{step}'\ntarget = 0\n", "is neither a step nor an option"),
        ("[framework]\nfoo = 1\n", "no `foo`"),
        ("framework = 3\n", "framework"),
        ("[framework]\nname = 'nanotron'\n", "is no framework that is known"),
        ("spare = 3\n", "`spare` is not known"),
        ("[[[", "not TOML"),
    ],
)
def test_a_wrong_configuration_is_an_error(
    text: str, said: str, built: Callable[[str], Path], command: Command, home: Path
) -> None:
    layouts.write(home / ".config/stepkeeper/config.toml", text)

    code, _, err = command("ls", built("dcp"))

    assert (code, said in err) == (ExitCode.USAGE, True), err


def test_a_variable_that_no_setting_has_is_an_error(
    built: Callable[[str], Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPKEEPER_FRAMWORK", "dcp")
    code, _, err = command("ls", built("dcp"))
    assert (code, "STEPKEEPER_FRAMWORK: no such setting" in err) == (ExitCode.USAGE, True)
    assert "STEPKEEPER_FRAMEWORK" in err

    monkeypatch.delenv("STEPKEEPER_FRAMWORK")
    monkeypatch.setenv("STEPKEEPER_FRAMEWORK", "dcp")
    assert json.loads(command("ls", built("torchtitan") / "checkpoint", "--json")[1])["framework"] == "dcp"
    code, _, err = command("ls", built("dcp"), "--framework", "nanotron")
    assert (code, "--framework: 'nanotron' is no framework that is known" in err) == (ExitCode.USAGE, True)
    code, _, err = command("ls", built("dcp"), "--framework", "generic")
    assert (code, "[framework.generic]" in err) == (ExitCode.USAGE, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from transformers import Trainer\nimport accelerate\nimport torch\n", "huggingface"),
        ("import accelerate\n", "accelerate"),
        ("from trl import SFTTrainer\n", "huggingface"),
        ("import lightning as L\n", "lightning"),
        ("import deepspeed\nimport torch.distributed.checkpoint\n", "deepspeed"),
        ("from megatron.bridge import AutoBridge\n", "megatron-bridge"),
        ("from megatron.core import dist_checkpointing\n", "megatron"),
        ("from nemo import lightning\n", "nemo"),
        ("import nemo_automodel\n", "automodel"),
        ("import torch.distributed.checkpoint as dcp\n", "dcp"),
        ("from torch.distributed import checkpoint\n", "dcp"),
        ("import torch_checkpointing\n", "torch-checkpointing"),
        ("import torch\n", None),
        ("import os; os.system('touch executed')\nraise SystemExit(1)\n", None),
        ("def (:\n", None),
    ],
)
def test_a_script_is_recognised_by_its_imports_without_running_it(
    text: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = recognise.of_script(Script(("python", "train.py", "--x"), "train.py", text), recognise.known())

    assert (found.framework.name if found else None) == expected
    assert not (tmp_path / "executed").exists()


def test_a_command_is_recognised_by_its_words() -> None:
    for words, expected in (
        (["deepspeed", "--num_gpus", "2", "train.py"], "deepspeed"),
        (["torchrun", "-m", "torchtitan.train", "--x"], "torchtitan"),
        (["python", "/opt/Megatron-LM/pretrain_gpt.py"], "megatron"),
        (["llamafactory-cli", "train", "a.yaml"], "huggingface"),
    ):
        found = recognise.of_script(Script(tuple(words)), recognise.known())
        assert found is not None
        assert found.framework.name == expected
        assert found.why


def test_our_own_step_directories_stay_ours(command: Command, tmp_path: Path) -> None:
    from tests.reading import build  # noqa: PLC0415

    run = build.make_run(tmp_path / "my-run")

    code, out, _ = command("ls", run.path, "--json")

    assert (code, "framework" in json.loads(out)) == (0, False)
    assert command("latest", tmp_path / "nothing-here")[0] == ExitCode.NOTHING_FOUND
    (tmp_path / "empty").mkdir()
    assert command("ls", tmp_path / "empty")[0] == ExitCode.NOTHING_FOUND
    code, _, err = command("ls", tmp_path / "empty", "--framework", "auto")
    assert (code, "no checkpoint of a framework that is known" in err) == (ExitCode.NOTHING_FOUND, True)


@pytest.mark.parametrize("damage", ["", "zeros at its start", "zeros in it", "cut"])
def test_compressed_items_are_followed_to_their_ends(damage: str, command: Command, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in (100, 200):
        state = {"model": {"a": torch.randn(200_000, generator=generator)}, "optim": {"a": layouts.tensor()}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = tmp_path / f"step-{step}"
            writer = FileSystemWriter(path, _extensions=[ZStandard()])
            dcp.save(state, storage_writer=writer, no_dist=True)
    [file] = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    if damage == "zeros at its start":
        data[:4096] = bytes(4096)
    elif damage == "zeros in it":  # as blocks look that never reached the disk
        at = len(data) // 2
        data[at : at + 262144] = bytes(262144)
    elif damage == "cut":  # an item that ends early, in a file of the right size
        data = data[:600_000] + data[700_000:] + bytes(100_000)
    file.write_bytes(data)

    code, out, _ = command("verify", path)

    assert (code == 0) == (not damage), out
    assert ("its compressed item at byte" in out) == bool(damage)
    assert "follows its frames, and compares no bytes" in out or damage

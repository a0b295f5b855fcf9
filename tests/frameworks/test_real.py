"""Real frameworks write real checkpoints, die in a save, and resume from what `checkpoints latest` names."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.cli.main import main
from stepkeeper.frameworks import choosing, recognise
from stepkeeper.frameworks.choosing import How, State
from stepkeeper_trainer.formats.reading import Reading
from tests.frameworks import environments, playing
from tests.frameworks.playing import Framework, Kill

pytestmark = pytest.mark.frameworks


class Case:
    """One framework, and where its save of step 4 dies."""

    def __init__(
        self,
        name: str,
        environment: str,
        script: str,
        imports: list[str],
        kills: list[Kill],
        *,
        arguments: str = "",
        beside: str = "",
    ) -> None:
        self.name, self.environment, self.script, self.imports, self.kills = name, environment, script, imports, kills
        self.arguments, self.beside = arguments.split(), beside  # an environment whose packages it has, too


MP = "mp_rank_00_model_states.pt"
CASES = [
    Case("dcp", "", "dcp_script.py", ["torch.distributed.checkpoint", "torch.distributed.fsdp"], [
        Kill(1, "open", "step_4/__1_0.distcp"),
        Kill(0, "fsync", "step_4/__0_0.distcp"),
        Kill(0, "rename", "step_4/.metadata.tmp"),
    ]),
    Case("dcp-fsdp1", "", "dcp_script.py", ["torch.distributed.checkpoint", "torch.distributed.fsdp"], [
        Kill(1, "write", "step_4/__1_0.distcp"),
        Kill(0, "rename", "step_4/.metadata.tmp"),
    ], arguments="--variant fsdp1"),
    Case("dcp-async", "", "dcp_script.py", ["torch.distributed.checkpoint", "torch.distributed.fsdp"], [
        Kill(1, "write", "step_4/__1_0.distcp"),
        Kill(0, "rename", "step_4/.metadata.tmp"),
    ], arguments="--variant async"),
    Case("huggingface", "huggingface", "huggingface_script.py", ["transformers", "accelerate"], [
        Kill(0, "write", "checkpoint-4/optimizer.pt"),
        Kill(1, "open", "checkpoint-4/rng_state_1.pth"),
        Kill(0, "write", "checkpoint-4/trainer_state.json"),
    ]),
    Case("huggingface-deepspeed", "deepspeed", "huggingface_script.py", ["deepspeed", "transformers", "accelerate"], [
        Kill(1, "open", "checkpoint-4/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        Kill(0, "write", "checkpoint-4/trainer_state.json"),
    ], arguments="--variant deepspeed", beside="huggingface"),
    Case("accelerate", "huggingface", "accelerate_script.py", ["accelerate"], [
        Kill(0, "write", "checkpoint_4/optimizer.bin"),
        Kill(0, "open", "checkpoint_4/scheduler.bin"),
        Kill(1, "write", "checkpoint_4/random_states_1.pkl"),
    ]),
    Case("lightning", "lightning", "lightning_script.py", ["lightning"], [
        Kill(0, "open", "step=4.ckpt"),
        Kill(0, "write", "step=4.ckpt"),  # half of it, where its temporary file lies on another file system
    ]),
    Case("lightning-sharded", "lightning", "lightning_script.py", ["lightning"], [
        Kill(1, "write", "step=4.ckpt/__1_0.distcp"),
        Kill(0, "rename", "step=4.ckpt/.metadata.tmp"),
        Kill(0, "open", "step=4.ckpt/meta.pt"),
    ], arguments="--variant sharded"),
    Case("torchtitan", "torchtitan", "torchtitan_script.py", ["torchtitan.components.checkpoint"], [
        Kill(1, "write", "checkpoint/step-4/__1_0.distcp"),
        Kill(0, "rename", "checkpoint/step-4/.metadata.tmp"),
    ]),
    Case("deepspeed-0", "deepspeed", "deepspeed_script.py", ["deepspeed"], [
        Kill(0, "write", f"global_step4/{MP}"),
    ], arguments="--variant 0"),
    Case("deepspeed-1", "deepspeed", "deepspeed_script.py", ["deepspeed"], [
        Kill(1, "write", "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ], arguments="--variant 1"),
    Case("deepspeed-2", "deepspeed", "deepspeed_script.py", ["deepspeed"], [
        Kill(0, "write", f"global_step4/{MP}"),
        Kill(1, "open", "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ], arguments="--variant 2"),
    Case("deepspeed-3", "deepspeed", "deepspeed_script.py", ["deepspeed"], [
        Kill(1, "write", "global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt"),
        Kill(1, "write", "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ], arguments="--variant 3"),
    Case("megatron", "megatron", "megatron_script.py", ["megatron.core.dist_checkpointing"], [
        Kill(0, "open", "iter_0000004/common.pt"),
        Kill(0, "rename", "iter_0000004/.metadata.tmp"),
        Kill(0, "open", "iter_0000004/metadata.json"),
    ]),
    Case("torch-checkpointing", "torch_checkpointing", "torch_checkpointing_script.py", ["torch_checkpointing"], [
        Kill(1, "open", "tmp_step_4/model_1.pt"),
        Kill(0, "rename", "tmp_step_4"),
    ]),
]  # fmt: skip


SAVED = [
    *CASES,
    *(
        Case(
            f"deepspeed-{variant}", "deepspeed", "deepspeed_parallel_script.py", ["deepspeed"], [],
            arguments=f"--variant {variant}",
        )
        for variant in ("pipeline-0", "pipeline-1", "experts-0", "experts-2")
    ),
]  # fmt: skip
ARGUMENTS = {"training_args.bin": "the Trainer of the new launch has arguments of its own"}
TOOLS = dict.fromkeys(("zero_to_fp32.py", "zero_to_torch.py"), "a script that converts")
NOT_NEEDED = {
    "huggingface": ARGUMENTS,
    "huggingface-deepspeed": {**ARGUMENTS, **TOOLS, "model.safetensors": "the weights are DeepSpeed's"},
}
"""Files that a resume does not need, and why."""


class Played:
    """A framework in memory, and an uninterrupted run of it."""

    def __init__(self, case: Case, framework: Framework, directory: Path) -> None:
        self.case, self.framework = case, framework
        self.out, self.losses = directory / "whole", directory / "whole-losses"
        codes = framework.play(self.out, self.losses)
        logs = "".join(Path(f"{self.losses}.log.{rank}").read_text()[-1500:] for rank in range(2))
        assert codes == [0, 0], logs

    def loss(self, rank: int) -> dict[int, str]:
        return playing.losses(self.losses, rank)


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Return what starts a framework: the processes stay until the module ends."""
    found: dict[str, Played] = {}
    with contextlib.ExitStack() as stack:

        def start(case: Case) -> Played:
            if case.name not in found:
                python = Path(sys.executable)
                if case.environment:
                    python = environments.require(case.environment)
                further = {}
                if case.beside:
                    other = environments.require(case.beside)
                    (packages,) = other.parent.parent.glob("lib/python3*/site-packages")
                    further = {"PYTHONPATH": f"{playing.SCRIPTS}:{packages}"}
                warm = playing.warm(python, case.script, case.imports, case.arguments, further=further)
                framework = stack.enter_context(warm)
                found[case.name] = Played(case, framework, tmp_path_factory.mktemp(case.name))
            return found[case.name]

        yield start


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def latest(out: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    main(["checkpoints", "latest", str(out), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_checkpoint_of_a_whole_run_is_verified_and_the_newest_is_chosen(
    case: Case, play, capsys: pytest.CaptureFixture[str]
) -> None:
    played = play(case)

    found = latest(played.out, capsys)

    assert found["chosen"]["step"] == 6, found
    assert found["chosen"]["state"] == "verified", found
    assert found["framework"] == case.name.partition("-")[0] or found["framework"] == case.name
    for each in (2, 4):
        [row] = [row for row in listed(played.out, capsys) if row["step"] == each]
        assert main(["checkpoints", "verify", row["directory"]]) == 0, capsys.readouterr().out


def listed(out: Path, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    capsys.readouterr()
    assert main(["checkpoints", "ls", str(out), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["steps"]


@pytest.mark.parametrize(
    ("case", "kill"),
    [pytest.param(case, kill, id=f"{case.name}-{kill}") for case in CASES for kill in case.kills],
)
def test_a_run_that_died_in_a_save_goes_on_from_what_latest_names(
    case: Case, kill: Kill, play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = play(case)
    out, losses = tmp_path / "out", tmp_path / "losses"

    codes = played.framework.play(out, losses, kill=kill)

    assert codes != [0, 0], "the kill did not happen"
    assert min(len(playing.losses(losses, rank)) for rank in range(2)) >= 4, "it died before its save of step 4"
    found = latest(out, capsys)
    assert found["chosen"] is not None, found
    chosen = found["chosen"]["step"]
    assert chosen in (2, 4), found
    assert chosen == 4 or found["skipped"] or not any("4" in path.name for path in out.iterdir()), found

    again = tmp_path / "again"
    # what is left of a save of torch_checkpointing is in the way of its next save: it goes on elsewhere
    place = tmp_path / "elsewhere" if case.name == "torch-checkpointing" else out
    codes = played.framework.play(place, again, resume=found["chosen"]["directory"])

    logs = "".join(Path(f"{again}.log.{rank}").read_text()[-1500:] for rank in range(2))
    assert codes == [0, 0], logs
    for rank in range(2):
        whole, resumed = played.loss(rank), playing.losses(again, rank)
        assert resumed == {step: loss for step, loss in whole.items() if step > chosen}, f"rank {rank} after {chosen}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_flipped_byte_that_the_framework_would_load_is_found(
    case: Case, play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = play(case)
    out = tmp_path / "out"
    shutil.copytree(played.out, out, symlinks=True)
    [newest] = [row for row in listed(out, capsys) if row["step"] == 6]
    path = Path(newest["directory"])
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    largest = max(
        (each for each in files if each.suffix not in (".safetensors", ".py")), key=lambda each: each.stat().st_size
    )
    data = bytearray(largest.read_bytes())
    data[_inside_a_record(bytes(data))] ^= 1
    largest.write_bytes(data)

    found = latest(out, capsys)

    assert found["chosen"]["step"] == 4, found
    assert largest.name in json.dumps(found["skipped"]), found


def test_deepspeed_without_a_tag_loads_what_the_repaired_latest_names(
    play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(each for each in CASES if each.name == "deepspeed-2")
    played = play(case)
    out, losses = tmp_path / "out", tmp_path / "losses"
    shutil.copytree(played.out, out, symlinks=True)
    shards = sorted((out / "global_step6").glob("*_optim_states.pt"))
    shards[-1].unlink()
    assert (out / "latest").read_text() == "global_step6"

    capsys.readouterr()
    code = main(["checkpoints", "repair", str(out), "--apply", "--allow-recent", "--json"])

    assert code == 0, capsys.readouterr().out
    assert (out / "latest").read_text() == "global_step4"
    codes = played.framework.play(out, losses, resume=f"{out}/")
    logs = "".join(Path(f"{losses}.log.{rank}").read_text()[-1500:] for rank in range(2))
    assert codes == [0, 0], logs
    for rank in range(2):
        assert playing.losses(losses, rank) == {step: x for step, x in played.loss(rank).items() if step > 4}


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.name)
def test_a_real_checkpoint_that_lost_any_file_is_not_complete(case: Case, play, tmp_path: Path) -> None:
    played = play(case)
    out = tmp_path / "out"
    shutil.copytree(played.out, out, symlinks=True)
    found = recognise.of_directory(out, recognise.known())
    assert found is not None
    how = How(environment={}, deep=False, cached=False, world_size=2, reading=Reading(threads=1))
    before = choosing.judge_all(found.framework, out, how)
    assert [each.state for each in before] == [State.COMPLETE] * 3, before
    newest = before[0].step.path
    files = sorted(each for each in newest.rglob("*") if each.is_file()) if newest.is_dir() else []
    passed = set()
    for path in files:
        kept = path.read_bytes()
        path.unlink()
        after = choosing.judge_all(found.framework, out, how)
        path.write_bytes(kept)
        if after[0].step.path == newest and after[0].state.chosen_from:
            passed.add(str(path.relative_to(newest)))
    assert passed == set(NOT_NEEDED.get(case.name, ()))


def _inside_a_record(data: bytes) -> int:
    """Return a byte of a tensor: after the name of its record and the padding before it."""
    at = data.index(b"data/0FB") if b"data/0FB" in data else data.index(b"data/0")
    while data[at] != ord("Z"):
        at += 1
    while data[at] == ord("Z"):
        at += 1
    return at + 1

"""Hostile checkpoints: a clear error, nothing executed, memory and time bounded, no traceback."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.cli.main import main
from stepkeeper.core.exits import ExitCode
from stepkeeper.frameworks import inert, recognise
from tests.frameworks import attacks, layouts

MEMORY_BYTES, CPU_S = 768 * 1024 * 1024, 60
PAYLOADS = list(attacks.payloads(Path("x")))
TRAINER = list(attacks.trainer_attacks(Path("x")))
METADATA = list(attacks.metadata_attacks(Path("x")))
ENGINE = list(attacks.engine_attacks())


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    importlib.import_module("stepkeeper.cli.checkpoints")  # once, and not in each forked process
    importlib.import_module("stepkeeper.config.resolve")
    recognise.known()
    return {name: layouts.LAYOUTS[name].build(root / name, 200) for name in ("huggingface", "dcp", "deepspeed-1")}


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Where a payload would leave its mark."""
    path = tmp_path / attacks.CANARY
    yield path
    assert not path.exists(), "something of the checkpoint was executed"


def verify(step: Path, home: Path) -> tuple[int, str]:
    """Verify in a process of its own, with little memory and time; return its exit code and what it said."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.environ["HOME"] = str(home)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
            spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
            resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_S, spent + CPU_S))
            code = main(["checkpoints", "verify", str(step), "--threads", "1"])
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with open(reader, encoding="utf-8", errors="replace") as said:
        text = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status not in (-signal.SIGXCPU, -signal.SIGKILL), "it did not end in time"
    return status, text


def attacked(original: Path, tmp_path: Path) -> Path:
    step = tmp_path / "out" / original.name
    shutil.copytree(original, step)
    return step


def refused(step: Path, tmp_path: Path) -> str:
    code, said = verify(step, tmp_path / "home")
    assert "Traceback" not in said, said
    assert "MemoryError" not in said, said
    assert code in (ExitCode.NOT_VERIFIED, ExitCode.RUN_DIRECTORY), (code, said)
    assert len(said.splitlines()) > 1
    return said


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_pickle_is_read_as_data(name: str, originals: dict[str, Path], canary: Path, tmp_path: Path) -> None:
    step = attacked(originals["huggingface"], tmp_path)
    attacks.repack(step / "scheduler.pt", attacks.payloads(canary)[name])

    if name in attacks.HARMLESS:
        code, said = verify(step, tmp_path / "home")
        assert (code, "Traceback" in said) == (0, False), said
    else:
        said = refused(step, tmp_path)
        assert "scheduler.pt: " in said


@pytest.mark.parametrize("name", TRAINER)
def test_a_hostile_file_is_refused(name: str, originals: dict[str, Path], canary: Path, tmp_path: Path) -> None:
    step = attacked(originals["huggingface"], tmp_path)
    attacks.trainer_attacks(canary)[name](step)

    said = refused(step, tmp_path)

    assert "root:" not in said, "of /etc/passwd nothing is shown"


@pytest.mark.parametrize("name", METADATA)
def test_hostile_metadata_is_refused(name: str, originals: dict[str, Path], canary: Path, tmp_path: Path) -> None:
    step = attacked(originals["dcp"], tmp_path)
    attacks.metadata_attacks(canary)[name](step)

    refused(step, tmp_path)


@pytest.mark.parametrize("name", ENGINE)
def test_hostile_dimensions_are_refused(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    step = attacked(originals["deepspeed-1"], tmp_path)
    attacks.engine_attacks()[name](step)

    refused(step, tmp_path)


def test_a_directory_of_a_strangers_file_is_refused(originals: dict[str, Path], tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file away")
    step = attacked(originals["huggingface"], tmp_path)
    for path in (step.parent, step, *step.rglob("*")):
        os.chown(path, 54321, 54321)
    os.chown(step / "optimizer.pt", 54322, 54322)

    assert "belongs to user id 54322" in refused(step, tmp_path) or "not read" in refused(step, tmp_path)


def test_names_act_on_no_terminal(
    originals: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = tmp_path / "out"
    shutil.copytree(originals["dcp"], root / "x\x1b[2J\x07-200")

    main(["checkpoints", "ls", str(root)])

    assert "\x1b" not in capsys.readouterr().out


def test_a_record_of_digests_that_others_could_write_counts_for_nothing(
    originals: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    step = attacked(originals["dcp"], tmp_path)
    main(["checkpoints", "verify", str(step)])
    [record] = (tmp_path / "home/.local/state/stepkeeper/first-sight").iterdir()
    document = json.loads(record.read_text())
    for seen in document["files"].values():
        seen[4] = "0" * 32
    record.write_text(json.dumps(document))
    capsys.readouterr()

    assert main(["checkpoints", "verify", str(step)]) == ExitCode.NOT_VERIFIED
    os.chmod(record, 0o666)  # noqa: S103 - what is not trusted
    assert main(["checkpoints", "verify", str(step)]) == 0
    record.write_text("{" * 1000)
    assert main(["checkpoints", "verify", str(step)]) == 0


def test_the_machine_reads_what_pickle_writes() -> None:
    value = {"a": [1, 2.5, "x", None, True, (1, 2), b"y"], "b": {"c": {"d": 2**39}}, 3: -5}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found = inert.read(pickle.dumps(value, protocol))
        assert inert.whole_number(found.value, "b", "c", "d") == 2**39
        assert found.value["a"][:6] == value["a"][:6]
        assert not found.hostile

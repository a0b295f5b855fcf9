"""Whole runs of the reference script: stopped, killed, resumed; the losses must not show it."""
# ruff: noqa: S311

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path

import msgspec
import pytest

from stepkeeper_trainer.formats import messages, records
from stepkeeper_trainer.formats.steps import list_steps, newest_verified
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.ranks import LIMIT_S, Ranks, finish, losses, steps_of, tokens, watcher_socket

Uninterrupted = tuple[Path, dict[int, str]]
SLOW_STEPS = "--step-seconds-min=0.05"


def test_a_killed_run_resumes_with_the_same_losses(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    run_dir = tmp_path / "run"
    with Ranks(2, run_dir, SLOW_STEPS) as ranks:
        ranks.until_step(random.randint(6, 14))
        ranks.kill()

    found = finish(2, run_dir, "--resume-from=latest")

    assert found == uninterrupted[1]
    seen = tokens(run_dir)
    assert [seen[step] for step in sorted(seen)] == [step * 8 * 16 for step in range(1, 25)]
    assert all(verify(step.path).ok for step in list_steps(run_dir / "checkpoints"))


@pytest.mark.campaign
def test_a_save_that_was_killed_in_flight_counts_for_nothing(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    run_dir = tmp_path / "run"
    with Ranks(2, run_dir, SLOW_STEPS, disk="slow:any:tmp-step_(?!00000004):60") as ranks:
        # the save due at 8 may have to wait for the one before
        ranks.until(lambda: _in_flight(run_dir, ".tmp-step_(?!00000004)", "__"))
        ranks.kill()
    assert steps_of(run_dir) == ["step_00000004"]

    found = finish(2, run_dir, "--resume-from=latest")

    assert found == uninterrupted[1]
    assert not list((run_dir / "checkpoints").glob(".tmp-*")), "leftovers of the dead are cleared"


def test_a_save_before_the_first_step_changes_no_loss(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """torch's own get_state_dict takes a fake AdamW step there."""
    run_dir = tmp_path / "run"

    found = finish(2, run_dir, "--save-at-start")

    assert "step_00000000" in steps_of(run_dir)
    assert found == uninterrupted[1]


def test_losses_agree_on_another_world_size_and_back(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    before, expected = uninterrupted
    alone, back = tmp_path / "alone", tmp_path / "back"

    first = list_steps(before / "checkpoints")[-1]
    finish(1, alone, SLOW_STEPS, f"--resume-from={first.path}")
    second = list_steps(alone / "checkpoints")[1]
    finish(2, back, f"--resume-from={second.path}")

    found = losses(alone) | losses(back)
    assert set(found) == set(range(first.step + 1, 25))
    assert min(losses(back)) == second.step + 1 < 25
    for step, loss in found.items():
        assert abs(float(loss) / float(expected[step]) - 1) < 1e-6, step


@pytest.mark.campaign
def test_sigterm_to_one_rank_alone_stops_both_and_the_run_goes_on_later(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    run_dir = tmp_path / "run"
    with Ranks(2, run_dir, "--step-seconds-min=0.2") as ranks:
        ranks.until_step(5)
        ranks.processes[1].send_signal(signal.SIGTERM)
        assert ranks.wait() == [75, 75], ranks.output()
    said = records.read_outcome(run_dir)
    assert said is not None
    assert (said.outcome, said.step) == ("stopped", max(losses(run_dir)))
    choice = newest_verified(run_dir / "checkpoints")
    assert choice.chosen is not None
    assert choice.chosen.step == said.step

    assert finish(2, run_dir, "--resume-from=latest") == uninterrupted[1]


def test_a_stop_request_over_the_socket_is_obeyed_by_all_ranks_at_one_step(tmp_path: Path) -> None:
    """Only one rank is asked; SIGTERM alone is no more than advice while a watcher lives."""
    run_dir = tmp_path / "run"
    name = f"stepkeeper-test-{tmp_path.name}-{time.monotonic_ns()}"
    environment = {"STEPKEEPER_SOCKET": f"@{name}", "STEPKEEPER_ATTEMPT": "3", "STEPKEEPER_LAUNCH": "1"}
    heard: list[object] = []
    addresses: dict[int, bytes] = {}
    # no periodic save comes, and no end, within the ten minutes that a test may take
    with Ranks(2, run_dir, SLOW_STEPS, steps=12_000, every=12_000, environment=environment) as ranks:
        with watcher_socket(name) as sock:
            _hear_until(sock, ranks, heard, addresses, lambda: len(addresses) == 2 and _step(heard) >= 3)
        ranks.processes[0].send_signal(signal.SIGTERM)
        addresses.clear()
        with watcher_socket(name) as sock:  # the watcher was restarted: the ranks introduce themselves again
            _hear_until(sock, ranks, heard, addresses, lambda: len(addresses) == 2)
            seen = _step(heard)
            _hear_until(sock, ranks, heard, addresses, lambda: _step(heard) >= seen + 3)
            save = messages.SaveRequest(launch="3.1", request_id=1, stop=False)
            for address in addresses.values():
                sock.sendto(messages.encode(save), address)
            _hear_until(sock, ranks, heard, addresses, lambda: _of(heard, messages.Committed))
            assert ranks.processes[0].poll() is None
            stop = messages.SaveRequest(launch="3.1", request_id=2, stop=True, deadline_at=time.time() + 60)
            sock.sendto(messages.encode(stop), addresses[1])
            _hear_until(sock, ranks, heard, addresses, lambda: _of(heard, messages.Stopped))
            assert ranks.wait() == [75, 75], ranks.output()
    [stopped] = _of(heard, messages.Stopped)
    first, last = _of(heard, messages.Committed)
    assert not first.emergency
    assert last.emergency
    assert (last.step, last.save_id) == (stopped.step, stopped.save_id)
    assert stopped.launch == "3.1"
    assert steps_of(run_dir) == [first.directory, last.directory]
    assert records.read_outcome(run_dir).save_id == stopped.save_id  # type: ignore[union-attr]


def test_sigterm_is_obeyed_where_the_watcher_is_dead(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environment = {"STEPKEEPER_SOCKET": "@nobody-listens-here", "STEPKEEPER_RUN_DIR": str(run_dir)}
    with Ranks(1, run_dir, SLOW_STEPS, steps=2000, environment=environment) as ranks:
        ranks.until_step(2)
        ranks.processes[0].send_signal(signal.SIGUSR1)

        assert ranks.wait() == [75], ranks.output()


def test_a_full_disk_leaves_training_alive_and_older_steps_whole(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    run_dir = tmp_path / "run"
    name = f"stepkeeper-test-{tmp_path.name}-{time.monotonic_ns()}"
    heard: list[object] = []
    environment = {"STEPKEEPER_SOCKET": f"@{name}"}
    disk = "full:1:tmp-step_(?!00000004|00000024)"  # where rank 1 is; the save due at 8 may have to wait
    with (
        watcher_socket(name) as sock,
        Ranks(2, run_dir, "--step-seconds-min=0.15", disk=disk, environment=environment) as ranks,
    ):
        _hear_until(sock, ranks, heard, {}, lambda: _of(heard, messages.Finished))
        assert ranks.wait() == [0, 0], ranks.output()

    [failed] = _of(heard, messages.SaveFailed)
    assert 8 <= failed.step < 24
    assert "No space left" in failed.error
    assert losses(run_dir) == uninterrupted[1]
    committed = {step.step for step in list_steps(run_dir / "checkpoints")}
    assert committed == {4, 24}, "periodic saves give the storage time, and the last one is tried anyway"
    assert all(verify(step.path).ok for step in list_steps(run_dir / "checkpoints"))
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))


def test_a_rank_that_dies_after_its_report_does_not_stop_the_commit(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Ranks(2, run_dir, SLOW_STEPS, disk="slow:0:.metadata:3") as ranks:
        ranks.until(lambda: _reported(run_dir, ".tmp-step_00000004", rank=1))
        ranks.processes[1].kill()
        codes = ranks.wait()

    assert codes[0] == 1
    assert steps_of(run_dir) == ["step_00000004"]
    assert verify(run_dir / "checkpoints/step_00000004").ok


def test_what_cannot_work_is_said_without_a_traceback(tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("")
    cases = [
        (tmp_path / "a", ["--resume-from=/nowhere/step_00000001"], 66, "no such step directory"),
        (occupied, [], 73, "cannot be written"),
        (tmp_path / "no" / "parent" / "there", [], 73, "make it"),
        (tmp_path / "b", ["--batch=9"], 64, "choose a multiple"),
    ]
    running = [(Ranks(1, run_dir, *arguments), code, text) for run_dir, arguments, code, text in cases[:2]]
    running[1:] += [(Ranks(1, run_dir, *arguments), code, text) for run_dir, arguments, code, text in cases[3:]]
    for ranks, code, text in running:
        with ranks:
            assert ranks.wait() == [code], ranks.output()
            assert text in ranks.output()
            assert "Traceback" not in ranks.output()


def _reported(run_dir: Path, save: str, *, rank: int) -> bool:
    """Tell whether the report of a rank is there, and complete."""
    reports = (run_dir / "checkpoints").glob(f"{save}*/rank-{rank}.json")
    return any(report.read_bytes().endswith(b"}") for report in reports)


def _in_flight(run_dir: Path, save: str, name: str) -> bool:
    """Tell whether a save whose directory matches has a file whose name begins so."""
    try:
        saves = [path for path in (run_dir / "checkpoints").iterdir() if re.match(save, path.name)]
        return any(each.name.startswith(name) for path in saves for each in path.iterdir())
    except FileNotFoundError:  # it has got its name, or nothing was saved yet
        return False


def _hear_until(sock, ranks, heard, addresses, condition) -> None:
    limit_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit_at, f"{heard[-5:]}\n{ranks.output()}"
        try:
            data, address = sock.recvfrom(2048)
        except TimeoutError:
            continue
        assert len(data) <= messages.MESSAGE_BYTES_MAX
        message = messages.decode_from_rank(data)
        assert message is not None, json.loads(data)
        heard.append(message)
        if isinstance(message, messages.Hello):
            addresses[message.rank] = address


def _of(heard, kind):
    return [message for message in heard if isinstance(message, kind)]


def _step(heard) -> int:
    return max((message.step for message in _of(heard, messages.Progress)), default=0)


def test_messages_of_a_run_fit_the_limit() -> None:
    """The longest that the library sends."""
    text = messages.shorten("x" * 1000)
    message = messages.SaveFailed(launch="9999.9999", step=10**12, save_id="f" * 32, error=text, emergency=True)

    assert len(messages.encode(message)) <= messages.MESSAGE_BYTES_MAX
    assert msgspec.json.decode(messages.encode(message))["error"] == text

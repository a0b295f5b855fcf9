"""The agent's own parts: configuration, ledger, verdict, systemd's socket, the queue."""

from __future__ import annotations

import io
import os
import queue
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import structlog

from stepkeeper.errors import StepkeeperError
from stepkeeper.loop_tools import Clock
from stepkeeper.node_agent import config, ledger, runtime
from stepkeeper.node_agent.agent import Agent
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.events import AskNodes, CheckNode, ListJobs, ResetGpus, SetDrain
from stepkeeper.node_agent.core.state import Drain, Incident, Mode, Outcome, Policy, Repair, State
from stepkeeper.node_agent.kernel import KernelLog
from stepkeeper.node_agent.readings import KernelRecord
from stepkeeper.node_agent.runtime import Systemd
from stepkeeper.node_agent.xid import catalogue
from stepkeeper.node_agent.xid.catalogue import Action, Domain, Kind
from stepkeeper.run_store.lines import NewestWriter

ACT = Policy(mode=Mode.ACT)
T = 1_790_000_000.0
WITHIN_S = 90.0
ROOT = Path(__file__).parents[3]


def incident(number: int = 1, **changes: object) -> Incident:
    values: dict[str, object] = {
        "id": f"a.{number}",
        "first_at": T + number,
        "last_at": T + number,
        "action": Action.DRAIN_REBOOT,
        "domain": Domain.HARDWARE,
        "kind": Kind.XID,
        "name": "XID 79",
        "why": "gone",
        "settle_at": T,
        "pci": "0000:3b:00.0",
        "boot_id": "b1",
        "sequence": number,
    }
    return Incident(**{**values, **changes})  # type: ignore[arg-type]


# --- configuration --------------------------------------------------------------------------------


def wrong(text: str) -> str:
    with pytest.raises(StepkeeperError) as caught:
        config.parse(text.encode(), "node.toml")
    return str(caught.value)


def test_an_unknown_key_is_refused_by_name() -> None:
    assert wrong('mod = "act"') == "node.toml: Object contains unknown field `mod`"


def test_an_unknown_key_of_a_table_names_the_table() -> None:
    said = wrong("[remedies]\nundrian = true")

    assert "`undrian`" in said
    assert "remedies" in said


@pytest.mark.parametrize(
    "text",
    ['mode = "always"', "expected_gpus = true", "= 3", "[remedies]\nreboot = true", "remedies = 3", "mode = \xff"],
)
def test_a_wrong_value_is_one_line(text: str) -> None:
    assert "\n" not in wrong(text)


def test_a_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    """It decides about drains."""
    path = tmp_path / "node.toml"
    path.write_text('mode = "act"\n')
    path.chmod(0o664)
    with pytest.raises(StepkeeperError, match="others may change it"):
        config.load(path)

    path.chmod(0o644)
    tmp_path.chmod(0o777)
    with pytest.raises(StepkeeperError, match="others may change it"):
        config.load(path)

    tmp_path.chmod(0o755)
    assert config.load(path).mode is Mode.ACT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('mode = "act"\n')
    path.chmod(0o644)
    os.chown(path, 1, 1)

    with pytest.raises(StepkeeperError, match="others may change it"):
        config.load(path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_text('mode = "act"\n')
    (tmp_path / "node.toml").symlink_to(tmp_path / "real")

    with pytest.raises(StepkeeperError, match=r"others may change it|symbolic"):
        config.load(tmp_path / "node.toml")


@pytest.mark.parametrize("key", ["slurm_bin", "slurm_conf"])
def test_what_the_configuration_points_at_is_trusted_no_more_than_itself(tmp_path: Path, key: str) -> None:
    used = tmp_path / "own" / "used"
    used.parent.mkdir(0o755)
    if key != "slurm_bin":
        used.touch(0o644)
    else:
        used.mkdir(0o755)
        (used / "scontrol").touch(0o755)
    path = tmp_path / "node.toml"
    path.write_text(f'{key} = "{used}"\n')
    path.chmod(0o644)

    assert getattr(config.load(path), key) == str(used)
    for changeable in {used, used.parent, used / "scontrol" if used.is_dir() else used}:
        mode = changeable.stat().st_mode
        changeable.chmod(0o777)
        with pytest.raises(StepkeeperError, match=f"{changeable}: others may change it"):
            config.load(path)
        changeable.chmod(mode)
    used.rename(tmp_path / "gone")
    with pytest.raises(StepkeeperError, match=f"{key}: .*No such file"):
        config.load(path)


@pytest.mark.parametrize("config_file", [True, False])
def test_the_sites_catalogue_that_nobody_names_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, config_file: bool
) -> None:
    path, rows = tmp_path / "node.toml", tmp_path / "xid.csv"
    rows.write_text("code,action\n79,log\n")
    rows.chmod(0o666)
    monkeypatch.setattr(config, "SITE_FILE", rows)
    monkeypatch.setattr(config, "DEFAULT_PATH", path)
    if config_file:
        path.write_text('mode = "act"\n')

    with pytest.raises(StepkeeperError, match=f"{rows}: others may change it"):
        config.load(None)


def test_the_nodes_name_stands_in_paths() -> None:
    found = config.parse(b'node_name = "gpu17"\nrun_dir = "/run/sk/%N"\n', "x")

    assert str(found.socket_path) == "/run/sk/gpu17/agent.sock"


def test_what_is_a_constant_now_is_passed_over_or_refused_with_its_value() -> None:
    """The file that 0.1 installed said every default."""
    text = (ROOT / "tests/fixtures/node-0.1.toml").read_text()

    assert config.parse(text.encode(), "x") == config.NodeConfig()
    said = wrong("[limits]\nwatch_s = 60")
    assert said == "node.toml: `limits.watch_s` is a constant since 1.0: 300.0; leave it out"
    assert "`nvml` is a constant since 1.0: true" in wrong("nvml = false")
    assert "unknown field `limits`" in wrong('[limits]\nmode = "observe"')
    assert "unknown field `undrain`" in wrong("[test.limits]\nundrain = true")
    assert "unknown field `limits`" in wrong("[limits]\nwatsch_s = 60\n")


# --- ledger ---------------------------------------------------------------------------------------


def opened(path: Path) -> ledger.Ledger:
    return ledger.Ledger(path, ledger.read(path), ACT)


def test_a_ledger_tells_what_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / ledger.NAME
    book = opened(path)
    drain = Drain(reason="stepkeeper: x", action=Action.DRAIN_REBOOT, at=T, boot_id="b1")
    book.append(ledger.IncidentLine(incident=incident()))
    book.append(ledger.IncidentLine(incident=incident(outcome=Outcome.DRAINED)))
    book.append(ledger.DrainLine(drain=drain))
    book.append(ledger.GpusLine(boot_id="b1", gpus=(("0000:3b:00.0", "GPU-1"),), driver="580.1"))
    assert book.flush(WITHIN_S)

    state = ledger.read(path).state("a", "b1")

    assert [each.outcome for each in state.incidents] == [Outcome.DRAINED]
    assert (state.drain, state.known_sequence, state.driver) == (drain, 1, "580.1")
    assert state.gpus == (("0000:3b:00.0", "GPU-1"),)
    assert path.stat().st_mode & 0o777 == 0o600


def test_numbers_and_gpus_of_another_boot_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / ledger.NAME
    book = opened(path)
    book.append(ledger.IncidentLine(incident=incident(sequence=4000)))
    book.append(ledger.GpusLine(boot_id="b1", gpus=(("0000:3b:00.0", "GPU-1"),)))
    assert book.flush(WITHIN_S)

    state = ledger.read(path).state("a", "b2")

    assert (state.known_sequence, state.gpus, len(state.incidents)) == (-1, (), 1)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_costs_that_line_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / ledger.NAME
    book = opened(path)
    book.append(ledger.IncidentLine(incident=incident(1)))
    book.append(ledger.IncidentLine(incident=incident(2)))
    assert book.flush(WITHIN_S)
    path.write_bytes(path.read_bytes()[:-cut])

    again = opened(path)
    again.append(ledger.IncidentLine(incident=incident(3)))
    assert again.flush(WITHIN_S)

    read = ledger.read(path)
    assert {"a.1", "a.3"} <= set(read.incidents)
    assert read.unreadable == (1 if cut > 1 else 0)


def test_a_ledger_that_has_grown_keeps_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "BYTES_MAX", 20_000)
    path = tmp_path / ledger.NAME
    policy = msgspec.structs.replace(ACT, incidents_max=20)
    book = ledger.Ledger(path, ledger.Book(), policy)
    book.append(ledger.IncidentLine(incident=incident(0, outcome=Outcome.DRAINED)))
    book.append(ledger.DrainLine(drain=Drain(reason="r", action=Action.DRAIN_REBOOT, at=T, boot_id="b1")))
    book.append(ledger.GpusLine(boot_id="b1", gpus=(("0000:3b:00.0", "GPU-1"),)))
    book.append(ledger.IncidentLine(incident=incident(-5, sequence=9000, outcome=Outcome.NOTED)))
    for number in range(1, 400):
        book.append(ledger.IncidentLine(incident=incident(number, outcome=Outcome.NOTED)))
    assert book.flush(WITHIN_S)

    read = ledger.read(path)
    assert path.stat().st_size < 25_000
    assert {"a.0", "a.399"} <= set(read.incidents)
    assert "a.-5" not in read.incidents
    assert read.state("a", "b1").known_sequence == 9000  # its records are not taken for new ones
    assert read.drain is not None
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_ledger_that_cannot_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "RETRY_S", 0.05)
    path = tmp_path / "missing" / ledger.NAME
    book = opened(path)
    book.append(ledger.IncidentLine(incident=incident()))
    assert not book.flush(5.0)
    assert book.failed

    path.parent.mkdir()
    until = time.monotonic() + WITHIN_S
    while book.failed and time.monotonic() < until:
        time.sleep(0.01)

    assert set(ledger.read(path).incidents) == {"a.1"}


def test_a_mistake_of_ours_in_the_writing_threads_reaches_the_loop(tmp_path: Path) -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    book = opened(tmp_path / "ledger")
    book.on_failure = failures.put
    book.append(object())  # type: ignore[arg-type]
    assert isinstance(failures.get(timeout=WITHIN_S), TypeError)

    writer = NewestWriter(tmp_path / "verdict", on_error=failures.put, on_failure=failures.put)
    writer.show(object())  # type: ignore[arg-type]
    assert isinstance(failures.get(timeout=WITHIN_S), TypeError)


def test_a_link_in_place_of_the_ledger_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    path = tmp_path / ledger.NAME
    path.symlink_to(victim)

    with pytest.raises(OSError, match="symbolic"):
        ledger.read(path)
    book = ledger.Ledger(path, ledger.Book(), ACT)
    book.append(ledger.IncidentLine(incident=incident()))
    assert not book.flush(5.0)

    assert victim.read_text() == "mine\n"


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StepkeeperError, match="writable by nobody else"):
        ledger.own_directory(tmp_path)

    tmp_path.chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StepkeeperError, match="no link"):
        ledger.own_directory(tmp_path / "link")


# --- verdict --------------------------------------------------------------------------------------


def judged(*incidents: Incident, policy: Policy = ACT, drain: Drain | None = None) -> ledger.Verdict:
    return ledger.verdict(State(node="a", boot_id="b1", incidents=incidents, drain=drain), T, policy)


def test_a_node_is_unfit_from_the_decision_on() -> None:
    """Slurm may be away for minutes: the prolog must not wait for it."""
    found = judged(incident(settled=True))

    assert not found.fit
    assert found.why == "XID 79 GPU 0000:3b:00.0: gone"


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.TAKEN_BACK, Outcome.FOREIGN, Outcome.OBSERVED])
def test_a_node_that_we_must_not_drain_is_fit(outcome: Outcome) -> None:
    """A failing prolog has Slurm drain the node: past the breaker."""
    assert judged(incident(settled=True, outcome=outcome)).fit


def test_a_node_that_slurm_returned_after_our_reboot_is_fit_until_its_checks_fail() -> None:
    """A prolog that failed meanwhile would have Slurm drain the node in its own name."""
    held = Drain(reason="stepkeeper: x", action=Action.DRAIN_REBOOT, at=T, boot_id="b0")
    asked = msgspec.structs.replace(held, reboot_asked=True)
    rebooted = msgspec.structs.replace(asked, repair=Repair.REBOOT)

    assert [judged(drain=each).fit for each in (held, asked, rebooted)] == [False, False, True]
    assert "checks are under way" in judged(drain=rebooted).why
    assert judged(drain=msgspec.structs.replace(rebooted, passed=True)).fit
    assert not judged(drain=msgspec.structs.replace(rebooted, reboot_asked=False)).fit  # they have failed
    assert not judged(incident(settled=True), drain=rebooted).fit  # a new fault


def test_an_observers_verdict_is_fit() -> None:
    assert judged(incident(settled=True), policy=Policy()).fit


# --- systemd --------------------------------------------------------------------------------------


def test_systemd_hears_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(WITHIN_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "60000000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        systemd = Systemd()

        systemd.say(READY="1", STATUS="observe:\nno faults")

        assert listener.recv(1000) == b"READY=1\nSTATUS=observe: no faults"
        assert systemd.watchdog_every_s == 20.0


def test_without_systemd_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC"):
        monkeypatch.delenv(name, raising=False)
    systemd = Systemd()

    systemd.say(READY="1")

    assert systemd.watchdog_every_s is None


# --- what may fail ----------------------------------------------------------------------------------


def broken(*_: object, **__: object) -> NoReturn:
    raise LookupError("nobody has foreseen this")


class BrokenClient:
    """Slurm's answers cannot be read."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return broken


@pytest.mark.parametrize(
    "effect",
    [
        ListJobs(incident="i"),
        AskNodes(call=3),
        SetDrain(call=3, reason="r"),
        CheckNode(call=3),
        ResetGpus(call=3, pcis=()),
    ],
    ids=lambda effect: type(effect).__name__,
)
def test_a_call_that_nobody_has_foreseen_to_fail_is_reported_and_answered(effect: runtime.Act) -> None:
    reported: list[str] = []
    inbox = runtime.Inbox(Clock(), lambda _part, _error, trace: reported.append(trace))
    made = runtime.Acts(
        "n1", BrokenClient(), inbox, check=broken, reset=broken, noted=lambda: "", mistaken=lambda _: ""
    )  # fmt: skip

    made.perform(effect)
    answer = inbox.get(WITHIN_S)

    assert isinstance(answer, (on.JobsListed, on.NodesAnswered, on.CallAnswered))
    assert answer.error == "LookupError: nobody has foreseen this"
    assert getattr(answer, "call", 3) == 3
    assert len(reported) == 1


def test_a_sensor_that_fails_says_so_instead_of_ending_in_silence(tmp_path: Path) -> None:
    """A kernel log that nobody reads looks like one in which nothing happens."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    failed: queue.Queue[BaseException] = queue.Queue()
    log = KernelLog(broken, path=str(path), boot="b", on_failure=failed.put)
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.write(descriptor, b"6,1,1,-;hello\n")
        log.start()
        assert isinstance(failed.get(timeout=WITHIN_S), LookupError)
    finally:
        log.stop()
        os.close(descriptor)


def test_a_verdict_that_cannot_be_written_does_not_keep_the_next_one_from_being_written(tmp_path: Path) -> None:
    failed: queue.Queue[BaseException] = queue.Queue()
    writer = NewestWriter(tmp_path / "verdict.json", on_error=print, on_failure=failed.put)

    writer.show(object())  # type: ignore[arg-type]
    assert isinstance(failed.get(timeout=WITHIN_S), TypeError)
    writer.show(ledger.verdict(State(node="n1", boot_id="b"), T, ACT))

    until = time.monotonic() + WITHIN_S
    while not (tmp_path / "verdict.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert msgspec.json.decode((tmp_path / "verdict.json").read_bytes())["fit"] is True


def test_a_record_that_cannot_be_judged_does_not_end_the_agent_which_would_read_it_again(tmp_path: Path) -> None:
    said = io.StringIO()
    settings = config.NodeConfig(node_name="n1", state_dir=str(tmp_path), run_dir=str(tmp_path))
    agent = Agent(
        config=settings,
        state=State(node="n1", boot_id="b"),
        book=ledger.Ledger(tmp_path / "ledger", ledger.Book(), settings.policy),
        catalogue=catalogue.load(),
        client=BrokenClient(),  # type: ignore[arg-type]
        systemd=Systemd(),
        log=structlog.wrap_logger(structlog.PrintLogger(said)),
    )

    agent._take(KernelRecord(at=T, boot_id="b", sequence=1, text=None))  # type: ignore[arg-type]

    assert "part_failed" in said.getvalue()
    assert "judging" in said.getvalue()

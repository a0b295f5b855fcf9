"""The agent as a process: systemd's words, the journal's priorities, a Slurm that hangs, remedies; without a lab."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_nvml import FakeNvml

WITHIN_S = 90.0
HEARS_WITHIN_S = 30.0  # a signal: the agent looks at the clock each minute, in any case
READS = ("sinfo ", "-a -o show ", "listpids ")  # calls that change nothing
BOOT = "11111111-2222-3333-4444-555555555555"
PCI = "0000:3b:00"
SCONTROL = """#!/bin/sh
# A Slurm of one node, in a directory: what is drained, and every call.
cd {directory} || exit 1
echo "$*" >> calls
[ -e hang ] && exec sleep 60
case "$*" in
*"show nodes") reason=$(cat reason 2>/dev/null)
    [ -n "$reason" ] && echo "NodeName=n1 State=IDLE+DRAIN Partitions=p Reason=$reason [root@$(date +%s)]" \
        || echo "NodeName=n1 State=IDLE Partitions=p"
    [ ! -e others ] || for n in n2 n3; do
        echo "NodeName=$n State=IDLE+DRAIN Partitions=p Reason=stepkeeper: theirs [root@1000]"
    done ;;
*"show partitions") echo "PartitionName=p State=UP TotalCPUs=8 TotalNodes=3 MaxNodes=UNLIMITED" ;;
*State=DRAIN*) for word; do case $word in Reason=*) echo "${{word#Reason=}}" > reason;; esac; done
    [ ! -e races ] || touch others ;; # two nodes that other agents have drained before, as Slurm tells from now on
*State=RESUME*) rm -f reason; [ ! -e races ] || exec sleep 60 ;; # it takes effect, and the answer does not come
*listpids*) echo "No job steps exist on this node." >&2; exit 1 ;;
esac
"""
SINFO = """#!/bin/sh
cd {directory} || exit 1
echo "sinfo $*" >> calls
[ -e hang ] && exec sleep 60
reason=$(cat reason 2>/dev/null)
printf '%-256s%-256s%-256s%-256s%-512s%-64s%-1024s\\n' n1 127.0.0.1 "idle${{reason:++drain}}" p '(null)' \
    "$(date +%s)" "${{reason:-none}}"
"""
NVIDIA_SMI = """#!/bin/sh
cd {directory} || exit 1
echo "nvidia-smi $*" >> calls
[ ! -e ledger_breaks ] || {{ mv state/incidents.jsonl state/aside; mkdir state/incidents.jsonl; }}
[ ! -e reset_fails ] || {{ echo "In use by another client" >&2; exit 1; }}
"""


class Process:
    """An agent on a node of its own, with stand-ins for the kernel log, Slurm's commands and systemd."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir()
        for name, text in (("scontrol", SCONTROL), ("sinfo", SINFO), ("nvidia-smi", NVIDIA_SMI)):
            (self.bin / name).write_text(text.format(directory=directory))
            (self.bin / name).chmod(0o755)
        os.mkfifo(directory / "kmsg")
        (directory / "boot_id").write_text(BOOT)
        self.kmsg = os.open(directory / "kmsg", os.O_RDWR)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(directory / "notify"))
        self.notify.settimeout(0)
        self.words = ""
        self.sequence = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.settings = 'mode = "act"\n'
        self.tables = ""
        self.nvml = False
        self.devices = "0000:"  # that count as there; empty: those that NVML or the PCI bus has
        self.limits = "gather_s = 0.2\nretry_s = 0.1\nretry_max_s = 0.2\nwatch_s = 0.5\nidle_poll_s = 0.2\n"
        self.environment: dict[str, str] = {}

    def start(self) -> None:
        config = self.directory / "node.toml"
        config.write_text(
            f'node_name = "n1"\nstate_dir = "{self.directory}/state"\nrun_dir = "{self.directory}/run"\n'
            f'slurm_bin = "{self.bin}"\n{self.settings}\n{self.tables}\n'
            f'[test]\nboot_id_file = "{self.directory}/boot_id"\nkernel_log = "{self.directory}/kmsg"\n'
            f'only_pci_prefix = "{self.devices}"\n'
            f"nvml = {str(self.nvml).lower()}\n[test.limits]\n{self.limits}"
        )
        config.chmod(0o644)
        with (self.directory / "log").open("ab") as log:
            status = os.fstat(log.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stepkeeper", "node", "agent", "--config", config],
                env={
                    "PATH": f"{self.bin}:/usr/bin:/bin",
                    "NOTIFY_SOCKET": str(self.directory / "notify"),
                    "WATCHDOG_USEC": "600000",
                    "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}",
                    **self.environment,
                },
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.until(lambda: "READY=1" in self.heard(), "READY=1")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(HEARS_WITHIN_S)
        self.process = None
        return code

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(WITHIN_S)
        os.close(self.kmsg)
        self.notify.close()

    def say(self, text: str, *, facility: int = 0) -> None:
        """Have the kernel (facility 0), or a program, write a line: the pipe keeps no bounds, so one at a time."""
        if self.process is not None:
            self.until(lambda: not self.unread(), "the line before is read")
        self.sequence += 1
        usec = int(time.monotonic() * 1e6)
        os.write(self.kmsg, f"{facility << 3 | 4},{self.sequence},{usec},-;{text}\n".encode())

    def unread(self) -> int:
        """Return how many bytes of the kernel log the agent has not read yet."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self.kmsg, termios.FIONREAD, waiting)
        return waiting[0]

    def heard(self) -> str:
        """Return all that systemd was told."""
        while True:
            try:
                self.words += self.notify.recv(4096).decode() + "\n"
            except BlockingIOError:
                return self.words

    def log(self) -> list[tuple[str, dict[str, object]]]:
        """Return (priority, line) of the log."""
        whole = (self.directory / "log").read_text().rpartition("\n")[0]  # behind it one may be in the making
        lines = whole.splitlines()
        return [(line[:3], json.loads(line[3:])) for line in lines]

    def calls(self) -> list[str]:
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def reason(self) -> str:
        path = self.directory / "reason"
        return path.read_text().strip() if path.exists() else ""

    def until(self, condition: Callable[[], object], what: str) -> None:
        limit = time.monotonic() + WITHIN_S
        while not condition():
            assert self.process is None or self.process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < limit, f"not in time: {what}\n{(self.directory / 'log').read_text()[-3000:]}"
            time.sleep(0.02)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.close()


def test_systemd_is_told_and_the_journal_gets_priorities(agent: Process) -> None:
    agent.start()
    agent.until(lambda: agent.heard().count("WATCHDOG=1") > 3, "the watchdog's food")
    agent.say(f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.")
    agent.until(agent.reason, "the drain")
    agent.until(lambda: "drained: stepkeeper: XID 79" in agent.heard(), "the status")

    code = agent.stop()

    assert code == 0
    assert "STOPPING=1" in agent.heard()
    priorities = {str(line["event"]): priority for priority, line in agent.log()}
    assert (priorities["agent_ready"], priorities["incident"]) == ("<6>", "<4>")


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.001, 0.003, 0.01])
def test_a_signal_in_the_moment_of_falling_asleep_is_heard(agent: Process, after_s: float) -> None:
    """It was lost until the next look at the clock, a minute later: systemd would have killed the agent."""
    agent.environment["WATCHDOG_USEC"] = ""
    agent.start()
    time.sleep(after_s)

    assert agent.stop() == 0  # which waits for half of that minute


def test_what_a_program_writes_into_the_kernel_log_is_nothing(agent: Process) -> None:
    agent.start()
    agent.say(f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.", facility=1)
    agent.say(f"a.out[7]: segfault NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.")
    agent.say("usb 1-1: new device")
    time.sleep(1.0)

    assert agent.calls() == []


def test_a_slurm_that_hangs_stops_neither_loop_nor_watchdog(agent: Process) -> None:
    agent.limits += "call_within_s = 1.0\n"
    (agent.directory / "hang").touch()
    agent.start()
    agent.say(f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.")
    agent.until(lambda: len(agent.calls()) > 3, "more tries")
    before = agent.heard().count("WATCHDOG=1")
    agent.until(lambda: agent.heard().count("WATCHDOG=1") > before + 3, "the watchdog's food")
    verdict = agent.directory / "run" / "verdict.json"
    agent.until(lambda: verdict.exists() and json.loads(verdict.read_text())["fit"] is False, "the verdict")
    (agent.directory / "hang").unlink()
    agent.until(agent.reason, "the drain")
    agent.stop()

    assert any(line["event"] == "alarm" for priority, line in agent.log() if priority == "<3>")


def test_a_crowd_is_not_asked_for_the_size_of_the_cluster_that_was_told_at_the_start(agent: Process) -> None:
    def sizes() -> int:
        return sum(call.endswith("show partitions") for call in agent.calls())

    agent.limits += "setup_spread_s = 0.0\ncrowded_s = 0.0\n"  # every answer is a crowd's
    agent.start()
    agent.until(sizes, "the size")
    agent.say(f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.")
    agent.until(agent.reason, "the drain")
    agent.stop()

    assert sizes() == 1
    assert any("all nodes are counted in" in str(line.get("why")) for _, line in agent.log())


def fill(address: str) -> None:
    """Send until not even a socket that has sent nothing yet may: the queue is full, and not what one may send."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # noqa: FBT003 - the method takes no keyword
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.sendto(b"x", address)
                    sent += 1
        if not sent:
            return


def test_a_systemd_that_does_not_listen_stops_nothing(agent: Process) -> None:
    """Its socket's queue is full: how much it takes is a matter of the machine's settings."""
    agent.start()
    fill(str(agent.directory / "notify"))
    agent.say(f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.")

    agent.until(agent.reason, "the drain")


def test_a_kernel_log_of_another_boot_is_new(agent: Process) -> None:
    """The numbers begin anew: a low one is no old one."""
    agent.start()
    agent.sequence = 500
    agent.say(f"NVRM: Xid (PCI:{PCI}): 31, Ch 1")
    agent.until(lambda: any(line["event"] == "incident" for _, line in agent.log()), "the incident")
    agent.stop()
    (agent.directory / "boot_id").write_text(BOOT.replace("1", "9"))
    agent.sequence = 0
    agent.start()
    agent.say(f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.")

    agent.until(agent.reason, "the drain")


def test_a_second_agent_on_the_node_is_refused(agent: Process) -> None:
    agent.start()
    config = agent.directory / "node.toml"

    done = subprocess.run(
        [sys.executable, "-m", "stepkeeper", "node", "agent", "--config", config],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )

    assert done.returncode == 2
    assert "another agent serves it" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def nvml(agent: Process) -> FakeNvml:
    found = FakeNvml(agent.directory / "nvml", gpus=1)
    found.place(0, pci=PCI, uuid="GPU-1")
    return found


@pytest.fixture
def curing(agent: Process, nvml: FakeNvml) -> Process:
    agent.environment = nvml.environment()
    agent.nvml = True
    agent.settings += "expected_gpus = 1\n"
    agent.limits += "health_every_s = 0.5\n"
    agent.tables += "[remedies]\nundrain = true\nreset_gpus = true\nreboot = true\n"
    return agent


def double_bit_error(agent: Process, nvml: FakeNvml) -> None:
    """Start the agent, and let both the kernel log and NVML tell of a fault."""
    agent.start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.xid(0, 48)
    agent.say(f"NVRM: Xid (PCI:{PCI}): 48, DBE (double bit error) ECC Error encountered")


def alarms(agent: Process) -> str:
    return "\n".join(str(line["text"]) for _, line in agent.log() if line["event"] == "alarm")


@pytest.mark.parametrize("code", [79, 119])
def test_a_kernel_record_that_nvml_does_not_bear_out_drains_nothing(curing: Process, nvml: FakeNvml, code: int) -> None:
    curing.start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    curing.say(f"NVRM: Xid (PCI:{PCI}): {code}, GPU has fallen off the bus.")
    curing.until(lambda: "NVML finds that GPU well: no drain" in alarms(curing), "the alarm")

    assert curing.calls() == [each for each in curing.calls() if "listpids" in each]


def test_a_gpu_that_nvml_finds_lost_is_drained_without_an_event(curing: Process, nvml: FakeNvml) -> None:
    curing.limits = curing.limits.replace("health_every_s = 0.5", "health_every_s = 600")
    curing.tables = ""
    curing.start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    nvml.lose(0)
    curing.say(f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.")

    curing.until(lambda: "XID 79" in curing.reason(), "the drain")


def test_what_netfilter_writes_for_a_user_is_no_report(agent: Process) -> None:
    """As any user gets it into the kernel's own records where `net.netfilter.nf_log_all_netns` is 1."""
    agent.start()
    tail = (
        "IN= OUT=lo SRC=127.0.0.1 DST=127.0.0.1 LEN=29 TOS=0x00 PREC=0x00 TTL=64 ID=1 DF PROTO=UDP SPT=4 DPT=9 LEN=9 "
    )
    agent.say(f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus.{tail}")
    agent.say(f"NVRM: Xid (PCI:{PCI}): 79, pid=1, name={tail}")
    agent.say(f"NVRM: Xid (PCI:{PCI}): 31, pid=1, name=x, Ch 1")
    agent.until(lambda: any(line["event"] == "incident" for _, line in agent.log()), "the incident")

    assert {line["name"] for _, line in agent.log() if line["event"] == "incident"} == {"XID 31"}


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.: loaded by a.out",
        "NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus. IN= OUT=lo MARK=0x7 ",
    ],
    ids=["module", "netfilter"],
)
def test_a_genuine_record_about_a_gpu_that_the_node_has_not_is_no_fault(
    curing: Process, nvml: FakeNvml, text: str
) -> None:
    """A netfilter rule's prefix, or a module's name, begins like the driver's lines: a user chose it."""
    curing.devices = ""
    curing.start()
    nvml.wait_for_call("nvmlEventSetWait_v2")
    curing.say(text)
    nvml.xid(0, 48)
    curing.say(f"NVRM: Xid (PCI:{PCI}): 48, DBE (double bit error) ECC Error encountered")
    curing.until(curing.reason, "the drain for the GPU that is there")

    assert {line["pci"] for _, line in curing.log() if line["event"] == "incident"} == {f"{PCI}.0"}


def test_a_return_is_asked_for_only_once_the_ledger_holds_it(curing: Process, nvml: FakeNvml) -> None:
    """An agent that is killed right after it must know that the return was its own."""
    (curing.directory / "ledger_breaks").touch()  # at the reset
    double_bit_error(curing, nvml)
    curing.until(lambda: "the ledger does not hold it yet" in alarms(curing), "the alarm")
    assert not any("State=RESUME" in each for each in curing.calls())
    assert curing.reason()

    state = curing.directory / "state"
    (state / "incidents.jsonl").rmdir()
    (state / "aside").rename(state / "incidents.jsonl")
    curing.until(lambda: any("State=RESUME" in each for each in curing.calls()), "the node's return")
    assert '"resume_sent":true' in (state / "incidents.jsonl").read_text()


def test_a_lost_take_back_leaves_the_fault_open(curing: Process, nvml: FakeNvml) -> None:
    """The controller returns the node, and its answer comes too late."""
    (curing.directory / "races").touch()
    curing.tables = ""
    curing.limits += "call_within_s = 1.0\n"
    double_bit_error(curing, nvml)
    curing.until(lambda: any("State=RESUME" in each for each in curing.calls()), "the take-back")
    nvml.field(0, 230, 2)  # meanwhile NVML asks for a reboot
    curing.until(lambda: "circuit breaker" in alarms(curing), "the breaker's alarm")
    for name in ("races", "others"):
        (curing.directory / name).unlink()
    curing.until(curing.reason, "the drain, once the breaker is closed")

    assert "somebody else returned the node" not in (curing.directory / "log").read_text()


def test_an_agent_that_cannot_read_the_kernel_log_says_so_aloud(agent: Process) -> None:
    (agent.directory / "kmsg").rename(agent.directory / "gone")
    agent.start()
    agent.until(lambda: "BLIND: cannot read" in agent.heard(), "the status")
    agent.stop()

    (alarm,) = [(priority, line) for priority, line in agent.log() if line["event"] == "alarm"]
    assert alarm[0] == "<3>"
    assert "kernel log: cannot read" in str(alarm[1]["text"])


def test_a_stopped_agent_has_written_how_often_a_fault_was_seen(agent: Process) -> None:
    agent.start()
    for _ in range(5):
        agent.say(f"NVRM: Xid (PCI:{PCI}): 79, pid=1, GPU has fallen off the bus.")
        time.sleep(0.3)  # the real device gives one record a read, this one all that is there
    agent.until(agent.reason, "the drain")
    agent.stop()

    lines = (agent.directory / "state" / "incidents.jsonl").read_text().splitlines()
    *_, last = (json.loads(line)["incident"] for line in lines if json.loads(line)["kind"] == "incident")
    assert last["count"] >= 3


def test_a_list_that_is_too_short_is_made_again_before_it_counts(curing: Process) -> None:
    curing.settings = curing.settings.replace("expected_gpus = 1", "expected_gpus = 2")
    curing.tables = ""
    curing.start()
    curing.until(lambda: "1 of 2 GPUs are there" in curing.reason(), "the drain")
    curing.stop()

    listings = [line for _, line in curing.log() if line["event"] == "nvml" and line["state"] == "ready"]
    assert len(listings) == 2


def test_a_gpu_is_reset_checked_and_the_node_returned(curing: Process, nvml: FakeNvml) -> None:
    """While nvidia-smi resets, our own NVML process is gone: it would keep the GPU busy."""
    double_bit_error(curing, nvml)
    curing.until(lambda: any("State=RESUME" in each for each in curing.calls()), "the node's return")

    calls = [each.split(" Reason=")[0] for each in curing.calls() if not each.startswith(READS)]
    assert calls == [
        "update NodeName=n1 State=DRAIN",
        f"nvidia-smi --gpu-reset -i {PCI}.0",
        "update NodeName=n1 State=RESUME",
    ]


def test_a_failed_reset_is_followed_by_a_reboot(curing: Process, nvml: FakeNvml) -> None:
    (curing.directory / "reset_fails").touch()
    double_bit_error(curing, nvml)

    curing.until(lambda: any(each.startswith("reboot ASAP nextstate=RESUME reason=") for each in curing.calls()), "it")

    assert not any("State=RESUME" in each for each in curing.calls())

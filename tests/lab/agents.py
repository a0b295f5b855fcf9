"""One node agent for each node of a lab: started, asked, stopped, killed.  Each believes only its own PCI domain.

    agents = Agents(lab, nvml=True)
    agents.start()                                  # on all nodes, or on those that are named
    agents.inject(node, 79)                         # into the machine's one kernel log, as `stepkeeper dev inject`
    lab.wait_node(node, "DRAIN")

All nodes of all labs share one machine, so its kernel log is everybody's: a PCI domain that nobody else uses tells
whose a record is.
"""

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from tests import ports
from tests.fake_nvml import FakeNvml
from tests.lab import processes
from tests.lab.cluster import Lab
from tests.lab.faults import LabError

READY_S = 90.0
STOP_S = 60.0
GPUS = 2
BUS = 0x3B
_dice = random.SystemRandom()  # trainings seed Python's own in this process


class Agents:
    """The agents of one lab's nodes; a context manager that stops them all."""

    def __init__(self, lab: Lab, *, mode: str = "act", nvml: bool = False, python: Path | None = None) -> None:
        """Describe them; `nvml`: with GPUs of a fake library of their own, as many as the lab's nodes have."""
        self.lab = lab
        self.mode = mode
        self.python = python or Path(sys.executable)
        self.prefix: tuple[str, ...] = ()  # a program that starts the agents, as systemd would
        self.directory = Path(tempfile.mkdtemp(prefix="agents-", dir=lab.directory))
        self.domains = {node: _new_domain() for node in lab.node_names}
        self._serials = {node: f"{_dice.getrandbits(32):08x}" for node in lab.node_names}
        self.settings: dict[str, dict[str, Any]] = {node: {} for node in lab.node_names}
        self.nvml: dict[str, FakeNvml] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        if nvml:
            for node in lab.node_names:
                self.nvml[node] = FakeNvml(self.directory / node / "nvml", gpus=GPUS)
                for gpu in range(GPUS):
                    self.nvml[node].place(gpu, pci=self.pci(node, gpu).removesuffix(".0"), uuid=self.uuid(node, gpu))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- names ------------------------------------------------------------------------------------

    def pci(self, node: str, gpu: int = 0) -> str:
        """Return where a GPU of a node is."""
        return f"{self.domains[node]}:{BUS + gpu:02x}:00.0"

    def uuid(self, node: str, gpu: int = 0) -> str:
        """Return which GPU that is."""
        return f"GPU-{self._serials[node]}-0000-0000-0000-{gpu:012d}"

    def config(self, node: str) -> Path:
        """Return the configuration file of a node's agent."""
        return self.directory / node / "node.toml"

    def socket(self, node: str) -> Path:
        """Return the socket of a node's agent."""
        return self.directory / node / "run" / "agent.sock"

    # -- life -------------------------------------------------------------------------------------

    def configure(self, node: str, **settings: Any) -> None:
        """Change settings of a node's agent, from its next start on; a dictionary is a table."""
        for key, value in settings.items():
            known = self.settings[node].get(key)
            self.settings[node][key] = {**known, **value} if isinstance(known, dict) else value

    def start(self, *nodes: str, wait: bool = True) -> None:
        """Start the agents of some nodes, of all by default, and wait until they are ready."""
        chosen = nodes or tuple(self.lab.node_names)
        for node in chosen:
            self._write_config(node)
            # the lab's users pass through to the socket
            for part in (self.directory, self.directory / node):
                part.chmod(0o755)
            log = (self.directory / node / "log").open("ab")
            with log:
                log.write(b"--- start\n")
                log.flush()
                self._running[node] = subprocess.Popen(
                    [*self.prefix, self.python, "-m", "stepkeeper", "node", "agent", "--config", self.config(node)],
                    env=self.environment(node),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        for node in chosen if wait else ():
            self.lab.until(
                lambda node=node: self._is_ready(node), f"the agent of {node}\n{self.log_text(node)}", READY_S
            )

    def environment(self, node: str) -> dict[str, str]:
        """Return the environment of a node's agent: its GPUs, and the lab's Slurm."""
        # found by the leak check and by the lab's teardown, should this process be killed
        marked = {processes.LAB_VARIABLE: str(self.lab.directory)}
        nvml = self.nvml[node].environment() if node in self.nvml else {}
        return {**self.lab.environment(), **marked, **nvml}

    def _is_ready(self, node: str) -> bool:
        process = self._running[node]
        if process.poll() is not None:
            raise LabError(f"the agent of {node} ended with {process.returncode}:\n{self.log_text(node)}")
        return '"agent_ready"' in self.log_text(node).rpartition("--- start\n")[2]

    def pid(self, node: str) -> int:
        """Return the process of a node's agent."""
        return self._running[node].pid

    def stop(self, *nodes: str) -> None:
        """Stop some agents as systemd would, all by default; kill what does not end."""
        chosen = [node for node in nodes or tuple(self._running) if node in self._running]
        for node in chosen:
            with contextlib.suppress(ProcessLookupError):  # ended already
                self._running[node].send_signal(signal.SIGTERM)
        for node in chosen:
            process = self._running.pop(node)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
                raise LabError(f"the agent of {node} did not end in {STOP_S} s\n{self.log_text(node)}") from None

    def kill(self, *nodes: str) -> None:
        """SIGKILL some agents, all by default."""
        for node in nodes or tuple(self._running):
            process = self._running.pop(node)
            process.kill()
            process.wait(STOP_S)

    # -- what happens -----------------------------------------------------------------------------

    def inject(self, node: str, code: int, *, gpu: int = 0, text: str = "") -> None:
        """Write an XID of a node's GPU into the kernel log, through the command that sites use."""
        words = ["dev", "inject", "xid", str(code), "--gpu", self.pci(node, gpu), *(["--text", text] if text else [])]
        done = self._run(node, *words)
        if done.returncode:
            raise LabError(f"dev inject: {done.stderr or done.stdout}")

    def boot(self, node: str) -> None:
        """Have a node's agent believe, from its next start on, that the node was rebooted.

        The machine was not, and its kernel log still holds what was injected: records of a new domain count from now.
        """
        path = self.directory / node / "boot_id"
        path.write_text(f"{_dice.getrandbits(128):032x}\n")
        self.domains[node] = _new_domain()
        if node in self.nvml:
            self.nvml[node].reset(gpus=GPUS)
            for gpu in range(GPUS):
                self.nvml[node].place(gpu, pci=self.pci(node, gpu).removesuffix(".0"), uuid=self.uuid(node, gpu))

    # -- what came of it --------------------------------------------------------------------------

    def log_text(self, node: str) -> str:
        """Return everything that a node's agent has logged."""
        path = self.directory / node / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, node: str, name: str) -> list[dict[str, Any]]:
        """Return the log lines of one kind."""
        text, _, _ = self.log_text(node).rpartition("\n")  # whole lines only: another one may be under way
        lines = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == name]

    def incidents(self, node: str) -> list[dict[str, Any]]:
        """Return the ledger, as `stepkeeper node incidents --json --all` shows it."""
        done = self._run(node, "node", "incidents", "--all", "--json")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def _run(self, node: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one of the commands on a node."""
        return subprocess.run(
            [self.python, "-m", "stepkeeper", *words, "--config", self.config(node)],
            env=self.environment(node),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def verdict(self, node: str) -> dict[str, Any]:
        """Return what Slurm's hooks read."""
        verdict: dict[str, Any] = json.loads((self.directory / node / "run" / "verdict.json").read_text())
        return verdict

    def wait_event(self, node: str, name: str, *, text: str = "", times: int = 1, within_s: float = 120.0) -> None:
        """Wait until an agent has logged something."""

        def found() -> bool:
            return sum(text in json.dumps(each) for each in self.events(node, name)) >= times

        until = time.monotonic() + within_s
        while not found():
            if time.monotonic() > until:
                raise LabError(f"no `{name}` with {text!r} on {node} in {within_s} s:\n{self.log_text(node)[-3000:]}")
            time.sleep(0.05)

    # -- configuration ----------------------------------------------------------------------------

    def _write_config(self, node: str) -> None:
        directory = self.directory / node
        directory.mkdir(exist_ok=True)
        boot_id = directory / "boot_id"
        test: dict[str, Any] = {
            "allow_injected": True,
            "only_pci_prefix": f"{self.domains[node]}:",
            "nvml": bool(self.nvml),
        }
        limits = {"health_every_s": 1.0, **self.settings[node].get("test", {}).get("limits", {})}
        if boot_id.exists():
            test["boot_id_file"] = str(boot_id)
        settings: dict[str, Any] = {
            "mode": self.mode,
            "node_name": node,
            "expected_gpus": GPUS if self.nvml else 0,
            "state_dir": str(directory / "state"),
            "run_dir": str(directory / "run"),
            "slurm_conf": str(self.lab.place.conf),
            **self.settings[node],
        }
        settings["test"] = {**test, **settings.get("test", {})}
        settings["test"].pop("limits", None)
        tables = {key: value for key, value in settings.items() if isinstance(value, dict)}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if key not in tables]
        for name, table in {**tables, "test.limits": limits}.items():
            lines += [f"[{name}]"] + [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        path = self.config(node)
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o644)


def _new_domain() -> str:
    """Return a PCI domain that nobody beside us is given, and that no record in the kernel log has yet.

    A port's number will do: it is this process's alone, of all that play tests on this machine.
    """
    log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=False, timeout=30).stdout
    while True:
        domain = f"{ports.reserve():04x}"
        if f"{domain}:" not in log:
            return domain

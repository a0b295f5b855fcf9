"""An agent whose configuration does not fit its node, or that sees half of it, says so at its start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.doctor.site import Level, users_log
from stepkeeper.node_agent import setup
from stepkeeper.node_agent.config import AllLimits, NodeConfig, Test
from stepkeeper.node_agent.core.state import Mode
from stepkeeper.node_agent.kernel import Roots
from stepkeeper.node_agent.readings import Gpu, NvmlState, NvmlStatus
from stepkeeper.slurm.client import NodeFacts
from tests.lab import Lab
from tests.lab.agents import Agents

PCI = ("0000:3b:00.0", "0000:86:00.0")
NODE = NodeFacts(name="gpu17", states=frozenset(("IDLE",)), host="gpu17", address="10.0.0.17", gres="gpu:2")
READY = NvmlStatus(
    at=0.0, state=NvmlState.READY, driver="570", gpus=tuple(Gpu(index=i, pci=pci) for i, pci in enumerate(PCI))
)
ABSENT = NvmlStatus(at=0.0, state=NvmlState.ABSENT, detail="nvmlInit: NVML Shared Library Not Found")


def problems(config: NodeConfig, facts: setup.Facts) -> list[str]:
    return [each.subject for each in setup.examine(config, facts) if each.level is Level.PROBLEM]


def test_a_node_as_it_should_be_has_nothing_to_say() -> None:
    config = NodeConfig(node_name="gpu17", expected_gpus=2, mode=Mode.ACT)

    found = setup.examine(config, setup.Facts(node=NODE, pci=PCI, nvml=READY))

    assert {each.level for each in found} == {Level.OK}
    assert {"mode", "kernel_log", "NVML", "expected_gpus"} < {each.subject for each in found}


@pytest.mark.parametrize(
    ("facts", "subject", "words"),
    [
        (setup.Facts(node=NODE, pci=PCI, nvml=ABSENT), "NVML", "2 GPUs of NVIDIA are on the PCI bus"),
        (setup.Facts(node=NODE, pci=PCI, nvml=None), "NVML", "nvml = false"),
        (setup.Facts(node=NODE, nvml=ABSENT), "NVML", "NVML is absent"),
        (setup.Facts(node=NODE, pci=(*PCI, "0000:af:00.0"), nvml=READY), "GPUs", "0000:af:00.0"),
        (
            setup.Facts(node=NodeFacts(name="x", states=frozenset(), gres="gpu:4"), pci=PCI, nvml=READY),
            "Gres",
            "4 GPUs",
        ),
        (setup.Facts(slurm_error="Could not establish a configuration source"), "node_name = gpu17", "configuration"),
        (setup.Facts(slurm_error="Slurm knows no node gpu17"), "node_name = gpu17", "knows no node"),
        (setup.Facts(node=NODE, nvml=READY, pci=PCI, kernel_log_error="/dev/kmsg: denied"), "kernel_log", "denied"),
    ],
)
def test_what_is_wrong_is_a_problem_with_a_remedy(facts: setup.Facts, subject: str, words: str) -> None:
    config = NodeConfig(node_name="gpu17", expected_gpus=2)

    (finding, *_) = [each for each in setup.examine(config, facts) if each.subject == subject]

    assert finding.level is Level.PROBLEM
    assert words in finding.found
    assert finding.means
    assert finding.remedy


def test_a_kernel_log_that_users_may_write_is_told_as_the_doctor_does() -> None:
    facts = setup.Facts(node=NODE, pci=PCI, nvml=READY, users_log=True)

    found = setup.examine(NodeConfig(node_name="gpu17", expected_gpus=2), facts)

    assert [each for each in found if each.level is not Level.OK] == [users_log()]


def test_a_test_table_that_was_left_in_production_is_told() -> None:
    config = NodeConfig(node_name="gpu17", expected_gpus=2, test=Test(limits=AllLimits(watch_s=1.0)))

    found = setup.examine(config, setup.Facts(node=NODE, pci=PCI, nvml=READY))

    assert [(each.level, each.subject) for each in found if each.level is not Level.OK] == [(Level.WARNING, "[test]")]


def test_a_node_without_gpus_is_no_half_blind_one() -> None:
    node = NodeFacts(name="cpu1", states=frozenset(("IDLE",)))

    assert problems(NodeConfig(node_name="cpu1"), setup.Facts(node=node, nvml=ABSENT)) == []


def test_expected_gpus_that_nobody_has_set_is_told() -> None:
    found = setup.examine(NodeConfig(node_name="gpu17"), setup.Facts(node=NODE, pci=PCI, nvml=READY))

    assert [(each.level, each.subject) for each in found if "set `expected_gpus = 2`" in each.remedy] == [
        (Level.WARNING, "expected_gpus")
    ]


def test_gpus_of_a_virtual_machine_are_not_ours(tmp_path: Path) -> None:
    for address, driver in zip(PCI, ("nvidia", "vfio-pci"), strict=True):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        (tmp_path / driver).mkdir()
        (device / "driver").symlink_to(tmp_path / driver)

    assert setup.gpus_on_the_bus(Roots(sys=tmp_path)) == (PCI[0],)


@pytest.mark.parametrize(
    ("host", "address", "hostname", "fits"),
    [
        ("gpu17", "gpu17", "gpu17.site.org", True),
        ("other", "127.0.0.1", "gpu18", True),  # a slurmd with a name of its own
        ("gpu17", "192.0.2.17", "gpu18", False),  # node.toml was copied
        ("", "", "gpu18", True),  # nothing is known
    ],
)
def test_a_node_of_slurms_is_this_machine_by_name_or_address(
    host: str, address: str, hostname: str, *, fits: bool
) -> None:
    node = NodeFacts(name="gpu17", states=frozenset(), host=host, address=address)

    assert (setup.judge_identity(node, hostname, setup.is_local) == "") is fits


@pytest.fixture(scope="module")
def cluster(lab_factory: Callable[..., Lab]) -> Lab:
    return lab_factory(nodes=4, gpus=2)


@pytest.fixture
def agents(cluster: Lab) -> Iterator[Agents]:
    with Agents(cluster) as agents:
        for node in cluster.node_names:
            agents.configure(node, test={"limits": {"setup_spread_s": 1.0}})
        yield agents


def test_agents_that_start_at_once_ask_slurm_one_after_the_other() -> None:
    starts = Counter(
        int(setup.first_look_after_s(NodeConfig(node_name=f"gpu{number:05d}"))) for number in range(10_000)
    )

    assert set(starts) == set(range(60))
    assert max(starts.values()) < 2 * 10_000 / 60


@pytest.mark.slurm
def test_an_agent_drains_no_node_that_is_another_machine(cluster: Lab, agents: Agents) -> None:
    """Its `node_name` was copied: Slurm says that this node has another host name and address."""
    node = cluster.node_names[-1]
    cluster.run("scontrol", "update", f"NodeName={node}", "NodeAddr=192.0.2.17", "NodeHostname=gpu17")
    try:
        agents.start(node)
        agents.wait_event(node, "setup_problem", text="is the host gpu17 at 192.0.2.17")
        agents.inject(node, 79)
        agents.wait_event(node, "alarm", text="is the host gpu17 at 192.0.2.17")
        assert "DRAIN" not in cluster.nodes()[node].state
        checked = _check(agents, node)
    finally:
        agents.stop()
        cluster.run(
            "scontrol", "update", f"NodeName={node}", "NodeAddr=127.0.0.1", f"NodeHostname={cluster.place.hostname}"
        )

    assert checked.returncode == ExitCode.SITE_UNFIT
    assert "the agent refuses to drain" in checked.stdout


@pytest.mark.slurm
def test_a_name_that_slurm_does_not_know_is_told_at_once(cluster: Lab, agents: Agents) -> None:
    node = cluster.node_names[0]
    agents.configure(node, node_name="nosuch")
    agents.start(node)

    agents.wait_event(node, "setup_problem", text="knows no node nosuch")

    checked = _check(agents, node)
    assert checked.returncode == ExitCode.SITE_UNFIT
    assert "set `node_name`" in " ".join(checked.stdout.split())
    agents.configure(node, node_name=node)
    agents.stop(node)
    agents.start(node)
    document = json.loads(_check(agents, node, "--json").stdout)
    assert document["node"] == node
    assert not [each for each in document["findings"] if each["subject"] == f"node_name = {node}" and each["remedy"]]


def _check(agents: Agents, node: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepkeeper", "node", "agent", "--check", "--config", agents.config(node), *more],
        env=agents.environment(node),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

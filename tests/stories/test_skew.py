"""Parts of two releases at work together, on a real Slurm: what an upgrade leaves for a while.

`tests/fixtures/releases` has the wheel of the release before.  The next one's takes its place when it is out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from stepkeeper import __version__
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.lab.agents import GPUS, Agents
from tests.lab.release import RELEASED, Environment, laid_out
from tests.stories.acts import kill_ranks, kill_watcher
from tests.stories.test_faults import mend
from tests.training import Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]

[BEFORE] = [wheel.name.split("-")[1] for wheel in RELEASED.glob("*.whl")]
NOW = ""
PAIRS = [pytest.param(BEFORE, NOW, id=f"{BEFORE}-and-now"), pytest.param(NOW, BEFORE, id=f"now-and-{BEFORE}")]


class Skewed(Training):
    """A run whose supervisor and whose ranks come from given environments."""

    supervisor: Environment
    ranks: Environment

    @property
    def python(self) -> Path:
        return self.ranks.python

    @property
    def stepkeeper(self) -> Path:
        return self.supervisor.stepkeeper


def skewed(lab: Lab, name: str, supervisor: Environment, ranks: Environment, **options: object) -> Skewed:
    training = Skewed(lab, name=name, **options)  # type: ignore[arg-type]
    training.supervisor, training.ranks = supervisor, ranks
    return training


@pytest.fixture
def environments(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[Environment]:
    """Two environments that every user of the lab can run."""
    place = lab.workdir("games") / tmp_path_factory.mktemp("environments").name
    releases = lab.directory / "releases"
    for version in (BEFORE, NOW):
        laid_out(releases, version)
    return [Environment(place / str(number), "games", releases) for number in range(2)]


@pytest.mark.parametrize(("supervisor", "library"), PAIRS)
def test_supervisor_and_library_of_two_releases_preempt_and_resume(
    lab: Lab,
    environments: list[Environment],
    reference: Training,
    supervisor: str,
    library: str,
) -> None:
    one, other = environments
    training = skewed(
        lab,
        f"library-{library or 'now'}",
        one.install(supervisor),
        other.install(library),
        step_seconds=0.5,
    )
    training.submit()
    training.wait_step(13)
    lab.requeue(training.job_id)
    training.wait_end()

    resumed(training, reference)
    assert [version_of_attempt(training, attempt) for attempt in (0, 1)] == [supervisor or __version__] * 2
    assert versions_of_steps(training) == {library or __version__}


def resumed(training: Training, reference: Training) -> None:
    """The run ended with the right losses, and its second attempt went on where the first one had been."""
    assert training.exits()[-1] == ExitCode.FINISHED, training.story()
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert training.rows()[10]["attempt"] == "0", training.story()
    assert training.rows()[training.steps]["attempt"] == "1", training.story()
    assert_complete(training, reference)


def version_of_attempt(training: Training, attempt: int) -> str:
    """Return which release supervised an attempt."""
    found = json.loads((training.run_dir / f"attempts/attempt-{attempt:03d}/config.json").read_text())
    return str(found["stepkeeper"])


def versions_of_steps(training: Training) -> set[str]:
    """Return which releases wrote the step directories that are left."""
    manifests = (training.run_dir / "checkpoints").glob("step_*/MANIFEST.json")
    return {json.loads(path.read_text())["versions"]["stepkeeper_trainer"] for path in manifests}


def test_a_run_begun_by_the_release_before_goes_on_under_this_one(
    lab: Lab, environments: list[Environment], reference: Training
) -> None:
    """The installation is upgraded while the run trains; it counts from the next attempt on."""
    [environment, _] = [each.install(BEFORE) for each in environments]
    training = skewed(lab, "upgraded", environment, environment, step_seconds=0.5).submit()
    training.wait_step(13)
    environment.install(NOW)
    lab.requeue(training.job_id)
    training.wait_end()

    resumed(training, reference)
    assert [version_of_attempt(training, attempt) for attempt in (0, 1)] == [BEFORE, __version__]


@pytest.mark.parametrize(("supervisor", "watchers"), PAIRS)
def test_a_supervisor_goes_on_with_watchers_of_the_other_release(
    lab: Lab, environments: list[Environment], reference: Training, supervisor: str, watchers: str
) -> None:
    """What it has in memory is one release; the watchers that it starts again, after an exchange, are of the other."""
    environment = environments[0].install(supervisor)
    training = skewed(lab, f"watchers-{watchers or 'now'}", environment, environment, step_seconds=0.5).submit()
    training.wait_step(13)
    environment.install(watchers)
    kill_watcher(training)
    training.wait_step(20)
    environment.install(NOW)  # of the next attempt
    lab.requeue(training.job_id)
    training.wait_end()

    resumed(training, reference)
    assert [version_of_attempt(training, attempt) for attempt in (0, 1)] == [supervisor or __version__, __version__]


def test_ranks_that_die_after_an_upgrade_go_on_under_this_release(
    lab: Lab, environments: list[Environment], reference: Training
) -> None:
    """Watchers of 0.1.0 miss a module that has another name now, call their nodes unfit, and the job is requeued."""
    environment = environments[0].install(BEFORE)
    training = skewed(lab, "ranks", environment, environment, step_seconds=0.5).submit()
    training.wait_step(13)
    environment.install(NOW)
    kill_ranks(training)
    training.wait_end()

    resumed(training, reference)
    assert [version_of_attempt(training, attempt) for attempt in (0, 1)] == [BEFORE, __version__]


class AgentsBefore(Agents):
    """Agents of the release before: with settings that have become constants since."""

    CONSTANTS: ClassVar = {"previous_journal": False, "nvml": True, "health_every_s": 1.0, "expected_gpus": GPUS}

    def _write_config(self, node: str) -> None:
        directory = self.directory / node
        directory.mkdir(exist_ok=True)
        settings = {
            "mode": self.mode, "node_name": node, "socket": str(self.socket(node)),
            "state_dir": str(directory / "state"), "run_dir": str(directory / "run"),
            "slurm_conf": str(self.lab.place.conf), **self.CONSTANTS,
        }  # fmt: skip
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        lines += ["[test]", "allow_injected = true", f'only_pci_prefix = "{self.domains[node]}:"']
        self.config(node).write_text("\n".join(lines) + "\n")
        self.config(node).chmod(0o644)


@pytest.fixture(params=[BEFORE, NOW], ids=lambda version: version or "now")
def agents(request: pytest.FixtureRequest, lab: Lab, environments: list[Environment]) -> Iterator[Agents]:
    """Agents of one release on every node; the jobs beside them are of the other."""
    kind = AgentsBefore if request.param else Agents
    with kind(lab, nvml=True, python=environments[0].install(request.param).python) as agents:
        environments[1].install(NOW if request.param else BEFORE)
        agents.start()
        yield agents
    mend(lab)


def test_a_job_leaves_a_node_at_the_word_of_an_agent_of_the_other_release(
    lab: Lab, agents: Agents, environments: list[Environment], reference: Training
) -> None:
    job = environments[1]
    env = {"STEPKEEPER_AGENT_SOCKET": str(agents.directory / "%N" / "run" / "agent.sock")}
    training = skewed(
        lab, f"agent-{type(agents).__name__}", job, job, nodes=3, step_seconds=0.4, run_args=("--spares=1",), env=env
    ).submit()
    training.wait_step(13)
    bad = next(node for node in training.launches()[0] if node != lab.job(training.job_id).batch_host)

    agents.inject(bad, 79)
    training.wait_event(on.NodeFaulted)
    training.wait_end()

    assert_complete(training, reference)
    assert bad not in training.launches()[1]
    assert "XID 79" in lab.nodes()[bad].reason

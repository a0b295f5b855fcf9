"""Fixtures of the socket's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node_agent.socket.people import AgentProcess, public_directory


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory of root's that every user can pass through."""
    with public_directory() as directory:
        yield directory


@pytest.fixture
def agents(public: Path) -> Iterator[Callable[..., AgentProcess]]:
    """Return a function that starts an agent with other limits; at the end it must still end in order."""
    started: list[AgentProcess] = []

    def start(**limits: object) -> AgentProcess:
        started.append(AgentProcess(public, **limits))
        return started[-1]

    yield start
    for agent in started:
        agent.close()


@pytest.fixture
def agent(agents: Callable[..., AgentProcess]) -> AgentProcess:
    """An agent with the limits that it has by default."""
    return agents()

"""Fixtures of the stories about the agent's rules."""

import pytest

from tests.node_agent.agent.story import Cluster, Node


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("a", "b", "c", "d")


@pytest.fixture
def node(cluster: Cluster) -> Node:
    return Node(cluster, "a")

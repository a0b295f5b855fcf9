"""On which nodes of its partition a job fits: only they stand in for one that it excludes."""

from __future__ import annotations

import pytest

from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import parse_fit

PARTITION = """\
n1|mixed|h100,ib,rack1|gpu:h100:8(S:0-1)|128|1031000
n2|idle|h100,ib,rack2|gpu:h100:8(S:0,1)|128|1031000
n3|allocated|h100,ib,rack2|gpu:h100:8(S:0-1)|128|2063000
n4|idle|h100,rack3|gpu:h100:8(S:0-1)|128|1031000
n5|idle|h100,ib,rack3|gpu:h100:4(S:0-1)|128|1031000
n6|idle|h100,ib,rack3|gpu:h100:8(S:0-1)|64|1031000
n7|idle|h100,ib,rack3|gpu:h100:8(S:0-1)|128|515000
c1|idle|rack1|(null)|256|1031000
c2|idle|(null)|(null)|256|1031000
"""


def test_only_nodes_made_as_well_as_one_of_the_jobs_own_count():
    """What its own nodes are named by, and where their GPUs are plugged in, is no matter."""
    assert parse_fit(PARTITION, ["n1"]) == ("n1", "n2", "n3", "n4")
    assert parse_fit(PARTITION, ["n3"]) == ("n3",)
    assert parse_fit(PARTITION, ["n1", "n5"]) == ("n1", "n2", "n3", "n4", "n5")
    assert parse_fit(PARTITION, ["c2"]) == ("c1", "c2")


@pytest.mark.parametrize(
    ("features", "fit"),
    [
        ("ib", ("n1", "n2", "n3")),
        ("h100&ib", ("n1", "n2", "n3")),
        ("h100|a100", ("n1", "n2", "n3", "n4")),
        ("[rack1|rack2]", ("n1",)),  # all nodes in one rack
        ("[rack1*1&rack3*1]", ("n1",)),
        ("(h100&ib)|rack3", ("n1", "n2", "n3")),
    ],
)
def test_of_features_those_count_that_the_job_asks_for(features, fit):
    assert parse_fit(PARTITION, ["n1"], features) == fit


@pytest.mark.parametrize("state", ["drained", "draining", "drained*", "down", "down*"])
def test_a_node_that_is_drained_or_down_is_none_but_says_what_the_job_needs(state):
    listing = PARTITION.replace("n1|mixed", f"n1|{state}")

    assert parse_fit(listing, ["n1"]) == ("n2", "n3", "n4")


def test_where_none_of_the_jobs_nodes_is_listed_every_node_counts():
    assert parse_fit(PARTITION, ["x"]) == parse_fit(PARTITION, []) == (*(f"n{i}" for i in range(1, 8)), "c1", "c2")
    assert parse_fit("", ["x"]) == ()


@pytest.mark.parametrize("line", ["n1|idle|h100|gpu:8|64", "n1|idle|h100|gpu:8|64+|9", "slurm: error"])
def test_an_answer_that_cannot_be_read_is_said(line):
    with pytest.raises(SlurmError, match="unexpected answer"):
        parse_fit(line, ["n1"])

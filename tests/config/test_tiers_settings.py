from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper.config.rank_settings import tier_variables, tiers_of
from stepkeeper.config.settings import RunSettings
from stepkeeper.errors import StepkeeperError
from stepkeeper_trainer.tiers.tier import TierError, Tiers, from_environment


def test_ranks_read_what_the_run_was_given() -> None:
    settings = RunSettings(
        local_tier="/nvme", cold_tier="s3://bucket/run", copy_rate=0.5, cold_keep=4, peer_copies=True
    )
    told = tier_variables(settings)
    assert from_environment(told) == tiers_of(settings)
    assert from_environment(told) == Tiers(
        local="/nvme", cold="s3://bucket/run", megabytes_per_s=0.5, cold_keep=4, peers=True
    )
    held = RunSettings(snapshot_every="5 steps", snapshot_dir="/memory", peer_copies=True, peer_interface="ib0")
    assert from_environment(tier_variables(held)) == Tiers(
        snapshot_every="5 steps", snapshot_directory="/memory", peers=True, peer_interface="ib0"
    )
    assert from_environment({"STEPKEEPER_SNAPSHOT_EVERY": "30 s"}).snapshot_directory == "/dev/shm"
    assert tier_variables(RunSettings(local_keep=5)) == {}, "without a tier ranks are told nothing"
    assert not from_environment({}).any


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/run", "https://host/run?sig=secret", "az://secret@host/run", "gs://b/r#secret"]
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StepkeeperError, match="holds no credentials") as told:
        tier_variables(RunSettings(cold_tier=url))
    assert "secret" not in str(told.value)
    with pytest.raises(TierError, match="holds no credentials"):
        from_environment({"STEPKEEPER_COLD_TIER": url})


@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        (Tiers(local="nvme"), "an absolute path is wanted"),
        (Tiers(cold="archive/run"), "an absolute path or a URL"),
        (Tiers(local="/nvme", megabytes_per_s=0.0), "more than 0"),
        (Tiers(local="/nvme", local_keep=0), "at least 1"),
        (Tiers(cold="/cold", peers=True), "there are none"),
        (Tiers(local="/nvme", peer_interface="ib0"), "for peer copies, and there are none"),
        (Tiers(local="/nvme", peers=True, peer_interface="ib0/1"), "not the name of a network interface"),
        (Tiers(snapshot_every="5 steps", snapshot_directory="shm"), "an absolute path is wanted"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(tiers: Tiers, problem: str) -> None:
    with pytest.raises(TierError, match=problem):
        tiers.check()


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(TierError, match="STEPKEEPER_COPY_RATE='fast'"):
        from_environment({"STEPKEEPER_COPY_RATE": "fast"})
    with pytest.raises(TierError, match=r"STEPKEEPER_COLD_KEEP='1\.5'"):
        from_environment({"STEPKEEPER_COLD_KEEP": "1.5"})


def test_each_run_has_a_place_of_its_own_on_a_disk_that_runs_share(tmp_path: Path) -> None:
    tiers = Tiers(local="/nvme")
    runs = [(tmp_path / owner / "run", made) for owner in ("a", "b") for made in ("1", "2")]
    places = {tiers.local_checkpoints(run, made, "n1") for run, made in runs}
    assert len(places) == 4
    assert all(str(place).startswith("/nvme/run.") for place in places)
    assert tiers.local_checkpoints(tmp_path / "a" / "run", "1", "n2") in places


def test_a_disk_may_be_named_by_its_node(tmp_path: Path) -> None:
    tiers = Tiers(local="/disks/%N/fast").check()
    places = [tiers.local_checkpoints(tmp_path / "run", "1", node) for node in ("n1", "n2")]
    assert [str(place).partition("/run.")[0] for place in places] == ["/disks/n1/fast", "/disks/n2/fast"]

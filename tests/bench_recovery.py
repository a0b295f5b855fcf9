"""`make bench-recovery`: failures under several ways to keep a training alive, side by side on one lab (root, Slurm).

The same model, data, step and cadence of saves for all; each fault is done to each way in turn, and the whole round is
repeated.  It writes docs/benchmarks-recovery.md.  With `--production` it plays a lost node alone, with the clocks that
Slurm has in production, and writes docs/benchmarks-recovery-production.md.

    python -m tests.bench_recovery [--quick] [--ways stepkeeper,torchrun] [--faults rank,hang] [--repeats 3]
    python -m tests.bench_recovery --production [--ways stepkeeper,torchrun] [--repeats 1]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from threading import Lock

from tests.lab import Lab, LabOptions
from tests.recovery import pieces
from tests.recovery.environment import Peers, peers
from tests.recovery.page import page
from tests.recovery.playing import FAULTS, IN_PRODUCTION, LOST_AFTER_SAVE, Fault, Outcome, play, steps
from tests.recovery.ways import EVERY, STEP_SECONDS, USER, WAYS, Way

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PRODUCTION_PAGE = DOCS / "benchmarks-recovery.md", DOCS / "benchmarks-recovery-production.md"
NOTES = Path(__file__).with_name("recovery") / "notes.md"
PRODUCTION_NOTES = NOTES.with_name("production.md")
LOST_NODES = ("stepkeeper", "stepkeeper-warm", "stepkeeper-spare", "stepkeeper-shrink")
TAKEN_APART = {  # fault -> how the page calls it, what takes it apart, and under which ways
    "rank": ("A killed rank", pieces.of_rank, ("stepkeeper", "stepkeeper-warm")),
    "hang": ("A hang", pieces.of_hang, ("stepkeeper", "stepkeeper-warm")),
    "stopped": ("A rank stopped by SIGSTOP", pieces.of_hang, ("stepkeeper", "stepkeeper-warm")),
    "node": ("A lost node", pieces.of_node, LOST_NODES),
    "silent": ("A node that falls silent", pieces.of_node, LOST_NODES),
}
OPTIONS = LabOptions(nodes=12, gpus=1, grace_time_s=30, kill_wait_s=10, slurmd_timeout_s=8, send_user_signal=True)
PRODUCTION = replace(OPTIONS, kill_wait_s=30, slurmd_timeout_s=300, cred_expire_s=None)
NODES_EACH = 4  # two that train or three with a spare, and one in place of the lost one
HEAD = """\
Written by `make bench-recovery`{how}, and by nothing else. {cores} cores, load average {load} before it began, torch
{torch}{versions}. Machines are noisy and shared: quote the ratios.

Two ranks on two nodes of a real Slurm, a job of an ordinary user. All ways have the same transformer, data,
optimizer and batch. A step takes {step} s, every {every} steps are saved, and the fault comes {lost} steps after a
save. *Next new step*: the first step that had not been done before, told by rank 0. Medians of {repeats}; ratios are
to Stepkeeper's median of this run.

What Slurm adds is the same for all, and shorter than in production. A requeued job waits {cred} s for its credential
to expire (production: 120 s). A silent node is DOWN after {slurmd} s (300 s), and KillWait is {kill} s (30 s).
GraceTime is {grace} s. The site sends `--signal` at a preemption (`preempt_send_user_signal`): submitit, Lightning
and the trap rely on that. The urgent job ends as soon as it runs. Nodes are lost by SIGKILL to all that runs there."""

PRODUCTION_HEAD = """\
Written by `python -m tests.bench_recovery --production`, and by nothing else. {cores} cores, load average {load} before
it began, torch {torch}{versions}. Medians of {repeats}; ratios are to Stepkeeper's median of this run.

The trainings and what is counted are those of [the other page](benchmarks-recovery.md). Slurm's clocks are those of
production: `SlurmdTimeout=300`, `KillWait=30`, and a requeued job waits 120 s for its credential to expire.

All ways wait at the same time on one cluster. Each has {each} nodes that no other way may use. They begin one after
another: the next training is submitted when the node of the one before is lost. So a recovery may share its cores with
a training that begins, which costs it some seconds."""


class Bench:
    """What one run plays, and what it has found so far."""

    def __init__(self, lab: Lab, site: Peers) -> None:
        self.lab, self.site = lab, site
        self.outcomes: list[Outcome] = []
        # what came before -> way -> piece -> one figure a repeat
        self.pieces: dict[str, dict[str, dict[str, list[float]]]] = {}
        self._serial = 0

    def name(self, way: Way, fault: Fault) -> str:
        """Return a directory's name that was not used before."""
        self._serial += 1
        return f"{way.name}-{fault.name}-{self._serial}"

    def one(
        self,
        way: Way,
        fault: Fault,
        name: str,
        *,
        constraint: str = "",
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        """Play one cell, and take Stepkeeper's relaunch apart where it is one."""
        began = time.time()
        try:
            outcome, spot = play(self.lab, self.site, way, fault, name, constraint=constraint, turn=turn)
        except Exception as error:  # noqa: BLE001 - one cell must not cost the others; the page tells
            outcome, spot = Outcome(way=way.name, fault=fault.name, why_not=f"could not be played: {error}"[:300]), None
            print(f"{name}: {error}", flush=True)
        self.outcomes.append(outcome)
        found = f"{outcome.seconds:.1f} s, {outcome.redone} redone" if outcome.seconds is not None else outcome.why_not
        print(f"{name}: {found}  [{time.time() - began:.0f} s]", flush=True)
        what, take_apart, ways = TAKEN_APART.get(fault.name, ("", pieces.of_rank, ()))
        if spot is not None and way.name in ways and outcome.seconds is not None:
            journal = spot.directory / "run" / "journal.jsonl"
            own = self.pieces.setdefault(what, {}).setdefault(way.name, {})
            for piece, seconds in take_apart(journal, outcome.struck_at, steps(spot)).items():
                own.setdefault(piece, []).append(seconds)

    def lost(self, way: Way, fault: Fault) -> bool:
        """Tell whether a way cannot recover: once is enough where it is known why, else it may have been bad luck."""
        own = [each for each in self.outcomes if (each.way, each.fault) == (way.name, fault.name)]
        return fault.name in way.reasons and bool(own) and all(each.why_not for each in own)

    def round(self, ways: list[Way], fault: Fault) -> None:
        """Play a fault under each way; those that will only stand still do so together."""
        ways = [way for way in ways if not self.lost(way, fault) and (fault.loses_node or not way.only_lost_nodes)]
        together = [way for way in ways if fault.name == "hang" and not way.watches_hangs]
        for way in ways:
            if way not in together:
                self.one(way, fault, self.name(way, fault))
        if together:
            with ThreadPoolExecutor(len(together)) as pool:
                for done in [pool.submit(self.one, way, fault, self.name(way, fault)) for way in together]:
                    done.result()

    def at_the_same_time(self, ways: Sequence[Way], fault: Fault) -> None:
        """Play a fault under all ways, each on nodes of its own; the fault comes to one after another."""
        turn = Lock()
        with ThreadPoolExecutor(len(ways)) as pool:
            for done in [
                pool.submit(self.one, way, fault, self.name(way, fault), constraint=way.name, turn=turn) for way in ways
            ]:
                done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure recoveries on a lab cluster, side by side.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="once, without hangs and without the ways with a spare")
    parser.add_argument("--ways", default="", help=f"some of {','.join(WAYS)}")
    parser.add_argument("--faults", default="", help=f"some of {','.join({**FAULTS, **IN_PRODUCTION})}")
    parser.add_argument("--production", action="store_true", help="lost nodes alone, with production's clocks")
    parser.add_argument("--page", type=Path, help=f"default: {PAGE}, or {PRODUCTION_PAGE}")
    chosen = parser.parse_args()
    if chosen.production and chosen.quick:
        parser.error("--production waits for many minutes: it is not --quick")
    quick = {"stepkeeper-spare", "stepkeeper-snapshots", "hang"} if chosen.quick else set()
    ways = [WAYS[name] for name in chosen.ways.split(",") if name] or [w for w in WAYS.values() if w.name not in quick]
    known = IN_PRODUCTION if chosen.production else FAULTS
    faults = [known[name] for name in chosen.faults.split(",") if name]
    faults = faults or [fault for fault in known.values() if fault.name not in quick]
    repeats = 1 if chosen.quick else chosen.repeats

    site = peers(USER)
    load = f"{os.getloadavg()[0]:.1f}"
    if chosen.production:
        text = head(PRODUCTION_HEAD, site, load, repeats)
        production(site, ways, faults * repeats, text, chosen.page or PRODUCTION_PAGE)
        return
    played, absent = playable(site, ways)
    with Lab(OPTIONS) as lab:
        bench = Bench(lab, site)
        for _ in range(repeats):
            for fault in faults:
                bench.round(played, fault)
                text = page(
                    bench.outcomes,
                    bench.pieces,
                    ways=played,
                    faults=faults,
                    head=head(HEAD, site, load, repeats, quick=chosen.quick),
                    notes=NOTES.read_text(),
                    absent=absent,
                )
                # after each round: hours are not lost to a last one that fails
                (chosen.page or PAGE).write_text(text)
    print(text)


def playable(site: Peers, ways: list[Way]) -> tuple[list[Way], dict[str, str]]:
    """Return the ways that are installed here, and why the others are not."""
    absent = {way.name: site.missing[way.package] for way in ways if way.package in site.missing}
    return [way for way in ways if way.name not in absent], absent


def production(site: Peers, wanted: list[Way], faults: list[Fault], head: str, to: Path) -> None:
    """Play one fault after another with production's clocks, each under all ways, and write the page after each."""
    ways, absent = playable(site, wanted)
    with Lab(replace(PRODUCTION, nodes=NODES_EACH * len(ways))) as lab:
        for index, way in enumerate(ways):
            own = ",".join(lab.node_names[NODES_EACH * index : NODES_EACH * (index + 1)])
            lab.run("scontrol", "update", f"NodeName={own}", f"AvailableFeatures={way.name}")
        bench = Bench(lab, site)
        for fault in faults:
            bench.at_the_same_time(ways, fault)
            text = page(
                bench.outcomes,
                bench.pieces,
                ways=ways,
                faults=list(dict.fromkeys(faults)),
                head=head,
                notes=PRODUCTION_NOTES.read_text(),
                absent=absent,
                title="A lost node with production's clocks",
            )
            to.write_text(text)
    print(text)


def head(text: str, site: Peers, load: str, repeats: int, *, quick: bool = False) -> str:
    """Say where, when and under what conditions."""
    others = "".join(f", {name} {version}" for name, version in site.versions.items() if name != "torch")
    return text.format(
        how=" with `--quick`" if quick else "",
        cores=os.cpu_count(),
        load=load,
        torch=site.versions["torch"],
        versions=others,
        step=STEP_SECONDS,
        every=EVERY,
        lost=LOST_AFTER_SAVE,
        repeats=repeats,
        cred=OPTIONS.cred_expire_s,
        slurmd=OPTIONS.slurmd_timeout_s,
        kill=OPTIONS.kill_wait_s,
        grace=OPTIONS.grace_time_s,
        each=NODES_EACH,
    )


if __name__ == "__main__":
    main()

"""`make bench-recovery`: failures under several ways to keep a training alive, side by side on one lab (root, Slurm).

The same model, data, step and cadence of saves for all; each fault is done to each way in turn.  That is a round.  It
is kept in tests/recovery/rounds, and docs/benchmarks-recovery.md shows the newest three.  With `--production` a lost
node is played alone, with the clocks that Slurm has in production, for docs/benchmarks-recovery-production.md.

    python -m tests.bench_recovery [--repeats 3] [--production]
    python -m tests.bench_recovery --page PAGE [--quick] [--ways stepkeeper,torchrun] [--faults rank,hang]

With `--page` nothing is kept, and the page shows this run alone.  Without a round to play (`--repeats 0`) the page is
written from what is kept.
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
from tests.recovery.playing import FAULTS, IN_PRODUCTION, LOST_AFTER_SAVE, STOPPED, Fault, Outcome, play, steps
from tests.recovery.rounds import Round, newest, table
from tests.recovery.ways import EVERY, STEP_SECONDS, USER, WAYS, Way

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PRODUCTION_PAGE = DOCS / "benchmarks-recovery.md", DOCS / "benchmarks-recovery-production.md"
NOTES = Path(__file__).with_name("recovery") / "notes.md"
PRODUCTION_NOTES = NOTES.with_name("production.md")
LOST_NODES = ("stepkeeper", "stepkeeper-agent", "stepkeeper-warm", "stepkeeper-spare", "stepkeeper-shrink")
TAKEN_APART = {  # fault -> how the page calls it, what takes it apart, and under which ways
    "rank": ("A killed rank", pieces.of_rank, ("stepkeeper", "stepkeeper-warm", "stepkeeper-snapshots-warm")),
    "hang": ("A hang", pieces.of_hang, ("stepkeeper", "stepkeeper-warm")),
    "stopped": ("A rank stopped by SIGSTOP", pieces.of_hang, ("stepkeeper", "stepkeeper-warm")),
    "node": ("A lost node", pieces.of_node, LOST_NODES),
    "silent": ("A node that falls silent", pieces.of_node, LOST_NODES),
}
OPTIONS = LabOptions(nodes=12, gpus=1, grace_time_s=30, kill_wait_s=10, slurmd_timeout_s=8, send_user_signal=True)
NODES_EACH = 4  # two that train or three with a spare, and one in place of the lost one
PRODUCTION = replace(OPTIONS, nodes=NODES_EACH * len(WAYS), kill_wait_s=30, slurmd_timeout_s=300, cred_expire_s=None)
HEAD = """\
Written by `make bench-recovery`, and by nothing else. Machines are noisy and shared: quote the ratios.

{rounds}

Two ranks on two nodes of a real Slurm, a job of an ordinary user. All ways have the same transformer, data,
optimizer and batch. A step takes {step} s, every {every} steps are saved, and the fault comes {lost} steps after a
save. *Next new step*: the first step that had not been done before, told by rank 0. Medians of {repeats} rounds.
A ratio is the median of each round's ratio to Stepkeeper.

What Slurm adds is the same for all, and shorter than in production. A requeued job waits {cred} s for its credential
to expire (production: 120 s). A silent node is DOWN after {slurmd} s (300 s), and KillWait is {kill} s (30 s).
GraceTime is {grace} s. The site sends `--signal` at a preemption (`preempt_send_user_signal`): submitit, Lightning
and the trap rely on that. The urgent job ends as soon as it runs. Nodes are lost by SIGKILL to all that runs there."""

PRODUCTION_HEAD = """\
Written by `python -m tests.bench_recovery --production`, and by nothing else. Medians of {repeats} rounds. A ratio is
the median of each round's ratio to Stepkeeper.

{rounds}

The trainings and what is counted are those of [the other page](benchmarks-recovery.md). Slurm's clocks are those of
production: `SlurmdTimeout=300`, `KillWait=30`, and a requeued job waits 120 s for its credential to expire.

All ways wait at the same time on one cluster. Each has {each} nodes that no other way may use. They begin one after
another: the next training is submitted when the node of the one before is lost. So a recovery may share its cores with
a training that begins, which costs it some seconds."""


class Bench:
    """What one run plays, and what it has found so far."""

    def __init__(self, lab: Lab, site: Peers) -> None:
        self.lab, self.site = lab, site
        self.outcomes: list[Outcome] = []  # of this round
        self.pieces: dict[str, dict[str, dict[str, float]]] = {}  # what came before -> way -> piece -> seconds
        self.at, self.load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
        self._serial = 0
        self._own: dict[str, Sequence[str]] = {}  # way -> the nodes that it may have; all, where it is not here

    def give_nodes(self, ways: Sequence[Way]) -> None:
        """Give each of these ways nodes of its own."""
        for index, way in enumerate(ways):
            nodes = self.lab.node_names[NODES_EACH * index : NODES_EACH * (index + 1)]
            self.lab.run("scontrol", "update", f"NodeName={','.join(nodes)}", f"AvailableFeatures={way.name}")
            self._own[way.name] = nodes

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
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        """Play one cell, and take Stepkeeper's relaunch apart where it is one."""
        began = time.time()
        try:
            outcome, spot = play(self.lab, self.site, way, fault, name, own=self._own.get(way.name, ()), turn=turn)
        except Exception as error:  # noqa: BLE001 - one cell must not cost the others; the page tells
            outcome, spot = Outcome(way=way.name, fault=fault.name, why_not=f"could not be played: {error}"[:300]), None
            print(f"{name}: {error}", flush=True)
        self.outcomes.append(outcome)
        found = f"{outcome.seconds:.1f} s, {outcome.redone} redone" if outcome.seconds is not None else outcome.why_not
        print(f"{name}: {found}  [{time.time() - began:.0f} s]", flush=True)
        what, take_apart, ways = TAKEN_APART.get(fault.name, ("", pieces.of_rank, ()))
        if spot is not None and way.name in ways and outcome.seconds is not None:
            journal = spot.directory / "run" / "journal.jsonl"
            self.pieces.setdefault(what, {})[way.name] = take_apart(journal, outcome.struck_at, steps(spot))

    def found(self) -> Round:
        """Return what the round has found."""
        cores = os.cpu_count() or 0
        return Round(
            at=self.at,
            cores=cores,
            load=self.load,
            versions=self.site.versions,
            outcomes=self.outcomes,
            pieces=self.pieces,
        )

    def one_after_another(self, ways: Sequence[Way], fault: Fault) -> None:
        """Play a fault under each way; those that will only stand still do so together."""
        ways = [way for way in ways if not way.faults or fault.name in way.faults]
        together = [way for way in ways if fault.name in ("hang", STOPPED.name) and not way.watches_hangs]
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
            for done in [pool.submit(self.one, way, fault, self.name(way, fault), turn=turn) for way in ways]:
                done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure recoveries on a lab cluster, side by side.")
    parser.add_argument("--repeats", type=int, default=1, help="rounds to play")
    parser.add_argument("--quick", action="store_true", help="once, without hangs and without the ways with a spare")
    parser.add_argument("--ways", default="", help=f"some of {','.join(WAYS)}")
    parser.add_argument("--faults", default="", help=f"some of {','.join({**FAULTS, **IN_PRODUCTION})},{STOPPED.name}")
    parser.add_argument("--production", action="store_true", help="lost nodes alone, with production's clocks")
    parser.add_argument("--page", type=Path, help="where the page of this run alone goes; nothing is kept")
    chosen = parser.parse_args()
    if chosen.production and chosen.quick:
        parser.error("--production waits for many minutes: it is not --quick")
    if chosen.page is None and (chosen.quick or chosen.ways or chosen.faults):
        parser.error("a part of a round is not kept: say where its --page goes")
    quick = {"stepkeeper-spare", "stepkeeper-snapshots", "stepkeeper-snapshots-warm", "hang"} if chosen.quick else set()
    ways = [WAYS[name] for name in chosen.ways.split(",") if name] or [w for w in WAYS.values() if w.name not in quick]
    known = IN_PRODUCTION if chosen.production else FAULTS
    faults = [{**known, STOPPED.name: STOPPED}[name] for name in chosen.faults.split(",") if name]
    faults = faults or [fault for fault in known.values() if fault.name not in quick]

    site = peers(USER)
    ways = [way for way in ways if way.package not in site.missing]
    kind = "production" if chosen.production else "recovery"
    played: list[Round] = []
    for _ in range(chosen.repeats):
        with Lab(PRODUCTION if chosen.production else OPTIONS) as lab:
            bench = Bench(lab, site)
            bench.give_nodes([way for way in ways if way.agents or chosen.production])
            for fault in faults:
                if chosen.production:
                    bench.at_the_same_time(ways, fault)
                else:
                    bench.one_after_another(ways, fault)
                if chosen.page:
                    write(kind, [*played, bench.found()], faults, site, chosen.page)
        played.append(bench.found())
        if chosen.page is None:
            print(f"kept: {bench.found().keep(kind)}", flush=True)
    if chosen.page is None:
        write(kind, newest(kind), faults, site, PRODUCTION_PAGE if chosen.production else PAGE)


def write(kind: str, rounds: Sequence[Round], faults: Sequence[Fault], site: Peers, to: Path) -> None:
    """Write the page of some rounds; rows are the ways that any of them has played."""
    if not rounds:
        raise SystemExit(f"tests/recovery/rounds has no round of {kind}: play one first")
    production = kind == "production"
    played = {each.way for one in rounds for each in one.outcomes}
    text = page(
        rounds,
        ways=[way for way in WAYS.values() if way.name in played],
        faults=faults,
        head=head(PRODUCTION_HEAD if production else HEAD, rounds),
        notes=(PRODUCTION_NOTES if production else NOTES).read_text(),
        absent={way.name: site.missing[way.package] for way in WAYS.values() if way.package in site.missing},
        title="A lost node with production's clocks" if production else "Recovery, side by side",
    )
    to.write_text(text)
    print(text)


def head(text: str, rounds: Sequence[Round]) -> str:
    """Say where, when and under what conditions."""
    return text.format(
        rounds=table(rounds),
        step=STEP_SECONDS,
        every=EVERY,
        lost=LOST_AFTER_SAVE,
        repeats=len(rounds),
        cred=OPTIONS.cred_expire_s,
        slurmd=OPTIONS.slurmd_timeout_s,
        kill=OPTIONS.kill_wait_s,
        grace=OPTIONS.grace_time_s,
        each=NODES_EACH,
    )


if __name__ == "__main__":
    main()

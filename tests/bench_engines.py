"""`make bench-engines`: what a save costs a training with Hugging Face and Lightning, by themselves and by our library.

One run has the ways in turn, several rounds of each, two gloo ranks a training.  It prints a table for
docs/frameworks.md.

    python -m tests.bench_engines [--rounds 5] [--steps 24] [--every 8] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import stepkeeper_trainer
from tests.frameworks import environments, playing

FRAMEWORKS = {"huggingface": ["transformers.trainer", "accelerate"], "lightning": ["lightning"]}
WAYS = ("own", "ours")
SHOWN = {"own": "its own save", "ours": "our library"}


@dataclass(frozen=True)
class Costs:
    """Of the saves of one training, in seconds."""

    step: float  # one without a save
    blocked: list[float]  # how much longer the step behind a save took
    lost: list[float]  # how much longer all steps up to the next save took
    durable: list[float]  # from the end of the step until the disk had its checkpoint


def costs(found: dict[str, dict[str, float]], steps: int, every: int) -> Costs:
    """Return what the stamps of a training say; the last save, with which training ends, is left out."""
    ends, durable, synced = ({int(step): at for step, at in found[name].items()} for name in found)
    took = {step: ends[step + 1] - ends[step] - synced.get(step, 0.0) for step in range(1, steps)}
    saves = range(every, steps, every)
    usual = statistics.median(took[step] for step in range(2, every))
    return Costs(
        usual,
        [took[step] - usual for step in saves],
        [sum(took[at] - usual for at in range(step, min(step + every, steps))) for step in saves],
        [durable[step] - ends[step] for step in saves],
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="where the checkpoints go: a disk")
    options = parser.parse_args(argv)
    root = Path(tempfile.mkdtemp(prefix="bench-engines-", dir=options.directory))
    print(f"load averages before: {os.getloadavg()}", file=sys.stderr)
    print(
        "| framework | saved by | a step | blocked | lost until the next save | until durable |\n"
        "|---|---|---|---|---|---|"
    )
    try:
        for name, imports in FRAMEWORKS.items():
            measure(name, imports, options, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"load averages after: {os.getloadavg()}", file=sys.stderr)
    return 0


def measure(name: str, imports: list[str], options: argparse.Namespace, root: Path) -> None:
    python, why = environments.python(name)
    if python is None:
        raise SystemExit(f"{name}: {why}")
    library = Path(stepkeeper_trainer.__file__).parent.parent
    further = {"PYTHONPATH": f"{library}:{playing.SCRIPTS}"}
    found: dict[str, list[Costs]] = {way: [] for way in WAYS}
    with playing.warm(python, f"{name}_saving.py", imports, [], further=further) as framework:
        for number in range(options.rounds):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                out, stamps = root / "out", root / "stamps"
                words = ["--steps", str(options.steps), "--every", str(options.every), "--way", way]
                codes = framework.play(out, stamps, arguments=words)
                if codes != [0, 0]:
                    raise SystemExit(Path(f"{stamps}.log.0").read_text()[-3000:])
                found[way].append(costs(json.loads(stamps.read_text()), options.steps, options.every))
                shutil.rmtree(out)
    for way in WAYS:
        each = [[x for c in found[way] for x in getattr(c, part)] for part in ("blocked", "lost", "durable")]
        step = statistics.median(c.step for c in found[way])
        cells = " | ".join(f"{statistics.median(values):.2f} s" for values in each)
        print(f"| {name} | {SHOWN[way]} | {step:.2f} s | {cells} |", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.picture FILE.svg`: the README's moving picture, of a training that is really preempted.

The screens are those of `stepkeeper status --follow`, looked at on the lab while the job runs, is preempted, waits and
resumes.  A viewer who wants no motion sees the last one.
"""

import argparse
import html
import os
import re
import sys
import time
from pathlib import Path

import msgspec

from stepkeeper.core import events as on
from stepkeeper.run_analytics import reading
from stepkeeper.run_analytics.follow import Look
from stepkeeper.run_analytics.screen import screen
from stepkeeper.run_store.paths import RunDirectory
from tests.lab import Lab, LabOptions
from tests.training import Training

COLUMNS, LINES = 88, 20
CHARACTER, LINE, MARGIN = 8, 18, 16  # pixels
FRAME_S = 1.6
FRAMES_A_PHASE = 2
_PHASE = re.compile(r"phase +(\w+)")


class Film:
    """What the screen showed, in its order: of each phase the first frames."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._reader = reading.Reader(run)
        self._look = Look(run)
        self._phase = ""
        self._of_phase = 0
        self.frames: list[list[str]] = []

    def take(self, *, anyway: bool = False) -> None:
        """Take a picture, if it shows something new."""
        now = time.time()
        accounts = self._reader.see(now=now).accounts
        seen = self._look.look()
        decisions = tuple(msgspec.structs.replace(each, why=self._short(each.why)) for each in seen.decisions)
        status = seen.status and msgspec.structs.replace(seen.status, why=self._short(seen.status.why))
        seen = msgspec.structs.replace(seen, decisions=decisions, status=status)
        lines = screen(self._short(str(self._run.path)), seen, accounts, now=now, width=COLUMNS, height=LINES)
        phase = _PHASE.match(lines[1])
        word = phase[1] if phase else lines[1]
        if word != self._phase:
            self._phase, self._of_phase = word, 0
        self._of_phase += 1
        if anyway or self._of_phase <= FRAMES_A_PHASE:
            self.frames.append(lines)

    def _short(self, words: str) -> str:
        """Leave out where the lab is, which tells a reader nothing."""
        return words.replace(str(self._run.path.parent), "runs")


def film(lab: Lab) -> list[list[str]]:
    """Have a training preempted, and film it."""
    training = Training(lab, name="llm", steps=300, step_seconds=0.2).submit()
    training.until(lambda: training.step() >= 60, "the first steps")
    shown = Film(RunDirectory(training.run_dir))
    shown.take()
    urgent = lab.preempt(training.job_id)

    def filmed(*, over: bool) -> bool:
        shown.take()
        return over

    training.until(lambda: filmed(over=lab.job(urgent).state == "RUNNING"), "the urgent job")
    lab.release(urgent)
    again = "the attempt after it"
    training.until(lambda: filmed(over=len(training.events(on.AttemptStarted)) > 1), again)
    training.until(lambda: filmed(over=training.step() >= 150), "steps again")
    shown.take(anyway=True)
    return shown.frames


def drawing(frames: list[list[str]]) -> str:
    """Return the frames, one after the other, as an SVG."""
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, LINES * LINE + 2 * MARGIN
    whole, share = len(frames) * FRAME_S, 100 / len(frames)
    style = (
        "text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#e6e8eb;white-space:pre}"
        "g{opacity:0;animation:show " + f"{whole:.1f}s step-end infinite" + "}"
        f"@keyframes show{{0%{{opacity:1}}{share:.3f}%{{opacity:0}}}}"
        "@media(prefers-reduced-motion:reduce){g{animation:none}g:last-of-type{opacity:1}}"
    )
    groups = "\n".join(
        f'<g style="animation-delay:{index * FRAME_S - whole:.1f}s">{"".join(map(_line, range(LINES), lines))}</g>'
        for index, lines in enumerate(frames)
    )
    said = "stepkeeper status --follow: a training is preempted, saves, is requeued, resumes and continues"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{said}">'
        f"<title>{said}</title><style>{style}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#14171c"/>\n{groups}\n</svg>\n'
    )


def _line(number: int, text: str) -> str:
    if not text.strip():
        return ""
    indent = len(text) - len(text.lstrip())
    words = text.strip()
    place = f'x="{MARGIN + indent * CHARACTER}" y="{MARGIN + (number + 1) * LINE - 5}"'
    length = f'textLength="{len(words) * CHARACTER}" lengthAdjust="spacingAndGlyphs"'
    return f'<text xml:space="preserve" {place} {length}>{html.escape(words)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the README's moving picture.")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    lab = Lab(LabOptions(nodes=4, grace_time_s=30), owned=True).up()
    os.environ["SLURM_CONF"] = str(lab.place.conf)  # the screen of a job that waits says what squeue does
    try:
        frames = film(lab)
    finally:
        lab.down()
    options.file.write_text(drawing(frames), encoding="utf-8")
    sys.stdout.write(f"{options.file}: {len(frames)} screens\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

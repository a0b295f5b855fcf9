"""Which jobs have worked on a run: of a chain of jobs, status and lease name the newest one only, the journal all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from stepkeeper.store import lines
from stepkeeper.store.rundir import RunDirectory
from stepkeeper_trainer.formats.plain import open_plain

_JOB_ID = re.compile(rb'\{"v":[0-9]+,"job_id":([0-9]+),')
LOOKED_AT = 100  # lines at either end, of which some may be torn


def worked_on(run: Path, job_id: int) -> bool:
    """Tell whether a run's journal names a job as one of its own; one that cannot be read names none.

    Slurm's numbers grow until they begin anew, so the ends of a journal are enough for nearly every run; only that of
    a chain which may hold the number is read whole.
    """
    try:
        with open_plain(RunDirectory(run).journal, within=run) as file:
            newest = _first(itertools.islice(lines.backwards(file), LOOKED_AT))
            file.seek(0)
            oldest = _first(itertools.islice(lines.forwards(file), LOOKED_AT))
            if oldest is None or newest is None or (oldest <= newest and not oldest <= job_id <= newest):
                return False
            if job_id in (oldest, newest):
                return True
            file.seek(0)
            return any(_job_of(line) == job_id for line in lines.forwards(file))
    except OSError:
        return False


def _first(some: Iterable[bytes]) -> int | None:
    return next((job for line in some if (job := _job_of(line)) is not None), None)


def _job_of(line: bytes) -> int | None:
    match = _JOB_ID.match(line)
    return int(match.group(1)) if match else None

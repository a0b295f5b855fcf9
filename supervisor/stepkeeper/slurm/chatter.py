"""What Slurm says around the end of a Slurm step without telling why: warnings, and what follows from an end.  Pure."""

from __future__ import annotations

import re

from stepkeeper.slurm.shepherd import NOISE

_FOLLOWS = re.compile(
    rf"""
    srun:\ (?:(?i:warning):
        |cluster\ configuration\ lacks\ support
        |Job\ step\ aborted
        |(?i:forc(?:e|ing)\ )?(?i:terminat(?:ed|ing))\b
        |forcing\ job\ termination
        |(?:error:\ )?Timed\ out\ waiting\ for\ job\ step
        |launch/slurm:
        |error:\ [^\s:]+:\ tasks?\ \d[\d,-]*:
        |[^\s:]+:\ tasks?\ \d[\d,-]*:
        |(?:got|sending|interrupt|Cancelled\ pending|First\ task\ exited|Waiting\ up\ to|unknown\ signal)
        |job\ \S+\ (?:queued|has\ been\ allocated)
        |Complete(?:d)?\ job\ step|StepId=\S+\ aborted\ before\ step\ completely\ launched)
    |slurmstepd(?:-[^\s:]+)?:\ error:\ \*\*\*\ STEP\ \S+\ (?:ON\ \S+\ )?CANCELLED\ AT\ [\dT:.-]+
        (?:\ DUE\ TO\ TASK\ FAILURE)?\ \*\*\*
    |.*{re.escape(NOISE)}
    """,
    re.VERBOSE,
)


def follows(text: str) -> bool:
    """Tell whether a line of Slurm's tells of no cause: a warning, or that what runs of a Slurm step is ended.

    >>> follows("srun: error: n2: task 1: Killed"), follows("srun: warning: can't honor --ntasks-per-node")
    (True, True)
    >>> follows("srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification")
    False
    >>> follows("slurmstepd: error: *** STEP 7.2 ON n1 CANCELLED AT 2026-09-21T10:00:00 DUE TO TIME LIMIT ***")
    False
    >>> follows("slurmstepd: error: Detected 1 oom_kill event in StepId=7.2. Some of the step tasks have been killed.")
    False
    """
    return _FOLLOWS.match(text) is not None

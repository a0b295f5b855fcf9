"""Why a launch failed: evidence of three planes, rules as data, one verdict.

    reading.py   a log of any size and content -> lines with their rank
    tracebacks.py  lines -> Python exceptions with their location
    rules.toml   what lines and exceptions mean; rules.py reads and checks it
    logs.py      a log -> evidence
    errorfiles.py  torch's error files -> evidence
    planes.py    exits of ranks, faults of nodes, answers of Slurm -> evidence
    joining.py   evidence -> verdict; pure
    gathering.py a run directory -> evidence

Nothing here acts.  `causes`, `joining` and `planes` read no clock, no file and no environment.
"""

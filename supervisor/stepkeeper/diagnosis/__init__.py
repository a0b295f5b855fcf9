"""Why a launch failed: evidence of three planes, rules as data, one verdict.

    reading.py   a log of any size and content -> lines with their rank; prefixes.py takes off what stands before them
    tracebacks.py  lines -> Python exceptions with their location
    rules.toml   what lines and exceptions mean; rules.py reads and checks it
    logs.py      a log -> evidence; who.py: whom a line is about
    lasting.py   a log -> its last error-like lines
    errorfiles.py  torch's error files -> evidence
    planes.py    exits of ranks, faults of nodes, answers of Slurm -> evidence
    joining.py   evidence -> verdict; pure
    gathering.py a run directory -> evidence

Nothing here acts.  `causes`, `joining` and `planes` read no clock, no file and no environment.
"""

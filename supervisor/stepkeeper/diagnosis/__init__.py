"""Why a launch failed: evidence of three planes, rules as data, one verdict.

    log_lines.py  a log of any size and content -> lines with their rank, and the tracebacks among them
    rules.toml    what lines and exceptions mean; rules.py reads and checks it
    logs.py       a log, or torch's error file -> evidence; whom a line is about; the last error-like lines
    planes.py     exits of ranks, faults of nodes, answers of Slurm -> evidence
    collectives.py  which collective each rank waits in -> evidence
    collect.py    a run directory -> evidence
    classify.py   evidence -> verdict

Nothing here acts.  `classify` and `planes` read no clock, no file and no environment.
"""

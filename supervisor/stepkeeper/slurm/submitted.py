"""What sbatch got that `scontrol show job` does not show of a job that runs.  Pure.

It stands on sbatch's own command line, which newer Slurms show, in the script's `#SBATCH` lines, and in variables that
sbatch reads or sets.  The first of these that says so counts, as it does for sbatch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

import msgspec

# with a value; of sbatch's command line, where nothing else shows them
_OF_THE_LINE = (
    "acctg-freq",
    "bb",
    "bbf",
    "cluster-constraint",
    "context",
    "cpu-freq",
    "distribution",
    "extra",
    "gpu-bind",
    "gpu-freq",
    "hint",
    "mcs-label",
    "mem-bind",
    "profile",
    "signal",
    "tres-bind",
    "tres-per-task",
    "wait-all-nodes",
)
_FLAGS = {"no-kill": "k", "overcommit": "O", "use-min-nodes": ""}  # and its short form
_SHORT = {
    "constraint": "C",
    "distribution": "m",
    "nodes": "N",
    "ntasks": "n",
    "partition": "p",
    "qos": "q",
    "time": "t",
}
_OF_THE_JOB = {  # variable that sbatch sets for a job -> option
    "SLURM_CPU_FREQ_REQ": "cpu-freq",
    "SLURM_GPU_BIND": "gpu-bind",
    "SLURM_GPU_FREQ": "gpu-freq",
    "SLURM_HINT": "hint",
    "SLURM_PROFILE": "profile",
}
# that sbatch reads, for what Slurm does not show: they say to the new job what they said to this one
KEPT_VARIABLES = frozenset(
    f"SBATCH_{name}"
    for name in (
        "ACCTG_FREQ", "BURST_BUFFER", "CLUSTER_CONSTRAINT", "CPU_FREQ_REQ", "DISTRIBUTION", "GPU_BIND", "GPU_FREQ",
        "HINT", "MEM_BIND", "NO_KILL", "OVERCOMMIT", "PROFILE", "SIGNAL", "TRES_BIND", "USE_MIN_NODES",
        "WAIT_ALL_NODES",
    )
)  # fmt: skip
_NO_LIMIT = "365-00:00:00"  # what Slurm makes of none when a job starts
_SIZES = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


class Words(msgspec.Struct, frozen=True):
    """What sbatch got, word by word."""

    line: tuple[str, ...]  # its options on the command line; empty where Slurm does not show them
    directives: tuple[str, ...]  # those of the script
    environment: Mapping[str, str]  # of the job

    def option(self, name: str, variable: str = "") -> str | None:
        """Return the value of an option, of whichever of the three counts."""
        return _value(self.line, name) or self.environment.get(variable) or _value(self.directives, name)

    def flag(self, name: str) -> bool:
        """Tell whether an option without a value was given, on the command line or in the script."""
        forms = {f"--{name}", f"-{_FLAGS[name]}"} - {"-"}
        return not forms.isdisjoint((*self.line, *self.directives))


def words(submit_line: str, script_path: str | None, script: str, environment: Mapping[str, str]) -> Words:
    """Take apart what is known of a submission.

    Args:
        submit_line: sbatch's command line as Slurm shows it, without quotes; empty where it does not.
        script_path: where the batch script was; None where it came from standard input.
        script: the batch script.
        environment: of a process of the job.
    """
    return Words(tuple(_before_the_script(submit_line, script_path)), tuple(_directives(script)), environment)


def nodes(said: Words, held: int) -> str:
    """Return how many nodes to ask for: as many as were held, or the same choice where the job left one.

    Of a job that runs, Slurm shows only how many it has.
    """
    wanted = said.option("nodes")
    return wanted if wanted is not None and _allows(wanted, held) else str(held)


def _one_of(said: Words, name: str, variable: str, held: str | None) -> str | None:
    """Return the list of partitions (or of QOS) among which Slurm chose the one that it shows, if there was one."""
    wanted = said.option(name, variable)
    return wanted if wanted is not None and held in wanted.split(",") else held


def choices(shown: Mapping[str, str], said: Words) -> list[str]:
    """Return the limits and places among which Slurm may choose: of a job that runs, it shows its choice alone."""
    options = []
    for field, option in (("Partition", "partition"), ("QOS", "qos")):
        if value := _one_of(said, option, f"SBATCH_{field.upper()}", shown.get(field)):
            options.append(f"--{option}={value}")
    limit = shown.get("TimeLimit")
    if "TimeMin" in shown:  # Slurm may have shortened the limit, to start the job earlier
        limit = said.option("time", "SBATCH_TIMELIMIT") or limit
    if limit:
        options.append(f"--time={'UNLIMITED' if limit == _NO_LIMIT else limit}")
    features, preferred = shown.get("Features"), said.option("prefer") or shown.get("Prefer")
    if preferred:  # where these were free, they took the place of what was demanded
        features = said.option("constraint", "SBATCH_CONSTRAINT") or (features if features != preferred else None)
        options.append(f"--prefer={preferred}")
    return [*options, *([f"--constraint={features}"] if features else [])]


def hidden(said: Words) -> list[str]:
    """Return the options that Slurm does not show, for a command line."""
    found: dict[str, str] = {}
    for variable, option in _OF_THE_JOB.items():
        if value := said.environment.get(variable):
            found[option] = value
    if spread := said.environment.get("SLURM_DISTRIBUTION"):
        plane = said.environment.get("SLURM_DIST_PLANESIZE")
        found["distribution"] = f"plane={plane}" if spread == "plane" and plane else spread
    found |= {option: value for option in _OF_THE_LINE if (value := _value(said.line, option))}
    flags = [f"--{name}" for name in _FLAGS if said.flag(name)]
    if "--overcommit" not in flags and said.environment.get("SLURM_OVERCOMMIT") == "1":
        flags.append("--overcommit")
    return [*(f"--{option}={value}" for option, value in found.items()), *flags]


def _before_the_script(line: str, path: str | None) -> Iterator[str]:
    """Yield the options of a command line: behind the script's name, its own arguments begin."""
    name = path.rpartition("/")[2] if path is not None else None
    for word in line.split(" ")[1:]:
        if word.startswith("--wrap") or word.rpartition("/")[2] == name:
            return
        yield word


def _directives(script: str) -> Iterator[str]:
    """Yield the words of `#SBATCH` lines, which end where the script's first command begins."""
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            try:
                yield from shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                yield from line.removeprefix("#SBATCH").split()  # sbatch takes an open quote as it is
        elif line.strip() and not line.startswith("#"):
            return


def _value(given: Sequence[str], name: str) -> str | None:
    """Return the value of an option; of several, the last one counts."""
    long, short = f"--{name}", f"-{_SHORT[name]}" if name in _SHORT else None
    found = None
    for index, word in enumerate(given):
        if word.startswith(f"{long}="):
            found = word.removeprefix(f"{long}=")
        elif word in (long, short) and index + 1 < len(given):
            found = given[index + 1]
        elif short is not None and word.startswith(short) and not word.startswith("--") and word != short:
            found = word.removeprefix(short)
    return found or None


def _allows(wanted: str, held: int) -> bool:
    """Tell whether a job that wants `2-4`, `1-15:2` or `4,8,16` nodes can have so many.  Other words: no."""
    for part in wanted.split(","):
        match = _SIZES.fullmatch(part)
        if match is None:
            return False
        least, most, step = (int(group) if group else None for group in match.groups())
        assert least is not None, "the pattern has it"
        if held in range(least, (most or least) + 1, step or 1):
            return True
    return False

"""Every setting of `stepkeeper run`, declared once: from here come flags, variables, files, checks and documentation.

Type and default are the field's, help is the docstring below it, all else stands in `_about`.  The fields of the
core's `Policy`, without its constants (`Limits`), are settings too, in the group `policy`; where nothing else is said,
their names give the unit.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepkeeper.core.anomalies import SLOW_NODE_CHOICES, WATCH
from stepkeeper.core.policy import STOP_SIGNALS, Limits, Policy
from stepkeeper.core.scale_up import GROW_BACK
from stepkeeper.run_store import paths
from stepkeeper_trainer.integrations import hook

GROUP = "policy"
VARIABLE_PREFIX = "STEPKEEPER_"
YEAR_S = 365 * 86_400.0
COUNT_MAX = 1_000_000
SHORTEST_WAIT_S = 0.1

ATTACH = ("off", "auto", *hook.NAMES)

Value = bool | int | float | str | None


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a type and a default do not say."""

    unit: str = ""
    metavar: str = "VALUE"
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()  # of a text: no other one
    takes_number: bool = False  # a text that a file may give as a whole number
    has_flag: bool = True
    has_variable: bool = True
    in_run_directory: bool = True  # may stand in the run directory's own file


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user decides about a run."""

    run_dir: Annotated[str, About(metavar="DIR", in_run_directory=False)] = paths.DEFAULT_PATTERN
    """The run directory, on shared storage.  It may contain `%j %A %a %x %u` as in sbatch.  A relative one lies
    below the submit directory."""

    torchrun: Annotated[bool, About()] = False
    """Start one torchrun a node, with c10d rendezvous."""

    resume_argument: Annotated[bool | None, About()] = None
    """Append `--resume-from DIR` to CMD on a resume, if CMD does not contain `{resume}`.  If not set: only if the
    script declares that option and does not use the trainer library.  The library reads
    `STEPKEEPER_RESUME_FROM`."""

    tasks_per_node: Annotated[
        int | None,
        # STEPKEEPER_TASKS_PER_NODE is what the ranks get
        About(unit="ranks a node", metavar="N", least=1, most=COUNT_MAX, has_variable=False),
    ] = None
    """Ranks on a node.  If not set: one for each GPU, otherwise the job's `--ntasks-per-node`.  If the job has
    none: its `--ntasks`, if Slurm gives each node the same number of these, otherwise 1."""

    spares: Annotated[int, About(unit="nodes", metavar="N", least=0, most=COUNT_MAX)] = 0
    """Nodes of the allocation that stay unused until another node fails."""

    min_nodes: Annotated[int, About(unit="nodes", metavar="N", least=0, most=COUNT_MAX)] = 0
    """If nodes fail, a launch may shrink to this number of nodes before the job is requeued.  0: it never
    shrinks."""

    micro_batches: Annotated[int, About(unit="micro-batches", metavar="N", least=0, most=COUNT_MAX)] = 0
    """Micro-batches of one optimizer step, over all ranks.  A launch has only as many nodes as share them evenly,
    so a smaller world takes the same steps.  0: any number of nodes."""

    free_gib_min: Annotated[float, About(unit="GiB", metavar="GIB", least=0, most=1e9)] = 1.0
    """Free space that the run directory's storage must have before each launch."""

    group_readable: Annotated[bool, About()] = False
    """Let your group read the run directory."""

    log_format: Annotated[str, About(metavar="text|json", choices=("text", "json"))] = "text"
    """Format of the supervisor's lines in the job's log: text for people, or JSON lines.
    `logs/attempt-000/supervisor.jsonl` in the run directory always has JSON lines (docs/log.md)."""

    same_code: Annotated[bool, About()] = False
    """Refuse to resume if the code differs from that of the attempt before.  The code is the git commit,
    uncommitted changes and scripts.  By default the log only reports the difference."""

    checkpoint_every: Annotated[str | None, About(metavar="RULE")] = None
    """How often the ranks save; it overrides the script.  It is `500 steps`, `30 min`, `auto` (computed from
    measured costs), `never`, or several joined by `or`."""

    retention: Annotated[str | None, About(metavar="POLICY")] = None
    """Which steps are kept; it overrides the script.  It is `all`, or some of these, separated by commas: `newest
    3`, `every 1000 steps`, `every 10 percent`, `epoch ends`, `best loss 2` (docs/retention.md)."""

    confirm_every: Annotated[int | None, About(unit="steps", metavar="N", least=1, most=COUNT_MAX)] = None
    """Find silent data corruption (SDC) every N steps, if the script calls `manager.confirm()`.  The ranks compute
    the first micro-batch twice and compare the results bit for bit.  If a rank differs, its node is not used any
    more.  The training goes back to the newest confirmed step (docs/trainer-api.md)."""

    local_tier: Annotated[str | None, About(metavar="DIR")] = None
    """A directory on each node's own disk (`%N` is the node's name).  Steps are written there first, and copied to
    the run directory while the training continues (docs/tiers.md)."""

    cold_tier: Annotated[str | None, About(metavar="URL")] = None
    """A directory or the URL of an object store, for this run alone (`s3://bucket/my-run`).  Steps are copied there
    too.  Credentials come from the store's own variables, never from here."""

    copy_rate: Annotated[float | None, About(unit="MB/s", metavar="MB", least=0.001, most=1e6)] = None
    """Speed limit of copies between tiers, on each node."""

    local_keep: Annotated[int, About(unit="steps", metavar="N", least=1, most=COUNT_MAX, has_flag=False)] = 2
    """How many of the newest steps stay on a node's disk."""

    cold_keep: Annotated[int | None, About(unit="steps", metavar="N", least=1, most=COUNT_MAX)] = None
    """How many of the newest steps stay in the cold tier.  If not set: all."""

    peer_copies: Annotated[bool, About()] = False
    """The next node keeps a copy of each node's files, so a lost node loses none of them.  These are the files of
    the local tier and of the snapshots in memory."""

    peer_interface: Annotated[str | None, About(metavar="NAME")] = None
    """The network interface of each node (`ib0`) for peer copies.  If not set: the one by which a node reaches the
    first node."""

    snapshot_every: Annotated[str | None, About(metavar="RULE")] = None
    """How often a step is also kept in the nodes' memory, for a relaunch in the same allocation.  For example `5
    steps` or `30 s` (docs/tiers.md).  By default never."""

    snapshot_dir: Annotated[str | None, About(metavar="DIR", has_flag=False)] = None
    """A directory in each node's memory for snapshots.  If not set: `/dev/shm`."""

    slurm_client: Annotated[str, About(metavar="commands|pyslurm[:PYTHON]", has_flag=False)] = "commands"
    """How Stepkeeper talks to Slurm: by its commands (`commands`), or by `pyslurm`.  It uses `pyslurm` only if that
    is installed and reports the same.  `pyslurm:PYTHON` names the interpreter that has it, if Stepkeeper's own has
    not."""

    notify_command: Annotated[str | None, About(metavar="COMMAND")] = None
    """A shell command that runs if the run has stopped and needs a person.  Its environment has
    `STEPKEEPER_REASON`, `STEPKEEPER_EXIT_CODE`, `STEPKEEPER_CAUSE`, `STEPKEEPER_RUN_DIR` and
    `STEPKEEPER_JOB_ID`."""

    warm_standby: Annotated[bool | None, About()] = None
    """Keep a second process for each rank, which has imported torch and waits.  A relaunch in the allocation uses it
    instead of starting Python again (docs/warm-standby.md).  If not set: only while a hang or a lost node is
    suspected."""

    warm_standby_imports: Annotated[str | None, About(metavar="MODULES", has_flag=False)] = None
    """More modules that a warm standby imports, separated by commas (`transformers,datasets`).  None of them may start
    CUDA."""

    verify_mib_per_s: Annotated[float, About(unit="MiB/s", metavar="MIB/S", least=0, most=1e6)] = 0.0
    """Speed limit of each node's verification of step directories; 0: no limit.  Nodes share the work on a step
    directory if it has 1 GiB or more.  They also share it if one node would read it for 4 s or more."""

    metrics_textfile: Annotated[str | None, About(metavar="DIR")] = None
    """A directory for metrics of Prometheus, which node_exporter's textfile collector reads (docs/metrics.md)."""

    metrics_port: Annotated[str | None, About(metavar="[ADDRESS:]PORT", takes_number=True)] = None
    """Serve the metrics over HTTP, at /metrics.  PORT alone listens on this node only (loopback); ADDRESS:PORT
    listens on that address.  0: any free port, which the log names."""

    framework: Annotated[str, About(metavar="NAME")] = "auto"
    """The framework of a training script that does not use the trainer library.  Its checkpoints are verified, chosen
    and resumed from (docs/frameworks.md).  `auto` recognises it, `none` leaves all to the script.  Also for `stepkeeper
    checkpoints`; in a file also `[framework] name = "..."`."""

    checkpoint_dir: Annotated[str | None, About(metavar="DIR")] = None
    """Where a script with such a framework writes its checkpoints.  If not set: taken from its command line or the
    script."""

    attach: Annotated[str, About(metavar="off|auto|NAME", choices=ATTACH)] = "off"
    """Have an unmodified script of another framework save its own checkpoint on a notice (docs/frameworks.md).  It
    also resumes from the chosen checkpoint if its own call names none.  `auto`: in any known framework; NAME: only
    in that one."""

    repair_pointers: Annotated[bool, About()] = False
    """Before each launch, have the pointer file of DeepSpeed or Megatron name the checkpoint that the launch
    resumes from (docs/frameworks.md).  These frameworks find their checkpoint by that file (`latest`, the tracker).
    No other file of the framework is changed."""

    policy: Policy = Policy()


# Of `Policy`: what its fields' names do not say.
_POLICY = {
    "save_margin_s": About(unit="s", metavar="SECONDS", least=0, most=YEAR_S),
    "stop_signal": About(metavar="SIGNAL", choices=tuple(STOP_SIGNALS)),
    "time_limit_margin": About(unit="s", metavar="SECONDS", least=0, most=YEAR_S),
    "exclude_lost_for_s": About(unit="s", metavar="SECONDS", least=0, most=YEAR_S, has_flag=False),
    "loss_not_finite": About(metavar="|".join(WATCH), choices=WATCH, has_flag=False),
    "loss_spike": About(metavar="|".join(WATCH), choices=WATCH, has_flag=False),
    "slow_node": About(metavar="|".join(SLOW_NODE_CHOICES), choices=SLOW_NODE_CHOICES, has_flag=False),
    "hang_least_s": About(unit="s", metavar="SECONDS", least=SHORTEST_WAIT_S, most=YEAR_S),
    "failures_max": About(unit="launches", metavar="N", least=1, most=COUNT_MAX),
    "read_back": About(metavar="off|newest|all", choices=("off", "newest", "all")),
    "grow_back": About(metavar="|".join(GROW_BACK), choices=GROW_BACK),
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One key."""

    key: str  # as in files; `policy.…` for a field of the policy
    kind: type[bool | int | float | str]
    default: Value
    about: About

    @property
    def flag(self) -> str:
        """Return the option of `run`; empty where only `--set` does it."""
        return "--" + self.key.rpartition(".")[2].replace("_", "-") if self.about.has_flag else ""

    @property
    def variable(self) -> str:
        """Return the environment variable; empty where there is none."""
        return variable(self.key) if self.about.has_variable else ""

    @property
    def help(self) -> str:
        """Return what it is for."""
        group, _, name = self.key.rpartition(".")
        return _docstrings(Policy if group else RunSettings).get(name, "")

    @property
    def wanted(self) -> str:
        """Return in words what is allowed."""
        if self.about.choices:
            return "one of " + ", ".join(self.about.choices)
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        least, most = self.about.least, self.about.most
        between = ""
        if least is not None and most is not None:
            between = f" from {least:g} to {most:,.0f}"
        elif least is not None:
            between = f" of at least {least:g}"
        unit = f" ({self.about.unit})" if self.about.unit else ""
        return f"{kinds[self.kind]}{between}{unit}"


def variable(key: str) -> str:
    """Return the environment variable of a key."""
    return VARIABLE_PREFIX + key.replace(".", "_").upper()


def _settings() -> dict[str, Setting]:
    hints = typing.get_type_hints(RunSettings, include_extras=True)
    found = []
    for field in msgspec.structs.fields(RunSettings):
        if field.name != GROUP:
            kind, about = typing.get_args(hints[field.name])
            found.append(_setting(field.name, kind, field.default, about))
    hints = typing.get_type_hints(Policy)
    for field in msgspec.structs.fields(Policy):
        if field.name in Limits.__struct_fields__:
            continue
        kind = hints[field.name]
        found.append(_setting(f"{GROUP}.{field.name}", kind, field.default, _about(field.name, kind)))
    return {setting.key: setting for setting in found}


def _setting(key: str, kind: Any, default: Value, about: About) -> Setting:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    plain = [each for each in kinds if each is not type(None)]
    assert len(plain) == 1 and plain[0] in {bool, int, float, str}, f"{key}: {kind} cannot be set"  # noqa: PT018
    return Setting(key=key, kind=plain[0], default=default, about=about)


def _about(name: str, kind: type) -> About:
    """Return what the name of a field of the policy says."""
    if name in _POLICY:
        return _POLICY[name]
    if name.endswith("_s"):
        return About(unit="s", metavar="SECONDS", least=SHORTEST_WAIT_S, most=YEAR_S, has_flag=False)
    if kind in {int, float}:
        return About(least=0, most=COUNT_MAX, has_flag=False)
    return About(has_flag=False)


@functools.cache
def _docstrings(declared: type) -> dict[str, str]:
    """Return the docstrings under the fields of a structure, each on one line.

    Read from the source file, without `inspect`: every command of ours declares its options, in 2 ms.
    """
    module = sys.modules[declared.__module__]
    try:
        text = Path(module.__file__ or "").read_text(encoding="utf-8")
    except OSError:
        return {}  # installed without sources: all works, but for the help texts
    source = next(
        node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == declared.__name__
    )
    found: dict[str, str] = {}
    name = ""
    for node in source.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
            name = ""
    return found


SETTINGS = _settings()
"""By key, in the order of declaration."""


def build(values: dict[str, Value]) -> RunSettings:
    """Return the settings with a value for every key."""
    plain = {key: value for key, value in values.items() if "." not in key}
    policy = {key.partition(".")[2]: value for key, value in values.items() if "." in key}
    return msgspec.convert({**plain, GROUP: policy}, RunSettings)

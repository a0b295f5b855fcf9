"""`python -m stepkeeper.docs docs/`: write the reference pages that are made from the code.

What the code declares (docstrings, fields and the comments behind them) is the only source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import sys
import tokenize
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from stepkeeper.cli.page import cli_page
from stepkeeper.config.settings import GROUP, SETTINGS, Setting
from stepkeeper.config.values import shown
from stepkeeper.core import effects, events, reasons
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.run_analytics.metrics import declared as metrics
from stepkeeper.run_store import journal

# `docs/log.md`: every line that the supervisor and the node agent can log, found in the code.
#
# Names, levels and keys come from the calls themselves; what they mean to a reader is said here, and a test sees to
# it that none is left out.

LEVELS = ("debug", "info", "warning", "error", "critical")
SUPERVISOR, AGENT = "supervisor", "node agent"
MEANINGS = {
    # supervisor
    "request_not_answered": "a request such as `stepkeeper save` was taken, and its answer could not be written",
    "requests_unreadable": "what people ask of the run (`stepkeeper save`, `stop`) cannot be read; the run goes on",
    "attempt_started": "the first line: where the ranks print, what runs where, how the attempt before ended",
    "code_changed": "this attempt runs other code than the one before",
    "code_not_recorded": "the run directory did not take the record of the code",
    "config_not_recorded": "the run directory did not take the record of the settings",
    "configured": "settings that are not the defaults, and where they came from; one key each",
    "decision": "one decision, why, and what was ordered",
    "exit": "the last line: exit code (docs/exit-codes.md) and reason",
    "ended_before_target": "the script ended with 0 before the last step that its newest checkpoint names, as it may",
    "failed_after_last_step": "training has finished, and the script failed since: what follows it may lack",
    "framework_cannot_resume": "nothing shows how the script can get the checkpoint to resume from",
    "framework_checkpoints_not_read": "the framework's checkpoints could not be read or verified, and why",
    "framework_directory_unknown": "where the framework's checkpoints are is not known: set `--checkpoint-dir`",
    "framework_recognized": "the framework of the script, where its checkpoints are, and what shows both",
    "framework_world_changed": "the checkpoint was saved by another number of ranks, and can be resumed on that alone",
    "cannot_save_on_notice": "a notice cannot be answered by a save: the last periodic checkpoint counts",
    "pointer_repaired": "a pointer file of the framework names the checkpoint of this launch now, and what it named",
    "pointer_not_repaired": "such a file names another checkpoint, and was not rewritten, and why",
    "pointers_not_repaired": "such files could not be looked at, and why",
    "world_not_noted": "how many ranks this launch has is not kept: a checkpoint that lacks the file of one may pass",
    "worlds_not_read": "how many ranks the launches before had cannot be read: the same",
    "fewer_cpus_than_ranks": "the job has fewer CPUs than ranks on a node",
    "submission_not_recorded": "how the job was submitted is not kept: `stepkeeper resume` has to ask Slurm",
    "no_batch_script": "in an allocation of `salloc` or a bare `srun`: nothing can be requeued",
    "no_place_for_resume": "CMD is a shell's script, in the line or in a file, with no place for the resume argument",
    "job_comment_not_set": "Slurm did not take the reason code as the job's comment",
    "journal_late": "a requeue does not wait longer for the journal; what is missing is on the node's disk",
    "journal_not_written": "the run directory does not take the journal; it is tried again",
    "journal_written_again": "the journal is up to date again",
    "log_emptied": "Slurm has emptied this log: the job was not submitted so that it appends",
    "lease_unreadable": "the lease cannot be read; the run goes on",
    "loader_is_slow": "all wait for this rank's data, not for its node: `factor` times as long for a step as others",
    "launch_is_slow": "this launch steps slower than those before it, and the nodes that may be why",
    "metrics_not_served": "the port of the metrics could not be opened",
    "metrics_not_written": "the directory does not take the metrics file; said once",
    "metrics_served": "where Prometheus finds the metrics",
    "node_is_slow": "its ranks work `factor` times as long for a step as the others, since then (Unix seconds)",
    "node_keeps_up": "a node that was slow is so no more",
    "notified": "the notify command ran to its end",
    "notify_command_failed": "the notify command ended with an error, or took too long",
    "notify_command_not_started": "the notify command could not be started",
    "progress": "the newest step; at most one in `progress_log_every_s`",
    "replay_differs": "a step that was done again after a resume came to another loss (`now`) than before (`then`)",
    "replay_equal": "so many steps were done again after a resume, with the same losses as before",
    "run_not_noted": "the home directory did not take the note where this run is",
    "no_way_to_resume": "the training script shows no way to go on from a checkpoint",
    "resume_argument_unknown": "the training script does not know the option that `--resume-argument` appends",
    "spool_merged": "records of an earlier attempt were found on this node's disk and taken over",
    "standby_ended": "the Slurm step of the warm standbys is over; the next launch starts its ranks as ever",
    "part_failed": "a part failed that training can do without; the training goes on: please report it",
    "standby_gone": "one process that was to wait for the next launch cannot, and why",
    "standby_impossible": "`warm_standby` has no effect with this CMD, and why",
    "standby_ready": "so many processes wait for the next launch; the memory of the largest",
    "status_not_written": "the run directory does not take `status.json`",
    "watcher": "a message of a node's watcher",
    # node agent
    "agent_ready": "the agent reads its sensors and listens on its socket; mode and open incidents",
    "agent_started": "the first line: version and configuration",
    "agent_stopped": "the last line, and why",
    "alarm": "somebody should look",
    "evidence": "what the kernel log or another sensor showed",
    "expedite_accepted": "a job's supervisor asks for its requeued job to start at once",
    "expedite_over": "what came of that",
    "expedite_waits_for_slurm": "Slurm does not answer yet",
    "expedited_job_requeued": "the agent requeues a job itself, and why",
    "job_expedited": "a requeued job is eligible at once, and what that saved",
    "job_joined": "a job on this node asks for reports of faults",
    "jobs_unknown": "Slurm did not say which jobs are on this node",
    "kernel_log_gap": "the kernel's log lost records before they were read",
    "ledger_late": "the ledger was not durable in time at the end",
    "ledger_not_written": "the ledger cannot be written: no drain is made without it",
    "ledger_written_again": "the ledger is up to date again",
    "look_asked": "a job asks the agent to look at a GPU; only what the agent then sees counts",
    "nvml": "the state of NVML",
    "sensor_sees_again": "a sensor that was blind works again",
    "setup_problem": "the agent's own setup is wrong: what was found, what it means, what to do",
    "setup_warning": "the agent's own setup could be better: the same",
    "socket_failed": "a mistake in the socket's loop; it goes on",
    "socket_listening": "where jobs can ask",
    "socket_refused": "a request was refused, by whom and why",
    "verdict": "whether this node is fit",
    "verdict_not_written": "the verdict's file could not be written",
}

PREAMBLE = """\
The supervisor writes text for people into the job's log (the file of `sbatch --output`), or to the terminal:

    [stepkeeper 2026-09-21 10:00:00] decision: the nodes are clear and fit (phase=training effects=start_launch)

The instant is in the time zone of the node; `WARNING` stands before the name of what somebody should look at.
`--log-format json` (`STEPKEEPER_LOG_FORMAT=json`) writes JSON lines there instead. Programs need not ask for that:
the same lines are always in `logs/attempt-000/supervisor.jsonl` of the run directory, a file for each attempt. The
node agent writes JSON lines only. Every JSON line has `timestamp` (ISO 8601, UTC), `level` and `event`; a
supervisor's also `job` and `attempt`. `...` stands for keys that depend on what is reported. What looks like a token, a
key or a secret is replaced. The journal is in [events.md](events.md).

What the ranks print is not in the job's log: each node has a file `logs/attempt-000/launch-000/NODE.log` in the run
directory, as the first line of the job's log says. `stepkeeper logs RUN --follow` shows it, over relaunches and
requeues; `stepkeeper logs RUN --failed` shows what the rank that failed first printed last.
"""


class Line(msgspec.Struct, frozen=True, order=True):
    """One event name of a program's log."""

    program: str
    name: str
    levels: tuple[str, ...]
    keys: tuple[str, ...]


@functools.cache
def found() -> tuple[Line, ...]:
    """Return every log line in the sources, by program and name."""
    root = Path(__file__).parent
    levels: dict[tuple[str, str], set[str]] = {}
    keys: dict[tuple[str, str], dict[str, None]] = {}
    for path in sorted(root.rglob("*.py")):
        part = path.relative_to(root).parts
        program = AGENT if part[0] == "node_agent" or part == ("cli", "node.py") else SUPERVISOR
        for level, name, words in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            levels.setdefault((program, name), set()).add(level)
            keys.setdefault((program, name), {}).update(dict.fromkeys(words))
    lines = sorted(
        Line(program, name, tuple(sorted(levels[program, name])), tuple(keys[program, name]))
        for program, name in levels
    )
    return tuple(lines)


def _calls(tree: ast.AST) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (level, event, keys) of each call of a logger."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
            continue
        logger = ast.unparse(node.func.value).rpartition(".")[2].strip("_")
        first = node.args[0] if node.args else None
        if logger != "log" or not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
            continue
        yield node.func.attr, first.value, [keyword.arg or "..." for keyword in node.keywords]


def log_page(made: str) -> str:
    """Return the page; `made` says that it is made from the code."""
    out = [
        "# The log",
        "",
        made,
        "",
        *PREAMBLE.splitlines(),
        "",
    ]
    for program in (SUPERVISOR, AGENT):
        out += [f"## {program.capitalize()}", "", "| event | level | keys | meaning |", "| --- | --- | --- | --- |"]
        for line in found():
            if line.program == program:
                keys = ", ".join(key if key == "..." else f"`{key}`" for key in line.keys)
                out.append(f"| `{line.name}` | {', '.join(line.levels)} | {keys} | {MEANINGS.get(line.name, '')} |")
        out.append("")
    return "\n".join(out)


# `docs/configuration.md`, from the declarations.

_LEAD = """
`stepkeeper run --print-config` shows every setting with its value, its unit and where it came from (`--json` for
programs), and `stepkeeper run --dry-run -- CMD` what would be started.  Neither needs Slurm.

The first of these that sets a key wins:

1. the command line: the setting's own option, or `--set KEY=VALUE`
2. the environment: `STEPKEEPER_...` at submission, or in the batch script; an empty variable sets nothing
3. `config.toml` in the run directory: read at the start of each attempt, so a change holds from the next one on
4. `config.toml` in `~/.config/stepkeeper` (`$XDG_CONFIG_HOME/stepkeeper`)
5. `/etc/stepkeeper/config.toml`, the administrator's
6. the default

```toml
spares = 1
free_gib_min = 50

[policy]
failures_max = 5
```

A key or a `STEPKEEPER_` variable that is not known, a value of another kind or out of range, a file that cannot be
read: each ends the start with exit code 2, and with the file, the line and what is wanted.  So does a file that
somebody else could have written: one that is neither yours nor root's, or that everybody may write (the
administrator's: its group, too).

By what an attempt went stands in `attempts/attempt-000/config.json` of the run directory.

## Locks

The administrator can lock keys.  A locked key that is set anywhere else, also to the same value, is an error which
names the file and the administrator's value.

```toml
# /etc/stepkeeper/config.toml
[locked]
free_gib_min = 100
policy.failures_max = 3
```

`locked = ["free_gib_min"]` locks what the file says outside `[locked]`, or the default.  It stands above all tables.
""".strip()

_NO_SETTINGS = """
`STEPKEEPER_SOCKET`, `STEPKEEPER_RUN_ID`, `STEPKEEPER_ATTEMPT`, `STEPKEEPER_LAUNCH`, `STEPKEEPER_RESUME_FROM`,
`STEPKEEPER_RESUME_NEWEST`, `STEPKEEPER_RELEASE` and `STEPKEEPER_TASKS_PER_NODE` are what Stepkeeper passes to the
ranks; they set nothing.

Other limits are constants, each with its reason in `core/policy.py`.  A key of 0.1 that became a constant, or that
another key replaces, is an error which says so.
""".strip()


TOPICS: dict[str, tuple[str, ...]] = {
    "The ten that matter most": (
        "run_dir", "checkpoint_every", "retention", "notify_command", "policy.failures_max", "torchrun", "spares",
        "min_nodes", "local_tier", "policy.stop_signal",
    ),
    "Ranks and nodes": (
        "tasks_per_node", "micro_batches", "resume_argument", "same_code", "warm_standby", "warm_standby_imports",
        "policy.begin_within_s", "policy.grow_back", "policy.unfit_again_s", "policy.grow_idle_s",
        "policy.excluded_max", "policy.exclude_lost_for_s",
    ),
    "Checkpoints": (
        "load_memory_gib", "verify_mib_per_s", "policy.choose_within_s", "policy.read_back", "local_keep",
        "peer_copies", "cold_tier", "cold_keep", "cold_zstd", "copy_rate", "framework", "checkpoint_dir",
        "repair_pointers",
    ),
    "Notices, time limit, stop": (
        "attach", "policy.save_margin_s", "policy.time_limit_margin", "policy.leave_within_s", "policy.stop_within_s",
        "policy.resubmit",
    ),
    "Failures": (
        "policy.node_losses_max",
        *(key for key in SETTINGS if key.startswith(f"{GROUP}.on_")),
    ),
    "Hangs, losses, slow nodes": (
        "policy.hang_watch", "policy.hang_least_s", "policy.hang_most_s", "policy.loss_not_finite",
        "policy.loss_spike", "policy.skip_data_steps", "policy.replay_differs", "policy.slow_node",
    ),
    "Storage and Slurm": (
        "free_gib_min", "group_readable", "policy.storage_wait_s", "slurm_client", "policy.slurm_away_for_s",
    ),
    "Log and metrics": (
        "log_format", "progress_log_every_s", "metrics_textfile", "metrics_port", "metrics_address",
    ),
}  # fmt: skip
"""Every key, in the order of the page."""


def configuration_page(made: str) -> str:
    """Return the page; `made` says from what."""
    out = ["# Configuration", "", made, "", _LEAD, ""]
    for topic, keys in TOPICS.items():
        out += [f"## {topic}", "", *_configuration_table([SETTINGS[key] for key in keys]), ""]
    return "\n".join([*out, "## What sets nothing", "", _NO_SETTINGS, ""])


def _configuration_table(settings: list[Setting]) -> list[str]:
    rows = ["| key | default | allowed | option, variable | what it is for |", "|---|---|---|---|---|"]
    for setting in settings:
        names = ", ".join(f"`{name}`" for name in (setting.flag, setting.variable) if name)
        default = f"`{shown(setting.default)}`" if setting.default is not None else shown(None)
        text = setting.help.replace("|", "\\|")
        rows.append(f"| `{setting.key}` | {default} | {setting.wanted} | {names} | {text} |")
    return rows


MADE = "<!-- Made by `python -m stepkeeper.docs docs/` from the code.  Change it there. -->"


class Field(NamedTuple):
    """One field of a declared structure."""

    name: str
    kind: str
    default: str | None
    comment: str


def main(argv: list[str]) -> int:
    """Write the pages into a directory."""
    if len(argv) != 2:  # noqa: PLR2004 - the program and the directory
        sys.stderr.write("stepkeeper.docs: name the directory: python -m stepkeeper.docs docs/\n")
        return int(ExitCode.USAGE)
    for name, text in pages().items():
        (Path(argv[1]) / name).write_text(text, encoding="utf-8")
    return int(ExitCode.FINISHED)


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    return {
        "cli.md": cli_page(MADE),
        "configuration.md": configuration_page(MADE),
        "events.md": _events_page(),
        "exit-codes.md": _exit_codes_page(),
        "log.md": log_page(MADE),
        "metrics.md": metrics.metrics_page(MADE),
    }


def _exit_codes_page() -> str:
    rows = [[f"`{code.value}`", f"`{code.name}`", code.meaning] for code in ExitCode]
    notes = (
        "`stepkeeper checkpoints latest` ends with 1 where there is no verified step directory.  "
        "130 means that the command was interrupted from the keyboard."
    )
    lead = "One a reason, never renumbered."
    return "\n".join(["# Exit codes", "", MADE, "", lead, "", *_table("code name meaning", rows), "", notes, ""])


def _events_page() -> str:
    out = ["# The journal: `journal.jsonl`", "", MADE, "", inspect.cleandoc(_doc(journal)), ""]
    out += [
        "`stepkeeper events RUN --json` prints the records as they stand.  Where storage failed in the",
        "middle of a write, records may stand there twice.  Fields with a default are left out where they",
        "have it.",
        "",
        "## Record",
        "",
        inspect.cleandoc(_doc(journal.Record)),
        "",
        *_fields(journal.Record, journal, ()),
        f"`phase` is one of {', '.join(f'`{phase.value}`' for phase in Phase)}.",
        "",
        "## Events",
        "",
        "Every event has its name in `event`, and in `at` the instant in Unix seconds, which never goes",
        "backwards within an attempt.",
        "",
    ]
    for each in typing.get_args(events.Event):
        out += _section(each, sys.modules[each.__module__], ("at",))
    out += ["## Effects", "", "Every effect has its name in `effect`.", ""]
    for each in typing.get_args(effects.Effect):
        out += _section(each, effects, ())
    out += ["## Reasons", "", inspect.cleandoc(_doc(reasons)), "", "A reason has its name in `reason`.", ""]
    facts = [
        [f"`{_tag(each)}`", _facts(each), inspect.cleandoc(_doc(each))] for each in typing.get_args(reasons.Reason)
    ]
    out += [*_table("name facts meaning", facts), "", "## Structures inside events", ""]
    for structure in _inside():
        out += [f"### {structure.__name__}", "", inspect.cleandoc(_doc(structure)), ""]
        if issubclass(structure, StrEnum):
            out += [f"One of {', '.join(f'`{each.value}`' for each in structure)}.", ""]
        else:
            out += _fields(structure, sys.modules[structure.__module__], ())
    return "\n".join(out).rstrip() + "\n"


def _inside() -> list[type]:
    """Return the structures and enumerations that stand in records, events and effects, each once, in their order."""
    found: dict[type, None] = {}
    waiting: list[Any] = [journal.Record, *typing.get_args(events.Event), *typing.get_args(effects.Effect)]
    listed = set(waiting)
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, type) and issubclass(kind, StrEnum | msgspec.Struct):
            if kind not in listed and kind is not Phase and kind not in typing.get_args(reasons.Reason):
                found[kind] = None
            listed.add(kind)
            hints = typing.get_type_hints(kind) if issubclass(kind, msgspec.Struct) else {}
            waiting += [hint for hint in hints.values() if hint not in listed]
        else:
            waiting += [part for part in typing.get_args(kind) if part not in listed]
    return list(found)


def _section(declared: Any, module: ModuleType, known: tuple[str, ...]) -> list[str]:
    return [f"### {_tag(declared)}", "", inspect.cleandoc(_doc(declared)), "", *_fields(declared, module, known)]


def _tag(declared: Any) -> str:
    return str(declared.__struct_config__.tag)


def _facts(declared: Any) -> str:
    return ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(declared))


def _doc(thing: Any) -> str:
    assert thing.__doc__, f"{thing} has a docstring: ruff sees to it"
    return str(thing.__doc__)


def _fields(declared: Any, module: ModuleType, known: tuple[str, ...]) -> list[str]:
    """Return a table of the fields that are not described elsewhere; nothing where there are none."""
    lineage = [each for each in reversed(declared.__mro__) if each.__module__ == module.__name__]
    by_name = _declared(module)
    fields = [field for each in lineage for field in by_name.get(each.__name__, ())]
    rows = []
    for field in fields:
        if field.name in known:
            continue
        default = "" if field.default is None else f"`{field.default}`"
        rows.append([f"`{field.name}`", f"`{field.kind}`".replace("|", "\\|"), default, field.comment])
    return [*_table("key type default meaning", rows), ""] if rows else []


def _declared(module: ModuleType) -> dict[str, list[Field]]:
    """Return the fields of every class of a module, with the comments that stand behind them."""
    source = inspect.getsource(module)
    comments = dict(_comments(source))
    classes: dict[str, list[Field]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        classes[node.name] = [
            Field(
                name=item.target.id,
                kind=ast.unparse(item.annotation),
                default=ast.unparse(item.value) if item.value is not None else None,
                comment=comments.get(item.lineno, ""),
            )
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
    return classes


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _table(header: str, rows: list[list[str]]) -> list[str]:
    head = header.split()
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""`docs/log.md`: every line that the supervisor and the node agent can log, found in the code.

Names, levels and keys come from the calls themselves.  What they mean to a reader is declared here, and a test fails
where one is left out.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import msgspec

import stepkeeper
from tests.pages.tables import MADE

LEVELS = ("debug", "info", "warning", "error", "critical")
SUPERVISOR, AGENT = "supervisor", "node agent"
MEANINGS = {
    # supervisor
    "request_not_answered": "a request such as `stepkeeper save` was taken, and its answer could not be written",
    "requests_unreadable": "what people ask of the run (`stepkeeper save`, `stop`) cannot be read; the run continues",
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
    "checkpoint_converted": "a ZeRO checkpoint was converted for another number of ranks; the launch takes the copy",
    "checkpoint_not_converted": "a ZeRO checkpoint could not be converted for this number of ranks: the launch failed",
    "framework_world_changed": "the checkpoint was saved by another number of ranks, and can be resumed on that alone",
    "cannot_save_on_notice": "a notice cannot be answered by a save: the last periodic checkpoint counts",
    "pointer_repaired": "a pointer file of the framework names the checkpoint of this launch now, and what it named",
    "pointer_not_repaired": "such a file names another checkpoint, and was not rewritten, and why",
    "pointers_not_repaired": "such files could not be checked, and why",
    "left_out_used_again": "checkpoints that training went back from count again: no older one is whole",
    "note_not_written": "a file of the run directory with notes about the framework's checkpoints, and why",
    "notes_not_read": "the same file: a checkpoint that lacks a rank's file, or was gone back from, may pass",
    "fewer_cpus_than_ranks": "the job has fewer CPUs than ranks on a node",
    "tasks_not_even": "`--ntasks` gives nodes different numbers of tasks, so each node gets one rank",
    "submission_not_recorded": "how the job was submitted is not kept: `stepkeeper resume` has to ask Slurm",
    "no_batch_script": "in an allocation of `salloc` or a bare `srun`: nothing can be requeued",
    "no_place_for_resume": "CMD is a shell's script, in the line or in a file, with no place for the resume argument",
    "job_comment_not_set": "Slurm did not take the reason code as the job's comment",
    "journal_late": "a requeue does not wait longer for the journal; what is missing is on the node's disk",
    "journal_not_written": "the run directory does not take the journal; it is tried again",
    "journal_written_again": "the journal is up to date again",
    "log_emptied": "Slurm has emptied this log: the job was not submitted so that it appends",
    "lease_unreadable": "the lease cannot be read; the run continues",
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
    "progress": "the newest step; at most one in 10 s",
    "replay_differs": "a step that was done again after a resume came to another loss (`now`) than before (`then`)",
    "replay_equal": "so many steps were done again after a resume, with the same losses as before",
    "run_not_noted": "the home directory did not take the note where this run is",
    "no_way_to_resume": "the training script shows no way to resume from a checkpoint",
    "resume_argument_unknown": "the training script does not know the option that `--resume-argument` appends",
    "setting_removed": "a setting of an earlier release that this attempt continues without, and what to do `instead`",
    "spool_merged": "records of an earlier attempt were found on this node's disk and taken over",
    "standby_ended": "the Slurm step of the warm standbys is over; the next launch starts its ranks without them",
    "part_failed": "a part failed that training can do without; training continues: please report it",
    "standby_gone": "one process that was to wait for the next launch cannot, and why",
    "standby_impossible": "`--warm-standby` has no effect with this CMD, and why",
    "standby_of_torchrun_ready": "on so many nodes a process waits to be torchrun; the memory of the largest",
    "standby_refused": "one process that waits does not become the rank that asked, which starts as usual, and why",
    "standby_ready": "so many processes wait for the next launch; the memory of the largest",
    "standby_taken": "all processes that waited are ranks of this launch",
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
    "look_asked": "a job asks the agent to look at the GPUs; only what the agent then sees counts",
    "nvml": "the state of NVML",
    "sensor_sees_again": "a sensor that was blind works again",
    "setup_problem": "the agent's own setup is wrong: what was found, what it means, what to do",
    "setup_warning": "the agent's own setup could be better: the same",
    "socket_failed": "a mistake in the socket's loop; it continues",
    "socket_listening": "where jobs can ask",
    "socket_refused": "a request was refused, by whom and why",
    "verdict": "whether this node is fit",
    "verdict_not_written": "the verdict's file could not be written",
}

PREAMBLE = """\
The supervisor writes text for people into the job's log (the file of `sbatch --output`), or to the terminal:

    [stepkeeper 2026-09-21 10:00:00] decision: the nodes are clear and fit (phase=training effects=start_launch)

The instant is in the time zone of the node. `WARNING` stands before the name of what somebody should check.
`--log-format json` (`STEPKEEPER_LOG_FORMAT=json`) writes JSON lines there instead. Programs need not ask for that:
`logs/attempt-000/supervisor.jsonl` of the run directory always has the same lines. Each attempt has its own file. The
node agent writes JSON lines only. Every JSON line has `timestamp` (ISO 8601, UTC), `level` and `event`; a
supervisor's also `job` and `attempt`. `...` stands for keys that depend on what is reported. What looks like a token, a
key or a secret is replaced. The journal is in [events](events.md).

What the ranks print is not in the job's log. Each node has a file `logs/attempt-000/launch-000/NODE.log` in the run
directory. The first line of the job's log says so. `stepkeeper logs RUN --follow` shows it, over relaunches and
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
    root = Path(stepkeeper.__file__).parent
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


def page() -> str:
    """Return the page."""
    out = [
        "# The log",
        "",
        MADE,
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

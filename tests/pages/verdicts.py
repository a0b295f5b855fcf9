"""`docs/verdicts.md`: causes and rules, from the rules of the diagnosis."""

from __future__ import annotations

from stepkeeper.core.causes import Cause
from stepkeeper.core.policy import Limits, Policy
from stepkeeper.diagnosis import planes, rules
from stepkeeper.diagnosis.classify import LIKELY, Role
from stepkeeper.diagnosis.log_lines import LINE_CHARACTERS_MAX
from stepkeeper.watcher.stacks import NATIVE_WITHIN_S
from tests.pages.tables import MADE

LEAD = f"""
`stepkeeper explain RUN` shows why the newest failed launch of a run failed (`--attempt`, `--launch` name another),
`stepkeeper explain --log FILE ...` what log files say on their own (one a node; `-` is stdin; torch's error files too).
`--json` prints one object: `cause`, `rule`, `confidence`, `role`, `evidence`, `location`, `rank`, `node`, `otherwise`,
`happened`, `todo`, and what people read besides: `message` (what the program or Slurm said), `who` (rank, node,
process, GPU, and `log`, the file and line), `last_lines` (the last error-like lines of that log, or its last lines),
`next` (what Stepkeeper does next, by the settings of the run) and `confirm` (commands).  `otherwise` is the verdict
without the strongest piece of evidence.  Of a run it names `run`, `attempt`, `launch`, `job_id`, `followed` (the next
launch) and `end` (how the newest attempt ended: `at`, `code`, `reason`).  RUN by the number of a job means the
launches of that job, where several have worked on the run.

The rules are data: `supervisor/stepkeeper/diagnosis/rules.toml`.  The logs that they are measured by are in
`tests/diagnosis/corpus`.

A supervisor that finds a launch failed judges it in the same way, while the next one is prepared, and goes by the
cause's row of the ladder (below).  A verdict of less confidence than {Limits().judged_from:g} decides as
`unknown` does.
What the supervisor itself saw is a root too: `progress-silence` (a hang, with what its ranks did, see below),
`loss-not-finite`, `loss-spike` and `loss-discontinuity` (numerical).  A rank that it killed itself is no evidence, nor
are Stepkeeper's own lines in a log: JSON or text of the supervisor, lines of the trainer library.
Why it had a launch stopped is in the journal: `asked-to-stop` (who, and when), `limit-notice`, `left-on-purpose`; where
the launch failed all the same, that only supports what else is known.
Of an attempt without a final record, the evidence is who had the job run again: Slurm, as it does where a node failed
(`slurm-requeued-itself`), a watcher on another node than the supervisor's (`batch-node-gone`), or the one beside it,
which proves that the node lives (`supervisor-gone`).

## How evidence is joined

1. A root says what went wrong, a cascade follows from it elsewhere, a confirmation supports.  Roots beat cascades: a
   collective's timeout is the verdict only where no rank says more, and `role` is `cascade` then.
2. A root below {LIKELY:g} gives way to any other.
3. A fault of a node is the verdict where it explains what the ranks say; it does not explain a program's own error.
4. Slurm's word is the verdict where it alone says why, or where it came before any rank failed.
5. Of several roots, that of the rank that failed first; within one log the more certain one, then the earlier one.
6. An error that training went on after did not end it.
7. A process that was asked to terminate, or was killed after another one had failed, gives way to what failed.
8. In a chain of exceptions, the one that a rule knows counts; else the one named as the cause; else the last one.
   NCCL's `Last error:` decides over the kind of its error.
9. A warning is a cascade, and weaker.

Prefixes are taken off each line, as far as their form is known: labels of srun, torchrun, mpirun and pdsh, times with
what loggers put behind them, Kubernetes, docker compose, Ray, colours, progress bars.  What stands before the first
line of a traceback is taken off its other lines, whatever it is.  Tracebacks of several writers are kept apart.

A log is read at both ends (0.5 MiB and 4 MiB), lines beyond {LINE_CHARACTERS_MAX:,} characters without their middle.
"""


HANG = f"""
Before a training that stands still is ended, each node's watcher collects what its ranks do, twice, seconds apart; all
of it stays in the launch's logs, below `stacks/`:

- `rank-R.txt`: the stacks of all threads, by py-spy where it is installed (on the `PATH` or beside Stepkeeper), else by
  Python's faulthandler; what the kernel says of each thread and of the rank's children (state, system call, and the
  file, socket or device that it is about); native stacks, by py-spy alone.
- `collectives-rank-R.json`: where the rank is in each group's collectives, by torch's flight recorders (NCCL's, and
  that of CPU groups), which a thread of the trainer library asks.
- `flight-recorder-nccl-rank-R.json`, `flight-recorder-cpu-rank-R.json`: what they said themselves.
- `nccl-of-rank-R`: NCCL's own dump, where its timeout was shorter than our patience; `torchfrtrace` reads it.

Python's stacks come first.  The native ones have {NATIVE_WITHIN_S:g} s for all ranks of a node; why there are none is
in the log (`watcher`).  py-spy and the kernel's word on system calls need leave to trace one's own processes:
`kernel.yama.ptrace_scope = 0` on the nodes.  Without it there are faulthandler's stacks, and where each thread sleeps.

The verdict puts stacks and collectives together:

    rank 2 is in the data loader (train.py:61 in step); 3 ranks, 0 to 3: each waits in all_reduce (train.py:66 in step);
    ranks 0, 1, 3 wait in all_reduce #812 of the default group, rank 2 has not entered it (the newest it entered is
    all_gather #811)

| words | meaning |
| --- | --- |
| `in cuStreamSynchronize (libcuda.so.1)` | where the rank is below Python: in this function, of that library |
| `in read of /data/7.bin under mdb_get (liblmdb.so.0)` | the library waits in a system call, for that file |
| `its process 4711 is in read of /data/7.bin` | a process of the rank's own does, such as a data loader's worker |
| `was stopped by a signal, and is in step (...)` | it can do nothing; so where it `waits for a device ...` |
| `rank 2 has not entered it` | it is the one to look at: its stack, its node |
| `rank 2 does not answer` | it was stopped, is stuck in the kernel, or holds the interpreter's lock: see its stack |
| `the ranks disagree at #812` | different collectives, or `all_reduce` of different sizes: an error of the program |
| `on rank 2 the GPU has not begun it` | the program has queued it; what its GPU does before does not end |
| `all 4 ranks that are known of have entered ...` | no rank is missing: the network, or the collective itself |

The recorders are on by default from torch 2.6 on (Stepkeeper sets `TORCH_FR_BUFFER_SIZE=2000` where it is not set; 0
turns them off).  gloo records no messages between two ranks (`send`, `recv`).  A script without the trainer library
gives stacks only.
"""


LADDER = """
Failures in the same way (the same cause at the same place) go along the row of their cause (below),
until a step is verified beyond the one at which they happened.  A node that cannot be left leads to the next action,
or, where that is `stop`, to a relaunch.  The last action holds for all that follow.  Causes without a row go by that of
`unknown`.  Besides:

- `policy.failures_max` launches without a newly verified step end the run, whatever their causes.  Faults of nodes and
  storage are in no budget of the training, nor is what Slurm ended, whether it says so before or after the ranks' end.
- A verdict on a node that the launch did not run on (it was left before) counts as `unknown`.
- A hang, a crash in native code, a collective's timeout or an unknown cause at the very same step twice: the step
  before is tried once (a `rollback` in the lineage), then the run ends. The same where a loss is wrong in the very
  first step from a checkpoint, twice: its state holds it already.
- `rollback` goes to the newest verified step before the one at which a loss went wrong, else one checkpoint back; never
  to the very start.
- Data that is left out from then on (`policy.skip_data_steps`) is named by the `rollback` in the lineage
  (`stepkeeper checkpoints ls`), and the manifest of each later step directory names the samples.
- Where the run ends, the exit code is 29 (or 20 for `failures_max`), the reason is in log and status, the code in the
  job's comment, and `notify_command` is run.
"""


def page() -> str:
    """Return the page."""
    table = rules.load()
    out = ["# Why a launch failed", "", MADE, "", LEAD.strip(), "", "## Causes", ""]
    out += _table(
        ("cause", "what happened", "what to do", "how to confirm"),
        [(f"`{cause.value}`", *_meaning(table.meanings[cause])) for cause in Cause],
    )
    out += ["", "## Training that stands still", "", HANG.strip()]
    out += ["", "## What follows", "", LADDER.strip(), ""]
    rows = [cause for cause in Cause if hasattr(Policy, f"on_{cause.value}")]
    out += _table(("cause", "first, second, ... failure", "setting"), [(f"`{c.value}`", *_row(c)) for c in rows])
    out += ["", "## Rules for logs and error files", "", "The first that matches a line or an exception decides.", ""]
    out += _table(
        ("rule", "cause", "role", "confidence", "plane", "says"),
        [
            (f"`{row.id}`", row.cause.value, row.role.value, f"{row.confidence:.2f}", row.plane.value, row.says)
            for row in (rule.row for rule in table.rules)
        ],
    )
    out += ["", "## Exits of ranks", "", "Only the first rank that failed is a root; those after it follow.", ""]
    exits = [(f"signal {number}", *row) for number, row in planes.SIGNALS.items()]
    exits += [(f"code {number}", *row) for number, row in planes.CODES.items()]
    out += _table(
        ("exit", "rule", "cause", "role", "confidence", "says"),
        [
            (name, f"`{rule}`", cause.value, _role(role), f"{confidence:.2f}", says)
            for name, rule, cause, role, confidence, says in exits
        ],
    )
    return "\n".join([*out, ""])


def _meaning(meaning: rules.Meaning) -> tuple[str, str, str]:
    return meaning.happened, meaning.todo, "; ".join(f"`{command}`" for command in meaning.confirm)


def _row(cause: Cause) -> tuple[str, str]:
    name = f"on_{cause.value}"
    row: str = getattr(Policy(), name)
    return f"`{row}`", "none: a constant" if name in Limits.__struct_fields__ else f"`policy.{name}`"


def _role(role: Role) -> str:
    return role.value


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [header, tuple("---" for _ in header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]

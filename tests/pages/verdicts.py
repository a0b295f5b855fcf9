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
`stepkeeper explain RUN` shows why the newest failed launch of a run failed (`--attempt`, `--launch` name another).
`stepkeeper explain --log FILE ...` shows what log files say on their own.  Give one a node; `-` is stdin.  Torch's
error files work too.  RUN by the number of a job means the launches of that job, where several have worked on
the run.

`--json` prints one object with these keys:

- the verdict: `cause`, `rule`, `confidence`, `role`, `evidence`, `location`, `rank`, `node`, `happened`, `todo`
- `otherwise`: the verdict without the strongest piece of evidence
- `message`: what the program or Slurm said
- `who`: rank, node, process, GPU, and `log`, the file and line
- `last_lines`: the last error-like lines of that log, or its last lines
- `next`: what Stepkeeper does next, by the settings of the run
- `confirm`: commands
- of a run: `run`, `attempt`, `launch`, `job_id`
- `followed`: the next launch of the run
- `end`: how the newest attempt of the run ended (`at`, `code`, `reason`)

The rules are data: `supervisor/stepkeeper/diagnosis/rules.toml`.  The logs that they are measured by are in
`tests/diagnosis/corpus`.

A supervisor that finds a launch failed judges it in the same way, while it prepares the next one.  It acts by the
cause's row of the ladder (below).  A verdict of less confidence than {Limits().judged_from:g} decides as
`unknown` does.

What the supervisor itself saw is a root too: `progress-silence` is a hang, with what its ranks did (see below).
`computed-wrongly` is a rank that came to other bits where it computed a micro-batch again
([silent corruption](trainer-api.md#silent-corruption)).  It outweighs all other evidence.
`loss-not-finite`, `loss-spike` and `loss-discontinuity` are numerical.  A rank that the supervisor killed is no
evidence.  Nor are Stepkeeper's own lines in a log: JSON or text of the supervisor, lines of the trainer library.

The journal says why the supervisor had a launch stopped: `asked-to-stop` (who, and when), `limit-notice`,
`left-on-purpose`.  Where the launch failed all the same, that only supports what else is known.

For an attempt without a final record, the evidence is who had the job run again:

- Slurm did, as it does where a node failed: `slurm-requeued-itself`.
- A watcher on another node than the supervisor's did: `batch-node-gone`.
- The watcher beside the supervisor did, which proves that the node lives: `supervisor-gone`.

## How evidence is joined

1. A root says what went wrong, a cascade follows from it elsewhere, a confirmation supports.  Roots beat cascades: a
   collective's timeout is the verdict only where no rank says more, and `role` is `cascade` then.
2. A root below {LIKELY:g} gives way to any other.
3. A fault of a node is the verdict where it explains what the ranks say.  It does not explain a program's own error.
4. Slurm's word is the verdict where it alone says why, or where it came before any rank failed.
5. Of several roots, that of the rank that failed first.  Within one log, the more certain one, then the earlier one.
6. An error after which training continued did not end it.  Ranks that Slurm ends write on until it kills them.
7. A process that was asked to terminate, or was killed after another one had failed, gives way to what failed.
8. In a chain of exceptions, the one that a rule knows counts.  Else the one named as the cause counts, else the last
   one.  NCCL's `Last error:` decides over the kind of its error.
9. A warning is a cascade, and weaker.

Known prefixes are taken off each line: labels of srun, torchrun, mpirun and pdsh, colours and progress bars.  So are
those of Kubernetes, docker compose and Ray, and times with what loggers put behind them.  What stands before the first
line of a traceback is taken off its other lines, whatever it is.  Tracebacks of several writers are kept apart.

A log is read at both ends (0.5 MiB and 4 MiB), lines beyond {LINE_CHARACTERS_MAX:,} characters without their middle.
"""


HANG = f"""
Before the supervisor ends a training that hangs, each node's watcher collects what its ranks do.  It does so twice,
seconds apart.  All of it stays in the launch's logs, below `stacks/`:

- `rank-R.txt`: the stacks of all threads, by py-spy where it is installed (on the `PATH` or beside Stepkeeper).  Else
  Python's faulthandler gives them.  Native stacks need py-spy.  The file also has what the kernel says of each thread
  and of the rank's children.  That is the state, the system call, and the file, socket or device of that call.
- `collectives-rank-R.json`: where the rank is in each group's collectives.  A thread of the trainer library asks
  torch's flight recorders for it (NCCL's, and that of CPU groups).  NCCL's RAS is asked too
  ([slow training](slow-training.md)).

- `flight-recorder-nccl-rank-R.json`, `flight-recorder-cpu-rank-R.json`: what they said themselves.
- `nccl-of-rank-R`: NCCL's own dump, where its timeout was shorter than our patience; `torchfrtrace` reads it.

Python's stacks come first.  The native ones have {NATIVE_WITHIN_S:g} s for all ranks of a node.  If there are
none, the log says why (`watcher`).  py-spy and the kernel's word on system calls need permission to trace one's own
processes: `kernel.yama.ptrace_scope = 0` on the nodes.  Without it there are faulthandler's stacks, and where each
thread sleeps.

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
| `rank 2 has not entered it` | it is the one to check: its stack, its node |
| `rank 2 does not answer` | it was stopped, is stuck in the kernel, or holds the interpreter's lock: see its stack |
| `the ranks disagree at #812` | different collectives, or `all_reduce` of different sizes: an error of the program |
| `on rank 2 the GPU has not begun it` | the program has queued it; what its GPU does before does not end |
| `all 4 ranks that are known of have entered ...` | no rank is missing: the network, or the collective itself |

The recorders are on by default from torch 2.6 on.  Stepkeeper sets `TORCH_FR_BUFFER_SIZE=2000` where it is not set, and
0 turns them off.  gloo records no messages between two ranks (`send`, `recv`).  A script without the trainer library
gives stacks only.
"""


LADDER = """
Failures with the same cause at the same place go along the row of their cause (below).  They do so
until a step is verified beyond the one at which they happened.  A node that cannot be left leads to the next action,
or, where that is `stop`, to a relaunch.  The last action holds for all that follow.  Causes without a row go by that of
`unknown`.  Besides:

- `policy.failures_max` launches without a newly verified step end the run, whatever their causes.  Faults of nodes and
  storage are in no budget of the training.  Nor is what Slurm ended, whether it says so before or after the ranks' end.
- A verdict on a node that the launch did not run on (it was left before) counts as `unknown`.
- A hang, a crash in native code, a collective's timeout or an unknown cause may repeat at the same step.  Then
  the step before is tried once (a `rollback` in the lineage), and after that the run ends.  The same holds where a loss
  is wrong twice in the first step from a checkpoint.  Its state holds the error already.
- `rollback` goes to the newest verified step before the one at which a loss went wrong.  Else it goes one checkpoint
  back, and never to the very start.
- The `rollback` in the lineage (`stepkeeper checkpoints ls`) names the data that is left out from then on
  (`policy.skip_data_steps`).  The manifest of each later step directory names the samples.
- Where the run ends, the exit code is 29 (or 20 for `failures_max`).  Log and status have the reason, and the job's
  comment has the code.  The supervisor runs `notify_command`.
"""


def page() -> str:
    """Return the page."""
    table = rules.load()
    out = ["# Why a launch failed", "", MADE, "", LEAD.strip(), "", "## Causes", ""]
    out += _table(
        ("cause", "what happened", "what to do", "how to confirm"),
        [(f"`{cause.value}`", *_meaning(table.meanings[cause])) for cause in Cause],
    )
    out += ["", "## Training that hangs", "", HANG.strip()]
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

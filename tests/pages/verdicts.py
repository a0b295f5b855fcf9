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
`stepkeeper explain RUN` shows why the newest failed launch of a run failed.  `--attempt` and `--launch` name another
one.  RUN may be a job number.  If several jobs have worked on the run, only the launches of that job count.

`stepkeeper explain --log FILE ...` judges log files without a run.  Give one file for each node, or `-` for stdin.
Error files of torchrun work too.

`--json` prints one object with these keys:

- the verdict: `cause`, `rule`, `confidence`, `role`, `evidence`, `location`, `rank`, `node`, `happened`, `todo`
- `otherwise`: the verdict without the strongest piece of evidence
- `message`: the error message of the program or of Slurm
- `who`: rank, node, process, GPU, and `log` (file and line)
- `last_lines`: the last lines of that log that look like errors; if none does, its last lines
- `next`: what Stepkeeper does next, by the settings of the run
- `confirm`: commands that confirm the cause
- only for a run: `run`, `attempt`, `launch`, `job_id`
- only for a run, `followed`: the next launch
- only for a run, `end`: how its newest attempt ended (`at`, `code`, `reason`)
- only for a run, `left_out`: data that the training leaves out (`step`, `steps`)
- only with `--log`, `logs`: the files

The supervisor judges every failed launch in the same way, while it prepares the next one.  Then it acts by the
[recovery ladder](#the-recovery-ladder).  A verdict with less confidence than {Limits().judged_from:g} counts as
`unknown`.

The rules are data: `supervisor/stepkeeper/diagnosis/rules.toml`.  `tests/diagnosis/corpus` has the logs by which they
are tested.

## How evidence is joined

Each piece of evidence has a role:

- A **root** says what went wrong.
- A **cascade** is a consequence of something that went wrong elsewhere.
- A **confirmation** only supports other evidence.

These rules choose the verdict:

1. Roots beat cascades.  So a timeout of a collective is the verdict only if no rank says more.  `role` is then
   `cascade`.
2. A root with less confidence than {LIKELY:g} gives way to any other root.
3. A fault of a node is the verdict if it explains what the ranks say.  It does not explain an error of the program.
4. Slurm's message is the verdict if no other evidence gives a reason, or if it came before any rank failed.
5. Of several roots, that of the rank that failed first counts.  Within one log the more certain one counts, then the
   earlier one.
6. An error after which the training continued is not the cause, however often it came.  Steps that ranks complete
   while Slurm ends them do not count as such.
7. A process may have been terminated or killed because another one had failed.  Then the failed one counts.
8. In a chain of exceptions, the one that a rule knows counts.  Otherwise the one named as the cause counts, or else
   the last one.  NCCL's `Last error:` counts more than the kind of its error.
9. A warning is a cascade with less confidence.

The supervisor's own findings are roots too:

- `progress-silence`: a hang, with what the ranks did ([below](#training-that-hangs))
- `computed-wrongly`: a rank computed a micro-batch twice, with different results
  ([silent corruption](trainer-api.md#silent-corruption)).  It outweighs all other evidence.
- `loss-not-finite`, `loss-spike`, `loss-discontinuity`: the cause is `numerical`.

The end of a rank that the supervisor killed is no evidence.  Lines that Stepkeeper itself wrote into a log are none
either.

The journal shows why the supervisor stopped a launch on purpose:

- `asked-to-stop`: a person asked for it.
- `limit-notice`: the time limit of the job was near.
- `left-on-purpose`: Stepkeeper had another reason.

If the launch failed all the same, this only supports other evidence.

If an attempt has no final record, the evidence is who requeued the job:

- `slurm-requeued-itself`: Slurm did, as it does after a node failure.
- `batch-node-gone`: a watcher on another node than the supervisor's did.
- `supervisor-gone`: the watcher on the supervisor's node did, so that node is alive.

Before the rules see a line, known prefixes are removed.  They are timestamps with the fields of a logger, colours,
progress bars, and labels of launchers.  srun, torchrun, mpirun, pdsh, Kubernetes, docker compose and Ray are known.
Text before the first line of a traceback is removed from its other lines too.  Tracebacks of several processes in one
log are kept apart.  A traceback in one record of a logger (JSON, logfmt) is read like any other.

Of a long log, the first 0.5 MiB and the last 4 MiB are read.  A line with more than {LINE_CHARACTERS_MAX:,} characters
is read without its middle.
"""


HANG = f"""
Before the supervisor ends a training that hangs, the watcher of each node collects what its ranks do.  It does so
twice, with seconds in between.  The files are below `stacks/` in the logs of the launch:

- `rank-R.txt`: the stacks of all threads.  They come from py-spy if it is installed (on the `PATH` or beside
  Stepkeeper), otherwise from Python's faulthandler.  Native stacks need py-spy.  The file also shows what the kernel
  knows about each thread and each child process.  That is its state, its system call, and the file, socket or device
  of that call.
- `collectives-rank-R.json`: how far the rank is in the collectives of each process group.  A thread of the trainer
  library reads it from torch's flight recorders, for NCCL and for CPU groups.  NCCL's RAS is asked too
  ([slow training](slow-training.md)).
- `flight-recorder-nccl-rank-R.json`, `flight-recorder-cpu-rank-R.json`: the dumps of these flight recorders.
- `nccl-of-rank-R`: torch's own NCCL dump, if the timeout of NCCL came first.  `torchfrtrace` reads it.

Python stacks come first.  Native stacks have {NATIVE_WITHIN_S:g} s for all ranks of a node.  If there are none, the log
says why (`watcher`).  py-spy and the names of system calls need permission to trace processes of the same user:
`kernel.yama.ptrace_scope = 0` on the nodes.  Without it, the file has the stacks of faulthandler and where each thread
sleeps.

The verdict joins stacks and collectives:

    rank 2 is in the data loader (train.py:61 in step); ranks 0, 1, 3: each waits in all_reduce (train.py:66 in step);
    ranks 0, 1, 3 wait in all_reduce #812 of the default group, rank 2 has not entered it (the newest it entered is
    all_gather #811)

| words | meaning |
| --- | --- |
| `in cuStreamSynchronize (libcuda.so.1)` | below Python, the rank is in this function of this library |
| `in read of /data/7.bin under mdb_get (liblmdb.so.0)` | the library waits in a system call for this file |
| `its process 4711 is in read of /data/7.bin` | a child process of the rank waits, such as a worker of a data loader |
| `was stopped by a signal, and is in step (...)` | the rank cannot run |
| `waits for a device ...` | the rank cannot run until a device or file system answers |
| `rank 2 has not entered it` | rank 2 is the one to check: its stack, its node |
| `rank 2 does not answer` | it was stopped, is stuck in the kernel, or holds the interpreter's lock: see its stack |
| `the ranks disagree at #812` | different collectives, or `all_reduce` of different sizes: an error of the program |
| `on rank 2 the GPU has not begun it` | the program has queued it, but earlier work of its GPU does not end |
| `all 4 known ranks have entered ...` | no rank is missing: the network, or the collective itself, is the cause |

torch's flight recorders are on by default since torch 2.6.  Stepkeeper sets `TORCH_FR_BUFFER_SIZE=2000` if it is not
set; 0 turns the recorders off.  gloo does not record messages between two ranks (`send`, `recv`).  A script without
the trainer library gives stacks only.
"""


LADDER = """
Each cause has a row of actions (below).  The first failure leads to the first action.
The second failure in the same way leads to the second action, and so on.  The last action is repeated.  "In the same
way" means the same cause at the same place, before a step beyond it is verified.  Causes without a row use the row of
`unknown`.

| action | what happens |
| --- | --- |
| `relaunch` | the ranks start again on the same nodes |
| `leave` | the next launch does without the failed node; if it cannot: the next action, or `relaunch` for `stop` |
| `rollback` | the ranks start again from an older verified step |
| `requeue` | the job goes back to the queue; a faulty node is excluded |
| `stop` | the run ends, and a person has to act |

Besides:

- `policy.failures_max` failed launches without a newly verified step end the run, whatever their causes.
- Faults of nodes and storage are not counted there.  Nor are launches that Slurm ended, even if Slurm says so later.
- A verdict that blames a node on which the launch did not run counts as `unknown`.
- A hang, a native crash, a timeout of a collective or an unknown failure may repeat at the same step.  Then
  the checkpoint itself may be the cause.  Stepkeeper tries the checkpoint before it once (`rollback`), and then ends
  the run.  The same holds if a loss is wrong twice in the first step after a checkpoint.
- `rollback` goes to the newest verified step before the one at which the loss went wrong.  For other causes it goes
  back by one checkpoint, and never to the very start.
- If a rollback leaves out data (`policy.skip_data_steps`), the lineage names it (`stepkeeper checkpoints ls`).  The
  manifest of each later step directory names the samples.
- If the run ends, the exit code is 29, or 20 for `failures_max`.  The log and `stepkeeper status` show the reason, and
  the job's comment shows the code.  The supervisor runs `notify_command`.
"""


def page() -> str:
    """Return the page."""
    table = rules.load()
    out = ["# Why a launch failed", "", MADE, "", LEAD.strip(), "", "## Causes", ""]
    for cause in Cause:
        out += _cause(cause, table.meanings[cause])
    out += ["## Training that hangs", "", HANG.strip()]
    out += ["", "## The recovery ladder", "", LADDER.strip(), ""]
    rows = [cause for cause in Cause if hasattr(Policy, f"on_{cause.value}")]
    out += _table(("cause", "first, second, ... failure", "setting"), [(f"`{c.value}`", *_row(c)) for c in rows])
    out += ["", "## Rules for logs and error files", ""]
    out += ["The first rule that matches a line or an exception decides.  `plane` says where it comes from.", ""]
    out += _table(
        ("rule", "cause", "role", "confidence", "plane", "says"),
        [
            (f"`{row.id}`", row.cause.value, row.role.value, f"{row.confidence:.2f}", row.plane.value, row.says)
            for row in (rule.row for rule in table.rules)
        ],
    )
    out += ["", "## Exits of ranks", ""]
    out += ["Only the exit of the rank that failed first is a root.  Later ones are cascades.", ""]
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


def _cause(cause: Cause, meaning: rules.Meaning) -> list[str]:
    commands = [f"- `{command}`" for command in meaning.confirm]
    return [
        f"### `{cause.value}`", "", meaning.happened, "", f"**What to do:** {meaning.todo}", "",
        "**To confirm:**", "", *commands, "",
    ]  # fmt: skip


def _row(cause: Cause) -> tuple[str, str]:
    name = f"on_{cause.value}"
    row: str = getattr(Policy(), name)
    return f"`{row}`", "none: a constant" if name in Limits.__struct_fields__ else f"`policy.{name}`"


def _role(role: Role) -> str:
    return role.value


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [header, tuple("---" for _ in header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]

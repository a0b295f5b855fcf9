"""The ways to keep a training alive that are compared, each as its own documentation has it: how one is submitted."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab import Lab
from tests.lab.agents import Agents
from tests.lab.site import site_python
from tests.recovery.environment import Peers
from tests.training import SMALL, Training

USER = "games"
SCRIPTS = Path(__file__).with_name("scripts")
EVERY = 20  # steps between checkpoints
STEP_SECONDS = 0.2
STEPS = 100_000  # more than any run here comes to
SIGNAL_BEFORE_S = 60
RESTARTS = 3
PORT = "port=$((12000 + (SLURM_JOB_ID * 16 + ${SLURM_RESTART_COUNT:-0}) % 7000))"
OPTIONS = (
    f"--steps={STEPS}",
    "--seed=7",
    f"--checkpoint-every-steps={EVERY}",
    f"--step-seconds-min={STEP_SECONDS}",
    *SMALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where one training of the benchmark lives."""

    lab: Lab
    name: str
    peers: Peers
    constraint: str = ""
    """The feature of the nodes that its job may have; empty: all."""
    agents: Agents | None = None
    """Those of its nodes; None: it has none."""

    @property
    def directory(self) -> Path:
        """What its ranks tell, and all its files."""
        return self.lab.workdir(USER) / self.name

    @property
    def log(self) -> Path:
        """What the job prints."""
        return self.directory / "job.log"

    @property
    def environment(self) -> dict[str, str]:
        """What the scripts go by."""
        path = f"{self.directory}:{self.peers.project}"
        return {"RECOVERY_DIR": str(self.directory), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **self.where}

    @property
    def where(self) -> dict[str, str]:
        """What keeps its job to its own nodes."""
        return {"SBATCH_CONSTRAINT": self.constraint} if self.constraint else {}

    def prepare(self) -> None:
        """Make the directory, with the scripts in it, the user's own."""
        account = pwd.getpwnam(USER)
        os.utime(site_python(USER).parents[1])  # it is in use: environments of newer sources must not push it out
        shutil.copytree(SCRIPTS, self.directory, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (self.directory, *self.directory.rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid)

    def sbatch(self, text: str, *options: str, nodes: int = 2) -> int:
        """Submit a batch script with the geometry that all ways have."""
        return self.lab.submit(
            text,
            sbatch_args=[
                f"--nodes={nodes}", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", "--cpus-per-task=1",
                "--requeue", "--open-mode=append", f"--output={self.log}", f"--job-name={self.name}", *options,
            ],
            user=USER,
            env=self.environment,
        )  # fmt: skip


Submit = Callable[[Spot], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way."""

    name: str
    what: str
    """What the page says of it."""
    submit: Submit
    package: str = ""
    """What must be installed for it."""
    is_ready: Callable[[Spot], bool] = lambda _: True
    """Whether the fault may come: what the way prepares beside training is there."""
    watches_hangs: bool = False
    faults: tuple[str, ...] = ()
    """Those for which it matters what sets it apart; empty: all."""
    agents: bool = False
    """Its job is kept to nodes of its own, which have a node agent each meanwhile."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Fault to why this way does not recover from it, for the page; used only where it did not."""


def stepkeeper(spot: Spot, *run_args: str, nodes: int = 2, torchrun: bool = False) -> int:
    """Submit by `sbatch stepkeeper.sbatch`, as users do."""
    python = Training(spot.lab, user=USER).python
    elastic = (str(python.with_name("torchrun")), "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d")
    training = Training(
        spot.lab,
        user=USER,
        name=spot.name,
        nodes=nodes,
        run_args=run_args,
        sbatch_args=(f"--output={spot.log}",),
        command=(*(elastic if torchrun else (str(python),)), str(spot.directory / "ours.py"), *OPTIONS),
        # its own environment has the project already
        env={
            "RECOVERY_DIR": str(spot.directory),
            "STEPKEEPER_RUN_DIR": str(spot.directory / "run"),
            **({"STEPKEEPER_AGENT_SOCKET": str(spot.agents.socket("%N"))} if spot.agents else {}),
            **spot.where,
        },
    )
    return training.submit().job_id


def _elastic(spot: Spot, launcher: list[str], *script_args: str) -> int:
    script = shlex.join(["plain.py", *OPTIONS, *script_args]).replace("plain.py", str(spot.directory / "plain.py"), 1)
    return spot.sbatch(
        f"{PORT}\n"
        f"srun {shlex.join(launcher)} --nnodes=2 --nproc-per-node=1 --max-restarts={RESTARTS} --rdzv-backend=c10d"
        f" --rdzv-endpoint=127.0.0.1:$port --rdzv-id=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
        f" --local-addr=127.0.0.1 {script}\n"
    )


def torchrun(spot: Spot) -> int:
    """One torchrun a node, as in its documentation for Slurm."""
    return _elastic(spot, [str(spot.peers.python), "-m", "torch.distributed.run"])


def ft_launcher(spot: Spot) -> int:
    """One ft_launcher a node; the ranks send heartbeats."""
    return _elastic(spot, [str(spot.peers.python.parent / "ft_launcher")], "--heartbeats")


def bash_trap(spot: Spot) -> int:
    """A batch script that passes the signal on, and requeues its job unless the training is done."""
    script = shlex.join([str(spot.peers.python), str(spot.directory / "plain.py"), *OPTIONS, "--stop-on-signal"])
    return spot.sbatch(
        f"""{PORT}
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$port
trap 'asked=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
srun --kill-on-bad-exit=1 {script} &
wait $!; code=$?
while jobs %% >/dev/null 2>&1; do wait %%; code=$?; done
[ "$code" = 0 ] && [ -z "$asked" ] && exit 0
[ "${{SLURM_RESTART_COUNT:-0}}" -lt {RESTARTS} ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
""",
        f"--signal=B:USR1@{SIGNAL_BEFORE_S}",
    )


def submitit(spot: Spot) -> int:
    """`SlurmExecutor.submit` of a checkpointable callable."""
    done = spot.lab.run(
        spot.peers.python,
        spot.directory / "submitit_job.py",
        spot.directory / "submitit",
        str(SIGNAL_BEFORE_S),
        *OPTIONS,
        user=USER,
        env=spot.environment,
        cwd=spot.directory,
    )
    return int(done.stdout.split()[-1])


def lightning(spot: Spot) -> int:
    """`srun python`, the signal to the tasks, as in its documentation for Slurm."""
    script = shlex.join([str(spot.peers.python), str(spot.directory / "lightning_job.py"), *OPTIONS])
    return spot.sbatch(
        f"{PORT}\nexport MASTER_ADDR=127.0.0.1 MASTER_PORT=$port\nsrun {script}\n",
        f"--signal=SIGUSR1@{SIGNAL_BEFORE_S}",
    )


def _told(spot: Spot, *events: str) -> bool:
    text = spot.log.read_text(errors="replace")
    return all(event in text for event in events)


_NO_HANG = "nothing watches for it: torch's own limit is 30 minutes"
_ENDS_IN_GRACE = "Slurm's SIGTERM ends the ranks. Slurm 22.05 does not requeue a job that ends in its grace time"
_NO_RETRY = "it requeues after its signal only: a failed task fails the job"

SNAPSHOTS = ("--spares=1", "--snapshot-every=2 steps", "--peer-copies")
WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way(
            name="stepkeeper",
            what="`sbatch stepkeeper.sbatch`, all settings as they come; saves by its CheckpointManager",
            submit=stepkeeper,
            watches_hangs=True,
        ),
        Way(
            name="stepkeeper-agent",
            what="the same on nodes with a [node agent](node-agent.md) each, which the administrator installs",
            submit=stepkeeper,
            watches_hangs=True,
            faults=("node", "silent", "preemption"),
            agents=True,
        ),
        Way(
            name="stepkeeper-warm",
            what="the same with `--warm-standby`: each rank has a process that has imported torch and waits",
            submit=lambda spot: stepkeeper(spot, "--warm-standby"),
            is_ready=lambda spot: _told(spot, "standby_ready"),
            watches_hangs=True,
        ),
        Way(
            name="stepkeeper-torchrun",
            what="the same with `torchrun` as CMD",
            submit=lambda spot: stepkeeper(spot, torchrun=True),
            watches_hangs=True,
        ),
        Way(
            name="stepkeeper-torchrun-warm",
            what="the same with `torchrun` as CMD and `--warm-standby`, which torchrun itself has too",
            submit=lambda spot: stepkeeper(spot, "--warm-standby", torchrun=True),
            is_ready=lambda spot: _told(spot, "standby_ready", "standby_of_torchrun_ready"),
            watches_hangs=True,
        ),
        Way(
            name="stepkeeper-spare",
            what="the same with a third node, `--spares=1`",
            submit=lambda spot: stepkeeper(spot, "--spares=1", nodes=3),
            watches_hangs=True,
        ),
        Way(
            name="stepkeeper-shrink",
            what="the same with `--min-nodes=1`: it goes on with the node that is left, which then computes for both",
            submit=lambda spot: stepkeeper(spot, "--min-nodes=1"),
            watches_hangs=True,
            faults=("node", "silent"),
        ),
        Way(
            name="stepkeeper-snapshots",
            what="the same with `--spares=1`, and besides with `--snapshot-every` 2 steps and `--peer-copies`",
            submit=lambda spot: stepkeeper(spot, *SNAPSHOTS, nodes=3),
            watches_hangs=True,
        ),
        Way(
            name="stepkeeper-snapshots-warm",
            what="the same with `--warm-standby`, too",
            submit=lambda spot: stepkeeper(spot, *SNAPSHOTS, "--warm-standby", nodes=3),
            is_ready=lambda spot: _told(spot, "standby_ready"),
            watches_hangs=True,
        ),
        Way(
            name="torchrun",
            what=f"`srun torchrun --max-restarts={RESTARTS}`, c10d rendezvous; rank 0 saves it all by `torch.save`",
            submit=torchrun,
            reasons={"hang": _NO_HANG, "preemption": _ENDS_IN_GRACE},
        ),
        Way(
            name="ft_launcher",
            what=(
                f"`srun ft_launcher --max-restarts={RESTARTS}`, a heartbeat a step, time limits calculated by it after"
                " the first save; `torch.save` as above"
            ),
            submit=ft_launcher,
            package="nvidia-resiliency-ext",
            watches_hangs=True,
            reasons={"preemption": _ENDS_IN_GRACE},
        ),
        Way(
            name="bash-trap",
            what=(
                f"`sbatch --requeue --signal=B:USR1@{SIGNAL_BEFORE_S}`, a trap that passes the signal on, `scontrol"
                " requeue` after a failure. The ranks save on the signal; `torch.save` as above"
            ),
            submit=bash_trap,
            reasons={"hang": _NO_HANG},
        ),
        Way(
            name="submitit",
            what=(
                "`SlurmExecutor`, a callable with `checkpoint()`, which runs in rank 0 alone and cannot collect a"
                " sharded state. `torch.save` as above"
            ),
            submit=submitit,
            package="submitit",
            reasons={"hang": _NO_HANG, "rank": _NO_RETRY},
        ),
        Way(
            name="lightning",
            what=(
                f"`Trainer` with `SLURMEnvironment(auto_requeue=True)`, `--signal=SIGUSR1@{SIGNAL_BEFORE_S}`, DDP (its"
                " sharded strategies want GPUs), `ModelCheckpoint(save_last=True)`"
            ),
            submit=lightning,
            package="lightning",
            reasons={"hang": _NO_HANG, "rank": _NO_RETRY},
        ),
    )
}

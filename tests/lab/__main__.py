"""`python -m tests.lab up|down|status|shell`: a lab by hand."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.lab import requirements
from tests.lab.cluster import Lab
from tests.lab.faults import LabError
from tests.lab.options import USERS, LabOptions
from tests.lab.teardown import PREFIX

DIRECTORY = Path(f"/tmp/{PREFIX}hand")


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help="the lab's directory (default: %(default)s)")
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="start a lab that stays until `down`")
    defaults = LabOptions()
    up.add_argument("--slurm", choices=("installed", "newest"), default=defaults.slurm)
    up.add_argument("--nodes", type=int, default=defaults.nodes)
    up.add_argument("--gpus", type=int, default=defaults.gpus)
    up.add_argument("--grace-time", type=int, default=defaults.grace_time_s, metavar="S")
    up.add_argument("--kill-wait", type=int, default=defaults.kill_wait_s, metavar="S")
    up.add_argument("--slurmd-timeout", type=int, default=defaults.slurmd_timeout_s, metavar="S")
    up.add_argument("--cred-expire", type=int, default=defaults.cred_expire_s, metavar="S", help="0: Slurm's default")
    up.add_argument("--send-user-signal", action="store_true")
    up.add_argument("--no-job-requeue", action="store_true")
    up.add_argument("--slurm-conf", action="append", default=[], metavar="LINE", help="one more line for slurm.conf")
    actions.add_parser("down", help="take it down")
    actions.add_parser("status", help="nodes and jobs")
    shell = actions.add_parser("shell", help="a shell, or a command, inside the lab")
    shell.add_argument("--user", choices=USERS, help="as an ordinary user; root by default")
    shell.add_argument("command", nargs="*")
    for each in actions.choices.values():
        # also behind the action, where one looks for it
        each.add_argument("--dir", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    try:
        return _act(chosen)
    except LabError as error:
        sys.stderr.write(f"lab: {error}\n")
        return 1


def _act(chosen: argparse.Namespace) -> int:
    if missing := requirements.missing():
        raise LabError("no lab on this machine: " + "; ".join(missing))
    if chosen.action == "up":
        lab = Lab(_options(chosen), directory=chosen.dir, owned=False).up()
        print(f"{len(lab.node_names)} nodes up in {lab.up_s:.1f} s; export SLURM_CONF={lab.place.conf}")
        return 0
    lab = Lab.attach(chosen.dir)
    if chosen.action == "down":
        lab.down()
    elif chosen.action == "status":
        print(lab.run("sinfo", "-N", "-l").stdout + lab.run("squeue").stdout, end="")
    else:
        done = subprocess.run(  # interactive: no limit but the user's own
            chosen.command or ["/bin/bash", "-i"],
            env=lab.environment(chosen.user, {"TERM": os.environ.get("TERM", "dumb")}),
            cwd=lab.workdir(chosen.user) if chosen.user else None,
            check=False,
            **lab.identity(chosen.user),
        )
        return done.returncode
    return 0


def _options(chosen: argparse.Namespace) -> LabOptions:
    return LabOptions(
        slurm=chosen.slurm,
        nodes=chosen.nodes,
        gpus=chosen.gpus,
        grace_time_s=chosen.grace_time,
        kill_wait_s=chosen.kill_wait,
        slurmd_timeout_s=chosen.slurmd_timeout,
        cred_expire_s=chosen.cred_expire or None,
        send_user_signal=chosen.send_user_signal,
        job_requeue=not chosen.no_job_requeue,
        slurm_conf=tuple(chosen.slurm_conf),
    )


if __name__ == "__main__":
    sys.exit(main())

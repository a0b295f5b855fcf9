"""What a lab needs from the machine, and what to do where it is missing."""

import os
import pwd
import shutil
import sys

from tests.lab.options import USERS

REQUIRE_VARIABLE = "TEST_REQUIRE_SLURM"
"""Set to 1 in CI: there a missing requirement is a failure, not a skip."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMANDS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "munged": "munge",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
    "scontrol": "slurm-client",
}


def missing() -> list[str]:
    """Return what keeps a lab from running here, each with its mend; empty where nothing does."""
    result = []
    if not sys.platform.startswith("linux"):
        return ["this is not Linux"]
    if os.geteuid() != 0:
        result.append("not root: run under sudo (slurmd starts jobs as other users)")
    absent = {package for command, package in COMMANDS.items() if shutil.which(command, path=PATH) is None}
    if absent:
        result.append(f"not installed: apt-get install {' '.join(sorted(absent))}")
    for user in USERS:
        try:
            pwd.getpwnam(user)
        except KeyError:
            result.append(f"no account `{user}`: useradd --system {user}")
    return result


def required() -> bool:
    """Tell whether a missing requirement must fail the tests."""
    return os.environ.get(REQUIRE_VARIABLE) == "1"

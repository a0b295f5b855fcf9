"""The newest Slurm, 26.05 or later, beside the machine's own: from Debian's unstable suite, and pyslurm with it.

Built once, in a few minutes, and kept in /var/tmp.  Where it cannot be built (that suite moves, and needs a network)
its tests are skipped with the reason; `python -m tests.lab.newest_or_skip` says it loudly.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.lab.building import locked
from tests.lab.faults import LabError
from tests.lab.mounts import LET_GO

HOME = Path("/var/tmp/stepkeeper-newest")  # world-writable parent: `locked` checks whose it is
RECIPE = Path(__file__).with_suffix(".sh")
MIRROR_VARIABLE = "STEPKEEPER_LAB_MIRROR"
MIRROR = "http://deb.debian.org/debian"
BUILD_S = 1500.0
APT_S = 300.0
LOG_LINES = 12
NOT_BUILT = "the newest Slurm is not here: `make test-slurm-newest` builds it"


class UnavailableError(LabError):
    """It cannot be built on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Newest:
    """Where the newest Slurm lies: programs that run here as they are, with a loader and libraries of their own."""

    directory: Path

    @property
    def bin(self) -> Path:
        """Daemons and commands: to be put first on PATH."""
        return self.directory / "bin"

    @property
    def plugins(self) -> Path:
        """PluginDir of slurm.conf: the directory built in is that of this machine's own Slurm."""
        return self.directory / "plugins"

    @property
    def python(self) -> Path:
        """An interpreter with pyslurm, and nothing of ours."""
        return self.directory / "python" / "bin" / "python3"

    @property
    def slurmd_options(self) -> tuple[str, ...]:
        """What slurmd must be told: the slurmstepd built in is that of this machine's own Slurm."""
        return ("-d", str(self.bin / "slurmstepd"))


def found() -> Newest | None:
    """Return what an earlier build left; None: nothing yet, or of another recipe."""
    newest = Newest(HOME / _fingerprint())
    return newest if (newest.directory / "version").exists() else None


def newest() -> Newest:
    """Return the newest Slurm, built first where that has not been done.

    Raises:
        UnavailableError: it cannot be built here.
    """
    if os.geteuid() != 0:
        raise UnavailableError("not root: run under sudo")
    with locked(HOME):
        if (before := found()) is not None:
            return before
        _install_debootstrap()
        built = Newest(HOME / _fingerprint())
        root = HOME / "root"
        for leftover in (root, built.directory):
            shutil.rmtree(leftover, ignore_errors=True)
        log = HOME / "build.log"
        try:
            _build(root, built, log)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        for old in HOME.iterdir():
            if old.is_dir() and old != built.directory:
                shutil.rmtree(old, ignore_errors=True)
        return built


def _build(root: Path, built: Newest, log: Path) -> None:
    """Run the recipe.  Its mounts and processes are in namespaces that end with it, however it ends."""
    within = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", f'{LET_GO}; exec sh "$@"', "sh"]
    argv = [*within, str(RECIPE), str(root)]
    mirror = os.environ.get(MIRROR_VARIABLE, MIRROR)
    with log.open("w") as output:
        try:
            done = subprocess.run(
                [*argv, str(built.directory), mirror],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=BUILD_S,
                check=False,
                cwd="/",
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"the build took more than {BUILD_S:g} s; {_end_of(log)}") from None
        except OSError as error:
            raise UnavailableError(f"unshare: {error.strerror}") from error
    if done.returncode or found() is None:
        raise UnavailableError(f"the build failed with exit code {done.returncode}; {_end_of(log)}")


def _install_debootstrap() -> None:
    if shutil.which("debootstrap") is not None:
        return
    if shutil.which("apt-get") is None:
        raise UnavailableError("no debootstrap, and no apt-get to install it")
    for argv in (
        ("apt-get", "update", "-q"),
        ("apt-get", "install", "-y", "-q", "--no-install-recommends", "debootstrap", "debian-archive-keyring"),
    ):
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                timeout=APT_S,
                check=False,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"{' '.join(argv)}: not done in {APT_S:g} s; is there a network?") from None
        if done.returncode:
            raise UnavailableError(f"{' '.join(argv)}: {done.stderr.strip()[-500:]}")


def _fingerprint() -> str:
    return hashlib.sha256(RECIPE.read_bytes() + platform.machine().encode()).hexdigest()[:12]


def _end_of(log: Path) -> str:
    return f"{log} ends:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])

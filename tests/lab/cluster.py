"""The lab: its life from `up` to `down`, and Slurm commands with a time limit.

What can be done to jobs and nodes is in `jobs.py` and `nodes.py`.  The daemons are children of the lab's guardian,
never of the test.
"""

from __future__ import annotations

import json
import os
import pwd
import random
import socket
import string
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tests.lab import conf, guardian, processes, teardown
from tests.lab.faults import LabError, LabTimeoutError
from tests.lab.jobs import Jobs
from tests.lab.looking import holds_within
from tests.lab.mounts import LET_GO
from tests.lab.newest import newest
from tests.lab.nodes import Nodes
from tests.lab.options import USERS, LabOptions
from tests.ports import reserve

if TYPE_CHECKING:
    from typing import Self

REPOSITORY = Path(__file__).resolve().parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_S = 60.0
UP_S = 90.0
DOWN_S = 60.0
SOCKET_PATH_MAX = 100
_dice = random.SystemRandom()  # trainings seed Python's own in this process: labs of several would share names

recorded: list[tuple[int, int]] = []
"""Every daemon and guardian that this process started: (pid, start time); the leak check at the end reads it."""


class Lab(Jobs, Nodes):
    """A cluster; a context manager.  `up` and `down` may also be called by hand."""

    def __init__(self, options: LabOptions | None = None, *, directory: Path | None = None, owned: bool = True) -> None:
        """Describe a lab; nothing starts yet.

        Args:
            options: What it should be like.
            directory: Where it should live; a new directory in /tmp by default.  Short: Unix sockets lie in it.
            owned: Take it down when this process is gone, however it ends.  False: it stays until `down`.
        """
        self.options = options or LabOptions()
        self._owned = owned
        self._wanted = directory
        self._guardian: subprocess.Popen[bytes] | None = None
        self.up_s = 0.0
        """How long `up` took."""

    def __enter__(self) -> Self:
        return self.up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # -- life ---------------------------------------------------------------------------------------------------

    def up(self) -> Self:
        """Start everything and wait until all nodes are idle."""
        started = time.monotonic()
        teardown.sweep()
        for tries_left in (2, 1, 0):
            self._place()
            try:
                self._start()
                break
            except BaseException as error:
                error.add_note(self.log_tail())
                taken = self._ports_taken()
                self.down()
                if not (taken and tries_left):  # else somebody took a port between our look and slurmctld's
                    raise
        self.up_s = time.monotonic() - started
        return self

    def _start(self) -> None:
        """Start all daemons and wait until the nodes are idle."""
        self._write_files()
        self._start_guardian()
        self._spawn("munged", self._munged())
        self.until(self.place.munge_socket.exists, "munged's socket", UP_S)
        self._spawn("slurmctld", self._slurmctld())
        if self.options.backup_controller:
            self._spawn("slurmctld-backup", self._backup())
        for node in self.node_names:
            self._start_slurmd(node)
        self.until(lambda: self._ports_taken() or self._all_up(), "idle nodes", UP_S)
        if not self._all_up():
            raise LabError("a port of this lab was taken by somebody else")

    def _ports_taken(self) -> bool:
        return "Address already in use" in self.log_tail()

    def down(self) -> None:
        """Take all down and wait for it; harmless when done twice."""
        if not self.directory.exists():
            return
        try:
            answer = guardian.request(self.directory, DOWN_S, do="down")
        except OSError:
            answer = {"left": sorted(teardown.take_down(self.directory))}  # no guardian any more
        if self._guardian is not None:
            self._guardian.wait(DOWN_S)
        if answer.get("left"):
            raise LabError(f"processes {answer['left']} of {self.directory} survived SIGKILL; see their stack in /proc")

    def _all_up(self) -> bool:
        """Tell whether every node is up; none is listed before slurmctld answers, which must not count."""
        found = self.nodes()
        return len(found) == self.options.nodes and all(node.is_up for node in found.values())

    @classmethod
    def attach(cls, directory: Path) -> Self:
        """Return a lab that another process brought up."""
        noted = teardown.read(directory)
        if not noted:
            raise LabError(f"{directory}: no lab here; start one by `python -m tests.lab up --dir {directory}`")
        options = noted["options"]
        options["slurm_conf"] = tuple(options["slurm_conf"])
        options["switches"] = tuple(options["switches"])
        lab = cls(LabOptions(**options), directory=directory)
        mountpoint = noted["cgroup_mountpoint"]
        lab._set_place(directory, noted["lab_id"], noted["port"], Path(mountpoint) if mountpoint else None)
        return lab

    def _place(self) -> None:
        directory = self._wanted or Path(tempfile.mkdtemp(prefix=teardown.PREFIX, dir=teardown.PARENTS[0]))
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory = directory.resolve()
        if len(str(directory / "guardian.sock")) > SOCKET_PATH_MAX:
            raise LabError(f"{directory}: too long for the Unix sockets in it; choose a shorter --dir")
        if (directory / "lab.json").exists():
            raise LabError(f"{directory}: there is a lab already; take it down or choose another --dir")
        directory.chmod(0o755)  # ordinary users pass through it
        mountpoint = processes.cgroup_mountpoint()
        if mountpoint is None and not self.options.linuxproc:
            warnings.warn(
                "NO CGROUP V1 FREEZER HERE: the lab uses proctrack/linuxproc, where orphans escape and signals "
                "reach other processes than in production; do not draw conclusions about signals from this machine",
                stacklevel=3,
            )
        self._set_place(directory, _new_lab_id(mountpoint), reserve(self.options.nodes + 1), mountpoint)

    def _set_place(self, directory: Path, lab_id: str, port: int, mountpoint: Path | None) -> None:
        self.directory = directory
        self.place = conf.Place(
            directory=directory,
            lab_id=lab_id,
            hostname=socket.gethostname().partition(".")[0],
            port=port,
            cgroup_mountpoint=mountpoint,
            newest=newest() if self.options.slurm == "newest" else None,
        )
        self.node_names = self.place.node_names(self.options)

    def _write_files(self) -> None:
        for name in ("etc", "munge", "state", "spool", "run", "log", "dev", "users"):
            (self.directory / name).mkdir()
        for name, text in conf.files(self.place, self.options).items():
            (self.directory / "etc" / name).write_text(text)
        self.place.munge_key.write_bytes(os.urandom(128))
        self.place.munge_key.chmod(0o600)
        for index in range(self.options.gpus):
            _fake_gpu(self.directory / "dev" / f"nvidia{index}")
        for user in USERS:
            account = pwd.getpwnam(user)
            work = self.directory / "users" / user
            work.mkdir(mode=0o700)
            os.chown(work, account.pw_uid, account.pw_gid)

    def _start_guardian(self) -> None:
        owner = os.pidfd_open(os.getpid()) if self._owned else None
        with (self.directory / "log" / "guardian.log").open("ab") as log:
            self._guardian = subprocess.Popen(
                [sys.executable, "-m", "tests.lab.guardian", str(self.directory)]
                + ([f"--owner-pidfd={owner}"] if owner is not None else []),
                cwd=REPOSITORY,
                pass_fds=[owner] if owner is not None else [],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is not for the guardian
            )
        if owner is not None:
            os.close(owner)
        note = {
            "lab_id": self.place.lab_id,
            "port": self.place.port,
            "nodes": self.node_names,
            "cgroup_mountpoint": str(self.place.cgroup_mountpoint) if self.place.cgroup_mountpoint else None,
            "guardian": self._record(self._guardian.pid),
            "options": {name: getattr(self.options, name) for name in LabOptions.__slots__},
        }
        (self.directory / "lab.json").write_text(json.dumps(note))
        self.until((self.directory / "guardian.sock").exists, "the guardian's socket", UP_S)

    def _slurmctld(self) -> list[str]:
        """Return its command line.

        It looks up the host of each srun, which is the node's own name, and a newer one waits 10 s with its locks held
        for a name that it does not find: it sees a hosts file of its own.
        """
        argv = ["slurmctld", "-D", "-f", str(self.place.conf)]
        if not (self.place.newest or self.options.backup_controller):
            return argv
        return self._with_hosts('exec "$@"', *argv)

    def _backup(self) -> list[str]:
        """Return the backup controller's command line: it knows itself by its host name."""
        conf = self.place.conf.with_name("backup.conf")
        start = 'hostname "$1" && exec slurmctld -D -f "$2"'
        return self._with_hosts(start, self.place.backup_name, str(conf))

    def _with_hosts(self, start: str, *words: str) -> list[str]:
        """Return a line with a hosts file and a host name of its own, in namespaces that end with it."""
        hosts = self.directory / "etc" / "hosts"
        ours = [f"127.0.0.1 {self.place.hostname}", f"127.0.0.2 {self.place.backup_name}"]
        names = [f"127.0.0.1 {node}" for node in self.node_names]
        hosts.write_text("\n".join([*ours, *names, Path("/etc/hosts").read_text()]))
        line = f'{LET_GO}; mount --bind "$0" /etc/hosts && {start}'
        return ["unshare", "--mount", "--uts", "sh", "-c", line, str(hosts), *words]

    def _munged(self) -> list[str]:
        munge = self.directory / "munge"
        return [
            "munged",
            "--foreground",
            "--force",  # it frowns on root and on /tmp; both are fine in a lab
            f"--socket={self.place.munge_socket}",
            f"--key-file={self.place.munge_key}",
            f"--pid-file={munge}/pid",
            f"--seed-file={munge}/seed",
            f"--log-file={self.directory}/log/munged.log",
            "--num-threads=4",
        ]

    # -- what Jobs and Nodes stand on ---------------------------------------------------------------------------

    def _spawn(self, name: str, argv: list[str], **extra: str) -> int:
        env = {"PATH": self.path, "LANG": "C.UTF-8", processes.LAB_VARIABLE: str(self.directory), **extra}
        log = str(self.directory / "log" / f"{name}.out")
        answer = guardian.request(self.directory, do="spawn", argv=argv, env=env, log=log)
        if "pid" not in answer:
            raise LabError(f"{name} does not start: {answer.get('error')}; see {log}")
        pid: int = answer["pid"]
        self._record(pid)
        (self.directory / "run" / f"{name}.lab-pid").write_text(str(pid))
        return pid

    def _daemon_pid(self, name: str) -> int | None:
        path = self.directory / "run" / f"{name}.lab-pid"
        pid = int(path.read_text()) if path.exists() else None
        return pid if pid is not None and processes.alive(pid) else None

    def _record(self, pid: int) -> tuple[int, int]:
        found = processes.stat(pid)
        entry = (pid, found[3] if found else 0)
        recorded.append(entry)
        return entry

    def run(
        self,
        *argv: str | Path,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str | None = None,
        check: bool = True,
        timeout_s: float = COMMAND_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (Slurm's or any other) inside the lab, as root or as an ordinary user.

        Nothing of the test's own environment goes along but for `env`: a lab job sees what a login shell would.
        """
        try:
            done = subprocess.run(
                [str(part) for part in argv],
                env=self.environment(user, env),
                cwd=cwd or (self.workdir(user) if user else self.directory),
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
                **self.identity(user),
            )
        except subprocess.TimeoutExpired as error:
            raise LabTimeoutError(f"{argv[0]}: no answer within {timeout_s} s; {self.log_tail()}") from error
        if check and done.returncode:
            command = " ".join(str(part) for part in argv)
            raise LabError(f"{command}: exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
        return done

    @property
    def path(self) -> str:
        """PATH of everything in the lab: its own Slurm comes first."""
        return f"{self.place.newest.bin}:{PATH}" if self.place.newest else PATH

    def environment(self, user: str | None = None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a user's login on this cluster."""
        home = str(self.workdir(user)) if user else "/root"
        base = {
            "PATH": self.path,
            "LANG": "C.UTF-8",
            "HOME": home,
            "USER": user or "root",
            "LOGNAME": user or "root",
        }
        return base | {"SHELL": "/bin/bash", "SLURM_CONF": str(self.place.conf)} | dict(extra or {})

    def identity(self, user: str | None) -> dict[str, Any]:
        """Return what makes `subprocess` run as that user: the account's shell is nologin, so `su` would refuse."""
        if user is None:
            return {}
        account = pwd.getpwnam(user)
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def workdir(self, user: str) -> Path:
        """Return the directory of an ordinary user on this cluster's shared storage: the user's alone."""
        return self.directory / "users" / user

    def until(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Wait until something holds, or raise with the end of slurmctld's log."""
        if not holds_within(condition, timeout_s):
            raise LabTimeoutError(f"waited {timeout_s} s for {what}; {self.log_tail()}")

    def queue(self) -> str:
        """Return what slurmctld has in its queue and on its nodes, for error messages."""
        try:
            jobs = self.run("squeue", "--format=%i %P %j %T %r %N", check=False).stdout
            return jobs + self.run("sinfo", "--Node", "--format=%N %P %T %C", check=False).stdout
        except LabTimeoutError as error:
            return str(error)

    def log_tail(self, lines: int = 15) -> str:
        """Return the end of slurmctld's log, for error messages."""
        path = self.directory / "log" / "slurmctld.log"
        text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else ["(none)"]
        return "slurmctld's log ends:\n" + "\n".join(text)


def _new_lab_id(mountpoint: Path | None) -> str:
    """Return a prefix for node names that nobody uses: nodes of equal names would share cgroups."""
    while True:
        lab_id = "k" + "".join(_dice.choices(string.ascii_lowercase, k=2)) + _dice.choice(string.digits)
        lab_id += _dice.choice(string.ascii_lowercase)
        if not (mountpoint and list(mountpoint.glob(f"*/slurm_{lab_id}n*"))):
            return lab_id


def _fake_gpu(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        path.touch()  # no right to make devices in this container; Slurm hands out plain files as well
    path.chmod(0o666)

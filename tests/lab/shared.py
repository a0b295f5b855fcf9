"""Shared storage as a real cluster has it: a server, and for each node a client of its own with caches of its own.

GlusterFS has both in user space, on FUSE, so that a machine whose kernel knows no NFS can have them.  All mounts and
processes end with the caller, who must be below `unshare --mount`: then no mount can outlive it either.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab.cluster import Lab
from tests.lab.faults import LabError
from tests.lab.mounts import LET_GO
from tests.lab.options import LabOptions
from tests.lab.processes import NODE_VARIABLE
from tests.lab.site import supervisor_python

PROGRAM = "glusterfs"  # of the package glusterfs-client; the server is the same program
LOGIN = "login"
WITHIN_S = 60.0
_BRICK = """
volume posix
  type storage/posix
  option directory {directory}
end-volume
volume delay
  type debug/delay-gen
  option delay-percentage {percent}
  option delay-duration {delay_us}
  subvolumes posix
end-volume
volume locks
  type features/locks
  subvolumes delay
end-volume
volume threads
  type performance/io-threads
  option thread-count 64
  subvolumes locks
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.address-family inet
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option auth.addr.threads.allow 127.0.0.1
  subvolumes threads
end-volume
"""
_CLIENT = """
volume client
  type protocol/client
  option transport-type tcp
  option transport.address-family inet
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume threads
end-volume
volume attributes
  type performance/md-cache
  option md-cache-timeout {cached_s}
  subvolumes client
end-volume
"""


def missing() -> str:
    """Return why there can be no such storage here; empty where there can."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which(PROGRAM) is None:
        return f"no {PROGRAM}: apt-get install glusterfs-client"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    return ""


class Storage:
    """A server with one directory, and its clients; a context manager."""

    def __init__(self, base: Path, *, delay_us: int = 0, cached_s: int = 3) -> None:
        """Describe it.

        Args:
            base: A directory of the caller's, not below the temporary one: labs leave what is mounted there.
            delay_us: How much later the server answers each request than it could.
            cached_s: How long a client believes what it knows of names and attributes, as NFS does by default.
        """
        self.place = base / "shared"
        """Where every node has it mounted; in the caller's namespace it is the login node's."""
        self._base, self._delay_us, self._cached_s = base, delay_us, cached_s
        self._mounted: list[Path] = []
        self._running: list[subprocess.Popen[bytes]] = []
        self._port = 0

    def __enter__(self) -> Self:
        """Start the server, and mount it for the login node."""
        for name in ("brick", "shared", "clients"):
            (self._base / name).mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        text = _BRICK.format(
            directory=self._base / "brick", port=self._port, delay_us=self._delay_us, percent=100 * bool(self._delay_us)
        )
        self._start("brick", text)
        self._until(self._listens, "the server")
        self.mount(LOGIN, self.place)
        self.place.chmod(0o755)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unmount all, and end all processes."""
        for place in reversed(self._mounted):
            subprocess.run(["umount", "--lazy", place], check=False, timeout=WITHIN_S)
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            try:
                process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(WITHIN_S)

    @contextmanager
    def filled(self) -> Iterator[Path]:
        """Give the place out before the server is there: what is written to it then takes no server's time."""
        for place in (self._base / "brick", self.place):
            place.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", self._base / "brick", self.place], check=True, timeout=WITHIN_S)
        try:
            yield self.place
        finally:
            subprocess.run(["umount", self.place], check=True, timeout=WITHIN_S)

    def mount(self, name: str, place: Path | None = None) -> Path:
        """Mount it for one node, with nothing in any cache; return where."""
        place = place or self._base / "clients" / name
        place.mkdir(exist_ok=True)
        text = _CLIENT.format(port=self._port, cached_s=self._cached_s)
        times = [f"--attribute-timeout={self._cached_s}", f"--entry-timeout={self._cached_s}"]
        self._start(name, text, *times, str(place))
        self._until(lambda: os.path.ismount(place), f"the mount at {place}")
        self._mounted.append(place)
        return place

    def _start(self, name: str, volume: str, *words: str) -> None:
        file, log = self._base / f"{name}.vol", self._base / f"{name}.log"
        file.write_text(volume)
        line = ["setpriv", "--pdeathsig", "KILL", PROGRAM, "--no-daemon", f"--volfile={file}", f"--log-file={log}"]
        self._running.append(subprocess.Popen([*line, *words], stdin=subprocess.DEVNULL, start_new_session=True))

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def _until(self, condition: object, what: str) -> None:
        give_up_at = time.monotonic() + WITHIN_S
        while not condition():  # type: ignore[operator]
            if self._running[-1].poll() is not None or time.monotonic() > give_up_at:
                logs = "".join(path.read_text(errors="replace")[-1500:] for path in self._base.glob("*.log"))
                raise LabError(f"{what} did not come within {WITHIN_S:g} s: {logs}")
            time.sleep(0.02)


class SharedLab(Lab):
    """A lab whose nodes each have such a mount of their own, at one path."""

    def __init__(self, options: LabOptions, storage: Storage) -> None:
        """Describe it."""
        super().__init__(options)
        self.storage = storage

    def _start_slurmd(self, node: str) -> None:
        client = self.storage.mount(node)
        start = f'{LET_GO}; mount --bind "$1" "$2" && hostname "$0" && shift 2 && exec slurmd -D -N "$0" -f "$@"'
        words = [node, str(client), str(self.storage.place), str(self.place.conf)]
        self._spawn(
            f"slurmd-{node}", ["unshare", "--mount", "--uts", "sh", "-c", start, *words], **{NODE_VARIABLE: node}
        )


def install(place: Path) -> Path:
    """Put Python and Stepkeeper, without torch, on shared storage; return the command `stepkeeper` there.

    All of it is there, as conda has it: the interpreter, its own modules, and packages in an environment.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    light = supervisor_python()
    base = Path(subprocess.run(
        [light, "-c", "import os, sys; print(os.path.realpath(sys._base_executable))"],
        capture_output=True, text=True, check=True, timeout=WITHIN_S,
    ).stdout.strip())  # fmt: skip
    modules = Path(sysconfig.get_paths()["stdlib"])
    if base.name != version or modules.name != version:
        raise LabError(f"{base} is not the Python of these tests, {version}")
    python = place / "python"
    (python / "bin").mkdir(parents=True)
    shutil.copy(base, python / "bin" / version)
    left_out = shutil.ignore_patterns("test", "idlelib", "tkinter", "ensurepip", "config-*", "site-packages")
    shutil.copytree(modules, python / "lib" / version, ignore=left_out, symlinks=False)
    env = place / "env"
    _call(python / "bin" / version, "-m", "venv", "--without-pip", env)
    packages = env / "lib" / version / "site-packages"
    [project] = light.parents[1].glob("lib/python3*/site-packages")
    for source in (Path((project / "dependencies.pth").read_text().strip()), project):
        unused = shutil.ignore_patterns(
            "pip", "pip-*", "setuptools*", "pkg_resources", "_distutils_hack", "*.pth", "torch*"
        )
        shutil.copytree(source, packages, ignore=unused, dirs_exist_ok=True)
    command = env / "bin" / "stepkeeper"
    text = (light.parent / "stepkeeper").read_text().splitlines()
    command.write_text("\n".join([f"#!{env}/bin/python3", *text[1:], ""]))
    command.chmod(0o755)
    _call(env / "bin" / "python3", "-m", "compileall", "-q", packages)
    return command


def _call(*words: Sequence[str] | Path | str) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, check=False, cwd="/")
    if done.returncode:
        raise LabError(f"{words[0]}: exit code {done.returncode}: {done.stderr[-500:]}")


def in_namespace(module: str, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module in a mount namespace of its own, and end all of it when it takes too long."""
    process = subprocess.Popen(
        ["unshare", "--mount", sys.executable, "-m", module, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=WITHIN_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)

"""The kernel's word for the job of a peer: real processes in real control groups, and numbers given to others."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.node_agent.connections import Credentials, Membership, credentials, job_of, parse_cgroup
from tests.lab import processes
from tests.node_agent.socket.people import GAMES, NEWS, Person, needs_root, raw, until

pytestmark = needs_root
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
TRIES = 50


@pytest.fixture
def group() -> Iterator[Path]:
    """The control group of a step, as slurmstepd makes it on a node that nobody has."""
    mountpoint = processes.cgroup_mountpoint()
    if mountpoint is None:
        pytest.skip("no cgroup v1 freezer here: make one with `mount -t cgroup -o freezer`")
    node = mountpoint / "freezer" / f"slurm_sockettest{secrets.token_hex(6)}"
    step = node / f"uid_{GAMES}" / "job_7" / "step_0"
    step.mkdir(parents=True)
    yield step
    for directory in (step, *list(step.parents)[:3]):
        until(lambda directory=directory: _removed(directory), f"the removal of {directory}")


def _removed(directory: Path) -> bool:
    with contextlib.suppress(OSError):  # its last process is about to be gone
        directory.rmdir()
    return not directory.exists()


@pytest.fixture
def listener(public: Path) -> Iterator[socket.socket]:
    """A socket that everybody can connect to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(public / "s"))
        os.chmod(public / "s", 0o666)  # noqa: S103 - as the agent's is
        sock.listen(8)
        sock.settimeout(60)
        yield sock


def _member(step: Path) -> Membership:
    return Membership(job_id=7, uid=GAMES, node=step.parts[-4].removeprefix("slurm_"))


def _enter(step: Path) -> None:
    (step / "cgroup.procs").write_text(str(os.getpid()))


def _sit(path: str) -> None:
    with raw(path):
        time.sleep(200)


def _accepted(listener: socket.socket) -> tuple[socket.socket, Credentials]:
    sock, _ = listener.accept()
    return sock, credentials(sock)


def _person_in(step: Path, uid: int, work: Callable[..., Any], *arguments: Any) -> Person:
    """Start a process of a user's inside the group: only root can put it there."""
    reader, writer = os.pipe()
    person = Person(uid, lambda: (os.read(reader, 1), work(*arguments)))
    (step / "cgroup.procs").write_text(str(person.pid))
    os.write(writer, b".")
    os.close(reader)
    os.close(writer)
    return person


def test_a_process_in_a_step_is_its_jobs(group: Path, listener: socket.socket) -> None:
    person = _person_in(group, GAMES, _sit, listener.getsockname())
    sock, peer = _accepted(listener)

    assert (peer.pid, peer.uid) == (person.pid, GAMES)
    assert job_of(sock, peer) == _member(group)

    person.end()
    assert job_of(sock, peer) is None, "it has ended: nobody is left to ask about"
    sock.close()


def test_a_process_outside_of_every_step_is_no_jobs(listener: socket.socket) -> None:
    person = Person(GAMES, _sit, listener.getsockname())
    sock, peer = _accepted(listener)

    assert job_of(sock, peer) is None
    person.end()
    sock.close()


def test_another_users_process_in_a_step_does_not_speak_for_the_job(group: Path, listener: socket.socket) -> None:
    """As a set-user-ID program would be."""
    person = _person_in(group, NEWS, _sit, listener.getsockname())
    sock, peer = _accepted(listener)

    assert job_of(sock, peer) is None
    person.end()
    sock.close()


def test_a_user_cannot_put_himself_into_a_step(group: Path) -> None:
    with pytest.raises(AssertionError, match="PermissionError"):
        Person(GAMES, _enter, group).result()


def test_a_process_that_was_given_the_number_of_a_peer_is_not_taken_for_it(
    group: Path, listener: socket.socket
) -> None:
    if not os.access(LAST_PID, os.W_OK):
        pytest.skip("no way to choose the next process number here")
    for _ in range(TRIES):
        first = Person(GAMES, lambda: raw(listener.getsockname()).detach() and None)
        sock, peer = _accepted(listener)
        first.result()
        LAST_PID.write_text(str(peer.pid - 1))
        heir = Person(GAMES, time.sleep, 200)
        if heir.pid == peer.pid:
            break
        heir.end()
        sock.close()
    else:
        pytest.skip(f"others took the number {TRIES} times")
    (group / "cgroup.procs").write_text(str(heir.pid))
    assert parse_cgroup(Path(f"/proc/{peer.pid}/cgroup").read_text()) == _member(group)

    assert job_of(sock, peer) is None

    heir.end()
    sock.close()

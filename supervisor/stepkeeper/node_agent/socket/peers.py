"""Who a peer is, by the kernel's word: uid, process, and the job that Slurm put the process in.

A user chooses neither the credentials of a socket nor the control group that slurmstepd put its processes in.  Parsing
is pure; only `credentials` and `job_of` look at the machine.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import struct

import msgspec

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module
_PROC_BYTES_MAX = 16 * 1024
# in these hierarchies only root makes groups; `name=systemd` and parts of the unified one are handed to users
_V1_CONTROLLERS = frozenset(("freezer", "memory", "devices", "cpuset"))
_V1 = re.compile(r"/slurm(?:_(?P<node>[^/]+))?/uid_(?P<uid>\d+)/job_(?P<job>\d+)/step_[^/]+(?:/.*)?")
_V2 = re.compile(r"/system\.slice/(?:(?P<node>[^/]+)_)?slurmstepd\.scope/job_(?P<job>\d+)/step_[^/]+(?:/.*)?")


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Of the process that connected, at that moment."""

    pid: int  # 0: not to be seen from here
    uid: int


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The job whose step a process is in."""

    job_id: int
    uid: int | None  # of the job; None where the path does not say
    node: str  # empty: the only one of this machine


def credentials(sock: socket.socket) -> Credentials:
    """Return who connected."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Credentials(pid=pid, uid=uid)


def job_of(sock: socket.socket, peer: Credentials) -> Membership | None:
    """Return the job that the peer's process is in; None where the kernel does not say for sure.

    The number of a process may be given to another one as soon as it ended: what was read counts only if the process
    lives after the reading.
    """
    if peer.pid <= 0:
        return None
    pidfd = _pidfd(sock, peer.pid)
    if pidfd is None:
        return None
    try:
        groups = _read(f"/proc/{peer.pid}/cgroup")
        status = _read(f"/proc/{peer.pid}/status")
        if groups is None or status is None or _ended(pidfd):
            return None
    finally:
        os.close(pidfd)
    if parse_uids(status) != {peer.uid}:
        return None  # a set-user-ID program inside another user's job is not that job's word
    found = parse_cgroup(groups)
    if found is None or found.uid not in (None, peer.uid):
        return None
    return found


def parse_cgroup(text: str) -> Membership | None:
    r"""Read /proc/PID/cgroup; None outside of every job, or where two lines name two jobs.

    >>> parse_cgroup("5:freezer:/slurm_n1/uid_1000/job_7/step_0/task_0\n").job_id
    7
    >>> parse_cgroup("0::/system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_0\n").node
    'n1'
    >>> parse_cgroup("0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_7/step_0\n")
    """
    found: set[tuple[int, str]] = set()
    owners: set[int] = set()
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        pattern = _V2 if not names else _V1 if _V1_CONTROLLERS & set(names.split(",")) else None
        match = pattern.fullmatch(path) if pattern else None
        if match is None:
            continue
        parts = match.groupdict()
        found.add((int(parts["job"]), parts["node"] or ""))
        if "uid" in parts:
            owners.add(int(parts["uid"]))
    if len(found) != 1 or len(owners) > 1:
        return None
    ((job_id, node),) = found
    return Membership(job_id=job_id, uid=next(iter(owners), None), node=node)


def parse_uids(status: str) -> set[int]:
    r"""Return the real, effective and saved uid of /proc/PID/status.

    >>> sorted(parse_uids("Name:\tx\nUid:\t5\t0\t0\t0\n"))
    [0, 5]
    """
    match = re.search(r"^Uid:\t(\d+)\t(\d+)\t(\d+)", status, re.MULTILINE)
    return {int(each) for each in match.groups()} if match else set()


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    """Return a descriptor of the process that connected, if it still exists."""
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return None  # it ended
        # An older kernel.  If the number was given away in between, the uid is still checked: at worst the process
        # belongs to another job of the same user.
        try:
            return os.pidfd_open(pid)
        except OSError:
            return None  # it ended
    return int.from_bytes(packed, "little", signed=True) if len(packed) == 4 else None  # noqa: PLR2004 - an int


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _read(path: str) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # the process ended, or is hidden from us
    try:
        data = os.read(descriptor, _PROC_BYTES_MAX)
    except OSError:
        return None  # it ended in between
    finally:
        os.close(descriptor)
    return data.decode(errors="replace") if len(data) < _PROC_BYTES_MAX else None

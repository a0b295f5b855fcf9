"""Connections between ranks are looked after by the kernel once they are wanted, and no others are."""

from __future__ import annotations

import gc
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from stepkeeper_trainer.coordinate import connections


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    connections.probe()  # forgets what was closed


def pair(opened: ExitStack) -> tuple[socket.socket, socket.socket]:
    listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    one = opened.enter_context(socket.create_connection(listening.getsockname()))
    return one, opened.enter_context(listening.accept()[0])


def is_probed(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_only_what_was_made_for_the_ranks_is_probed(opened: ExitStack) -> None:
    gc.collect()  # what would be closed between the two looks
    others = connections.probe()  # of tests before this one
    before, _ = pair(opened)
    with connections.noted():
        ours, theirs = pair(opened)
        local, _ = (opened.enter_context(end) for end in socket.socketpair())
    after, _ = pair(opened)
    assert not is_probed(ours), "not before it is asked for"

    assert connections.probe() == others + 3, "both ends and who listens"

    assert [is_probed(each) for each in (ours, theirs, before, after, local)] == [True, True, False, False, False]
    asked = [ours.getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
    assert asked == [connections.IDLE_S, connections.ASK_EVERY_S]
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == connections.LOST_AFTER_S * 1000
    assert ours.getblocking()


def test_a_number_that_is_another_connections_by_now_is_left_alone(opened: ExitStack) -> None:
    with connections.noted():
        first, other = pair(opened)
    number = first.fileno()
    first.close()
    later = [opened.enter_context(socket.socket())]
    while number not in [each.fileno() for each in later]:  # other tests may have let go of lower ones
        later.append(opened.enter_context(socket.socket()))

    connections.probe()

    assert not any(is_probed(each) for each in later)
    assert is_probed(other)


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "then"), [(1024, 8192, 100, 1024), (64, 8192, 2000, 2000), (64, 900, 2000, 900)]
)
def test_there_is_room_for_the_sockets_of_a_group_as_far_as_the_limit_may_be_raised(
    soft: int, hard: int, ranks: int, then: int
) -> None:
    """A group has a socket for each rank; Slurm hands on a login shell's soft limit, which is often 1,024."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.closerange(soft // 2, hard)  # those of the test's own process
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            connections.make_room(ranks)
            found, still = resource.getrlimit(resource.RLIMIT_NOFILE)
            code = 0 if (then <= found <= then + 200 and still == hard) else 2
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_there_is_room_where_no_descriptor_is_free_to_look() -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            soft = 64
            os.closerange(soft // 2, 4096)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            with suppress(OSError):
                while True:
                    os.dup(0)
            connections.make_room(100)
            code = 0 if resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft + 100 else 2
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

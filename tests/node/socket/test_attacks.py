"""Hostile users: whatever they do, an honest job is served meanwhile, and the agent neither grows nor stops."""

import array
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node.client import AgentClient, AgentError
from stepkeeper.node.protocol import MESSAGE_BYTES_MAX
from tests.node.socket.people import (
    GAMES,
    NEWS,
    NOBODY,
    AgentProcess,
    Person,
    by,
    incident,
    needs_root,
    raw,
    until,
)

pytestmark = needs_root

JOB = 7
ATTACK_S = 2.0
GROWTH_KIB_MAX = 4096
HONEST_WITHIN_S = 3.0


def honest(path: str) -> float:
    """Join and look as a watcher does; return how long it took, with the tries that it needed."""
    started = time.monotonic()
    while True:
        try:
            with AgentClient(path) as client:
                client.join(JOB, 0, within_s=5.0)
                return time.monotonic() - started
        except AgentError:
            if time.monotonic() - started > 15.0:
                raise
            time.sleep(0.1)


def withstands(agent: AgentProcess, attack: Callable[[str, float], Any], attackers: int = 3) -> list[Any]:
    """Have users attack while an honest one works; return what the attackers found."""
    agent.job(JOB, GAMES)
    by(GAMES, honest, agent.path)
    rss, descriptors = agent.rss_kib(), agent.descriptors()
    until_at = time.monotonic() + ATTACK_S
    people = [Person(uid, attack, agent.path, until_at) for uid in (NEWS, NOBODY, 1234)[:attackers]]
    try:
        time.sleep(0.2)
        took_s = []
        while time.monotonic() < until_at:
            took_s.append(by(GAMES, honest, agent.path))
            time.sleep(0.1)
        found = [each.result() for each in people]
    finally:
        for each in people:
            each.end()

    assert max(took_s) < HONEST_WITHIN_S, took_s
    agent.tell(publish=incident("XID 79"))  # it lives, and its thread still does what it is told
    until(lambda: agent.descriptors() <= descriptors + 1, "the connections' end", agent.descriptors)
    assert agent.rss_kib() - rss < GROWTH_KIB_MAX
    log = agent.said("event", "socket_refused")
    assert len(log) < 60, f"{len(log)} lines"
    assert not agent.said("call", "hasten")
    return found


def refuses(path: str, until_at: float, action: Callable[[socket.socket, random.Random], None]) -> int:
    """Connect and do something over and over, whatever comes of it; return how often."""
    dice, count = random.Random(os.getpid()), 0  # noqa: S311 - noise, no secret
    while time.monotonic() < until_at:
        count += 1
        with contextlib.suppress(OSError), raw(path) as sock:
            action(sock, dice)
    return count


def test_noise_of_all_sizes(agent: AgentProcess) -> None:
    def noise(sock: socket.socket, dice: random.Random) -> None:
        for _ in range(30):
            sock.send(dice.randbytes(dice.choice((0, 1, 10, 1000, MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX + 1, 100_000))))

    withstands(agent, lambda path, until_at: refuses(path, until_at, noise))


def test_well_formed_floods(agent: AgentProcess) -> None:
    packets = [
        b'{"type":"join","job_id":7,"restart_count":0}',
        b'{"type":"hasten","job_id":7,"restart_count":0,"exclude":["n1"]}',
        b'{"type":"look","job_id":7}',
        b'{"type":"tomorrow"}',
    ]

    def flood(sock: socket.socket, dice: random.Random) -> None:
        for _ in range(1000):
            sock.send(dice.choice(packets))

    withstands(agent, lambda path, until_at: refuses(path, until_at, flood))

    assert not agent.said("look")
    assert len(agent.said("call", "owned_job")) < 60


def test_thousands_of_connections(agent: AgentProcess) -> None:
    def connect(path: str, until_at: float) -> int:
        held: list[socket.socket] = []
        count = 0
        while time.monotonic() < until_at:
            with contextlib.suppress(OSError):
                held.append(raw(path))
                count += 1
            if len(held) > 500:
                held.pop(0).close()
        return count

    assert sum(withstands(agent, connect)) > 1000


def test_connections_that_come_and_go_use_bounded_processor_time(agent: AgentProcess) -> None:
    before = agent.cpu_s()

    withstands(agent, lambda path, until_at: refuses(path, until_at, lambda *_: None))

    assert agent.cpu_s() - before < 0.6 * (ATTACK_S + 1), "accepting is paced"


def test_a_full_house_of_strangers_makes_room_for_a_job(agents: Any) -> None:
    agent = agents(connections_max=20, connections_per_uid_max=10)

    def sit(path: str, until_at: float) -> int:
        held = [raw(path) for _ in range(10)]
        time.sleep(max(0.0, until_at - time.monotonic()))
        return len(held)

    withstands(agent, sit)


def test_descriptors_sent_along_are_not_kept(agent: AgentProcess) -> None:
    def pass_descriptors(sock: socket.socket, _: random.Random) -> None:
        reader, writer = os.pipe()
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reader, writer] * 50))]
            for _ in range(3):
                sock.sendmsg([b'{"type":"join","job_id":7,"restart_count":0}'], rights)
            sock.recv(100)
        finally:
            os.close(reader)
            os.close(writer)

    withstands(agent, lambda path, until_at: refuses(path, until_at, pass_descriptors))

    whys = {line["why"] for line in agent.said("event", "socket_refused")}
    assert "a message with descriptors or credentials" in whys


def test_a_pipe_whose_end_was_sent_to_the_agent_closes(agent: AgentProcess) -> None:
    reader, writer = os.pipe()
    sock = raw(agent.path)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))]
    sock.sendmsg([b'{"type":"tomorrow"}'], rights)
    os.close(writer)

    os.set_blocking(reader, False)
    until(lambda: _at_end(reader), "the pipe's end: nobody holds the other one")
    os.close(reader)
    sock.close()


def _at_end(reader: int) -> bool:
    try:
        return os.read(reader, 1) == b""
    except BlockingIOError:
        return False


def test_a_reader_that_does_not_read_is_cut_off(agent: AgentProcess) -> None:
    agent.job(JOB, GAMES)

    def stop(path: str) -> int:
        client = AgentClient(path)
        client.join(JOB, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    descriptors = agent.descriptors()
    sleeper = Person(GAMES, stop, agent.path)
    until(lambda: agent.said("event", "job_joined"), "the join", agent.words)
    until(lambda: "State:\tT" in open(f"/proc/{sleeper.pid}/status").read(), "the stop")  # noqa: SIM115
    rss = agent.rss_kib()

    for index in range(300):
        agent.tell(publish=incident(incident=f"i{index}", why="x" * 400))
        if agent.descriptors() <= descriptors:
            break
    until(lambda: agent.descriptors() <= descriptors, "the cut", agent.words)

    assert any("has not read" in line["why"] for line in agent.said("event", "socket_refused"))
    assert agent.rss_kib() - rss < GROWTH_KIB_MAX
    assert by(GAMES, honest, agent.path) < HONEST_WITHIN_S
    sleeper.end()


def test_a_reader_that_stays_stopped_is_cut_off_after_a_while(agents: Any) -> None:
    agent = agents(outgoing_stuck_s=0.5, outgoing_max=10_000)
    agent.job(JOB, GAMES)
    client = AgentClient(agent.path)
    client.join(JOB, 0)

    for index in range(150):
        agent.tell(publish=incident(incident=f"i{index}", why="x" * 400))

    until(lambda: any("read nothing" in each["why"] for each in agent.said("event", "socket_refused")), "the cut")
    client.close()


def test_those_who_never_join_are_closed_and_those_who_joined_stay(agents: Any) -> None:
    agent = agents(unjoined_s=0.5)
    agent.job(JOB, 0)
    joined = AgentClient(agent.path)
    joined.join(JOB, 0)

    def idle() -> bool:
        return raw(agent.path).recv(10) == b""

    assert by(NEWS, idle)
    agent.tell(publish=incident())
    until(joined.receive, "the incident")
    joined.close()


def test_an_idle_agent_sleeps(agent: AgentProcess) -> None:
    agent.job(JOB, GAMES)
    joined = AgentClient(agent.path)
    joined.join(JOB, 0)
    time.sleep(0.6)  # until it has seen that nothing is to be watched
    before = _switches(agent.pid)

    time.sleep(1.0)

    assert _switches(agent.pid) - before <= 2
    joined.close()


def _switches(pid: int) -> int:
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/status", encoding="ascii") as file:
            total += int(next(line for line in file if line.startswith("voluntary")).split()[1])
    return total


def test_the_number_of_a_process_that_ended_speaks_for_nobody(agent: AgentProcess) -> None:
    """A peer that passed its socket on and ended: who has its number now is not the peer."""
    agent.job(JOB, GAMES)

    def heir() -> list[str]:
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            sock = raw(agent.path)
            socket.send_fds(theirs, [b"x"], [sock.fileno()])
            os._exit(0)
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
        os.waitpid(child, 0)
        with socket.socket(fileno=descriptor) as inherited:
            answers = []
            for job_id in (8, JOB):
                inherited.send(b'{"type":"join","job_id":%d,"restart_count":0}' % job_id)
                answers.append(json.loads(inherited.recv(4096))["type"])
            return answers

    # Slurm's word is asked instead of the process's, and counts for the user who connected
    assert by(GAMES, heir) == ["refused", "joined"]
    assert len(agent.said("call", "owned_job")) == 2


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
_requests = st.fixed_dictionaries(
    {"type": st.sampled_from(("join", "look", "hasten", "joined", "seen", "x"))},
    optional={
        "job_id": st.integers(-(2**70), 2**70) | st.just(JOB) | _json,
        "restart_count": st.integers(-3, 2**66) | _json,
        "exclude": st.lists(st.text(max_size=12), max_size=70) | _json,
        "pci": st.text(max_size=40) | _json,
        "ordinal": st.integers() | _json,
        "why": st.text(max_size=400) | _json,
    },
)
_packets = (
    st.binary(max_size=MESSAGE_BYTES_MAX + 10)
    | _json.map(lambda value: json.dumps(value).encode())
    | _requests.map(lambda value: json.dumps(value).encode())
    | st.integers(1, 4000).map(lambda depth: b'{"type":"join","job_id":' + b"[" * depth)
    | st.integers(1, 4000).map(lambda digits: b'{"type":"join","restart_count":0,"job_id":' + b"9" * digits + b"}")
)


def test_no_packet_does_anything_that_it_may_not(agents: Any) -> None:
    """From root, whom no rate limits and no refusal for want of a job keep from the code behind them."""
    agent = agents(packets_per_s=1e6, packets_burst=1e6, accepts_per_s=1e6, accepts_burst=1e6)
    agent.job(JOB, GAMES)

    @settings(
        max_examples=300,
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(_packets, min_size=1, max_size=5))
    def send(packets: list[bytes]) -> None:
        with contextlib.suppress(OSError), raw(agent.path) as sock:
            for packet in packets:
                sock.send(packet)

    rss = agent.rss_kib()
    send()

    assert by(GAMES, honest, agent.path) < HONEST_WITHIN_S
    assert agent.rss_kib() - rss < GROWTH_KIB_MAX
    assert not agent.said("call", "requeue")
    assert not agent.said("event", "socket_failed")


@pytest.mark.parametrize("packet", [b"", b"x" * (MESSAGE_BYTES_MAX + 1), b"\xff\xfe", b"[]", b'{"type":"join"}'])
def test_what_cannot_be_read_ends_the_connection(agent: AgentProcess, packet: bytes) -> None:
    def talk() -> bool:
        with raw(agent.path) as sock:
            sock.send(packet)
            return sock.recv(100) == b""

    assert by(NEWS, talk)

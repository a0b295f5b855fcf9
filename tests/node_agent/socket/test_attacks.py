"""Hostile users: whatever they do, an honest job is served meanwhile, and the agent neither grows nor stops."""

import array
import contextlib
import json
import os
import random
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent.protocol import MESSAGE_BYTES_MAX, AgentClient, AgentError
from tests.node_agent.socket.people import (
    GAMES,
    NEWS,
    NOBODY,
    WAIT_S,
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
"""At least: it goes on until the honest one was served some times, however busy the machine is."""
SERVED = 5
GROWTH_KIB_MAX = 4096
HONEST_WITHIN_S = 60.0
LINES_PER_S = 20
ENOUGH = 400
"""Connections of one attacker: of all together over a thousand."""
ATTACKERS = (NEWS, NOBODY, 1234)


class Attack:
    """What tells attackers, in processes of their own, when it is over, and us when each has begun."""

    def __init__(self) -> None:
        self._begun, self._begins = os.pipe()
        self._over, self._ends = os.pipe()
        self._has_begun = False
        self._at = time.monotonic()

    @property
    def lasts_s(self) -> float:
        return time.monotonic() - self._at

    def goes_on(self) -> bool:
        """For an attacker."""
        if not self._has_begun:
            self._has_begun = True
            os.write(self._begins, b".")
        return not select.select([self._over], [], [], 0.0)[0]  # the byte stays, for the others

    def wait_begun(self) -> None:
        for _ in ATTACKERS:
            until(lambda: select.select([self._begun], [], [], 0.0)[0], "an attacker")
            os.read(self._begun, 1)

    def end(self) -> None:
        os.write(self._ends, b".")

    def close(self) -> None:
        for descriptor in (self._begun, self._begins, self._over, self._ends):
            os.close(descriptor)


def honest(path: str) -> None:
    """Join as a watcher does, with the tries that it needs."""
    limit_at = time.monotonic() + HONEST_WITHIN_S
    while True:
        try:
            with AgentClient(path) as client:
                client.join(JOB, 0, within_s=5.0)
                return
        except AgentError:
            if time.monotonic() > limit_at:
                raise
            time.sleep(0.1)


def withstands(agent: AgentProcess, work: Callable[[str, Attack], Any]) -> list[Any]:
    """Have users attack until an honest one was served some times; return what the attackers found."""
    agent.job(JOB, GAMES)
    by(GAMES, honest, agent.path)
    rss, descriptors = agent.rss_kib(), agent.descriptors()
    attack = Attack()
    people = [Person(uid, work, agent.path, attack) for uid in ATTACKERS]
    try:
        attack.wait_begun()
        served = 0
        while served < SERVED or attack.lasts_s < ATTACK_S:
            by(GAMES, honest, agent.path)
            served += 1
            time.sleep(0.1)
        attack.end()
        found = [each.result(HONEST_WITHIN_S + WAIT_S) for each in people]
    finally:
        for each in people:
            each.end()
        attack.close()

    agent.tell(publish=incident("XID 79"))  # it lives, and its thread still does what it is told
    until(lambda: agent.descriptors() <= descriptors + 1, "the connections' end", agent.descriptors)
    assert agent.rss_kib() - rss < GROWTH_KIB_MAX
    log = agent.said("event", "socket_refused")
    assert len(log) < LINES_PER_S * (attack.lasts_s + 1), f"{len(log)} lines"
    assert not agent.said("call", "hasten")
    return found


def refuses(path: str, attack: Attack, action: Callable[[socket.socket, random.Random], None]) -> int:
    """Connect and do something over and over, whatever comes of it; return how often."""
    dice, count = random.Random(os.getpid()), 0  # noqa: S311 - noise, no secret
    while attack.goes_on():
        count += 1
        with contextlib.suppress(OSError), raw(path) as sock:
            action(sock, dice)
    return count


@pytest.mark.campaign
def test_noise_of_all_sizes(agent: AgentProcess) -> None:
    def noise(sock: socket.socket, dice: random.Random) -> None:
        for _ in range(30):
            sock.send(dice.randbytes(dice.choice((0, 1, 10, 1000, MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX + 1, 100_000))))

    withstands(agent, lambda path, attack: refuses(path, attack, noise))


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

    began = time.monotonic()
    withstands(agent, lambda path, attack: refuses(path, attack, flood))

    assert not agent.said("look")
    assert len(agent.said("call", "owned_job")) < LINES_PER_S * (time.monotonic() - began + 1)


@pytest.mark.campaign
def test_thousands_of_connections(agent: AgentProcess) -> None:
    def connect(path: str, attack: Attack) -> int:
        held: list[socket.socket] = []
        count = 0
        while attack.goes_on() or (count < ENOUGH and attack.lasts_s < HONEST_WITHIN_S):
            with contextlib.suppress(OSError):
                held.append(raw(path))
                count += 1
            if len(held) > 500:
                held.pop(0).close()
        return count

    assert min(withstands(agent, connect)) >= ENOUGH


def test_connections_that_come_and_go_use_bounded_processor_time(agent: AgentProcess) -> None:
    before, began = agent.cpu_s(), time.monotonic()

    withstands(agent, lambda path, attack: refuses(path, attack, lambda *_: None))

    assert agent.cpu_s() - before < 0.6 * (time.monotonic() - began + 0.5), "accepting is paced"


@pytest.mark.campaign
def test_two_hundred_connecting_processes_of_one_user_keep_no_other_from_joining(agent: AgentProcess) -> None:
    """Each join of the honest one is tried once."""
    agent.job(JOB, GAMES)

    def join(path: str) -> bool:
        with AgentClient(path) as client:
            client.join(JOB, 0)
        return True

    def connect_on_and_on(path: str, reader: int) -> int:
        count = 0
        while not select.select([reader], [], [], 0.0)[0]:
            with contextlib.suppress(OSError), raw(path):
                count += 1
        return count

    reader, writer = os.pipe()
    crowd = [Person(NEWS, connect_on_and_on, agent.path, reader) for _ in range(200)]
    try:
        until(lambda: agent.said("event", "socket_refused"), "the crowd", agent.words)
        joined = [by(GAMES, join, agent.path) for _ in range(8)]
    finally:
        os.write(writer, b".")
        for each in crowd:
            each.end()
        os.close(reader)
        os.close(writer)

    assert joined == [True] * 8


def test_one_user_fills_no_log(agent: AgentProcess) -> None:
    """Neither by what is refused nor by what is granted: joins and changed requests."""
    agent.job(JOB, GAMES, state="RUNNING")

    def ask_on_and_on(path: str) -> float:
        began, number = time.monotonic(), 0
        while time.monotonic() - began < 4 * ATTACK_S:
            number += 1
            with contextlib.suppress(AgentError), AgentClient(path) as client:
                client.join(JOB, 0)
                client.expedite(JOB, 0, (f"n{number}",))
            time.sleep(0.05)
        return time.monotonic() - began

    lasted_s = by(GAMES, ask_on_and_on, agent.path)

    of_events = Counter(word["event"] for word in agent.words() if "event" in word)
    assert sum(of_events.values()) < 20 + 2 * lasted_s, of_events
    calls = len(agent.said("call", "owned_job"))
    assert calls < 5 + 3 * lasted_s, "changed requests cost no more than one"


def test_a_full_house_of_strangers_makes_room_for_a_job(agents: Any) -> None:
    agent = agents(connections_max=20, connections_per_uid_max=10)

    def sit(path: str, attack: Attack) -> int:
        held = [raw(path) for _ in range(10)]
        while attack.goes_on():
            time.sleep(0.02)
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

    withstands(agent, lambda path, attack: refuses(path, attack, pass_descriptors))

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
    try:
        until(lambda: agent.said("event", "job_joined"), "the join", agent.words)
        until(lambda: "State:\tT" in open(f"/proc/{sleeper.pid}/status").read(), "the stop")  # noqa: SIM115
        rss = agent.rss_kib()

        for index in range(300):
            agent.tell(publish=incident(incident=f"i{index}", why="x" * 400))
            if agent.said("event", "socket_refused"):
                break

        assert any("does not read" in line["why"] for line in agent.said("event", "socket_refused"))
        until(lambda: agent.descriptors() <= descriptors, "the cut", agent.words)
        assert agent.rss_kib() - rss < GROWTH_KIB_MAX
        by(GAMES, honest, agent.path)
    finally:
        sleeper.end()  # it holds the agent's stdin open, too


def test_those_who_never_join_are_closed_and_those_who_joined_stay(agents: Any) -> None:
    agent = agents(unjoined_s=3.0)
    agent.job(JOB, 0)
    joined = AgentClient(agent.path)
    joined.join(JOB, 0)

    def idle() -> bool:
        return raw(agent.path, 30).recv(10) == b""

    assert by(NEWS, idle)
    agent.tell(publish=incident())
    until(joined.receive, "the incident")
    joined.close()


def test_an_idle_agent_sleeps(agent: AgentProcess) -> None:
    agent.job(JOB, GAMES)
    joined = AgentClient(agent.path)
    joined.join(JOB, 0)

    def sleeps() -> bool:
        before = _switches(agent.pid)
        time.sleep(1.0)
        return _switches(agent.pid) - before <= 2

    until(sleeps, "a second in which it sleeps: it sees first that nothing is to be watched")
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
            sock = raw(agent.path, 30)
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
    agent = agents(packets=(1e6, 1e6), accepts=(1e6, 1e6))
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

    by(GAMES, honest, agent.path)
    assert agent.rss_kib() - rss < GROWTH_KIB_MAX
    assert not agent.said("call", "requeue")
    assert not agent.said("event", "socket_failed")


@pytest.mark.parametrize("packet", [b"", b"x" * (MESSAGE_BYTES_MAX + 1), b"\xff\xfe", b"[]", b'{"type":"join"}'])
def test_what_cannot_be_read_ends_the_connection(agent: AgentProcess, packet: bytes) -> None:
    def talk() -> bool:
        with raw(agent.path, 30) as sock:
            sock.send(packet)
            return sock.recv(100) == b""

    assert by(NEWS, talk)

"""What users are granted and refused: real sockets, real users, a Slurm of our own making."""

import select
import time
from typing import Any

import pytest

from stepkeeper.node_agent.protocol import (
    SOCKET_VARIABLE,
    AgentClient,
    AgentError,
    AgentRefusedError,
    ExpediteRequeue,
    Look,
    Refused,
    Seen,
    connect,
    encode,
)
from stepkeeper.watcher.messages import Assignment
from stepkeeper.watcher.sensors import NodeSensors
from tests.node_agent.socket.people import (
    GAMES,
    NEWS,
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


def joins(path: str, job_id: int, restart_count: int = 0) -> str:
    try:
        with AgentClient(path) as client:
            return client.join(job_id, restart_count, within_s=WAIT_S).node
    except AgentRefusedError as error:
        return f"{error.what}: {error.why}"


def expedites(
    path: str, joined: int, job_id: int, exclude: list[str], restart_count: int = 0, *, attempt: int = 0
) -> str:
    try:
        with AgentClient(path) as client:
            client.join(joined, attempt, within_s=WAIT_S)
            client.expedite(job_id, restart_count, tuple(exclude), within_s=WAIT_S)
    except AgentRefusedError as error:
        return f"{error.what}: {error.why}"
    return "accepted"


def floods_names(path: str) -> str:
    with AgentClient(path) as client:
        client.join(7, 0)
        with pytest.raises(AgentError, match="65 nodes to exclude are too many"):
            client.expedite(7, 0, tuple(f"n{index}" for index in range(65)))
        client.send(ExpediteRequeue(job_id=7, restart_count=0, exclude=tuple(f"n{index}" for index in range(65))))
        until(lambda: select.select([client], [], [], 1.0)[0], "the refusal")
        (refused,) = client.receive()
        assert isinstance(refused, Refused)
        return f"{refused.what}: {refused.why}"


def test_the_owner_of_a_job_on_this_node_joins_and_nobody_else(agent: AgentProcess) -> None:
    agent.job(7, GAMES)

    assert by(GAMES, joins, agent.path, 7) == "n1"
    assert by(NEWS, joins, agent.path, 7) == "join: not a job of yours on n1"
    assert by(0, joins, agent.path, 7) == "n1"


def test_a_job_elsewhere_or_over_or_unknown_is_refused_in_the_same_words(agent: AgentProcess) -> None:
    agent.job(8, GAMES, nodes=["n2"])
    agent.job(9, GAMES, state="COMPLETED")

    answers = {by(GAMES, joins, agent.path, job_id) for job_id in (8, 9, 10)}

    assert answers == {"join: not a job of yours on n1"}
    assert by(GAMES, joins, agent.path, -1) == "join: no such job"


def test_guessing_job_ids_soon_asks_slurm_no_more(agents: Any) -> None:
    agent = agents(questions_per_uid=(0.001, 3))

    def guess() -> list[str]:
        return [joins(agent.path, 100 + index) for index in range(8)]

    found = by(GAMES, guess)

    assert found[0] == "join: not a job of yours on n1"
    assert found[-1].startswith("join: busy")
    assert len(agent.said("call", "owned_job")) == 3


def test_a_slurm_that_hangs_stops_only_those_who_need_it(agent: AgentProcess) -> None:
    agent.job(7, GAMES)
    assert by(GAMES, joins, agent.path, 7) == "n1"
    agent.tell(hangs=True)
    waiting = [Person(NEWS, joins, agent.path, 50 + index) for index in range(3)]
    until(lambda: len(agent.said("call", "owned_job")) == 2, "the question of whoever came first", agent.words)

    assert by(0, joins, agent.path, 7) == "n1"  # Slurm answers nobody yet

    agent.tell(hangs=False)
    assert {each.result() for each in waiting} == {"join: not a job of yours on n1"}


def test_those_who_joined_hear_of_incidents_and_others_do_not(agent: AgentProcess) -> None:
    agent.job(7, GAMES)
    agent.tell(publish=incident("XID 13", incident="i0"))

    def listen() -> list[str]:
        with AgentClient(agent.path) as client, AgentClient(agent.path) as stranger:
            client.join(7, 0)
            names: list[str] = []
            until(lambda: names.extend(_names(client)) or len(names) == 2, "two incidents", lambda: names)
            assert stranger.receive() == []
            return names

    listener = Person(GAMES, listen)
    until(lambda: agent.said("event", "job_joined"), "the join", agent.words)
    agent.tell(publish=incident("XID 79"))

    assert listener.result() == ["XID 13", "XID 79"]


def _names(client: AgentClient) -> list[str]:
    return [message.name for message in client.receive() if isinstance(message, Seen)]


def test_a_look_is_a_hint_for_the_agent_and_no_more(agent: AgentProcess) -> None:
    agent.job(7, GAMES)

    def ask() -> None:
        with AgentClient(agent.path) as client:
            client.join(7, 0)
            client.send(Look(job_id=7, why="rank 5 died\x1b[2J\nXID 79 " + "x" * 500))

    by(GAMES, ask)
    until(lambda: agent.said("event", "look_asked"), "the look", agent.words)
    (look,) = agent.said("event", "look_asked")
    assert look["job"] == 7
    assert look["why"].startswith("rank 5 died [2J XID 79 xxx")
    assert len(look["why"]) <= 200
    until(lambda: len(agent.said("look")) == 1, "the word to the agent", agent.words)


def test_a_watcher_of_an_older_version_names_a_gpu_besides(agent: AgentProcess) -> None:
    agent.job(7, GAMES)

    def ask() -> None:
        sock = raw(agent.path, 30)
        sock.send(b'{"type":"join","job_id":7,"restart_count":0}')
        sock.recv(4096)  # before it has joined, a look is refused
        sock.send(b'{"type":"look","job_id":7,"pci":"0000:3B:00.0; reboot","ordinal":-1,"why":"x"}')

    by(GAMES, ask)
    until(lambda: agent.said("event", "look_asked"), "the look", agent.words)
    assert not any("reboot" in str(word) for word in agent.words()), "nobody reads it"


def test_looks_are_refused_for_other_jobs_and_when_too_many(agents: Any) -> None:
    agent = agents(looks_per_uid=(0.001, 3))
    agent.job(7, GAMES)
    agent.job(8, NEWS)

    def ask() -> list[str]:
        with AgentClient(agent.path) as client:
            client.send(Look(job_id=8))
            refused = _refused(client)
            client.join(7, 0)
            for job_id in (8, 7, 7, 7, 7, 7, 7):
                client.send(Look(job_id=job_id))
            until(lambda: refused.extend(_refused(client)) or len(refused) == 5, "five refusals", lambda: refused)
            return refused

    found = by(GAMES, ask)

    assert found[:2] == ["join with this job first"] * 2
    assert found[2:] == ["too often: the agent also checks on its own schedule"] * 3
    assert len(agent.said("look")) == 3


def _refused(client: AgentClient) -> list[str]:
    """Wait for a word of the agent, and return why it refuses."""
    until(lambda: select.select([client], [], [], 1.0)[0], "an answer")
    return [message.why for message in client.receive() if isinstance(message, Refused)]


def test_only_who_joined_a_job_here_may_expedite_it(agent: AgentProcess) -> None:
    agent.job(7, GAMES)
    agent.job(8, NEWS)
    assert by(GAMES, joins, agent.path, 7) == "n1"

    assert by(NEWS, expedites, agent.path, 8, 7, []) == "hasten: join with this job first"
    assert by(GAMES, expedites, agent.path, 7, 8, []) == "hasten: join with this job first"
    assert by(GAMES, expedites, agent.path, 7, 7, ["n1", "n2"]) == "accepted"


def test_false_node_names_and_too_many_are_refused(agents: Any) -> None:
    agent = agents(questions_per_uid=(1000.0, 1000.0))
    agent.job(7, GAMES)
    false = ("n1,n2", "n[1-9]", "n1 StartTime=now", "", "-n1", "n1\n", "../n1", "n" * 64, "né")

    answers = {by(GAMES, expedites, agent.path, 7, 7, [name]) for name in false}

    assert answers == {"hasten: a name in `exclude` that no node can have"}
    assert by(GAMES, floods_names, agent.path) == "hasten: more than 64 nodes to exclude"
    assert not agent.said("call", "hasten")


def test_an_attempt_expedites_nothing_for_one_before_it(agent: AgentProcess) -> None:
    agent.job(7, GAMES)

    def ask() -> str:
        return expedites(agent.path, 7, 7, [], restart_count=1, attempt=2)

    assert by(GAMES, ask) == "hasten: a later attempt of the job has joined"


def test_an_attempt_that_was_superseded_replaces_no_request_of_the_newer_one(agent: AgentProcess) -> None:
    agent.job(7, GAMES)

    def ask() -> str:
        with AgentClient(agent.path) as newer:
            newer.join(7, 2, within_s=WAIT_S)
            while_it_is_there = expedites(agent.path, 7, 7, [], restart_count=1, attempt=1)
            newer.expedite(7, 2, ("n1",), within_s=WAIT_S)
        return f"{while_it_is_there}; {expedites(agent.path, 7, 7, [], restart_count=1, attempt=1)}"

    refused = "hasten: a later attempt of the job has joined"
    assert by(GAMES, ask) == f"{refused}; {refused}"


def test_a_requeued_job_is_expedited_with_its_whole_list_in_one_call(agent: AgentProcess) -> None:
    agent.job(7, GAMES)
    assert by(GAMES, expedites, agent.path, 7, 7, ["n3", "n1", "n3"]) == "accepted"
    agent.job(7, GAMES, state="COMPLETING", restarts=1)
    until(lambda: len(agent.said("call", "owned_job")) > 3, "some questions", agent.words)
    assert not agent.said("call", "hasten")

    agent.job(7, GAMES, state="PENDING", restarts=1, nodes=[], eligible_at=time.time() + 120)
    until(lambda: agent.said("call", "hasten"), "the update", agent.words)
    agent.job(7, GAMES, restarts=1)
    until(lambda: agent.said("event", "expedite_over"), "the end", agent.words)

    assert [(word["job"], word["exclude"], word["after_s"]) for word in agent.said("call", "hasten")] == [
        (7, "n3,n1", 2)
    ]
    assert agent.said("event", "expedite_over")[0]["why"] == "the next attempt started: RUNNING"


def test_messages_of_a_later_version_are_skipped(agent: AgentProcess) -> None:
    agent.job(7, GAMES)

    def talk() -> str:
        sock = raw(agent.path, 30)
        sock.send(b'{"type":"tomorrow","x":[1,2]}')
        sock.send(b'{"type":"join","job_id":7,"restart_count":0,"tomorrow":{"x":1}}')
        return sock.recv(4096).decode()

    assert '"joined"' in by(GAMES, talk)


def test_a_node_without_an_agent_costs_one_look_at_the_file_system() -> None:
    assert connect({SOCKET_VARIABLE: "/tmp/no-agent-%N.sock"}, "n1") is None


def test_a_restarted_agent_is_seen_at_once_and_takes_the_same_path(public: Any) -> None:
    first = AgentProcess(public)
    first.job(7, GAMES)
    client = AgentClient(first.path)
    client.join(7, 0)
    assert connect({SOCKET_VARIABLE: first.path.replace("agent", "%N")}, "agent") is not None

    first.close()
    with pytest.raises(AgentError, match="has left"):
        client.receive()
    with pytest.raises(AgentError):
        client.send(ExpediteRequeue(job_id=7, restart_count=0))
    client.close()

    second = AgentProcess(public)
    second.job(7, GAMES)
    assert by(GAMES, joins, second.path, 7) == "n1"
    second.close()


def test_a_watcher_hears_a_restarted_agent_within_seconds(public: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told the open faults when it joins again: nothing is missed in between."""
    first = AgentProcess(public)
    monkeypatch.setenv(SOCKET_VARIABLE, first.path)
    senses = NodeSensors(assignment(job_id=7), "n1")
    senses.start()
    until(lambda: first.said("event", "job_joined"), "the watcher's join", first.words)

    first.close()
    second = AgentProcess(public)
    began = time.monotonic()
    until(lambda: second.said("event", "job_joined"), "the watcher's next join", second.words)
    took_s = time.monotonic() - began
    senses.close()
    second.close()

    assert took_s < 15


def assignment(*, job_id: int) -> Assignment:
    return Assignment(
        run_directory="/nonexistent",
        run_id="r",
        job_id=job_id,
        slurm_name=str(job_id),
        restart_count=0,
        attempt=0,
        nodes=("n1",),
        kill_wait_s=10.0,
        nonce="n",
    )


def test_a_request_fits_its_packet() -> None:
    assert encode(
        ExpediteRequeue(job_id=2**31, restart_count=9, exclude=tuple("n" * 57 + f"{i:05d}" for i in range(60)))
    )

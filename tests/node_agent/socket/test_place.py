"""Where the socket may lie: hostile directories, links, squatters, a second agent, a stale socket."""

import contextlib
import gc
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper.node_agent.protocol import AgentAbsentError, AgentClient, AgentError
from stepkeeper.node_agent.server import Place, PlaceError
from tests.node_agent.socket.people import NEWS, Person, by, needs_root, until

pytestmark = needs_root


def squat(path: str, uid: int) -> None:
    """Leave a socket of another user's behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(path)
    os.chown(path, uid, uid)


def test_the_socket_is_for_everybody_and_its_directory_is_not(public: Path) -> None:
    place = Place(str(public / "run" / "agent.sock"), backlog=1)

    assert stat.S_IMODE(os.stat(place.path).st_mode) == 0o666
    assert stat.S_IMODE(os.stat(public / "run").st_mode) == 0o755
    place.close()
    assert sorted(os.listdir(public / "run")) == ["agent.sock.lock"]


def test_a_stale_socket_is_replaced_without_a_moment_in_which_there_is_none(public: Path) -> None:
    path = public / "agent.sock"
    squat(str(path), 0)
    squat(str(public / ".agent.sock.new"), 0)  # of an agent that was killed while it started
    missing: list[str] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            if not os.path.lexists(path):
                missing.append("gone")

    watcher = threading.Thread(target=look)
    watcher.start()
    for _ in range(20):
        place = Place(str(path), backlog=1)
        place.socket.close()  # as if killed: its socket stays
        place._release()
    stop.set()
    watcher.join(60)

    assert not missing
    assert os.listdir(public).count(".agent.sock.new") == 0


def _link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _dangling(path: Path, _: Path) -> None:
    path.symlink_to("/tmp/does-not-exist-at-all")


def _file(path: Path, _: Path) -> None:
    path.write_text("precious")


def _directory(path: Path, _: Path) -> None:
    path.mkdir()


def _fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _foreign(path: Path, _: Path) -> None:
    squat(str(path), NEWS)


def _hard_link(path: Path, target: Path) -> None:
    os.link(target, path)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        (name, plant)
        for name in ("agent.sock", ".agent.sock.new", "agent.sock.lock")
        for plant in (_link, _dangling, _file, _directory, _fifo, _foreign, _hard_link)
        if (name, plant) != ("agent.sock.lock", _file)  # an own file of that name is the lock
    ],
)
def test_what_others_planted_is_neither_followed_nor_removed(
    public: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    precious = public / "precious"
    precious.write_text("precious")
    precious.chmod(0o600)
    plant(public / name, precious)
    before = os.lstat(public / name)

    with pytest.raises(PlaceError) as caught:
        Place(str(public / "agent.sock"), backlog=1)

    assert name in str(caught.value)
    after = os.lstat(public / name)
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_size) == (
        before.st_ino,
        before.st_mode,
        before.st_uid,
        before.st_size,
    )
    assert precious.read_text() == "precious"
    assert stat.S_IMODE(os.stat(precious).st_mode) == 0o600
    assert not os.path.exists("/tmp/does-not-exist-at-all")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(public: Path, mode: int) -> None:
    directory = public / "run"
    directory.mkdir()
    directory.chmod(mode)

    with pytest.raises(PlaceError, match="others may write"):
        Place(str(directory / "agent.sock"), backlog=1)
    assert os.listdir(directory) == []


def test_a_directory_of_another_users_is_refused_wherever_it_stands(public: Path) -> None:
    theirs = public / "theirs"
    (theirs / "run").mkdir(parents=True)
    os.chown(theirs, NEWS, NEWS)

    with pytest.raises(PlaceError, match=f"belongs to uid {NEWS}"):
        Place(str(theirs / "run" / "agent.sock"), backlog=1)
    with pytest.raises(PlaceError, match=f"belongs to uid {NEWS}"):
        Place(str(theirs / "agent.sock"), backlog=1)


def test_a_link_instead_of_the_directory_leads_to_the_same_checks(public: Path) -> None:
    theirs = public / "theirs"
    theirs.mkdir()
    os.chown(theirs, NEWS, NEWS)
    (public / "run").symlink_to(theirs)

    with pytest.raises(PlaceError, match=f"belongs to uid {NEWS}"):
        Place(str(public / "run" / "agent.sock"), backlog=1)
    assert os.listdir(theirs) == []


@pytest.mark.parametrize("path", ["agent.sock", "/tmp/" + "x" * 100, "/no-such/dir/agent.sock", "/"])
def test_a_path_that_cannot_be_is_refused_in_words(path: str) -> None:
    with pytest.raises(PlaceError):
        Place(path, backlog=1)


def test_a_second_agent_is_refused_and_the_first_goes_on(public: Path) -> None:
    path = str(public / "agent.sock")
    first = Place(path, backlog=1)

    with pytest.raises(PlaceError, match="another agent"):
        Place(path, backlog=1)

    AgentClient(path).close()
    first.close()


def test_an_agent_removes_only_its_own_socket(public: Path) -> None:
    place = Place(str(public / "agent.sock"), backlog=1)
    os.unlink(place.path)
    squat(place.path, NEWS)

    place.close()

    assert os.lstat(place.path).st_uid == NEWS


def test_nothing_is_left_open_when_it_is_refused(public: Path) -> None:
    (public / "agent.sock").write_text("")

    def count() -> int:
        gc.collect()  # what other tests have left to be closed
        return len(os.listdir("/proc/self/fd"))

    before = count()

    for _ in range(5):
        with pytest.raises(PlaceError):
            Place(str(public / "agent.sock"), backlog=1)

    until(lambda: count() <= before, "descriptors are closed", count)  # other threads may have some for a moment


def test_a_fake_agent_of_an_ordinary_user_is_not_believed(public: Path) -> None:
    theirs = public / "theirs"
    theirs.mkdir()
    os.chown(theirs, NEWS, NEWS)
    path = str(theirs / "agent.sock")

    def pretend() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.bind(path)
            os.chmod(path, 0o666)  # noqa: S103 - as the agent's is
            sock.listen(8)
            sock.settimeout(60)
            taken = []
            while True:
                taken.append(sock.accept()[0])
                with contextlib.suppress(OSError):  # whoever saw through it has left
                    taken[-1].send(b'{"type":"joined","node":"n1","acts":true}')

    fake = Person(NEWS, pretend)
    until(lambda: os.path.exists(path) and os.stat(path).st_mode & 0o002, "the fake agent")

    for _ in range(3):
        with pytest.raises(AgentError, match=f"uid {NEWS} listens there"):
            AgentClient(path)
    assert by(NEWS, lambda: AgentClient(path, trusted_uid=NEWS).join(1, 0, within_s=30).node) == "n1"
    fake.end()


def test_an_agent_that_takes_no_connection_costs_only_the_time_limit(public: Path) -> None:
    place = Place(str(public / "agent.sock"), backlog=0)
    waiting = AgentClient(place.path)

    with pytest.raises(AgentAbsentError, match=r"takes no connection in 0\.2 s"):
        AgentClient(place.path, connect_within_s=0.2)

    waiting.close()
    place.close()

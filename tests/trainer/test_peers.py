"""A node's files are kept by the next node too."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.tiers import Held, Pace
from stepkeeper_trainer.tiers.directory import LocalTier
from stepkeeper_trainer.tiers.peers import (
    CHALLENGE_BYTES,
    PROVED_WITHIN_S,
    STRANGERS_MAX,
    WITHIN_S,
    Address,
    Keeping,
    PeerCopies,
    own_host,
    proof_of,
)
from tests.trainer.tier_steps import LATE_S, content, lay, make

FILES = content(100)
HELD = make(100, FILES)


@pytest.fixture
def disks(tmp_path: Path) -> list[LocalTier]:
    """Two nodes with a rank each."""
    found = []
    for rank in range(2):
        local = LocalTier(tmp_path / f"disk{rank}", keep=2)
        own = {f"__{rank}_0.distcp": FILES[f"__{rank}_0.distcp"]}
        lay(local.begin(100, HELD.manifest.save_id, 0), own | ({".metadata": FILES[".metadata"]} if rank == 0 else {}))
        local.commit(HELD)
        found.append(local)
    return found


@pytest.fixture
def keeping(disks: list[LocalTier]) -> Iterator[Keeping]:
    made = Keeping(disks[1], "127.0.0.1")
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    limit_at = time.monotonic() + LATE_S
    while not condition():
        assert time.monotonic() < limit_at
        time.sleep(0.01)


def here(local: LocalTier) -> Held:
    return local.steps()[0]


def send(disks: list[LocalTier], address: Address, said: Callable[[], str], word: str) -> None:
    copies = PeerCopies(disks[0], address, (0,), Pace())
    copies.offer(here(disks[0]))
    until(lambda: word in said())
    copies.close()


def test_the_next_node_has_this_ones_files_too(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    send(disks, keeping.address, lambda: caplog.text, "peer_copied")
    assert set(disks[1].files(here(disks[1]))) == set(FILES)
    directory = disks[1].checkpoints / "step_00000100"
    assert all((directory / name).read_bytes() == data for name, data in FILES.items())
    assert disks[0].files(here(disks[0])) == [".metadata", "__0_0.distcp"], "it goes one way"
    caplog.clear()
    send(disks, keeping.address, lambda: caplog.text, "peer_copied")
    assert "bytes=0" in caplog.text, "and not again"


def test_who_does_not_know_the_key_is_refused(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = Address(keeping.address.host, keeping.address.port, b"x" * 32)
    send(disks, wrong, lambda: caplog.text, "peer_copy_failed")
    until(lambda: "does not know this launch's key" in caplog.text)
    assert disks[1].files(here(disks[1])) == ["__1_0.distcp"]
    assert keeping.address.key.hex() not in caplog.text


def test_a_damaged_file_is_not_passed_on(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    bad = disks[0].checkpoints / "step_00000100" / "__0_0.distcp"
    data = bytearray(bad.read_bytes())
    data[3500] ^= 1
    bad.write_bytes(data)
    send(disks, keeping.address, lambda: caplog.text, "peer_copy_failed")
    assert "bytes of chunk 3" in caplog.text
    assert "__0_0.distcp" not in disks[1].files(here(disks[1]))


def test_a_file_that_breaks_off_gets_no_name_and_others_are_served(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    class BreaksOff(Pace):
        def take(self, _count: int) -> None:
            raise OSError("the node is lost")

    copies = PeerCopies(disks[0], keeping.address, (0,), BreaksOff())
    copies.offer(here(disks[0]))
    until(lambda: "ends in chunk" in caplog.text)
    copies.close()
    assert disks[1].files(here(disks[1])) == ["__1_0.distcp"]
    with socket.create_connection((keeping.address.host, keeping.address.port), timeout=LATE_S):
        pass
    caplog.set_level("INFO")
    send(disks, keeping.address, lambda: caplog.text, "peer_copied")
    assert set(disks[1].files(here(disks[1]))) == set(FILES)


class Short:
    """A listening socket of a process that has no free descriptors for a while."""

    def __init__(self, inner: socket.socket, tries: int) -> None:
        self._inner, self._tries = inner, tries

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def accept(self) -> object:
        if self._tries:
            self._tries -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._inner.accept()


def test_a_process_without_free_descriptors_listens_on(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    keeping._socket = Short(keeping._socket, 3)  # type: ignore[assignment]
    socket.create_connection((keeping.address.host, keeping.address.port), timeout=LATE_S).close()  # it accepts already
    until(lambda: "peer_copies_wait" in caplog.text)
    send(disks, keeping.address, lambda: caplog.text, "peer_copied")

    assert set(disks[1].files(here(disks[1]))) == set(FILES)
    assert caplog.text.count("peer_copies_wait") == 1, "once, however often it is tried"


def test_a_listener_that_can_take_nobody_any_more_says_so(
    disks: list[LocalTier], caplog: pytest.LogCaptureFixture
) -> None:
    keeping = Keeping(disks[1], "127.0.0.1")
    keeping._socket.shutdown(socket.SHUT_RDWR)  # as if the kernel refused; it was not closed
    until(lambda: "peer_copies_off" in caplog.text)
    keeping.close()


def test_names_that_are_no_file_of_the_step_are_refused(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    mine = here(disks[0])
    other = make(100, FILES | {"__0_9.distcp": b"planted"}, save_id=mine.manifest.save_id)
    (disks[0].checkpoints / "step_00000100" / "__0_9.distcp").write_bytes(b"planted")
    copies = PeerCopies(disks[0], keeping.address, (0,), Pace())
    copies.offer(Held(mine.directory, other.manifest, other.raw))
    until(lambda: "not a file of step 100" in caplog.text)
    copies.close()
    assert "__0_9.distcp" not in os.listdir(disks[1].checkpoints / "step_00000100")


def test_the_address_is_the_one_on_the_way_to_where_ranks_meet() -> None:
    assert own_host("127.0.0.1") == "127.0.0.1"


# --- strangers on the network -----------------------------------------------------------------------------------------


def stranger(keeping: Keeping) -> socket.socket:
    return socket.create_connection((keeping.address.host, keeping.address.port), timeout=LATE_S)


def test_a_stranger_who_drips_bytes_is_left_and_holds_up_nobody(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    """He was served for as long as he sent a byte a minute, and nobody else was."""
    caplog.set_level("INFO")
    left = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection:
            try:
                for _ in range(int(10 * LATE_S)):
                    connection.sendall(b"x")
                    time.sleep(0.1)
            except OSError:
                left.set()

    dripping = threading.Thread(target=drip, args=(stranger(keeping),), daemon=True)
    dripping.start()
    began = time.monotonic()
    send(disks, keeping.address, lambda: caplog.text, "peer_copied")
    served_s = time.monotonic() - began

    assert set(disks[1].files(here(disks[1]))) == set(FILES)
    assert left.wait(LATE_S), "he is left"
    assert served_s < 10 * PROVED_WITHIN_S
    assert "peer_copy_refused" in caplog.text  # one is reported every so often: this one, or one that broke before it
    dripping.join(LATE_S)


def test_a_crowd_of_strangers_has_a_limit_and_a_sender_is_served(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    crowd = [stranger(keeping) for _ in range(5 * STRANGERS_MAX)]
    try:
        send(disks, keeping.address, lambda: caplog.text, "peer_copied")
        threads = [each for each in threading.enumerate() if each.name == "stepkeeper-peer"]
        until(lambda: not [each for each in threading.enumerate() if each.name == "stepkeeper-peer"])
    finally:
        for each in crowd:
            each.close()

    assert set(disks[1].files(here(disks[1]))) == set(FILES)
    assert len(threads) <= 2 * STRANGERS_MAX, "those that gave way are about to end"
    assert caplog.text.count("peer_copy_refused") == 1, "one line, however many there are"


def test_a_proof_of_an_earlier_connection_proves_nothing(
    keeping: Keeping, disks: list[LocalTier], caplog: pytest.LogCaptureFixture
) -> None:
    line = b'{"save_id": "x", "step": 100, "file": "__0_0.distcp"}\n'
    with stranger(keeping) as first, stranger(keeping) as second:
        proof = proof_of(keeping.address.key, first.recv(CHALLENGE_BYTES, socket.MSG_WAITALL), line)
        second.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        second.sendall(line + proof)
        assert second.recv(1) == b""

    assert "does not know this launch's key" in caplog.text
    assert disks[1].files(here(disks[1])) == ["__1_0.distcp"]


def test_a_sender_that_connects_anew_takes_the_place_of_what_was_left_of_it(
    disks: list[LocalTier], keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection whose other end is gone without a word would block the next one for a minute."""
    caplog.set_level("INFO")
    line = b'{"save_id": "%s", "step": 100, "file": "__0_0.distcp"}\n' % HELD.manifest.save_id.encode()
    with stranger(keeping) as half_dead:
        challenge = half_dead.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        half_dead.sendall(line + proof_of(keeping.address.key, challenge, line))
        assert half_dead.recv(1) == b"G"
        began = time.monotonic()
        send(disks, keeping.address, lambda: caplog.text, "peer_copied")

    assert time.monotonic() - began < WITHIN_S / 2
    assert set(disks[1].files(here(disks[1]))) == set(FILES)

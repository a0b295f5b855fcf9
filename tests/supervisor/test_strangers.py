"""Another user on the same node: what he sends to the ranks' and the watchers' sockets is not heard."""

import os
import secrets
import socket
import subprocess

import pytest

from stepkeeper.watcher import ranks
from stepkeeper_trainer.formats import messages

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
NAME = f"@stepkeeper-test-{secrets.token_hex(6)}/n1"
HELLO = messages.encode(messages.Hello(launch="0.0", rank=0, pid=1, world_size=1, version="0"))


def as_stranger(code: str) -> subprocess.Popen[bytes]:
    """Run Python as another user: isolated, standard library only."""
    return subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", code],
        user=65533,
        group=65533,
        extra_groups=[],
        stdout=subprocess.PIPE,
        cwd="/",
    )


@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no python that everybody can run")
def test_a_strangers_words_are_not_those_of_a_rank() -> None:
    sock = ranks.RankSocket(NAME)
    send = (
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind(''); "
        f"s.sendto({HELLO!r}, {chr(0) + NAME[1:]!r})"
    )
    assert as_stranger(send).wait(90) == 0

    heard_stranger = sock.receive()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind("")
        own.sendto(HELLO, "\0" + NAME[1:])
    heard_own = sock.receive()
    sock.close()

    assert heard_stranger is None
    assert heard_own is not None
    assert heard_own[0] == messages.decode_from_rank(HELLO)


def test_an_address_that_a_stranger_took_is_an_error_and_not_his(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher ends then, and the next attempt has another name, which nobody can guess."""
    monkeypatch.setattr(ranks, "BIND_WITHIN_S", 0.2)
    squat = as_stranger(
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
        f"s.bind({chr(0) + NAME[1:]!r}); print('bound', flush=True); sys.stdin.read(); import time; time.sleep(600)"
    )
    try:
        assert squat.stdout is not None
        assert squat.stdout.readline() == b"bound\n"
        with pytest.raises(OSError, match="in use"):
            ranks.RankSocket(NAME)
    finally:
        squat.kill()
        squat.communicate(timeout=90)

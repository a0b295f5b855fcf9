"""Tests that run at once are given different ports."""

import random
import subprocess
import sys

import pytest

from tests import ports

CHILD = """
import sys
from tests import ports
first = int(sys.argv[1])
ports.PORTS = range(first, first + 11)
try:
    print(ports.reserve())
except RuntimeError as error:
    print(error)
"""


def test_ports_of_another_process_are_not_given_out() -> None:
    first = ports.reserve(11)

    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(first)], capture_output=True, text=True, check=True, timeout=120
    )

    assert child.stdout.startswith("found no 1 free neighbouring ports")


def test_no_port_is_given_twice_though_a_training_seeds_this_process() -> None:
    found = set()
    for _ in range(20):
        random.seed(0)
        found.add(ports.reserve())

    assert len(found) == 20


def test_a_port_that_somebody_listens_on_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.reserve(2)
    code = f"import socket; s = socket.create_server(('127.0.0.1', {first})); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as listener:
        try:
            assert listener.stdout is not None
            listener.stdout.readline()
            monkeypatch.setattr(ports, "_own", set())
            monkeypatch.setattr(ports, "PORTS", range(first, first + 2))
            with pytest.raises(RuntimeError, match="found no 1 free"):
                ports.reserve()
        finally:
            listener.kill()

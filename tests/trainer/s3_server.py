"""A real server of the S3 protocol on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.ports import reserve

CONFIG = {
    "access_key_id": "anyone",
    "secret_access_key": "anything",  # the server takes any
    "region": "us-east-1",
    "virtual_hosted_style_request": False,
}


@contextmanager
def s3_server() -> Iterator[str]:
    """Start it, with a bucket `bucket`, and give its address."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    port = reserve()
    server = subprocess.Popen(
        # it ends with whoever started it, however that ends
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        limit_at = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=30).close()  # noqa: S310
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < limit_at, "the server does not answer"
                time.sleep(0.1)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def variables(endpoint: str) -> dict[str, str]:
    """Return what tells any program where the server is, and who asks."""
    return {
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": "anything-that-is-secret",
    }

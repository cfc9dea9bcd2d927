"""A real S3 server (moto's) in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

START_S = 30.0


class S3:
    """Serves on a free port of 127.0.0.1 until `close`. `environ`: what makes obstore find it.

    The port is bound here for all that time, without listening: nobody else is given it while the server is still
    starting or is killed, and the server may bind it beside us, since both say SO_REUSEADDR.
    """

    def __init__(self) -> None:
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = int(self._reserved.getsockname()[1])
        self.process: subprocess.Popen[bytes]
        self.start()

    @property
    def environ(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < until, "moto's server does not start"
                time.sleep(0.05)

    def bucket(self) -> str:
        """A new one; its name."""
        name = f"bucket-{uuid.uuid4().hex}"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=START_S):
            return name

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reserved.close()


@contextmanager
def s3_server() -> Iterator[S3]:
    """One that this process finds by its environment; ended afterwards."""
    server = S3()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environ.items():
                patch.setenv(name, value)
            yield server
    finally:
        server.close()

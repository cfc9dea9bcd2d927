"""A redis-server of a test's own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.cli.up.plan import Ports

WHY = "redis-server is not installed: scripts/install_redis.sh installs it where apt-get may be used"
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason=WHY)


class RedisServer:
    """Keeps nothing over a restart, as a Redis without persistence does."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self.port = Ports().take()
        self.url = f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"
        self._password = password
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        argv = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        argv += ["--requirepass", self._password] if self._password else []
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as peer:
                peer.sendall(b"PING\r\n")
                if peer.recv(16).startswith((b"+PONG", b"-NOAUTH")):
                    return
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """With what it holds."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None


@contextlib.contextmanager
def redis_server(folder: Path, password: str = "") -> Iterator[RedisServer]:
    """Started; killed in the end."""
    server = RedisServer(folder, password)
    server.start()
    try:
        yield server
    finally:
        server.kill()

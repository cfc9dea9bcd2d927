"""A redis-server of a test's own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.cli.up.plan import Ports
from kvmesh.rpc.security import TlsFiles

WHY = "redis-server is not installed: scripts/install_redis.sh installs it where apt-get may be used"


def why_no_tls() -> str:
    """Why no redis-server with TLS can be started here, "" where it can."""
    program = shutil.which("redis-server")
    if program is None:
        return WHY
    # Built without TLS it refuses the setting before anything else.
    done = subprocess.run([program, "--tls-port", "0", "--port", "x"], capture_output=True, timeout=10, check=False)
    built = b"tls-port" not in done.stderr + done.stdout
    return "" if built else "this redis-server is built without TLS (BUILD_TLS=yes)"


needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason=WHY)


class RedisServer:
    """Keeps nothing over a restart, as a Redis without persistence does."""

    def __init__(self, folder: Path, password: str = "", tls: TlsFiles | None = None) -> None:
        self.port = Ports().take()
        self._tls = tls
        scheme, query = ("rediss", f"?ssl_ca_certs={tls.tls_ca}") if tls is not None else ("redis", "")
        self.url = f"{scheme}://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0{query}"
        self._password = password
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        argv = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        argv += ["--requirepass", self._password] if self._password else []
        if (tls := self._tls) is not None:
            argv += ["--tls-port", str(self.port), "--tls-cert-file", tls.tls_cert, "--tls-key-file", tls.tls_key]
            argv += ["--tls-ca-cert-file", tls.tls_ca, "--tls-auth-clients", "no", "--port", "0"]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), self._connected() as peer:
                peer.sendall(b"PING\r\n")
                if peer.recv(16).startswith((b"+PONG", b"-NOAUTH")):
                    return
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def _connected(self) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", self.port), 1)
        if self._tls is None:
            return peer
        context = ssl.create_default_context(cafile=self._tls.tls_ca)
        return context.wrap_socket(peer, server_hostname="127.0.0.1")

    def kill(self) -> None:
        """With what it holds."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None


@contextlib.contextmanager
def redis_server(folder: Path, password: str = "", tls: TlsFiles | None = None) -> Iterator[RedisServer]:
    """Started; killed in the end."""
    server = RedisServer(folder, password, tls)
    server.start()
    try:
        yield server
    finally:
        server.kill()

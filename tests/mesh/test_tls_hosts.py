"""A mesh of two machines under TLS whose network nobody called trusted: its KV goes over tcp, encrypted. The other
machine is a user namespace of this one, which shares no memory with it, so that tcp is all there is."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvmesh.cli.up.plan import Ports
from kvmesh.rpc.certificates import make_certificates
from tests.support.mesh.client import until
from tests.support.paths import ROOT
from tests.support.reference import assert_matches_reference

ELSEWHERE = ("unshare", "--user", "--map-root-user")


def why_not() -> str:
    """Why this machine has no user namespaces, or may not be listened to; "" when it can be tried."""
    if shutil.which(ELSEWHERE[0]) is None:
        return "unshare (util-linux) is not installed"
    made = subprocess.run([*ELSEWHERE, "true"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"user namespaces: {made.stderr.strip()}"
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)).close()
    except OSError as err:
        return f"captures: {err}"
    return ""


WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.mesh,
    pytest.mark.timeout(240),
]

KVMESH = (sys.executable, "-m", "kvmesh.cli")
MODEL = "examples/demo-model"
READY_S = 120.0
SO_RCVBUFFORCE = 33
WINDOW, STRIDE = 32, 1024


class Capture:
    """Keeps what TCP carries over loopback while it is entered, one stream for each pair of ports and direction."""

    def __init__(self) -> None:
        self.streams: dict[tuple[int, int], bytearray] = {}
        self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
        self._sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        self._sock.bind(("lo", 0x0800))
        self._sock.settimeout(0.05)
        self._over, self._last = threading.Event(), os.urandom(WINDOW)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Capture:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        wave(self._last)  # what came before it has been seen when it has
        self._over.wait(20)
        self._thread.join(20)
        _, self.dropped = struct.unpack("@II", self._sock.getsockopt(263, 6, 8))  # SOL_PACKET, PACKET_STATISTICS
        self._sock.close()

    def _run(self) -> None:
        while True:
            try:
                packet = self._sock.recv(1 << 17)  # once: a tap of one protocol sees what comes in
            except TimeoutError:
                continue
            if packet[9] != socket.IPPROTO_TCP:
                continue
            at = (packet[0] & 15) * 4
            source, target = struct.unpack_from("!HH", packet, at)
            payload = packet[at + (packet[at + 12] >> 4) * 4 :]
            if payload == self._last:
                self._over.set()
                return
            self.streams.setdefault((source, target), bytearray()).extend(payload)

    def found(self, data: bytes) -> int:
        """How many windows of `data` were seen as they are; those of few different bytes say nothing."""
        whole = b"|".join(map(bytes, self.streams.values()))
        windows = (data[at : at + WINDOW] for at in range(0, len(data) - WINDOW, STRIDE))
        return sum(window in whole for window in windows if len(set(window)) > WINDOW // 2)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The URL of the gateway and the decode instance's process; prefill is on the other machine."""
    made, ports = make_certificates(tmp_path / "tls"), Ports()
    store, conductor, prefill, decode, http, grpc = (str(ports.take()) for _ in range(6))
    known = ("--conductor", f"127.0.0.1:{conductor}", "--store", f"127.0.0.1:{store}")
    model = ("--model", MODEL)
    services = {
        "store": ("--port", store),
        "conductor": ("--port", conductor, "--store", f"127.0.0.1:{store}"),
        "decode": (*model, "--port", decode, *known),
        "prefill": (*model, "--port", prefill, *known),
        "gateway": (*model, "--conductor", known[1], "--http-port", http, "--port", grpc),
    }
    tls = {"CERT": made.cert, "KEY": made.key, "CA": made.ca}
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "KVMESH_MEMORY_MB": "16"}
    env |= {f"KVMESH_TLS_{name}": str(file) for name, file in tls.items()}
    pids: dict[str, int] = {}
    with ExitStack() as stack:
        for name, args in services.items():
            log = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            where = ELSEWHERE if name == "prefill" else ()
            argv = [*where, *KVMESH, "serve", name, *args]
            process = subprocess.Popen(argv, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(end, process)
            pids[name] = process.pid
        yield f"http://127.0.0.1:{http}", pids["decode"]


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()


def wave(data: bytes) -> None:
    """Sends `data` over a plain connection, for the capture to see."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            while other.recv(1 << 16):
                pass


def memory_of(pid: int) -> bytes:
    """What is not zero of the shared memory of this process's children, where ranks keep KV: 1 KiB for 1 KiB."""
    children = [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
    found: dict[int, bytes] = {}
    for path in (file for child in children for file in Path(f"/proc/{child}/fd").iterdir()):
        if os.readlink(path).startswith("/memfd:"):
            found[path.stat().st_ino] = path.read_bytes()
    parts = (data[at : at + STRIDE] for data in found.values() for at in range(0, len(data), STRIDE))
    return b"".join(part for part in parts if part.count(0) < len(part) // 2)


async def test_kv_crosses_hosts_and_nobody_can_read_it(mesh: tuple[str, int]) -> None:
    url, decode = mesh
    tokens = list(range(10, 310))
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def ready() -> bool:
            try:
                return (await http.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready, "the gateway", READY_S)
        with Capture() as capture:
            body = {"model": "demo-model", "prompt": tokens, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
            answer = await http.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    assert_matches_reference(ROOT / MODEL, tokens, answer.json()["choices"][0]["token_ids"])
    kv = memory_of(decode)
    assert len(kv) > 64 << 10, "the pages of the prompt"
    assert capture.dropped == 0
    assert max(map(len, capture.streams.values())) > 64 << 10, "KV went over tcp"
    assert capture.found(kv) == 0
    # Where they go in plain they are found.
    with Capture() as plain:
        wave(kv)
    assert plain.found(kv) > 0.9 * len(kv) / STRIDE

"""The metrics and probe port among strangers: bounded connections, a deadline, and probes that are always answered."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvmesh import watched_files
from kvmesh.config import ServiceConfig
from kvmesh.rpc import runner
from kvmesh.rpc.certificates import make_certificates
from kvmesh.telemetry import names, readiness
from kvmesh.telemetry.metrics_server import MetricsLimits
from kvmesh.telemetry.readiness import Readiness
from tests.support.paths import ROOT

IDLE = 1_500
MOST_THREADS = 40  # of a whole service


@contextlib.contextmanager
def idle_connections(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing; those that the server has closed meanwhile are still held here."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(count)]


def ask(address: tuple[str, int], path: str, headers: str = "") -> tuple[int, bytes]:
    """Status and body; status 0: closed without an answer."""
    with socket.create_connection(address, timeout=10) as link:
        link.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        return answer_of(link)


def answer_of(link: socket.socket) -> tuple[int, bytes]:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := link.recv(1 << 16):
            said += piece
    head, _, body = said.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[int, tuple[str, int]]]:
    """A store master of its own process: pid, address of its metrics."""
    ready = tmp_path / "ready.json"
    argv = [sys.executable, "-m", "kvmesh.cli", "serve", "store", "--port=0", f"--ready-file={ready}"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.02)
            host, _, port = json.loads(ready.read_text())["metrics"].rpartition(":")
            yield process.pid, (host, int(port))
        finally:
            process.terminate()


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.slow
def test_a_service_answers_probes_among_1500_idle_connections_with_few_threads(
    store: tuple[int, tuple[str, int]],
) -> None:
    pid, address = store
    with idle_connections(address, IDLE):
        assert ask(address, "/live") == (200, b"live\n")
        assert ask(address, "/ready")[0] == 200
        assert b"kvmesh_store_" in ask(address, "/metrics")[1]
        assert threads_of(pid) <= MOST_THREADS


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, int]]]:
    state = Readiness()
    state.why_not = ""
    monkeypatch.setattr(readiness, "PROCESS", state)
    with contextlib.ExitStack() as stack:

        def start(**changed: float) -> tuple[str, int]:
            limits = MetricsLimits(**changed)  # type: ignore[arg-type]
            port, close = names.serve_metrics("127.0.0.1", 0, limits)
            stack.callback(close)
            return "127.0.0.1", port

        yield start


def test_idle_connections_cost_no_threads_and_the_oldest_go_first(server: Callable[..., tuple[str, int]]) -> None:
    before = threading.active_count()
    address = server(connections=8, timeout_s=60.0)
    with idle_connections(address, 40) as links:
        assert ask(address, "/ready") == (200, b"ready\n")
        assert threading.active_count() == before + 2
        assert [answer_of(link) for link in links[:32]] == [(0, b"")] * 32, "closed by the server"
        links[-1].sendall(b"GET /live HTTP/1.1\r\n\r\n")
        assert answer_of(links[-1]) == (200, b"live\n"), "the youngest are still served"


def test_a_request_that_does_not_end_is_closed(server: Callable[..., tuple[str, int]]) -> None:
    address = server(timeout_s=0.2)
    with socket.create_connection(address, timeout=10) as silent:
        assert answer_of(silent) == (0, b"")
    with socket.create_connection(address, timeout=10) as slow:
        slow.sendall(b"GET /live HTTP/1.1\r\nX: ")
        assert answer_of(slow) == (0, b"")


def test_what_is_asked_is_bounded_and_must_be_http(server: Callable[..., tuple[str, int]]) -> None:
    address = server()
    assert ask(address, "/live", f"X: {'a' * 9000}\r\n")[0] == 431
    assert ask(address, "/" + "a" * 9000)[0] == 431
    for request, status in ((b"POST /live HTTP/1.1\r\n\r\n", 405), (b"\x16\x03\x01 \r\n\r\n", 400)):
        with socket.create_connection(address, timeout=10) as link:
            link.sendall(request)
            assert answer_of(link)[0] == status
    assert ask(address, "/metrics?name[]=x")[0] == 200


def test_probes_are_answered_while_a_scrape_is_rendered(
    server: Callable[..., tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def collect(_self: object) -> Iterator[object]:
        begun.set()
        assert go_on.wait(30)
        return iter(())

    monkeypatch.setattr(names._Active, "collect", collect)
    address = server()
    with socket.create_connection(address, timeout=10) as scrape:
        scrape.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert begun.wait(10)
        assert ask(address, "/live") == (200, b"live\n")
        go_on.set()
        assert answer_of(scrape)[0] == 200


PROBE = ROOT / "compose" / "probe.py"


def probed(port: int, env: dict[str, str]) -> tuple[int, str]:
    argv = [sys.executable, "-IS", str(PROBE), "/live"]
    done = subprocess.run(argv, env={"KVMESH_METRICS_PORT": str(port), **env}, capture_output=True, text=True)
    return done.returncode, done.stdout.strip()


def test_with_a_certificate_the_port_speaks_tls_and_containers_probes_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "PROCESS", Readiness())
    files = make_certificates(tmp_path, ["127.0.0.1"]).files
    config = ServiceConfig(tls_cert=files.tls_cert, tls_key=files.tls_key, metrics_timeout_ms=60_000)
    trust = ssl.create_default_context(cafile=files.tls_ca)
    address, close = runner.serve_metrics(config)
    host, _, port = address.rpartition(":")
    try:
        assert ask((host, int(port)), "/metrics")[0] == 0, "plain HTTP gets nothing"
        with idle_connections((host, int(port)), 200), urlopen(f"https://{address}/metrics", context=trust) as answer:
            assert b"process_cpu_seconds_total" in answer.read()
        for env in ({}, {"KVMESH_TLS_CERT": "x"}):
            assert probed(int(port), env) == (0, "live")
        before = ssl.get_server_certificate((host, int(port)))
        renewed = make_certificates(tmp_path, ["127.0.0.1"])
        monkeypatch.setattr(watched_files, "LOOK_S", 0.0)
        assert ssl.get_server_certificate((host, int(port))) == renewed.cert.read_text() != before
        assert probed(int(port), {}) == (0, "live")
    finally:
        close()
    address, close = runner.serve_metrics(dataclasses.replace(config, metrics_tls="off", metrics_host="127.0.0.2"))
    try:
        assert address.startswith("127.0.0.2:")
        assert ask(("127.0.0.2", int(address.rpartition(":")[2])), "/live") == (200, b"live\n")
    finally:
        close()


def test_a_probe_of_plain_http_follows_whatever_the_environment_says(server: Callable[..., tuple[str, int]]) -> None:
    _, port = server()
    for env in ({}, {"KVMESH_TLS_CERT": "x"}):
        assert probed(port, env) == (0, "live")

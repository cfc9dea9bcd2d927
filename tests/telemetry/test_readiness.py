"""What orchestrators' probes hear: readiness in words, and a hung event loop."""

from __future__ import annotations

import socket
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from kvmesh.errors import ConfigError
from kvmesh.telemetry import names, readiness
from kvmesh.telemetry.readiness import SILENT_S, Readiness


def test_ready_says_why_not() -> None:
    state = Readiness()
    assert state.answer("/ready", 0.0) == (503, "starting")
    state.why_not = ""
    assert state.answer("/ready", 0.0) == (200, "ready")
    state.why_not = "rank 0 has been silent for 7.0 s"
    assert state.answer("/ready", 0.0) == (503, "rank 0 has been silent for 7.0 s")
    assert state.answer("/live", 0.0) == (200, "live"), "one that cannot serve need not be restarted"
    assert state.answer("/metrics", 0.0) is None


def test_a_hung_loop_is_neither_live_nor_ready() -> None:
    state = Readiness()
    state.why_not = ""
    state.beat(100.0)
    assert state.answer("/live", 100.0 + SILENT_S) == (200, "live")
    for path in ("/live", "/ready"):
        answer = state.answer(path, 101.0 + SILENT_S)
        assert answer is not None and answer[0] == 503 and "has not turned for 16 s" in answer[1]
    state.beat(200.0)
    assert state.answer("/ready", 200.5) == (200, "ready")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_beside_the_metrics(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Readiness()
    monkeypatch.setattr(readiness, "PROCESS", state)
    port, close = names.serve_metrics(host, 0)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        with pytest.raises(HTTPError) as caught:
            urlopen(f"{url}/ready", timeout=10)
        assert caught.value.code == 503 and caught.value.read() == b"starting\n"
        caught.value.close()
        state.why_not = ""
        with urlopen(f"{url}/ready", timeout=10) as answer:
            assert answer.read() == b"ready\n"
        with urlopen(f"{url}/metrics", timeout=10) as answer:
            assert b"process_cpu_seconds_total" in answer.read()
        with pytest.raises(ConfigError, match=f"metrics_port={port}: the port is in use"):
            names.serve_metrics(host, port)
    finally:
        close()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((host, port))  # closed

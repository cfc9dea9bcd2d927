"""`kvmesh serve` as a process: configuration from three places, the ready file, and a quiet end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmesh.cli.up.plan import Ports


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_service_alone_from_file_environment_and_flags(tmp_path: Path, number: signal.Signals) -> None:
    by_file, by_environment, by_flag = Ports().take(), Ports().take(), tmp_path / "flag.json"
    config = tmp_path / "store.toml"
    config.write_text(f'port = {by_file}\nmetrics_port = {by_file}\nready_file = "{tmp_path}/file.json"\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "kvmesh.cli", "serve", "store", "--config", str(config), "--ready-file", str(by_flag)],
        env={**os.environ, "KVMESH_PORT": str(by_environment), "KVMESH_HTTP_PORT": "1"},  # another service's key
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        assert any("serving address=" in line for line in iter(process.stdout.readline, ""))
        deadline = time.monotonic() + 30
        while not by_flag.exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
        told = json.loads(by_flag.read_text())
        assert told["pid"] == process.pid
        assert told["address"] == f"127.0.0.1:{by_environment}"
        assert told["metrics"] == f"127.0.0.1:{by_file}"
        assert not (tmp_path / "file.json").exists()
        with socket.create_connection(("127.0.0.1", by_environment), timeout=30):
            pass
        process.send_signal(number)
        rest, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, rest
    assert rest.strip().endswith("stopped")

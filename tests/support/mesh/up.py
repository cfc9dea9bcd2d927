"""`kvmesh up` on one of several machines, which are network namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.mesh.namespaces import Machine, metric, until

START_S = 120.0


class Up:
    """`kvmesh up` on one machine; `printed` so far."""

    def __init__(self, machine: Machine, folder: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.machine, self.run_dir = machine, folder / "run"
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
        self.env |= env or {}
        self.log = folder / "up.log"
        folder.mkdir(parents=True, exist_ok=True)
        argv = self._argv("up", *args, "--dtype=float32", "--memory-mb=64", "--no-prompt", f"--run-dir={self.run_dir}")
        with self.log.open("w") as out:
            self.process = subprocess.Popen(argv, env=self.env, stdout=out, stderr=subprocess.STDOUT)

    def _argv(self, *args: str) -> list[str]:
        return self.machine.inside(sys.executable, "-m", "kvmesh.cli", *args)

    def ready(self) -> Up:
        """Once it says how to go on."""
        until(lambda: "Ctrl-C" in self.printed or self.process.poll() is not None, "up", START_S)
        assert "Ctrl-C" in self.printed, self.printed
        return self

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def call(self, *args: str) -> tuple[int, str]:
        """Another command there: exit status, what it printed."""
        done = subprocess.run(self._argv(*args), env=self.env, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "mesh.json").read_text())
        return found

    def metric(self, process: str, name: str, *labels: str) -> float:
        return self.machine.call(metric, self.told()["services"][process]["metrics"], name, *labels)

    def tokens(self) -> float:
        """That its decode instance has made."""
        return self.metric("decode-0", "kvmesh_decode_output_tokens_total")

    def over_tcp(self) -> float:
        """KV bytes that its instances have moved over tcp: between machines, as within one it goes over shm."""
        one = "kvmesh_node_transfer_bytes_total"
        return sum(self.metric(process, one, 'transport="tcp"') for process in ("prefill-0", "decode-0"))

    def stop(self) -> str:
        """As Ctrl-C does; what it has printed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        return self.printed

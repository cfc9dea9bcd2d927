"""An engine in a process of its own (`engine_side.py`), stopped (SIGSTOP) whenever it is not asked: its threads take
nothing from the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.link import PeerMissing

SIDE = Path(__file__).parent / "engine_side.py"
READY_S, ANSWER_S = 300, 400


class SideSpec(NamedTuple):
    """Says which of `engine_side.SIDES` runs, in which environment, over which checkout's code (None: no kvmesh)."""

    kind: str
    python: str
    checkout: Path | None = None


class Engine:
    """Drives one side's process. `kv_bytes` is the pool of KV that it gets, if it has one of its own. Raises
    PeerMissing with the end of its log where it does not start."""

    def __init__(self, name: str, side: SideSpec, model: Path, threads: int, kv_bytes: int) -> None:
        self.name = name
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONPATH"] = str(side.checkout or "")
        self._log = Path(os.environ.get("TMPDIR", "/tmp")) / f"engine-{name}-{os.getpid()}.log"
        started = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [side.python, str(SIDE), side.kind, str(model), str(kv_bytes), str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env, start_new_session=True,
            )  # fmt: skip
        try:
            self._read(READY_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - started
        self._signal(signal.SIGSTOP)

    def ask(self, **request: Any) -> dict[str, Any]:
        """The side's answer. PeerMissing with the end of its log when it has died."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._read(ANSWER_S)
        finally:
            self._signal(signal.SIGSTOP)

    def _read(self, seconds: float) -> dict[str, Any]:
        def give_up(*_: object) -> None:
            raise PeerMissing(f"{self.name} said nothing for {seconds:.0f} s, see {self._log}")

        assert self._process.stdout is not None
        previous = signal.signal(signal.SIGALRM, give_up)
        signal.alarm(int(seconds))
        try:
            line = self._process.stdout.readline()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        if not line:
            raise PeerMissing(f"{self.name} ended: {self._last_words()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:])[-400:]

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the process and what it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait(10)
        self._log.unlink(missing_ok=True)

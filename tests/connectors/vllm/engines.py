"""Starts vLLM engines and a store for tests: real processes, each of which its owner stops."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.paths import ROOT

HERE = Path(__file__).parent
PYTHON_ENV = "PYTHON_OF_VLLM"
START_S, ANSWER_S, STOP_S = 580.0, 300.0, 30.0
BLOCK_TOKENS = 32
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": BLOCK_TOKENS,
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "distributed_executor_backend": "uni",
}


def python_of_vllm() -> str:
    return os.environ.get(PYTHON_ENV, "")


def make_model(folder: Path, seed: int, **fields: Any) -> Path:
    command = [python_of_vllm(), str(HERE / "tiny_model.py"), str(folder), str(seed), json.dumps(fields)]
    subprocess.run(command, check=True, timeout=START_S, capture_output=True)
    return folder


def transfer_config(store: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvmeshConnector",
        "kv_connector_module_path": "kvmesh.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "namespace": "tests", **extra},
    }


class EngineProcess:
    """Is one vLLM engine in a process of its own (its engine core and worker are threads of it, which saves a minute
    of imports; with tensor parallelism each worker is a process). `log` has what it printed."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any],
        log: Path,
        env: dict[str, str] | None = None,
        driver: Path | None = None,
        **options: Any,
    ) -> None:
        env = {
            **os.environ,
            **(env or {}),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        words = [json.dumps(transfer), json.dumps({**OPTIONS, **options})]
        self.log = log
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [python_of_vllm(), str(driver or HERE / "engine_driver.py"), str(model), *words],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                if line.startswith("@"):
                    self._lines.put(line[1:])
        self._lines.put(None)

    def _told(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            line = None
        assert line is not None, f"no answer within {timeout_s} s:\n{self.log.read_text()[-4000:]}"
        told: dict[str, Any] = json.loads(line)
        return told

    def wait_ready(self) -> None:
        self._told(START_S)

    def ask(
        self, *prompts: list[int], max_tokens: int = 8, forget: bool = False, transfer: dict[str, Any] | None = None
    ) -> None:
        """Begins to answer prompts; `forget`: vLLM's own prefix cache is emptied before. `transfer`: kv_transfer_params
        of these requests."""
        assert self._process.stdin is not None
        asked = {"prompts": prompts, "max_tokens": max_tokens, "forget": forget, "transfer": transfer}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return self._told(ANSWER_S)

    def run(self, *prompts: list[int], **more: Any) -> dict[str, Any]:
        self.ask(*prompts, **more)
        return self.answer()

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        self._reader.join(STOP_S)
        self._process.stdout.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class StoreProcess:
    """Is `kvmesh serve store` or `kvmesh serve pool`, with its ranks."""

    def __init__(self, role: str, log: Path, *options: str, port: int = 0) -> None:
        self.address = f"127.0.0.1:{port or free_port()}"
        command = [sys.executable, "-m", "kvmesh.cli", "serve", role, "--port", self.address.rpartition(":")[2]]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [*command, "--metrics-port", "0", *options], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT
            )

    def _all(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def freeze(self) -> None:
        for one in self._all():
            one.suspend()

    def thaw(self) -> None:
        for one in self._all():
            one.resume()

    def kill(self) -> None:
        for one in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._process.wait(STOP_S)

    def stop(self) -> None:
        if self._process.poll() is None:
            self.kill()


@contextlib.contextmanager
def store_processes(folder: Path, *, memory_mb: int = 256) -> Iterator[tuple[StoreProcess, StoreProcess]]:
    """Yields a master and a pool node."""
    master = StoreProcess("store", folder / "store.log")
    pool = start_pool(folder, master, memory_mb=memory_mb)
    try:
        yield master, pool
    finally:
        pool.stop()
        master.stop()


def start_pool(folder: Path, master: StoreProcess, *, memory_mb: int = 256) -> StoreProcess:
    return StoreProcess("pool", folder / "pool.log", "--store", master.address, "--memory-mb", str(memory_mb))

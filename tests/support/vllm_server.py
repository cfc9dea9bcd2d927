"""vLLM's own server as a process: for tests and benchmarks that have a Python with vllm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.support.mesh.client import until

PYTHON_ENV = "PYTHON_OF_VLLM"
START_S = 500.0  # some processes that import torch and vllm at once, on a slow machine


@contextlib.contextmanager
def vllm_server(model: Path, port: int, log: Path, name: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a server, in a process group of its own that ends with it. Its cache is 1 GiB unless `more` says how many
    blocks it has."""
    argv = [os.environ[PYTHON_ENV], "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    argv += ["--served-model-name", name, "--enable-prompt-tokens-details", *more]
    env = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("PYTHONPATH", None)
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.STDOUT, process_group=0)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def wait_healthy(servers: Sequence[tuple[str, subprocess.Popen[bytes], Path]]) -> None:
    """Returns when all of these (URL, process, log) answer. Raises AssertionError with the log of one that has
    ended."""
    async with httpx.AsyncClient(timeout=60) as http:
        for url, process, log in servers:

            async def up(url: str = url, process: subprocess.Popen[bytes] = process, log: Path = log) -> bool:
                if process.poll() is not None:
                    raise AssertionError((await asyncio.to_thread(log.read_text))[-2000:])
                with contextlib.suppress(httpx.HTTPError):
                    return (await http.get(f"{url}/health")).status_code == 200
                return False

            await until(up, url, START_S)

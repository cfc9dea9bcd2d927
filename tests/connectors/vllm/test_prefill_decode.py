"""Two real vLLM servers, one of which pushes prompts to the other: the answers are those of one vLLM alone, whatever
happens to who pushes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.connectors.vllm.engines import BLOCK_TOKENS, PYTHON_ENV, free_port, python_of_vllm
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not python_of_vllm(), reason=f"{PYTHON_ENV} names no Python with vLLM (`make vllm-env` prints one)"
    ),
]

START_S, STOP_S = 900.0, 30.0
SLOW_S = 60.0  # a request that takes longer hangs: its push has 1.5 s, its tokens a second
BLOCKS = 24  # of each engine: two prompts of 330 tokens fit, and a third waits for pages
CONFIG = {
    "kv_connector": "KvmeshConnector",
    "kv_connector_module_path": "kvmesh.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "pool": False,
        "push": True,
        "push_timeout_ms": 1_500,
        "push_staging_mb": 1,  # eight blocks a window, so that a prompt has two
        "push_threads": 1,
        "hold_ms": 3_000,
        "pause_ms": 0,
        "model_identity": "demo",
    },
}
OPTIONS = {
    "dtype": "float32",
    "max-model-len": "512",
    "max-num-seqs": "4",
    "block-size": str(BLOCK_TOKENS),
    "num-gpu-blocks-override": str(BLOCKS),
    "served-model-name": "m",
}


def prompt(seed: int, tokens: int = 330) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 1900) for _ in range(tokens)]


class VllmServer:
    """Is a process that serves completions, with all its children."""

    def __init__(self, argv: list[str], log: Path, **more: str) -> None:
        self.log = log
        host = argv[argv.index("--host") + 1] if "--host" in argv else "127.0.0.1"
        self.url = f"http://{host}:{argv[argv.index('--port') + 1]}"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **more,
        }
        with log.open("w") as out:
            self._process = subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.STDOUT)

    def wait_ready(self, path: str) -> None:
        end = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None and time.monotonic() < end, self.log.read_text()[-4000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + path, timeout=5.0).status_code < 500:
                    return
            time.sleep(0.5)

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
        if self._process.poll() is None:
            for one in self._all():
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            self._process.wait(STOP_S)

    def complete(self, tokens: list[int], max_tokens: int = 12, transfer: dict[str, Any] | None = None) -> Any:
        """Returns the answer's token ids, and the answer itself with the `seconds` that it took."""
        body: dict[str, Any] = {"model": "m", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0}
        body |= {"return_token_ids": True, "ignore_eos": True, "kv_transfer_params": transfer}
        begun = time.perf_counter()
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=SLOW_S)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        told["seconds"] = time.perf_counter() - begun
        return told["choices"][0]["token_ids"], told

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Has a prompt computed for another engine, and returns where its KV is."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
        _, told = self.complete(tokens, 1, asked)
        params: dict[str, Any] = told["kv_transfer_params"]
        assert params["do_remote_prefill"] and params["remote_num_tokens"] == len(tokens), params
        return params


def taken(server: VllmServer) -> float:
    """Returns how many tokens an engine has had from others, or waited for."""
    lines = httpx.get(f"{server.url}/metrics", timeout=SLOW_S).text.splitlines()
    named = [line for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")]
    return sum(float(line.rpartition(" ")[2]) for line in named)


@contextlib.contextmanager
def servers(model: Path, folder: Path) -> Iterator[tuple[VllmServer, VllmServer, VllmServer]]:
    """Yields two vLLM servers and the example's proxy before them."""
    made: list[VllmServer] = []
    try:
        for at in range(2):
            argv = [python_of_vllm(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            argv += ["--host", "127.0.0.1", "--port", str(free_port()), "--enforce-eager"]
            argv += ["--enable-prompt-tokens-details"]
            argv += [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
            module = {} if at else {"kv_connector_module_path": "tests.connectors.vllm.striking_connector"}
            argv += ["--kv-transfer-config", json.dumps(CONFIG | module)]
            made.append(VllmServer(argv, folder / f"vllm-{at}.log", STRIKE_FILE=str(folder / "strike")))
        script = str(ROOT / "examples" / "prefill_decode_proxy.py")
        urls = ["--prefill", made[0].url, "--decode", made[1].url, "--port", str(free_port())]
        made.append(VllmServer([sys.executable, script, *urls], folder / "proxy.log"))
        for one, path in zip(made, ("/health", "/health", "/"), strict=True):
            one.wait_ready(path)
        yield made[0], made[1], made[2]
    finally:
        for one in made:
            one.kill()


def test_a_prefill_vllm_pushes_to_a_decode_vllm(tmp_path: Path) -> None:
    with servers(ROOT / "examples" / "demo-model", tmp_path) as (a, b, proxy):
        tokens_taken = 0
        for seed, tokens in ((1, 330), (2, 20), (3, 320), (4, 33)):
            asked = prompt(seed, tokens)
            alone, _ = a.complete(asked)
            found, _ = b.complete(asked, transfer=a.prefill(asked))
            tokens_taken += tokens
            assert (found, taken(b)) == (alone, tokens_taken)

        other = prompt(5)  # a router that mixes requests up: the KV of another prompt is not taken
        alone, _ = a.complete(other)
        found, _ = b.complete(other, transfer=a.prefill(prompt(6)))
        assert (found, taken(b)) == (alone, tokens_taken)
        assert "tokens, adapter, cache salt, weights or configuration differ" in b.log.read_text()
        b.complete(prompt(7, 40), transfer={"do_remote_prefill": True, "remote_host": "nobody"})
        assert "kv_transfer_params.remote_ranks" in b.log.read_text() and taken(b) == tokens_taken

        routed = prompt(8)  # any router that speaks vLLM's protocol
        found, _ = proxy.complete(routed)
        tokens_taken += len(routed)
        assert (found, taken(b)) == (a.complete(routed)[0], tokens_taken)

        stuck = prompt(9)
        alone, _ = a.complete(stuck)
        params = a.prefill(stuck)
        a.freeze()
        found, told = b.complete(stuck, transfer=params)
        a.thaw()
        assert found == alone and told["seconds"] < SLOW_S
        cut = prompt(30)  # it freezes itself in the middle of the second window
        alone, _ = a.complete(cut)
        params = a.prefill(cut)
        strike = tmp_path / "strike"
        strike.touch()
        found, told = b.complete(cut, transfer=params)
        a.thaw()
        assert found == alone and told["seconds"] < SLOW_S and not strike.exists()
        again = prompt(10)
        tokens_taken = taken(b) + len(again)
        found, _ = b.complete(again, transfer=a.prefill(again))
        assert (found, taken(b)) == (a.complete(again)[0], tokens_taken)

        for seed in range(11, 17):  # a decode that never comes: each third prompt needs pages of those before
            assert a.prefill(prompt(seed))

        last = prompt(20)
        alone, _ = a.complete(last)
        params = a.prefill(last)
        a.kill()
        found, told = b.complete(last, transfer=params)
        assert found == alone and told["seconds"] < SLOW_S
        lonely = prompt(21)  # the proxy's prefill is dead
        found, _ = proxy.complete(lonely)
        assert found == b.complete(lonely)[0]
        for seed in range(22, 28):  # and a decode that was killed is one that never comes
            assert b.prefill(prompt(seed))

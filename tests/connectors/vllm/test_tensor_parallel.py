"""Real vLLM engines of two ranks each, which are processes: what one has computed another one loads, rank by rank, and
what any rank cannot load is computed by all of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.engines import (
    BLOCK_TOKENS,
    PYTHON_ENV,
    EngineProcess,
    make_model,
    python_of_vllm,
    store_processes,
    transfer_config,
)
from tests.connectors.vllm.test_vllm import TOKENS, engines, prompt, wait_joined, wait_stored

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not python_of_vllm(), reason=f"{PYTHON_ENV} names no Python with vLLM (`make vllm-env` prints one)"
    ),
]

RANKS = 2
BLOCKS = TOKENS // BLOCK_TOKENS  # full ones of a prompt
LOADED = BLOCKS * BLOCK_TOKENS
PARALLEL: dict[str, Any] = {
    "tensor_parallel_size": RANKS,
    "distributed_executor_backend": "mp",
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}
MODULE = "tests.connectors.vllm.lossy_rank_connector"


class RankFault:
    """Has one rank of an engine fail. `told` says for each load whose end a rank has told where it came from, and how
    many pages it lacked."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "fault.json"

    @contextlib.contextmanager
    def __call__(self, *, rank: int | None, block: int | None, last: int) -> Iterator[None]:
        for one in range(RANKS):
            self._told(one).unlink(missing_ok=True)
        self.file.write_text(json.dumps({"rank": rank, "block": block, "last": last}))
        yield
        self.file.unlink()

    def _told(self, rank: int) -> Path:
        return self.file.with_suffix(f".rank{rank}")

    def told(self, rank: int) -> list[str]:
        return self._told(rank).read_text().splitlines()


def prefill(engine: EngineProcess, tokens: list[int]) -> dict[str, Any]:
    """Has a prompt computed for another engine, and returns where its KV is."""
    params: dict[str, Any] = engine.run(tokens, max_tokens=1, transfer={"do_remote_decode": True})["transfer"]
    assert params["tp_size"] == RANKS and len(params["remote_ranks"]) == RANKS
    return params


def test_engines_of_two_ranks_share_a_pool_and_push(tmp_path: Path) -> None:
    """A answers first, by computing: its tokens are the reference. B has A's prefixes by the pool or by pushes, while
    one of its ranks fails. C has one rank: its cut of the KV is another one, so it has nothing of theirs."""
    model = make_model(tmp_path / "model", 3)
    fault = RankFault(tmp_path)
    parallel = {**PARALLEL, "env": {**PARALLEL["env"], "FAULT_FILE": str(fault.file)}}
    with store_processes(tmp_path) as (master, pool):
        config = transfer_config(master.address, push=True, host="127.0.0.1", pause_ms=0)
        lossy = {**config, "kv_connector_module_path": MODULE}
        wait_joined(master, pool)
        with engines(tmp_path, model, config, lossy, **parallel) as (a, b):
            prompts = [prompt(seed) for seed in range(6)]
            expected = a.run(*prompts, max_tokens=12)
            assert expected["cached"] == [0] * 6
            answers = expected["tokens"]
            wait_stored(master, pool, 6 * BLOCKS * RANKS)

            told = b.run(prompts[0], max_tokens=12)
            assert (told["tokens"], told["cached"]) == (answers[:1], [LOADED])

            with fault(rank=1, block=0, last=0):  # one rank has nothing, and says so before the other has all
                told = b.run(prompts[1], max_tokens=12)
            assert told["tokens"] == answers[1:2]
            assert (fault.told(1), fault.told(0)) == ([f"pool {BLOCKS}"], ["pool 0"])  # it is not loaded again
            with fault(rank=1, block=4, last=0):
                told = b.run(prompts[2], max_tokens=12)
            assert told["tokens"] == answers[2:3]
            assert (fault.told(1), fault.told(0)) == ([f"pool {BLOCKS - 4}"], ["pool 0"])
            with fault(rank=0, block=2, last=0):  # and after the other has all
                told = b.run(prompts[3], max_tokens=12)
            assert told["tokens"] == answers[3:4]
            assert (fault.told(1), fault.told(0)) == (["pool 0"], [f"pool {BLOCKS - 2}"])
            wait_stored(master, pool, 6 * BLOCKS * RANKS)  # what was lost is saved again
            again = a.run(*prompts[1:4], max_tokens=12, forget=True)
            assert (again["tokens"], again["cached"]) == (answers[1:4], [LOADED] * 3)

            pushed = prompt(10)
            params = prefill(a, pushed)
            with fault(rank=None, block=None, last=1):
                told = b.run(pushed, max_tokens=12, transfer=params)
            assert fault.told(0) == fault.told(1) == ["push 0"]
            assert told["tokens"] == a.run(pushed, max_tokens=12)["tokens"]
            refused = prompt(11)
            params = prefill(a, refused)
            with fault(rank=1, block=None, last=0):
                told = b.run(refused, max_tokens=12, transfer=params)
            assert told["tokens"] == a.run(refused, max_tokens=12)["tokens"]
            assert fault.told(1) == [f"push {BLOCKS + 1}", "pool 0"]  # A has saved it, too
            assert fault.told(0) == ["push 0", "pool 0"]

            kept = prompt(12)
            params = prefill(a, kept)
            (tmp_path / "c").mkdir()
            with engines(tmp_path / "c", model, config) as (c,):
                told = c.run(*prompts, max_tokens=12)
                assert (told["tokens"], told["cached"]) == (answers, [0] * 6)
                told = c.run(kept, max_tokens=12, transfer=params)
                assert told["tokens"] == a.run(kept, max_tokens=12)["tokens"]
                assert "tp_size=2 there and 1 here" in c.log.read_text()
                fresh = prompt(13)
                expected = c.run(fresh, max_tokens=12)
                wait_stored(master, pool, BLOCKS * (9 * RANKS + 8))  # 9 prompts of A, 8 of C
                told = a.run(fresh, max_tokens=12)
                assert (told["tokens"], told["cached"]) == (expected["tokens"], [0])

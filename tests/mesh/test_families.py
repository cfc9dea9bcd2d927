"""Every model family through real instances, whatever way the KV took: cold, over a prefix that is here already, in
chunks, preempted and resumed; in one instance of two ranks, from one instance to another, and between instances that
cut the model differently. float32 tokens are transformers'; bfloat16 log-probabilities are as close as its own.

docs/reports/parity.md is the table of these cells.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint, prompts, save_tokenizer
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.mesh.client import Answer
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import Running
from tests.support.reference import Forced, assert_as_close_as_reference, assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK, CHUNK, TOP = 16, 48, 20
LONG, ANSWER = 131, 8  # three chunks
CROWD, CROWD_ANSWER = 6, 40  # three of them outgrow PAGES
PAGES = 12
ROUNDS = 15  # of the crowd, until somebody had to leave: on a busy machine they may come one after the other

# Prompts are longer than every window and than longrope's original context. Shapes are odd on purpose: GQA ratios 1, 2,
# 4 and 7, one KV head that two ranks share, tied and untied, head_dim ≠ hidden / heads, each rope scaling, odd
# vocabularies, one file and several.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": FAMILY_ZOO["llama3"]
    | {"num_attention_heads": 14, "hidden_size": 112, "head_dim": 18, "tie_word_embeddings": True, "vocab_size": 389},
    "mistral": FAMILY_ZOO["mistral-some"] | {"num_key_value_heads": 4, "rope": "linear", "vocab_size": 517},
    "qwen2": FAMILY_ZOO["qwen2"] | {"rope": "yarn", "tie_word_embeddings": True, "vocab_size": 333},
    "qwen3": FAMILY_ZOO["qwen3"] | {"num_key_value_heads": 1, "head_dim": 40, "shards": 3, "vocab_size": 411},
    "gemma2": FAMILY_ZOO["gemma2"] | {"num_attention_heads": 8},
    "gemma3": FAMILY_ZOO["gemma3"],
    "phi3": FAMILY_ZOO["phi3"] | {"sliding_window": 24, "original_max_position_embeddings": 4},
    "qwen3_moe": FAMILY_ZOO["qwen3_moe"],
    "olmo3": FAMILY_ZOO["olmo3"],
    "glm4_moe": FAMILY_ZOO["glm4_moe"],
    "deepseek_v2": FAMILY_ZOO["deepseek_v2"],
    "deepseek_v3": FAMILY_ZOO["deepseek_v3"],
    "gpt_oss": FAMILY_ZOO["gpt_oss"],
    "llama4": FAMILY_ZOO["llama4"],
    "qwen3_next": {},
}
# The one whose pages differ most from the plain ones, which all other meshes have; windows in their groups are in
# test_cache_groups.py. Services depend on nothing else.
IN_CI = {"deepseek_v3"}
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.long]) for name in FAMILIES]
)
BOUNDED = ("phi3",)  # all layers have a window: rows hardly grow, so that nobody may have to leave

# Instances of one rank and of two for each precision, with few pages.
HALF = {"dtype": "bfloat16", "served_name": "half"}
FLAGS: dict[str, dict[str, Any]] = {
    "conductor": {"slo_tbt_ms": 60_000},  # what is slow on a busy machine is answered all the same
    "coupled": {"prefill_chunk_tokens": CHUNK, "num_pages": PAGES, "num_extents": 2 * PAGES},
    "coupled-1": {"tensor_parallel": 2},
    "coupled-2": HALF,
    "coupled-3": HALF | {"tensor_parallel": 2},
}
RANKS = {name: FLAGS.get(name, {}).get("tensor_parallel", 1) for name in ("coupled-0", *FLAGS) if name != "conductor"}

MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]
Asked = list[tuple[list[int], Answer]]


@EACH
async def test_every_way(name: str, tmp_path: Path, mesh: MeshFactory) -> None:
    """One rank and two, each by itself and each handing over to the other."""
    if name == "qwen3_next":
        path = make_qwen3_next(tmp_path / name, gain=2.0)  # bfloat16 rounds states, too
        save_tokenizer(path, 331, 512)
    else:
        path = make_checkpoint(tmp_path / name, seed=len(name), **FAMILIES[name])
    async with mesh(path, block_tokens=BLOCK, prefill=0, decode=0, coupled=4, flags=FLAGS) as running:
        for instance in running.instances():
            await running.ready(instance)
        direct = await Direct.of(running, name)
        for way in itertools.product(("coupled-0", "coupled-1"), repeat=2):
            for prompt, answer in await every_situation(name, direct, *way):
                assert_matches_reference(path, prompt, answer.tokens)
        await through_the_gateway(running, path)
        direct = await Direct.of(running, "half")
        for way in (("coupled-2", "coupled-3"), ("coupled-3", "coupled-3")):
            asked = await every_situation(name, direct, *way, logprobs=True, top_logprobs=TOP)
            assert_as_close_as_reference(path, [forced(*one) for one in asked])
        await running.settled()


def forced(prompt: list[int], answer: Answer) -> Forced:
    """What the instance said, over its own tokens."""
    assert [len(told) for told in answer.logprobs] == [TOP] * len(answer.tokens)
    return [*prompt, *answer.tokens[:-1]], len(prompt), answer.logprobs


async def every_situation(name: str, direct: Direct, prefill: str, decode: str, **sampling: Any) -> Asked:
    """A long prompt cold and in chunks, then over its prefix, and a crowd of which some are preempted and resumed. What
    was asked, with the answers; each situation is seen to have come about."""
    metrics = Metrics(direct)

    async def ask(prompt: list[int], tokens: int) -> Answer:
        answer = await direct.generate(
            prompt, tokens, prefill=prefill, decode=decode, salt=f"{prefill} {decode}", **sampling
        )
        assert (answer.error, len(answer.tokens)) == (None, tokens)
        assert answer.timings is not None
        assert bool(answer.timings.transfer_bytes) == (prefill != decode)
        return answer

    [long] = prompts(1, 300, seed=21, low=LONG, high=LONG + 1)
    crowd = prompts(CROWD, 300, seed=22, low=5, high=40)
    steps = await metrics.of(prefill, "prefill_step_seconds_count")
    cold = await ask(long, ANSWER)
    assert cold.cached_tokens == 0
    chunks = (await metrics.of(prefill, "prefill_step_seconds_count") - steps) / RANKS[prefill]  # each counts its steps
    assert chunks == (4 if name == "qwen3_next" else 3), "not in chunks"  # one ends where a snapshot is kept
    warm = await ask(long, ANSWER)
    assert warm.cached_tokens == LONG // BLOCK * BLOCK
    asked, before = [(long, cold), (long, warm)], await metrics.of(decode, "decode_preemptions_total")
    for _ in range(ROUNDS):
        answers = await asyncio.gather(*(ask(prompt, CROWD_ANSWER) for prompt in crowd))
        asked += zip(crowd, answers, strict=True)
        if name in BOUNDED or await metrics.of(decode, "decode_preemptions_total") > before:
            return asked
    raise AssertionError("nobody had to leave")


class Metrics:
    def __init__(self, direct: Direct) -> None:
        self._processes = direct.running.mesh.processes

    async def of(self, instance: str, name: str) -> float:
        async with httpx.AsyncClient() as http:
            told = (await http.get(f"http://{self._processes[instance].spec.metrics}/metrics", timeout=10)).text
        found = [line.split() for line in told.splitlines() if line.startswith(f"kvmesh_{name}")]
        assert len(found) == 1, (instance, name, found)
        return float(found[0][1])


async def through_the_gateway(running: Running, path: Path) -> None:
    """Placed by the conductor, sixteen at once."""
    asked = [prompts(1, 300, seed=100 + n, low=5 + 7 * n, high=6 + 7 * n)[0] for n in range(16)]
    answers = await asyncio.gather(*(running.client.generate(prompt, 10) for prompt in asked))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.error is None
        assert_matches_reference(path, prompt, answer.tokens)

"""Models of several cache groups on a mesh that keeps them group by group: windows, chunks and states are handed over,
adopted, preempted, found again, and moved when an instance leaves or dies. float32 tokens are transformers'.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint, prompts, save_tokenizer
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.mesh.client import Answer, pools
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK, CHUNK, PAGES = 16, 48, 14
LONG, ANSWER = 131, 40
CROWD, CROWD_ANSWER = 6, 64  # of them some outgrow PAGES
ROUNDS = 5
GROUPS = {"gemma3": 2, "gpt_oss": 2, "llama4": 2, "qwen3_next": 3}
FLAGS: dict[str, dict[str, Any]] = {
    "*": {"cache_groups": True, "dtype": "float32", "num_extents": 3 * PAGES},
    "conductor": {"slo_tbt_ms": 60_000},
    "coupled": {"prefill_chunk_tokens": CHUNK, "num_pages": PAGES},
    "prefill": {"prefill_chunk_tokens": CHUNK, "num_pages": 3 * PAGES},
    "decode": {"num_pages": PAGES, "stop_grace_ms": 100},
    "gateway": {"max_migrations": 4, "token_timeout_s": 10.0},
}
MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


def cases(in_ci: Collection[tuple[str, Any]], values: Sequence[Any]) -> list[Any]:
    """Every family with every value: those of which CI has no need are marked."""
    every = itertools.product(GROUPS, values)
    return [
        pytest.param(*case, marks=[] if case in in_ci else [pytest.mark.long], id="-".join(map(str, case)))
        for case in every
    ]


def checkpoint(name: str, folder: Path) -> Path:
    if name == "qwen3_next":
        path = make_qwen3_next(folder / name)
        save_tokenizer(path, 331, 512)
        return path
    return make_checkpoint(folder / name, seed=len(name), **FAMILY_ZOO[name])


async def preemptions(running: Running, instance: str) -> float:
    async with httpx.AsyncClient() as http:
        address = running.mesh.processes[instance].spec.metrics
        told = (await http.get(f"http://{address}/metrics", timeout=10)).text
    found = [line.split() for line in told.splitlines() if line.startswith("kvmesh_decode_preemptions_total")]
    return float(found[0][1])


SITUATIONS = {("gemma3", "adopted"), ("qwen3_next", "handed over"), ("qwen3_next", "adopted")}


@pytest.mark.parametrize(("name", "ways"), cases(SITUATIONS, ["handed over", "adopted"]))
async def test_in_every_situation(name: str, ways: str, tmp_path: Path, mesh: MeshFactory) -> None:
    """Cold and in chunks, over what is here already, over an answer, and a crowd of which some are preempted."""
    path = checkpoint(name, tmp_path)
    adopted = ways == "adopted"
    kinds = {"prefill": 0, "decode": 0, "coupled": 1} if adopted else {"prefill": 1, "decode": 1}
    async with mesh(path, block_tokens=BLOCK, flags=FLAGS, **kinds) as running:
        direct = await Direct.of(running, name)
        prefill, decode = ("coupled-0", "coupled-0") if adopted else ("prefill-0", "decode-0")
        counted = await pools(running.mesh.addresses[decode], "decode")
        assert len(counted.groups) == GROUPS[name], "it is not kept group by group"

        async def ask(prompt: list[int], tokens: int) -> Answer:
            answer = await direct.generate(prompt, tokens, prefill=prefill, decode=decode)
            assert (answer.error, len(answer.tokens)) == (None, tokens)
            assert_matches_reference(path, prompt, answer.tokens)
            return answer

        [long] = prompts(1, 300, seed=21, low=LONG, high=LONG + 1)
        cold = await ask(long, ANSWER)
        assert cold.cached_tokens == 0
        warm = await ask(long, ANSWER)
        assert warm.cached_tokens == LONG // BLOCK * BLOCK
        if adopted:  # the next turn finds the answer's last full block, too, whatever the model keeps
            turn = await ask([*long, *warm.tokens, 5, 6, 7], 3)
            assert turn.cached_tokens == (LONG + ANSWER - 1) // BLOCK * BLOCK
        crowd = prompts(CROWD, 300, seed=22, low=5, high=40)
        for _ in range(ROUNDS):
            await asyncio.gather(*(ask(prompt, CROWD_ANSWER) for prompt in crowd))
            if await preemptions(running, decode):
                break
        else:
            raise AssertionError("nobody had to leave")
        await running.settled()


@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.long), "qwen3_next"])
async def test_steps_run_ahead(name: str, tmp_path: Path, mesh: MeshFactory) -> None:
    """On a device that runs behind the host, which lands in host memory and launches a step before it has read the one
    before: rows end in steps in vain, and a turn goes on from the state that they left at the last block border."""
    path = checkpoint(name, tmp_path)
    device = {"device": "cpu-staged", "async_steps": "on", "num_pages": 3 * PAGES}
    flags = FLAGS | {"coupled": FLAGS["coupled"] | device}
    async with mesh(path, block_tokens=BLOCK, prefill=0, decode=0, coupled=2, flags=flags) as running:
        direct = await Direct.of(running, name)

        async def ask(prompt: list[int], stop: list[int]) -> list[int]:
            answer = await direct.generate(
                prompt, 21, prefill="coupled-1", decode="coupled-0", stop_token_ids=stop, pulls=[("coupled-0", 0, 1)]
            )
            assert answer.error is None
            return answer.tokens

        async def converse(prompt: list[int]) -> None:
            whole = await ask(prompt, [])
            assert_matches_reference(path, prompt, whole)
            last = whole[10]  # the answer ends with it while the next step runs
            cut = await ask(prompt, [last])
            assert cut == whole[: whole.index(last) + 1]
            turn = [*prompt, *cut, 5, 6, 7]
            assert_matches_reference(path, turn, await ask(turn, []))

        await asyncio.gather(*(converse(prompt) for prompt in prompts(6, 300, seed=24, low=20, high=60)))
        await running.settled()


ENDS = {("gpt_oss", signal.SIGTERM), ("qwen3_next", signal.SIGTERM), ("llama4", signal.SIGKILL)}


@pytest.mark.parametrize(("name", "how"), cases(ENDS, [signal.SIGTERM, signal.SIGKILL]))
async def test_an_answer_goes_on_elsewhere(name: str, how: signal.Signals, tmp_path: Path, mesh: MeshFactory) -> None:
    """The decode instance of some answers leaves, or dies: nobody sees it in the tokens."""
    path = checkpoint(name, tmp_path)
    flags = FLAGS | {"decode": FLAGS["decode"] | {"num_pages": 4 * PAGES}}
    async with mesh(path, block_tokens=BLOCK, prefill=1, decode=2, flags=flags) as running:
        asked = prompts(8, 300, seed=23, low=20, high=90)
        answers = [
            asyncio.create_task(running.client.generate(prompt=prompt, max_tokens=120, timeout_s=120))
            for prompt in asked
        ]
        await running.busy("decode-0")
        old = running.pid("decode-0")
        running.kill("decode-0", how)
        for prompt, answer in zip(asked, await asyncio.gather(*answers), strict=True):
            assert (answer.error, len(answer.tokens)) == (None, 120)
            assert_matches_reference(path, prompt, answer.tokens)
        await running.restarted("decode-0", old)
        await running.settled()

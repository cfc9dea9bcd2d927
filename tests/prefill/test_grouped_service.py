"""A prefill service that keeps its model by cache groups, with its real rank, against a scripted decode instance with a
real rank: tokens are those of a runner that keeps everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import needed_blocks
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.status import from_rpc_error
from kvmesh.services.prefill.config import PrefillConfig
from kvmesh.services.prefill.main import run
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint, prompts
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.grouped_rank import told_by_runner
from tests.support.prefill.client import decode, instance, pools
from tests.support.prefill.grouped_client import grouped_decode
from tests.support.rank_driver import BLOCK, rank
from tests.support.reference import assert_scores_match_reference
from tests.support.services import running, until

ANSWER = 24  # tokens: beyond a window's and a block's end
# Cached when the prompt comes again: all but the last block, which is always computed.
AGAIN = {"gemma2": 144, "qwen3_next": 144, "llama4": 144, "mistral": 144}


def model(name: str, folder: Path) -> Path:
    if name == "qwen3_next":
        return make_qwen3_next(folder / name)
    return make_checkpoint(folder / name, **FAMILY_ZOO[name])


def config(path: Path, **fields: Any) -> PrefillConfig:
    known: dict[str, Any] = {
        "model": str(path),
        "instance_id": "prefill-x",
        "block_tokens": BLOCK,
        "num_pages": 30,
        "prefill_chunk_tokens": 48,
        "dtype": "float32",
        "cache_groups": True,
        "conductor": "127.0.0.1:9",  # nobody: registration is tested elsewhere
        "store": "127.0.0.1:9",
        "log_level": "error",
    }
    return PrefillConfig(**(known | fields))


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.slow
async def test_tokens_are_the_references_cold_and_over_what_is_kept(name: str, tmp_path: Path) -> None:
    path = model(name, tmp_path)
    prompt = prompts(1, 250, seed=7, low=150, high=151)[0]
    other = prompt[:140] + prompt[:7]
    answer, others = (told_by_runner(path, one, ANSWER) for one in (prompt, other))
    async with (
        running(run, config(path)) as service,
        rank("decode-x", path, ("shm",), pages=40, cache_groups=True) as driver,
        grouped_decode(service.address, driver, path) as client,
    ):
        for asked, wanted, cached in ((prompt, answer, 0), (prompt, answer, AGAIN[name]), (other, others, 128)):
            first, told = await client.told(asked, ANSWER)
            assert told == wanted
            assert first.cached_tokens == cached
        scored = pb_common.SamplingParams(max_tokens=8, top_p=1, prompt_logprobs=1)
        first, told = await client.told(prompt, ANSWER, sampling=scored)
        assert (first.cached_tokens, told) == (0, answer)
        assert_scores_match_reference(path, prompt, first.prompt_logprobs)

        async def nothing_is_held() -> bool:
            now = await pools(service.address)
            return not now.handoffs and all(
                one.pages_free == one.pages_total and one.extents_free == one.extents_total for one in now.groups
            )

        await until(nothing_is_held)


async def test_a_decode_instance_without_groups_is_refused(tmp_path: Path) -> None:
    path = model("gemma2", tmp_path)
    async with running(run, config(path)) as service, decode(service.address, None, "00", hello=False) as client:
        with pytest.raises(Exception) as failed:
            await client.hello()
        error = from_rpc_error(failed.value)  # type: ignore[arg-type]
        assert isinstance(error, ConfigError) and error.field == "group_layouts"


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
@pytest.mark.slow
async def test_what_another_instance_has_is_pulled_group_by_group(name: str, tmp_path: Path) -> None:
    path = model(name, tmp_path)
    prompt = prompts(1, 250, seed=8, low=150, high=151)[0]
    async with (
        running(run, config(path, instance_id="prefill-a")) as holder,
        running(run, config(path, instance_id="prefill-b")) as service,
        rank("decode-x", path, ("shm",), pages=40, cache_groups=True) as driver,
    ):
        async with grouped_decode(holder.address, driver, path) as client:
            await client.told(prompt, 2)
        where = (await instance(holder.address)).instance
        hint = pb_common.PullRange(holder=where, first_block=0, blocks=len(prompt) // BLOCK)
        async with grouped_decode(service.address, driver, path) as client:
            first, told = await client.told(prompt, ANSWER, pulls=[hint])
            parts = zip(client.front.groups, client.front.memory, strict=True)
            needed = [(needed_blocks(group, BLOCK, AGAIN[name]), one.shard.shard_bytes) for group, one in parts]
        assert told == told_by_runner(path, prompt, ANSWER)
        assert (first.cached_tokens, first.timings.pulled_tokens) == (AGAIN[name], AGAIN[name])
        assert first.timings.pull_bytes == sum(len(blocks) * size for blocks, size in needed), "what a hit needs alone"

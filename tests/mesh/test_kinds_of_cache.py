"""One family for each kind of cache group through every way that KV takes between the processes of a mesh: handed off,
found again, pulled, cut anew from one rank to two and back (by heads; where all tokens are kept by these, too), read
from SSD and from object storage, and migrated by a drain and by a kill. Tokens are transformers', greedy in float32,
and each way is seen to have been taken."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.kvcache.cache_groups import CacheKind, longest_hit
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint, prompts, save_tokenizer
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.mesh.client import Answer, pools, until
from tests.support.mesh.direct import Direct, blocks_at, masks_at, node_store
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference
from tests.support.s3_server import S3, s3_server

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(600)]

VOCAB, BLOCK, CHUNK = 300, 16, 48
# Longer than every window and chunk of attention, in several chunks of prefill; a whole number of blocks; within one.
LENGTHS = (149, 64, 11)
ANSWER, LONG_ANSWER = 12, 320
TRIES = 3  # prompts that are read from a tier for another instance: a holder waits a second for what lies there
PAGES = 96  # of the instances that have a tier below memory


def with_tokenizer(path: Path) -> Path:
    save_tokenizer(path, 331, 512)
    return path


MAKE: dict[str, Callable[[Path], Path]] = {
    "full": lambda path: make_checkpoint(path, **FAMILY_ZOO["llama3"]),
    "window": lambda path: make_checkpoint(path, **FAMILY_ZOO["gemma3"]),
    "chunk": lambda path: make_checkpoint(path, **FAMILY_ZOO["llama4"]),
    "latent": lambda path: make_checkpoint(path, **FAMILY_ZOO["deepseek_v3"]),
    "state": lambda path: with_tokenizer(make_qwen3_next(path)),
}
KINDS: dict[str, set[tuple[CacheKind, int]]] = {  # (kind, planes) of each group: a latent is one plane
    "full": {(CacheKind.ALL, 2)},
    "window": {(CacheKind.ALL, 2), (CacheKind.WINDOW, 2)},
    "chunk": {(CacheKind.ALL, 2), (CacheKind.CHUNK, 2)},
    "latent": {(CacheKind.ALL, 1)},
    "state": {(CacheKind.ALL, 2), (CacheKind.STATE, 1), (CacheKind.STATE, 3)},
}

CUTS: dict[str, dict[str, str]] = {  # where contexts can be shared over ranks, some are
    "full": {"prefill-0": "cp=2"},
    "latent": {"prefill-0": "cp=2", "coupled-0": "tp=2,dcp=2"},
}

MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize("kind", MAKE)
async def test_every_way_of_its_cache(kind: str, tmp_path: Path, mesh: MeshFactory, s3: S3) -> None:
    path = MAKE[kind](tmp_path / kind)
    groups = open_checkpoint(path).config.cache_groups
    assert {(group.kind, group.layout.planes) for group in groups} == KINDS[kind]
    few: dict[str, Any] = {"num_pages": PAGES, "num_extents": PAGES, "prefill_chunk_tokens": CHUNK}
    few |= {"ssd_offload_percent": 0, "ssd_staging_percent": 50}  # what is computed goes down at once; a prompt fits
    flags: dict[str, dict[str, Any]] = {
        "conductor": {"slo_tbt_ms": 60_000, "admission": "off"},  # what a busy machine is slow at is answered
        "gateway": {"token_timeout_s": 60},
        "*": {"stop_grace_ms": 100},
        "prefill-0": few | {"ssd_path": str(tmp_path / "ssd"), "ssd_capacity_mb": 64},
        "prefill-1": few | {"object_url": f"s3://{s3.bucket()}/one"},
        "coupled-0": few | {"object_url": f"s3://{s3.bucket()}/two", "mesh": "tp=2"},
    }
    for name, cut in CUTS.get(kind, {}).items():
        flags[name] |= {"mesh": cut}
    shape: dict[str, Any] = {"prefill": 2, "decode": 1, "coupled": 1, "block_tokens": BLOCK, "memory_mb": 16}
    async with mesh(path, flags=flags, **shape) as running:
        for name in running.instances():
            await running.ready(name)
        walk = Walk(running, await Direct.of(running), path)
        for prefill, decode in (("prefill-0", "decode-0"), ("prefill-0", "coupled-0"), ("coupled-0", "decode-0")):
            await walk.handed_off(prefill, decode)
        for holder, reader in (("prefill-0", "prefill-1"), ("prefill-0", "coupled-0"), ("coupled-0", "prefill-0")):
            await walk.pulled(holder, reader)
        await walk.pulled_by_decode("coupled-0", "decode-0")
        await walk.read_from_below("prefill-0", Tier.SSD, "coupled-0")
        await walk.read_from_below("prefill-1", Tier.OBJECT, "coupled-0")
        await walk.read_from_below("coupled-0", Tier.OBJECT, "prefill-0")
        await walk.migrated(signal.SIGTERM)
        await walk.migrated(signal.SIGKILL)
        await running.settled()


class Walk:
    """Asks one mesh for one way after the other. Salts keep the ways apart: each finds but what it has put there."""

    def __init__(self, running: Running, direct: Direct, path: Path) -> None:
        self._running = running
        self._direct = direct
        self._path = path
        self._groups = open_checkpoint(path).config.cache_groups
        self._asked = [prompts(1, VOCAB, seed=n, low=length, high=length + 1)[0] for n, length in enumerate(LENGTHS)]
        self._long = self._asked[0]
        self._hit = self._found(LENGTHS[0])

    def _found(self, length: int) -> int:
        """The tokens of a prompt that are found again: all blocks but that of its last token."""
        return (length - 1) // BLOCK * BLOCK

    async def _ask(self, prompt: list[int], prefill: str, decode: str, salt: str, **more: Any) -> Answer:
        answer = await self._direct.generate(
            prompt, ANSWER, prefill=prefill, decode=decode, salt=salt, timeout_s=120, **more
        )
        way = f"{prefill} → {decode}, {salt}"
        assert (answer.error, len(answer.tokens)) == (None, ANSWER), way
        assert answer.timings is not None
        assert_matches_reference(self._path, prompt, answer.tokens)
        return answer

    async def handed_off(self, prefill: str, decode: str) -> None:
        """Cold; then all of it is found where it was computed, and where it was sent."""
        salt = f"{prefill} {decode}"
        for hits in ((0, 0, 0), [self._found(length) for length in LENGTHS]):
            answers = await asyncio.gather(*(self._ask(prompt, prefill, decode, salt) for prompt in self._asked))
            assert [answer.cached_tokens for answer in answers] == list(hits), salt
            # What a short answer moved may be told after its end.
            assert any(answer.timings.transfer_bytes for answer in answers), salt  # type: ignore[union-attr]
            assert not any(answer.timings.pulled_tokens for answer in answers), salt  # type: ignore[union-attr]
            at_decode = [answer.timings.at_decode_tokens for answer in answers]  # type: ignore[union-attr]
            assert bool(any(at_decode)) == bool(any(hits)), (salt, at_decode)

    async def _put(self, holder: str, salt: str) -> list[bytes]:
        """The long prompt's blocks are at `holder` and nowhere else; their keys."""
        await self._ask(self._long, holder, "decode-0" if holder != "decode-0" else "coupled-0", salt)
        keys = self._direct.keys(self._long, salt)
        await self._sealed(holder, keys)
        return keys

    async def _sealed(self, holder: str, keys: Sequence[bytes]) -> None:
        async def there() -> bool:
            return set(keys) <= await blocks_at(self._running.mesh.addresses[holder])

        await until(there, f"{len(keys)} blocks at {holder}")

    async def pulled(self, holder: str, reader: str) -> None:
        """`reader` computes but the rest of what `holder` has."""
        salt = f"{holder} to {reader}"
        await self._put(holder, salt)
        other = "coupled-0" if reader != "coupled-0" else "decode-0"
        answer = await self._ask(self._long, reader, other, salt, pulls=[(holder, 0, self._hit // BLOCK)])
        assert answer.timings is not None
        assert (answer.cached_tokens, answer.timings.pulled_tokens) == (self._hit, self._hit), salt
        assert answer.timings.pull_bytes, salt

    async def pulled_by_decode(self, holder: str, decode: str) -> None:
        """Decode reads what prefill has as well, and is sent the rest."""
        salt = f"{holder} to {decode}"
        await self._ask(self._long, holder, holder, salt)
        keys = self._direct.keys(self._long, salt)
        await self._sealed(holder, keys)
        answer = await self._ask(self._long, holder, decode, salt, decode_pulls=[(holder, 0, self._hit // BLOCK)])
        assert answer.timings is not None
        assert (answer.cached_tokens, answer.timings.at_decode_tokens) == (self._hit, self._hit), salt

    def _whole(self, masks: Sequence[int]) -> bool:
        """Whether these objects of a prompt's blocks are what a hit of all of them needs."""
        groups = range(len(self._groups))
        held = [sum(1 << block for block, mask in enumerate(masks) if mask >> group & 1) for group in groups]
        return longest_hit(self._groups, BLOCK, len(masks), held).blocks * BLOCK == self._hit

    async def _tier(self, name: str, tier: Tier) -> blocks_pb2.TierCounters:
        told = await node_store(self._running.mesh.addresses[name])
        return next(one for one in told.tiers if one.tier == tier.value)

    async def _has_read(self, name: str, tier: Tier, before: int) -> None:
        async def told() -> bool:
            return (await self._tier(name, tier)).hits > before

        await until(told, f"reads of the tier of {name}")  # its ranks tell what they count now and then

    async def read_from_below(self, name: str, tier: Tier, reader: str) -> None:
        """Blocks outlive their instance in its tier: its next life reads them, and reads them back for `reader`, an
        instance of another cut."""
        running, own = self._running, f"{tier.name} of {name}"
        others = [f"{own} to {reader}, {number}" for number in range(TRIES)]
        chains = [await self._put(name, salt) for salt in (own, *others)]

        async def written() -> bool:
            masks = await masks_at(running.mesh.addresses[name], tier)
            return all(self._whole([masks.get(key, 0) for key in chain]) for chain in chains)

        await until(written, f"all prompts in the tier of {name}")
        old = running.pid(name)
        running.kill(name)
        await running.restarted(name, old)
        await running.ready(name)
        await self._direct.refresh()
        await until(written, f"all prompts in the tier of {name} again")
        assert not await blocks_at(running.mesh.addresses[name], Tier.DRAM), "it has just begun"
        answer = await self._ask(self._long, name, "decode-0", own)
        assert answer.timings is not None
        assert answer.cached_tokens and not answer.timings.pulled_tokens, own
        await self._has_read(name, tier, 0)
        hits = (await self._tier(name, tier)).hits
        for salt in others:  # of a prompt that is not in time the reader computes all, and has it then
            answer = await self._ask(self._long, reader, "decode-0", salt, pulls=[(name, 0, self._hit // BLOCK)])
            assert answer.timings is not None
            assert answer.timings.pulled_tokens == answer.cached_tokens, salt
            if answer.cached_tokens:  # a slow disk may bring but some in time
                break
        else:
            raise AssertionError(f"nothing came in time from {own}")
        await self._has_read(name, tier, hits)

    async def migrated(self, strike: signal.Signals) -> None:
        """Who decodes is struck in the middle of an answer, which goes on elsewhere: from one rank to two, or back."""
        running, decodes = self._running, ("decode-0", "coupled-0")
        for name in decodes:
            await running.ready(name)
        moved, begun = await self._moved(), asyncio.Event()

        def token(tokens: int) -> None:
            if tokens >= 12:
                begun.set()

        asking = asyncio.create_task(
            running.client.generate(self._long, LONG_ANSWER, cache_salt=strike.name, on_token=token, timeout_s=240)
        )
        async with asyncio.timeout(120):
            await begun.wait()
        addresses = running.mesh.addresses
        [holder] = [name for name in decodes if (await pools(addresses[name], "decode")).requests]
        old = running.pid(holder)
        running.kill(holder, strike)
        answer = await asking
        assert (answer.error, len(answer.tokens)) == (None, LONG_ANSWER), strike.name
        assert_matches_reference(self._path, self._long, answer.tokens)
        assert await self._moved() == moved + 1, strike.name
        await running.restarted(holder, old)
        await self._direct.refresh()

    async def _moved(self) -> float:
        async with httpx.AsyncClient() as http:
            told = await http.get(f"http://{self._running.mesh.processes['gateway'].spec.metrics}/metrics", timeout=30)
        lines = [line for line in told.text.splitlines() if line.startswith("kvmesh_gateway_migrations_total{")]
        return sum(float(line.split()[-1]) for line in lines if 'outcome="moved"' in line)

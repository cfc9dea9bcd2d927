"""The public client of the Store: a shared pool of immutable blocks.

    async with StoreClient(ClientConfig(store="10.0.0.5:7002", namespace="docs")) as client:
        key = await client.put(b"...", name="report")
        data = await client.get("report")          # or client.get(key)

A *ref* is a block's key (16 bytes) or a name (text) that a key was bound to. Blocks never change: equal bytes have
equal keys, unless a key was granted. What is not found is None, as in a cache; what cannot be asked or read in time is
an error.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvmesh.kvcache.client.calls import Source, Target, source_of, turn, whole
from kvmesh.kvcache.client.choice import Here
from kvmesh.kvcache.client.config import ClientConfig, split_list
from kvmesh.kvcache.client.context import ClientContext
from kvmesh.kvcache.client.directory import Directory
from kvmesh.kvcache.client.hints import Hints
from kvmesh.kvcache.client.holding import Holding, Place
from kvmesh.kvcache.client.memory import Buffer, Data, Memory, Span
from kvmesh.kvcache.client.moving import Mover
from kvmesh.kvcache.client.naming import check_name
from kvmesh.kvcache.client.near import Near
from kvmesh.kvcache.client.ownkeys import OwnKeys, Ref
from kvmesh.kvcache.client.peers import Peers
from kvmesh.kvcache.client.prefetching import Prefetcher
from kvmesh.kvcache.client.reading import Got, Reader
from kvmesh.kvcache.client.upkeep import Upkeep
from kvmesh.kvcache.client.writing import Block, Pin, Put, Wish, Writer
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.errors import InvalidRequest, Overloaded, Unavailable
from kvmesh.transfer import EngineConfig, TransferEngine


class StoreClient(Upkeep):
    """Asynchronous; for one event loop. `close` it, or use `async with`. Times are milliseconds; an operation that
    names none has the configuration's. Every method raises KvmeshError; none returns while anything still moves in
    memory that it was given."""

    def __init__(self, config: ClientConfig | None = None) -> None:
        """ConfigError or TransferError: no such NIC, no master named, a port in use."""
        self.config = config = config or ClientConfig()
        self._directory = Directory(config.store)
        self._engine = TransferEngine(
            f"client:{config.node_id}:{os.getpid()}:{secrets.token_hex(6)}",
            EngineConfig(
                transports=config.transport_list,
                host=config.host,
                advertise_host=config.advertise_host,
                nics=split_list(config.nics),
                fault=config.fault,
            ),
        )
        self._memory = Memory(self._engine, config.staging_mb << 20)
        self._peers = Peers(self._engine)
        self._hints = Hints(config.locations)
        here = Here(config.node_id, frozenset({config.host, config.advertise_host} - {""}))
        context = ClientContext(config, self._engine, self._memory, self._peers, self._directory, self._hints, here)
        self._near = Near(config, self._engine, self._memory, self._peers)
        self._reader = Reader(context, self._near.met)
        self._writer = Writer(context)
        self._prefetcher = Prefetcher(self._peers, self._directory, self._hints, here)
        self._holding = Holding(self._peers, self._directory, self._hints, here)
        self._mover = Mover(self._peers, self._directory, self._holding, self._hints, random.Random())
        self._keys = OwnKeys(config, self._directory)
        self._turns = asyncio.Semaphore(config.concurrency)
        self._closed = False

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what was begun in the background and gives all memory back. Bounded. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._prefetcher.close()
        await self._near.close()
        await self._reader.close()
        await self._peers.close()
        await self._directory.close()
        await self._memory.close()
        await asyncio.to_thread(self._engine.close)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory that nodes of this machine map: puts and gets copy once, and nothing on the way."""
        return self._memory.allocate(nbytes)

    def register(self, buffer: object) -> Buffer:
        """Memory of the caller (bytearray, numpy array, contiguous CPU tensor), which must live until `unregister` or
        `close`. Gets land in it directly. Puts out of it are read by nodes over tcp where it cannot be mapped; they are
        staged when that is faster. TransferError: it is no such memory."""
        return self._memory.register(buffer)

    def unregister(self, buffer: Buffer) -> None:
        """TransferError: an operation still uses it."""
        self._memory.unregister(buffer)

    # ── put ──────────────────────────────────────────────────────────────────────────────────────

    async def put(
        self,
        data: Source,
        *,
        key: bytes | None = None,
        name: str | None = None,
        replace: bool = False,
        pin: Pin | None = None,
        pin_ttl_ms: int = 0,
        verify: bool | None = None,
        timeout_ms: int | None = None,
    ) -> bytes:
        """Seal one block at a pool node; its key. `data`: bytes, or registered memory (see `put_from`).

        `key`: of exactly these bytes (`content_key`), or one of `grant`. `name`: is bound to the key; InvalidRequest
        when it stands for another block, unless `replace`. Overloaded: no node has room; Unavailable: none answers."""
        keys = None if key is None else [key]
        names = None if name is None else [name]
        done = await self.put_many(
            [data],
            keys=keys,
            names=names,
            replace=replace,
            pin=pin,
            pin_ttl_ms=pin_ttl_ms,
            verify=verify,
            timeout_ms=timeout_ms,
        )
        if not done[0].held:
            kind = Overloaded if "room" in done[0].cause or "full" in done[0].cause else Unavailable
            raise kind(f"no node has taken the block of {done[0].nbytes} bytes: {done[0].cause}")
        return done[0].key

    async def put_many(
        self,
        datas: Sequence[Source],
        *,
        keys: Sequence[bytes] | None = None,
        names: Sequence[str] | None = None,
        replace: bool = False,
        pin: Pin | None = None,
        pin_ttl_ms: int = 0,
        verify: bool | None = None,
        timeout_ms: int | None = None,
    ) -> list[Put]:
        """As `put`, for many blocks in few transfers; what becomes of each is in its `Put`. Names are bound for those
        that are held; InvalidRequest tells the first name that stands for another block."""
        deadline = self._deadline(timeout_ms)
        wish = Wish(deadline, self.config.verify if verify is None else verify, pin, pin_ttl_ms)
        for text in names or ():
            check_name(text)
        if names is not None and len(names) != len(datas):
            raise InvalidRequest.of("names", len(names), f"{len(datas)} blocks, as many names")
        sources = [source_of(one) for one in datas]
        used = await self._keys.of(sources, keys, deadline)
        puts = await whole(self._put_all(sources, used, wish))
        if names is not None:
            named = {name: put.key for name, put in zip(names, puts, strict=True) if put.held}
            await self._keys.bind(named, replace, deadline)
        return puts

    async def put_from(self, source: Target, **options: Any) -> bytes:
        """`put` out of registered memory, which must not change until this returns; from then on it may."""
        return await self.put(source, **options)

    async def put_many_from(self, sources: Sequence[Target], **options: Any) -> list[Put]:
        """`put_many` out of registered memory, as `put_from`."""
        return await self.put_many(sources, **options)

    async def _put_all(self, sources: Sequence[Data | Span], keys: Sequence[bytes], wish: Wish) -> list[Put]:
        """Equal blocks once. Memory that nodes here cannot map goes through staging where that is shared memory."""
        blocks: list[Block] = []
        items: list[tuple[bytes, Data]] = []
        for key, source in dict(zip(keys, sources, strict=True)).items():
            if not isinstance(source, Span):
                items.append((key, source))
            elif source.shared or "shm" not in self.config.transport_list:
                blocks.append(Block(key, source))
            else:
                items.append((key, source.memory))
        async with turn(self._turns, wish.deadline):
            done = await self._writer.put_spans(blocks, wish) + await self._writer.put_data(items, wish)
        by_key = {put.key: put for put in done}
        self._met(keys)
        return [by_key[key] for key in keys]

    def _met(self, keys: Sequence[bytes]) -> None:
        """Nodes that have just taken some of these."""
        now = time.monotonic()
        for address in {replica.holder.address for key in keys for replica in self._hints.of(key, now)}:
            self._near.met(address)

    def content_key(self, data: Source) -> bytes:
        """The key of exactly these bytes in this client's namespace."""
        return self._keys.of_content(data)

    async def grant(self, n: int = 1, *, timeout_ms: int | None = None) -> list[bytes]:
        """Keys that nobody else gets, each for one put of this client. They cost no hash of the data."""
        return await self._keys.grant(n, self._deadline(timeout_ms))

    # ── get ──────────────────────────────────────────────────────────────────────────────────────

    async def get(self, ref: Ref, *, verify: bool | None = None, timeout_ms: int | None = None) -> bytes | None:
        """The block's bytes; None: nobody has it. Unavailable: somebody should, and could not be read."""
        got = (await self.get_many([ref], verify=verify, timeout_ms=timeout_ms))[0]
        if not got.here and got.cause:
            raise Unavailable(f"block {got.key.hex()} could not be read: {got.cause}")
        return got.data

    async def get_many(
        self, refs: Sequence[Ref], *, verify: bool | None = None, timeout_ms: int | None = None
    ) -> list[Got]:
        """Each with its bytes, and which node and tier they came from."""
        deadline = self._deadline(timeout_ms)
        return await self._get(refs, None, verify, deadline)

    async def get_into(
        self, ref: Ref, target: Target, *, verify: bool | None = None, timeout_ms: int | None = None
    ) -> Got:
        """The block into registered memory, from its first byte on. What stands there when it was not read is
        undefined. InvalidRequest: the memory is too small. Unavailable as `get`."""
        got = (await self.get_many_into([ref], [target], verify=verify, timeout_ms=timeout_ms))[0]
        if not got.here and got.cause:
            raise Unavailable(f"block {got.key.hex()} could not be read: {got.cause}")
        return got

    async def get_many_into(
        self,
        refs: Sequence[Ref],
        targets: Sequence[Target],
        *,
        verify: bool | None = None,
        timeout_ms: int | None = None,
    ) -> list[Got]:
        """Each into its own memory. Memory that overlaps holds no one knows what."""
        if len(targets) != len(refs):
            raise InvalidRequest.of("targets", len(targets), f"{len(refs)} blocks, as many targets")
        spans = [one.span() if isinstance(one, Buffer) else one for one in targets]
        return await self._get(refs, spans, verify, self._deadline(timeout_ms))

    async def _get(
        self, refs: Sequence[Ref], targets: Sequence[Span] | None, verify: bool | None, deadline: float
    ) -> list[Got]:
        check = self.config.verify if verify is None else verify
        plan = None if check else self._near.plan(refs, targets)
        if plan is None:
            keys = await self._keys.resolved(refs, deadline)
            if not check and any(isinstance(ref, str) for ref in refs):
                plan = self._near.plan(keys, targets)
            if plan is None:
                return await self._ask(keys, targets, check, deadline)
        here = await self._near.read(plan)
        got = [one for one in here if one is not None]
        if len(got) < len(here):
            rest = [i for i, one in enumerate(here) if one is None]
            others = None if targets is None else [targets[i] for i in rest]
            asked = iter(await self._ask([plan.keys[i] for i in rest], others, check, deadline))
            got = [next(asked) if one is None else one for one in here]
        return got

    async def _ask(
        self, keys: Sequence[bytes | None], targets: Sequence[Span] | None, check: bool, deadline: float
    ) -> list[Got]:
        first: dict[bytes, int] = {}  # equal blocks are read once
        for i, key in enumerate(keys):
            if key is not None:
                first.setdefault(key, i)
        spans = None if targets is None else [targets[i] for i in first.values()]
        async with turn(self._turns, deadline):
            read = dict(zip(first, await whole(self._reader.read(list(first), spans, deadline, check)), strict=True))
        for i, key in enumerate(keys if targets is not None else ()):
            if targets is not None and key is not None and first[key] != i and read[key].here:
                nbytes = read[key].nbytes
                if targets[i].nbytes < nbytes:
                    raise InvalidRequest(f"target: {targets[i].nbytes} bytes for a block of {nbytes}", field="target")
                targets[i].memory[:nbytes] = targets[first[key]].memory[:nbytes]
        return [Got(b"") if key is None else read[key] for key in keys]

    async def exists(self, ref: Ref, *, timeout_ms: int | None = None) -> Tier | None:
        """The fastest tier that a node says it has it in, now; None: nobody."""
        return (await self.exists_many([ref], timeout_ms=timeout_ms))[0]

    async def exists_many(self, refs: Sequence[Ref], *, timeout_ms: int | None = None) -> list[Tier | None]:
        """As `exists`: holders are asked themselves."""
        places = await self.locate_many(refs, timeout_ms=timeout_ms)
        return [min((p.tier for p in some), default=None) for some in places]

    async def locate_many(self, refs: Sequence[Ref], *, timeout_ms: int | None = None) -> list[list[Place]]:
        """Every node that says it has each block: where, in which tier, how many bytes."""
        deadline = self._deadline(timeout_ms)
        keys = await self._keys.resolved(refs, deadline)
        found = await self._holding.places([key for key in keys if key is not None], deadline)
        return [found[key] if key is not None else [] for key in keys]

    @property
    def tag(self) -> bytes:
        """What every key of this client's namespace begins with: 4 bytes."""
        return self._keys.tag

    @property
    def directory(self) -> Directory:
        """The master's own calls."""
        return self._directory

    def at_hand(self, refs: Sequence[Ref], targets: Sequence[Target] | None) -> list[Got] | None:
        """What `get_many` or `get_many_into` gives, if all of it lies in memory that is mapped here: read by the thread
        that calls this, which may be any. None: call those."""
        if self._closed or self.config.verify or (targets is not None and len(targets) != len(refs)):
            return None
        spans = None if targets is None else [one.span() if isinstance(one, Buffer) else one for one in targets]
        plan = self._near.plan(refs, spans)
        if plan is None or plan.missing:
            return None
        got = [one for one in self._near.read_here(plan) if one is not None]
        return got if len(got) == len(refs) else None

    def counters(self) -> dict[str, int]:
        """Since this client's start."""
        read, wrote = self._reader.stats, self._writer.stats
        return {
            "blocks_got": read.blocks + self._near.hits,
            "bytes_got": read.nbytes + self._near.nbytes,
            "near_hits": self._near.hits,
            "misses": read.misses,
            "failed_replicas": read.failed_replicas,
            "gathered": read.gathered,
            "blocks_put": wrote.blocks,
            "bytes_put": wrote.nbytes,
            "puts_refused": wrote.refused,
            "locations": len(self._hints),
            "staging_free": self._memory.staging_free,
        }

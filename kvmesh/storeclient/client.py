"""This is the public client of the Store: a shared pool of immutable blocks.

    async with StoreClient(ClientConfig(store="10.0.0.5:7002", namespace="docs")) as client:
        key = await client.put(b"...", name="report")
        data = await client.get("report")          # or client.get(key)

A *ref* is a block's key (16 bytes) or a name (text) that a key was bound to. Blocks never change: equal bytes have
equal keys, unless a key was granted or computed. What is not found is None, as in a cache; what cannot be asked or read
in time is an error.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from types import NoneType, TracebackType
from typing import Any

from kvmesh.blockservice.peers import PeerPool
from kvmesh.errors import DeadlinePassed, InvalidRequest, Unavailable
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc import security
from kvmesh.storeclient import arguments, forks
from kvmesh.storeclient.arguments import MAX_REPLICAS, MAX_TTL_MS, flag, instance, listed, milliseconds
from kvmesh.storeclient.calls import left, turn, whole
from kvmesh.storeclient.config import ClientConfig, split_list
from kvmesh.storeclient.context import ClientContext, EngineSegments
from kvmesh.storeclient.copying import NO_BLOCK, Moved, Mover, Policy, Prefetcher
from kvmesh.storeclient.directory import Directory, Quota, Removed
from kvmesh.storeclient.holding import HolderQueries, Place
from kvmesh.storeclient.memory import Buffer, ClientMemory, Data, Source, Span, Target, memory_of, source_of, target_of
from kvmesh.storeclient.naming import OwnKeys, Ref, check_name
from kvmesh.storeclient.reading.leased import Got
from kvmesh.storeclient.reading.reader import BlockReader
from kvmesh.storeclient.replicas import Hints, ReaderLocation, Replica
from kvmesh.storeclient.writing import Block, BlockWriter, Pin, Put, PutOptions
from kvmesh.transfer import EngineConfig, TransferEngine
from kvmesh.transfer.config import tls_fields


class StoreClient:
    """Is a client of the Store for one event loop. `close` it, or use `async with`. Times are milliseconds; an
    operation without a `timeout_ms` has the configuration's. Every method raises KvmeshError; none returns while bytes
    still move in memory that it was given."""

    def __init__(self, config: ClientConfig | None = None) -> None:
        """Raises ConfigError or TransferError: a NIC does not exist, no master is named, a port is in use, the process
        was forked after a client was made."""
        forks.check()
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
                leave_host=config.transfer_network == "trusted" or security.current().channel_credentials() is None,
                **tls_fields(security.current().paths, network=config.transfer_network),  # type: ignore[arg-type]
            ),
        )
        self._memory = ClientMemory(self._engine, config.staging_mb << 20)
        self._peers = PeerPool(EngineSegments(self._engine), self._engine.config.transports)
        self._hints = Hints(config.locations)
        here = ReaderLocation(config.node_id, frozenset({config.host, config.advertise_host} - {""}))
        self._turns = asyncio.Semaphore(config.concurrency)
        context = ClientContext(
            config, self._engine, self._memory, self._peers, self._directory, self._hints, here, self._turns
        )
        self._keys = OwnKeys(config, self._directory)
        self._reader = BlockReader(context, self._keys)
        self._writer = BlockWriter(context)
        self._prefetcher = Prefetcher(self._peers, self._directory, self._hints, here)
        self._holding = HolderQueries(self._peers, self._directory, self._hints, here)
        self._mover = Mover(self._peers, self._directory, self._holding, self._hints, random.Random())
        self._closed = False
        forks.watch(self)

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what was begun in the background and gives all memory back, within a bounded time. It may be called more
        than once. In a forked child it does nothing, as everything is the parent's."""
        if self._closed:
            return
        self._closed = True
        await self._prefetcher.close()
        await self._reader.close()
        await self._peers.close()
        await self._directory.close()
        await self._memory.close()
        try:
            await asyncio.to_thread(self._engine.close)
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            self._engine.close()

    def allocate(self, nbytes: int) -> Buffer:
        """Returns zeroed memory that nodes of this machine map: a put or get copies it once, and the transfer copies
        nothing."""
        self._check_open()
        return self._memory.allocate(nbytes)

    def register(self, buffer: object) -> Buffer:
        """Registers memory of the caller (bytearray, numpy array, contiguous CPU tensor), which must live until
        `unregister` or `close`. Gets land in it directly. Nodes that cannot map it read puts out of it over tcp; a put
        is staged in shared memory where that is faster. Raises TransferError when the object is no such memory."""
        self._check_open()
        return self._memory.register(buffer)

    def unregister(self, buffer: Buffer) -> None:
        """Ends a registration, and raises TransferError while an operation uses the memory."""
        self._check_open()
        self._memory.unregister(buffer)

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
        """Seals one block at a pool node and returns its key. `data` is bytes, or registered memory (see `put_from`).

        `key` is the key of exactly these bytes (`content_key`), or one of `grant`; with `keys="computed"` in the
        configuration it is the caller's own, which begins with `tag`. `name` is bound to the key;
        InvalidRequest is raised when it stands for another block, unless `replace` is set: then the name stands for
        this block from now on, and whoever reads it meanwhile finds the old block or this one; of several clients that
        do so at once the last one counts.

        Raises Overloaded when no node has room, PinLimit when as much is pinned hard as may be, InvalidRequest for a
        value that is larger than any node's memory, DeadlinePassed when the time is over, Unavailable when no node can
        be asked.
        """
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
            error = done[0].error or Unavailable(done[0].cause)
            text = f"no node has taken the block of {done[0].nbytes} bytes: {done[0].cause}"
            raise type(error)(text, field=error.field, retry_after_ms=error.retry_after_ms)
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
        """Puts many blocks in few transfers, as `put` does; what becomes of each is in its `Put`. Names are bound for
        blocks that are held; InvalidRequest tells the first name that stands for another block. With `replace`, up to
        4096 names change together."""
        deadline = self._deadline(timeout_ms)
        if pin is not None:
            pin = _pin(pin)
        pin_ttl_ms = arguments.whole("pin_ttl_ms", pin_ttl_ms, 0, arguments.MAX_TTL_MS)
        wish = PutOptions(deadline, arguments.flag("verify", verify, self.config.verify), pin, pin_ttl_ms)
        replace = arguments.flag("replace", replace)
        datas = arguments.listed("datas", datas)
        keys = None if keys is None else arguments.listed("keys", keys)
        names = None if names is None else _names(arguments.listed("names", names), len(datas))
        sources = [source_of(one) for one in datas]
        if not sources:
            return []
        await self._writer.check(max(len(memory_of(one)) for one in sources), deadline)
        used = await self._keys.of(sources, keys, deadline)
        puts = await whole(self._put_all(sources, used, wish))
        if names is not None:
            named = {name: put.key for name, put in zip(names, puts, strict=True) if put.held}
            await self._keys.bind(named, replace, deadline, {put.key: put.store_id for put in puts if put.held})
        return puts

    async def put_from(self, source: Target, **options: Any) -> bytes:
        """Puts registered memory, which must not change until this returns."""
        return await self.put(source, **options)

    async def put_many_from(self, sources: Sequence[Target], **options: Any) -> list[Put]:
        """Puts many spans of registered memory, as `put_from` does."""
        return await self.put_many(sources, **options)

    async def _put_all(self, sources: Sequence[Data | Span], keys: Sequence[bytes], wish: PutOptions) -> list[Put]:
        """Puts equal blocks once. Memory that nodes of this machine cannot map goes through staging where that is
        shared memory."""
        blocks: list[Block] = []
        items: list[tuple[bytes, Data]] = []
        by_source = dict(zip(keys, sources, strict=True))
        already = await self._already_held(by_source, wish) if self.config.keys == "computed" else []
        for put in already:
            del by_source[put.key]
        for key, source in by_source.items():
            if not isinstance(source, Span):
                items.append((key, source))
            elif source.shared or "shm" not in self._engine.config.transports:
                blocks.append(Block(key, source))
            else:
                items.append((key, source.memory))
        async with turn(self._turns, wish.deadline):
            done = await self._writer.put_spans(blocks, wish) + await self._writer.put_data(items, wish)
        by_key = {put.key: put for put in (*already, *done)}
        self._met(keys)
        return [by_key[key] for key in keys]

    async def _already_held(self, sources: Mapping[bytes, Data | Span], wish: PutOptions) -> list[Put]:
        """Returns the puts of blocks that a node holds by what the master knows. A node may let go of one meanwhile:
        then it misses until it is put again, as if it had been evicted later. A block to be pinned is put anyway."""
        if wish.pin is not None:
            return []
        found, _ = await self._directory.find(list(sources), max(wish.left_s(), 0.001))
        return [
            Put(key, len(memory_of(source)), replicas[0].holder.store_id)
            for (key, source), replicas in zip(sources.items(), found, strict=True)
            if replicas
        ]

    def _met(self, keys: Sequence[bytes]) -> None:
        """Notes that the nodes that hold some of these keys have just answered."""
        now = time.monotonic()
        for address in {replica.holder.address for key in keys for replica in self._hints.of(key, now)}:
            self._reader.local.met(address)

    def content_key(self, data: Source) -> bytes:
        """Returns the key of exactly these bytes in this client's namespace."""
        self._check_open()
        return self._keys.of_content(data)

    async def grant(self, n: int = 1, *, timeout_ms: int | None = None) -> list[bytes]:
        """Returns `n` keys that nobody else gets, each for one put of this client. They save the hash of the data."""
        return await self._keys.grant(n, self._deadline(timeout_ms))

    async def get(self, ref: Ref, *, verify: bool | None = None, timeout_ms: int | None = None) -> bytes | None:
        """Returns the block's bytes, or None if no node has it. Raises Unavailable when a node should have it and could
        not be read, and DeadlinePassed when it was not read in time."""
        deadline = self._deadline(timeout_ms)
        got = (await self._get([ref], None, verify, deadline))[0]
        _raise_unread(got, deadline)
        return got.data

    async def get_many(
        self, refs: Sequence[Ref], *, verify: bool | None = None, timeout_ms: int | None = None
    ) -> list[Got]:
        """Returns each block with its bytes, and the node and tier that they came from."""
        deadline = self._deadline(timeout_ms)
        return await self._get(arguments.listed("refs", refs), None, verify, deadline)

    async def get_into(
        self, ref: Ref, target: Target, *, verify: bool | None = None, timeout_ms: int | None = None
    ) -> Got:
        """Reads the block into registered memory, from the memory's first byte on. If the block is not read, the
        memory's content is undefined. Raises InvalidRequest when the memory is too small; Unavailable and
        DeadlinePassed as `get` does."""
        deadline = self._deadline(timeout_ms)
        got = (await self._get([ref], [target_of(target)], verify, deadline))[0]
        _raise_unread(got, deadline)
        return got

    async def get_many_into(
        self,
        refs: Sequence[Ref],
        targets: Sequence[Target],
        *,
        verify: bool | None = None,
        timeout_ms: int | None = None,
    ) -> list[Got]:
        """Reads each block into its own memory. If two memories overlap, the content of both is undefined."""
        deadline = self._deadline(timeout_ms)
        refs, spans = arguments.listed("refs", refs), [target_of(one) for one in arguments.listed("targets", targets)]
        if len(spans) != len(refs):
            raise InvalidRequest.of("targets", len(spans), f"{len(refs)} blocks, as many targets")
        return await self._get(refs, spans, verify, deadline)

    async def _get(
        self, refs: Sequence[Ref], targets: Sequence[Span] | None, verify: bool | None, deadline: float
    ) -> list[Got]:
        return await self._reader.read(refs, targets, flag("verify", verify, self.config.verify), deadline)

    async def exists(self, ref: Ref, *, timeout_ms: int | None = None) -> Tier | None:
        """Returns the fastest tier in which a node says that it has the block now, or None if no node has it."""
        return (await self.exists_many([ref], timeout_ms=timeout_ms))[0]

    async def exists_many(self, refs: Sequence[Ref], *, timeout_ms: int | None = None) -> list[Tier | None]:
        """Returns, for each block, what `exists` does. The holders themselves are asked."""
        places = await self.locate_many(refs, timeout_ms=timeout_ms)
        return [min((p.tier for p in some), default=None) for some in places]

    async def locate_many(self, refs: Sequence[Ref], *, timeout_ms: int | None = None) -> list[list[Place]]:
        """Returns, for each block, every node that says it has it: where, in which tier, how many bytes."""
        deadline = self._deadline(timeout_ms)
        refs = arguments.listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        found = await self._holding.places([key for key in keys if key is not None], deadline)
        return [found[key] if key is not None else [] for key in keys]

    @property
    def tag(self) -> bytes:
        """The 4 bytes that every key of this client's namespace begins with."""
        return self._keys.tag

    @property
    def directory(self) -> Directory:
        """The store master's own calls."""
        return self._directory

    def at_hand(self, refs: Sequence[Ref], targets: Sequence[Target] | None) -> list[Got] | None:
        """Returns what `get_many` or `get_many_into` would return, if all of it lies in memory that is mapped here; the
        calling thread, which may be any, copies it. Returns None if those must be called instead."""
        if self._closed or self.config.verify or not isinstance(refs, list | tuple):
            return None
        if targets is not None and not isinstance(targets, list | tuple):
            return None
        if targets is not None and (
            len(targets) != len(refs) or not all(isinstance(one, Buffer | Span) for one in targets)
        ):
            return None
        spans = None if targets is None else [target_of(one) for one in targets]
        return self._reader.read_at_hand(refs, spans)

    def counters(self) -> dict[str, int]:
        """Returns counts since this client's start."""
        read, near, wrote = self._reader.stats, self._reader.local, self._writer.stats
        return {
            "blocks_got": read.blocks + near.hits,
            "bytes_got": read.nbytes + near.nbytes,
            "near_hits": near.hits,
            "misses": read.misses,
            "failed_replicas": read.failed_replicas,
            "gathered": read.gathered,
            "blocks_put": wrote.blocks,
            "bytes_put": wrote.nbytes,
            "puts_refused": wrote.refused,
            "locations": len(self._hints),
            "staging_free": self._memory.staging_free,
        }

    # ── blocks that are there: removed, pinned, copied, moved, brought near, counted ─────────────────

    async def remove(self, *refs: Ref, timeout_ms: int | None = None) -> Removed:
        """Removes these blocks everywhere; names among the refs are unbound. `Removed` says which nodes have applied
        it."""
        deadline = self._deadline(timeout_ms)
        names = [ref for ref in refs if isinstance(ref, str)]
        keys = [key for key in await self._keys.resolved(refs, deadline) if key is not None]
        self._hints.forget(keys)
        done = Removed()
        if keys:
            done = await self._directory.remove(left(deadline), keys=list(dict.fromkeys(keys)))
            self._hints.forget(keys)
        # Only now: a client that has to repeat the removal must still find what the names stood for.
        await self._keys.unbind_removed(names, deadline)
        return done

    async def remove_namespace(self, *, timeout_ms: int | None = None) -> Removed:
        """Removes every block of this client's namespace, KV blocks of the tenant of that name included."""
        self._hints.forget_tag(self._keys.tag)
        done = await self._directory.remove(left(self._deadline(timeout_ms)), prefix=self._keys.tag)
        self._hints.forget_tag(self._keys.tag)
        return done

    async def pin(self, *refs: Ref, ttl_ms: int = 0, timeout_ms: int | None = None) -> list[int]:
        """Pins the blocks at every node that has them: softly for `ttl_ms` (they are evicted last), or with 0 hard
        (they stay). Returns how many nodes pinned each. Raises Overloaded when a node has too much pinned already."""
        ttl_ms = arguments.whole("ttl_ms", ttl_ms, 0, MAX_TTL_MS)
        kind = Pin.SOFT if ttl_ms else Pin.HARD
        return await self._pin(refs, kind, ttl_ms, self._deadline(timeout_ms))

    async def unpin(self, *refs: Ref, timeout_ms: int | None = None) -> list[int]:
        """Removes the pins of the blocks at every node that has them. Returns how many nodes have done so for each."""
        return await self._pin(refs, Pin.NONE, 0, self._deadline(timeout_ms))

    async def _pin(self, refs: Sequence[Ref], kind: Pin, ttl_ms: int, deadline: float) -> list[int]:
        keys = await self._keys.resolved(refs, deadline)
        done = await self._holding.pin([key for key in keys if key is not None], kind, ttl_ms, deadline)
        return [done[key] if key is not None else 0 for key in keys]

    async def change_replica(
        self, refs: Sequence[Ref], replicas: int, *, hard: bool = False, timeout_ms: int | None = None
    ) -> list[int]:
        """Sets how many nodes are to hold each block (0: however many there happen to be); the master sees to it. With
        `hard` each pins it hard. Returns how many hold each now."""
        deadline = self._deadline(timeout_ms)
        replicas, hard = arguments.whole("replicas", replicas, 0, MAX_REPLICAS), flag("hard", hard)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        known = [key for key in keys if key is not None]
        live = await self._directory.change_replica(known, replicas, hard, left(deadline)) if known else []
        by_key = dict(zip(known, live, strict=True))
        return [by_key[key] if key is not None else 0 for key in keys]

    async def prefetch(
        self, refs: Sequence[Ref], policy: Policy = Policy.BEST_EFFORT, *, timeout_ms: int | None = None
    ) -> list[bool]:
        """Lets the nearest pool node copy these blocks, and returns which it has by then. BEST_EFFORT returns at once,
        WAIT when all is done that can be, DEADLINE after `timeout_ms` whatever is done. Raises Unavailable when no pool
        node is near."""
        deadline = self._deadline(timeout_ms)
        instance("policy", policy, Policy)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        here = await self._prefetcher.prefetch([key for key in keys if key is not None], policy, deadline)
        return [key is not None and here[key] for key in keys]

    async def copy(self, refs: Sequence[Ref], *, to: str, timeout_ms: int | None = None) -> list[Moved]:
        """Lets the node `to` pull a copy of each block that it does not have. The master's target (`change_replica`)
        stands: if there are more copies than that, one is removed again. Raises InvalidRequest when there is no such
        node."""
        deadline = self._deadline(timeout_ms)
        instance("to", to, str)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        done = await self._mover.copy([key for key in keys if key is not None], to, deadline)
        return [done[key] if key is not None else NO_BLOCK for key in keys]

    async def move(
        self, refs: Sequence[Ref], *, to: str, source: str | None = None, timeout_ms: int | None = None
    ) -> list[Moved]:
        """Copies as `copy` does; then the copy at `source` is removed from every tier (None: at the only other node
        that has it). A hard pin there comes along, a soft one does not. A copy that is being read all the time stays,
        and its `Moved` says so. At every moment at least one of the two nodes has the block. Raises InvalidRequest when
        there is no such node."""
        deadline = self._deadline(timeout_ms)
        instance("to", to, str)
        instance("source", source, str, NoneType)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        done = await self._mover.move([key for key in keys if key is not None], to, source, deadline)
        return [done[key] if key is not None else NO_BLOCK for key in keys]

    async def replicas(self, refs: Sequence[Ref], *, timeout_ms: int | None = None) -> list[list[Replica]]:
        """Returns each block's holders as the master knows them. `locate_many` asks the holders themselves."""
        deadline = self._deadline(timeout_ms)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        known = [key for key in keys if key is not None]
        found = dict(zip(known, (await self._directory.find(known, left(deadline)))[0], strict=True)) if known else {}
        return [found[key] if key is not None else [] for key in keys]

    async def quotas(self, *, timeout_ms: int | None = None) -> list[Quota]:
        """Returns the quota of every namespace that has one, with what it uses now."""
        return await self._directory.quotas(left(self._deadline(timeout_ms)))

    async def set_quota(self, namespace: str, blocks: int, *, timeout_ms: int | None = None) -> None:
        """Sets how many blocks the namespace, and the tenant with that salt, may have in memory over all nodes, copies
        counted; 0 means no limit. Nodes are told with their next heartbeats. Raises Overloaded when too many quotas are
        set."""
        await self._directory.set_quota(namespace, blocks, left(self._deadline(timeout_ms)))

    def _deadline(self, timeout_ms: float | None) -> float:
        self._check_open()
        timeout_ms = self.config.timeout_ms if timeout_ms is None else milliseconds("timeout_ms", timeout_ms)
        return time.monotonic() + timeout_ms / 1000

    def _check_open(self) -> None:
        """Raises Unavailable when this client is closed, InvalidRequest when it belongs to a parent process."""
        if self._closed:
            raise forks.closed(self)


def _raise_unread(got: Got, deadline: float) -> None:
    """Raises Unavailable or DeadlinePassed for a block that a node should have and did not give."""
    if not got.here and got.cause:
        kind = DeadlinePassed if time.monotonic() >= deadline else Unavailable
        raise kind(f"block {got.key.hex()} could not be read: {got.cause}")


def _pin(pin: Pin) -> Pin:
    try:
        return Pin(pin)
    except ValueError:
        raise InvalidRequest.of("pin", pin, "must be Pin.NONE, Pin.SOFT or Pin.HARD") from None


def _names(names: list[str], count: int) -> list[str]:
    """Checks names for `count` blocks. Raises InvalidRequest, also for a name that comes twice, as it can stand for one
    block only."""
    for text in names:
        check_name(text)
    if len(names) != count:
        raise InvalidRequest.of("names", len(names), f"{count} blocks, as many names")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest.of("names", twice, "is there twice, and can stand for one block only")
    return names

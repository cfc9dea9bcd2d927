"""Put, Exists, Remove, Pin at a real pool node, from a real transfer engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvmesh.errors import InvalidRequest, Overloaded, StaleTerm, UnknownInstance
from kvmesh.kvcache.tiers import Tier
from kvmesh.pool import pool
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.membership.test_master_answers import master_at
from tests.support.nodes import LAYOUT, SHARD, bench, keys_of, node, stub
from tests.support.putting import Caller, config, held, pool_and_caller, refused
from tests.support.services import running, until

SLOW = json.dumps({"rules": [{"kind": "delay", "op": "read", "delay_ms": 400}]})
STUCK = json.dumps({"rules": [{"kind": "freeze", "op": "read"}]})


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_values_of_any_length_come_and_go(transport: str) -> None:
    async with pool_and_caller(transport) as caller:
        sizes = [1, 100, 4096, 4097, 60_000, 65_536, 300_001, 1 << 20]
        keys = keys_of(*range(len(sizes)))
        answer = await caller.put(keys, sizes)
        assert (answer.held, answer.why_not) == (b"\1" * len(keys), "")
        await caller.check(keys)
        told = await caller.rpc.Exists(pb.ExistsRequest(keys=b"".join([*keys, keys_of("no")[0]])))
        assert list(told.nbytes) == [*sizes, 0] and told.tiers == bytes([Tier.DRAM] * len(keys) + [0])
        assert list(told.layouts) == ["bytes"]
        assert (await caller.rpc.Exists(pb.ExistsRequest(keys=keys[0], layout="another"))).tiers == b"\0"
        before = dict(caller.blocks)
        again = await caller.put(keys[:2], [1, 100], segment_descriptor=b"")
        assert again.held == b"\1\1", "immutable: what is here stays, whatever lies there now"
        caller.blocks.update(before)
        await caller.check(keys)
        counts = await caller.counts()
        assert (counts.pools.store_blocks, counts.pools.store_writing) == (len(keys), 0)
        assert 0 <= counts.fragmentation < 1
        removed = await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(keys)))
        assert removed.removed == len(keys)
        await caller.idle()

        async def free() -> bool:
            return (await caller.counts()).pools.extents_total == 0

        await until(free)


async def test_a_lease_over_many_sizes_is_one() -> None:
    async with pool_and_caller() as caller:
        keys, sizes = keys_of(*range(4)), [100, 70_000, 5_000, 300_000]
        await caller.put(keys, sizes)
        asked = [keys[3], keys_of("no")[0], keys[0], keys[1]]
        lease = await caller.lease(asked)
        assert lease.held == b"\1\0\1\1" and list(lease.nbytes) == [300_000, 100, 70_000]
        assert len(lease.tiers) == 4
        renewed = await caller.rpc.RenewLease(pb.RenewBlocksRequest(lease_id=lease.lease_id, lease_ms=4_000))
        assert renewed.lease_ms >= 4_000
        assert (await caller.counts()).pools.store_leases == 3, "one in each size"
        await caller.read(asked, lease)
        await caller.release(lease)
        assert (await caller.counts()).pools.store_leases == 0
        over = await refused(caller.rpc.RenewLease(pb.RenewBlocksRequest(lease_id=lease.lease_id, lease_ms=400)))
        assert isinstance(over, UnknownInstance)
        short = await caller.lease(keys, lease_ms=50)
        await caller.idle()
        assert isinstance(
            await refused(caller.rpc.RenewLease(pb.RenewBlocksRequest(lease_id=short.lease_id, lease_ms=400))),
            UnknownInstance,
        )


async def test_what_is_not_what_was_promised_is_not_sealed() -> None:
    async with pool_and_caller() as caller:
        keys, sizes = keys_of(1, 2, 3), [5_000, 100_000, 5_000]
        request = caller.request(keys, sizes)
        sums = [xxhash.xxh3_64_intdigest(caller.blocks[key]) for key in keys]
        request.checksum.extend([sums[0], sums[1] ^ 1, sums[2]])
        answer = await caller.rpc.Put(request)
        assert answer.held == b"\1\0\1" and "checksum" in answer.why_not
        assert await held(caller, keys) == b"\1\0\1"
        await caller.check([keys[0], keys[2]])
        request.checksum[1] = sums[1]
        assert (await caller.rpc.Put(request)).held == b"\1\1\1", "the key is not spoilt"
        await caller.idle()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_ticket_that_was_cleared_means_that_nobody_waits(transport: str) -> None:
    async with pool_and_caller(transport) as caller:
        keys = keys_of(1, 2)
        request = caller.request(keys, [5_000, 100_000], ticket=77, ticket_offset=caller.region.base_offset)
        caller.memory[:8] = (76).to_bytes(8, "little")
        answer = await caller.rpc.Put(request)
        assert answer.held == b"\0\0" and "given up" in answer.why_not
        caller.memory[:8] = (77).to_bytes(8, "little")
        request.segment_descriptor = caller.engine.local_descriptor().encode()
        assert (await caller.rpc.Put(request)).held == b"\1\1"
        await caller.check(keys)
        await caller.idle()


async def test_what_is_not_read_in_time_is_given_up_and_its_memory_comes_back() -> None:
    async with pool_and_caller("tcp", fault=STUCK) as caller:
        keys = keys_of(*range(3))
        answer = await caller.put(keys, [5_000, 5_000, 1 << 20], read_within_ms=300)
        assert answer.held == b"\0\0\0" and answer.why_not
        await caller.idle()
        assert (await caller.counts()).pools.extents_total == 0
        unknown = await refused(caller.put(keys, [5_000, 5_000, 9], segment_descriptor=b""))
        assert isinstance(unknown, UnknownInstance) and unknown.field == "segment_descriptor"


CALLER = """
import sys, time
from kvmesh.transfer import EngineConfig, TransferEngine
engine = TransferEngine("short-lived@1", EngineConfig(transports=("tcp",)))
region = engine.allocate(1 << 20, "cpu:0")
print(engine.local_descriptor().encode().hex(), region.base_offset, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
async def test_a_caller_that_dies_in_the_middle_leaves_nothing_behind() -> None:
    async with pool_and_caller("tcp", fault=SLOW) as caller:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, stdout=asyncio.subprocess.PIPE)
        try:
            assert child.stdout is not None
            told, offset = (await asyncio.wait_for(child.stdout.readline(), 30)).split()
            keys = keys_of(*range(8))
            request = caller.request(
                keys,
                [100_000] * 8,
                segment="short-lived@1",
                segment_descriptor=bytes.fromhex(told.decode()),
                offset=[int(offset) + i * 100_000 for i in range(8)],
                read_within_ms=3_000,
            )
            put = asyncio.ensure_future(caller.rpc.Put(request))

            async def writing() -> bool:
                return (await caller.counts()).pools.store_writing == 8

            await until(writing)
            os.kill(child.pid, signal.SIGKILL)
            answer = await put
            assert not any(answer.held) and answer.why_not
            assert not any(await held(caller, keys)), "not poisoned"
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        assert (await caller.put(keys, [10_000] * 8)).held == b"\1" * 8, "anybody else may put them"
        await caller.check(keys)
        await caller.idle()


async def test_two_callers_of_one_key_both_hear_of_the_one_that_was_first() -> None:
    async with pool_and_caller("shm", fault=SLOW) as caller:
        keys = keys_of(1, 2)
        request = caller.request(keys, [50_000, 60_000])
        answers = await asyncio.gather(*(caller.rpc.Put(request) for _ in range(3)))
        assert [answer.held for answer in answers] == [b"\1\1"] * 3
        await caller.check(keys)
        assert (await caller.counts()).pools.store_blocks == 2
        first = asyncio.ensure_future(caller.rpc.Put(caller.request(keys_of(3), [50_000])))

        async def writing() -> bool:
            return (await caller.counts()).pools.store_writing == 1

        await until(writing)
        engine = TransferEngine("another@1", EngineConfig(transports=("shm",)))
        try:
            other = Caller(caller.rpc, caller.incarnation, engine)
            answer = await other.put(keys_of(4, 3), [40_000, 50_000])
            assert answer.held == b"\1\1", "one of its own, one that somebody else writes"
            assert (await first).held == b"\1"
            await caller.check(keys_of(3))
            await other.check(keys_of(4))
        finally:
            await asyncio.to_thread(engine.close)


async def test_removed_while_leased_and_while_put() -> None:
    async with pool_and_caller("shm", fault=SLOW) as caller:
        keys = keys_of(1, 2)
        await caller.put(keys, [5_000, 90_000])
        lease = await caller.lease(keys)
        assert (await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(keys), seq=9))).removed == 2
        assert not (await caller.lease(keys)).lease_id
        await caller.read(keys, lease)
        put = asyncio.ensure_future(caller.put(keys_of(3), [7_000]))

        async def writing() -> bool:
            return (await caller.counts()).pools.store_writing == 1

        await until(writing)
        assert (await caller.rpc.Remove(pb.RemoveBlocksRequest(prefix=keys_of(3)[0][:4]))).removed == 1
        answer = await put
        assert answer.held == b"\0" and "removed" in answer.why_not
        assert not any(await held(caller, keys_of(1, 2, 3)))
        await caller.release(lease)
        await caller.idle()

        async def free() -> bool:
            return (await caller.counts()).pools.extents_total == 0

        await until(free)


async def test_removed_while_pulled() -> None:
    async with pool_and_caller() as caller:
        keys = keys_of(1, 2)
        await caller.put(keys, [5_000, 90_000])
        source = (await caller.counts()).instance
        slow = config(instance_id="pool-1", transports="shm", fault=SLOW)
        async with running(pool.run, slow) as second, stub(second.address) as rpc:
            pull = pb.PullBlocksRequest(keys=b"".join(keys), holders=[source], timeout_ms=9_000)
            pulling = asyncio.ensure_future(rpc.Pull(pull, timeout=20))

            async def writing() -> bool:
                return (await rpc.GetStore(pb.GetNodeStoreRequest())).pools.store_writing == 2

            await until(writing)
            assert (await rpc.Remove(pb.RemoveBlocksRequest(keys=keys[1]))).removed == 1
            assert (await pulling).held == b"\1\0"
            assert (await rpc.Exists(pb.ExistsRequest(keys=keys[1]))).tiers == b"\0"
            assert (await rpc.Pull(pull, timeout=20)).held == b"\1\1", "said again, it is another copy"
        await caller.check(keys)


async def test_removal_by_prefix_takes_a_tenant_and_nobody_else() -> None:
    async with pool_and_caller() as caller:
        ours = [b"\1\2\3\4" + key[4:] for key in keys_of(*range(20))]
        theirs = [b"\1\2\3\5" + key[4:] for key in keys_of(*range(20))]
        await caller.put([*ours, *theirs], [5_000] * 20 + [40_000] * 20)
        assert (await caller.rpc.Remove(pb.RemoveBlocksRequest(prefix=b"\1\2\3\4"))).removed == 20
        assert await held(caller, ours) == bytes(20) and await held(caller, theirs) == b"\1" * 20


async def test_no_room_is_one_clear_error_after_a_bounded_wait() -> None:
    async with pool_and_caller() as caller:
        keys = keys_of(*range(3))
        await caller.put(keys, [1 << 20] * 3)
        lease = await caller.lease(keys)
        full = await refused(caller.put(keys_of("new"), [2 << 20], read_within_ms=400))
        assert isinstance(full, Overloaded) and full.retry_after_ms > 0
        assert "2097152 bytes" in full.message and "4194304 bytes" in full.message
        waiting = asyncio.ensure_future(caller.put(keys_of("new"), [2 << 20], read_within_ms=20_000))
        await caller.release(lease)
        assert (await waiting).held == b"\1"
        await caller.idle()


async def test_orders_of_a_master_of_yesterday_are_refused() -> None:
    async with master_at(7) as (_, store), pool_and_caller(store=store) as caller:
        keys = keys_of(1)
        await caller.put(keys, [5_000])

        async def heard() -> bool:
            return (await caller.counts()).term == 7

        await until(heard)
        late = await refused(caller.rpc.Remove(pb.RemoveBlocksRequest(keys=keys[0], term=6)))
        assert isinstance(late, StaleTerm)
        nowhere = pb_common.InstanceRef(instance_id="x", address="127.0.0.1:1", incarnation=1)
        pull = pb.PullBlocksRequest(keys=keys_of("no")[0], holders=[nowhere], timeout_ms=100, term=6)
        assert isinstance(await refused(caller.rpc.Pull(pull)), StaleTerm)
        unpin = pb.PinBlocksRequest(keys=keys[0], kind=pb.PIN_KIND_NONE, term=6)
        assert isinstance(await refused(caller.rpc.Pin(unpin)), StaleTerm)
        assert await held(caller, keys) == b"\1"
        await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=keys_of("no")[0], term=9))
        assert (await caller.counts()).term == 7, "it is compared and not learnt: who gives orders need not be a master"
        await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=keys[0]))  # nobody's order
        assert await held(caller, keys) == b"\0"


async def test_a_put_after_a_removal_waits_until_this_node_has_heard_of_that() -> None:
    """The node was frozen when it was asked to remove a block, and wakes when the same block is put again."""
    async with master_at(7) as (master, store), pool_and_caller(store=store) as caller:
        keys, more = keys_of(1), keys_of(2)
        assert (await caller.put(keys, [5_000])).held == b"\1"
        master.mute.clear()  # nothing is heard of the master from here on
        seq = 7 << 32
        early = await caller.put(keys + more, [5_000] * 2, removed_seq=seq, read_within_ms=200)
        assert early.held == b"\0\0" and f"removed_seq={seq}" in early.why_not
        assert await held(caller, keys) == b"\1"
        again = asyncio.ensure_future(caller.put(keys + more, [5_000] * 2, removed_seq=seq))
        master.tombstones = [pb_store.Tombstone(seq=seq, keys=keys[0])]
        master.mute.set()
        assert (await again).held == b"\1\1"

        async def heard() -> bool:
            return master.beats[-1].removed_seq == seq

        await until(heard)
        await caller.check(keys + more)  # what was sealed since is not what was removed
        # A master that never heard of a removal, as it has lost its tombstones, has none to tell of.
        assert (await caller.put(keys_of(3), [100], removed_seq=seq + 1)).held == b"\1"
        await caller.idle()


async def test_an_instance_takes_no_puts_of_bytes() -> None:
    async with node("h", total=8) as instance, pool_and_caller() as caller, stub(instance.address) as rpc:
        error = await refused(rpc.Put(caller.request(keys_of(1), [100])))
        assert isinstance(error, InvalidRequest) and error.field == "layout"
        assert "this instance keeps blocks of" in error.message
        instance.store.check_integrity()
        assert instance.store.stats.writing == 0


@pytest.mark.slow
async def test_copies_come_as_their_holders_have_them() -> None:
    async with pool_and_caller() as caller, bench() as desk, node("a") as a:
        sizes = [1, 5_000, 70_000, 300_001]
        keys, blocks = keys_of(*range(4)), keys_of("k1", "k2")
        await caller.put(keys, sizes)
        await a.fill(desk, blocks)
        source = (await caller.counts()).instance
        other = config(instance_id="pool-1", transports="shm")
        async with running(pool.run, other) as second, stub(second.address) as rpc:
            wanted = [*keys, *blocks, keys_of("nowhere")[0]]
            pull = pb.PullBlocksRequest(
                keys=b"".join(wanted), holders=[a.ref, source], timeout_ms=5_000, background=True, term=3
            )
            assert (await rpc.Pull(pull, timeout=20)).held == b"\1" * 6 + b"\0"
            there = await rpc.Exists(pb.ExistsRequest(keys=b"".join(wanted)))
            assert list(there.nbytes) == [*sizes, SHARD, SHARD, 0]
            assert sorted(there.layouts) == sorted(["bytes", LAYOUT])
            told = await rpc.GetStore(pb.GetNodeStoreRequest())
            assert told.pulled_bytes == sum(sizes) + 2 * SHARD
            assert told.transports == "shm"
            mirror = Caller(rpc, told.instance.incarnation, caller.engine, blocks=caller.blocks)
            await mirror.check(keys)
            # An instance takes what is of its own layout, and lets the rest be.
            async with node("b") as b, stub(b.address) as to_b:
                pull.holders.append(told.instance)
                pull.holders[1].CopyFrom(told.instance)
                del pull.holders[2]
                assert (await to_b.Pull(pull, timeout=20)).held == b"\0" * 4 + b"\1\1\0"
                await b.check(desk, blocks)


@pytest.mark.slow
async def test_below_dram_too_blocks_are_copied_and_removed_for_good(tmp_path: Path) -> None:
    below: dict[str, Any] = {"ssd_path": str(tmp_path / "ssd"), "ssd_capacity_mb": 512, "ssd_offload_percent": 0}
    keys = keys_of(*range(18))

    async def told(caller: Caller) -> pb.ExistsResponse:
        return await caller.rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))

    async with pool_and_caller(**below) as caller:
        for at in range(0, 18, 6):
            assert (await caller.put(keys[at : at + 6], [300_000] * 6)).held == b"\1" * 6
            await until(lambda: written(caller))
        answer = await told(caller)
        cold = [key for key, tier in zip(keys, answer.tiers, strict=True) if tier == Tier.SSD]
        assert len(cold) > 4 and set(answer.nbytes) == {300_000} and list(answer.layouts) == ["bytes"]
        source = (await caller.counts()).instance
        other = config(instance_id="pool-1", transports="shm")
        async with running(pool.run, other) as second, stub(second.address) as rpc:
            pull = pb.PullBlocksRequest(keys=b"".join(cold[:5]), holders=[source], timeout_ms=9_000)

            async def copied() -> bool:
                """Again and again: as much as may be staged at once."""
                return all((await rpc.Pull(pull, timeout=20)).held)

            await until(copied)
            counts = await rpc.GetStore(pb.GetNodeStoreRequest())
            await Caller(rpc, counts.instance.incarnation, caller.engine, blocks=caller.blocks).check(cold[:5])
        pinned = await caller.rpc.Pin(pb.PinBlocksRequest(keys=cold[-1], kind=pb.PIN_KIND_HARD))
        assert pinned.done == b"\1", "brought up to be pinned"
        gone = [cold[0], keys[-1]]
        assert (await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(gone)))).removed == 2
        blocks = caller.blocks
    async with pool_and_caller(**below) as caller:
        answer = await told(caller)
        assert [bool(tier) for tier in answer.tiers] == [key not in gone for key in keys]
        caller.blocks = blocks
        await caller.check(cold[1:4])


async def written(caller: Caller) -> bool:
    """All that was put is below DRAM, wherever else it is."""
    counts = await caller.counts()
    return sum(tier.blocks for tier in counts.tiers) >= len(caller.blocks)

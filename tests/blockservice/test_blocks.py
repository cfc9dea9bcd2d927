"""Pulls between real node stores: leases over gRPC, bytes one-sided, and everything that may go wrong meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from kvmesh.blockservice import reader_lease
from kvmesh.blockservice.pulls import Pulls
from kvmesh.kvcache.sources import PullJob, PullRange
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.telemetry import names, setup
from tests.support.nodes import SHARD, Node, bench, keys_of, node, stub, until


def slow_reads(peer: str, delay_ms: int) -> str:
    return json.dumps({"rules": [{"kind": "delay", "peer": peer, "op": "read", "delay_ms": delay_ms}]})


def stuck_reads(peer: str) -> str:
    return json.dumps({"rules": [{"kind": "freeze", "peer": peer, "op": "read"}]})


def all_back(holder: Node, *readers: Node) -> None:
    """No lease, no reference, nothing being written: only sealed blocks."""
    for one in (holder, *readers):
        one.store.check_integrity()
        stats = one.store.stats
        assert (stats.writing, stats.leases) == (0, 0)
        assert one.store.free == one.store.total, "an extent is still held"
        assert one.blocks is not None and one.blocks.pulls == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_what_is_sealed_at_a_is_pulled_into_b(transport: str) -> None:
    keys = keys_of(*range(20))
    async with bench() as b, node("a", transports=(transport,)) as a, node("b", transports=(transport,)) as r:
        await a.fill(b, keys)
        pulled = await r.ended(r.pull(keys, [a.range_of(0, 20)]))
        assert pulled.arrived == tuple(range(20))
        assert (pulled.cause, pulled.bytes_done) == ("", 20 * SHARD)
        await r.check(b, keys)
        await until(lambda: a.store.stats.leases == 0)
        all_back(a, r)
        assert len(r.segments) == 1, "kept for the next pull"
        again = keys_of("more")
        await a.fill(b, again)
        assert (await r.ended(r.pull(again, [a.range_of(0, 1)]))).arrived == (0,)
        await r.check(b, again)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_node_calls_its_holders_by_the_fast_path(transport: str) -> None:
    """Over a Unix socket only where the node's own transports have shm."""
    keys = keys_of(*range(4))
    async with bench() as b, node("a", transports=(transport,)) as a, node("b", transports=(transport,)) as r:
        assert a.blocks is not None and r.blocks is not None
        await a.blocks.fast_paths.open("127.0.0.1", 0)
        await a.fill(b, keys)
        assert (await r.ended(r.pull(keys[:1], [a.range_of(0, 1)]))).arrived == (0,)
        peer = r.blocks._peers._peers[a.address]
        await until(lambda: peer.calls.by_door)
        path = peer.calls._fast_path
        assert path is not None and path._transport is not None
        family = path._transport.get_extra_info("socket").family
        assert family == (socket.AF_UNIX if transport == "shm" else socket.AF_INET)
        await a.server.stop(0)  # type: ignore[union-attr]  # nobody answers over gRPC any more
        assert (await r.ended(r.pull(keys[1:], [a.range_of(0, 3)]))).arrived == (0, 1, 2)
        await r.check(b, keys)
        await until(lambda: a.store.stats.leases == 0)
        all_back(a, r)


async def test_disjoint_ranges_of_two_holders_and_one_that_knows_less_than_was_said() -> None:
    keys = keys_of(*range(12))
    async with bench() as b, node("a") as a1, node("c") as a2, node("b") as r:
        await a1.fill(b, keys[:4])  # the placement says 0..6
        await a2.fill(b, keys[4:])
        pulled = await r.ended(r.pull(keys, [a1.range_of(0, 6), a2.range_of(6, 6), a2.range_of(0, 6)]))
        assert pulled.arrived == tuple(range(12)), pulled
        await r.check(b, keys)
        assert a2.store.stats.leases_given == 2


async def test_keys_that_nobody_holds_are_not_had() -> None:
    keys = keys_of(*range(3))
    async with bench() as b, node("a") as a, node("b") as r:
        await a.fill(b, keys[1:2])
        pulled = await r.ended(r.pull(keys, [a.range_of(0, 2), PullRange("x", "127.0.0.1:1", 5, 0, 3)]))
        assert pulled.arrived == (1,)
        assert "a: holds 1 of 2" in pulled.cause and "x: " in pulled.cause
        assert not (await r.ended(r.pull(keys_of("none"), []))).arrived
        await until(lambda: a.store.stats.leases == 0)
        all_back(a, r)


async def test_another_life_of_the_holder_gives_nothing() -> None:
    keys = keys_of("k")
    async with bench() as b, node("a", incarnation=9) as a, node("b") as r:
        await a.fill(b, keys)
        old = PullRange("a", a.address, 8, 0, 1)
        pulled = await r.ended(r.pull(keys, [old]))
        assert not pulled.arrived and "another life" in pulled.cause
        assert (await r.ended(r.pull(keys, [old, a.range_of(0, 1)]))).arrived == (0,)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.slow
async def test_a_holder_killed_in_the_middle_of_the_pull_is_left_for_the_next(transport: str) -> None:
    keys = keys_of(*range(8))
    fault = stuck_reads("a/*")  # what is read from a never comes
    async with (
        bench() as b,
        node("a", transports=(transport,)) as a,
        node("c", transports=(transport,)) as c,
        node("b", transports=(transport,), fault=fault) as r,
    ):
        await a.fill(b, keys)
        await c.fill(b, keys)
        job = r.pull(keys, [a.range_of(0, 8), c.range_of(0, 8)], timeout_ms=4_000)
        await until(lambda: a.store.stats.leases == 1)
        a.kill_rank()
        await a.server.stop(0)  # type: ignore[union-attr]
        pulled = await r.ended(job)
        assert pulled.arrived == tuple(range(8)), pulled
        await r.check(b, keys)


async def test_without_another_holder_a_killed_one_ends_the_pull_with_a_cause() -> None:
    keys = keys_of(*range(8))
    async with bench() as b, node("a") as a, node("b", fault=stuck_reads("a/*")) as r:
        await a.fill(b, keys)
        job = r.pull(keys, [a.range_of(0, 8)], timeout_ms=1_000)
        await until(lambda: a.store.stats.leases == 1)
        a.kill_rank()
        await a.server.stop(0)  # type: ignore[union-attr]
        pulled = await r.ended(job)
        assert pulled.arrived == () and pulled.cause
        assert len(r.segments) == 0, "a dead peer's memory is let go"
        assert r.store.free == r.store.total


async def test_bytes_that_came_after_the_lease_are_discarded() -> None:
    """The reads are slower than the lease, and the holder is not there to renew it."""
    keys = keys_of(*range(4))
    fault = slow_reads("a/*", 2_000)
    async with bench() as b, node("a", lease_ms=700) as a, node("b", fault=fault) as r:
        await a.fill(b, keys)
        job = r.pull(keys, [a.range_of(0, 4)], timeout_ms=8_000)
        await until(lambda: len(r.segments) == 1)  # the lease has come, and the read begins
        await a.server.stop(0)  # type: ignore[union-attr]
        pulled = await r.ended(job)
        assert pulled.arrived == () and "the lease ran out" in pulled.cause
        await until(lambda: a.store.stats.leases == 0)  # by its timer: nobody gave it back


@pytest.mark.slow
async def test_a_lease_is_renewed_while_slow_bytes_move() -> None:
    keys = keys_of(*range(4))
    async with bench() as b, node("a", lease_ms=1_500) as a, node("b", fault=slow_reads("a/*", 2_500)) as r:
        await a.fill(b, keys)
        pulled = await r.ended(r.pull(keys, [a.range_of(0, 4)]))
        assert pulled.arrived == (0, 1, 2, 3), pulled
        await r.check(b, keys)


async def test_blocks_under_lease_are_not_evicted_and_afterwards_they_are() -> None:
    keys = keys_of(*range(8))
    async with bench() as b, node("a", total=8, lease_ms=60_000) as a, stub(a.address) as holder:
        await a.fill(b, keys[:4])
        asked = pb.LeaseRequest(
            holder_incarnation=7, keys=b"".join(keys[:4]), lease_ms=60_000, layout=a.partition.layout
        )
        lease = await holder.Lease(asked)
        assert lease.held == b"\1" * 4 and len(lease.ranks[0].offset) == 4
        assert lease.ranks[0].segment_descriptor == b""
        assert a.store.begin(keys[4:] + keys_of("ninth")).count(None) == 1
        for key in keys[4:]:
            a.store.abandon(key)
        await holder.ReleaseLease(pb.ReleaseBlocksRequest(lease_id=lease.lease_id))
        assert len(a.store.allocate(8)) == 8 and not a.store.holds(keys[0])


async def test_a_cancelled_pull_ends_soon_and_once() -> None:
    keys = keys_of(*range(4))
    async with bench() as b, node("a") as a, node("b", fault=slow_reads("a/*", 300)) as r:
        await a.fill(b, keys)
        job = r.pull(keys, [a.range_of(0, 4)], timeout_ms=60_000)
        await until(lambda: a.store.stats.leases == 1)
        assert r.blocks is not None
        r.blocks.cancel_pull(job.ticket)
        r.blocks.cancel_pull(job.ticket)
        r.blocks.cancel_pull(12345)
        pulled = await r.ended(job)
        assert len(pulled.arrived) < 4 or not pulled.cause
        await until(lambda: a.store.stats.leases == 0)
        all_back(a, r)


async def test_a_lease_granted_after_the_pull_was_cancelled_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, ask, heard = keys_of(*range(4)), reader_lease.ask, asyncio.Event()

    async def ask_and_hear_late(*args: Any) -> reader_lease.ReaderLease | None:
        lease = await ask(*args)
        await heard.wait()
        return lease

    monkeypatch.setattr(reader_lease, "ask", ask_and_hear_late)
    async with bench() as b, node("a", lease_ms=60_000) as a, node("b", lease_ms=60_000) as r:
        await a.fill(b, keys)
        job = r.pull(keys, [a.range_of(0, 4)], timeout_ms=60_000)
        await until(lambda: a.store.stats.leases == 1)
        assert r.blocks is not None
        r.blocks.cancel_pull(job.ticket)
        assert not (await r.ended(job)).arrived
        heard.set()
        await until(lambda: a.store.stats.leases == 0)
        all_back(a, r)


async def test_a_cancelled_pull_from_a_frozen_holder_ends_too() -> None:
    """The holder's rank is stopped: over tcp nobody answers the read, and only the deadline cuts its connection."""
    keys = keys_of(*range(4))
    async with bench() as b, node("a", transports=("tcp",)) as a, node("b", transports=("tcp",)) as r:
        await a.fill(b, keys)
        os.kill(a.rank.pid, signal.SIGSTOP)
        try:
            job = r.pull(keys, [a.range_of(0, 4)], timeout_ms=1_500)
            await until(lambda: a.store.stats.leases == 1)
            assert r.blocks is not None
            r.blocks.cancel_pull(job.ticket)
            pulled = await r.ended(job)
            assert pulled.arrived == () and "cancelled" in pulled.cause
        finally:
            os.kill(a.rank.pid, signal.SIGCONT)


async def test_a_reader_whose_own_rank_dies_ends_its_pulls() -> None:
    keys = keys_of(*range(4))
    async with bench() as b, node("a") as a, node("b", fault=stuck_reads("a/*")) as r:
        await a.fill(b, keys)
        job = r.pull(keys, [a.range_of(0, 4)], timeout_ms=60_000)
        await until(lambda: a.store.stats.leases == 1)
        r.kill_rank()
        pulled = await r.ended(job)
        assert pulled.arrived == () and "rank" in pulled.cause
        again = r.pull(keys_of("later"), [a.range_of(0, 1)])
        assert not (await r.ended(again)).arrived


async def test_closing_ends_what_runs() -> None:
    keys = keys_of(*range(4))
    async with bench() as b, node("a") as a, node("b", fault=stuck_reads("a/*")) as r:
        await a.fill(b, keys)
        job = r.pull(keys, [a.range_of(0, 4)], timeout_ms=60_000)
        await until(lambda: a.store.stats.leases == 1)
        assert r.blocks is not None
        await r.blocks.close()
        await r.blocks.close()
        assert not (await r.ended(job)).arrived


async def test_many_pulls_of_one_holder_at_once_share_its_segment() -> None:
    async with bench() as b, node("a", total=128) as a, node("b", total=128) as r:
        keys = keys_of(*range(96))
        await a.fill(b, keys)
        jobs = [r.pull(keys[i : i + 4], [a.range_of(0, 4)]) for i in range(0, 96, 4)]
        ends = await asyncio.gather(*(r.ended(job) for job in jobs))
        assert all(end.arrived == (0, 1, 2, 3) for end in ends), ends
        await r.check(b, keys[::7])
        assert len(r.segments) == 1
        await until(lambda: a.store.stats.leases == 0)
        all_back(a, r)


async def test_a_range_that_breaks_does_not_end_the_job_under_the_reads_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else extents are given back, and to others, while bytes still land in them."""
    keys = keys_of(*range(4))
    trace = Pulls._trace

    def broken(pulls: Pulls, job: PullJob, source: PullRange, *rest: Any) -> None:
        if source.instance_id == "nowhere":
            raise RuntimeError("no disk for spans")
        trace(pulls, job, source, *rest)

    monkeypatch.setattr(Pulls, "_trace", broken)
    async with bench() as b, node("a") as a, node("b", fault=slow_reads("a/*", 700)) as r:
        await a.fill(b, keys)
        pulled = await r.ended(r.pull(keys, [a.range_of(0, 3), PullRange("nowhere", "127.0.0.1:1", 1, 3, 1)]))
        assert pulled.arrived == (0, 1, 2) and "no disk" in pulled.cause
        await until(lambda: a.store.stats.leases == 0)
        all_back(a, r)


async def test_one_span_for_each_holder_under_the_request_s(tmp_path: Path) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    keys = keys_of(*range(6))
    telemetry = setup.start("prefill", "b", trace_dir=str(tmp_path), otlp_endpoint="", log_level="info")
    try:
        async with bench() as b, node("a") as a, node("c") as c, node("b") as r:
            await a.fill(b, keys[:2])
            await c.fill(b, keys)
            job = r.pull(keys, [a.range_of(0, 4), c.range_of(0, 6)], traceparent=f"00-{trace}-{parent}-01")
            assert len((await r.ended(job)).arrived) == 6
    finally:
        telemetry.shutdown()
    fetched = []
    lines = read_spans(tmp_path)
    # Under each of them its rank's transfer: from where to where its bytes went, and when.
    fetches = {line["span_id"]: line for line in lines if line["name"] == names.SPAN_FETCH}
    moved = [line for line in lines if line["name"] == names.SPAN_TRANSFER]
    assert len(moved) == len(fetches) == 3 and len(lines) == 12
    # And what its holder did for it. Over shm the reader reads by itself, and the holder's span says that it saw none.
    for name in (names.SPAN_LEASE, names.SPAN_SERVE):
        held = [line for line in lines if line["name"] == name]
        assert {line["parent"] for line in held} == set(fetches)
        assert sum(line["attributes"][names.LEASED_BYTES] for line in held) == 6 * SHARD
        assert {line["attributes"][names.READER] for line in held} == {"b"}
    assert all(not line["attributes"][names.READS_SEEN] and not line["status"] for line in held)
    for line in moved:
        told, around = line["attributes"], fetches.pop(line["parent"])
        assert told[names.TRANSFER_BYTES] == around["attributes"][names.PULL_BYTES] > 0
        assert (told[names.TRANSFER_OPERATION], told[names.TRANSFER_TRANSPORT]) == ("read", "shm")
        assert told[names.TRANSFER_RAILS] == f"shm={told[names.TRANSFER_BYTES]}" and told[names.TRANSFER_RETRIES] == 0
        assert around["start_ns"] <= line["start_ns"] <= line["end_ns"] <= around["end_ns"]
    for line in (line for line in lines if line["name"] == names.SPAN_FETCH):
        text = json.dumps(line)
        assert trace in text and parent in text and "req-1" in text
        told = line["attributes"]
        assert told[names.PULL_BYTES] == told[names.BLOCKS] * SHARD
        fetched.append((told[names.HOLDER], told[names.WANTED_BLOCKS], told[names.BLOCKS]))
    # What a was said to hold and does not, c is asked for afterwards.
    assert sorted(fetched) == [("a", 4, 2), ("c", 2, 2), ("c", 2, 2)]


def read_spans(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]

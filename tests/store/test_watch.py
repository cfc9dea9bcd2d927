"""Blocks over real gRPC: node stores announce, watchers follow, masters restart."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvmesh.errors import Overloaded, Unavailable
from kvmesh.kvcache.announce import Announcement
from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2
from kvmesh.rpc.server import Server
from kvmesh.services.store import block_map, main, watchers
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.domain import Announce
from tests.support.services import running, until
from tests.support.store.mesh import TIMEOUT, Node, Watcher, keys, wire


def config(**more: Any) -> StoreConfig:
    return StoreConfig(**{"heartbeat_interval_ms": 50, "lease_ms": 60_000, **more})


async def status_of(stub: Any) -> store_pb2.GetStoreStatusResponse:
    answer = await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT)
    assert isinstance(answer, store_pb2.GetStoreStatusResponse)
    return answer


async def holders(stub: Any, wanted: list[bytes]) -> list[set[str]]:
    answer = await stub.Lookup(store_pb2.LookupRequest(keys=b"".join(wanted)), timeout=TIMEOUT)
    return [set(found.store_ids) for found in answer.holders]


async def test_what_nodes_announce_is_looked_up_counted_and_watched() -> None:
    async with running(main.run, config()) as master, channels.connect(master.address) as channel:
        a, b = Node(channel, "a"), Node(channel, "b", total=40)
        watcher = Watcher(channel)
        a.seal(keys(20))
        b.seal(keys(10))
        for node in (a, b):
            await node.join()
            await node.announce()
        both, only_a, nobody = keys(20)[3], keys(20)[15], keys(1, salt=9)[0]
        assert await holders(a.stub, [both, nobody, only_a, both]) == [{"a", "b"}, set(), {"a"}, {"a", "b"}]
        status = await status_of(a.stub)
        assert (status.blocks, status.replicas) == (20, 30)
        assert [(s.member.store_id, s.blocks, s.seq) for s in status.stores] == [("a", 20, 1), ("b", 10, 1)]
        assert status.map_bytes > 16 * 20
        b.seal(keys(35, salt=1))  # evicts
        await b.announce()
        await watcher.until(lambda: watcher.knows((a, b)) and len(watcher.members) == 2)
        assert watcher.blocks.seq("b") == b.announcer.seq
        assert {e.blocks.seq for e in watcher.events if e.blocks.store_id == "b"} >= {1, 2}  # its own numbers


async def test_a_gap_asks_for_a_snapshot_and_repeats_are_harmless() -> None:
    async with running(main.run, config()) as master, channels.connect(master.address) as channel:
        node = Node(channel, "a")
        await node.join()
        first, second = (Announcement("a", 1, seq, (key,)) for seq, key in enumerate(keys(2), 1))
        late = await node.stub.Announce(wire(second), timeout=TIMEOUT)
        assert late.want_snapshot and late.seq == 0
        for _ in range(2):
            answer = await node.stub.Announce(wire(first), timeout=TIMEOUT)
            assert not answer.want_snapshot and answer.seq == 1
        assert await holders(node.stub, keys(2)) == [{"a"}, set()]
        tail = await node.stub.Announce(wire(Announcement("a", 1, 2)), timeout=TIMEOUT)
        assert tail.want_snapshot  # an empty batch says that the second was lost


async def test_a_restarted_master_is_rebuilt_by_announcements() -> None:
    async with running(main.run, config()) as first, channels.connect(first.address) as channel:
        nodes = [Node(channel, "a"), Node(channel, "b")]
        for salt, node in enumerate(nodes):
            node.seal(keys(50, salt))
            await node.announce()  # the master knows nobody: they join on the way
            node.seal(keys(5, salt + 10))
            await node.announce()
        before = await status_of(nodes[0].stub)
        watcher = Watcher(channel)
        await watcher.until(lambda: watcher.knows(nodes))
        await first.stop()
        with pytest.raises(Unavailable):
            await watcher.until(lambda: False)
        nodes[0].seal(keys(7, 20))  # nobody hears of it
        async with running(main.run, config(port=first.port)):
            for node in nodes:
                await node.announce()
            after = await status_of(nodes[0].stub)
            assert after.master_incarnation != before.master_incarnation
            assert (after.blocks, after.replicas) == (117, 117)
            again = Watcher(channel)
            await again.until(lambda: again.knows(nodes))
            assert again.master == after.master_incarnation
            assert set(again.members) == {"a", "b"}


async def test_a_restarted_instance_has_none_of_its_old_blocks() -> None:
    async with running(main.run, config()) as master, channels.connect(master.address) as channel:
        old = Node(channel, "a", incarnation=1)
        old.seal(keys(10))
        await old.announce()
        watcher = Watcher(channel)
        await watcher.until(lambda: watcher.knows([old]))
        new = Node(channel, "a", incarnation=2)
        await new.join()
        assert await holders(new.stub, keys(10)) == [set()] * 10
        await watcher.until(lambda: watcher.members["a"].instance.incarnation == 2)
        assert len(watcher.blocks) == 0  # by the member event alone
        assert all(e.HasField("member") for e in watcher.events)
        late = old.stub.Announce(wire(Announcement("a", 1, 2, tuple(keys(1)))), timeout=TIMEOUT)
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            await late
        assert await holders(new.stub, keys(10)) == [set()] * 10
        new.seal(keys(3, salt=5))
        await new.announce()
        await watcher.until(lambda: watcher.knows([new]))


@pytest.fixture
async def master() -> AsyncIterator[tuple[main.Master, grpc.aio.Channel]]:
    """A master whose clock and ticks are the test's: nothing happens between two of its lines."""
    service = main.Master(config(heartbeat_interval_ms=10_000, watch_queue_bytes=1 << 20))
    server = Server("127.0.0.1", 0)
    service.add_to(server)
    await server.start()
    try:
        async with channels.connect(server.address) as channel:
            yield service, channel
    finally:
        await service.close()
        await server.stop(0)


async def test_a_snapshot_of_many_parts_while_everything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher reads its first message, then stores change, leave and come."""
    monkeypatch.setattr(block_map, "READ_KEYS", 1000)
    monkeypatch.setattr(watchers, "SNAPSHOT_BYTES", 20_000)
    async with running(main.run, config()) as master, channels.connect(master.address) as channel:
        big, leaving, coming = Node(channel, "big", 25_000), Node(channel, "leaving", 25_000), Node(channel, "coming")
        big.seal(keys(20_000))
        leaving.seal(keys(20_000, salt=1))
        await leaving.announce()
        await big.announce()
        watcher = Watcher(channel)
        await watcher.read()
        assert watcher.seq is None, "there is more"
        big.seal(keys(30, salt=2))
        await big.announce()
        await leaving.leave()
        await leaving.announce()  # joins again
        await leaving.leave()
        coming.seal(keys(30, salt=3))
        await coming.announce()
        await watcher.until(lambda: set(watcher.members) == {"big", "coming"} and watcher.knows([big, coming]))
        assert watcher.snapshot_messages >= 20
        assert watcher.blocks.keys_of("leaving") == []
        assert watcher.seq == watcher.events[-1].seq
        assert (await status_of(big.stub)).replicas == watcher.blocks.replicas == 20_060


async def test_a_watcher_that_falls_behind_is_closed_and_starts_over(
    master: tuple[main.Master, grpc.aio.Channel],
) -> None:
    service, channel = master
    assert service.session is not None
    node = Node(channel, "a")
    await node.join()
    watcher = Watcher(channel)
    await watcher.until(lambda: True)
    for seq in range(1, 20):  # 1.2 MB in one turn of the loop: the stream cannot keep up
        service.session.servicer._step(Announce(Announcement("a", 1, seq, tuple(keys(4000, seq)))))
    with pytest.raises(Unavailable, match="behind"):
        await watcher.until(lambda: False)

    async def nobody_watches() -> bool:
        return len(service.session.watchers) == 0

    await until(nobody_watches)
    again = Watcher(channel)
    await again.until(lambda: again.blocks.count("a") == 19 * 4000)
    assert again.seq == service.session.state.seq


async def test_a_snapshot_ends_when_its_watcher_is_overrun(
    master: tuple[main.Master, grpc.aio.Channel],
) -> None:
    """A watcher that is lost anyhow does not get the rest of a great snapshot."""
    service, channel = master
    assert service.session is not None
    node = Node(channel, "a")
    await node.join()
    for seq in range(1, 4):
        service.session.servicer._step(Announce(Announcement("a", 1, seq, tuple(keys(65_536, seq)))))
    watcher = Watcher(channel)
    await watcher.read()
    for seq in range(4, 6):
        service.session.servicer._step(Announce(Announcement("a", 1, seq, tuple(keys(65_536, seq)))))
    with pytest.raises(Unavailable, match="behind"):
        await watcher.until(lambda: False)


async def test_small_announcements_share_a_message(master: tuple[main.Master, grpc.aio.Channel]) -> None:
    service, channel = master
    assert service.session is not None
    node = Node(channel, "a")
    await node.join()
    watcher = Watcher(channel)
    await watcher.until(lambda: True)
    for seq in range(1, 301):  # in one turn of the loop
        service.session.servicer._step(Announce(Announcement("a", 1, seq, tuple(keys(1, seq % 256)))))
    sizes: list[int] = []
    while watcher.blocks.seq("a") < 300:
        sizes.append(len((await watcher.read()).events))
    assert sum(sizes) == 300
    assert len(sizes) <= 3


async def test_a_dropped_store_vanishes_at_once_and_its_memory_soon(
    master: tuple[main.Master, grpc.aio.Channel],
) -> None:
    service, channel = master
    assert service.session is not None
    node = Node(channel, "a", 30_000)
    node.seal(keys(25_000))
    await node.announce()
    full = (await status_of(node.stub)).map_bytes
    await node.leave()
    status = await status_of(node.stub)
    assert (status.blocks, status.replicas, len(status.stores)) == (0, 0, 0)
    assert await holders(node.stub, keys(2)) == [set(), set()]
    known = service.session.state.blocks.map
    assert known.unswept == 25_000  # no tick yet
    service.tick()
    assert 0 < known.unswept < 25_000  # a slice only

    async def swept() -> bool:
        return known.unswept == 0

    await until(swept)
    assert known._masks == {}
    assert (await status_of(node.stub)).map_bytes < full


async def test_watchers_are_bounded() -> None:
    async with running(main.run, config(max_watchers=2)) as master, channels.connect(master.address) as channel:
        kept = [Watcher(channel), Watcher(channel)]
        for watcher in kept:
            await watcher.read()
        with pytest.raises(Overloaded, match="max_watchers"):
            await Watcher(channel).read()
        kept[0].stream.cancel()

        async def room() -> bool:
            try:
                await Watcher(channel).read()
            except Overloaded:
                return False
            return True

        await until(room)

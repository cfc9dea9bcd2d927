"""A master that has not heard from everybody says so to whoever looks for blocks."""

from __future__ import annotations

from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.services.store import main
from kvmesh.services.store.config import StoreConfig
from tests.support.services import running, until
from tests.support.store.mesh import TIMEOUT, Node, keys


async def test_a_key_without_replicas_is_no_miss_before_all_have_announced() -> None:
    config = StoreConfig(heartbeat_interval_ms=100, lease_ms=2000)
    async with running(main.run, config) as service, channels.connect(service.address) as channel:
        stub = store_pb2_grpc.StoreMasterStub(channel)

        async def find() -> store_pb2.FindResponse:
            return await stub.Find(store_pb2.FindRequest(keys=b"".join(keys(2))), timeout=TIMEOUT)  # type: ignore[no-any-return]

        assert (await find()).rebuilding, "nobody has had the time to join"

        async def grown_up() -> bool:
            return not (await find()).rebuilding

        await until(grown_up)
        for incarnation in (1, 2):  # a member's next life begins anew
            node = Node(channel, "a", incarnation=incarnation)
            await node.join()
            assert (await find()).rebuilding, "it may hold anything"
            status = await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT)
            assert list(status.rebuilding) == ["a"]
            node.seal(keys(1))
            await node.announce()
            answer = await find()
            assert not answer.rebuilding
            assert [list(replicas.holder) for replicas in answer.replicas] == [[0], []]

"""Node stores that announce to a real master, and a watcher that keeps what it hears."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvmesh.errors import UnknownInstance
from kvmesh.kvcache.announce import Announcement, Announcer
from kvmesh.kvcache.block_map import BlockMap, Verdict
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.rpc import protocol, status
from kvmesh.rpc.pb import common_pb2, store_pb2, store_pb2_grpc

TIMEOUT = 10.0


def keys(count: int, salt: int = 0) -> list[bytes]:
    """`count` keys, others for each salt."""
    return [bytes([salt]) + i.to_bytes(15, "little") for i in range(count)]


def joining(name: str, incarnation: int = 1, version: int = protocol.PROTOCOL_VERSION) -> store_pb2.JoinRequest:
    ref = common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=incarnation)
    member = store_pb2.Member(instance=ref, role=common_pb2.ROLE_PREFILL, node_id="n", store_id=name)
    return store_pb2.JoinRequest(protocol_version=version, member=member)


def wire(said: Announcement) -> store_pb2.AnnounceRequest:
    return store_pb2.AnnounceRequest(
        announcement=store_pb2.Announcement(
            store_id=said.store_id,
            incarnation=said.incarnation,
            seq=said.seq,
            sealed=b"".join(said.sealed),
            removed=b"".join(said.removed),
            snapshot=said.snapshot,
            part=said.part,
            more=said.more,
        )
    )


class Node:
    """A node store with its announcer; joins again whenever the master does not know it."""

    def __init__(self, channel: grpc.aio.Channel, name: str, total: int = 1000, incarnation: int = 1) -> None:
        self.stub: Any = store_pb2_grpc.StoreMasterStub(channel)
        self.name, self.incarnation = name, incarnation
        self.store = NodeStore(total)
        self.announcer = Announcer(name, incarnation, self.store)

    async def join(self) -> None:
        await self.stub.Join(joining(self.name, self.incarnation), timeout=TIMEOUT, wait_for_ready=True)

    async def leave(self) -> None:
        await self.stub.Leave(store_pb2.LeaveRequest(instance=joining(self.name).member.instance), timeout=TIMEOUT)

    def seal(self, new: Sequence[bytes]) -> None:
        for key, extent in zip(new, self.store.begin(new), strict=True):
            assert extent is not None, "the store is too small for this test"
            self.store.seal(key)

    async def announce(self) -> None:
        """Until there is nothing new to say."""
        force = True
        while said := self.announcer.next(force):
            force = False
            try:
                answer = await self.stub.Announce(wire(said), timeout=TIMEOUT, wait_for_ready=True)
            except grpc.RpcError as err:
                if not isinstance(status.from_rpc_error(err), UnknownInstance):
                    raise
                await self.join()
                self.announcer.restart()
            else:
                self.announcer.acked(answer.want_snapshot)


class Watcher:
    """One watch stream. GAP or a seq out of order is an AssertionError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stream: Any = store_pb2_grpc.StoreMasterStub(channel).Watch(store_pb2.WatchRequest())
        self.blocks = BlockMap()
        self.members: dict[str, store_pb2.Member] = {}
        self.seq: int | None = None
        self.master = 0
        self.snapshot_messages = 0
        self.events: list[store_pb2.StoreEvent] = []

    async def read(self) -> store_pb2.StoreEvents:
        """One message, taken in. The error of a broken stream is raised by its name."""
        try:
            message = await asyncio.wait_for(self.stream.read(), TIMEOUT)
        except grpc.RpcError as err:
            raise status.from_rpc_error(err) from None
        assert message is not grpc.aio.EOF
        assert message.ByteSize() < 3 << 20
        self.master = message.master_incarnation
        if message.snapshot:
            assert self.seq is None, "one snapshot a stream"
            self.snapshot_messages += 1
            self.seq = None if message.more else message.seq
        for event in message.events:
            if not message.snapshot:
                assert self.seq is not None and event.seq == self.seq + 1
                self.seq = event.seq
                self.events.append(event)
            self._take(event)
        assert message.snapshot or message.seq == self.seq
        return message

    def _take(self, event: store_pb2.StoreEvent) -> None:
        if event.HasField("blocks"):
            said = event.blocks
            cut = [[raw[at : at + 16] for at in range(0, len(raw), 16)] for raw in (said.sealed, said.removed)]
            sealed, removed = map(tuple, cut)
            verdict = self.blocks.apply(
                Announcement(
                    said.store_id, said.incarnation, said.seq, sealed, removed, said.snapshot, said.part, said.more
                )
            )
            assert verdict not in (Verdict.GAP, Verdict.STALE)
            return
        member = event.member.member
        if event.member.change == store_pb2.MEMBER_CHANGE_JOINED:
            assert member.instance.instance_id not in self.members
            self.members[member.instance.instance_id] = member
        else:
            assert self.members.pop(member.instance.instance_id) == member
            self.blocks.drop(member.store_id, member.instance.incarnation)

    async def until(self, what: Callable[[], bool]) -> None:
        while self.seq is None or not what():
            await self.read()

    def knows(self, nodes: Iterable[Node]) -> bool:
        return all(set(self.blocks.keys_of(node.name)) == set(node.store.keys()) for node in nodes)

"""Find: both forms of its answer say the same, and what BlockMap says."""

from __future__ import annotations

import random
import struct
from typing import Any

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.tiers import Tier, store_name
from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc
from kvmesh.rpc.server import Server
from kvmesh.services.store import main
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.domain import Announce, NodeJoined, NodeRole, RegisteredNode
from kvmesh.services.store.servicer import found
from kvmesh.services.store.state import MasterState
from tests.support.store.mesh import keys as numbered

Place = tuple[str, int]


def named(answer: pb.FindResponse, replicas: pb.Replicas) -> list[Place]:
    return [(answer.holders[at].member.store_id, tier) for at, tier in zip(replicas.holder, replicas.tier, strict=True)]


def test_grouped_answers_say_the_same() -> None:
    rng = random.Random(5)
    keys = [rng.randbytes(16) for _ in range(300)]
    state = MasterState(lease_s=2.0, stall_s=1e9)
    held: dict[bytes, list[Place]] = {key: [] for key in keys}
    for i, name in enumerate(("a", "b", "c")):
        list(state.step(NodeJoined(RegisteredNode(name, f"h:{i + 1}", 1, NodeRole.POOL, "node", name)), 0.0))
        for tier in (Tier.DRAM, Tier.SSD):
            some = rng.sample(keys, 120)
            said = Announcement(store_name(name, tier), 1, 1, tuple(some), (), True, 0, False)
            list(state.step(Announce(said), 0.0))
            for key in some:
                held[key].append((name, int(tier)))
    plain, grouped = found(state, keys), found(state, keys, grouped=True)
    assert not plain.groups and not plain.group and not grouped.replicas
    group = struct.unpack(f"<{len(keys)}H", grouped.group)
    assert len(grouped.groups) == len(set(group)) < len(keys)
    for key, replicas, at in zip(keys, plain.replicas, group, strict=True):
        assert sorted(named(plain, replicas)) == sorted(held[key])
        assert sorted(named(grouped, grouped.groups[at])) == sorted(held[key])


async def test_who_only_wants_to_know_warms_nothing() -> None:
    service = main.Master(StoreConfig())
    server = Server("127.0.0.1", 0)
    service.add_to(server)
    await server.start()
    try:
        assert service.session is not None
        heat = service.session.state.policy.heat
        async with channels.connect(server.address) as channel:
            stub: Any = store_pb2_grpc.StoreMasterStub(channel)
            packed = b"".join(numbered(4096))
            await stub.Lookup(pb.LookupRequest(keys=packed, uncounted=True), timeout=10)
            assert len(heat) == 0
            await stub.Lookup(pb.LookupRequest(keys=packed), timeout=10)
            assert len(heat) > 100
    finally:
        await service.close()
        await server.stop(0)

"""What the master forgets by itself and what the conductor's index then has: never a block that its node has said to be
gone, whatever was removed, or left out of the master's map for want of memory."""

from __future__ import annotations

import random

import pytest

from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.tombstones import Tombstone
from kvmesh.rpc.pb.store_pb2 import StoreUsage
from kvmesh.services.conductor.prefixes.index import Index
from kvmesh.services.store.domain import Announce, Beat, Heard, NodeJoined, NodeRole, RegisteredNode, Relay
from kvmesh.services.store.policy.store_policy import PolicyLimits
from kvmesh.services.store.state import MasterState

NAMES = "abc"


class World:
    """A master, three nodes, a conductor that has followed from the start and one that comes late."""

    def __init__(self, map_bytes: int) -> None:
        limits = PolicyLimits(max_map_bytes=map_bytes)
        self.master = MasterState(lease_s=1e9, stall_s=1e9, limits=limits)
        self.stores = {name: NodeStore(200, high_percent=100) for name in NAMES}
        self.tellers = {name: Announcer(name, 1, store, max_keys=7) for name, store in self.stores.items()}
        self.applied = dict.fromkeys(NAMES, 0)
        self.follower, self.late = Index(), Index()
        for name in NAMES:
            self.master.step(NodeJoined(RegisteredNode(name, f"{name}:1", 1, NodeRole.POOL, name, name)), 0.0)
            self.master.step(Beat(name, 1, StoreUsage(capacity_bytes=1 << 30, free_bytes=1 << 30)), 0.0)

    def hear(self, index: Index, said: object) -> None:
        if isinstance(said, Relay):
            assert index.hear(said.announcement, (said.announcement.store_id, 1), None)

    def says(self, name: str, *, force: bool = False) -> bool:
        """One announcement of a node; whether there was one."""
        word = self.tellers[name].next(force)
        if word is None:
            return False
        for action in self.master.step(Announce(word), 0.0):
            self.hear(self.follower, action)
            self.hear(self.late, action)
            if isinstance(action, Heard):
                self.tellers[name].acked(action.want_snapshot)
        return True

    def comes_late(self) -> None:
        """Another conductor takes the late one's place: it begins with what the master's map shows."""
        self.late = Index()
        for said in self.master.read().announcements():
            assert self.late.hear(said, (said.store_id, 1), None)

    def apply(self, name: str, tombstones: list[Tombstone]) -> None:
        for each in tombstones:
            self.stores[name].remove([key for key in self.stores[name].keys() if each.covers(key)])  # noqa: SIM118
            self.applied[name] = each.seq

    def beats(self, name: str) -> None:
        self.apply(name, self.master.policy.tombstones.newer(name))
        self.master.step(Beat(name, 1, None, self.applied[name]), 0.0)

    def quiet(self) -> None:
        """All have said all, and what is to be cleared away is."""
        while self.master.blocks.sweep(100):
            pass
        for name in NAMES:
            self.beats(name)
        for _ in range(4):  # a snapshot that is owed is asked for in the answer to an empty word
            for name in NAMES:
                self.says(name, force=True)
                while self.says(name):
                    pass


def kept(index: Index, name: str) -> set[bytes]:
    return set(index.truth.keys_of(name))


@pytest.mark.parametrize("seed", range(6))
def test_the_index_has_what_nodes_have_though_the_master_forgets(seed: int) -> None:
    rng = random.Random(seed)
    world = World(9000 if seed % 2 else 0)
    keys = [rng.choice([b"tag1", b"tag2"]) + rng.randbytes(12) for _ in range(300)]
    shed = 0
    for _ in range(400):
        name, some = rng.choice(NAMES), rng.sample(keys, rng.randrange(1, 9))
        match rng.choice(["seal", "seal", "drop", "say", "say", "remove", "prefix", "beat", "sweep", "late", "quiet"]):
            case "seal":
                begun = zip(some, world.stores[name].begin(some), strict=True)
                for key in [key for key, extent in begun if extent is not None]:
                    world.stores[name].seal(key)
            case "drop":
                world.stores[name].remove(some)
            case "say":
                world.says(name, force=rng.random() < 0.3)
            case "remove":
                world.master.policy.remove(some, b"", 0.0)
            case "prefix":
                world.master.policy.remove([], rng.choice([b"tag1", some[0][:6]]), 0.0)
            case "beat":
                world.beats(name)
            case "sweep":
                world.master.blocks.sweep(3)
            case "late":
                world.comes_late()
            case "quiet":
                world.quiet()
                for each, store in world.stores.items():
                    assert kept(world.follower, each) == set(store.keys())
                    assert kept(world.late, each) <= set(store.keys())
                    if not world.master.policy.memory.missing:
                        assert kept(world.late, each) == set(store.keys())
                shed = max(shed, world.master.policy.memory.missing)
    assert (shed > 0) == bool(seed % 2), "the master's memory was not short"

"""A small world for the master's brain: node stores with their announcers, calls that get lost, time by hand.

`Shown` is what the master's map must show, computed the slow way: by replaying everything that each life has said and
everything that was removed, one key at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.kvcache.announce import Announcement, Announcer
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.tiers import Tier, store_name
from kvmesh.kvcache.tombstones import Tombstone
from kvmesh.rpc.pb.store_pb2 import StoreUsage, TierUsage
from kvmesh.services.store.domain import (
    Announce,
    Beat,
    Heard,
    NodeJoined,
    NodeRole,
    Publish,
    RefuseCall,
    RegisteredNode,
)
from kvmesh.services.store.policy.copies import DiscardOrder, Order, PinOrder, PullOrder, TrimOrder
from kvmesh.services.store.policy.store_policy import PolicyLimits
from kvmesh.services.store.state import MasterState

LEASE = 100.0
EXTENTS = 64


@dataclass
class Life:
    """What the master must show of one store of one life."""

    seq: int = 0
    keys: set[bytes] = field(default_factory=set)
    staged: set[bytes] | None = None
    staged_seq: int = 0
    staged_parts: int = 0


class Shown:
    """The reference: `heard`, `removed`, `applied` and `ended` are told as the master is."""

    def __init__(self) -> None:
        self.stores: dict[str, Life] = {}
        self.tombstones: list[Tombstone] = []
        self.applied: dict[str, int] = {}

    def holders(self, key: bytes) -> set[str]:
        return {name for name, life in self.stores.items() if key in life.keys}

    def removed(self, tombstone: Tombstone) -> None:
        self.tombstones.append(tombstone)
        for life in self.stores.values():
            life.keys = {key for key in life.keys if not tombstone.covers(key)}
            if life.staged is not None:
                life.staged = {key for key in life.staged if not tombstone.covers(key)}

    def ended(self, instance_id: str) -> None:
        self.stores = {name: life for name, life in self.stores.items() if name.partition("#")[0] != instance_id}
        self.applied.pop(instance_id, None)

    def heard(self, said: Announcement, floor: int) -> None:
        """`floor`: the last tombstone that is forgotten; who has not applied it is believed nothing."""
        applied = self.applied[said.store_id.partition("#")[0]]
        behind = [tombstone for tombstone in self.tombstones if tombstone.seq > applied]
        sealed = {key for key in said.sealed if not any(tombstone.covers(key) for tombstone in behind)}
        sealed = sealed if applied >= floor else set()
        life = self.stores.setdefault(said.store_id, Life())
        if not said.snapshot:
            if said.seq == life.seq + 1 and (said.sealed or said.removed):
                life.keys = (life.keys - set(said.removed)) | sealed
                life.seq = said.seq
            return
        if said.seq <= life.seq:
            return
        if said.part == 0 and said.seq > life.staged_seq:
            life.staged, life.staged_seq, life.staged_parts = set(), said.seq, 0
        if life.staged is None or said.seq != life.staged_seq or said.part != life.staged_parts:
            return
        life.staged |= sealed
        life.staged_parts += 1
        if not said.more:
            life.keys, life.seq, life.staged = life.staged, said.seq, None


class Node:
    """One pool node: a store for each tier, tombstones applied in order, pins."""

    def __init__(self, name: str, tiers: tuple[Tier, ...], machine: str) -> None:
        self.name, self.tiers, self.machine = name, tiers, machine
        self.incarnation = 0
        self.removed_seq = 0
        self.frozen = False
        self.writing = 0
        self.stores: dict[Tier, NodeStore] = {}
        self.restart(warm=False)

    def restart(self, warm: bool) -> None:
        """Another life; `warm`: with what it had. Pins are gone."""
        kept = {tier: store.keys() for tier, store in self.stores.items()} if warm else {}
        self.incarnation += 1
        self.removed_seq = self.removed_seq if warm else 0
        self.member = RegisteredNode(
            self.name, f"{self.name}:1", self.incarnation, NodeRole.POOL, self.machine, self.name
        )
        self.stores = {tier: NodeStore(EXTENTS) for tier in self.tiers}
        names = {tier: store_name(self.name, tier) for tier in self.tiers}
        self.announcers = {t: Announcer(names[t], self.incarnation, self.stores[t], max_keys=3) for t in self.tiers}
        self.pins: set[bytes] = set()  # by the master
        self.own_pins: set[bytes] = set()  # by somebody else
        self.asked: set[int] = set()  # tombstones applied at the master's wish, which a node does not report
        self.old_words: list[Announcement] = []
        for tier, keys in kept.items():
            for key in keys:
                self.seal(key, tier)

    def seal(self, key: bytes, tier: Tier = Tier.DRAM) -> None:
        store = self.stores[tier]
        if store.begin([key])[0] is not None:
            store.seal(key)

    def drop(self, keys: list[bytes], tier: Tier | None = None) -> None:
        for each, store in self.stores.items():
            if tier in (None, each):
                store.remove([key for key in keys if store.holds(key)])
        self.pins -= set(keys)
        self.own_pins -= set(keys)

    def holds(self, key: bytes) -> bool:
        return any(store.holds(key) for store in self.stores.values())

    def blocks(self) -> set[bytes]:
        return {key for store in self.stores.values() for key in store.keys()}  # noqa: SIM118

    def apply(self, tombstone: Tombstone) -> None:
        if tombstone.seq > self.removed_seq:
            if tombstone.seq not in self.asked:
                self.drop([key for key in self.blocks() if tombstone.covers(key)])
            self.removed_seq = tombstone.seq

    @property
    def usage(self) -> StoreUsage:
        store = self.stores[Tier.DRAM]
        return StoreUsage(
            capacity_bytes=EXTENTS * 100,
            free_bytes=(EXTENTS - len(store.keys())) * 100,
            blocks=len(store.keys()),
            tiers=[TierUsage(tier=tier.value, blocks=len(self.stores[tier].keys())) for tier in self.tiers[1:]],  # type: ignore[arg-type]
            writing=self.writing,
        )


class World:
    """One master and its nodes. `state` may be a broken one."""

    def __init__(self, nodes: list[Node], limits: PolicyLimits) -> None:
        self.state = MasterState(lease_s=LEASE, stall_s=1e9, limits=limits)
        self.nodes = {node.name: node for node in nodes}
        self.shown = Shown()
        self.now = 0.0

    def _ended(self, actions: object) -> None:
        for action in actions:  # type: ignore[attr-defined]
            if isinstance(action, Publish) and action.change.value != "joined":
                self.shown.ended(action.member.instance_id)

    def beat(self, node: Node, lost: bool = False) -> None:
        """One heartbeat, or NodeJoined when the master does not know it. `lost`: the answer."""
        actions = self.state.step(Beat(node.name, node.incarnation, node.usage, node.removed_seq), self.now)
        self._ended(actions)
        if any(isinstance(action, RefuseCall) for action in actions):
            actions = self.state.step(NodeJoined(node.member, node.removed_seq), self.now)
            self._ended(actions)
            assert not any(isinstance(action, RefuseCall) for action in actions), actions
            self.shown.applied[node.name] = self.state.policy.tombstones._applied[node.name]
            for announcer in node.announcers.values():
                announcer.restart()
        else:
            self.shown.applied[node.name] = max(self.shown.applied[node.name], node.removed_seq)
        if not lost:
            for tombstone in self.state.policy.tombstones.newer(node.name):
                node.apply(tombstone)

    def announce(self, node: Node, tier: Tier, lost: str = "", force: bool = True) -> bool:
        """One word. `lost`: "request" or "answer". Whether it was heard and answered."""
        announcer = node.announcers[tier]
        word = announcer.next(force)
        if word is None:
            return False
        node.old_words.append(word)
        heard = None if lost == "request" else self.deliver(node, word)
        if heard is None or lost:
            announcer.failed()
            return False
        announcer.acked(heard.want_snapshot)
        return True

    def announce_all(self, node: Node) -> None:
        """Everything, as long as there is something new."""
        for tier in node.tiers:
            force = True
            while self.announce(node, tier, force=force):
                force = False

    def deliver(self, node: Node, word: Announcement) -> Heard | None:
        """The master hears it; None: it refuses."""
        actions = self.state.step(Announce(word), self.now)
        self._ended(actions)
        heard = next((action for action in actions if isinstance(action, Heard)), None)
        if heard is not None:
            self.shown.heard(word, self.state.policy.tombstones.floor)
        return heard

    def remove(self, keys: tuple[bytes, ...], prefix: bytes, asked: set[str], deaf: set[str]) -> Tombstone:
        """As the master's shell does it: `asked` can be reached, of which the answers of `deaf` get lost."""
        tombstone, _ = self.state.policy.remove(keys, prefix, self.now)
        self.shown.removed(tombstone)
        kept = self.state.policy.tombstones
        for member in self.state.members:
            node = self.nodes[member.instance_id]
            reachable = node.name in asked and not node.frozen and node.member == member
            if reachable and kept.is_next(node.name, tombstone.seq):
                node.drop([key for key in node.blocks() if tombstone.covers(key)])
                node.asked.add(tombstone.seq)
                if node.name not in deaf:
                    kept.applied(node.name, tombstone.seq)
                    self.shown.applied[node.name] = tombstone.seq
                    assert not any(tombstone.covers(key) for key in node.blocks()), "acknowledged, and still there"
        return tombstone

    def carry_out(self, order: Order, reached: bool = True) -> None:
        """What nodes do when they are ordered."""
        work = order.work
        holder = work.receiver if isinstance(work, PullOrder) else work.holder
        node = self.nodes[holder.instance_id]
        assert self.state.known(node.name) is not None, "only members are ordered"
        if node.frozen or node.member != holder or not reached:
            order.then(frozenset(), False, self.now)
            return
        done: set[bytes] = set()
        match work:
            case PullOrder(_, holders, keys):
                sources = [self.nodes[h.instance_id] for h in holders if self.nodes[h.instance_id].member == h]
                done = {key for key in keys if any(source.holds(key) for source in sources if not source.frozen)}
                for key in done:
                    node.seal(key)
            case TrimOrder(_, keepers, keys, spare):
                done = {key for key in keys if all(self.nodes[k.instance_id].holds(key) for k in keepers)}
                done -= node.pins | node.own_pins if spare else set()
                node.drop(list(done))
            case PinOrder(_, keys, hard):
                done = {key for key in keys if node.holds(key)}
                node.pins = node.pins | done if hard else node.pins - set(keys)
            case DiscardOrder(_, keys):
                done = set(keys)
                node.drop(list(done))
        order.then(frozenset(done), True, self.now)

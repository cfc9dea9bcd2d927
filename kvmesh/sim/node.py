"""One machine: its node store with the tiers below it, its wires, and what it announces of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvmesh.kvcache.announce import Announcement, Announcer
from kvmesh.kvcache.cache_groups import longest_hit, object_shard
from kvmesh.kvcache.grouped_store import written_mask
from kvmesh.kvcache.node_store import NodeStore, bits_of
from kvmesh.kvcache.quotas import NoTagQuotas
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier, TierUse, store_name
from kvmesh.services.conductor.costs.cache_cost import CacheCost
from kvmesh.services.conductor.domain import Ref
from kvmesh.sim.config import SimConfig
from kvmesh.sim.hardware.times import NodeSpec
from kvmesh.sim.host import Machine
from kvmesh.sim.links import Link
from kvmesh.sim.loop import Loop

INCARNATION = 1
ADDRESS = "sim:1"  # nobody dials it

Tell = Callable[[Announcement], bool]  # whether somebody wants a snapshot instead


class SimulatedTier:
    """A node store, or a tier below it, and its announcer. Every change is announced `announce_s` after the first one
    that was not. `masks` say which cache groups of each block there are; None: the model has one."""

    def __init__(
        self,
        name: str,
        blocks: int,
        config: SimConfig,
        loop: Loop,
        tell: Tell,
        incarnation: int = INCARNATION,
        masks: Mapping[bytes, int] | None = None,
    ) -> None:
        self.store = NodeStore(
            blocks,
            high_percent=config.store_high_percent,
            low_percent=config.store_low_percent,
            eviction=config.eviction,
            block_tokens=config.block_tokens,
            quotas=NoTagQuotas(),  # no tenant has an allowance here,
        )
        self.store.journals.append(self)
        self.below: Callable[[bytes], None] | None = None  # takes what is evicted here
        self._announcer = Announcer(name, incarnation, self.store)
        self.dead = False
        self._masks = masks
        self._loop, self._tell, self._delay_s = loop, tell, config.announce_s
        self._due = False

    # ── what the store says of itself (`node_store.Journal`) ──────────────────────────────────

    def sealed(self, key: bytes, extent: int, nbytes: int | None) -> None:
        """Notes that the store has this block, for the next announcement."""
        if not self._due:
            self._wake()

    def gone(self, key: bytes, extent: int, held: bool) -> None:
        """Notes that the store has this block no more, for the next announcement."""
        if not self._due:
            self._wake()
        if self.below is not None:
            self.below(key)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Nobody may find them any more: nobody says so here."""

    def _wake(self) -> None:
        self._due = True
        self._loop.after(self._delay_s, self._announce)

    def _announce(self) -> None:
        self._due = False
        if self.dead:
            return
        while (announcement := self._announcer.next()) is not None:
            if self._masks is not None:
                groups = bytes(map(self._masks.__getitem__, announcement.sealed))
                announcement = replace(announcement, groups=groups)
            self._announcer.acked(self._tell(announcement))


class Node:
    """What instances on it share. `ref`: of its one instance. `machine`: what it shares with other nodes, if so.

    Of a model with several cache groups a store has whole blocks: all objects that whoever computes one seals, so
    states at every `keep` blocks and behind the last block that a prompt finds again. A window's old objects do not go
    before their blocks do."""

    def __init__(
        self,
        name: str,
        spec: NodeSpec,
        config: SimConfig,
        loop: Loop,
        tell: Tell,
        machine: Machine | None = None,
        incarnation: int = INCARNATION,
    ) -> None:
        self.name = name
        self.machine = machine
        self.spec = spec
        self.clock = config.clock_of(name)
        self.ref = Ref(name, ADDRESS, incarnation)
        self.dead = False
        block = config.block_tokens
        objects = tuple((g, object_shard(g, block, itemsize).shard_bytes) for g, itemsize in spec.groups)
        self.cost = CacheCost(block, spec.kv_bytes_per_token, objects)
        self.block_bytes = self.cost.block
        self._groups = [group for group, _ in objects]
        self._masks: dict[bytes, int] | None = {} if objects else None
        self.shelf = SimulatedTier(name, spec.dram_tokens // block, config, loop, tell, incarnation, self._masks)
        self.store = self.shelf.store
        self.tx = Link(f"{name}.tx", spec.nic_bytes_per_s)
        self.rx = Link(f"{name}.rx", spec.nic_bytes_per_s)
        self.ssd: NodeStore | None = None
        if spec.ssd_tokens >= config.block_tokens:
            tier = store_name(name, Tier.SSD)
            self._lower = SimulatedTier(tier, spec.ssd_tokens // block, config, loop, tell, incarnation, self._masks)
            self.ssd = self._lower.store
            self.disk = Link(tier, spec.ssd_read_bytes_per_s)
            self.shelf.below = self._demote

    def note(self, keys: Sequence[bytes], masks: bytes = b"") -> None:
        """Notes that these blocks, of a prompt from its first on unless `masks` say what they have, may come here."""
        if self._masks is not None:
            told = masks or [written_mask(self._groups, block) for block in range(len(keys))]
            for key, mask in zip(keys, told, strict=True):
                self._masks[key] = self._masks.get(key, 0) | mask

    def keep_states(self, key: bytes) -> None:
        """Notes that the states behind this block are kept, wherever it lies."""
        if self._masks is not None:
            self._masks[key] = (1 << len(self._groups)) - 1

    def cut(self, keys: Sequence[bytes], blocks: int) -> int:
        """Returns how many of so many leading blocks of a prompt, which lie here, it can go on behind."""
        if not self._groups or self._masks is None:
            return blocks
        masks = [self._masks.get(key, 0) for key in keys[:blocks]]
        held = [bits_of([bool(mask >> g & 1) for mask in reversed(masks)]) for g in range(len(self._groups))]
        return longest_hit(self._groups, self.cost.block_tokens, blocks, held).blocks

    def die(self) -> None:
        """Ends the node: it announces nothing more."""
        self.dead = self.shelf.dead = True
        if self.ssd is not None:
            self._lower.dead = True

    @property
    def incarnation(self) -> int:
        """The incarnation of its instance and of its stores."""
        return self.ref.incarnation

    def _demote(self, key: bytes) -> None:
        """Writing to the SSD hides: it has a queue of its own, and nobody waits for it."""
        assert self.ssd is not None
        if self.ssd.begin([key])[0] is not None:
            self.ssd.seal(key)

    def tier(self, tier: Tier) -> NodeStore | None:
        """Returns the store with its blocks of that tier; None: it has none."""
        return {Tier.DRAM: self.store, Tier.SSD: self.ssd}.get(tier)

    def uses(self) -> tuple[TierUse, ...]:
        """Returns how full the lower tiers are, for heartbeats."""
        if self.ssd is None:
            return ()
        used = self.ssd.total - self.ssd.unheld
        rate = int(self.spec.ssd_read_bytes_per_s)
        return (TierUse(Tier.SSD, self.ssd.total * self.block_bytes, used * self.block_bytes, used, 0, rate),)

    def below(self, keys: Sequence[bytes]) -> PullRange | None:
        """Returns what of a prompt with these blocks is read from a lower tier of this node; None: nothing."""
        if self.ssd is None or not any(map(self.ssd.holds, keys)):
            return None
        return PullRange(self.name, ADDRESS, self.incarnation, 0, len(keys), Tier.SSD)

"""Blocks and KV on their way over the links.

A *pull* brings blocks into a node store: they are leased at whoever holds them, sent over the wires, and counted when
they are here. A *push* brings KV from prefill to decode, layer by layer while it is computed: all layers of a chunk but
the last have left the device, or can, when its step ends; so a step's KV is fed evenly while the step runs, all but one
layer's share, and that at the end. Nothing is sent of blocks that decode has; nothing at all before decode has room. A
transfer ends with its last byte, never before the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.services.prefill.planner import Chunk
from kvmesh.sim.life import Life
from kvmesh.sim.links import Flow, Links
from kvmesh.sim.loop import ScheduledCall
from kvmesh.sim.node import Node

NS = 1_000_000_000


@dataclass(eq=False)
class TransferJob:
    """One job. `over` is called once: with the keys that have arrived, and how many of their bytes came over wires."""

    keys: tuple[bytes, ...]  # begun (`NodeStore.begin`) at the reader
    began_s: float
    until_s: float
    over: Callable[[TransferJob], None]
    arrived: set[bytes] = field(default_factory=set)
    wire_bytes: int = 0
    flows: dict[Flow, tuple[NodeStore, int]] = field(default_factory=dict)  # and its lease at the holder
    timer: ScheduledCall | None = None
    reader: Node | None = None

    def keep(self, store: NodeStore) -> None:
        """What has arrived becomes blocks of the reader's store, a chain's tail first; the others are given up."""
        if len(self.arrived) == len(self.keys):
            store.seal_all(reversed(self.keys))
            return
        for key in reversed(self.keys):
            if key in self.arrived:
                store.seal(key)
            else:
                store.abandon(key)


class Puller:
    """Starts and ends all pulls of a simulation."""

    def __init__(self, links: Links, nodes: Mapping[str, Node], timeout_s: float) -> None:
        self._links, self._nodes, self._timeout_s = links, nodes, timeout_s
        self._under_way: dict[TransferJob, None] = {}  # with flows

    def pull(
        self,
        reader: Node,
        wanted: Sequence[tuple[int, bytes]],
        ranges: Sequence[PullRange],
        over: Callable[[TransferJob], None],
    ) -> TransferJob:
        """`wanted`: blocks of a prompt by their number, begun at `reader`; `ranges` are asked in order for what they
        cover. What nobody has, or what comes too late, does not arrive. `over` is never called before this returns."""
        loop = self._links.loop
        pull = TransferJob(tuple(key for _, key in wanted), loop.now, loop.now + self._timeout_s, over, reader=reader)
        missing = dict(wanted)
        for source in ranges:
            covered = range(source.first_block, source.first_block + source.blocks)
            keys = [key for at, key in missing.items() if at in covered]
            found = self._send(pull, reader, source, keys)
            missing = {at: key for at, key in missing.items() if key not in found}
        if pull.flows:
            self._under_way[pull] = None
            pull.timer = loop.at(pull.until_s, lambda: self._late(pull))
        else:
            pull.timer = loop.after(0.0, lambda: pull.over(pull))
        return pull

    def _send(self, pull: TransferJob, reader: Node, source: PullRange, keys: list[bytes]) -> set[bytes]:
        """Sends those of `keys` that the source has, and returns them."""
        holder = self._nodes.get(source.instance_id)
        store = holder.tier(source.tier) if holder is not None else None
        if holder is None or store is None or not keys or holder.dead or holder.incarnation != source.incarnation:
            return set()
        now = self._links.loop.now
        lease = store.lease(keys, int((pull.until_s - now + 1) * NS), int(now * NS))
        found = [key for key, extent in zip(keys, lease.extents, strict=True) if extent is not None]
        if not found:
            return set()
        path = [] if source.tier is Tier.DRAM else [holder.disk]
        if holder is not reader:
            path += [holder.tx, reader.rx]
        assert path, "a block in the reader's own memory is not pulled"
        nbytes = len(found) * reader.cost.objects(source.groups)

        def done() -> None:
            store.unlease(lease.lease_id)
            del pull.flows[flow]
            pull.arrived.update(found)
            pull.wire_bytes += nbytes if holder is not reader else 0
            if not pull.flows:
                self._end(pull)

        flow = self._links.open(path, done)
        pull.flows[flow] = store, lease.lease_id
        flow.feed(nbytes, close=True)
        return set(found)

    def lose(self, node: Node) -> None:
        """Ends all flows from and to a node that is gone."""
        stores = [store for store in (node.store, node.ssd) if store is not None]
        for pull in list(self._under_way):
            for flow, (store, lease_id) in list(pull.flows.items()):
                if pull.reader is node or any(store is one for one in stores):
                    flow.cancel()
                    store.unlease(lease_id)
                    del pull.flows[flow]
            if not pull.flows:
                self._end(pull)

    def _late(self, pull: TransferJob) -> None:
        self._under_way.pop(pull, None)
        pull.timer = None
        for flow, (store, lease_id) in pull.flows.items():
            flow.cancel()
            store.unlease(lease_id)
        pull.flows.clear()
        pull.over(pull)

    def _end(self, pull: TransferJob) -> None:
        self._under_way.pop(pull, None)
        if pull.timer is not None:
            pull.timer.cancel()
        pull.over(pull)


class _Step:
    """The step that computes a piece of one request, up to token `end`; `nbytes` of it are to be sent."""

    __slots__ = ("began_s", "end", "nbytes", "seconds")

    def __init__(self, began_s: float, seconds: float, end: int) -> None:
        self.began_s, self.seconds, self.end, self.nbytes = began_s, seconds, end, 0.0


class Pushes:
    """All of a simulation. `done` is told of every request whose KV has arrived."""

    def __init__(self, links: Links, layers: int, done: Callable[[Life], None]) -> None:
        self._links, self._done = links, done
        self._early = 1 - 1 / layers  # share of a chunk that leaves while it is computed
        self._steps: dict[Life, _Step] = {}

    def computing(self, life: Life, chunk: Chunk, now: float, seconds: float) -> None:
        """A step with a chunk of it begins."""
        self._steps[life] = _Step(now, seconds, chunk.end)
        if life.flow is not None:
            self._feed(life)

    def landing(self, life: Life, source: Node, target: Node, at_decode: int) -> None:
        """There is room at decode, where the prompt's first `at_decode` tokens lie already."""
        life.sent_to = at_decode
        life.push_bytes = source.cost.handoff(life.tokens, at_decode // source.cost.block_tokens)
        life.bytes_per_token = source.spec.kv_bytes_per_token
        if source.cost.groups:  # evenly over what is computed, though a window's are those of the last tokens
            life.bytes_per_token = life.push_bytes / max(1, life.tokens - at_decode)
        life.flow = self._links.open((source.tx, target.rx), lambda: self._done(life))
        self._feed(life)

    def computed(self, life: Life, chunk: Chunk) -> None:
        """The step with this chunk has ended."""
        life.computed = chunk.end
        step = self._steps.pop(life, None)
        if step is None:
            return
        if life.flow is not None and (step.nbytes or life.over):
            life.flow.feed(step.nbytes * (1 - self._early), close=life.over)

    def stop(self, life: Life) -> None:
        """Nobody wants the rest."""
        if life.flow is not None:
            life.flow.cancel()
        if life.lost:
            life.flow = None
            self._steps.pop(life, None)

    def _feed(self, life: Life) -> None:
        """What was computed before the step under way can be sent now, what that computes as it comes."""
        step, flow = self._steps.get(life), life.flow
        assert flow is not None
        at_once, produced = self._bytes(life, life.computed), 0.0
        if step is not None:
            step.nbytes = self._bytes(life, step.end)
            produced = step.nbytes * self._early / step.seconds
            at_once += produced * (self._links.loop.now - step.began_s)
        flow.feed(at_once, produced=produced, close=life.over)

    @staticmethod
    def _bytes(life: Life, end: int) -> float:
        """Counts the bytes of the prompt's tokens before `end` that were not counted yet."""
        tokens = max(0, end - life.sent_to)
        life.sent_to += tokens
        return tokens * life.bytes_per_token

"""The shared pool offline: the product's own prefill brains, node stores, announcers and block map, without processes.

One request at a time, each complete before the next one comes; ranks, wires and pulls answer at once. What a request
finds cached is therefore what the policies give, with nothing but them: `kvmesh replay` compares a live mesh with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.block_map import BlockMap
from kvmesh.kvcache.keys import Namespace, chain_tip, extend, pack_tokens, split
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.planner import PlanConfig
from kvmesh.services.prefill.state import PrefillState

STEP_NS = 1_000_000  # every request takes this long; only the order of times matters
_SPACE = Namespace(fingerprint="offline", kv_dtype="")
_ANSWER = 2**31  # token ids of answers: never those of a prompt, new in every answer


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePoolConfig:
    """The instances: name → (device pages, host extents) of those that prefill, name → host extents of the others.
    Percentages are the watermarks of every store."""

    prefills: Mapping[str, tuple[int, int]]
    decodes: Mapping[str, int]
    block_tokens: int
    chunk_tokens: int = 512
    high_percent: int = 95
    low_percent: int = 90


@dataclass(frozen=True, slots=True)
class Hit:
    """What one prompt found."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    pulled_tokens: int

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.pulled_tokens


class OfflinePool:
    """Instances as they are after the requests served so far."""

    def __init__(self, config: OfflinePoolConfig) -> None:
        self._config = config
        self.map = BlockMap()
        self.stores: dict[str, NodeStore] = {}
        self._brains: dict[str, PrefillState] = {}
        for name, (pages, extents) in config.prefills.items():
            self.stores[name] = self._store(extents)
            self._brains[name] = PrefillState(_brain(config), PagePool(pages), self.stores[name])
        for name, extents in config.decodes.items():
            self.stores[name] = self._store(extents)
        self._announcers = {name: Announcer(name, 1, store) for name, store in self.stores.items()}
        self._now = STEP_NS
        self._handle = 0
        self._made = 0

    def _store(self, extents: int) -> NodeStore:
        return NodeStore(extents, high_percent=self._config.high_percent, low_percent=self._config.low_percent)

    def serve(self, prompt: Sequence[int], answer_tokens: int, prefill: str, decode: str) -> Hit:
        """One request on these instances. What `prefill` lacks is pulled from whoever holds it."""
        self._now += STEP_NS
        packed = pack_tokens(prompt)
        keys, digest = chain_tip(_SPACE, packed, self._config.block_tokens)
        names = tuple(split(keys))
        self.stores[decode].touch(names)
        hit = self._prefill(prompt, names, prefill)
        self._decode(prompt, names, digest, answer_tokens, decode)
        self._announce()
        return hit

    # ── prefill: the brain itself ────────────────────────────────────────────────────────────────

    def _prefill(self, prompt: Sequence[int], keys: tuple[bytes, ...], name: str) -> Hit:
        self._handle += 1
        start = ev.Start(
            handle=self._handle,
            stream=1,
            request_id=str(self._handle),
            token_ids=tuple(prompt),
            block_keys=keys,
            sampling=m.Sampling(0.0, 1.0, 0, 0),
            pulls=self._holders(keys, name),
        )
        brain = self._brains[name]
        events: deque[ev.Event] = deque([start])
        found = ev.Found()
        while events:
            for action in brain.step(events.popleft(), self._now):
                match action:
                    case ev.SendFirstToken():
                        found = action.found
                    case ev.SendFailed(_, error, _):
                        raise error
                    case _:
                        events.extend(self._answer(action, name))
        return Hit(len(prompt), found.device_tokens, found.host_tokens, found.pulled_tokens)

    def _holders(self, keys: tuple[bytes, ...], name: str) -> tuple[PullRange, ...]:
        """The longest runs that others hold, from the first block on."""
        own = self.map.slot(name)
        others = sum(1 << slot for s in self.stores if (slot := self.map.slot(s)) is not None and slot != own)
        ranges, at = [], 0
        while at < len(keys):
            slot, length = self.map.run(keys, at, others)
            if slot >= 0:
                ranges.append(PullRange(self.map.store_of(slot), "offline:1", 1, at, length))
            at += max(length, 1)
        return tuple(ranges)

    def _answer(self, action: ev.Action, name: str) -> list[ev.Event]:
        """What ranks, other nodes and decode say to it, at once."""
        now = self._now
        match action:
            case ev.FetchBlocks(job):
                return [self._pulled(job)]
            case ev.SendBeginFill(handle, blocks):
                landing = ev.RankLanding(0, "offline", (0,) * blocks, 0)
                return [ev.Landing(handle, handle, 60_000, (landing,))]
            case m.TellRank(rank, m.SealCopy(ticket)):
                return [m.FromRank(rank, m.SealCopied(ticket, now, now))]
            case m.TellRank(rank, m.LoadCopy(ticket)):
                return [m.FromRank(rank, m.LoadCopied(ticket, now, now))]
            case m.TellRank(rank, m.PrefillStep(step_id, items)):
                sampled = tuple(m.Sampled(item.handle, 0) for item in items if item.sample)
                return [m.FromRank(rank, m.PrefillStepDone(step_id, now, now, sampled))]
            case m.TellRank(rank, m.PushOpen(handle, epoch)):
                return [m.FromRank(rank, m.PushDone(handle, epoch, now, now, 0))]
        return []

    def _pulled(self, job: PullJob) -> Pulled:
        """Lease from each holder, read, give back."""
        arrived: set[int] = set()
        for holder in job.ranges:
            store = self.stores[holder.instance_id]
            covered = range(holder.first_block, holder.first_block + holder.blocks)
            wanted = [at for at, block in enumerate(job.blocks) if block in covered and at not in arrived]
            lease = store.lease([job.keys[at] for at in wanted], STEP_NS, self._now)
            arrived.update(at for at, extent in zip(wanted, lease.extents, strict=True) if extent is not None)
            store.unlease(lease.lease_id)
        return Pulled(job.ticket, tuple(sorted(arrived)), 0, 0)

    # ── decode: what it seals ────────────────────────────────────────────────────────────────────

    def _decode(self, prompt: Sequence[int], keys: tuple[bytes, ...], digest: bytes, answer: int, name: str) -> None:
        """Full blocks of prompt and answer, but for the last token, whose KV is never computed."""
        block, store = self._config.block_tokens, self.stores[name]
        made = [_ANSWER + (self._made + i) % _ANSWER for i in range(answer)]
        self._made += answer
        tail = [*prompt[len(keys) * block :], *made][: len(prompt) % block + answer - 1]
        chain = list(keys)
        for at in range(0, len(tail) - block + 1, block):
            key, digest = extend(digest, pack_tokens(tail[at : at + block]))
            chain.append(key)
        store.release(store.hold(chain))
        store.seal_all([key for key, extent in zip(chain, store.begin(chain), strict=True) if extent is not None])
        store.touch(chain)

    def _announce(self) -> None:
        for announcer in self._announcers.values():
            while (announcement := announcer.next()) is not None:
                self.map.apply(announcement)
                announcer.acked(False)


def _brain(config: OfflinePoolConfig) -> BrainConfig:
    chunk = max(config.chunk_tokens, config.block_tokens)
    plan = PlanConfig(block_tokens=config.block_tokens, prefill_chunk_tokens=chunk, max_batch_tokens=chunk)
    return BrainConfig(plan=plan, max_context_tokens=1 << 40, vocab_size=2**32)

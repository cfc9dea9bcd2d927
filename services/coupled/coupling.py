"""Prefill and decode of one instance: two brains over one pool of pages and one node store. Pure.

Each brain decides as it does alone; what joins them is here, and all of it:

- a prompt that is computed for this very instance is *adopted*: its pages, with their references, pass from prefill to
  decode in the turn in which the first token is known;
- what the prefix cache alone holds counts as free for both, and goes when somebody takes it (`CachedPages`);
- a new prompt gets its pages all at once, and only from what is left beside `Scheduler.reserve`: so running rows grow,
  those that were preempted come back, and a prompt that has pages needs nothing more to end. Neither half waits for
  memory that only the other's waiting could free;
- while rows run, a step has at most `mixed_chunk_tokens` of prompts: that bounds the time between two tokens (rows of
  another data-parallel place count where places make their steps together);
- who waits for memory looks again when the other has given some back (`prefill_due`, `decode_due`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.prefix_cache import CachedPages
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.grouped.scheduler import GroupedScheduler
from kvmesh.services.decode.limits import Limits, Shape
from kvmesh.services.decode.state import DecodeState
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.state import PrefillState

# Handles, tickets and epochs of decode begin here, those of prefill at 1: the ranks and the node store know them apart.
FIRST_OF_DECODE = 1 << 32

_PREFILLS = (m.PrefillStepDone, m.PushProgress, m.PushDone, m.PushFailed, m.PushDrained)


class Coupling:
    """Both brains of one instance. Whoever runs them says `prefill_looked` or `decode_looked` when one has taken all
    its events, and gives it a Tick when it is due."""

    def __init__(
        self,
        config: BrainConfig,
        limits: Limits,
        shape: Shape,
        store: NodeStore | GroupedStore,
        mixed_chunk_tokens: int,
    ) -> None:
        self.store = store
        if isinstance(store, GroupedStore):
            self._share_groups(config, limits, shape, store)
        else:
            pool = PagePool(shape.num_pages)
            self.prefill = PrefillState(config, pool, store)
            self.pages = CachedPages(pool, self.prefill.cache)
            self.decode = DecodeState(limits, shape, store, self.pages, FIRST_OF_DECODE)
            self.prefill.reserve = lambda: scheduler.reserve
        self._rooms = [0]  # when prefill looked last
        self._free = [0, 0]  # pages and extents, when decode looked last
        scheduler, most = self.decode.scheduler, max(mixed_chunk_tokens, shape.block_tokens)
        # Whether rows run at another place of this instance, all of whose steps are made together.
        self.others_run: Callable[[], bool] = lambda: False
        self.prefill.most = lambda: most if self.runs or self.others_run() else None

    @property
    def runs(self) -> bool:
        """Whether rows run."""
        return bool(self.decode.scheduler.running)

    # ── who looks again ──────────────────────────────────────────────────────────────────────────

    def _share_groups(self, config: BrainConfig, limits: Limits, shape: Shape, store: GroupedStore) -> None:
        """Both halves over one pool of each cache group. A prompt claims of a group what its row will, so that a row
        that adopts a prompt has what it needs."""
        pools = [PagePool(room.num_pages) for room in shape.groups]
        self.prefill = PrefillState(config, pools, store)
        table = self.prefill.grouped
        assert table is not None
        views = [CachedPages(pool, table.cache.of_group(g)) for g, pool in enumerate(pools)]
        self.pages = views[0]
        self.decode = DecodeState(limits, shape, store, views, FIRST_OF_DECODE)
        scheduler = self.decode.scheduler
        assert isinstance(scheduler, GroupedScheduler)
        prompts = table.pages
        claims = [room.claim(shape.block_tokens, room.num_pages) or 0 for room in shape.groups]
        prompts.rules = dataclasses.replace(prompts.rules, least=tuple(claims))
        prompts.reserve = scheduler.reserved
        scheduler.others = lambda g: prompts.claimed[g]

    @property
    def rooms(self) -> list[int]:
        """Pages that a new prompt may take; of several cache groups of each, and what is free and not reserved."""
        scheduler = self.decode.scheduler
        if not isinstance(scheduler, GroupedScheduler):
            return [self.pages.free - scheduler.reserve]
        free = [pool.free for pool in scheduler.pools]
        return free + [pages - scheduler.reserved(g) for g, pages in enumerate(free)]

    @property
    def _memory(self) -> list[int]:
        """Free pages and extents; of several cache groups of each."""
        scheduler = self.decode.scheduler
        if not isinstance(scheduler, GroupedScheduler):
            return [self.pages.free, scheduler.extents.free]
        return [pool.free for pool in scheduler.pools] + [store.free for store in scheduler.store.stores]

    def prefill_looked(self) -> None:
        """Prefill has taken all its events."""
        self._rooms = self.rooms

    def decode_looked(self) -> None:
        """Decode has taken all its inputs."""
        self._free = self._memory

    def prefill_due(self) -> bool:
        """Prompts wait, and there is more room than when they were looked at."""
        # Of several cache groups a prompt that is being computed may wait for pages, too.
        waiting = self.prefill.planner.waiting if self.prefill.grouped is None else self.prefill.handoffs
        return bool(waiting) and _more(self.rooms, self._rooms)

    def decode_due(self) -> bool:
        """Somebody waits for memory, and there is more than when he was looked at."""
        return self.decode.scheduler.waits and _more(self._memory, self._free)


def _more(now: Sequence[int], before: Sequence[int]) -> bool:
    """Says whether one of these counts has grown."""
    return any(one > other for one, other in zip(now, before, strict=False))


def to_prefill(message: m.ToFront) -> bool:
    """Whether this is for the prefill half (or for decode)."""
    match message:
        case m.RankError(handles):
            return bool(handles) and handles[0] < FIRST_OF_DECODE  # of one half each
        case m.SealCopied(ticket) | m.LoadCopied(ticket):
            return ticket < FIRST_OF_DECODE
        case _:
            return isinstance(message, _PREFILLS)


def doors(role: pb.Role.ValueType, who: str, local_prefill_tokens: int) -> tuple[ev.Doors, i.CloseDoor]:
    """What the halves of instance `who` take in this role. One that decodes computes its own prompts if it may compute
    short ones."""
    name = pb.Role.Name(role).removeprefix("ROLE_").lower()
    why = f"instance {who} has the role {name} now"
    shut: KvmeshError | None = Unavailable(why) if role == pb.ROLE_PREFILL else None
    if role == pb.ROLE_DECODE:
        return ev.Doors(remote=why, own="" if local_prefill_tokens else why), i.CloseDoor(shut)
    return ev.Doors(remote="", own=""), i.CloseDoor(shut)

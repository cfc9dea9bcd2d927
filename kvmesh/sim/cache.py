"""Hit rates of a trace in one cache of so many blocks, by the product's own orders (`kvmesh.kvcache.eviction`).

Nothing is held, leased or pinned here and no time passes: what differs between two lines is the policy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvmesh.errors import ConfigError
from kvmesh.kvcache.eviction import PARITY_TOKENS, EvictionOrder, make_order
from kvmesh.sim.workloads.trace import TRACE_BLOCK

DEFINITION = (
    "by block, whole trace, in file order, cache empty at first: a request's hits are the blocks of its longest cached "
    "prefix, a partly filled last block included; after the look-up all its blocks are touched from head to tail, and "
    "each missing one takes the place of the block that the policy evicts"
)
SAVED = (
    "recompute cost of the hits / of the prompts; n blocks from the head on cost "
    f"n + n x n x block_tokens / {2 * PARITY_TOKENS:,} (attention costs a token as much as all else at "
    f"{PARITY_TOKENS:,} tokens)"
)
EVERY_BLOCKS = 4_096  # progress is told about so often


@dataclass(frozen=True, slots=True)
class CacheRun:
    """What one cache found. `capacity`: blocks, None: unbounded."""

    policy: str
    capacity: int | None
    blocks: int  # asked for
    hits: int
    evicted: int
    cost: float  # to compute all prompts from nothing, in full blocks without attention
    saved: float  # of that, what the hits spare

    @property
    def hit_rate(self) -> float:
        """The share of all blocks that were asked for; 0 where none was."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def compute_saved(self) -> float:
        """Share of the cost; 0 of none."""
        return self.saved / self.cost if self.cost else 0.0


def recompute_cost(blocks: int, block_tokens: int) -> float:
    """Returns the cost of computing the first `blocks` of a prompt, in costs of a block without attention."""
    return blocks + blocks * blocks * block_tokens / (2 * PARITY_TOKENS)


def run(
    prompts: Iterable[Sequence[int]],
    policy: str,
    capacity: int | None,
    *,
    block_tokens: int = TRACE_BLOCK,
    progress: Callable[[int], None] = lambda blocks: None,
) -> CacheRun:
    """Blocks (chained ids) of each prompt, in order, through one cache. `progress` hears how many blocks are done, now
    and then. ConfigError: an unknown policy, a capacity below 1."""
    if capacity is not None and capacity < 1:
        raise ConfigError(f"capacity={capacity}: must be at least 1 block", field="capacity")
    order: EvictionOrder[int] = make_order(policy, block_tokens)
    blocks = hits = evicted = told = 0
    cost = saved = 0.0
    for ids in prompts:
        found = next((at for at, block in enumerate(ids) if block not in order), len(ids))
        hits += found
        saved += recompute_cost(found, block_tokens)
        cost += recompute_cost(len(ids), block_tokens)
        for block in ids:
            if block not in order:
                if capacity is not None and len(order) >= capacity:
                    evicted += len(order.evict(1))
                order.admit(block, len(ids))
            order.use(block, len(ids))
            order.mark_idle(block)
        blocks += len(ids)
        if blocks - told >= EVERY_BLOCKS:
            progress(blocks)
            told = blocks
    return CacheRun(policy, capacity, blocks, hits, evicted, cost, saved)

"""The prefill brain refuses requests that can never run here, and landings that do not fit. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.errors import ContextTooLong, InvalidRequest, KvmeshError
from kvmesh.kvcache.cache_groups import CacheGroup
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.planner import PlanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BrainConfig:
    """Has the limits of one prefill instance, in tokens and requests. `world` is its number of ranks, which cut blocks
    into shards as `layouts` say: one a rank or, where the model has several cache `groups`, one for each group, rank by
    rank."""

    plan: PlanConfig
    max_context_tokens: int
    vocab_size: int
    max_queued: int = 1024
    world: int = 1
    layouts: tuple[ShardLayout, ...] = ()
    pull_timeout_ms: int = 2_000
    push_at_end: bool = False
    groups: tuple[CacheGroup, ...] = ()  # (): the model has one that keeps all
    stages: Mapping[int, int] = field(default_factory=dict)  # of the ranks that speak for one; none: there is one stage


def refusal(start: ev.Start, config: BrainConfig, num_pages: int) -> KvmeshError | None:
    """Returns why `start` can never run on an instance with `num_pages` pages; None if it can."""
    tokens, limit, block = len(start.token_ids), config.max_context_tokens, config.plan.block_tokens
    if not tokens:
        return InvalidRequest.of("token_ids", (), "a prompt holds at least one token")
    if tokens > limit:
        return ContextTooLong(f"token_ids holds {tokens} tokens: the model's context is {limit}", field="token_ids")
    if tokens > num_pages * block:
        return ContextTooLong(
            f"token_ids holds {tokens} tokens: the pages of this prefill instance hold {num_pages * block}",
            field="token_ids",
        )
    if max(start.token_ids) >= config.vocab_size:
        bad = next(t for t in start.token_ids if t >= config.vocab_size)
        return InvalidRequest.of("token_ids", bad, f"the vocabulary has {config.vocab_size} tokens")
    if len(start.block_keys) != tokens // block:
        why = f"{tokens} tokens have {tokens // block} full blocks of {block}"
        return InvalidRequest.of("block_keys", f"{len(start.block_keys)} keys", why)
    return None


def landing_fault(landing: ev.Landing, blocks: int, readers: int) -> str:
    """Returns what is wrong with the landing of a prompt of `blocks` blocks at `readers` ranks of decode; "" if nothing
    is."""
    ranks = [target.rank for target in landing.ranks]
    if sorted(ranks) != list(range(readers)):
        return f"it names ranks {ranks}, there are {readers}"
    if len({target.first_block for target in landing.ranks}) > 1:
        return f"its ranks begin at blocks {[target.first_block for target in landing.ranks]}"
    for target in landing.ranks:
        if len(target.offsets) != blocks:
            return f"it has {len(target.offsets)} offsets for {blocks} blocks"
        if target.first_block > blocks:
            return f"first_block={target.first_block} of {blocks} blocks"
    return ""


def grouped_landing_fault(landing: ev.Landing, kept: Sequence[range], readers: int) -> str:
    """Returns what is wrong with the landing of a prompt at `readers` ranks of decode, which may need the blocks
    `kept[group]`; "" if nothing is."""
    ranks = [target.rank for target in landing.ranks]
    if sorted(ranks) != list(range(readers)):
        return f"it names ranks {ranks}, there are {readers}"
    named = [[(one.group, one.first, len(one.ids)) for one in target.groups] for target in landing.ranks]
    if any(one != named[0] for one in named):
        return f"its ranks take (group, first block, blocks) {named}"
    groups = [group for group, _, _ in named[0]]
    if groups != sorted(set(groups)) or not set(groups) <= set(range(len(kept))):
        return f"it names groups {groups} of {len(kept)}"
    for group, first, count in named[0]:
        if first not in kept[group] or first + count != kept[group].stop:
            return f"it takes blocks {first} to {first + count} of group {group}, which are {kept[group]} at most"
    if 0 not in groups:
        return "it takes nothing of group 0, whose last block says that all is computed"
    return ""

"""What each layer of a model keeps, from its config.json alone, as cache groups (ADR 0037)."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.kvcache.cache_groups import (
    CacheGroup,
    CacheKind,
    CacheLayout,
    freed_blocks,
    needed_blocks,
    object_shard,
    snapshot_blocks,
)

# Kinds of layers as `layer_types` of config.json names them.
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
DELTA, CONVOLUTION = "delta", "convolution"  # groups of a gated DeltaNet, as the engine names them


def groups_of(
    kinds: Sequence[str], window: int, chunk: int, layout: CacheLayout, states: dict[str, CacheLayout], index_dim: int
) -> tuple[CacheGroup, ...]:
    """Returns the groups of a model: `kinds` names what each layer is, `layout` is that of an attention layer,
    `states` those of a linear layer, by name, and `index_dim` the width of the keys by which a sparse attention chooses
    tokens (0: there are none)."""

    def of(kind: str) -> tuple[int, ...]:
        return tuple(layer for layer, its in enumerate(kinds) if its == kind)

    found = []
    if full := of(FULL):
        found.append(CacheGroup("all", full, layout))
        if index_dim:
            found.append(CacheGroup("index", full, CacheLayout(1, 1, index_dim)))
    if local := of(SLIDING):
        found.append(CacheGroup(f"window{window}", local, layout, CacheKind.WINDOW, window))
    if chunked := of(CHUNKED):
        found.append(CacheGroup(f"chunk{chunk}", chunked, layout, CacheKind.CHUNK, chunk))
    if linear := of(LINEAR):
        apart = snapshot_blocks(found[0], len(linear), states.values()) if found else 8
        found += [CacheGroup(name, linear, of_it, CacheKind.STATE, apart) for name, of_it in states.items()]
    return tuple(found)


def row_objects(group: CacheGroup, block_tokens: int, tokens: int) -> int:
    """Returns how many objects of the group a running request has that is at `tokens` tokens."""
    if group.kind is CacheKind.STATE:
        return 2  # its own, and one for a snapshot
    if group.kind is CacheKind.ALL:
        return -(-(tokens + 1) // block_tokens)
    return tokens // block_tokens - freed_blocks(group, block_tokens, tokens) + 1


def group_bytes(group: CacheGroup, block_tokens: int, itemsize: int, contexts: Sequence[int]) -> dict[str, object]:
    """Returns what one group weighs: an object, a token that later ones see and one that they do not, a running request
    and a stored prefix of each of `contexts` tokens (the prefix in whole blocks)."""
    whole = object_shard(group, block_tokens, itemsize).shard_bytes
    of_token = 0 if group.kind is CacheKind.STATE else whole // block_tokens
    blocks = [tokens // block_tokens * block_tokens for tokens in contexts]
    return {
        "name": group.name,
        "kind": group.kind.name.lower(),
        "keep": group.keep,
        "layers": len(group.layers),
        "object_bytes": whole,
        "bytes_per_token": of_token,
        "bytes_per_token_beyond": of_token if group.kind is CacheKind.ALL else 0,
        "row_bytes": {str(tokens): whole * row_objects(group, block_tokens, tokens) for tokens in contexts},
        "prefix_bytes": {
            str(tokens): whole * len(needed_blocks(group, block_tokens, at))
            for tokens, at in zip(contexts, blocks, strict=True)
        },
    }

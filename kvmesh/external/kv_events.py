"""The KV events of an engine, as vLLM publishes them (`--kv-events-config`): messages to events. Pure.

A batch is MessagePack: [time, [event, ...], rank of data parallelism]. An event is a map with its name under `type`,
or, of older versions, a list that begins with it. Fields that are not known here are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from kvmesh.errors import InternalError
from kvmesh.kvcache.keys import pack_tokens

MAX_EVENTS = 65_536  # of one batch
MAX_HASH_BYTES = 128
DEVICE = (None, "GPU")  # media that are an engine's own cache; its CPU backend says GPU, too

# Fields in their order as a list.
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")

BlockHash: TypeAlias = bytes | int


class KvEventsUnusable(InternalError):
    """What an engine reports cannot be understood, or does not fit what is known of it."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that follow each other. `tokens` are those of all, as of `pack_tokens`; `salts` is the cache salt of the
    first one where `parent` is None; `foreign`: their KV depends on something else as well (a LoRA, an image)."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: bytes
    block_tokens: int
    salt: str = ""
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllRemoved:
    """The engine's cache was emptied."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | AllRemoved


def events_of(payload: bytes) -> list[KvEvent]:
    """Reads one batch. Raises KvEventsUnusable naming what is wrong."""
    try:
        told = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as err:
        raise KvEventsUnusable(f"a batch of KV events is no MessagePack: {str(err)[:100]}") from None
    if not isinstance(told, list) or len(told) < 2 or not isinstance(told[1], list):
        raise KvEventsUnusable("a batch of KV events is not [time, events]")
    if len(told[1]) > MAX_EVENTS:
        raise KvEventsUnusable(f"a batch has {len(told[1])} KV events, more than {MAX_EVENTS}")
    if len(told) > 2 and told[2] not in (None, 0):
        raise KvEventsUnusable(f"data_parallel_rank={told[2]!r:.20}: an engine of several ranks has several caches")
    found: list[KvEvent] = []
    for event in told[1]:
        if (one := _event(event)) is not None:
            found.append(one)
    return found


def _event(told: Any) -> KvEvent | None:
    """Returns None for what another medium than the engine's own cache has, and for events of another kind."""
    if isinstance(told, dict):
        name, fields = told.get("type"), told
    elif isinstance(told, list) and told:
        name = told[0]
        order: Sequence[str] = _STORED if name == "BlockStored" else _REMOVED
        fields = dict(zip(order, told[1:], strict=False))
    else:
        raise KvEventsUnusable(f"a KV event is neither a map nor a list: {told!r:.60}")
    match name:
        case "AllBlocksCleared":
            return AllRemoved()
        case "BlockStored" | "BlockRemoved":
            if fields.get("medium") not in DEVICE:
                return None
            if fields.get("group_idx") not in (None, 0):
                raise KvEventsUnusable("group_idx: the engine has several groups of caches")
            hashes = _hashes(fields.get("block_hashes"))
            return BlocksRemoved(hashes) if name == "BlockRemoved" else _stored(fields, hashes)
        case _:
            return None


def _hashes(told: Any) -> tuple[BlockHash, ...]:
    if not isinstance(told, list):
        raise KvEventsUnusable(f"block_hashes: is no list: {told!r:.60}")
    return tuple(_hash(one) for one in told)


def _hash(told: Any) -> BlockHash:
    if (type(told) is bytes and 0 < len(told) <= MAX_HASH_BYTES) or type(told) is int:
        return told
    raise KvEventsUnusable(f"block_hashes: {told!r:.60} is no hash")


def _stored(fields: dict[Any, Any], hashes: tuple[BlockHash, ...]) -> BlocksStored:
    parent, ids, size = fields.get("parent_block_hash"), fields.get("token_ids"), fields.get("block_size")
    if type(size) is not int or size < 1:
        raise KvEventsUnusable(f"block_size={size!r:.20}: must be a number of tokens")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise KvEventsUnusable("token_ids: is no list of token ids")
    if len(ids) != size * len(hashes):
        raise KvEventsUnusable(f"token_ids: {len(ids)} of them for {len(hashes)} blocks of {size}")
    try:
        tokens = pack_tokens(ids)
    except ValueError as err:
        raise KvEventsUnusable(f"token_ids: {err}") from None
    salt, foreign = _depends(fields.get("extra_keys"), parent is None)
    foreign = foreign or fields.get("lora_name") is not None or fields.get("lora_id") is not None
    return BlocksStored(hashes, None if parent is None else _hash(parent), tokens, size, salt, foreign)


def _depends(told: Any, first: bool) -> tuple[str, bool]:
    """Returns the salt, and whether there is something else: `extra_keys` has an entry a block."""
    if told is None:
        return "", False
    if not isinstance(told, list):
        raise KvEventsUnusable("extra_keys: is no list")
    head = told[0] if first and told else None
    if isinstance(head, list) and len(head) == 1 and isinstance(head[0], str):
        return head[0], any(told[1:])
    return "", any(told)

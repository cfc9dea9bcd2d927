"""A prefix cache that reports what it does as vLLM's does: blocks by hash, the longest unused first to go, the same
hash at several places where a prompt's last block is computed again."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from typing import Any

import msgspec

from kvmesh.kvcache.keys import Namespace, chain, pack_tokens, split

SIZE = 4  # tokens a block
NAMESPACE = Namespace(fingerprint="external-tests", kv_dtype="")


class ReportingCache:
    """Keeps at most `places` blocks. `batches` are all that it has published, by number."""

    def __init__(self, places: int, namespace: Namespace = NAMESPACE) -> None:
        self._places, self._namespace = places, namespace
        self._used: OrderedDict[int, bytes | None] = OrderedDict((at, None) for at in range(places))
        self._keys: dict[bytes, bytes] = {}  # by hash
        self._events: list[dict[str, Any]] = []
        self.batches: list[bytes] = []

    def held(self) -> set[bytes]:
        """Returns the keys of all blocks."""
        return {self._keys[name] for name in self._used.values() if name is not None}

    def serve(self, tokens: list[int], salt: Namespace | None = None) -> None:
        """Computes a prompt of whole blocks, as far as it has no room for it, and publishes what that changed."""
        count = min(len(tokens) // SIZE, self._places)
        namespace = salt or self._namespace
        keys = split(chain(namespace, pack_tokens(tokens), SIZE))[:count]
        told = "" if salt is None else namespace.root(SIZE).hex()
        names, parent = [], told.encode()
        for at in range(count):
            parent = hashlib.sha256(parent + pack_tokens(tokens[at * SIZE : (at + 1) * SIZE])).digest()
            names.append(parent)
        known = Counter(name for name in self._used.values() if name is not None)
        hit = next((at for at, name in enumerate(names) if not known[name]), count)
        hit = min(hit, count - 1)  # the last token is always computed, and its block with it
        mine = {self._place_of(name) for name in names[:hit]}
        for place in mine:
            self._used.move_to_end(place)
        taken = [place for place in self._used if place not in mine][: count - hit]
        for place in taken:
            if (gone := self._used[place]) is not None:
                self._events.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU", "group_idx": 0})
        for place, name, key in zip(taken, names[hit:], keys[hit:], strict=True):
            self._used[place] = name
            self._used.move_to_end(place)
            self._keys[name] = key
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": names[hit:],
                "parent_block_hash": names[hit - 1] if hit else None,
                "token_ids": tokens[hit * SIZE : count * SIZE],
                "block_size": SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [[told] if told and not at else None for at in range(hit, count)],
                "group_idx": 0,
            }
        )
        self._publish()

    def _place_of(self, name: bytes) -> int:
        return next(place for place, there in reversed(self._used.items()) if there == name)

    def clear(self) -> None:
        self._used = OrderedDict((at, None) for at in range(self._places))
        self._events.append({"type": "AllBlocksCleared"})
        self._publish()

    def _publish(self) -> None:
        self.batches.append(msgspec.msgpack.encode([1.5, self._events, 0]))
        self._events = []

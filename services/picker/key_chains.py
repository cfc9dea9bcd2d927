"""Block keys of prompts that begin as earlier ones did: a stretch of blocks behind a known digest is hashed once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache

from kvmesh.kvcache.keys import KEY_BYTES, TOKEN_BYTES, Namespace, extend

STRETCH_BLOCKS = 16
_ENTRY_BYTES = 400  # of Python's objects around an entry

_roots = lru_cache(maxsize=256)(Namespace.root)


class KeyChains:
    """The stretches that were used last, up to `max_bytes` of memory. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._stretches: OrderedDict[tuple[bytes, bytes], tuple[bytes, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def keys(self, namespace: Namespace, packed: bytes, block_tokens: int) -> bytes:
        """Returns what `kvmesh.kvcache.keys.chain` does: the keys of all full blocks, packed."""
        block = block_tokens * TOKEN_BYTES
        step, end = block * STRETCH_BLOCKS, len(packed) // block * block
        digest, found = _roots(namespace, block_tokens), []
        for at in range(0, end, step):
            stretch = packed[at : min(at + step, end)]
            keys, digest = self._stretch(digest, stretch, block)
            found.append(keys)
        return b"".join(found)

    def _stretch(self, digest: bytes, stretch: bytes, block: int) -> tuple[bytes, bytes]:
        with self._lock:
            known = self._stretches.get((digest, stretch))
            if known is not None:
                self._stretches.move_to_end((digest, stretch))
                return known
        tip, keys = digest, []
        for at in range(0, len(stretch), block):
            key, tip = extend(tip, stretch[at : at + block])
            keys.append(key)
        made = b"".join(keys), tip
        with self._lock:
            if (digest, stretch) not in self._stretches:
                self._stretches[digest, stretch] = made
                self._held_bytes += _size(stretch, made[0])
                while self._held_bytes > self._max_bytes:
                    (_, old), (gone, _) = self._stretches.popitem(last=False)
                    self._held_bytes -= _size(old, gone)
        return made


def _size(stretch: bytes, keys: bytes) -> int:
    return _ENTRY_BYTES + len(stretch) + len(keys) + 2 * 2 * KEY_BYTES

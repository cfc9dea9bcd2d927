"""Keys of one request's blocks: the prompt's as they came with it, the answer's chained as its tokens come. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvmesh.kvcache import keys as block_keys


class Chain:
    """`keys` names the leading blocks that are known. Without a digest it never grows, and keeps no tokens."""

    __slots__ = ("_block_tokens", "_digest", "keys", "pending")

    def __init__(self, keys: Sequence[bytes], digest: bytes, tail: bytes, block_tokens: int) -> None:
        self.keys = list(keys)
        self._digest = digest
        self._block_tokens = block_tokens
        # Tokens after the last known key; None when nobody wants to know.
        self.pending: array[int] | None = array("I", block_keys.unpack_tokens(tail)) if digest else None

    def upto(self, blocks: int) -> list[bytes]:
        """Keys of the leading `blocks` blocks, or of fewer when no more can be named."""
        pending, step = self.pending, self._block_tokens
        while pending is not None and len(self.keys) < blocks and len(pending) >= step:
            key, self._digest = block_keys.extend(self._digest, block_keys.pack_tokens(pending[:step]))
            del pending[:step]
            self.keys.append(key)
        return self.keys[:blocks]

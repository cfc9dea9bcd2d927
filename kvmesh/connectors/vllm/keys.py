"""Keys of KV that vLLM computes: kvmesh's own chain over token ids, so that whoever knows the root computes them, too.

    fingerprint  SHA-256 of KvContent: all that decides the bytes of a block besides its tokens
    key[i]       kvmesh.kvcache.keys.chain, in a namespace of this fingerprint, the LoRA adapter and the cache salt
    part key     tag, then SHA-256(domain, key[i], rank, ranks, part, parts) from its 5th byte on

vLLM's own block hashes are not used: they differ from process to process unless PYTHONHASHSEED is set. A block of a
model is stored in parts, one for each rank and group of layers; one chain serves all of them. Pure.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from kvmesh.kvcache.keys import KEY_BYTES, TAG_BYTES, TOKEN_BYTES, Namespace, extend, pack_tokens

_DOMAIN = b"kvmesh.vllm-part\x00"
_PROMPT = b"kvmesh.vllm-prompt\x00"
_PLACE = struct.Struct("<4I")

Layers = tuple[int, int]  # first layer of a part, and the one after its last


@dataclass(frozen=True, slots=True, kw_only=True)
class KvContent:
    """Says all that decides the bytes of a block of KV besides its tokens, the adapter and the salt. `model` stands for
    the weights; `layout` is what the workers say of their pages: strides, attention backend, instruction set."""

    engine: str  # name and version: how pages are filled may change with it
    model: str
    model_config: str
    dtype: str
    kv_dtype: str
    block_tokens: int
    ranks: int
    layout: str
    more: Mapping[str, str] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Returns a hash of all fields, in hex."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvmesh.vllm-content\x00" + text.encode()).hexdigest()


class TokenChain:
    """Computes the keys of one request's full blocks, each once, as tokens are added."""

    __slots__ = ("_block_tokens", "_digest", "_root", "keys")

    def __init__(self, namespace: Namespace, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._digest = self._root = namespace.root(block_tokens)
        self.keys: list[bytes] = []

    def reach(self, tokens: Sequence[int], blocks: int) -> None:
        """Computes keys up to `blocks` full blocks of `tokens`, which begin with those of earlier calls. Raises
        ValueError when an id is not a u32 or there are not enough tokens."""
        first = len(self.keys)
        if blocks <= first:
            return
        step = self._block_tokens
        packed = memoryview(pack_tokens(tokens[first * step : blocks * step]))
        if len(packed) != (blocks - first) * step * TOKEN_BYTES:
            raise ValueError(f"{len(tokens)} tokens: fewer than {blocks} blocks of {step}")
        for at in range(0, len(packed), step * TOKEN_BYTES):
            key, self._digest = extend(self._digest, packed[at : at + step * TOKEN_BYTES])
            self.keys.append(key)

    def digest(self, tokens: Sequence[int], count: int) -> str:
        """Returns a hash, in hex, of all that the KV of the first `count` tokens follows from. Raises as `reach`
        does."""
        full = count // self._block_tokens
        self.reach(tokens, full)
        last = self.keys[full - 1] if full else b""
        tail = pack_tokens(tokens[full * self._block_tokens : count])
        return hashlib.sha256(_PROMPT + self._root + last + tail).hexdigest()


def part_key(key: bytes, rank: int, ranks: int, part: int, parts: int) -> bytes:
    """Returns the key under which one rank stores one group of layers of a block."""
    hashed = hashlib.sha256(_DOMAIN + key + _PLACE.pack(rank, ranks, part, parts))
    return key[:TAG_BYTES] + hashed.digest()[TAG_BYTES:KEY_BYTES]


def split_layers(page_bytes: Sequence[int], least: int) -> list[Layers]:
    """Returns groups of consecutive layers, as many as there can be of at least `least` bytes each (one, if all are
    smaller together), each ending where its share of all bytes does."""
    total = sum(page_bytes)
    parts = max(min(total // least, len(page_bytes)), 1)
    found: list[Layers] = []
    first = reached = 0
    for layer, nbytes in enumerate(page_bytes):
        reached += nbytes
        left = len(page_bytes) - layer - 1
        due = reached * parts >= total * (len(found) + 1)
        if due and len(found) < parts - 1 and left:
            found.append((first, layer + 1))
            first = layer + 1
    return [*found, (first, len(page_bytes))]

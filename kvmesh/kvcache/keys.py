"""Block keys: names of the KV of `block_tokens` consecutive tokens; equal keys mean equal tokens before, too.

    tag       = first 4 bytes of SHA-256(domain, tenant)
    root      = tag, then SHA-256(domain, kind, every field of the namespace, block_tokens) from its 5th byte on
    digest[i] = tag, then SHA-256(digest[i-1] or root, token ids of block i as little-endian u32, extra bytes of i) ...
    key[i]    = first 16 bytes of digest[i]

The chain runs over full digests; only the keys are cut to 16 bytes. The block size is part of the root, so a
block's token bytes have one length within a chain and the extra bytes cannot be taken for tokens. The tag makes a
tenant's blocks recognizable wherever keys are known (quotas, removal by namespace); 96 bits of hash are left.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from kvmesh.errors import InvalidRequest

KEY_VERSION = 2  # 1: keys without a tag
KEY_BYTES = 16
TAG_BYTES = 4
DIGEST_BYTES = 32
MAX_WEIGHTS_EPOCH = (1 << 64) - 1
MAX_EPOCH_AHEAD_NS = 388 * 86_400 * 10**9  # of the clock: a slip must not use up the epochs of all later updates
TOKEN_BYTES = 4
_MANY = struct.Struct(f"{KEY_BYTES}s" * 32)  # keys cut at C speed

# Fingerprints of external engines' models begin so: kvmesh's own, which are hex, never do, and share no key with them.
EXTERNAL = "external-"

_DOMAIN = b"kvmesh.block-key\x00"
_TAG_DOMAIN = b"kvmesh.tenant-tag\x00"


class KeyKind(enum.IntEnum):
    """What a key promises. It is part of the root, so keys of two kinds never coincide."""

    PREFIX = 1  # these tokens after exactly those before them
    POSITION_FREE = 2  # these tokens at any position (CacheBlend); no code makes such keys yet


def check_epoch(epoch: int, served: int, now_ns: int) -> None:
    """Raises InvalidRequest for the epoch of an update that is so far ahead that few or none could follow it. `now_ns`
    is of the clock; an operator may have started the instance with a greater one."""
    most = max(now_ns, served) + MAX_EPOCH_AHEAD_NS
    if epoch > most:
        raise InvalidRequest.of("weights_epoch", epoch, f"at most {most}, the clock's nanoseconds and 388 days")


def tenant_tag(tenant: str) -> bytes:
    """Returns the first 4 bytes of every key of this tenant ("" for requests without one). With 65,000 tenants two
    share a tag by chance with probability 0.4; they then share a quota and a removal by namespace, but never a block.
    """
    return hashlib.sha256(_TAG_DOMAIN + tenant.encode("utf-8")).digest()[:TAG_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything besides tokens that KV depends on; blocks are shared only within one namespace.

    `fingerprint` (hex) is a hash of every byte of the weights, `lora` names the adapter ("" for none), `tenant_salt`
    separates those who must not share blocks with others ("" is shared by all), `weights_epoch` is the version of
    weights that change while serving. `tenant` is the tenant whose tag the keys have; it need not be secret.
    """

    key_version: int = KEY_VERSION
    fingerprint: str
    kv_dtype: str
    lora: str = ""
    tenant_salt: str = ""
    weights_epoch: int = 0
    tenant: str = ""

    def root(self, block_tokens: int, kind: KeyKind = KeyKind.PREFIX) -> bytes:
        """Returns the 32-byte digest that chains of this namespace start from. Fields are length-prefixed, so no two
        namespaces hash the same bytes."""
        parts = [_DOMAIN, struct.pack("<IIQI", self.key_version, kind, self.weights_epoch, block_tokens)]
        for text in (self.fingerprint, self.kv_dtype, self.lora, self.tenant_salt):
            raw = text.encode("utf-8")
            parts += (struct.pack("<Q", len(raw)), raw)
        return tenant_tag(self.tenant) + hashlib.sha256(b"".join(parts)).digest()[TAG_BYTES:]


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Returns token ids as little-endian u32, the form in which they are sent and hashed. Raises ValueError when an id
    is not a u32."""
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as err:
        raise ValueError(f"token ids must be integers in 0..2^32-1: {err}") from None
    if packed.itemsize != TOKEN_BYTES:  # a platform whose unsigned int is not 32 bits
        return struct.pack(f"<{len(packed)}I", *packed)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes | bytearray | memoryview) -> list[int]:
    """Reverses `pack_tokens`. Raises ValueError when the length is not a whole number of ids."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"packed token ids have {len(packed)} bytes, not a multiple of {TOKEN_BYTES}")
    return list(struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed))


def chain(
    namespace: Namespace,
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_tokens: int,
    *,
    extra: Mapping[int, bytes] | None = None,
) -> bytes:
    """Returns the keys of all full blocks, packed: 16 bytes each, in order. A trailing partial block has no key.

    `token_ids` are ints, or bytes as of `pack_tokens`. `extra` maps a block's index to bytes that its KV depends on
    besides tokens (an image's digest); later blocks inherit them through the chain. Raises ValueError when an id is not
    a u32, or `block_tokens` is not positive.
    """
    if block_tokens <= 0:
        raise ValueError(f"block_tokens={block_tokens}: must be positive")
    packed = token_ids if isinstance(token_ids, bytes | bytearray | memoryview) else pack_tokens(token_ids)
    view = memoryview(packed).cast("B")
    if len(view) % TOKEN_BYTES:
        raise ValueError(f"packed token ids have {len(view)} bytes, not a multiple of {TOKEN_BYTES}")
    return chain_tip(namespace, view, block_tokens, extra=extra)[0]


def chain_tip(
    namespace: Namespace, packed: bytes | memoryview, block_tokens: int, *, extra: Mapping[int, bytes] | None = None
) -> tuple[bytes, bytes]:
    """Returns (the keys of `chain`, the full 32-byte digest of the last block, from which `extend` goes on)."""
    view, digest = memoryview(packed), namespace.root(block_tokens)
    if not extra:
        return chain_on(digest, view, block_tokens)
    step, keys = block_tokens * TOKEN_BYTES, []
    for index, end in enumerate(range(step, len(view) + 1, step)):
        hashed = hashlib.sha256(digest)
        hashed.update(view[end - step : end])
        hashed.update(extra.get(index, b""))
        digest = digest[:TAG_BYTES] + hashed.digest()[TAG_BYTES:]
        keys.append(digest[:KEY_BYTES])
    return b"".join(keys), digest


def chain_on(digest: bytes, packed: bytes | memoryview, block_tokens: int) -> tuple[bytes, bytes]:
    """Returns (the keys of the full blocks in `packed`, which follow the block of `digest`, and the last one's digest).
    Raises ValueError when the digest has another length than 32 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a chain digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    step, sha256, tag, keys = block_tokens * TOKEN_BYTES, hashlib.sha256, digest[:TAG_BYTES], []
    for at in range(0, len(packed) - step + 1, step):
        digest = tag + sha256(digest + packed[at : at + step]).digest()[TAG_BYTES:]
        keys.append(digest[:KEY_BYTES])
    return b"".join(keys), digest


def extend(digest: bytes, packed_block: bytes | memoryview) -> tuple[bytes, bytes]:
    """Returns (key, digest) of the block that follows `digest` (32 bytes). `packed_block` holds exactly one block's
    tokens. Raises ValueError when the digest has another length."""
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a chain digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    hashed = hashlib.sha256(digest)
    hashed.update(packed_block)
    digest = digest[:TAG_BYTES] + hashed.digest()[TAG_BYTES:]
    return digest[:KEY_BYTES], digest


class Keys(Sequence[bytes]):
    """The keys of one chain, packed as they are sent. A key becomes an object only when it is indexed, so native code
    that goes through all of them reads one piece of memory."""

    __slots__ = ("_count", "packed")

    def __init__(self, packed: bytes) -> None:
        """Raises ValueError when `packed` is not a whole number of keys."""
        self._count, rest = divmod(len(packed), KEY_BYTES)
        if rest:
            raise ValueError(f"packed keys have {len(packed)} bytes, not a multiple of {KEY_BYTES}")
        self.packed = packed

    @staticmethod
    def of(keys: Sequence[bytes]) -> Keys:
        """Returns the keys as `Keys`. Raises ValueError when one of them is no key."""
        if isinstance(keys, Keys):
            return keys
        packed = Keys(b"".join(keys))
        if len(packed) != len(keys):
            raise ValueError(f"{len(keys)} keys have {len(packed.packed)} bytes, not {KEY_BYTES} each")
        return packed

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> Keys: ...

    def __getitem__(self, at: int | slice) -> bytes | Keys:
        """Returns a key, or a slice, whose step must be 1."""
        if isinstance(at, slice):
            first, end, step = at.indices(self._count)
            if step != 1:
                raise ValueError(f"step={step}: keys of one chain are neighbours")
            return Keys(self.packed[first * KEY_BYTES : end * KEY_BYTES])
        place = range(self._count)[at] * KEY_BYTES
        return self.packed[place : place + KEY_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        return iter(split(self.packed))

    def __eq__(self, other: object) -> bool:
        return self.packed == other.packed if isinstance(other, Keys) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"Keys({self.packed.hex(' ', KEY_BYTES)})"


def split(packed: bytes) -> list[bytes]:
    """Returns packed keys one by one. Raises ValueError when the length is not a whole number of keys."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"packed keys have {len(packed)} bytes, not a multiple of {KEY_BYTES}")
    whole = len(packed) - len(packed) % _MANY.size
    found: list[bytes] = []
    for some in _MANY.iter_unpack(packed[:whole]):
        found += some
    return found + [packed[at : at + KEY_BYTES] for at in range(whole, len(packed), KEY_BYTES)]

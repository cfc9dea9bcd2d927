"""Policies ask the shell to keep these records, as bytes in the form in which they outlive this master. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvmesh.kvcache.keys import KEY_BYTES, TAG_BYTES, split
from kvmesh.kvcache.tombstones import Tombstone
from kvmesh.services.store.policy.names import Name
from kvmesh.services.store.policy.quotas import TagQuota
from kvmesh.services.store.policy.replicas import Pinned

FLOOR = b"tombstone_floor"
_SEQ = struct.Struct(">Q")
_TARGET = struct.Struct(">IB")
_KEYS, _PREFIX = b"k", b"p"

T = TypeVar("T")


@dataclass(frozen=True)
class Write:
    """Has records of one kind (see `kvmesh.services.store.durable`) that are to be kept, and those that are to be
    forgotten."""

    kind: str
    puts: Mapping[bytes, bytes] = field(default_factory=dict)
    drops: tuple[bytes, ...] = ()


def readable(
    kept: Mapping[str, Mapping[bytes, bytes]], kind: str, read: Callable[[bytes, bytes], T], bad: list[str]
) -> list[T]:
    """Returns every record of `kind` that can be read; why one cannot is appended to `bad`."""
    found = []
    for key, value in kept.get(kind, {}).items():
        try:
            found.append(read(key, value))
        except (ValueError, struct.error) as error:
            bad.append(f"{kind} {key[:64]!r}: {error}")
    return found


def name_out(name: Name) -> bytes:
    """Returns a name as the key of its record. The parts of a name contain no NUL."""
    return "\0".join(name).encode()


def binding_out(key: bytes, after: int) -> bytes:
    """Returns the record of a binding: the key, and the last tombstone at the time of binding. A later tombstone that
    covers the key ends the binding, whoever leads by then."""
    return key + _SEQ.pack(after)


def binding_in(raw: bytes, value: bytes) -> tuple[Name, bytes, int]:
    """Returns (name, key, the last tombstone then). Raises ValueError or struct.error for a malformed record."""
    namespace, _, text = raw.decode().partition("\0")
    return (namespace, text), _key(value[:KEY_BYTES]), int(_SEQ.unpack(value[KEY_BYTES:])[0])


def seq_out(seq: int) -> bytes:
    """Returns a tombstone's number as eight bytes."""
    return _SEQ.pack(seq)


def floor_in(key: bytes, value: bytes) -> int:
    """Returns the floor of tombstones; 0 for other settings."""
    return int(_SEQ.unpack(value)[0]) if key == FLOOR else 0


def tombstone_out(tombstone: Tombstone) -> tuple[bytes, bytes]:
    """Returns the record of a tombstone: (key, value)."""
    value = _PREFIX + tombstone.prefix if tombstone.prefix else _KEYS + b"".join(tombstone.keys)
    return seq_out(tombstone.seq), value


def tombstone_in(key: bytes, value: bytes, now: float) -> Tombstone:
    """The inverse of `tombstone_out`; the tombstone's time begins anew. Raises ValueError or struct.error for a
    malformed record."""
    kind, rest, seq = value[:1], value[1:], int(_SEQ.unpack(key)[0])
    if kind == _PREFIX and 0 < len(rest) <= KEY_BYTES:
        return Tombstone(seq, prefix=rest, at=now)
    if kind == _KEYS:
        return Tombstone(seq, tuple(split(rest)), at=now)
    raise ValueError(f"a tombstone begins with {kind!r}")


def target_out(replicas: int, hard: bool, after: int) -> bytes:
    """Returns the record of one key's target; `after` is the last tombstone then."""
    return _TARGET.pack(replicas, hard) + _SEQ.pack(after)


def target_in(key: bytes, value: bytes) -> tuple[bytes, int, bool, int]:
    """Returns (key, replicas, hard, after). Raises ValueError or struct.error for a malformed record."""
    replicas, hard = _TARGET.unpack(value[: _TARGET.size])
    if replicas < 1:
        raise ValueError("no replicas")
    return _key(key), replicas, bool(hard), int(_SEQ.unpack(value[_TARGET.size :])[0])


def unpin_out(pinned: Pinned) -> bytes:
    """Returns the record of one key that is to be unpinned at one incarnation."""
    (instance_id, incarnation), key = pinned
    return key + _SEQ.pack(incarnation) + instance_id.encode()


def unpin_in(raw: bytes, value: bytes) -> Pinned:
    """The inverse of `unpin_out`. Raises ValueError or struct.error for a malformed record."""
    key, rest = _key(raw[:KEY_BYTES]), raw[KEY_BYTES:]
    return (rest[_SEQ.size :].decode(), int(_SEQ.unpack(rest[: _SEQ.size])[0])), key


def quota_out(quota: TagQuota) -> tuple[bytes, bytes]:
    """Returns the record of a quota: (tag, value)."""
    return quota.tag, _SEQ.pack(quota.blocks) + quota.name.encode()


def quota_in(tag: bytes, value: bytes) -> TagQuota:
    """The inverse of `quota_out`. Raises ValueError or struct.error for a malformed record."""
    blocks = int(_SEQ.unpack(value[: _SEQ.size])[0])
    if len(tag) != TAG_BYTES:
        raise ValueError(f"a tag of {len(tag)} bytes")
    return TagQuota(tag, blocks, value[_SEQ.size :].decode())


def _key(raw: bytes) -> bytes:
    if len(raw) != KEY_BYTES:
        raise ValueError(f"a key of {len(raw)} bytes")
    return raw

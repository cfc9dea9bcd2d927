"""What policies ask the shell to keep: how each record looks where it survives this master. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.kvcache.keys import KEY_BYTES, split
from services.store.policy.names import Name
from services.store.policy.tombstones import Tombstone

FLOOR = b"tombstone_floor"
_SEQ = struct.Struct(">Q")
_KEYS, _PREFIX = b"k", b"p"


@dataclass(frozen=True)
class Write:
    """To be kept, and to be forgotten, of one kind (see `services.store.durable`)."""

    kind: str
    puts: Mapping[bytes, bytes] = field(default_factory=dict)
    drops: tuple[bytes, ...] = ()


def name_out(name: Name) -> bytes:
    """Neither part holds a NUL."""
    return "\0".join(name).encode()


def name_in(raw: bytes) -> Name:
    """The inverse of `name_out`."""
    namespace, _, text = raw.decode().partition("\0")
    return namespace, text


def seq_out(seq: int) -> bytes:
    """Eight bytes."""
    return _SEQ.pack(seq)


def seq_in(raw: bytes) -> int:
    """The inverse of `seq_out`. struct.error: not eight bytes."""
    found: int = _SEQ.unpack(raw)[0]
    return found


def tombstone_out(tombstone: Tombstone) -> tuple[bytes, bytes]:
    """(key, value)."""
    value = _PREFIX + tombstone.prefix if tombstone.prefix else _KEYS + b"".join(tombstone.keys)
    return seq_out(tombstone.seq), value


def tombstone_in(key: bytes, value: bytes, now: float) -> Tombstone:
    """The inverse; its time begins anew. ValueError: not one that we wrote."""
    kind, rest = value[:1], value[1:]
    if kind == _PREFIX and 0 < len(rest) <= KEY_BYTES:
        return Tombstone(seq_in(key), prefix=rest, at=now)
    if kind == _KEYS:
        return Tombstone(seq_in(key), tuple(split(rest)), at=now)
    raise ValueError(f"a tombstone begins with {kind!r}")

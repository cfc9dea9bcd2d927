"""Random protobuf messages, made from their descriptors: valid, absurd, and bytes that are no message at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.support.hostile import mangled

_DEPTH = 5
_FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
_BITS = {
    FieldDescriptor.TYPE_UINT32: (0, 32), FieldDescriptor.TYPE_FIXED32: (0, 32), FieldDescriptor.TYPE_UINT64: (0, 64),
    FieldDescriptor.TYPE_FIXED64: (0, 64), FieldDescriptor.TYPE_INT32: (1, 32), FieldDescriptor.TYPE_SINT32: (1, 32),
    FieldDescriptor.TYPE_SFIXED32: (1, 32), FieldDescriptor.TYPE_INT64: (1, 64), FieldDescriptor.TYPE_SINT64: (1, 64),
    FieldDescriptor.TYPE_SFIXED64: (1, 64),
}  # fmt: skip


def random_message(rng: random.Random, descriptor: Descriptor, words: Sequence[str | bytes], depth: int = 0) -> Message:
    """Returns a message with any part of its fields set; texts and bytes are often of `words`, so that some calls mean
    something that exists."""
    message: Any = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if rng.random() < 0.35:
            continue
        times = rng.choice((0, 1, 1, 2, 7)) if field.is_repeated else 1
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth >= _DEPTH or field.message_type.GetOptions().map_entry:
                continue
            for _ in range(times):
                inner = random_message(rng, field.message_type, words, depth + 1)
                if field.is_repeated:
                    getattr(message, field.name).append(inner)
                else:
                    getattr(message, field.name).CopyFrom(inner)
            continue
        values = [_value(rng, field, words) for _ in range(times)]
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, values[0])
    return message  # type: ignore[no-any-return]


def noisy(rng: random.Random, descriptor: Descriptor, words: Sequence[str | bytes]) -> bytes:
    """Returns bytes to send as one message: a random one, a mangled one, or noise."""
    what = rng.random()
    if what < 0.05:
        return rng.randbytes(rng.choice((0, 1, 3, 16, 1000)))
    raw = random_message(rng, descriptor, words).SerializeToString()
    return raw if what < 0.75 else mangled(rng, raw)


def _value(rng: random.Random, field: FieldDescriptor, words: Sequence[str | bytes]) -> Any:
    if field.type in _BITS:
        signed, bits = _BITS[field.type]
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        return rng.choice((low, high, 0, 1, rng.randint(0, 100), rng.randint(low, high)))
    if field.type == FieldDescriptor.TYPE_ENUM:
        assert field.enum_type is not None
        return rng.choice((*(value.number for value in field.enum_type.values), 999))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in _FLOATS:
        return rng.choice((0.0, -1.0, 0.5, 3e38, float("inf"), float("-inf"), float("nan")))
    known = [word for word in words if isinstance(word, bytes) is (field.type == FieldDescriptor.TYPE_BYTES)]
    if known and rng.random() < 0.6:
        return rng.choice(known)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 4, 15, 16, 32, 160, 4096)))
    return rng.choice(("", "x", "\x00", "a\nb", "☠" * 3, "../..", "127.0.0.1:1", "[::1]:0", "z" * 5000))

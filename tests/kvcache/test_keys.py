"""Block keys: equal exactly when namespace, tokens and everything before are equal."""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.keys import (
    KEY_BYTES,
    TAG_BYTES,
    KeyKind,
    Keys,
    Namespace,
    chain,
    chain_tip,
    extend,
    pack_tokens,
    split,
    tenant_tag,
    unpack_tokens,
)

NAMESPACE = Namespace(fingerprint="ab12", kv_dtype="float32")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def by_the_book(namespace: Namespace, tokens: list[int], block_tokens: int, extra: dict[int, bytes]) -> bytes:
    """The definition, written the slow way."""
    digest, keys = namespace.root(block_tokens), b""
    for index in range(len(tokens) // block_tokens):
        block = tokens[index * block_tokens : (index + 1) * block_tokens]
        raw = b"".join(struct.pack("<I", token) for token in block)
        digest = digest[:4] + hashlib.sha256(digest + raw + extra.get(index, b"")).digest()[4:]
        keys += digest[:KEY_BYTES]
    return keys


@given(
    tokens=TOKENS,
    block_tokens=st.sampled_from([1, 4, 16]),
    extra=st.dictionaries(st.integers(0, 5), st.binary()),
)
def test_chain_equals_its_definition(tokens: list[int], block_tokens: int, extra: dict[int, bytes]) -> None:
    expected = by_the_book(NAMESPACE, tokens, block_tokens, extra)
    assert chain(NAMESPACE, tokens, block_tokens, extra=extra) == expected
    assert chain(NAMESPACE, pack_tokens(tokens), block_tokens, extra=extra) == expected
    assert len(expected) == KEY_BYTES * (len(tokens) // block_tokens)


def test_the_first_keys_never_change() -> None:
    """Keys are on the wire and on disks of other builds: a change here must raise KEY_VERSION."""
    namespace = Namespace(fingerprint="ab12", kv_dtype="bfloat16", lora="l", tenant_salt="t", weights_epoch=7)
    assert chain(namespace, range(48), 16).hex() == (
        "a44cbcce5c13a3c39607a75196f6e2cba44cbcce8bbd5b9f34d6497c50b9904aa44cbcced2889b834ab445ac52df61a2"
    )


@given(tokens=TOKENS, tenant=st.text(max_size=5))
def test_every_key_bears_its_tenants_tag(tokens: list[int], tenant: str) -> None:
    keys, digest = chain_tip(dataclasses.replace(NAMESPACE, tenant=tenant), pack_tokens(tokens), 4)
    key, digest = extend(digest, pack_tokens([1, 2, 3, 4]))
    assert {k[:TAG_BYTES] for k in (*split(keys), key, digest)} == {tenant_tag(tenant)}
    assert tenant_tag(tenant) != tenant_tag(tenant + "x")


@given(tokens=TOKENS, at=st.integers(0, 69), block_tokens=st.sampled_from([1, 4, 16]))
def test_a_changed_token_changes_its_block_and_all_after_it(tokens: list[int], at: int, block_tokens: int) -> None:
    if at >= len(tokens):
        return
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = (
        split(chain(NAMESPACE, tokens, block_tokens)),
        split(chain(NAMESPACE, changed, block_tokens)),
    )
    same = at // block_tokens
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key_version", 1),
        ("fingerprint", "ab13"),
        ("kv_dtype", "bfloat16"),
        ("lora", "adapter"),
        ("tenant_salt", "tenant"),
        ("tenant", "alice"),
        ("weights_epoch", 1),
    ],
)
def test_every_field_of_the_namespace_separates(field: str, value: object) -> None:
    other = dataclasses.replace(NAMESPACE, **{field: value})  # type: ignore[arg-type]
    assert not set(split(chain(NAMESPACE, range(64), 16))) & set(split(chain(other, range(64), 16)))


def test_kind_block_size_and_field_borders_separate() -> None:
    assert NAMESPACE.root(16) != NAMESPACE.root(16, KeyKind.POSITION_FREE)
    assert NAMESPACE.root(16) != NAMESPACE.root(32)
    left = Namespace(fingerprint="a", kv_dtype="f", lora="xy", tenant_salt="")
    right = Namespace(fingerprint="a", kv_dtype="f", lora="x", tenant_salt="y")
    assert left.root(16) != right.root(16)


@given(tokens=TOKENS)
def test_tokens_pack_and_unpack(tokens: list[int]) -> None:
    assert pack_tokens(tokens) == struct.pack(f"<{len(tokens)}I", *tokens)
    assert unpack_tokens(pack_tokens(tokens)) == tokens


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"]])
def test_an_id_that_is_no_u32_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        chain(NAMESPACE, tokens, 16)


def test_broken_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens=0"):
        chain(NAMESPACE, [1], 0)
    with pytest.raises(ValueError, match="multiple of 4"):
        chain(NAMESPACE, b"12345", 1)
    with pytest.raises(ValueError, match="multiple of 4"):
        unpack_tokens(b"12345")
    with pytest.raises(ValueError, match="multiple of 16"):
        split(b"1")


@given(tokens=TOKENS, block_tokens=st.sampled_from([1, 4, 16]), at=st.integers(0, 70))
def test_a_chain_goes_on_from_its_tip(tokens: list[int], block_tokens: int, at: int) -> None:
    """Decode chains the answer's blocks after the prompt's; together they are one chain."""
    whole = len(tokens) // block_tokens
    head = min(at, whole)
    keys, digest = chain_tip(NAMESPACE, pack_tokens(tokens[: head * block_tokens]), block_tokens)
    for block in range(head, whole):
        key, digest = extend(digest, pack_tokens(tokens[block * block_tokens : (block + 1) * block_tokens]))
        keys += key
    assert keys == chain(NAMESPACE, tokens, block_tokens)
    assert (keys, digest) == chain_tip(NAMESPACE, pack_tokens(tokens), block_tokens)


def test_the_tip_of_no_block_is_the_root_and_a_partial_block_has_none() -> None:
    assert chain_tip(NAMESPACE, b"", 16) == (b"", NAMESPACE.root(16))
    assert chain_tip(NAMESPACE, pack_tokens(range(20)), 16) == chain_tip(NAMESPACE, pack_tokens(range(16)), 16)


def test_only_a_whole_digest_is_extended() -> None:
    for digest in (b"", NAMESPACE.root(16)[:KEY_BYTES]):
        with pytest.raises(ValueError, match=f"32 bytes, not {len(digest)}"):
            extend(digest, pack_tokens(range(16)))


@given(st.integers(0, 80), st.integers(-90, 90), st.integers(-90, 90))
def test_packed_keys_are_a_sequence(count: int, one: int, other: int) -> None:
    plain = [bytes([n, *[7] * 15]) for n in range(count)]
    packed = Keys(b"".join(plain))
    assert list(packed) == plain and len(packed) == count and packed == Keys.of(tuple(plain)) == Keys.of(packed)
    assert list(packed[one:other]) == plain[one:other] and list(packed[one:]) == plain[one:]
    if -count <= one < count:
        assert packed[one] == plain[one] and packed[one] in packed and packed.index(packed[one]) == one % count
    else:
        with pytest.raises(IndexError):
            packed[one]


def test_what_is_no_packed_keys() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        Keys(bytes(17))
    with pytest.raises(ValueError, match="2 keys have 48 bytes"):
        Keys.of((bytes(16), bytes(32)))
    with pytest.raises(ValueError, match="step=2"):
        Keys(bytes(64))[::2]

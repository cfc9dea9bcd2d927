"""The file of keys, the check, and the salts that keep tenants apart: all pure."""

from __future__ import annotations

import hashlib
import itertools
import tomllib
from typing import Any

import pytest

from kvmesh.errors import ConfigError, Unauthorized
from kvmesh.kvcache.keys import chain, split
from kvmesh.services.gateway.api_keys import ANYBODY, MAX_KEYS, KeyEntry, KeyRing, Tenant, combined_salt, make_entry
from kvmesh.services.gateway.models import ServedModelFacts

FACTS = ServedModelFacts("feed", 16, "float32", 512, 400, frozenset(), 0)
KEYS = {"alice": "sk-a", "bob": "sk-b", "carol": "sk-c"}


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def table(name: str, **more: Any) -> str:
    lines = [f"{field} = {value}" for field, value in more.items()]
    return "\n".join(["[[key]]", f'name = "{name}"', f'sha256 = "{sha(KEYS.get(name, name))}"', *lines, ""])


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


# ── who asks ──────────────────────────────────────────────────────────────────────────────────────


def test_a_file_of_keys() -> None:
    ring = KeyRing.parse(
        table("alice") + table("bob", salt='"shared"', models='["small", "large"]') + table("carol", disabled="true")
    )
    assert ring.tenant(bearer("sk-a")) == Tenant("alice", "alice", None, 0)
    bob = ring.tenant(bearer("sk-b"))
    assert bob == Tenant("bob", "shared", frozenset({"small", "large"}), 0)
    assert (bob.may_use("small"), bob.may_use("other")) == (True, False)
    assert ring.tenant(b"bearer   sk-a ") == ring.tenant(bearer("sk-a")), "schemes know no case"


@pytest.mark.parametrize(
    "header",
    [
        None, b"", b"Bearer", b"Bearer ", b"sk-a", b"Basic sk-a", b"Bearer sk-c", b"Bearer sk-A", b"Bearer sk-a sk-a",
        b"Bearer sk-aa", b"Bearer sk-", b"Bearer \xff\x00", b"Bearer " + sha("sk-a").encode(),
        b"Bearer " + b"x" * 60_000,
    ],
)  # fmt: skip
def test_who_is_refused(header: bytes | None) -> None:
    ring = KeyRing.parse(table("alice") + table("carol", disabled="true"))
    with pytest.raises(Unauthorized) as caught:
        ring.tenant(header)
    assert (caught.value.code, caught.value.http_status, caught.value.grpc_status) == (
        "invalid_api_key", 401, "UNAUTHENTICATED",
    )  # fmt: skip
    assert "sk-" not in caught.value.message
    assert len(caught.value.message) < 100


def test_the_digest_of_nothing_opens_no_door() -> None:
    ring = KeyRing.parse(f'[[key]]\nname = "oops"\nsha256 = "{sha("")}"\n')
    for header in (b"Bearer ", b"Bearer"):
        with pytest.raises(Unauthorized):
            ring.tenant(header)


def test_every_key_is_compared_whichever_is_met() -> None:
    """Time must not tell which entry matched, nor whether one did."""
    compared: list[str] = []

    class Spy(KeyEntry):
        def matches(self, digest: bytes) -> bool:
            compared.append(self.tenant.name)
            return super().matches(digest)

    ring = KeyRing([Spy(Tenant(name), hashlib.sha256(key.encode()).digest()) for name, key in KEYS.items()])
    for key in (*KEYS.values(), "sk-nobody", ""):
        compared.clear()
        try:
            found = ring.tenant(bearer(key)).name
        except Unauthorized:
            found = ""
        assert compared == list(KEYS), key
        assert found == next((name for name, own in KEYS.items() if own == key), "")


def test_digests_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        seen.append((left, right))
        return left == right

    monkeypatch.setattr("hmac.compare_digest", compare)
    KeyRing.parse(table("alice")).tenant(bearer("sk-a"))
    digest = hashlib.sha256(b"sk-a").digest()
    assert seen == [(digest, digest)]


# ── files that are refused ────────────────────────────────────────────────────────────────────────

GOOD = "0" * 64
BAD: list[tuple[str, str]] = [
    ("", "holds 0 keys"),
    ("key = 3", "[[key]] tables and nothing else"),
    ("key = [1]", "[[key]] tables and nothing else"),
    (f'[key]\nname = "a"\nsha256 = "{GOOD}"', "[[key]] tables and nothing else"),
    (f'[[keys]]\nname = "a"\nsha256 = "{GOOD}"', "[[key]] tables and nothing else"),
    ("[[key]\n", "not TOML (line 1"),
    ('[[key]]\nname = "a"', "key 1 ('a'): sha256 is missing"),
    (f'[[key]]\nsha256 = "{GOOD}"', "key 1: name is missing"),
    (f'[[key]]\nname = "a b"\nsha256 = "{GOOD}"', "key 1: name must be 1 to 64"),
    (f'[[key]]\nname = "{"a" * 65}"\nsha256 = "{GOOD}"', "key 1: name must be 1 to 64"),
    (f'[[key]]\nname = 3\nsha256 = "{GOOD}"', "key 1: name must be text"),
    ('[[key]]\nname = "a"\nsha256 = "sk-secret"', "key 1 ('a'): sha256 must be the 64 hex digits"),
    (f'[[key]]\nname = "a"\nsha256 = "{GOOD}"\nkey = "sk-secret"', "unknown field 'key'"),
    (f'[[key]]\nname = "sk-kvmesh-secret"\nsha256 = "{GOOD}"', "key 1: name must not be a key"),
    (f'[[key]]\nname = "a"\nsha256 = "{GOOD}"\nsk-secret = true', "unknown field"),
    (f'[[key]]\nname = "a"\nsha256 = "{GOOD}"\ndisabled = "yes"', "disabled must be true or false"),
    (f'[[key]]\nname = "a"\nsha256 = "{GOOD}"\nsalt = ""', "salt has 0 characters"),
    (f'[[key]]\nname = "a"\nsha256 = "{GOOD}"\nsalt = "{"s" * 257}"', "salt has 257 characters"),
    (f'[[key]]\nname = "a"\nsha256 = "{GOOD}"\nmodels = []', "models must name models"),
    (f'[[key]]\nname = "a"\nsha256 = "{GOOD}"\nmodels = [1]', "models must name models"),
    (f'[[key]]\nname = "a"\nsha256 = "{GOOD}"\nmodels = "m"', "models must be a list"),
    (table("alice") + f'[[key]]\nname = "alice"\nsha256 = "{GOOD}"', "key 2 ('alice'): name is used twice"),
    (table("alice") + f'[[key]]\nname = "b"\nsha256 = "{sha("sk-a")}"', "key 2 ('b'): sha256 is used twice"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_bad_file_is_refused_and_tells_no_secret(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KeyRing.parse(text)
    assert words in caught.value.message
    assert caught.value.field == "api_keys"
    assert "-secret" not in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_of_too_many_keys() -> None:
    text = "".join(table(f"t{index}") for index in range(MAX_KEYS))
    assert len(KeyRing.parse(text).entries) == MAX_KEYS
    with pytest.raises(ConfigError, match=f"holds {MAX_KEYS + 1} keys"):
        KeyRing.parse(text + table("more"))


def test_a_new_key() -> None:
    key, text = make_entry("alice@example.org")
    assert len(key) > 40
    assert key not in text
    assert KeyRing.parse(text + make_entry("bob")[1]).tenant(bearer(key)).name == "alice@example.org"
    assert tomllib.loads(text)["key"] == [{"name": "alice@example.org", "sha256": sha(key)}]
    assert make_entry("alice")[0] != make_entry("alice")[0]
    for name in ("", "a b", "x" * 65, 'a"\n'):
        with pytest.raises(ConfigError, match="name="):
            make_entry(name)


# ── what tenants share ────────────────────────────────────────────────────────────────────────────


def test_no_two_pairs_of_salts_meet() -> None:
    """All pairs of short texts over the characters that could be taken for one another."""
    texts = ["".join(text) for length in range(4) for text in itertools.product("1:a", repeat=length)]
    pairs = list(itertools.product(texts, repeat=2))
    assert len({combined_salt(*pair) for pair in pairs}) == len(pairs)


def test_only_nobodys_blocks_without_a_salt_are_everybodys() -> None:
    assert combined_salt("", "") == ""
    assert FACTS.namespace(ANYBODY, "").tenant_salt == ""


def test_tenants_with_equal_prompts_have_no_key_in_common() -> None:
    prompt = list(range(64))
    asked = [
        (Tenant(name, salt), own) for name, salt in (("alice", "alice"), ("bob", "bob")) for own in ("", "alice", "bob")
    ]
    asked += [(ANYBODY, own) for own in ("", "alice", "5:alice:", "bob")]
    keys = [key for tenant, own in asked for key in split(chain(FACTS.namespace(tenant, own), prompt, 16))]
    assert len(set(keys)) == len(keys) == 4 * len(asked)


def test_tenants_of_one_salt_share_because_the_file_says_so() -> None:
    left, right = Tenant("alice", "team"), Tenant("bob", "team")
    assert FACTS.namespace(left, "") == FACTS.namespace(right, "")
    assert FACTS.namespace(left, "x") != FACTS.namespace(right, "")

"""API keys: who may ask, as which tenant, and what keeps tenants' KV blocks apart.

A file of keys is TOML, one table a key, and holds no key, only digests:

    [[key]]
    name = "alice"              # of the tenant, in traces
    sha256 = "64 hex digits"    # of the key
    salt = "alice"              # default: the name; tenants of one salt share KV blocks
    models = ["small"]          # default: every model of the gateway
    max_priority = 0            # the most urgent priority that it may ask for; smaller goes first
    disabled = false
    requests_per_minute = 60    # quotas, see quotas.py; default: none
    prompt_tokens_per_minute = 100000
    answer_tokens_per_minute = 20000
    max_running = 8             # answers at once
    weight = 1.0                # of the tenant's prompts where they wait with those of others
    trainer = false             # may pause models and change their weights

Keys must be long and random, as `make_entry` makes them: a digest of one can be known to everybody.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import ConfigError, Unauthorized
from kvmesh.services.gateway.quotas import FIELDS as QUOTA_FIELDS
from kvmesh.services.gateway.quotas import MAX_LIMIT, NO_QUOTA, KeyQuota

MAX_KEYS = 4096  # every one of them is compared at every call
MAX_SALT_CHARS = 256
PREFIX = "sk-kvmesh-"
_RANDOM_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAME_RULE = "must be 1 to 64 of A-Z a-z 0-9 . _ @ - and begin with a letter or digit"
_FIELD = re.compile(r"[a-z0-9_]{1,24}")  # no key is one
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TYPES: Mapping[str, type] = {
    "name": str,
    "sha256": str,
    "salt": str,
    "models": list,
    "disabled": bool,
    "max_priority": int,
    **dict.fromkeys(QUOTA_FIELDS, int),
    "weight": float,
    "trainer": bool,
}


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is. `models`: those it may use; None: all. `max_priority`: the most urgent (smallest) priority
    that it may ask for; None: the gateway's. `weight`: of its prompts where those of several tenants wait."""

    name: str = ""
    salt: str = ""
    models: frozenset[str] | None = None
    max_priority: int | None = None
    quota: KeyQuota = NO_QUOTA
    weight: float = 1.0
    trainer: bool = False  # may pause models and change their weights

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


DEFAULT_MAX_PRIORITY = 0
"""The most urgent priority of a key that says nothing else: it may yield to others, and not go before them."""
PRIORITY_BOUND = 2**31 - 1
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0

ANYBODY = Tenant()
"""Everybody, where a gateway has no API keys."""


@dataclass(frozen=True)
class KeyEntry:
    """One key of the file; `digest` is the SHA-256 of the key."""

    tenant: Tenant
    digest: bytes
    disabled: bool = False

    def matches(self, digest: bytes) -> bool:
        """Takes as long whether it does or not."""
        return hmac.compare_digest(self.digest, digest)


class KeyRing:
    """All keys of one file, at one moment."""

    def __init__(self, entries: Sequence[KeyEntry]) -> None:
        self.entries = tuple(entries)

    @classmethod
    def parse(cls, text: str) -> KeyRing:
        """Read a file's text. ConfigError names the entry and the field; never a digest that may be a key."""
        try:
            found = tomllib.loads(text)
        except tomllib.TOMLDecodeError as err:
            raise ConfigError(f"api_keys: not TOML ({_place(err)})", field="api_keys") from None
        tables = found.get("key", [])
        if found.keys() - {"key"} or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            raise ConfigError("api_keys: must hold [[key]] tables and nothing else", field="api_keys")
        if not 1 <= len(tables) <= MAX_KEYS:
            raise ConfigError(f"api_keys: holds {len(tables)} keys; 1 to {MAX_KEYS} are allowed", field="api_keys")
        entries = [_entry(number, table) for number, table in enumerate(tables, 1)]
        for what, values in (
            ("name", [entry.tenant.name for entry in entries]),
            ("sha256", [entry.digest.hex() for entry in entries]),
        ):
            if len(set(values)) < len(values):
                twice = next(index for index, value in enumerate(values) if value in values[:index])
                shown = f" ({entries[twice].tenant.name!r})"
                raise ConfigError(f"api_keys: key {twice + 1}{shown}: {what} is used twice", field="api_keys")
        return cls(entries)

    def tenant(self, authorization: bytes | None) -> Tenant:
        """Who presents this Authorization header. Unauthorized, never with the key in it.

        Every entry is compared, so that time does not tell which one was met, nor whether any."""
        if authorization is None:
            raise Unauthorized("no API key: send it in an Authorization header, as in 'Authorization: Bearer KEY'")
        scheme, _, key = authorization.strip().partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found: KeyEntry | None = None
        for entry in self.entries:
            if entry.matches(digest):
                found = entry
        if scheme.lower() != b"bearer":
            raise Unauthorized("the Authorization header holds no API key: it must read 'Bearer KEY'")
        if found is None or found.disabled or not key.strip():
            raise Unauthorized("incorrect API key")
        return found.tenant


def _entry(number: int, table: dict[str, Any]) -> KeyEntry:
    name = table.get("name")
    tells = isinstance(name, str) and _NAME.fullmatch(name) and not name.startswith(PREFIX)
    shown = f"key {number}" + (f" ({name!r})" if tells else "")

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"api_keys: {shown}: {why}", field="api_keys")

    for field, value in table.items():
        if field not in _TYPES:
            raise refuse(f"unknown field {field!r}" if _FIELD.fullmatch(field) else "unknown field")
        if type(value) is not _TYPES[field] and not (field == "weight" and type(value) is int):
            raise refuse(f"{field} must be {_words(_TYPES[field])}")
    for field in ("name", "sha256"):
        if field not in table:
            raise refuse(f"{field} is missing")
    if not _NAME.fullmatch(table["name"]):
        raise refuse(f"name {_NAME_RULE}")
    if table["name"].startswith(PREFIX):
        raise refuse("name must not be a key: it stands in traces")
    if not _DIGEST.fullmatch(table["sha256"].lower()):
        raise refuse("sha256 must be the 64 hex digits of the key's SHA-256, not the key")
    salt = table.get("salt", table["name"])
    if not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise refuse(f"salt has {len(salt)} characters; 1 to {MAX_SALT_CHARS} are allowed")
    models = table.get("models")
    if models is not None and (not models or not all(isinstance(model, str) and model for model in models)):
        raise refuse("models must name models; without it all are allowed")
    priority = table.get("max_priority", DEFAULT_MAX_PRIORITY)
    if not -PRIORITY_BOUND <= priority <= PRIORITY_BOUND:
        raise refuse(f"max_priority must be between {-PRIORITY_BOUND} and {PRIORITY_BOUND}")
    for field in QUOTA_FIELDS:
        if not 1 <= table.get(field, 1) <= MAX_LIMIT:
            raise refuse(f"{field}={table[field]}: must be 1 to {MAX_LIMIT}; without it there is no limit")
    weight = float(table.get("weight", 1.0))
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise refuse(f"weight={weight:g}: must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    quota = KeyQuota(**{field: table[field] for field in QUOTA_FIELDS if field in table})
    allowed = None if models is None else frozenset(models)
    tenant = Tenant(table["name"], salt, allowed, priority, quota, weight, table.get("trainer", False))
    return KeyEntry(tenant, bytes.fromhex(table["sha256"]), table.get("disabled", False))


def _words(kind: type) -> str:
    words: Mapping[type, str] = {
        str: "text", list: "a list of names", bool: "true or false", int: "a whole number", float: "a number",
    }  # fmt: skip
    return words[kind]


def _place(err: tomllib.TOMLDecodeError) -> str:
    """Where the file is broken, without the text that stands there."""
    found = re.search(r"at (line \d+, column \d+|end of document)", str(err))
    return found.group(1) if found else "its syntax is wrong"


def combined_salt(tenant_salt: str, cache_salt: str) -> str:
    """The salt of the key namespace for a request's own salt within its tenant's: no two pairs give the same text.

    "" only where there is neither: blocks that everybody may share."""
    if not tenant_salt and not cache_salt:
        return ""
    return f"{len(tenant_salt)}:{tenant_salt}:{cache_salt}"


def make_entry(name: str, *, random: Callable[[int], str] = secrets.token_urlsafe) -> tuple[str, str]:
    """(a new key, its table for the file of keys). The key is nowhere else. ConfigError: no name for a tenant."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name={name[:80]!r}: {_NAME_RULE}", field="name")
    key = PREFIX + random(_RANDOM_BYTES)
    # JSON's strings are TOML's, too.
    text = f"[[key]]\nname = {json.dumps(name)}\nsha256 = {json.dumps(hashlib.sha256(key.encode()).hexdigest())}\n"
    return key, text

"""What a prefill engine tells a decode engine of a prompt whose KV it keeps, by way of whoever routes the requests:
vLLM's `kv_transfer_params`. Pure.

    first request   do_remote_decode   ─▶ prefill keeps the pages; its answer has `RemotePrefill.params()`
    second request  the same params    ─▶ decode reads them by `RemotePrefill.of()`, and `why_not` says what differs

Whoever may send requests to a decode engine may say anything here, so all of it is bounded and checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.rpc.addresses import check_addresses

TICKET_BYTES = 16
MAX_RANKS = 1024
MAX_TOKENS = 1 << 31
MAX_TEXT = 512  # of an id, a name or an address

_HEX = re.compile(r"[0-9a-f]{32,64}")


@dataclass(frozen=True, slots=True)
class PushRank:
    """Is one rank that holds pages: the address of its control port, and the name of its transfer engine."""

    address: str
    engine: str


@dataclass(frozen=True, slots=True)
class PageSharing:
    """Says what two engines must have in common so that rank i of one can push pages to rank i of the other."""

    block_tokens: int
    layout: str  # shapes, strides, attention backend and instruction set, hashed
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """Says where the KV of a prompt's first `tokens` tokens is kept. `digest` is a hash of all that this KV follows
    from, weights and tokens included."""

    engine_id: str
    request_id: str
    ticket: str
    tokens: int
    digest: str
    block_tokens: int
    layout: str
    ranks: tuple[PushRank, ...]

    def params(self) -> dict[str, Any]:
        """Returns the parameters for the request that decodes; routers pass them on as they are."""
        host, _, port = self.ranks[0].address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": host,
            "remote_port": int(port),
            "remote_num_tokens": self.tokens,
            "tp_size": len(self.ranks),
            "remote_block_size": self.block_tokens,
            "remote_ticket": self.ticket,
            "remote_digest": self.digest,
            "remote_layout": self.layout,
            "remote_ranks": [[rank.address, rank.engine] for rank in self.ranks],
        }

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> RemotePrefill:
        """Reads parameters of a request. Raises InvalidRequest naming the field that is missing or malformed."""
        ranks = params.get("remote_ranks")
        if not isinstance(ranks, list) or not 1 <= len(ranks) <= MAX_RANKS:
            raise _refuse("remote_ranks", ranks, f"must be a list of 1 to {MAX_RANKS} pairs")
        return cls(
            engine_id=_text(params, "remote_engine_id"),
            request_id=_text(params, "remote_request_id"),
            ticket=_hex(params, "remote_ticket", TICKET_BYTES),
            tokens=_count(params, "remote_num_tokens"),
            digest=_hex(params, "remote_digest", 32),
            block_tokens=_count(params, "remote_block_size"),
            layout=_text(params, "remote_layout"),
            ranks=tuple(map(_rank, ranks)),
        )

    def why_not(self, own: PageSharing) -> str:
        """Returns what keeps these pages from being taken by an engine whose pages are `own`; "" when nothing does."""
        if len(self.ranks) != own.ranks:
            return f"tp_size={len(self.ranks)} there and {own.ranks} here: rank i pushes to rank i alone"
        if self.block_tokens != own.block_tokens:
            return f"block size {self.block_tokens} there and {own.block_tokens} here"
        if self.layout != own.layout:
            return "the pages have another layout there (shapes, strides, attention backend or instruction set)"
        return ""


def _rank(pair: object) -> PushRank:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise _refuse("remote_ranks", pair, "must be an address and an engine")
    found = {"remote_ranks": pair[0]}
    address = _text(found, "remote_ranks")
    try:
        check_addresses(address, "remote_ranks")
    except ConfigError as error:
        raise InvalidRequest(error.message, field="remote_ranks") from None
    if "," in address:
        raise _refuse("remote_ranks", address, "must be one address")
    return PushRank(address, _text({"remote_ranks": pair[1]}, "remote_ranks"))


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise _refuse(name, value, f"must be a text of 1 to {MAX_TEXT} characters")
    return value


def _hex(params: Mapping[str, Any], name: str, nbytes: int) -> str:
    value = params.get(name)
    if not isinstance(value, str) or len(value) != 2 * nbytes or not _HEX.fullmatch(value):
        raise _refuse(name, value, f"must be {nbytes} bytes in hex")
    return value


def _count(params: Mapping[str, Any], name: str) -> int:
    value = params.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_TOKENS:
        raise _refuse(name, value, f"must be a number in 1..{MAX_TOKENS}")
    return value


def _refuse(name: str, value: object, why: str) -> InvalidRequest:
    return InvalidRequest(f"kv_transfer_params.{name}={str(value)[:80]!r}: {why}", field=name)

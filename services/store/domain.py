"""This module has the events and actions of the store master's brain, and the bounds on what a member may say.

Records are plain classes where they are compared or kept; a member's report on its memory stays the message that it
came in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvmesh.clock import CaughtUp, Tick
from kvmesh.errors import InvalidRequest, KvmeshError
from kvmesh.kvcache.announce import MAX_KEYS, Announcement
from kvmesh.kvcache.block_map import Verdict
from kvmesh.kvcache.tiers import MARK, split_name
from kvmesh.rpc.pb.store_pb2 import StoreUsage


class NodeRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    POOL = "pool"  # memory without a model


@dataclass(frozen=True)
class RegisteredNode:
    """Is one incarnation of one instance, as it introduced itself."""

    instance_id: str
    address: str
    incarnation: int
    role: NodeRole
    node_id: str
    store_id: str


class Change(Enum):
    JOINED = "joined"
    LEFT = "left"  # it announced its end
    DIED = "died"  # lease ran out, or a new incarnation took its name


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class NodeJoined:
    """An incarnation begins. `removed_seq` is the last tombstone that this node, in any incarnation, has applied;
    `lasting_seq` the last one that its next incarnation will have applied, if that is another one."""

    member: RegisteredNode
    removed_seq: int = 0
    lasting_seq: int | None = None


@dataclass(frozen=True)
class Beat:
    instance_id: str
    incarnation: int
    usage: StoreUsage | None = None
    removed_seq: int = 0
    pace: int = 0  # the number of the pulse that the member goes by (see kvmesh/pacing.py); 0: unknown
    by_door: bool = False  # it came by the fast path, not by gRPC


@dataclass(frozen=True)
class NodeLeft:
    instance_id: str
    incarnation: int


@dataclass(frozen=True)
class Announce:
    announcement: Announcement


Event = NodeJoined | Beat | NodeLeft | Announce | CaughtUp | Tick


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Publish:
    """Tells every watcher of a change of membership. Publish and Relay share one `seq`, from 1 without gaps. The blocks
    of an incarnation that ended are gone with this event; nothing else is published about them."""

    seq: int
    change: Change
    member: RegisteredNode


@dataclass(frozen=True)
class Relay:
    """Tells every watcher of an announcement that was applied. The announcement has the store's own id and seq."""

    seq: int
    announcement: Announcement


@dataclass(frozen=True)
class Heard:
    """Is the answer to an Announce. `seq` is the last announcement of that store which is included now; `cut` counts
    keys that were too many for one store and are not in the map; `shed` counts replicas that were left out for want of
    memory."""

    verdict: Verdict
    want_snapshot: bool
    seq: int
    cut: int = 0
    shed: int = 0


@dataclass(frozen=True)
class RefuseCall:
    """The answer to the event is this error."""

    error: KvmeshError


Action = Publish | Relay | Heard | RefuseCall


# ── what a member may say: bounds on every field, and the error that names the one which is wrong ─────

MAX_TEXT = 256
# Parts of one snapshot: far more than the largest store needs. Without a bound, empty parts could follow for ever.
MAX_PARTS = 4096


def check_member(who: RegisteredNode) -> InvalidRequest | None:
    """Returns what is wrong with an introduction; None if nothing is."""
    texts = {
        "member.instance.instance_id": who.instance_id,
        "member.instance.address": who.address,
        "member.node_id": who.node_id,
        "member.store_id": who.store_id,
    }
    for field, text in texts.items():
        if len(text) > MAX_TEXT:
            return InvalidRequest.of(field, text, f"is longer than {MAX_TEXT} characters")
        if not text.isprintable():
            return InvalidRequest.of(field, text, "holds characters that cannot be printed")
    for field in ("member.instance.instance_id", "member.store_id"):
        if MARK in texts[field]:
            return InvalidRequest.of(field, texts[field], f"must not hold {MARK!r}: it sets off the tiers of a store")
    if not who.instance_id:
        return InvalidRequest.of("member.instance.instance_id", who.instance_id, "must not be empty")
    if not _is_address(who.address):
        return InvalidRequest.of("member.instance.address", who.address, "must be host:port")
    if who.incarnation == 0:
        return InvalidRequest.of("member.instance.incarnation", 0, "must be new at every process start, never 0")
    if who.store_id != who.instance_id:
        return InvalidRequest.of("member.store_id", who.store_id, f"must be the instance_id ({who.instance_id!r})")
    return None


def check_rank_host(name: str, address: str, incarnation: int, *texts: str) -> None:
    """Raises InvalidRequest for what a rank host cannot say of itself; `texts` are further words of it."""
    for field, text in (
        ("host.instance.instance_id", name),
        ("host.instance.address", address),
        *(("host", one) for one in texts),
    ):
        if len(text) > MAX_TEXT or not text.isprintable():
            raise InvalidRequest.of(
                field, text[:MAX_TEXT], f"must have at most {MAX_TEXT} characters that can be printed"
            )
    if not name:
        raise InvalidRequest.of("host.instance.instance_id", name, "must not be empty")
    if not _is_address(address):
        raise InvalidRequest.of("host.instance.address", address, "must be host:port")
    if incarnation == 0:
        raise InvalidRequest.of("host.instance.incarnation", 0, "must be new at every process start, never 0")


def check_announcement(said: Announcement) -> InvalidRequest | None:
    """Returns what is wrong with an announcement, whoever sent it; None if nothing is. Its `store_id` is the name of a
    tier."""
    store_id, _ = split_name(said.store_id)
    if not store_id or len(store_id) > MAX_TEXT:
        return InvalidRequest.of("announcement.store_id", store_id, f"must have 1 to {MAX_TEXT} characters")
    if said.incarnation == 0:
        return InvalidRequest.of("announcement.incarnation", 0, "must be that of the member, never 0")
    for field, keys in (("sealed", said.sealed), ("removed", said.removed)):
        if len(keys) > MAX_KEYS:
            return InvalidRequest.of(f"announcement.{field}", len(keys), f"one announcement holds {MAX_KEYS} keys")
    if said.groups and (len(said.groups) != len(said.sealed) or 0 in said.groups):
        return InvalidRequest.of("announcement.groups", len(said.groups), "must have a mask over 0 for each sealed key")
    if said.snapshot:
        if said.removed:
            return InvalidRequest.of("announcement.removed", len(said.removed), "a snapshot removes nothing")
        if said.seq == 0:
            return InvalidRequest.of("announcement.seq", 0, "a snapshot has a number of its own")
        if said.part >= MAX_PARTS:
            return InvalidRequest.of("announcement.part", said.part, f"a snapshot has at most {MAX_PARTS} parts")
    elif said.part or said.more:
        field, value = ("part", said.part) if said.part else ("more", said.more)
        return InvalidRequest.of(f"announcement.{field}", value, "only snapshots come in parts")
    elif said.seq == 0 and (said.sealed or said.removed):
        return InvalidRequest.of("announcement.seq", 0, "batches are numbered from 1")
    return None


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536

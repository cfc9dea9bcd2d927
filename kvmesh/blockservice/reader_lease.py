"""A lease as its reader sees it: asked for, renewed while bytes move, given back.

The reader counts a lease from before its request, less 10 %: by that count the lease is over before it is over at the
holder. That count only says when to renew and when to give up. What was read counts when the holder has confirmed, as
the lease is given back, that it was open until then (docs/adr/0032-seals-are-confirmed.md), or when its checksum is
right: a reader whose clocks have all stood still cannot know.

A reader of a model that has several cache groups names the groups it wants of each key, and believes of the answer only
what each rank says group by group: a holder of an older version, or of blocks that an older version wrote, knows of no
groups, and what it has under the same keys is something else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.blockservice.peers import Life, Peer, PeerPool, worth_forgetting
from kvmesh.blockservice.shard_wire import from_wire
from kvmesh.clock import lease_clock_ns
from kvmesh.errors import KvmeshError, TransferError, UnknownInstance
from kvmesh.kvcache.groups import GroupPlan, plan_group
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.rpc.pb import blocks_pb2 as pb

log = logging.getLogger(__name__)

RELEASE_S = 1.0
RELEASE_AFTER_S = 0.005
RELEASED = 1024  # leases in one call
MIN_RENEW_S = 0.005
UNCONFIRMED = "the lease ran out: its holder has not confirmed that it was open until the last byte was here"


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a reader asks for every time. `ranks` is how many shards of a block it reads; `shards` is how it cuts
    blocks, () when it takes no other cut than its own. `groups` is how it cuts the objects of each cache group, where a
    model has several; `layout` is the text of their family then."""

    reader: str
    lease_ms: int
    layout: str
    ranks: int = 1
    shards: tuple[ShardLayout, ...] = ()
    checksums: bool = False
    groups: Mapping[int, tuple[ShardLayout, ...]] = field(default_factory=dict)
    traceparent: str = ""  # of a trace that is kept: the holder's spans belong to it


@dataclass(frozen=True, slots=True)
class LeasedPart:
    """The leased objects of one cache group: `held[i]` is the position of the i-th one's key among those asked for, and
    `offsets[w][i]` where it begins in the segment of rank `ranks[w]` of the holder, which cuts it as
    `plan.writers[w]`."""

    held: tuple[int, ...]
    ranks: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    plan: GroupPlan


@dataclass(eq=False, slots=True)
class ReaderLease:
    """A lease that a reader has. `held` are positions among the keys asked for. `offsets[rank][i]` is the offset of the
    i-th of them in `segments[rank]`; `sizes` and `checksums` (when asked for) have one entry for each. `tiers` says
    where each key asked for was found, one byte each. `removed_seq` is the last removal that the holder had applied by
    then. `over` means given back, or over as the holder said, whatever the reader's count. Of a lease of objects of
    several cache groups `parts` has each group, and `offsets` is empty."""

    peer: Peer
    lease_id: int
    until_ns: int
    held: tuple[int, ...] = ()
    offsets: tuple[tuple[int, ...], ...] = ()
    segments: tuple[str, ...] = ()
    sizes: Sequence[int] = ()
    checksums: Sequence[int] = ()
    tiers: bytes = b""
    plan: GroupPlan | None = None  # where the holder cuts blocks otherwise: which of its bytes go where
    removed_seq: int = 0
    over: bool = False
    parts: Mapping[int, LeasedPart] = field(default_factory=dict)

    def holds_at(self, when_ns: int) -> bool:
        """Whether what was read until then counts, by the reader's own clock."""
        return not self.over and when_ns <= self.until_ns


class Releases:
    """Gives leases back. Those whose readers wait for the answer (`confirm`) go at once, together with whatever else is
    due at that node; while such a call is under way others gather for the next one. The rest are given back together a
    moment later: a lease that is not given back ends by itself. It belongs to the event loop; its owner must `close`
    it."""

    def __init__(self, peers: PeerPool) -> None:
        self._peers = peers
        self._due: dict[str, list[int]] = {}  # address → lease ids
        self._asked: dict[tuple[str, int], asyncio.Future[bool]] = {}  # by address and lease: whether it was open
        self._calling: set[str] = set()  # addresses with a call under way
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def give_back(self, lease: ReaderLease) -> None:
        """Gives a lease back, under which nothing can land any more. It returns at once."""
        if lease.over:
            return
        lease.over = True
        self._due.setdefault(lease.peer.address, []).append(lease.lease_id)
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(RELEASE_AFTER_S, self._send)

    async def confirm(self, lease: ReaderLease) -> bool:
        """Gives a lease back and returns whether the holder confirms that it was open until now, so that what was read
        under it is right. It takes at most RELEASE_S, or about twice that where many wait. A holder that does not
        answer has not confirmed."""
        if lease.over or self._closed:
            return False
        address = lease.peer.address
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[address, lease.lease_id] = answer
        lease.over = True
        self._due.setdefault(address, []).append(lease.lease_id)
        if address not in self._calling:
            self._send_to(address)
        return await answer

    def _send(self) -> None:
        self._timer = None
        for address in list(self._due):
            self._send_to(address)

    def _send_to(self, address: str) -> None:
        if not (ids := self._due.pop(address, [])):
            return
        if rest := ids[RELEASED:]:
            self._due[address] = rest
        self._calling.add(address)
        task = asyncio.get_running_loop().create_task(self._call(address, ids[:RELEASED]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, address: str, ids: list[int]) -> None:
        held = b""
        try:
            async with self._peers.use(address) as peer:
                request = pb.ReleaseBlocksRequest(lease_id=ids[0], also=ids[1:])
                try:
                    held = (await peer.call("ReleaseLease", request, RELEASE_S)).held
                except KvmeshError as error:
                    log.debug("release at %s: %s", address, error.message)
                    if worth_forgetting(error):
                        self._peers.forget(peer)
        finally:
            for at, lease_id in enumerate(ids):
                asked = self._asked.pop((address, lease_id), None)
                if asked is not None and not asked.done():
                    asked.set_result(len(held) == len(ids) and held[at] == 1)
            self._calling.discard(address)
            if not self._closed:
                self._send_to(address)

    async def close(self) -> None:
        """Sends what is due and ends, within RELEASE_S."""
        if self._timer is not None:
            self._timer.cancel()
            self._send()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=RELEASE_S)
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(False)


async def ask(
    terms: LeaseTerms,
    life: Life,
    keys: Sequence[bytes],
    peer: Peer,
    peers: PeerPool,
    releases: Releases,
    timeout_s: float,
    masks: bytes = b"",
) -> ReaderLease | None:
    """Returns a lease on those of `keys` that this incarnation of a holder has, with its segments open here; None if
    it holds none of them. `masks` says which objects of each key are wanted, of a model of several cache groups. Raises
    KvmeshError when the holder does not answer, TransferError when its answer is malformed."""
    known = peer.segments.get(life)
    asked_ns = lease_clock_ns()
    request = pb.LeaseRequest(
        reader=terms.reader,
        holder_incarnation=life[1],
        keys=b"".join(keys),
        lease_ms=terms.lease_ms,
        layout=terms.layout,
        any_cut=bool(terms.shards),
        want_descriptors=known is None,
        want_checksums=terms.checksums,
        groups=masks,
        traceparent=terms.traceparent,
    )
    answer: pb.LeaseResponse = await peer.call("Lease", request, timeout_s)
    if not answer.lease_id:
        return None
    lease = ReaderLease(peer, answer.lease_id, _until(asked_ns, answer.lease_ms))
    if masks and not answer.held_groups:
        releases.give_back(lease)
        return None
    try:
        if masks:
            lease.parts = _parts(answer, terms, masks)
            lease.held = tuple(i for i, mask in enumerate(answer.held_groups) if mask)
        else:
            lease.plan = _plan(answer, terms)
            lease.held = tuple(i for i, here in enumerate(answer.held) if here)
            ranks = terms.ranks if lease.plan is None else len(lease.plan.writers)
            _check(answer, terms, len(keys), len(lease.held), ranks)
        # Another request may have opened the segments while this one was under way.
        descriptors = [rank.segment_descriptor for rank in answer.ranks]
        lease.segments = peer.segments.get(life) or peers.learn(peer, life, descriptors)
        if [rank.segment for rank in answer.ranks] != list(lease.segments):
            raise TransferError(f"{life[0]} names segments that its descriptors do not")
    except TransferError:
        releases.give_back(lease)
        raise
    if not masks:
        lease.offsets = tuple(tuple(rank.offset) for rank in answer.ranks)
    lease.sizes, lease.tiers, lease.removed_seq = tuple(answer.nbytes), answer.tiers, answer.removed_seq
    lease.checksums = tuple(answer.ranks[0].checksum) if terms.checksums and not masks else ()
    return lease


async def wait_open(
    lease: ReaderLease, final: asyncio.Future[Any], lease_ms: int, deadline: float, *stops: asyncio.Future[Any]
) -> bool:
    """Waits until `final` is done, and renews the lease at half its time. Returns False if `final` is not done and
    what comes now is of no use, because the lease is over, `deadline` (monotonic s) has passed, or one of `stops` is
    done."""
    waits = {final, *stops}
    left_s = max(deadline - time.monotonic(), 0)
    done, _ = await asyncio.wait(waits, timeout=min(_half_s(lease), left_s), return_when=asyncio.FIRST_COMPLETED)
    if done or time.monotonic() >= deadline:
        return final.done()
    renewing = asyncio.ensure_future(_keep_alive(lease, lease_ms))
    try:
        left_s = max(deadline - time.monotonic(), 0)
        await asyncio.wait({*waits, renewing}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        renewing.cancel()
    return final.done()


async def _keep_alive(lease: ReaderLease, lease_ms: int) -> None:
    """Renews the lease now and then at half its time; returns when the lease is over."""
    try:
        while True:
            if not await _renewed(lease, lease_ms):
                return
            await asyncio.sleep(_half_s(lease))
    except Exception:
        log.exception("renewing a lease at %s", lease.peer.address)


async def _renewed(lease: ReaderLease, lease_ms: int) -> bool:
    """Renews the lease; returns False if it is over. A holder that does not answer is asked again as long as there is
    time."""
    asked_ns = lease_clock_ns()
    if asked_ns >= lease.until_ns:
        return False
    request = pb.RenewBlocksRequest(lease_id=lease.lease_id, lease_ms=lease_ms)
    try:
        answer = await lease.peer.call("RenewLease", request, (lease.until_ns - asked_ns) * 1e-9)
    except KvmeshError as error:
        lease.over = isinstance(error, UnknownInstance)
        return not lease.over
    lease.until_ns = max(lease.until_ns, _until(asked_ns, answer.lease_ms))
    return True


def _half_s(lease: ReaderLease) -> float:
    return max((lease.until_ns - lease_clock_ns()) * 1e-9 / 2, MIN_RENEW_S)


def _until(asked_ns: int, lease_ms: int) -> int:
    return asked_ns + lease_ms * 900_000


def _plan(answer: pb.LeaseResponse, terms: LeaseTerms) -> GroupPlan | None:
    """Returns how the holder's shards become this reader's; None if both cut blocks alike. Raises TransferError if that
    cannot be done."""
    if not terms.shards or not all(rank.HasField("layout") for rank in answer.ranks):
        return None
    try:
        cuts = from_wire([rank.layout for rank in answer.ranks], "ranks.layout")
        return plan_group(cuts, terms.shards) if cuts and cuts != terms.shards else None
    except KvmeshError as error:
        raise TransferError(error.message) from None


def _parts(answer: pb.LeaseResponse, terms: LeaseTerms, masks: bytes) -> dict[int, LeasedPart]:
    """Returns what is leased of each cache group, and how it becomes this reader's. Raises TransferError when the
    answer does not fit the request, or cannot be read into this reader's cut."""
    held = answer.held_groups
    if len(held) != len(masks) or any(mask & ~asked for mask, asked in zip(held, masks, strict=True)) or not any(held):
        raise TransferError(f"a lease of objects that speaks of {len(held)} keys, or of what was not asked for")
    if [rank.rank for rank in answer.ranks] != list(range(len(answer.ranks))):
        raise TransferError("a lease whose ranks are not in order")
    told: dict[int, list[tuple[int, pb.LeasedGroup]]] = {}
    for rank in answer.ranks:
        for group in rank.groups:
            told.setdefault(group.group, []).append((rank.rank, group))
    parts: dict[int, LeasedPart] = {}
    for number, shards in terms.groups.items():
        positions = tuple(at for at, mask in enumerate(held) if mask >> number & 1)
        mine = told.pop(number, [])
        if not positions and not mine:
            continue
        ranks = tuple(rank for rank, _ in mine)
        if not positions or not mine or len(set(ranks)) < len(ranks):
            raise TransferError(f"a lease whose ranks do not agree on what they hold of group {number}")
        if any(len(group.offset) != len(positions) for _, group in mine):
            raise TransferError(f"a lease whose offsets do not match its objects of group {number}")
        if terms.checksums and any(len(group.checksum) != len(positions) for _, group in mine):
            raise TransferError("a lease without the checksums that were asked for")
        try:
            # Cuts of another group, or of other shapes, are refused here: no plan joins two groups.
            plan = plan_group(from_wire([group.layout for _, group in mine], "ranks.groups.layout"), shards)
        except KvmeshError as error:
            raise TransferError(error.message) from None
        parts[number] = LeasedPart(positions, ranks, tuple(tuple(group.offset) for _, group in mine), plan)
    if told or any(mask >> g & 1 for g in range(8) if g not in parts for mask in held):
        raise TransferError(f"a lease of groups that were not asked for: {sorted(told)}")
    return parts


def _check(answer: pb.LeaseResponse, terms: LeaseTerms, keys: int, held: int, ranks: int) -> None:
    """Raises TransferError when the holder's answer does not fit the request."""
    if len(answer.held) != keys or not held:
        raise TransferError(f"a lease that speaks of {len(answer.held)} keys ({held} held), not of {keys}")
    if [rank.rank for rank in answer.ranks] != list(range(ranks)):
        raise TransferError(f"blocks of {len(answer.ranks)} ranks, not of {ranks}")
    if any(len(rank.offset) != held for rank in answer.ranks):
        raise TransferError("a lease whose offsets do not match its blocks")
    if terms.layout == BYTES and (len(answer.nbytes) != held or not all(answer.nbytes)):
        raise TransferError("a lease of blocks whose sizes are not told")
    if terms.checksums and any(len(rank.checksum) != held for rank in answer.ranks):
        raise TransferError("a lease without the checksums that were asked for")

"""A lease as its reader sees it: asked for, kept alive while bytes move, given back.

It is counted from before the request, less 10 %: by that count it is over before it is over at the holder. That count
only says when to renew and when to give up. What was read counts when the holder has confirmed, as the lease is given
back, that it was open until then (docs/adr/0032-seals-are-confirmed.md): a reader whose clocks have all stood still
cannot know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from kvmesh.blockservice.peers import Peer, Peers
from kvmesh.blockservice.shard_wire import from_wire
from kvmesh.clock import lease_clock_ns
from kvmesh.errors import KvmeshError, TransferError, UnknownInstance
from kvmesh.kvcache.groups import GroupPlan, plan_group
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.sources import PullRange
from kvmesh.ranks import protocol as m
from kvmesh.rpc import status
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

NS = 1_000_000_000
RELEASE_S = 1.0
MIN_RENEW_S = 0.005
UNCONFIRMED = "the lease ran out: its holder has not confirmed that it was open until the last byte was here"


@dataclass(eq=False)
class ReaderLease:
    """`held`: positions among the keys asked for; `offsets[rank][i]` of the i-th of them in `segments[rank]`.
    `removed_seq`: what the holder had removed by then. `over`: the holder said so, whatever our count. `confirmed`: the
    holder said, as it was given back, that it was open until then."""

    peer: Peer
    lease_id: int
    until_ns: int
    granted_s: float
    held: tuple[int, ...] = ()
    offsets: tuple[tuple[int, ...], ...] = ()
    segments: tuple[str, ...] = ()
    plan: GroupPlan | None = None  # the holder cuts blocks otherwise: what of its shards goes where in ours
    removed_seq: int = 0
    over: bool = False
    confirmed: bool = False


@dataclass(frozen=True)
class LeaseTerms:
    """What a reader asks for every time."""

    reader: str
    lease_ms: int
    layout: str
    ranks: int
    shards: tuple[ShardLayout, ...] = ()  # of the reader; (): it takes no other cut than its own


async def ask(
    terms: LeaseTerms, source: PullRange, keys: Sequence[bytes], peer: Peer, peers: Peers, timeout_s: float
) -> ReaderLease | None:
    """A lease on what `source` holds of `keys`, its segments open at our ranks; None: it holds none of them.
    Raises AioRpcError; TransferError when the answer makes no sense."""
    life = (source.instance_id, source.incarnation)
    known = peer.segments.get(life)
    asked_ns = lease_clock_ns()
    request = pb.LeaseRequest(
        reader=terms.reader,
        holder_incarnation=source.incarnation,
        keys=b"".join(keys),
        lease_ms=terms.lease_ms,
        layout=terms.layout,
        any_cut=bool(terms.shards),
        want_descriptors=known is None,
    )
    answer = await peer.stub.Lease(request, timeout=timeout_s)
    if not answer.lease_id:
        return None
    lease = ReaderLease(peer, answer.lease_id, _until(asked_ns, answer.lease_ms), answer.lease_ms / 1000)
    try:
        lease.plan = _plan(answer, terms)
        _check(answer, len(keys), terms.ranks if lease.plan is None else len(lease.plan.writers))
        lease.segments = peer.segments.get(life) or peers.learn(
            peer, life, [r.segment_descriptor for r in answer.ranks]
        )
        if [r.segment for r in answer.ranks] != list(lease.segments):
            raise TransferError(f"{source.instance_id} names segments that its descriptors do not")
    except TransferError:
        await give_back(lease, peers)
        raise
    lease.held = tuple(i for i, here in enumerate(answer.held) if here)
    lease.removed_seq = answer.removed_seq
    lease.offsets = tuple(tuple(rank.offset) for rank in answer.ranks)
    return lease


async def keep_alive(lease: ReaderLease, lease_ms: int) -> None:
    """Renew at half its time, again and again; returns when it is over. Raises nothing but CancelledError."""
    while True:
        left_s = (lease.until_ns - lease_clock_ns()) / NS
        await asyncio.sleep(max(min(lease.granted_s, left_s) / 2, MIN_RENEW_S))
        asked_ns = lease_clock_ns()
        if asked_ns >= lease.until_ns:
            return
        request = pb.RenewBlocksRequest(lease_id=lease.lease_id, lease_ms=lease_ms)
        try:
            answer = await lease.peer.stub.RenewLease(request, timeout=(lease.until_ns - asked_ns) / NS)
        except grpc.aio.AioRpcError as error:
            if isinstance(status.from_rpc_error(error), UnknownInstance):
                lease.over = True
                return
            continue  # tried again as long as there is time
        except Exception:
            log.exception("renewing a lease at %s", lease.peer.address)
            return
        lease.granted_s = answer.lease_ms / 1000
        lease.until_ns = max(lease.until_ns, _until(asked_ns, answer.lease_ms))


async def give_back(lease: ReaderLease, peers: Peers) -> None:
    """The reader is done: nothing it reads can land any more. Sets `confirmed`, within RELEASE_S; a holder that does
    not answer, or does not say, has not confirmed. A lease that is not given back ends by itself."""
    if lease.over:
        return
    async with peers.use(lease.peer.address) as peer:
        try:
            request = pb.ReleaseBlocksRequest(lease_id=lease.lease_id)
            answer = await peer.stub.ReleaseLease(request, timeout=RELEASE_S)
            lease.confirmed = answer.held == b"\1"
        except grpc.aio.AioRpcError as error:
            log.debug("release at %s: %s", peer.address, error.details())
            peers.forget(peer)


def judge(lease: ReaderLease, ended: Sequence[m.PullEnded | None]) -> tuple[set[int], str]:
    """(what counts of what the lease held, why not all): every rank has it, and the holder has confirmed the lease."""
    whole, cause = set(range(len(lease.held))), ""
    for said in ended:
        if said is None:
            return set(), "the rank that read is gone"
        if said.arrived and not lease.confirmed:
            names.NODE_PULL_LAPSED.inc()
            return set(), UNCONFIRMED
        whole &= set(said.arrived)
        cause = cause or said.cause
    return whole, cause


def partly(held: int, wanted: int) -> str:
    """Why not all came, where the holder had not all."""
    return "" if held == wanted else f"holds {held} of {wanted}"


def _plan(answer: pb.LeaseResponse, terms: LeaseTerms) -> GroupPlan | None:
    """How the holder's shards become ours; None: they are cut alike. TransferError: they cannot."""
    if not terms.shards or not all(rank.HasField("layout") for rank in answer.ranks):
        return None
    try:
        cuts = from_wire([rank.layout for rank in answer.ranks], "ranks.layout")
        return plan_group(cuts, terms.shards) if cuts and cuts != terms.shards else None
    except KvmeshError as error:
        raise TransferError(error.message) from None


def _until(asked_ns: int, lease_ms: int) -> int:
    return asked_ns + lease_ms * 900_000


def _check(answer: pb.LeaseResponse, keys: int, ranks: int) -> None:
    """Raises TransferError when the holder's answer makes no sense."""
    held = sum(1 for here in answer.held if here)
    if len(answer.held) != keys or not held:
        raise TransferError(f"a lease that speaks of {len(answer.held)} keys ({held} held), not of {keys}")
    if [rank.rank for rank in answer.ranks] != list(range(ranks)):
        raise TransferError(f"blocks of {len(answer.ranks)} ranks, not of {ranks}")
    if any(len(rank.offset) != held for rank in answer.ranks):
        raise TransferError("a lease whose offsets do not match its blocks")

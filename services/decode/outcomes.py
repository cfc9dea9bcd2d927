"""How a request went, for the conductor: what came of its predictions, and who is to blame when it failed. Pure.

Nobody is to blame when the client left, when there was no room or no time, or when the request was no good. A failure
is the prefill instance's when its handoff brought it, and this instance's otherwise.
"""

from __future__ import annotations

from kvmesh.errors import (
    DeadlinePassed,
    HandoffLost,
    InvalidRequest,
    KvmeshError,
    ModelNotFound,
    Overloaded,
    RequestCancelled,
)
from kvmesh.rpc.pb import conductor_pb2 as pb
from services.decode.events import Reason
from services.decode.handoff import Handoff

_NOBODYS = (Overloaded, DeadlinePassed, InvalidRequest, ModelNotFound)


def judge(error: KvmeshError, *, by_writer: bool, prefill: str, own: str) -> tuple[pb.Outcome.ValueType, str]:
    """What kind of end `error` is, and the instance to blame ("": nobody). `by_writer`: prefill brought it, or the way
    to it."""
    if isinstance(error, RequestCancelled):
        return pb.OUTCOME_CANCELLED, ""
    if isinstance(error, _NOBODYS):
        return pb.OUTCOME_REFUSED, ""
    return pb.OUTCOME_FAILED, prefill if by_writer or isinstance(error, HandoffLost) else own


def outcome_of(h: Handoff, end: Reason | KvmeshError, attempt: int, prefill: str, own: str) -> pb.RequestOutcome:
    """Of a request that was admitted and has ended. `prefill`, `own`: instance ids."""
    times, gaps = h.times, h.times.gaps
    told = pb.RequestOutcome(
        request_id=h.spec.request_id,
        attempt=attempt,
        outcome=pb.OUTCOME_DONE,
        output_tokens=h.made,
        ttft_us=_us(times.first - times.received) if times.first else 0,
        tbt_us=_us(gaps.slowest_ns),
        mean_tbt_us=_us(gaps.mean_ns),
        duration_us=_us(times.ended - times.received),
    )
    if isinstance(end, KvmeshError):
        by_writer = times.writer_lost > 0
        told.outcome, told.blamed = judge(end, by_writer=by_writer, prefill=prefill, own=own)
        told.error = end.code
    return told


def refusal_of(request_id: str, attempt: int, error: KvmeshError) -> pb.RequestOutcome:
    """Of a request that was not admitted."""
    kind = pb.OUTCOME_CANCELLED if isinstance(error, RequestCancelled) else pb.OUTCOME_REFUSED
    return pb.RequestOutcome(request_id=request_id, attempt=attempt, outcome=kind, error=error.code)


def _us(ns: float) -> int:
    return max(0, round(ns / 1000))

"""Which endpoints a proxy shall try, and in which order. Pure: loads, choices and draws are arguments.

An endpoint is `ip:port`. The list that a proxy gets begins with the choice; it tries the others, in order, where the
first ones fail.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from kvmesh.errors import ModelNotFound, Unavailable

CROWD = 1.25  # a session's own endpoint may have so many times the mean load, and one request more
_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class PickableEngine:
    """An engine that is not kvmesh's own, as the conductor knows it. `load_s` orders endpoints: seconds that a request
    would wait there."""

    instance_id: str
    address: str
    model: str
    ready: bool
    load_s: float = 0.0
    requests: int = 0  # placed there, not over


@dataclass(frozen=True, slots=True)
class PickableGateway:
    """A kvmesh gateway. `requests` are those that this picker has sent there and that are not over."""

    address: str
    ready: bool
    requests: int = 0


def within(addresses: Iterable[str], subset: Collection[str] | None) -> list[str]:
    """Returns those addresses that may be picked. `subset` is what the proxy allows; None: everything."""
    return [one for one in addresses if subset is None or one in subset]


def engines_by_load(
    engines: Sequence[PickableEngine], subset: Collection[str] | None, sent: Mapping[str, int], turn: int
) -> list[PickableEngine]:
    """Orders the engines that may be picked, the least loaded first. `sent` counts requests by address that this picker
    sent there without a placement; `turn` is a number that grows, which deals equal ones out in turn."""
    able = [one for one in engines if one.ready and (subset is None or one.address in subset)]
    if not able:
        return []
    able.sort(key=lambda one: one.address)
    first = turn % len(able)
    dealt = able[first:] + able[:first]
    return sorted(dealt, key=lambda one: (one.requests + sent.get(one.address, 0), one.load_s))


def gateways_in_order(
    gateways: Sequence[PickableGateway], subset: Collection[str] | None, session: str, turn: int
) -> list[str]:
    """Orders the gateways that may be picked. Requests of one session go to one gateway (rendezvous hashing: another
    gateway's coming or going moves few sessions) while it has no more than its share of requests; others go to the
    least loaded one."""
    able = sorted((one for one in gateways if one.ready), key=lambda one: one.address)
    able = [one for one in able if subset is None or one.address in subset]
    if not able:
        return []
    if session:
        most = CROWD * sum(one.requests for one in able) / len(able) + 1
        able.sort(key=lambda one: xxhash.xxh3_64_intdigest(f"{session}\0{one.address}".encode()), reverse=True)
        able.sort(key=lambda one: one.requests > most)  # stable: those that are full go behind
        return [one.address for one in able]
    first = turn % len(able)
    return [one.address for one in sorted(able[first:] + able[:first], key=lambda one: one.requests)]


def with_fallbacks(choice: str, others: Iterable[str], fallbacks: int) -> tuple[str, ...]:
    """Returns the choice and up to so many further endpoints, each once."""
    found = dict.fromkeys((choice, *others))
    return tuple(found)[: 1 + fallbacks]


def none_left(
    model: str, known: Collection[str], endpoints: int, ready: int, subset: Collection[str] | None
) -> ModelNotFound | Unavailable:
    """Returns the error of a request that no endpoint can have. `known` are the models that engines serve, `endpoints`
    and `ready` how many there are for it, whatever the proxy allows."""
    if model and known and not endpoints:
        shown = ", ".join(sorted(known)[:20])
        return ModelNotFound(f"model={model[:200]!r}: no endpoint serves it; served: {shown}", field="model")
    if subset is not None and not subset:
        why = "the proxy's subset of endpoints is empty"
    elif subset is not None and ready:
        why = f"none of the {len(subset)} endpoints that the proxy allows is ready and known here"
    elif endpoints:
        why = f"none of {endpoints} endpoints is ready"
    else:
        why = "no endpoint is known"
    return Unavailable(why, retry_after_ms=_RETRY_MS)

"""What the instances of a model that decode have, as gathering (`balance.gather`) looks at it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvmesh.membership.places import instance_of
from kvmesh.services.conductor.balance.gather import DecodeHolding
from kvmesh.services.conductor.fleet.instance import Instance


def holdings(instances: Sequence[Instance]) -> list[DecodeHolding]:
    """Returns what those that decode have, each with all its data-parallel places."""
    of: dict[str, list[Instance]] = {}
    for instance in instances:
        if instance.role.decodes:
            of.setdefault(instance_of(instance.ref.instance_id), []).append(instance)
    return [_holding(name, places) for name, places in of.items()]


def _holding(name: str, places: Sequence[Instance]) -> DecodeHolding:
    first = places[0]
    return DecodeHolding(
        name,
        rows=sum(place.batch.requests for place in places),
        context_tokens=sum(place.batch.context_tokens for place in places),
        room_tokens=sum(place.load.free_pages * place.model.block_tokens for place in places),
        max_rows=sum(place.max_running or math.inf for place in places),
        prefills=first.role.prefills,
        left_s=max(place.batch.residence_s for place in places),
        step_s=first.decode.predict,
        places=len(places),
    )


def prefill_s(instances: Sequence[Instance]) -> Callable[[float], float]:
    """Returns how long it takes to compute so many tokens at the first of those that prefill."""
    for instance in instances:
        if instance.role.prefills:
            return lambda tokens: instance.prefill.predict(tokens, 0)
    return lambda tokens: math.inf

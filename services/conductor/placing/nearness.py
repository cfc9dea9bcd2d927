"""What it costs at each instance not to be near a request's session and origin: terms of the score (see
affinity.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.score import COUNTED_TOKENS


class NearInstances:
    """The instances that are near, by id, with what that is worth in seconds (at least 0)."""

    __slots__ = ("_at", "most_s")

    def __init__(self, at: Mapping[str, float] | None = None) -> None:
        self._at = at or {}
        self.most_s = max(self._at.values(), default=0.0)  # of the nearest

    @property
    def near(self) -> Collection[str]:
        """The ids of the near instances."""
        return self._at.keys()

    def far_s(self, instance_id: str) -> float:
        """Returns what it costs, in seconds, not to be at the nearest instance: 0 there, `most_s` where nothing is
        known."""
        return self.most_s - self._at.get(instance_id, 0.0) if self._at else 0.0


NOTHING = NearInstances()


@dataclass(frozen=True, slots=True)
class Nearness:
    """The affinity terms of one request, for each half of a placement. Costs are never negative; those of decode are
    for one token, as is the TBT that they are added to."""

    session_prefill: NearInstances = NOTHING
    session_decode: NearInstances = NOTHING
    origin: NearInstances = NOTHING

    def of(self, prefill: Instance, decode: Instance) -> float:
        """Returns the cost added to a whole placement."""
        return self.prefill_s(prefill.ref.instance_id) + COUNTED_TOKENS * self.decode_s(decode.ref.instance_id)

    def prefill_s(self, instance_id: str) -> float:
        """Returns the cost added to computing the prompt there."""
        return self.session_prefill.far_s(instance_id)

    def decode_s(self, instance_id: str) -> float:
        """Returns the cost added to the score of decoding there."""
        return self.session_decode.far_s(instance_id) + self.origin.far_s(instance_id)


NOWHERE = Nearness()

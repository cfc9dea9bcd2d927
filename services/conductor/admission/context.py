"""Among whom a request was weighed: what admission needs to know of that when it refuses. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.conductor.placing.decodes import DecodeChoice
from services.conductor.placing.kinds import Found, Kind
from services.conductor.placing.prefills import PrefillChoice
from services.conductor.screening.columns import Chosen


@dataclass(slots=True)
class AdmissionContext:
    """Instances: all that are `serving` the model of the request, those that are `usable` now, and which of these may
    be its `prefills` and its `decodes`. `others_rate`: see `Others.rate`."""

    found: Found
    serving: Chosen
    usable: Chosen
    prefills: Chosen
    decodes: Chosen
    others_rate: float

    @property
    def unable(self) -> Chosen:
        """Instances of the model that get no work now."""
        return Chosen(self.serving.view, self.serving.mask & ~self.usable.mask)

    def prompts(self) -> Iterator[PrefillChoice]:
        """Every way to compute the prompt that was weighed."""
        yield from (o.choice.prefill for o in self.found.options if o.kind is not Kind.PAIR and o.choice is not None)
        if self.found.pair is not None:
            yield from (option for c in self.found.pair.prefills for option in c.options)

    def answers(self) -> Iterator[DecodeChoice]:
        """Every instance that was weighed for the answer."""
        yield from (o.choice.decode for o in self.found.options if o.kind is not Kind.PAIR and o.choice is not None)
        if self.found.pair is not None:
            yield from self.found.pair.decodes

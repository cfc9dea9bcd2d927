"""The instances among which a request was weighed, and what one more such request would take of them: what admission
needs to know for a refusal. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvmesh.services.conductor.admission.turns import PoolWork
from kvmesh.services.conductor.candidates.selection import Selection
from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.placing.decodes import DecodeChoice
from kvmesh.services.conductor.placing.placement import ServingMode, WeighedModes
from kvmesh.services.conductor.placing.prefills import PrefillChoice


@dataclass(slots=True)
class AdmissionContext:
    """The instances that a request was weighed among: all that are `serving` its model, those that are `usable` now,
    and which of these may be its `prefills` and its `decodes`. `others_rate` is `OtherConductors.rate`."""

    found: WeighedModes
    serving: Selection
    usable: Selection
    prefills: Selection
    decodes: Selection
    others_rate: float

    @property
    def unable(self) -> Selection:
        """Instances of the model that get no work now."""
        return Selection(self.serving.view, self.serving.mask & ~self.usable.mask)

    def prompts(self) -> Iterator[PrefillChoice]:
        """Yields every way to compute the prompt that was weighed."""
        yield from (
            o.choice.prefill for o in self.found.options if o.kind is not ServingMode.PAIR and o.choice is not None
        )
        if self.found.pair is not None:
            yield from (option for c in self.found.pair.prefills for option in c.options)

    def answers(self) -> Iterator[DecodeChoice]:
        """Yields every instance that was weighed for decoding."""
        yield from (
            o.choice.decode for o in self.found.options if o.kind is not ServingMode.PAIR and o.choice is not None
        )
        if self.found.pair is not None:
            yield from self.found.pair.decodes

    def pool_work(self, request: Schedule, answer_tokens: float) -> PoolWork:
        """Returns what such a request takes of the pools, from which the distance of turns follows. `answer_tokens` is
        the predicted length. Instances that were not weighed count as equal to those that were."""
        prompts_s: dict[str, float] = {}
        for way in self.prompts():
            name, seconds = way.instance.ref.instance_id, way.prefill_s / way.instance.queue.speedup
            prompts_s[name] = min(seconds, prompts_s.get(name, seconds))
        if not prompts_s and self.prefills:  # refused before any was weighed
            one = self.prefills.first
            prompts_s[""] = one.prefill.predict(request.prompt_tokens, 0) / one.queue.speedup
        # Such requests that each could take a second: prompts one after the other, answers in the rows there are now.
        prompts = [1 / max(seconds, 1e-9) for seconds in prompts_s.values()]
        answering = {c.instance.ref.instance_id: c for c in self.answers()}
        answers = [c.instance.batch.requests / max(answer_tokens * c.tbt_s, 1e-9) for c in answering.values()]
        return PoolWork(_each_s(prompts, len(self.prefills)), _each_s(answers, len(self.decodes)))


def _each_s(rates: list[float], instances: int) -> float:
    """Returns the mean seconds between requests of `instances` instances, of which some have these rates (per second);
    0 when no rate is known."""
    rate = sum(rates) * max(1.0, instances / len(rates)) if rates else 0.0
    return 1 / rate if rate > 0 else 0.0

"""Algorithm 1: what a request would cost at each prefill instance, with the prefix that is there or with the longest
that could be fetched. Pure: instances are only read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.conductor.domain import Fetch, Schedule
from services.conductor.index import Place
from services.conductor.instance import Instance
from services.conductor.routes import Leg, Mesh


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """One way for one prefill instance to serve the request, and the terms of its TTFT in seconds."""

    instance: Instance
    local_blocks: int  # leading prompt blocks that are there or coming
    cached_tokens: int  # of the prompt, fetched ones included
    computed_tokens: int
    queue_s: float
    pull_s: float
    prefill_s: float
    tail_s: float
    admission_prefill_s: float
    legs: tuple[Leg, ...] = ()
    fetched_to: int = 0  # the block that `legs` end before
    pull_bytes: int = 0
    ahead_bytes: int = 0  # what the holders have to send before

    @property
    def start_s(self) -> float:
        """Until it computes: the pull goes on while others are served."""
        return max(self.queue_s, self.pull_s)

    @property
    def ttft_s(self) -> float:
        """Predicted, without waiting for room at decode."""
        return self.start_s + self.prefill_s + self.tail_s

    @property
    def admission_ttft_s(self) -> float:
        """The TTFT by which work may be refused (see cost.FittedModel.admission_s)."""
        return self.start_s + self.admission_prefill_s + self.tail_s

    @property
    def pulled_blocks(self) -> int:
        """Blocks to fetch."""
        return sum(leg.blocks for leg in self.legs)


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """One instance and its ways: with what it has, and with what it could fetch if that is worth weighing; `rule` says
    whether fetching is weighed against computing or done."""

    use: PrefillChoice
    fetch: PrefillChoice | None
    rule: Fetch = Fetch.CHEAPER

    @property
    def options(self) -> tuple[PrefillChoice, ...]:
        """One or two."""
        if self.fetch is None:
            return (self.use,)
        return (self.fetch,) if self.rule is Fetch.ALWAYS else (self.use, self.fetch)

    def best(self, slo_s: float) -> PrefillChoice | None:
        """The faster option among those that may meet the SLO."""
        return min((o for o in self.options if o.admission_ttft_s <= slo_s), key=lambda o: o.ttft_s, default=None)

    @property
    def instance(self) -> Instance:
        """Whose they are."""
        return self.use.instance


def candidate(
    request: Schedule,
    instance: Instance,
    place: Place,
    mesh: Mesh,
    at_decode: int,
    threshold: float,
    now: float,
    rule: Fetch = Fetch.CHEAPER,
) -> PrefillCandidate:
    """`place`: the instance's blocks in the survey; `at_decode`: leading blocks that nobody need send to decode."""
    local = mesh.survey.depth(place)
    # The last token is always computed: its logits are the answer's first token.
    usable = (request.prompt_tokens - 1) // instance.model.block_tokens
    use = _choice(request, instance, local, min(local, usable), at_decode, now)
    reach = min(mesh.reach(place, local), usable)
    if rule is Fetch.NEVER or not _worth_weighing(reach, local, threshold):
        return PrefillCandidate(use, None)
    legs, end = mesh.plan(place, instance.node_id, local, reach)
    if not legs or not _worth_weighing(end, local, threshold):
        return PrefillCandidate(use, None)
    return PrefillCandidate(use, _choice(request, instance, local, end, at_decode, now, mesh, legs), rule)


def _worth_weighing(best: int, local: int, threshold: float) -> bool:
    return best > local and best > threshold * local


def _choice(
    request: Schedule,
    instance: Instance,
    local: int,
    cached_blocks: int,
    at_decode: int,
    now: float,
    mesh: Mesh | None = None,
    legs: tuple[Leg, ...] = (),
) -> PrefillChoice:
    model = instance.model
    cached = cached_blocks * model.block_tokens
    computed = request.prompt_tokens - cached
    prefill_s = instance.prefill.predict(computed, cached)
    block_bytes = model.block_tokens * model.kv_bytes_per_token
    pull_bytes = block_bytes * sum(leg.blocks for leg in legs)
    ahead = mesh.ahead(legs) if mesh is not None else 0
    holders = len({leg.holder.ref.life for leg in legs})
    # What decode fetches itself (see `placement._decode_pulls`) is not sent either.
    spared = cached_blocks if legs and local <= at_decode < cached_blocks else at_decode
    pushed = max(0, request.prompt_tokens - spared * model.block_tokens) * model.kv_bytes_per_token
    return PrefillChoice(
        instance,
        local,
        cached,
        computed,
        queue_s=instance.queue.wait_s(now),
        pull_s=instance.pull.seconds(pull_bytes + ahead, holders, now) if legs else 0.0,
        prefill_s=prefill_s,
        tail_s=instance.transfer.tail_s(pushed, prefill_s),
        admission_prefill_s=instance.prefill.admission_s(computed, cached, now),
        legs=legs,
        fetched_to=cached_blocks if legs else 0,
        pull_bytes=pull_bytes,
        ahead_bytes=ahead,
    )


def soonest(candidates: Sequence[PrefillCandidate], slo_s: float) -> tuple[PrefillChoice, float, float]:
    """Of candidates that all miss the SLO: the nearest option; the waiting that would make some option meet it (inf:
    none would); and for how long waiting helps the nearest one. Only queues drain, not pulls or computation."""
    options = [option for c in candidates for option in c.options]
    best = min(options, key=lambda o: o.admission_ttft_s)
    waits = [excess_s for o in options if (excess_s := o.admission_ttft_s - slo_s) <= max(0.0, o.queue_s - o.pull_s)]
    return best, min(waits, default=float("inf")), max(0.0, best.queue_s - best.pull_s)

"""Why recent requests went where they went. Recording keeps raw numbers; words are made when somebody asks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.kvcache.tiers import Tier
from services.conductor.domain import Placed, PrefillSample, Ref, Refuse, RequestOutcome, Role, Schedule
from services.conductor.fleet.instance import Instance
from services.conductor.placing.decodes import DecodeChoice
from services.conductor.placing.kinds import HANDOFF_S, Found, Kind, Option, answer_s
from services.conductor.placing.nearness import Near, Worth
from services.conductor.placing.placement import Weighed
from services.conductor.placing.prefills import PrefillCandidate

# All records together: a record of a mesh of a thousand instances is long.
MAX_CANDIDATES = 131_072

# ttft = max(queue, pull and load) + prefill + transfer tail + landing wait (at the decode instance that was chosen).
# A holder loads before it sends, the instance's own tiers load beside that.
PREFILL_TERMS = (
    "queue_ms",
    "pull_ms",
    "load_ms",
    "prefill_ms",
    "transfer_tail_ms",
    "landing_wait_ms",
    "ttft_ms",
    "ttft_other_way_ms",
    "session_ms",
)
# cost = ttft + stall + answer + handoff + far (see kinds.py)
KIND_TERMS = ("ttft_ms", "rows", "stall_ms", "answer_ms", "handoff_ms", "tbt_ms", "rows_tbt_ms", "far_ms")
# session, origin: what it costs not to be where the request's last ones are (see affinity.py)
DECODE_TERMS = ("tbt_ms", "landing_wait_ms", "slot_wait_ms", "transfer_tail_ms", "session_ms", "origin_ms")


class Candidate(NamedTuple):
    """One instance that was weighed for one role, or could not be (`why`). Seconds."""

    ref: Ref
    role: Role  # PREFILL or DECODE
    why: str
    score_s: float = 0.0
    admission_s: float = 0.0  # what is compared with the SLO
    terms: tuple[float, ...] = ()
    local_blocks: int = 0
    pulled_blocks: int = 0
    loaded_blocks: int = 0
    tier: Tier = Tier.DRAM

    def named_terms(self) -> dict[str, float]:
        """Milliseconds by name; what does not apply is left out."""
        names = PREFILL_TERMS if self.role is Role.PREFILL else DECODE_TERMS
        return {name: s * 1000 for name, s in zip(names, self.terms, strict=False) if s >= 0}


class WeighedKind(NamedTuple):
    """One kind of placement on certain instances, or why it could not be. Seconds."""

    kind: Kind
    prefill: Ref
    decode: Ref
    why: str
    cost_s: float = 0.0
    terms: tuple[float, ...] = ()

    def named_terms(self) -> dict[str, float]:
        """By name: `rows`, the others in milliseconds."""
        told = dict(zip(KIND_TERMS, self.terms, strict=False))
        return {name: value if name == "rows" else value * 1000 for name, value in told.items()}


@dataclass(slots=True)
class Decision:
    """One answered Schedule, and what prefill reported of it later."""

    request_id: str
    attempt: int
    model: str
    prompt_tokens: int
    prompt_blocks: int
    best_prefix_blocks: int
    at: float
    ttft_slo_s: float
    tbt_slo_s: float
    candidates: tuple[Candidate, ...]
    outcome: str  # "placed" or the refusal's reason
    message: str = ""
    placed: Placed | None = None
    sample: PrefillSample | None = field(default=None)
    ended: RequestOutcome | None = field(default=None)
    kinds: tuple[WeighedKind, ...] = ()
    screened: int = 0  # instances that could not have been the best, or get no work, of whom nothing else is told

    def is_chosen(self, candidate: Candidate) -> bool:
        """Whether the request went there, as a pair."""
        if self.placed is None or self.placed.prefill == self.placed.decode:
            return False
        return candidate.ref == (self.placed.prefill if candidate.role is Role.PREFILL else self.placed.decode)

    def is_chosen_kind(self, kind: WeighedKind) -> bool:
        """Whether the request became that."""
        return self.placed is not None and (self.placed.prefill, self.placed.decode) == (kind.prefill, kind.decode)

    def kind_verdict(self, kind: WeighedKind) -> str:
        """In words, why it was chosen or not."""
        if kind.why:
            return kind.why
        chosen = next((k for k in self.kinds if self.is_chosen_kind(k)), None)
        if chosen is None:
            return "would do"
        more_ms = (kind.cost_s - chosen.cost_s) * 1000
        if chosen is kind:
            return "chosen"
        return f"costs {more_ms:.1f} ms more" if more_ms >= 0.05 else "as good: busier, avoided or by chance"

    def verdict(self, candidate: Candidate) -> str:
        """In words, why it was chosen or not."""
        if candidate.why:
            return candidate.why
        if self.is_chosen(candidate):
            return "chosen"
        slo_s = self.ttft_slo_s if candidate.role is Role.PREFILL else self.tbt_slo_s
        if candidate.admission_s > slo_s:
            return "over the SLO"
        chosen = next((c for c in self.candidates if c.role is candidate.role and self.is_chosen(c)), None)
        if chosen is None:
            halves = {ref for k in self.kinds if k.kind is Kind.PAIR for ref in (k.prefill, k.decode)}
            lost = self.placed is not None and candidate.ref in halves
            return "of the best pair, which costs more" if lost else "would do"
        slower_ms = (candidate.score_s - chosen.score_s) * 1000
        return f"slower by {slower_ms:.1f} ms" if slower_ms >= 0.05 else "as good: busier, without room or by chance"


class Explanations:
    """The last decisions, by request; the least recently decided or asked for goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._candidates = 0

    def __len__(self) -> int:
        return len(self._decisions)

    def get(self, request_id: str) -> Decision | None:
        """The last decision on it; None: unknown or forgotten."""
        if request_id in self._decisions:
            self._decisions.move_to_end(request_id)
        return self._decisions.get(request_id)

    def keep(self, decision: Decision) -> None:
        """It replaces the one of an earlier attempt."""
        old = self._decisions.pop(decision.request_id, None)
        self._candidates += len(decision.candidates) - (len(old.candidates) if old else 0)
        self._decisions[decision.request_id] = decision
        while len(self._decisions) > self._limit or (self._candidates > MAX_CANDIDATES and len(self._decisions) > 1):
            _, gone = self._decisions.popitem(last=False)
            self._candidates -= len(gone.candidates)

    def report(self, ref: Ref, sample: PrefillSample) -> None:
        """What the instance that was chosen found and took."""
        decision = self._decisions.get(sample.request_id)
        if decision is not None and decision.placed is not None and decision.placed.prefill == ref:
            decision.sample = sample

    def ended(self, outcome: RequestOutcome) -> None:
        """How it went, seen from decode."""
        decision = self._decisions.get(outcome.request_id)
        if decision is not None and decision.placed is not None and decision.attempt == outcome.attempt:
            decision.ended = outcome


def decided(
    request: Schedule,
    answer: Placed | Refuse,
    candidates: tuple[Candidate, ...],
    *,
    kinds: tuple[WeighedKind, ...] = (),
    serving: int = 0,
    best_prefix: int,
    ttft_slo_s: float,
    tbt_slo_s: float,
    now: float,
) -> Decision:
    """The record of one answer. `serving`: how many instances of the model there are."""
    told = {c.ref.instance_id for c in candidates} | {k.decode.instance_id for k in kinds if k.kind is not Kind.PAIR}
    placed = answer if isinstance(answer, Placed) else None
    return Decision(
        request.request_id,
        request.attempt,
        request.model,
        request.prompt_tokens,
        len(request.keys),
        best_prefix,
        now,
        ttft_slo_s,
        tbt_slo_s,
        candidates,
        "placed" if isinstance(answer, Placed) else answer.reason,
        "" if isinstance(answer, Placed) else str(answer.error),
        placed,
        kinds=kinds,
        screened=max(0, serving - len(told)),
    )


def kinds_of(found: Found | None, max_tokens: int) -> tuple[WeighedKind, ...]:
    """All that the request could have become; `found`: None when nothing could be weighed."""
    return tuple(_kind(option, max_tokens) for option in found.options) if found is not None else ()


def _kind(option: Option, max_tokens: int) -> WeighedKind:
    why = option.why_not or (f"over the {option.refused.reason.upper()} SLO" if option.refused is not None else "")
    refs = option.prefill.ref, option.decode.ref
    if (choice := option.choice) is None:
        return WeighedKind(option.kind, *refs, why)
    shared = choice.prefill.shared
    terms = (
        choice.ttft_s,
        float(shared.rows),
        shared.stall_s,
        answer_s(choice, max_tokens),
        HANDOFF_S if option.kind is Kind.PAIR else 0.0,
        choice.decode.tbt_s,
        shared.rows_tbt_s,
        *((option.far_s,) if option.far_s else ()),
    )
    return WeighedKind(option.kind, *refs, why, option.cost_s, terms)


def candidates_of(
    request: Schedule, serving: Sequence[Instance], why: Mapping[str, str], found: Found | None, slo_s: float
) -> tuple[Candidate, ...]:
    """Whoever was weighed, and those `serving` instances that were not, in every role that they have in a pair.
    `found`: None when nobody could be weighed."""
    pair = found.pair if found is not None else None
    known = list(_weighed(pair, slo_s)) if pair is not None else []
    if not serving:
        return tuple(known)
    done = {(c.ref, c.role) for c in known}
    if found is not None:  # those tell more
        done |= {(o.prefill.ref, role) for o in found.options if o.kind is not Kind.PAIR for role in Role}
    for i in serving:
        for role, has_role, fits in (
            (Role.PREFILL, i.role.prefills, i.can_prefill(request.prompt_tokens)),
            (Role.DECODE, i.role.decodes, i.can_decode(request.prompt_tokens)),
        ):
            if has_role and (i.ref, role) not in done:
                known.append(Candidate(i.ref, role, _why_unweighed(request, i, why[i.ref.instance_id], fits)))
    return tuple(known)


def _why_unweighed(request: Schedule, instance: Instance, reason: str, fits: bool) -> str:
    if reason:
        return f"not ready: {reason}"
    if not fits:
        return "the prompt does not fit"
    return "avoided" if instance.ref.instance_id in request.avoid else "not weighed"


def _weighed(found: Weighed, ttft_slo_s: float) -> Iterable[Candidate]:
    landing_wait_s = found.decode.landing_wait_s if found.decode is not None else 0.0
    for p in found.prefills:
        yield _prefill(p, ttft_slo_s - landing_wait_s, landing_wait_s, found.near)
    for d in found.decodes:
        yield _decode(d, found.near)


def _prefill(candidate: PrefillCandidate, slo_s: float, landing_wait_s: float, near: Near) -> Candidate:
    best = candidate.best(slo_s) or min(candidate.options, key=lambda o: o.admission_ttft_s)
    other = -1.0
    if candidate.fetches:
        others = [o for o in candidate.options if o is not best and (best is candidate.use or o is candidate.use)]
        other = min([o.ttft_s for o in others]) + landing_wait_s if others else -1.0
    pulled = best.pulled_blocks
    pull_s = best.pull_s if pulled else -1.0
    load_s = best.load_s or -1.0
    ttft_s = best.ttft_s + landing_wait_s
    name = best.instance.ref.instance_id
    far_s = _far(near.session_prefill, name)
    return Candidate(
        best.instance.ref,
        Role.PREFILL,
        "",
        ttft_s + near.prefill_s(name),
        best.admission_ttft_s + landing_wait_s,
        (best.queue_s, pull_s, load_s, best.prefill_s, best.tail_s, landing_wait_s, ttft_s, other, far_s),
        best.local_blocks,
        pulled,
        best.loaded_blocks,
        best.tier,
    )


def _decode(d: DecodeChoice, near: Near) -> Candidate:
    name = d.instance.ref.instance_id
    far = _far(near.session_decode, name), _far(near.origin, name)
    terms = (d.tbt_s, d.landing_wait_s, d.slot_wait_s, d.tail_s, *far)
    score_s = d.score_s + near.decode_s(name)
    return Candidate(d.instance.ref, Role.DECODE, "", score_s, d.admission_tbt_s, terms, d.at_decode)


def _far(worth: Worth, instance_id: str) -> float:
    return worth.far_s(instance_id) if worth.most_s else -1.0

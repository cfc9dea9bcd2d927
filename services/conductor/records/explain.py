"""Why recent requests were placed where they were. The numbers that decided are recorded as the choice itself had them
(ties.py), and are put into words when somebody asks. No verdict is computed again from other numbers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor.costs.accuracy import Spread
from kvmesh.services.conductor.domain import (
    InstanceAxes,
    Placed,
    PrefillSample,
    Ref,
    Refuse,
    RequestOutcome,
    Role,
    Schedule,
)
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.placing.decodes import DecodeChoice
from kvmesh.services.conductor.placing.nearness import NearInstances, Nearness
from kvmesh.services.conductor.placing.placement import (
    HANDOFF_S,
    Option,
    PlacementAndWeighed,
    PlacementChoice,
    ServingMode,
    WeighedModes,
)
from kvmesh.services.conductor.placing.prefills import PrefillCandidate, PrefillChoice
from kvmesh.services.conductor.placing.scoring_context import ScoringContext
from kvmesh.services.conductor.placing.ties import ComparedNumbers, Comparison, Crowd
from kvmesh.services.conductor.score import STALL_WEIGHT, answer_s

# All records together: a record of a mesh of a thousand instances is long.
MAX_CANDIDATES = 131_072
AVOIDED = "avoided: an earlier attempt failed there"
_REFUSED = "the best, and refused all the same"
# What stands against one of two whose scores were as good, part by part of what they were compared by then (see
# `crowd` in queues.py and placement.py).
_THERE = "more requests there ({} against {})"
_PROMPTS, _TOKENS = (f"was given more lately ({{}} against {{}} {what})" for what in ("s of prompts", "tokens"))
CROWDS = {Role.PREFILL: (_THERE, _PROMPTS), Role.DECODE: (_THERE, _TOKENS)}
KIND_CROWD = (_THERE, _PROMPTS, _TOKENS)

# ttft = max(queue, pull and load) + prefill + transfer tail + landing wait (at the decode instance that was chosen).
# A holder loads before it sends, the instance's own tiers load beside that.
# score = ttft - landing wait (which is the same for all) + stall + line + session + lately
# lately: what it is handicapped by, since it was given more work lately than another that is hardly worse (ties.py)
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
    "stall_ms",
    "line_ms",
    "lately_ms",
)
# cost = ttft + stall + line + answer + handoff + far + room (see placement.py)
# room: what an engine is handicapped by that would drop blocks, since another one has room (ties.py)
KIND_TERMS = (
    "ttft_ms",
    "rows",
    "stall_ms",
    "answer_ms",
    "handoff_ms",
    "tbt_ms",
    "rows_tbt_ms",
    "far_ms",
    "line_ms",
    "room_ms",
)
# score = all of them. session, origin: what it costs not to be where the request's last ones are (see affinity.py).
DECODE_TERMS = (
    "tbt_ms",
    "landing_wait_ms",
    "slot_wait_ms",
    "transfer_tail_ms",
    "session_ms",
    "origin_ms",
    "page_wait_ms",
    "lately_ms",
)


class SloMiss(NamedTuple):
    """Which SLO a placement would have missed, by the figures that were compared, in seconds."""

    what: str
    predicted_s: float
    slo_s: float

    def __str__(self) -> str:
        ms, most_ms = self.predicted_s * 1000, self.slo_s * 1000
        digits = 1 if abs(ms - most_ms) >= 0.1 else 4
        return f"over the {self.what}: {ms:,.{digits}f} ms, at most {most_ms:,.{digits}f}"


class Winner(NamedTuple):
    """What was chosen among several candidates, and by which numbers. `crowd` is None when no other score was
    as good."""

    refs: tuple[Ref, ...]
    score_s: float
    near_s: float  # a score up to this was as good
    crowd: Crowd | None = None
    short: bool = False  # of room for the whole answer, as all were

    def over(self, score_s: float, crowd: Crowd | None, more: str, parts: Sequence[str]) -> str:
        """Returns in words why it won over a candidate with these numbers. `more` is the text for a greater score, with
        a place for it; `parts` are the texts for the part of a crowd that is greater, with places for both."""
        if crowd is None or self.crowd is None:
            return more.format(_figure((score_s - self.score_s) * 1000))
        mine, its = (c if isinstance(c, tuple) else (c,) for c in (crowd, self.crowd))
        for at, (one, other) in enumerate(zip(mine, its, strict=True)):
            if one != other:  # the first that differs decided
                words = parts[at] if at < len(parts) else "busier ({} against {})"
                return f"as good: {words.format(*_apart(one, other))}"
        return "as good: another was drawn by chance"


class Candidate(NamedTuple):
    """One instance that was weighed for one role, or could not be (`why`). Times are in seconds."""

    ref: Ref
    role: Role  # PREFILL or DECODE
    why: str
    score_s: float = 0.0  # the least wins
    terms: tuple[float, ...] = ()
    local_blocks: int = 0
    pulled_blocks: int = 0
    loaded_blocks: int = 0
    tier: Tier = Tier.DRAM
    miss: SloMiss | None = None
    short: bool = False  # of room for the whole answer
    crowd: Crowd | None = None  # what decided among scores that were as good; None: its score alone decided
    axes: InstanceAxes = InstanceAxes()

    def named_terms(self) -> dict[str, float]:
        """Returns the terms in milliseconds by name; those that do not apply are left out."""
        names = PREFILL_TERMS if self.role is Role.PREFILL else DECODE_TERMS
        return {name: s * 1000 for name, s in zip(names, self.terms, strict=False) if s >= 0}


class WeighedKind(NamedTuple):
    """One serving mode on certain instances, or why it was not possible. Times are in seconds."""

    kind: ServingMode
    prefill: Ref
    decode: Ref
    why: str
    cost_s: float = 0.0
    terms: tuple[float, ...] = ()
    miss: SloMiss | None = None
    avoided: bool = False  # an earlier attempt failed there, and something else passes
    crowd: Crowd | None = None  # as a candidate's

    def named_terms(self) -> dict[str, float]:
        """Returns the terms by name: `rows` as a number, the others in milliseconds; rare terms only where they are not
        0."""
        told = dict(zip(KIND_TERMS, self.terms, strict=False))
        return {
            name: value if name == "rows" else value * 1000
            for name, value in told.items()
            if value or name not in ("far_ms", "line_ms", "room_ms")
        }


@dataclass(slots=True)
class Decision:
    """One answered Schedule, and what prefill and decode reported of the request later."""

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
    prefill: Winner | None = None  # the best pair's
    decode: Winner | None = None  # likewise
    kind: Winner | None = None
    expected: Expected | None = None
    short: tuple[str, ...] = ()  # cache groups because of which `best_prefix_blocks` is no greater

    def is_chosen(self, candidate: Candidate) -> bool:
        """Says whether the request went to this candidate, as part of a pair."""
        if self.placed is None or self.placed.prefill == self.placed.decode:
            return False
        return candidate.ref == (self.placed.prefill if candidate.role is Role.PREFILL else self.placed.decode)

    def is_chosen_kind(self, kind: WeighedKind) -> bool:
        """Says whether the request became this."""
        if kind.miss is not None or kind.why:  # its instances are those that came nearest, perhaps those that got it
            return False
        return self.placed is not None and (self.placed.prefill, self.placed.decode) == (kind.prefill, kind.decode)

    def kind_verdict(self, kind: WeighedKind) -> str:
        """Returns in words why this serving mode was chosen or not."""
        if kind.why:
            return kind.why
        if self.is_chosen_kind(kind):
            return "chosen"
        if kind.miss is not None:
            return str(kind.miss)
        if self.kind is None:
            return "would do"
        if kind.avoided:
            return AVOIDED
        if (kind.prefill, kind.decode) == self.kind.refs:
            return _REFUSED
        return self.kind.over(kind.cost_s, kind.crowd, "costs {} ms more", KIND_CROWD)

    def verdict(self, candidate: Candidate) -> str:
        """Returns in words why this candidate was chosen or not."""
        if candidate.why:
            return candidate.why
        if self.is_chosen(candidate):
            return "chosen"
        if candidate.miss is not None:
            return str(candidate.miss)
        winner = self.prefill if candidate.role is Role.PREFILL else self.decode
        if winner is None:
            return "would do"
        if candidate.short and not winner.short:
            return "no room for the whole answer"
        if (candidate.ref,) == winner.refs:
            return self._of_the_best_pair()
        return winner.over(candidate.score_s, candidate.crowd, "slower by {} ms", CROWDS[candidate.role])

    def _of_the_best_pair(self) -> str:
        pair = next((k for k in self.kinds if k.kind is ServingMode.PAIR), None)
        if pair is None or self.prefill is None or self.decode is None:
            return "would do"
        said = self.kind_verdict(pair)
        return said if said in ("would do", _REFUSED) else f"of the best pair: {said}"


class Expected(NamedTuple):
    """What a placement was predicted to bring, in seconds, and how far similar predictions were off lately."""

    ttft_s: float  # until the client has its first token
    ttft: Spread
    tbt_s: float
    tbt: Spread


class Explanations:
    """The last decisions, by request; the least recently decided or asked for are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._candidates = 0

    def __len__(self) -> int:
        return len(self._decisions)

    def get(self, request_id: str) -> Decision | None:
        """Returns the last decision about the request, or None when it is unknown or was forgotten."""
        if request_id in self._decisions:
            self._decisions.move_to_end(request_id)
        return self._decisions.get(request_id)

    def keep(self, decision: Decision) -> None:
        """Keeps a decision in the place of the one of an earlier attempt."""
        old = self._decisions.pop(decision.request_id, None)
        self._candidates += len(decision.candidates) - (len(old.candidates) if old else 0)
        self._decisions[decision.request_id] = decision
        while len(self._decisions) > self._limit or (self._candidates > MAX_CANDIDATES and len(self._decisions) > 1):
            _, gone = self._decisions.popitem(last=False)
            self._candidates -= len(gone.candidates)

    def report(self, ref: Ref, sample: PrefillSample) -> None:
        """Adds what the chosen prefill instance found and took."""
        decision = self._decisions.get(sample.request_id)
        if decision is not None and decision.placed is not None and decision.placed.prefill == ref:
            decision.sample = sample

    def ended(self, outcome: RequestOutcome) -> None:
        """Adds how the request went, as decode saw it."""
        decision = self._decisions.get(outcome.request_id)
        if decision is not None and decision.placed is not None and decision.attempt == outcome.attempt:
            decision.ended = outcome


def decided(
    request: Schedule,
    answer: Placed | Refuse,
    some: Sequence[Instance],
    why: Mapping[str, str],
    found: WeighedModes | None,
    *,
    scoring: ScoringContext,
    serving: int,
    best_prefix: int,
    short: tuple[str, ...] = (),
    expected: Expected | None = None,
) -> Decision:
    """Returns the record of one answer. It mentions `some` of the `serving` instances of the model, weighed or not; see
    `_candidates`."""
    pair = found.pair if found is not None else None
    prefill, decode = (_half(pair.prefill_by), _half(pair.decode_by)) if pair is not None else (_NOBODY, _NOBODY)
    candidates = _candidates(request, some, why, found, scoring, prefill, decode)
    kinds, kind = _kinds(request, found, scoring)
    told = {c.ref.instance_id for c in candidates} | {
        k.decode.instance_id for k in kinds if k.kind is not ServingMode.PAIR
    }
    placed = answer if isinstance(answer, Placed) else None
    return Decision(
        request.request_id,
        request.attempt,
        request.model,
        request.prompt_tokens,
        len(request.keys),
        best_prefix,
        scoring.now,
        scoring.ttft_slo_s,
        scoring.tbt_slo_s,
        candidates,
        "placed" if isinstance(answer, Placed) else answer.reason,
        "" if isinstance(answer, Placed) else str(answer.error),
        placed,
        kinds=kinds,
        screened=max(0, serving - len(told)),
        prefill=prefill.winner,
        decode=decode.winner,
        kind=kind,
        expected=expected,
        short=short,
    )


class _Half(NamedTuple):
    """What one half of the best pair was chosen by. `choices` and `numbers` are those of all that were possible, in the
    order of weighing."""

    choices: Sequence[DecodeChoice] | Sequence[PrefillChoice] = ()
    numbers: ComparedNumbers = ComparedNumbers([], [], 0.0, 0)
    winner: Winner | None = None

    def of(self, instance: Instance, at: int) -> tuple[float, Crowd | None] | None:
        """Returns the score and crowd of an instance; `at` is how many of `choices` came before it."""
        if at < len(self.choices) and self.choices[at].instance is instance:
            return self.numbers.scores[at], self.numbers.crowds[at]
        return None


_NOBODY = _Half()


def _half(by: Comparison[DecodeChoice] | Comparison[PrefillChoice] | None) -> _Half:
    if by is None:
        return _NOBODY
    numbers, chosen = by.numbers(), by.chosen
    short = isinstance(chosen, DecodeChoice) and chosen.short
    return _Half(by.choices, numbers, _winner((chosen.instance.ref,), numbers, short))


def _winner(refs: tuple[Ref, ...], numbers: ComparedNumbers, short: bool = False) -> Winner:
    return Winner(refs, numbers.scores[numbers.at], numbers.near_s, numbers.crowds[numbers.at], short)


def _kinds(
    request: Schedule, found: WeighedModes | None, scoring: ScoringContext
) -> tuple[tuple[WeighedKind, ...], Winner | None]:
    """Returns all serving modes that were weighed and what decided between them. `found` is None when nothing could be
    weighed."""
    if found is None:
        return (), None
    winner, by_id = None, dict[int, tuple[float, Crowd | None]]()
    if (by := found.by) is not None:
        numbers = by.numbers()
        winner = _winner((by.chosen.prefill.ref, by.chosen.decode.ref), numbers)
        told = zip(by.choices, numbers.scores, numbers.crowds, strict=True)
        by_id = {id(option): (score_s, crowd) for option, score_s, crowd in told}
    return tuple(_kind(request, o, by_id.get(id(o)), found, scoring) for o in found.options), winner


def _kind(
    request: Schedule,
    option: Option,
    numbers: tuple[float, Crowd | None] | None,
    found: WeighedModes,
    scoring: ScoringContext,
) -> WeighedKind:
    refs = option.prefill.ref, option.decode.ref
    choice = option.choice
    miss = None
    if option.refused is not None:
        miss = _alone_miss(choice, scoring) if choice is not None else _pair_miss(found.pair, scoring)
    why = option.why_not
    if option.refused is not None and miss is None:  # for another reason than an SLO
        why = str(option.refused.error)
    if choice is None:
        return WeighedKind(option.kind, *refs, why, miss=miss)
    shared = choice.prefill.shared
    told = (
        choice.ttft_s,
        float(shared.rows),
        STALL_WEIGHT * shared.stall_s,
        answer_s(choice.decode.slot_wait_s, choice.decode.tbt_s, request.max_tokens),
        HANDOFF_S if option.kind is ServingMode.PAIR else 0.0,
        choice.decode.tbt_s,
        shared.rows_tbt_s,
        option.far_s,
        choice.prefill.others_s,
        numbers[0] - option.cost_s if numbers is not None else 0.0,
    )
    cost_s, crowd = numbers or (option.cost_s, None)
    avoided = numbers is None and option.passes and bool(option.names & request.avoid)
    return WeighedKind(option.kind, *refs, why, cost_s, told, miss, avoided, crowd)


def _alone_miss(choice: PlacementChoice, scoring: ScoringContext) -> SloMiss | None:
    """Returns which SLO keeps one instance from serving the whole request; `choice` is its nearest option."""
    return _decode_miss(choice.decode) or _prefill_miss(choice.prefill, choice.decode.landing_wait_s, scoring)


def _pair_miss(pair: PlacementAndWeighed | None, scoring: ScoringContext) -> SloMiss | None:
    """Returns which SLO keeps every pair from serving the request, by the candidates that come nearest."""
    if pair is None:
        return None
    if pair.decode is None:
        missed = [miss for d in pair.decodes if (miss := _decode_miss(d)) is not None]
        return min(missed, key=lambda miss: miss.predicted_s / miss.slo_s, default=None)
    landing_s = pair.decode.landing_wait_s
    options = [option for p in pair.prefills for option in p.options]
    in_time = [o for o in options if o.admission_ttft_s <= scoring.ttft_slo_s - landing_s]
    nearest = min(in_time, key=lambda o: o.shared.rows_tbt_s, default=None)
    nearest = nearest or min(options, key=lambda o: o.admission_ttft_s, default=None)
    return _prefill_miss(nearest, landing_s, scoring) if nearest is not None else None


def _decode_miss(choice: DecodeChoice) -> SloMiss | None:
    """Returns the SLO that the choice's verdict says is missed."""
    if choice.judged is None or (verdict := choice.judged[1]).passes:
        return None
    return SloMiss("TBT SLO", verdict.tbt_s, verdict.slo_s)


def _prefill_miss(choice: PrefillChoice, landing_wait_s: float, scoring: ScoringContext) -> SloMiss | None:
    if choice.admission_ttft_s > scoring.ttft_slo_s - landing_wait_s:
        return SloMiss("TTFT SLO", choice.admission_ttft_s + landing_wait_s, scoring.ttft_slo_s)
    if choice.shared.rows_tbt_s > scoring.tbt_slo_s:
        return SloMiss("TBT SLO of the rows there", choice.shared.rows_tbt_s, scoring.tbt_slo_s)
    return None


def _candidates(
    request: Schedule,
    serving: Sequence[Instance],
    why: Mapping[str, str],
    found: WeighedModes | None,
    scoring: ScoringContext,
    prefill: _Half,
    decode: _Half,
) -> tuple[Candidate, ...]:
    """Returns those that were weighed, and the `serving` instances that were not, in each role that they have in a
    pair. `found` is None when nothing could be weighed; `why` says by name why an instance can get no work."""
    pair = found.pair if found is not None else None
    known = list(_weighed(pair, scoring, prefill, decode)) if pair is not None else []
    if not serving:
        return tuple(known)
    # Those that could have had it alone are told of as such, which tells more.
    alone = (
        [o.prefill.ref.instance_id for o in found.options if o.kind is not ServingMode.PAIR]
        if found is not None
        else []
    )
    prefills, decodes = set(alone), set(alone)
    for c in known:
        (prefills if c.role is Role.PREFILL else decodes).add(c.ref.instance_id)
    for i in serving:
        name = i.ref.instance_id
        if i.role.prefills and name not in prefills:
            fits = i.can_prefill(request.prompt_tokens)
            known.append(_unweighed(request, i, Role.PREFILL, why[name], fits, found))
        if i.role.decodes and name not in decodes:
            fits = i.can_decode(request.prompt_tokens)
            known.append(_unweighed(request, i, Role.DECODE, why[name], fits, found))
    return tuple(known)


def _unweighed(
    request: Schedule,
    i: Instance,
    role: Role,
    reason: str,
    fits: bool,
    found: WeighedModes | None,
) -> Candidate:
    if reason:
        return Candidate(i.ref, role, f"not ready: {reason}", axes=i.axes)
    if not fits:
        return Candidate(i.ref, role, "the prompt does not fit", axes=i.axes)
    return Candidate(i.ref, role, _why_unweighed(request, i, role, found), axes=i.axes)


def _why_unweighed(request: Schedule, i: Instance, role: Role, found: WeighedModes | None) -> str:
    """Returns why an instance was not weighed that could have had the request."""
    if i.ref.instance_id in request.avoid:
        return AVOIDED
    if found is not None and found.picked_by:
        return f"the policy {found.picked_by} took another"
    if found is None or (pair := found.pair) is None:
        return "not weighed"
    if role is Role.PREFILL and pair.decode is None:
        return "not weighed: no decode instance may have the request"
    if role is Role.PREFILL and pair.decode is not None and pair.decode.instance is i:
        return "not weighed: it is the decode half"
    if role is Role.DECODE and [p.instance for p in pair.prefills] == [i]:
        return "not weighed: it is the prefill half, there is no other"
    return "not weighed: others seemed as good or better"


def _weighed(pair: PlacementAndWeighed, scoring: ScoringContext, prefill: _Half, decode: _Half) -> Iterable[Candidate]:
    landing_wait_s = pair.decode.landing_wait_s if pair.decode is not None else 0.0
    at = 0
    for p in pair.prefills:
        numbers = prefill.of(p.instance, at)
        at += numbers is not None
        yield _prefill(p, landing_wait_s, pair.near, scoring, numbers)
    at = 0
    for d in pair.decodes:
        numbers = decode.of(d.instance, at)
        at += numbers is not None
        yield _decode(d, pair.near, numbers)


def _prefill(
    candidate: PrefillCandidate,
    landing_wait_s: float,
    near: Nearness,
    scoring: ScoringContext,
    numbers: tuple[float, Crowd | None] | None,
) -> Candidate:
    slo_s = scoring.ttft_slo_s - landing_wait_s
    best = candidate.best(slo_s, scoring.tbt_slo_s) or min(candidate.options, key=lambda o: o.admission_ttft_s)
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
    stall_s, line_s = STALL_WEIGHT * best.shared.stall_s or -1.0, best.others_s or -1.0
    own_s = best.cost_s + near.prefill_s(name)
    score_s, crowd = numbers or (own_s, None)
    waits = best.queue_s, pull_s, load_s, best.prefill_s, best.tail_s, landing_wait_s
    return Candidate(
        best.instance.ref,
        Role.PREFILL,
        "",
        score_s,
        (*waits, ttft_s, other, far_s, stall_s, line_s, score_s - own_s or -1.0),
        best.local_blocks,
        pulled,
        best.loaded_blocks,
        best.tier,
        None if numbers else _prefill_miss(best, landing_wait_s, scoring),
        crowd=crowd,
        axes=best.instance.axes,
    )


def _decode(d: DecodeChoice, near: Nearness, numbers: tuple[float, Crowd | None] | None) -> Candidate:
    name = d.instance.ref.instance_id
    far = _far(near.session_decode, name), _far(near.origin, name)
    own_s = d.score_s + near.decode_s(name)
    score_s, crowd = numbers or (own_s, None)
    waits = d.tbt_s, d.landing_wait_s, d.slot_wait_s, d.tail_s
    told = (*waits, *far, d.page_wait_s or -1.0, score_s - own_s or -1.0)
    miss = _decode_miss(d)
    return Candidate(
        d.instance.ref,
        Role.DECODE,
        "",
        score_s,
        told,
        d.at_decode,
        miss=miss,
        short=d.short,
        crowd=crowd,
        axes=d.instance.axes,
    )


def _far(worth: NearInstances, instance_id: str) -> float:
    return worth.far_s(instance_id) if worth.most_s else -1.0


def _apart(one: float, other: float) -> tuple[str, str]:
    """Returns both numbers with as many digits as are needed to tell them apart."""
    for form in (",.0f", ",.1f", ",.3f", ".9g"):
        if (first := format(one, form)) != (second := format(other, form)):
            return first, second
    return str(one), str(other)


def _figure(ms: float) -> str:
    return f"{ms:,.1f}" if abs(ms) >= 0.05 or not ms else f"{ms:.2g}"

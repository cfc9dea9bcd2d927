"""How long answers get: quantiles learnt online from answers that ended, by tenant, endpoint and model. Pure.

Lengths are counted in bins that grow by BIN, older ones fading; a key speaks once it has seen ENOUGH answers, else its
model's, else everybody's, else the request's own limit. An answer that was cut (by its limit, or by its client) is only
known to be that long at least: it counts where the longer ones known of its key lie (Efron's redistribution to the
right), so that short limits do not make long answers look short.

Of an answer that goes on elsewhere (`Schedule.answered_tokens`) the rest is foretold, from those answers that were
longer than what there is; it teaches its whole length.

A client's own guess counts as much as the guesses of its key have been worth: corrected by how far they were off, and
weighed against what is known without it by the spreads of both (in logarithms, inverse variance).
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvmesh.services.conductor.domain import Outcome, RequestOutcome, Schedule

BIN = 2**0.25
BINS = 81  # up to 2^20 tokens
KEEP = 0.99  # of a key's weight, at each of its answers: the last hundred count
ENOUGH = 8
MAX_KEYS = 2048
MAX_AWAITED = 65_536
UNTOLD_TOKENS = 1024  # of an answer nothing is known of, not even a limit below this
HINT_SPREAD = math.log(2)  # what a guess of a new key is taken for: within a factor of two, two times in three
MIN_SPREAD = 0.05
_Z90 = 1.2816  # of the normal distribution


@dataclass(slots=True)
class Lengths:
    """The predicted length of an answer, or of its rest, in tokens: at least 1, at most the request's limit."""

    mean: float
    p50: float
    p90: float


class LengthModel(Protocol):
    """Predicts answer lengths for the conductor; another predictor can replace the built-in one."""

    def predict(self, request: Schedule) -> Lengths:
        """Returns the predicted length of the request's answer."""
        ...

    def placed(self, request: Schedule) -> None:
        """Notes that the request's answer is being made."""
        ...

    def ended(self, outcome: RequestOutcome) -> None:
        """Notes how the answer went. A second outcome of one request is ignored."""
        ...


class _Asked(NamedTuple):
    """What is kept of a request until its answer ends."""

    attempt: int
    names: tuple[tuple[str, ...], ...]
    limit: int  # of the whole answer; 0: none
    hint: int
    answered: int  # by earlier attempts


class LearntLengths:
    """Learns lengths from answers, as the module's docstring says. It keeps at most MAX_KEYS histograms (of 0.7 kB) and
    MAX_AWAITED requests; the least recently used are forgotten."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[str, ...], _Known] = OrderedDict()
        self._awaited: OrderedDict[str, _Asked] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def predict(self, request: Schedule) -> Lengths:
        answered = request.answered_tokens
        limit = request.max_tokens + answered if request.max_tokens else math.inf
        kept = filter(None, map(self._keys.get, _names(request)))
        known = next((k for k in kept if k.answers.weight >= ENOUGH), None)
        if known is not None:
            found = known.answers.lengths(limit, answered)
            spread = known.answers.spread
        else:
            flat = min(limit, answered + UNTOLD_TOKENS)
            found, spread = Lengths(flat, flat, flat), math.inf
        if request.expected_output_tokens > 0:
            hints = self._known(_names(request)[0]).hints
            found = hints.joined(request.expected_output_tokens, found, spread)
        return Lengths(*(max(1.0, min(limit, tokens) - answered) for tokens in (found.mean, found.p50, found.p90)))

    def placed(self, request: Schedule) -> None:
        self._awaited.pop(request.request_id, None)
        answered = request.answered_tokens
        limit = request.max_tokens + answered if request.max_tokens else 0
        self._awaited[request.request_id] = _Asked(
            request.attempt, _names(request), limit, request.expected_output_tokens, answered
        )
        if len(self._awaited) > MAX_AWAITED:
            self._awaited.popitem(last=False)

    def ended(self, outcome: RequestOutcome) -> None:
        asked = self._awaited.get(outcome.request_id)
        if asked is None or asked.attempt != outcome.attempt:
            return
        del self._awaited[outcome.request_id]
        if outcome.outcome not in (Outcome.DONE, Outcome.CANCELLED) or outcome.output_tokens < 1:
            return
        tokens = outcome.output_tokens + asked.answered
        cut = outcome.outcome is Outcome.CANCELLED or 0 < asked.limit <= tokens
        for name in asked.names:
            self._known(name, keep=True).answers.add(tokens, cut=cut)
        if asked.hint > 0 and not cut:
            self._known(asked.names[0], keep=True).hints.add(asked.hint, tokens)

    def _known(self, name: tuple[str, ...], *, keep: bool = False) -> _Known:
        known = self._keys.get(name)
        if known is None:
            known = _Known()
            if not keep:
                return known
            self._keys[name] = known
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        elif keep:
            self._keys.move_to_end(name)
        return known


def _names(request: Schedule) -> tuple[tuple[str, ...], ...]:
    """Returns the keys under which lengths are learnt, the most specific first."""
    return (request.tenant, request.endpoint, request.model), (request.model,), ()


class _Answers:
    """A fading histogram of lengths."""

    def __init__(self) -> None:
        self._bins: array[float] | None = None  # of the current weight of one answer, `_one`
        self._one = 1.0
        self._total = 0.0

    @property
    def weight(self) -> float:
        """How many answers the histogram is worth."""
        return self._total / self._one

    def add(self, tokens: int, *, cut: bool) -> None:
        """Adds an answer of so many tokens; with `cut`, of at least so many."""
        if self._bins is None:
            self._bins = array("d", bytes(8 * BINS))
        self._one /= KEEP  # instead of shrinking all the others
        first = _bin(tokens)
        longer = sum(self._bins[first:]) if cut else 0.0
        if longer > 0:
            for index in range(first, BINS):
                self._bins[index] *= 1 + self._one / longer
        else:
            self._bins[first] += self._one
        self._total += self._one
        if self._one > 1e100:
            self._bins = array("d", (value / self._one for value in self._bins))
            self._total /= self._one
            self._one = 1.0

    def lengths(self, limit: float, beyond: int = 0) -> Lengths:
        """Returns the lengths of an answer that has `beyond` tokens already and may have at most `limit`. At least one
        answer is known. If no known answer was longer than `beyond`, this one may become twice as long."""
        assert self._bins is not None, "asked only once answers are known"
        mean, p50, p90, below = 0.0, 0.0, 0.0, 0.0
        total = self._total
        if beyond:
            total = sum(value for tokens, value in zip(_TOKENS, self._bins, strict=True) if tokens > beyond)
            if not total:
                return Lengths(*(3 * (min(2.0 * beyond, limit),)))
        for tokens, value in zip(_TOKENS, self._bins, strict=True):
            if not value or tokens <= beyond:
                continue
            below += value
            mean += value * min(tokens, limit)
            if not p50 and below >= 0.5 * total:
                p50 = tokens
            if not p90 and below >= 0.9 * total * (1 - 1e-9):
                p90 = tokens
        return Lengths(mean / total, min(p50, limit), min(p90, limit))

    @property
    def spread(self) -> float:
        """Returns the standard deviation of the logarithms."""
        assert self._bins is not None, "asked only once answers are known"
        mean = square = 0.0
        for log, value in zip(_LOGS, self._bins, strict=True):
            if value:
                mean += value * log
                square += value * log * log
        mean /= self._total
        return math.sqrt(max(0.0, square / self._total - mean * mean))


class _Hints:
    """How good the guesses of one key were: fading mean and spread of log(answer / guess). The prior is worth ENOUGH /
    2 guesses."""

    def __init__(self) -> None:
        self._weight = ENOUGH / 2
        self._sum = 0.0
        self._squares = self._weight * HINT_SPREAD**2

    def add(self, hint: int, tokens: int) -> None:
        off = math.log(tokens / hint)
        self._weight = self._weight * KEEP + 1
        self._sum = self._sum * KEEP + off
        self._squares = self._squares * KEEP + off * off

    def joined(self, hint: int, known: Lengths, spread: float) -> Lengths:
        """Combines the guess with what is known without it, whose spread in logarithms is `spread`."""
        bias = self._sum / self._weight
        own = max(MIN_SPREAD, math.sqrt(max(0.0, self._squares / self._weight - bias * bias)))
        other = max(MIN_SPREAD, spread)
        share = 1 / own**2 / (1 / own**2 + 1 / other**2)
        middle = math.exp(share * (math.log(hint) + bias) + (1 - share) * math.log(known.p50))
        both = math.sqrt(1 / (1 / own**2 + 1 / other**2))
        return Lengths(middle * math.exp(both**2 / 2), middle, middle * math.exp(_Z90 * both))


class _Known:
    __slots__ = ("answers", "hints")

    def __init__(self) -> None:
        self.answers = _Answers()
        self.hints = _Hints()


def _bin(tokens: int) -> int:
    return min(BINS - 1, round(math.log(tokens, BIN)))


_TOKENS = [float(BIN**index) for index in range(BINS)]  # in the middle of each bin
_LOGS = list(map(math.log, _TOKENS))

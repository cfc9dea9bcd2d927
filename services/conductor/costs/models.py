"""What work will cost: prefill, decode step, transfer, pull and read of a lower tier, each a `CostModel` that is fitted
online (fit.py), with coefficients that a file or a simulation can set and save (file.py). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Protocol

from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor import score
from kvmesh.services.conductor.costs.equals import Departure, Equals, OwnFit
from kvmesh.services.conductor.costs.fit import ENOUGH_SAMPLES as ENOUGH_SAMPLES
from kvmesh.services.conductor.costs.fit import HALF_LIFE_S as HALF_LIFE_S
from kvmesh.services.conductor.costs.fit import Anchors
from kvmesh.services.conductor.costs.fit import Coefficients as Coefficients
from kvmesh.services.conductor.costs.fit import FittedModel as FittedModel
from kvmesh.services.conductor.score import HIDDEN_SHARE as HIDDEN_SHARE
from kvmesh.services.conductor.score import attention_pairs as attention_pairs

# What a node says of a lower tier counts for less and less while it says nothing new: nobody may have used it since.
TIER_HALF_LIFE_S = 30.0
SEEN_SHARE = 0.3  # of a new observation in what is expected of a tier
MAX_SEEN = 1e4  # times as slow, or as fast, as the prior
# A transfer so many times as slow (or as fast) as the others counts as that much, once others are known.
MAX_ODD = 8.0
KEPT_STEPS = 64
RATE_STEP = 0.02  # of a bandwidth, by which it moves at least


class CostModel(Protocol):
    """Predicts the seconds of work with two sizes, whose meaning is each model's own: (computed tokens, cached tokens)
    of a prompt; (rows, context tokens) of a decode step; (bytes, bytes before them on the way) of a transfer or a read
    of a lower tier; (bytes with those before them, holders) of a pull."""

    @property
    def coefficients(self) -> Coefficients:
        """The present coefficients. Seconds are `coefficients.at(x1, x2)`, with x1 and x2 as file.py defines them."""

    def take(self, coefficients: Coefficients) -> None:
        """Sets the prior, from a file or from peers."""

    def predict(self, size: float, other: float, /) -> float:
        """Returns the best estimate in seconds, for ranking and queues."""

    def admission_s(self, size: float, other: float, /, now: float) -> float:
        """Returns seconds for refusing work. A refusal brings no measurement, so figures that are slow and old fade
        towards the prior."""

    def add(self, size: float, other: float, seconds: float, /, now: float) -> None:
        """Learns one measurement; values that are not positive and finite are ignored."""


PREFILL_PRIOR = Coefficients(a=0.010, b=50e-6, c=2.5e-9)
DECODE_PRIOR = Coefficients(a=0.010, b=100e-6, c=0.2e-6)
PULL_PRIOR = Coefficients(a=0.010, b=2e-9, c=0.005)
TRANSFER_PRIOR = Coefficients(a=0.0, b=1e-9, c=1e-9)
# Until the first byte, and for each byte. What is thought slow is never tried: a good device of its kind.
TIER_PRIORS = {
    Tier.SSD: Coefficients(a=0.0002, b=0.5e-9, c=0.0),
    Tier.OBJECT: Coefficients(a=0.030, b=5e-9, c=0.0),
}
PREFILL_ANCHORS = tuple(
    (float(n), attention_pairs(n, m)) for n, m in ((1, 0), (256, 0), (2048, 0), (8192, 0), (512, 8192))
)
PULL_ANCHORS = ((float(1 << 16), 0.0), (float(1 << 24), 0.0), (float(1 << 30), 0.0), (float(1 << 24), 4.0))
DECODE_ANCHORS = ((1.0, 64.0), (8.0, 4096.0), (64.0, 65536.0), (8.0, 131072.0))


class Pooled:
    """A model that equal instances share, or one instance's part of such a model."""

    equals: Equals
    departure: Departure | None = None  # of an instance

    def leave(self) -> None:
        """Removes the instance, which is gone, from its equals."""
        if self.departure is not None:
            self.equals.leave(self.departure)


class PooledFit(Pooled):
    """A pooled model that is fitted to samples."""

    def __init__(
        self, prior: Coefficients, anchors: Anchors, shared: PooledFit | None, name: str, *, bends: bool = False
    ) -> None:
        """`shared` is the model of its equals, from which the instance `name` may depart; None makes this the shared
        model."""
        self.fit: FittedModel | OwnFit
        if shared is None:
            fit = self.fit = FittedModel(prior, anchors, bends=bends)
            self.equals = Equals(lambda: fit.coefficients)
        else:
            assert isinstance(shared.fit, FittedModel), "what is shared is nobody's part"
            own = self.fit = OwnFit(shared.fit, shared.equals, name)
            self.equals, self.departure = shared.equals, own.departure

    @property
    def coefficients(self) -> Coefficients:
        """The present coefficients; file.py defines x1, x2 and n."""
        return self.fit.coefficients

    def take(self, coefficients: Coefficients) -> None:
        self.fit.take(coefficients)


class PrefillModel(PooledFit):
    """The time to prefill `computed` tokens behind `cached` ones, alone:

        t = a·steps + b·computed + c·pairs        pairs = computed·(computed + 2·cached) / 2

    A long prompt is cut into chunks and pays the constant once a step; short prompts computed in one step share it
    (`together`). A sample tells its steps and what else was computed in them.
    """

    def __init__(
        self, prior: Coefficients = PREFILL_PRIOR, *, shared: PrefillModel | None = None, name: str = ""
    ) -> None:
        super().__init__(prior, PREFILL_ANCHORS, shared, name)
        self._chunks: deque[float] = deque(maxlen=KEPT_STEPS)  # tokens a step, of prompts that took several
        self._steps: deque[float] = deque(maxlen=KEPT_STEPS)  # tokens a step, of all that was computed in it
        self.chunk_tokens = inf  # of one prompt in one step at most, as far as samples tell
        self.step_tokens = 0.0  # of all prompts in one step at most, as far as samples tell
        self._shared = shared
        if shared is not None:
            self.chunk_tokens, self.step_tokens = shared.chunk_tokens, shared.step_tokens

    def add(
        self,
        computed: float,
        cached: float,
        seconds: float,
        now: float,
        *,
        steps: int = 1,
        chunks: int = 1,
        beside_tokens: float = 0.0,
        beside_pairs: float = 0.0,
    ) -> None:
        """Learns one prompt, measured from the beginning of its first step to the end of its last: it took `steps`
        steps, of which `chunks` had tokens of its own. `beside_tokens` and `beside_pairs` are those of other prompts in
        these steps."""
        if computed <= 0:
            return
        steps, all_tokens = max(1, steps), computed + beside_tokens
        self._steps.append(all_tokens / steps)
        self.step_tokens = max(self._steps)
        if chunks > 1:
            self._chunks.append(computed / chunks)
            self.chunk_tokens = max(self._chunks)
        if self._shared is not None:
            self._shared.chunk_tokens, self._shared.step_tokens = self.chunk_tokens, self.step_tokens
        self.fit.add(all_tokens, attention_pairs(computed, cached) + beside_pairs, seconds, now, steps)

    def predict(
        self, computed: float, cached: float, *, steps: int = 0, beside_tokens: float = 0.0, beside_pairs: float = 0.0
    ) -> float:
        """Returns seconds. What is not known beforehand (see `add`) is left out; `steps` 0 stands for the expected
        number."""
        pairs = attention_pairs(computed, cached) + beside_pairs
        return self.fit.predict(computed + beside_tokens, pairs, steps or self._steps_of(computed))

    def admission_s(self, computed: float, cached: float, now: float) -> float:
        """Returns seconds for refusing work (see `Estimate.admission_s`)."""
        return self.fit.admission_s(computed, attention_pairs(computed, cached), now, self._steps_of(computed))

    def both(self, computed: float, cached: float, now: float) -> tuple[float, float]:
        """Returns `predict` and `admission_s`."""
        return self.fit.both(computed, attention_pairs(computed, cached), now, self._steps_of(computed))

    def together(self, prompts: Iterable[tuple[float, float]]) -> float:
        """Returns the seconds of one step with these prompts (computed, cached), which share the constant."""
        tokens = pairs = 0.0
        for computed, cached in prompts:
            tokens, pairs = tokens + computed, pairs + attention_pairs(computed, cached)
        return self.fit.predict(tokens, pairs)

    def chunks_of(self, computed: float) -> int:
        """Returns how many chunks a prompt is cut into, as far as samples tell."""
        return int(self._steps_of(computed))

    def _steps_of(self, computed: float) -> float:
        return 1.0 if computed <= self.chunk_tokens else max(1.0, -(-computed // self.chunk_tokens))


class DecodeModel(PooledFit):
    """The time of one decode step, which is the TBT of all rows in its batch:

        t = a + b·rows + c·context + d·max(0, rows - knee)

    A small batch waits for memory, above all for weights: a floor that rows hardly raise. A large batch computes, and
    each row costs. Where that begins is found from the samples.
    """

    def __init__(
        self, prior: Coefficients = DECODE_PRIOR, *, shared: DecodeModel | None = None, name: str = ""
    ) -> None:
        super().__init__(prior, DECODE_ANCHORS, shared, name, bends=True)

    def add(self, batch: float, context_tokens: float, seconds: float, now: float) -> None:
        """Learns one step."""
        if batch > 0:
            self.fit.add(batch, context_tokens, seconds, now)

    def predict(self, batch: float, context_tokens: float) -> float:
        """Returns seconds."""
        return self.fit.predict(batch, context_tokens)

    def admission_s(self, batch: float, context_tokens: float, now: float) -> float:
        """Returns seconds for refusing work."""
        return self.fit.admission_s(batch, context_tokens, now)

    def both(self, batch: float, context_tokens: float, now: float) -> tuple[float, float]:
        """Returns `predict` and `admission_s`."""
        return self.fit.both(batch, context_tokens, now)


class DecayedRatio:
    """`sum(amount) / sum(seconds)` with fading samples: an average rate weighted by size. It is the least-squares line
    through the origin when the variance of a time grows with its size."""

    def __init__(self, amount: float, seconds: float, keep: float) -> None:
        """It starts at amount / seconds, worth as much as one sample of that size. `keep` in (0, 1) is applied at each
        sample."""
        self._amount, self._seconds, self._keep = amount, seconds, keep
        self.rate = amount / seconds  # amount per second

    def add(self, amount: float, seconds: float) -> None:
        """Adds one measurement; one that took no time is ignored."""
        if amount >= 0 and seconds > 0:
            self._amount = self._amount * self._keep + amount
            self._seconds = self._seconds * self._keep + seconds
            self.rate = self._amount / self._seconds


class TransferModel(Pooled):
    """The time of bytes from one prefill instance to decode, behind those on the way already, and the part of it that
    prefill does not hide. It has one number, the measured bandwidth: layers are sent while others are computed, so no
    constant can be told apart from computing."""

    def __init__(
        self, bytes_per_s: float = 1 / TRANSFER_PRIOR.b, *, shared: TransferModel | None = None, name: str = ""
    ) -> None:
        """`shared` is as in `PooledFit`."""
        self._count = 0
        self._shared = shared
        self._known = Coefficients(0.0, 0.0, 0.0)
        self.take(Coefficients(0.0, 1 / bytes_per_s, 1 / bytes_per_s))
        self.equals = Equals(lambda: self._known) if shared is None else shared.equals
        self.departure = None if shared is None else self.equals.join(name)

    @property
    def coefficients(self) -> Coefficients:
        """The present coefficients. x1 is bytes, x2 the bytes before them; both cost the same."""
        if self.departure is None:
            return self._known
        # Nobody's work is refused for what its equals, perhaps one of them alone, have told of their wires.
        known = self.departure.coefficients
        return known if self.departure.count > 1 or known.b < TRANSFER_PRIOR.b else TRANSFER_PRIOR

    def take(self, coefficients: Coefficients) -> None:
        """Sets the bandwidth, for which only `b` counts, and forgets what was measured."""
        first = 1 << 20
        self._count = 0
        self._bandwidth = DecayedRatio(first, first * max(coefficients.b, 1e-15), keep=0.9)
        self._say()

    def _say(self) -> None:
        """Publishes the bandwidth in steps, because each change is a new prediction for all instances that share it."""
        each_s = 1 / self._bandwidth.rate
        if abs(each_s - self._known.b) > RATE_STEP * self._known.b:
            self._known = Coefficients(0.0, each_s, each_s)

    def add(self, nbytes: float, ahead: float, seconds: float, now: float, *, prefill_s: float = 0.0) -> None:
        """Learns one handoff: `seconds` from its first byte to its last, during `prefill_s` of which it was computed.
        Once others are known, an odd one counts as at most MAX_ODD times as slow or as fast."""
        if nbytes <= 0 or not 0 < seconds < 1e6 or self.hidden(nbytes, ahead, seconds, prefill_s):
            return
        usual = self.predict(nbytes, ahead)
        shared = self._shared or self
        if shared._count >= ENOUGH_SAMPLES:
            seconds = min(MAX_ODD * usual, max(usual / MAX_ODD, seconds))
        seconds = min(seconds, MAX_SEEN * TRANSFER_PRIOR.at(nbytes, ahead))  # a pause is nothing of the wires
        if self.departure is not None:
            self.departure.add(1.0, nbytes, ahead, seconds, now)
            seconds = self.departure.normal_s(seconds)
        shared._count += 1
        shared._bandwidth.add(nbytes + ahead, seconds)
        shared._say()
        shared.equals.refresh(now)

    def predict(self, nbytes: float, ahead: float = 0.0) -> float:
        """Returns the seconds from the first byte to the last."""
        return (nbytes + ahead) * self.coefficients.b

    def hidden(self, nbytes: float, ahead: float, seconds: float, prefill_s: float) -> bool:
        """Says whether a handoff that ended with its computing waited for that and not for the network. Such a handoff
        only tells that the network is no slower than predicted."""
        return self.predict(nbytes, ahead) <= seconds < prefill_s / HIDDEN_SHARE

    def admission_s(self, nbytes: float, ahead: float, now: float) -> float:
        """Returns `predict`, because pushes are measured whenever anything is placed, however long they take."""
        return self.predict(nbytes, ahead)

    @property
    def bytes_per_s(self) -> float:
        """The average bandwidth of the last handoffs, weighted by size."""
        return 1 / self.coefficients.b

    def tail_s(self, nbytes: float, prefill_s: float, ahead: float = 0.0, hidden_share: float = HIDDEN_SHARE) -> float:
        """Returns the seconds between the end of prefill and the last byte. Layers are sent while later ones are
        computed, except the last: at least the share that cannot hide remains. `ahead` is the number of bytes before
        them on the same network."""
        if nbytes <= 0:
            return 0.0
        seconds: float = score.tail_s(nbytes, ahead, self.bytes_per_s, prefill_s, 1 - hidden_share)
        return seconds


class PullModel(PooledFit):
    """The time to fetch blocks from other nodes: an overhead, the bytes (with those before ours at the holders or on
    their way to the reader), and something for each further holder."""

    def __init__(self, prior: Coefficients = PULL_PRIOR, *, shared: PullModel | None = None, name: str = "") -> None:
        super().__init__(prior, PULL_ANCHORS, shared, name)

    def add(self, nbytes: float, holders: float, seconds: float, now: float) -> None:
        """Learns one pull."""
        if nbytes > 0:
            self.fit.add(nbytes, max(0, holders - 1), seconds, now)

    def assume(self, bytes_per_s: float) -> None:
        """Sets the prior until pulls are measured: as fast as KV was seen to go to decode, if that is faster. A push
        waits for the layers that it sends, so its rate is only a lower bound; and a pull that is thought slow would
        never be tried."""
        self.fit.take(Coefficients(PULL_PRIOR.a, min(PULL_PRIOR.b, 1 / bytes_per_s), PULL_PRIOR.c))

    def predict(self, nbytes: float, holders: float) -> float:
        """Returns seconds, as measured."""
        return self.fit.predict(nbytes, max(0, holders - 1))

    def admission_s(self, nbytes: float, holders: float, now: float) -> float:
        """Returns the seconds that placements use as well. A pull that is expected to be slow is not made and teaches
        nothing (see `Estimate.admission_s`)."""
        return self.fit.admission_s(nbytes, max(0, holders - 1), now)

    seconds = admission_s


class TierModel:
    """The time to read blocks from one lower tier of one node: by what that node reports of its reads, or when it
    reports nothing, by what reading from it was seen to take."""

    def __init__(self, tier: Tier) -> None:
        self._prior = TIER_PRIORS[tier]
        self._told: Coefficients | None = None
        self._seen = 0.0  # times as slow as the prior; 0: never seen
        self._known: Coefficients | None = None
        self._known_at = 0.0

    @property
    def coefficients(self) -> Coefficients:
        """The present coefficients. x1 is bytes, with those that are read before them."""
        return self._known or self._prior

    def take(self, coefficients: Coefficients) -> None:
        self._prior = coefficients

    def hear(self, read_s: float, bytes_per_s: float, now: float) -> bool:
        """Takes the node's own report: seconds until the first byte, and the rate from then on (0: nothing was
        measured). Returns whether that is news."""
        if read_s < 0 or bytes_per_s <= 0:
            return False
        told = Coefficients(read_s, 1 / bytes_per_s, 0.0)
        news = told != self._told
        if news:
            self._told = self._known = told
            self._known_at = now
        return news

    def saw(self, nbytes: float, seconds: float, now: float) -> None:
        """Notes that somebody waited so long for `nbytes` from this tier. The node's own report counts for more."""
        if self._told is None:
            ratio = min(MAX_SEEN, max(1 / MAX_SEEN, seconds / self._prior.at(nbytes, 0)))
            self._seen = ratio if not self._seen else self._seen + SEEN_SHARE * (ratio - self._seen)
            self._known, self._known_at = self._prior.scaled(self._seen), now

    def add(self, nbytes: float, ahead: float, seconds: float, now: float) -> None:
        """Learns one read of `nbytes` behind `ahead` other bytes."""
        if nbytes > 0 and 0 < seconds < 1e6:
            self.saw(nbytes + ahead, seconds, now)

    def predict(self, nbytes: float, ahead: float = 0.0) -> float:
        """Returns the seconds, as last known, for `nbytes` in one go behind `ahead` other bytes."""
        return self.coefficients.at(nbytes + ahead, 0)

    def admission_s(self, nbytes: float, ahead: float, now: float) -> float:
        """Returns seconds that fade towards the prior while nothing new is known (see `Estimate.admission_s`)."""
        floor = self._prior.at(nbytes + ahead, 0)
        if self._known is None:
            return floor
        known = self.predict(nbytes, ahead)
        faded = known * 0.5 ** (max(0.0, now - self._known_at) / TIER_HALF_LIFE_S)
        return float(max(min(known, floor), faded))

    def seconds(self, nbytes: float, now: float) -> float:
        """Returns the seconds that placements use, for `nbytes` in one go."""
        return self.admission_s(nbytes, 0.0, now)

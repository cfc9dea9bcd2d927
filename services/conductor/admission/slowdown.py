"""How much slower the batch lane makes the interactive requests of one model, and how much slower it may make them now.
Pure.

Each interactive request was placed with a prediction of what it would take without the lane's work. Its TTFT and its
mean TBT over these are its ratios. Those of requests beside which nothing of the lane ran tell how far predictions are
off, and how much interactive requests disturb each other: the *clear* ratios. What requests beside the lane's work show
beyond these is the lane's doing.

Cost models learn from what is disturbed, too (instances may share a machine), and would take the lane's doing for the
way things are. So predictions are reckoned back to what was known of an instance when it was met first.

The lane is let in by a prediction of what it does (lanes.py); what is measured corrects that prediction, as the delay
corrects the window of a scavenger transport (LEDBAT, RFC 6817): too slow, and the fraction that predictions may use
shrinks at once, in proportion; fast enough, and while the lane asks for more it grows step by step. Without anything
measured it returns to the fraction that was set: it is tried again.

Until clear ratios are known the lane waits, for a while: a mesh that was busy with it when interactive requests came
has none. Where none came lately, it may do what it likes.
"""

from __future__ import annotations

import math
from collections import deque

from kvmesh.services.conductor.admission.judge import Judge
from kvmesh.services.conductor.costs.models import Coefficients, attention_pairs
from kvmesh.services.conductor.domain import RequestOutcome
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.placing.placement import PlacementChoice

QUIET_S = 10.0  # after the last interactive request the lane has the mesh for itself
ENOUGH = 4  # requests that say something together
KEPT_CLEAR = 32
CLEAR_WAIT_S = 20.0  # for clear ratios, at most: then predictions are taken at their word
MOST_RATIO = 16.0
LEAST_FACTOR, MOST_FACTOR = 1 / 64, 16.0
SHRINK, GROW = 0.25, 1.5  # at most, in one step
AGAIN_S = 10.0  # without news the factor doubles, up to 1
TRIMMED = 8  # of so many ratios the greatest and the least are left out
USUAL_SHARE = 0.1  # of a new request in what is thought usual
MAX_RUNNING = 16_384
LOOK_S = 1.0  # for what was given up
MAX_INSTANCES = 4096
MOST_DRIFT = 2.0  # of what is known of an instance


class _Felt:
    """The ratios of one kind, TTFT or TBT."""

    def __init__(self) -> None:
        self.clear: deque[float] = deque(maxlen=KEPT_CLEAR)
        self.beside: list[float] = []  # since the factor was changed

    def slower(self) -> float | None:
        """Returns the fraction by which the lane slows requests down, or None when it is not known."""
        if len(self.beside) < ENOUGH:
            return None
        beside = trimmed_mean(self.beside)
        # Without the lane they would be no slower than with it, whatever predictions say.
        clear = min(trimmed_mean(self.clear) if len(self.clear) >= ENOUGH else 1.0, beside)
        return beside / clear - 1


def trimmed_mean(ratios: deque[float] | list[float]) -> float:
    """Returns the mean without the greatest and the least eighth; of fewer than TRIMMED values, without the
    greatest."""
    ordered, out = sorted(ratios), len(ratios) // TRIMMED
    kept = ordered[out : len(ordered) - max(1, out)] or ordered
    return sum(kept) / len(kept)


class Slowdown:
    """The slowdown of one model's interactive requests at one conductor. `most` is the fraction that is allowed."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._factor = 1.0
        self._ttft, self._tbt = _Felt(), _Felt()
        self._came_at = -math.inf
        self._since: float | None = None  # when interactive requests came beside the lane, clear ratios being unknown
        self._changed_at = 0.0
        self._held_back = False  # since the factor was changed
        self._first: dict[tuple[str, bool], Coefficients] = {}  # by instance and whether it is of decode
        self._running: dict[str, float] = {}  # of the lane, by when each is given up
        self._looked_at = -math.inf
        self._entered = 0
        self.next_at = -math.inf  # before that the lane would compute prompts for too much of the time
        self.ttft_s = 0.0  # that interactive requests have usually had without the lane; 0: none came

    def came(self, now: float) -> None:
        """Notes that an interactive request came."""
        if now - self._came_at > QUIET_S:
            self._since = None
        self._came_at = now

    def placed(self, choice: PlacementChoice, judge: Judge) -> Undisturbed:
        """Notes that an interactive request was placed. Pass the result to `ended`."""
        p, d, now = choice.prefill, choice.decode, judge.now
        pairs, computed = attention_pairs(p.computed_tokens, p.cached_tokens), p.computed_tokens
        ttft_s = max(p.queue_s - p.yielding_s, p.fetch_s) + p.prefill_s
        ttft_s = self._at_first(p.instance, p.instance.prefill.coefficients, computed, pairs, ttft_s)
        rows, context = max(1, d.instance.batch.requests), judge.request.prompt_tokens
        tbt_s = judge.undisturbed_s(d, choice.ttft_s)
        tbt_s = self._at_first(d.instance, d.instance.decode.coefficients, rows, context, tbt_s, decode=True)
        self.ttft_s += (USUAL_SHARE if self.ttft_s else 1.0) * (ttft_s - self.ttft_s)
        return Undisturbed(self, ttft_s, tbt_s, now, -1 if self._busy(now) else self._entered)

    def entered(self, request_id: str, until: float, next_at: float) -> None:
        """Notes that a request of the lane was placed; without further news it counts as over at `until`. The next one
        may enter at `next_at`."""
        self._entered += 1
        self.next_at = next_at
        self._running[request_id] = until
        if len(self._running) > MAX_RUNNING:
            del self._running[next(iter(self._running))]

    def left(self, request_id: str) -> None:
        """Notes that a request has ended, if it is one of the lane."""
        self._running.pop(request_id, None)

    def allowed(self, now: float) -> float:
        """Returns the fraction, in terms of predictions, by which the lane may slow interactive requests down; infinity
        when there are none. It is called when the lane wants to enter."""
        if now - self._came_at > QUIET_S:
            return math.inf
        if self._since is None:
            self._since = self._changed_at = now
        known = max(len(self._ttft.clear), len(self._tbt.clear)) >= ENOUGH
        if not known and now - self._since < CLEAR_WAIT_S:
            return 0.0
        if self._factor < 1 and now - self._changed_at >= AGAIN_S:
            self._change(min(1.0, 2 * self._factor), now)
        self._held_back = True
        return self._most * self._factor

    def ended(self, request: Undisturbed, outcome: RequestOutcome, now: float) -> None:
        """Notes how an interactive request went."""
        clear = request.entered == self._entered
        tbt_s = outcome.mean_tbt_s or outcome.tbt_s
        for felt, measured_s, expected_s in (
            (self._ttft, outcome.ttft_s, request.ttft_s),
            (self._tbt, tbt_s, request.tbt_s),
        ):
            if 0 < measured_s < math.inf and expected_s > 0:
                ratio = min(MOST_RATIO, measured_s / expected_s)
                if clear:
                    felt.clear.append(ratio)
                elif request.at >= self._changed_at:
                    felt.beside.append(ratio)
        self._judge(now)

    def _judge(self, now: float) -> None:
        told = [slower for felt in (self._ttft, self._tbt) if (slower := felt.slower()) is not None]
        if not told:
            return
        slower = max(told)
        if slower > self._most:
            self._change(self._factor * max(SHRINK, self._most / slower), now)
        elif slower < self._most / 2 and self._held_back:
            self._change(self._factor * GROW, now)
        else:
            self._change(self._factor, now)

    def _change(self, factor: float, now: float) -> None:
        self._factor = min(MOST_FACTOR, max(LEAST_FACTOR, factor))
        self._changed_at, self._held_back = now, False
        self._ttft.beside.clear()
        self._tbt.beside.clear()

    def _at_first(
        self, instance: Instance, known: Coefficients, x1: float, x2: float, seconds: float, *, decode: bool = False
    ) -> float:
        """Converts `seconds`, predicted by what is `known` of the instance now, to what its first known model would
        predict."""
        key = instance.ref.instance_id, decode
        first = self._first.get(key)
        if first is None:
            self._first[key] = first = known
            if len(self._first) > MAX_INSTANCES:
                del self._first[next(iter(self._first))]
        if first is known:
            return seconds
        drift = known.at(x1, x2) / max(first.at(x1, x2), 1e-9)
        if not 1 / MOST_DRIFT <= drift <= MOST_DRIFT and not self._running:  # not the lane's doing: it has changed
            self._first[key] = known
            self._ttft.clear.clear()
            self._tbt.clear.clear()
            return seconds
        return seconds / max(drift, 1e-9)

    def _busy(self, now: float) -> bool:
        if self._running and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._running = {name: until for name, until in self._running.items() if until > now}
        return bool(self._running)


class Undisturbed:
    """An interactive request under way. `entered` is how many requests of the lane were placed before it if none of
    them was still there, else -1."""

    __slots__ = ("at", "entered", "of", "tbt_s", "ttft_s")

    def __init__(self, of: Slowdown, ttft_s: float, tbt_s: float, at: float, entered: int) -> None:
        self.of, self.ttft_s, self.tbt_s, self.at, self.entered = of, ttft_s, tbt_s, at, entered

"""What `benchmarks.equals` makes of placements and waits: shares of equal instances, when a share fell and came back,
what clients were told to wait beside what was right. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

DECISION = b'{"kind":"decision"'
AT = b'"at":'
SURE = 1.64  # standard deviations that chance exceeds on one side once in twenty times
ALLOWANCE = 1.0  # placements more (or fewer) than chance explains: the conductor tries a slow instance again
LEAST = 4  # placements after a change, without which it is none


# ── the decision log ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One answer of the conductor. `at`: seconds of the machine's monotonic clock; `prefill` and `decode` are "" and
    the predicted TTFT is 0 where it refused; `retry_after_s` is 0 where it placed."""

    at: float
    request_id: str
    attempt: int
    prompt_tokens: int
    prefill: str = ""
    decode: str = ""
    ttft_s: float = 0.0
    retry_after_s: float = 0.0

    def instance(self, pool: str) -> str:
        """The instance of "prefill" or "decode" that the request was placed on."""
        return self.prefill if pool == "prefill" else self.decode


def parse_decision(line: bytes) -> LoggedDecision | None:
    """The decision that a line of the conductor's decision log tells; None for any other line."""
    if not line.startswith(DECISION):
        return None
    told: dict[str, Any] = orjson.loads(line)
    asked, answer = told["event"], told["answer"]
    first = float(told["at"]), str(asked["request_id"]), int(asked["attempt"]), int(asked["prompt_tokens"])
    if (placed := answer.get("placed")) is None:
        return LoggedDecision(*first, retry_after_s=(answer["refused"]["retry_after_ms"] or 0) / 1000)
    names = placed["prefill"]["instance_id"], placed["decode"]["instance_id"]
    return LoggedDecision(*first, *names, float(placed["ttft_s"]))


def line_time(line: bytes) -> float | None:
    """The time of any line of the decision log that tells one, without reading the whole of it."""
    start = line.find(AT, 0, 64)
    return None if start < 0 else float(line[start + len(AT) : line.index(b",", start)])


# ── shares ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class InstanceShares:
    """How work was spread over equal instances: requests and tokens of each, in the order of names."""

    requests: dict[str, int]
    tokens: dict[str, int]

    @property
    def by_requests(self) -> float:
        """The busiest instance's share of the requests."""
        return busiest(self.requests.values())

    @property
    def by_tokens(self) -> float:
        """The busiest instance's share of the tokens."""
        return busiest(self.tokens.values())

    @property
    def goal(self) -> float:
        """The share that the busiest may have."""
        return most_of(len(self.requests))

    @property
    def fair(self) -> bool:
        return max(self.by_requests, self.by_tokens) <= self.goal

    def told(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        return {
            "requests": self.requests, "tokens": self.tokens, "busiest_by_requests": self.by_requests,
            "busiest_by_tokens": self.by_tokens, "goal": self.goal, "fair": self.fair,
        }  # fmt: skip


def most_of(instances: int) -> float:
    """The largest share that the busiest of so many equal instances may have: 60% of two, 45% of three, a third more
    than its part of more."""
    return {1: 1.0, 2: 0.60, 3: 0.45}.get(instances, 4 / (3 * instances))


def busiest(counts: Iterable[int]) -> float:
    """The largest part of a sum; 0 where there is nothing."""
    known = list(counts)
    return max(known) / sum(known) if sum(known) else 0.0


def spread(names: Sequence[str], placed: Iterable[tuple[str, int]]) -> InstanceShares:
    """Counts (instance, tokens) over the instances of one pool; those that got nothing count, too."""
    requests, tokens = Counter(dict.fromkeys(names, 0)), Counter(dict.fromkeys(names, 0))
    for name, count in placed:
        requests[name] += 1
        tokens[name] += count
    return InstanceShares(dict(sorted(requests.items())), dict(sorted(tokens.items())))


def left_cached(prompt: int, answer: int, next_prompt: int, block: int) -> int:
    """Tokens of a turn's prompt that the turn before can have left cached: its full blocks (the last token of an answer
    has no KV), without the last token of the new prompt, which is always computed."""
    return min((prompt + answer - 1) // block, (next_prompt - 1) // block) * block


# ── when a share fell, and when it came back ──────────────────────────────────────────────────────

Hits = Sequence[tuple[float, bool]]  # placements in order of time: when, and whether the instance in question got it


def change_after(hits: Hits, start: float, end: float, expected: float, falls: bool) -> float | None:
    """Seconds from `start` until the share of placements that hit fell (or rose) to what is `expected`, as far as the
    placements between `start` and `end` tell: the likeliest moment of one change from any share to any lower (higher)
    one. 0: it was so at once. None: it is not so at the end, allowing for chance."""
    inside = [(at, hit) for at, hit in hits if start <= at < end]
    total, count = sum(hit for _, hit in inside), len(inside)
    if count < LEAST:
        return None
    most, place, before = math.log(count), 0, 0  # a change that explains less is chance
    hit_so_far = 0
    for number, (_, hit) in enumerate(inside[: count - LEAST], 1):
        hit_so_far += hit
        first, rest = hit_so_far / number, (total - hit_so_far) / (count - number)
        gain = _likelihood(hit_so_far, number) + _likelihood(total - hit_so_far, count - number)
        gain -= _likelihood(total, count)
        if (first > rest) is falls and gain > most:
            most, place, before = gain, number, hit_so_far
    over = before - place * expected if falls else place * expected - before
    if not place or over <= ALLOWANCE:
        return 0.0 if as_expected(total, count, expected, falls) else None
    if not as_expected(total - before, count - place, expected, falls):
        return None
    return inside[place - 1][0] - start


def _likelihood(hits: int, count: int) -> float:
    """The logarithm of the likelihood of so many hits at the share that makes it greatest."""
    misses = count - hits
    return sum(one * math.log(one / count) for one in (hits, misses) if one)


def as_expected(hits: int, count: int, share: float, at_most: bool) -> bool:
    """Whether so many hits may come of a true share of `share` or less (`at_most`), or of `share` or more."""
    slack = SURE * math.sqrt(count * share * (1 - share)) + ALLOWANCE
    return hits - count * share <= slack if at_most else count * share - hits <= slack


def share_between(hits: Hits, start: float, end: float) -> float | None:
    """The share of placements between two times that hit; None where there was none."""
    inside = [hit for at, hit in hits if start <= at < end]
    return sum(inside) / len(inside) if inside else None


def binned(hits: Hits, start: float, end: float, width_s: float) -> list[float | None]:
    """The share in each `width_s` seconds from `start` to `end`."""
    count = max(1, round((end - start) / width_s))
    return [share_between(hits, start + n * width_s, start + (n + 1) * width_s) for n in range(count)]


def able_share(speed: float, others: int) -> float:
    """The share that an instance can do at `speed` of its usual speed beside so many equal ones at theirs."""
    return speed / (speed + others)


# ── waits that were told ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt of a client that comes again. `told_s`: what a refusal told it to wait; `placed`: it was answered."""

    at: float
    placed: bool
    told_s: float = 0.0


RIGHT_S = 0.1  # a wait that is wrong by no more is right, however short it should have been


def told_against_right(waits: Iterable[float], per_s: float) -> list[tuple[float, float]]:
    """(told, right) of those that were refused at once, when the mesh can take `per_s` of them a second: the one told
    the k-th shortest wait should have waited until k could be taken."""
    return [(told, k / per_s) for k, told in enumerate(sorted(waits), 1)]


def is_right(told_s: float, right_s: float) -> bool:
    """Within a factor of two, or by RIGHT_S."""
    return right_s / 2 <= told_s <= 2 * right_s or abs(told_s - right_s) <= RIGHT_S


def herd(times: Iterable[float], width_s: float = 0.1) -> int:
    """The most attempts that came within one slot of `width_s`."""
    slots = Counter(math.floor(at / width_s) for at in times)
    return max(slots.values(), default=0)

"""What an API key may use: requests, prompt tokens and answer tokens a minute, answers running at once. Pure: time is
an argument.

Each of the first three is a leaky bucket: a level rises by what is used and drains at `limit` a minute. A request is
taken while its cost fits under the limit, so a key that was silent for a minute may use a whole minute's quota at once.

    requests        1 for each request, whatever it asks for
    prompt tokens   those of all its prompts, each once however many answers it gets; known before anything is placed
    answer tokens   those of all its answers, settled when the request ends: a stream is never cut by a quota. What was
                    over the limit drains before the next request is taken
    running         answers (a request with n=4 has four)

A request that fails before its first token, and not because its client went away, gets back what it was charged. One
that goes on at other instances is charged once. A retry by the client is a request of its own, whatever its id.

A gateway that cannot ask what others use has `share` of each limit: 1 / gateways. quota_book.py holds what was used;
its script in Redis decides as `decide` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvmesh.errors import QuotaExceeded, QuotaTooSmall

MINUTE_S = 60.0
MAX_LIMIT = 10**12
RUNNING_RETRY_S = 1.0  # when an answer ends is unknown
REQUESTS, PROMPT, ANSWER, RUNNING = 0, 1, 2, 3
FIELDS = ("requests_per_minute", "prompt_tokens_per_minute", "answer_tokens_per_minute", "max_running")
"""Of a key in keys.toml, by the indices above."""

Levels = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class KeyQuota:
    """The limits of one key; 0: none."""

    requests_per_minute: int = 0
    prompt_tokens_per_minute: int = 0
    answer_tokens_per_minute: int = 0
    max_running: int = 0

    @property
    def limits(self) -> tuple[int, int, int, int]:
        """The limits in the order of FIELDS."""
        return (
            self.requests_per_minute,
            self.prompt_tokens_per_minute,
            self.answer_tokens_per_minute,
            self.max_running,
        )

    def capacity(self, which: int, share: float) -> float:
        """Returns what a gateway with this share of the limit may use of it; 0: there is no limit. A share lets at
        least one request through."""
        limit = self.limits[which]
        return max(1.0, limit * share) if limit else 0.0


NO_QUOTA = KeyQuota()


@dataclass(frozen=True, slots=True)
class QuotaCost:
    """What a request takes when it begins. `answers`: choices of all prompts."""

    prompt_tokens: int
    answers: int


@dataclass(slots=True)
class QuotaUse:
    """What one key has used: three levels as of `at`, in the order of FIELDS."""

    at: float
    levels: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def drain(self, quota: KeyQuota, share: float, now: float) -> Levels:
        """Moves the levels on to `now`, and returns them. A field without a limit has level 0."""
        passed_s = max(0.0, now - self.at)
        for which in (REQUESTS, PROMPT, ANSWER):
            capacity = quota.capacity(which, share)
            left = self.levels[which] - passed_s * capacity / MINUTE_S
            self.levels[which] = max(0.0, left) if capacity else 0.0
        self.at = max(self.at, now)
        requests, prompt, answer = self.levels
        return requests, prompt, answer

    def add(self, charge: Levels) -> None:
        """Charges what was used; what is negative is given back."""
        self.levels = [max(0.0, level + more) for level, more in zip(self.levels, charge, strict=True)]


@dataclass(frozen=True, slots=True)
class QuotaVerdict:
    """`exceeded`: the index of the field that refuses the request for the longest time, -1: it is taken; `wait_s`:
    until it would pass. The levels and the answers running are those of before the request."""

    exceeded: int
    wait_s: float
    levels: Levels
    running: int


def needs(quota: KeyQuota, share: float, cost: QuotaCost) -> Levels:
    """Returns what must be free under the limits for a request to be taken. A prompt that is longer than a share needs
    all of it to be free."""
    return 1.0, min(float(cost.prompt_tokens), quota.capacity(PROMPT, share)), 1.0


def decide(levels: Levels, running: int, quota: KeyQuota, share: float, cost: QuotaCost) -> QuotaVerdict:
    """Returns whether a request may begin. It charges nothing."""
    exceeded, wait_s = -1, 0.0
    for which, (level, need) in enumerate(zip(levels, needs(quota, share, cost), strict=True)):
        capacity = quota.capacity(which, share)
        late_s = (level + need - capacity) * MINUTE_S / capacity if capacity else 0.0
        if late_s > max(1e-9, wait_s):
            exceeded, wait_s = which, late_s
    most = math.floor(quota.capacity(RUNNING, share))
    if most and running and running + cost.answers > most and wait_s < RUNNING_RETRY_S:
        exceeded, wait_s = RUNNING, RUNNING_RETRY_S
    return QuotaVerdict(exceeded, wait_s, levels, running)


def check_possible(name: str, quota: KeyQuota, cost: QuotaCost) -> None:
    """Raises QuotaTooSmall for a request that the key could never make, however long it waits."""
    for which, wanted, noun in (
        (PROMPT, cost.prompt_tokens, "prompt tokens"),
        (RUNNING, cost.answers, "answers"),
    ):
        limit = quota.limits[which]
        if limit and wanted > limit:
            text = f"{FIELDS[which]}={limit} of key {name!r}: a request of {wanted} {noun} can never be taken"
            raise QuotaTooSmall(text, field=FIELDS[which])


@dataclass(frozen=True, slots=True)
class QuotaStanding:
    """Where a key stands once a request of it was taken or refused, for headers. `share` 1: all gateways together.
    `exceeded`, `wait_s`: as in QuotaVerdict."""

    quota: KeyQuota
    share: float
    levels: Levels
    exceeded: int = -1
    wait_s: float = 0.0

    def limit(self, which: int) -> int:
        """Returns the limit of a field as it is here; 0: there is none."""
        return math.floor(self.quota.capacity(which, self.share))

    def remaining(self, which: int) -> int:
        """Returns what is left of it."""
        return max(0, math.floor(self.quota.capacity(which, self.share) - self.levels[which] + 1e-9))

    def reset_s(self, which: int) -> float:
        """Returns the seconds until all of it is free."""
        capacity = self.quota.capacity(which, self.share)
        return self.levels[which] * MINUTE_S / capacity if capacity else 0.0


def refusal(name: str, standing: QuotaStanding) -> QuotaExceeded:
    """Returns the error of a request that is refused now."""
    field_name, limit = FIELDS[standing.exceeded], standing.quota.limits[standing.exceeded]
    wait_ms = max(1, math.ceil(round(1000 * standing.wait_s, 3)))
    part = "" if standing.share == 1 else f" (this gateway has {standing.share:.3g} of it: Redis does not answer)"
    text = f"{field_name}={limit} of key {name!r} is used up{part}; try again in {wait_ms} ms"
    return QuotaExceeded(text, field=field_name, retry_after_ms=wait_ms)

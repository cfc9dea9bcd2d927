"""Which prefixes are used most: a table of fixed size over the ends of chains. Pure.

It is space-saving (Metwally et al. 2005) over decayed counts (forward decay, Cormode et al. 2009): a use at time t
weighs 2^((t - landmark) / half-life), so no count need be changed as time passes. A new key in a full table replaces
the key with the least count and inherits that count as *error*; count minus error is certainly real.

A key stands for its whole prefix. Of each prompt a few depths are counted: powers of two, and those where the holders
change (where a system prompt ends and a conversation begins).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.kvcache.keys import KEY_BYTES, Keys
from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.prefixes.index import PrefixSurvey

CAPACITY = 1024
MAX_PACKED_BYTES = 16 << 20
MAX_BORDERS = 4
ALIKE = 0.7
_RESCALE_AT = 64.0  # half-lives from the landmark: weights stay far from what a float holds


@dataclass(slots=True, eq=False)
class _Chain:
    key: bytes
    model: str
    depth: int
    count: float = 0.0
    error: float = 0.0
    prompt_tokens: float = 0.0  # summed like `count`, without the error
    uses: int = 0
    packed: bytes = b""  # the keys up to it, once it was used twice


@dataclass(frozen=True, slots=True)
class Hot:
    """A hot prefix: it is used at least `rate` times a second, by prompts of `prompt_tokens` on average. `packed` are
    its keys."""

    model: str
    packed: bytes
    rate: float
    prompt_tokens: float

    @property
    def blocks(self) -> int:
        """The number of its keys."""
        return len(self.packed) // KEY_BYTES

    @property
    def keys(self) -> Keys:
        """Its keys."""
        return Keys(self.packed)

    def begins_with(self, chain: _Chain) -> bool:
        """Says whether that chain is a beginning of this prefix. One key decides, as it names all before it."""
        return self.packed[(chain.depth - 1) * KEY_BYTES : chain.depth * KEY_BYTES] == chain.key


class PrefixHeat:
    """Counts uses of at most `capacity` prefixes, O(log capacity) a use. The keys of prefixes take at most
    `max_packed_bytes`."""

    def __init__(
        self, half_life_s: float, *, capacity: int = CAPACITY, max_packed_bytes: int = MAX_PACKED_BYTES
    ) -> None:
        self._half_life_s = half_life_s
        self._capacity = capacity
        self._max_packed = max_packed_bytes
        self._chains: dict[bytes, _Chain] = {}
        self._least: list[tuple[float, bytes]] = []  # a heap, one entry a chain; counts may have grown since
        self._landmark: float | None = None
        self.packed_bytes = 0

    def __len__(self) -> int:
        return len(self._chains)

    def use(self, request: Schedule, survey: PrefixSurvey, now: float) -> None:
        """Counts a prompt that was weighed. `survey` says who holds its blocks; blocks that nobody holds are not
        counted."""
        weight, keys, chains = self._weight(now), Keys.of(request.keys), self._chains
        tokens = weight * request.prompt_tokens
        for depth in depths(survey, len(keys)):
            key = keys[depth - 1]
            chain = chains.get(key)
            if chain is None:
                chain = self._admit(_Chain(key, request.model, depth))
            chain.count += weight
            chain.prompt_tokens += tokens
            chain.uses += 1
            if chain.uses > 1 and not chain.packed and self.packed_bytes + depth * KEY_BYTES <= self._max_packed:
                chain.packed = keys.packed[: depth * KEY_BYTES]
                self.packed_bytes += len(chain.packed)

    def hottest(self, now: float, *, most: int, least_rate: float) -> list[Hot]:
        """Returns the `most` prefixes with the most block reads a second, among those used at least `least_rate` times
        a second. Of two with a common beginning only the longer is returned, unless the shorter is used much more."""
        per_s = math.log(2) / self._half_life_s / self._weight(now)
        found = [
            (rate * chain.depth, chain)
            for chain in self._chains.values()
            if chain.packed and (rate := (chain.count - chain.error) * per_s) >= least_rate
        ]
        found.sort(key=lambda one: (-one[0], one[1].key))
        best: list[Hot] = []
        for reads, chain in found:
            rate = reads / chain.depth
            if rate * ALIKE > max((hot.rate for hot in best if hot.begins_with(chain)), default=0.0):
                prompt_tokens = chain.prompt_tokens / (chain.count - chain.error)
                best.append(Hot(chain.model, chain.packed, rate, prompt_tokens))
                if len(best) == most:
                    break
        return best

    def _weight(self, now: float) -> float:
        if self._landmark is None:
            self._landmark = now
        age = (now - self._landmark) / self._half_life_s
        if age > _RESCALE_AT:
            self._rescale(0.5**age if age < 1000 else 0.0)
            self._landmark, age = now, 0.0
        return float(2.0 ** max(0.0, age))

    def _rescale(self, factor: float) -> None:
        for chain in self._chains.values():
            chain.count *= factor
            chain.error *= factor
            chain.prompt_tokens *= factor
        self._least = [(chain.count, key) for key, chain in self._chains.items()]
        heapq.heapify(self._least)

    def _admit(self, chain: _Chain) -> _Chain:
        if len(self._chains) >= self._capacity:
            chain.count = chain.error = self._evict()
            heapq.heapreplace(self._least, (chain.count, chain.key))
        else:
            heapq.heappush(self._least, (chain.count, chain.key))
        self._chains[chain.key] = chain
        return chain

    def _evict(self) -> float:
        """Removes the least used chain, except for its place as the first in the heap; returns its count."""
        least, chains = self._least, self._chains
        while True:
            noted, key = least[0]
            chain = chains[key]
            if chain.count == noted:
                del chains[key]
                self.packed_bytes -= len(chain.packed)
                return noted
            heapq.heapreplace(least, (chain.count, key))


def depths(survey: PrefixSurvey, blocks: int) -> Sequence[int]:
    """Returns the prefix lengths, in blocks, that are counted of one prompt; the greatest is what somebody
    holds of it."""
    if not survey.runs:
        return ()
    reach = min(survey.runs[-1].end, blocks)
    found = {1 << k for k in range(reach.bit_length())}
    found.update(min(run.end, reach) for run in survey.runs[-MAX_BORDERS:])
    return sorted(found)

"""Placement by session, for comparison: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam: SODA
2018). A key goes to the first name behind it on the ring that has at most its share of requests. Pure."""

from __future__ import annotations

import bisect
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.policies.policy import PickingPolicy, Pool

POINTS = 64  # of each name on the ring
SHARE = 1.25  # of the mean load, that one may have
MAX_RINGS = 16  # for as many sets of names


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


class Ring:
    """A hash ring with several points for each name. When a name comes or goes, only keys next to its points move."""

    def __init__(self, names: Sequence[str]) -> None:
        points = sorted((_hash(f"{name}\0{n}".encode()), at) for at, name in enumerate(names) for n in range(POINTS))
        self._at = [point for point, _ in points]
        self._who = [who for _, who in points]

    def first(self, key: bytes, free: Callable[[int], bool]) -> int:
        """Returns the index in `names` of the first name behind `key` that is `free`; at least one must be."""
        start = bisect.bisect(self._at, _hash(key))
        seen: set[int] = set()
        for n in range(len(self._who)):
            who = self._who[(start + n) % len(self._who)]
            if who not in seen:
                if free(who):
                    return who
                seen.add(who)
        raise AssertionError("nobody is free")


class Rings:
    """The most recently used rings, by their names."""

    def __init__(self) -> None:
        self._rings: OrderedDict[tuple[str, ...], Ring] = OrderedDict()

    def pick(self, key: bytes, names: tuple[str, ...], loads: Sequence[int]) -> int:
        """Returns the index in `names` where one more request with `key` goes. `loads` are the requests that
        each has."""
        ring = self._rings.get(names)
        if ring is None:
            ring = self._rings[names] = Ring(names)
            if len(self._rings) > MAX_RINGS:
                self._rings.popitem(last=False)
        self._rings.move_to_end(names)
        most = math.ceil(SHARE * (sum(loads) + 1) / len(names))
        return ring.first(key, lambda who: loads[who] < most)


class SessionHash(PickingPolicy):
    """Picks the same instance for a session as long as that one has at most its share of all requests. A request
    without a session is hashed by the first block of its prompt."""

    def __init__(self) -> None:
        self._rings = Rings()

    def pick(self, request: Schedule, pool: Pool, rng: random.Random) -> str:
        key = request.session.encode() or (request.keys[0] if request.keys else request.request_id.encode())
        names = tuple(sorted(pool.names))
        return names[self._rings.pick(key, names, [pool.requests(name) for name in names])]

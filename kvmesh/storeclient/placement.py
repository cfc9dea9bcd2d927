"""Decides which pool node a put goes to. Pure.

    local    the node on this machine while it has room; else as best2
    random   any
    best2    of two drawn at random the one with more free memory

Two are drawn, and not the emptiest of all is taken, because figures are a heartbeat old and every client has the same
ones: "the emptiest" would get every put of every client until its next heartbeat. Of two, a node that has just come
back empty is drawn with probability 2/n whatever the others hold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

POLICIES = ("local", "random", "best2")
ROOM_PERCENT = 5  # so much of a node's capacity must be free besides the block for it to count as having room


@dataclass(frozen=True, slots=True)
class PoolCandidate:
    """Is a pool node, as it reported last; capacity 0 means that it has not reported yet. A pool node evicts blocks for
    a put, so "free" is what costs nobody a block."""

    store_id: str
    address: str
    node_id: str = ""
    incarnation: int = 0
    free_bytes: int = 0
    capacity_bytes: int = 0
    draining: bool = False

    def roomy(self, nbytes: int) -> bool:
        return self.free_bytes - nbytes >= self.capacity_bytes * ROOM_PERCENT // 100


def takes(candidate: PoolCandidate, nbytes: int) -> bool:
    """Whether the node may hold a block of so many bytes at all."""
    return not candidate.draining and (not candidate.capacity_bytes or candidate.capacity_bytes >= nbytes)


def order(
    candidates: Sequence[PoolCandidate], policy: str, nbytes: int, largest: int, node_id: str, rng: random.Random
) -> list[PoolCandidate]:
    """Returns the nodes to ask for `nbytes` in blocks of at most `largest` bytes, the first choice first, each once.
    Nodes that drain or cannot hold such a block at all are left out."""
    able = [c for c in candidates if takes(c, largest)]
    rng.shuffle(able)
    if policy != "random" and len(able) > 1 and able[1].free_bytes > able[0].free_bytes:
        able[:2] = able[1], able[0]
    if policy == "local":
        near = [c for c in able if node_id and c.node_id == node_id]
        near = [c for c in near if c.roomy(nbytes)] or (near if not any(c.roomy(nbytes) for c in able) else [])
        able = near + [c for c in able if c not in near]
    return able

"""Which node stores blocks are fetched from, and what names them in a placement. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvmesh.kvcache.sources import PullRange
from services.conductor.domain import Life, Member, Source
from services.conductor.index import Place, Survey, bits
from services.conductor.outgoing import Outgoing

MAX_RANGES = 8


@dataclass(frozen=True, slots=True)
class Leg:
    """Prompt blocks [first, first + blocks) come from `holder`."""

    holder: Member
    first: int
    blocks: int

    @property
    def range(self) -> PullRange:
        """As a placement says it."""
        ref = self.holder.ref
        return PullRange(ref.instance_id, ref.address, ref.incarnation, self.first, self.blocks)


@dataclass(frozen=True)
class Mesh:
    """What one request can use: its survey, and who of those in it may be asked (by slot of the block map)."""

    survey: Survey
    holders: Mapping[int, Member]
    among: int  # the bitset of `holders`
    outgoing: Outgoing

    def reach(self, own: Place, start: int) -> int:
        """How far the prefix goes when the live stores together bring what is missing from `start` on."""
        return self.survey.reach(self.among | own.sealed, start)

    def plan(self, own: Place, node_id: str, start: int, end: int) -> tuple[tuple[Leg, ...], int]:
        """Legs for blocks [start, end) by longest runs, without those that lie at `own`; and the end that they reach.
        Among holders of equal runs the one with the least to send is named, then one on the same node."""
        legs: list[Leg] = []
        at = start
        runs = [run for run in self.survey.runs if run.end > start and run.first < end]
        index = 0
        while index < len(runs) and at < end:
            run = runs[index]
            if run.sealed & own.sealed or run.coming & own.coming:
                index, at = index + 1, run.end
                continue
            alive = run.sealed & self.among
            if not alive or len(legs) == MAX_RANGES:
                break
            index += 1
            while index < len(runs) and (still := alive & runs[index].sealed):
                alive, index = still, index + 1
            until = min(end, runs[index - 1].end)
            legs.append(Leg(self._preferred(alive, node_id), at, until - at))
            at = until
        return tuple(legs), min(at, end)

    def ahead(self, legs: Iterable[Leg]) -> int:
        """Bytes that the holders of `legs` have to send before."""
        return sum(self.outgoing.ahead(life) for life in {leg.holder.ref.life for leg in legs})

    def _preferred(self, alive: int, node_id: str) -> Member:
        holders = [self.holders[slot] for slot in bits(alive)]
        return min(holders, key=lambda h: (self.outgoing.ahead(h.ref.life), h.node_id != node_id, h.ref.instance_id))


def sources(blocks: int, at_decode: int, pulled_to: int) -> bytes:
    """One `Source` for each of `blocks` prompt blocks: the first `at_decode` lie there, those up to `pulled_to` decode
    fetches, prefill pushes the rest; empty when it pushes all."""
    pulled = max(0, pulled_to - at_decode)
    if not at_decode and not pulled:
        return b""
    told = bytes([Source.AT_DECODE]) * at_decode + bytes([Source.DECODE_PULLS]) * pulled
    return told + bytes([Source.PREFILL_PUSHES]) * (blocks - len(told))


def lives_of(legs: Iterable[Leg]) -> dict[Life, int]:
    """Blocks that each holder sends."""
    found: dict[Life, int] = {}
    for leg in legs:
        found[leg.holder.ref.life] = found.get(leg.holder.ref.life, 0) + leg.blocks
    return found

"""From which node stores, and which tiers of them, blocks are fetched; and how a placement describes that. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier, store_name
from kvmesh.services.conductor.costs.cache_cost import CacheCost
from kvmesh.services.conductor.domain import Life, Member, Source
from kvmesh.services.conductor.loads.outgoing import Outgoing
from kvmesh.services.conductor.prefixes.grouped_plan import GroupedFetch
from kvmesh.services.conductor.prefixes.grouped_survey import GroupedSurvey
from kvmesh.services.conductor.prefixes.index import PrefixPlace, PrefixSurvey, bits
from kvmesh.services.conductor.prefixes.sources import FetchSources as FetchSources

MAX_RANGES = 8
MAX_HOLDERS = 64  # of one block, among whom the one to ask is sought

TierLoad = Callable[[Life, Tier, int], float]  # seconds to read so many bytes out of that tier of that node


@dataclass(slots=True, unsafe_hash=True)
class FetchSegment:
    """Prompt blocks [first, first + blocks) come from that tier of `holder`. `own` says that the holder is the reader
    itself. `groups` is the mask of the cache groups that are meant; 0: all of the model's."""

    holder: Member
    first: int
    blocks: int
    tier: Tier = Tier.DRAM
    own: bool = False
    groups: int = 0

    @property
    def end(self) -> int:
        """The block after its last."""
        return self.first + self.blocks

    @property
    def range(self) -> PullRange:
        """The segment as a placement describes it."""
        ref = self.holder.ref
        return PullRange(ref.instance_id, ref.address, ref.incarnation, self.first, self.blocks, self.tier, self.groups)

    def until(self, end: int) -> FetchSegment:
        """Returns its part before block `end`."""
        blocks = min(self.blocks, end - self.first)
        return FetchSegment(self.holder, self.first, blocks, self.tier, self.own, self.groups)


class _Calmest(NamedTuple):
    """Of some holders those with the least to send: the first by name, and the first on each node."""

    first: Member
    by_node: Mapping[str, Member]


@dataclass(slots=True)
class FetchPlanner:
    """Plans fetches for one request, from its survey and the holders that may be asked (by slot of the block map)."""

    survey: PrefixSurvey
    holders: Mapping[int, Member]
    among: int  # the bitset of `holders` in memory
    outgoing: Outgoing
    lower: tuple[tuple[Tier, int], ...] = ()  # and of those below, the fastest tier first
    tier_load: TierLoad = lambda life, tier, nbytes: 0.0
    arriving: Callable[[Life], int] = lambda life: 0  # bytes on their way to a node
    congestion: float = 1.0  # how many times as long as the fitted model says pulls take now, at least 1
    _calmest: dict[int, _Calmest] = field(default_factory=dict, init=False, repr=False, compare=False)
    anywhere: int = field(init=False, repr=False, compare=False)  # the bitset of all `holders`
    memory: tuple[FetchSources, ...] = field(init=False, repr=False, compare=False)  # others' memory alone

    def __post_init__(self) -> None:
        self.anywhere = self.among
        for _, slots in self.lower:
            self.anywhere |= slots
        self.memory = (FetchSources(self.among, Tier.DRAM, own=False),) if self.among else ()

    @property
    def grouped(self) -> bool:
        """Whether the model keeps several cache groups: a shorter prefix is then no part of the plan of a longer
        one."""
        return isinstance(self.survey, GroupedSurvey)

    def reach(self, own: PrefixPlace, start: int) -> int:
        """Returns how far the prefix goes, in blocks, when all live stores together supply what is missing from `start`
        on."""
        return self.survey.reach(self.anywhere | own.sealed, start)

    def sources(self, own: PrefixPlace, *, others: bool = True, own_first: bool = False) -> tuple[FetchSources, ...]:
        """Returns where blocks can come from that are not in the reader's memory, the best first: others' memory, then
        tier by tier its own before others'. With `own_first` its fastest own lower tier comes even before others'
        memory; without `others` only its own tiers are used."""
        if not self.lower:
            return self.memory if others else ()
        found = list(self.memory) if others else []
        for tier, slots in self.lower:
            mine = slots & dict(own.lower).get(tier, 0)
            if mine:
                found.append(FetchSources(mine, tier, own=True))
            if others and slots & ~mine:
                found.append(FetchSources(slots & ~mine, tier, own=False))
        if own_first and len(found) > 1 and found[0].tier is Tier.DRAM and found[1].own:
            found[:2] = found[1], found[0]
        return tuple(found)

    def plan(
        self,
        own: PrefixPlace,
        node_id: str,
        start: int,
        end: int,
        sources: tuple[FetchSources, ...],
        *,
        to_decode: bool = False,
    ) -> tuple[tuple[FetchSegment, ...], int]:
        """Returns segments for blocks [start, end), by longest runs and without those that lie at `own`, and the end
        that they reach. A run of a worse source ends where a better one begins. Among holders of equal runs the one
        with the least to send is chosen, then one on the same node. Of several cache groups the segments name what a
        prefix up to that end needs or, `to_decode`, what decode needs after the whole prompt."""
        if isinstance(self.survey, GroupedSurvey):
            groups, wanted = GroupedFetch(self.survey, own, start, sources), end
            while True:
                pieces, reached = groups.pieces(wanted, to_decode=to_decode)
                if len(pieces) <= MAX_RANGES or not pieces[MAX_RANGES].needed:
                    break
                wanted = min(piece.first for piece in pieces[MAX_RANGES:] if piece.needed)
            found = pieces[:MAX_RANGES]
            told = [
                FetchSegment(
                    self._preferred(one.alive, node_id, sources[one.source].tier),
                    one.first,
                    one.end - one.first,
                    sources[one.source].tier,
                    sources[one.source].own,
                    one.groups,
                )
                for one in found
            ]
            return tuple(told), reached
        segments: list[FetchSegment] = []
        at = start
        runs = [run for run in self.survey.runs if run.end > start and run.first < end]
        index = 0
        while index < len(runs) and at < end:
            run = runs[index]
            if run.sealed & own.sealed or run.coming & own.coming:
                index, at = index + 1, run.end
                continue
            better = 0
            for source in sources:
                if run.sealed & source.slots:
                    break
                better |= source.slots | own.sealed
            else:
                break
            if len(segments) == MAX_RANGES:
                break
            alive = run.sealed & source.slots
            index += 1
            while index < len(runs) and not runs[index].sealed & better and (still := alive & runs[index].sealed):
                alive, index = still, index + 1
            until = min(end, runs[index - 1].end)
            segments.append(
                FetchSegment(self._preferred(alive, node_id, source.tier), at, until - at, source.tier, source.own)
            )
            at = until
        return tuple(segments), min(at, end)

    def ahead(self, segments: Iterable[FetchSegment]) -> int:
        """Returns the bytes that the segments' holders have to send before."""
        return self.ahead_of({segment.holder.ref.life for segment in segments})

    def ahead_of(self, lives: Iterable[Life]) -> int:
        """Returns the bytes that these incarnations have to send."""
        return sum(map(self.outgoing.ahead, lives))

    def named(self, slots: int) -> list[Member]:
        """Returns whose stores these slots are; of very many, MAX_HOLDERS that are spread evenly among them."""
        found = bits(slots)
        if len(found) > MAX_HOLDERS:
            found = found[:: -(-len(found) // MAX_HOLDERS)]
        return [self.holders[slot] for slot in found]

    def _preferred(self, alive: int, node_id: str, tier: Tier) -> Member:
        if tier is Tier.DRAM:
            calmest = self._calmest.get(alive)
            if calmest is None:
                calmest = self._calmest[alive] = _calmest(self.named(alive), self.outgoing)
            return calmest.by_node.get(node_id, calmest.first)
        holders, busy = self.named(alive), self.outgoing.ahead

        def worth(h: Member) -> tuple[int, bool, str]:
            return busy(h.ref.life) + busy(tier_life(h.ref.life, tier)), h.node_id != node_id, h.ref.instance_id

        return min(holders, key=worth)

    def load_s(self, segments: Sequence[FetchSegment], sizes: Sequence[int]) -> tuple[float, float]:
        """Returns the seconds that lower tiers need before the segments' blocks, of so many bytes each segment, are in
        memory: the reader's own, and the slowest of the others'. Each node reads by itself, after what it reads
        already."""
        if not self.lower:
            return 0.0, 0.0
        asked: dict[tuple[Life, Tier, bool], int] = {}
        for segment, nbytes in zip(segments, sizes, strict=True):
            if segment.tier is not Tier.DRAM:
                which = segment.holder.ref.life, segment.tier, segment.own
                asked[which] = asked.get(which, 0) + nbytes
        own_s = others_s = 0.0
        for (life, tier, own), nbytes in asked.items():
            seconds = self.tier_load(life, tier, nbytes + self.outgoing.ahead(tier_life(life, tier)))
            if own:
                own_s = max(own_s, seconds)
            else:
                others_s = max(others_s, seconds)
        return own_s, others_s


def _calmest(holders: Sequence[Member], outgoing: Outgoing) -> _Calmest:
    ahead = [outgoing.ahead(h.ref.life) for h in holders]
    least = min(ahead)
    found = [h for h, nbytes in zip(holders, ahead, strict=True) if nbytes == least]
    found.sort(key=lambda h: h.ref.instance_id, reverse=True)
    return _Calmest(found[-1], {h.node_id: h for h in found})


def tier_life(life: Life, tier: Tier) -> Life:
    """Returns the name under which a tier of a node is counted: what it reads shares one device, what it sends
    one NIC."""
    return store_name(life[0], tier), life[1]


def sources(blocks: int, at_decode: int, pulled_to: int) -> bytes:
    """Returns one `Source` for each of `blocks` prompt blocks: the first `at_decode` are there, decode fetches those up
    to `pulled_to`, prefill pushes the rest. It is empty when prefill pushes all."""
    pulled = max(0, pulled_to - at_decode)
    if not at_decode and not pulled:
        return b""
    told = bytes([Source.AT_DECODE]) * at_decode + bytes([Source.DECODE_PULLS]) * pulled
    return told + bytes([Source.PREFILL_PUSHES]) * (blocks - len(told))


def sizes_of(segments: Sequence[FetchSegment], cost: CacheCost) -> list[int]:
    """Returns the bytes of each segment."""
    return [segment.blocks * cost.objects(segment.groups) for segment in segments]


def blocks_of(segments: Iterable[FetchSegment]) -> int:
    """Returns how many blocks are fetched, each of which may be named for several cache groups."""
    found = list(segments)
    if any(segment.groups for segment in found):
        return len({block for segment in found for block in range(segment.first, segment.end)})
    return sum([segment.blocks for segment in found])


def lives_of(segments: Iterable[FetchSegment], sizes: Iterable[int]) -> dict[Life, int]:
    """Returns the bytes that each holder sends, and that each of its lower tiers reads (`tier_life`), of segments with
    these sizes."""
    found: dict[Life, int] = {}
    for segment, nbytes in zip(segments, sizes, strict=True):
        burdened = [] if segment.own else [segment.holder.ref.life]
        if segment.tier is not Tier.DRAM:
            burdened.append(tier_life(segment.holder.ref.life, segment.tier))
        for life in burdened:
            found[life] = found.get(life, 0) + nbytes
    return found

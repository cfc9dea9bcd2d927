"""The objects of a model with several cache groups, as one text that nodes of other cuts understand (ADR 0037).

    <model> B<block tokens> G<name>:<kind and keep>:<shape> G...      a family: what all cuts of these objects share
    <family> #<group>                                                  whole objects of one group, of one partition
    <family> #<group> L<first>+<count>H<first>+<count>|...             likewise, as ranks cut them: one entry a rank
                                                                       (T<turn>/<turns> behind it where they take turns)

A key and a group name an object within a family. `<model>` says what the bytes depend on beyond the key: weights and
dtype. Kind is A, W, C or S, "?" marks an optional group, and a shape is layers x planes x heads x tokens x dim x bytes
of an element. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, check_groups, needed_blocks, object_shard
from kvmesh.kvcache.layout import ShardLayout

_KINDS = {CacheKind.ALL: "A", CacheKind.WINDOW: "W", CacheKind.CHUNK: "C", CacheKind.STATE: "S"}
_KIND_OF = {letter: kind for kind, letter in _KINDS.items()}
_GROUP = re.compile(r" G([\w.-]+):([AWCS])(\d{1,9})(\??):(\d{1,6})x(\d{1,3})x(\d{1,6})x(\d{1,6})x(\d{1,9})x(\d{1,3})")
_FAMILY = re.compile(rf"([^#]+?) B(\d{{1,6}})((?:{_GROUP.pattern})+)")
_CUT = re.compile(r"L(\d{1,6})\+(\d{1,6})H(\d{1,6})\+(\d{1,6})(?:T(\d{1,4})/(\d{1,4}))?")
_NAME = re.compile(r"[\w.-]+")
MAX_TEXT = 1000  # characters of a family: layouts have 1,024 on the wire


class GroupPlace(NamedTuple):
    """The partition of one group at a node: its layout, and the bytes of an extent at each rank."""

    layout: str
    shard_bytes: int


@dataclass(frozen=True)
class ObjectFamily:
    """Objects of `groups`, with `itemsizes[g]` bytes an element of group g. Of a family that was read from a text the
    layers count within each group. Raises ConfigError when no text can be made of it."""

    model: str
    block_tokens: int
    groups: tuple[CacheGroup, ...]
    itemsizes: tuple[int, ...]

    def __post_init__(self) -> None:
        check_groups(self.groups)
        if wrong := [group.name for group in self.groups if not _NAME.fullmatch(group.name)]:
            raise ConfigError(f"cache_groups: {wrong} are no names", field="cache_groups")
        if len(self.text) > MAX_TEXT:
            raise ConfigError(f"cache_groups: {len(self.text)} characters of layout", field="cache_groups")

    @property
    def text(self) -> str:
        """The layout that leases, pulls and GetStore name."""
        return f"{self.model} B{self.block_tokens}" + "".join(map(self._group_text, range(len(self.groups))))

    def _group_text(self, number: int) -> str:
        group, whole = self.groups[number], self.object(number)
        layers, planes, heads, tokens, dim = whole.shape
        kind = f"{_KINDS[group.kind]}{group.keep}{'?' if group.optional else ''}"
        return f" G{group.name}:{kind}:{layers}x{planes}x{heads}x{tokens}x{dim}x{whole.itemsize}"

    def object(self, number: int) -> ShardLayout:
        """Returns the layout of the whole object of group `number`."""
        return object_shard(self.groups[number], self.block_tokens, self.itemsizes[number], number)

    def needed(self, number: int, blocks: int) -> range:
        """Returns which of a chain of `blocks` blocks a hit at its end needs in group `number`."""
        return needed_blocks(self.groups[number], self.block_tokens, blocks * self.block_tokens)

    def part(self, number: int, cuts: Sequence[ShardLayout] = ()) -> str:
        """Returns the layout of the partition of group `number` whose ranks have `cuts`; () means whole objects."""
        whole = self.object(number)
        text = f"{self.text} #{number}"
        if not cuts or tuple(cuts) == (whole,):
            return text
        return f"{text} " + "|".join(map(_cut_text, cuts))

    def wholes(self) -> dict[int, GroupPlace]:
        """Returns, of each group, where a node that keeps whole objects has it."""
        numbers = range(len(self.groups))
        return {number: GroupPlace(self.part(number), self.object(number).shard_bytes) for number in numbers}

    @property
    def stored_bytes(self) -> tuple[float, ...]:
        """The bytes of each group for each block of a long prompt: of a state, those of a snapshot every `keep`
        blocks."""
        return tuple(
            self.object(g).shard_bytes / (group.keep if group.kind is CacheKind.STATE else 1)
            for g, group in enumerate(self.groups)
        )


@dataclass(frozen=True)
class PartLayout:
    """What the layout of a group's partition says. `cuts` has one entry a rank."""

    family: ObjectFamily
    group: int
    cuts: tuple[ShardLayout, ...]


def _cut_text(cut: ShardLayout) -> str:
    text = f"L{cut.first_layer}+{cut.layers}H{cut.first_head}+{cut.kv_heads}"
    return text if cut.turns == 1 else f"{text}T{cut.turn}/{cut.turns}"


@lru_cache(maxsize=256)
def family_of(text: str) -> ObjectFamily | None:
    """Returns what a family's text says; None for any other layout."""
    found = _FAMILY.fullmatch(text) if len(text) <= MAX_TEXT else None
    if found is None:
        return None
    groups: list[CacheGroup] = []
    itemsizes: list[int] = []
    try:
        for name, letter, keep, optional, layers, planes, heads, _, dim, itemsize in _GROUP.findall(found[3]):
            shape = CacheLayout(int(planes), int(heads), int(dim))
            groups.append(
                CacheGroup(name, tuple(range(int(layers))), shape, _KIND_OF[letter], int(keep), bool(optional))
            )
            itemsizes.append(int(itemsize))
        family = ObjectFamily(found[1], int(found[2]), tuple(groups), tuple(itemsizes))
        return family if family.text == text else None
    except ConfigError:
        return None


@lru_cache(maxsize=1024)
def part_of(layout: str) -> PartLayout | None:
    """Returns what the layout of a group's partition says; None for any other layout."""
    text, mark, rest = layout.partition(" #")
    family = family_of(text) if mark else None
    number, _, cuts = rest.partition(" ")
    if family is None or not number.isascii() or not number.isdecimal() or int(number) >= len(family.groups):
        return None
    whole = family.object(int(number))
    found = []
    for cut in cuts.split("|") if cuts else ():
        if (said := _CUT.fullmatch(cut)) is None:
            return None
        first, layers, head, heads = map(int, said.groups()[:4])
        try:
            found.append(
                ShardLayout(
                    layers,
                    heads,
                    whole.block_tokens,
                    whole.head_dim,
                    whole.itemsize,
                    first,
                    head,
                    whole.planes,
                    whole.group,
                    int(said[5] or 0),
                    int(said[6] or 1),
                )
            )
        except ConfigError:
            return None
    return PartLayout(family, int(number), tuple(found) or (whole,))

"""The node stores of one instance whose model has several cache groups: one NodeStore a group, taken as one (ADR 0037).

A block is one object a group. Bit g of a *mask* says something of the object in group g; group 0 is the *anchor*, the
one that counts where one must. What a hit of so many blocks needs of each group is said by `cache_groups`; which object
is here or missing never has to be right, as the masks say it and every hit is checked against them.

    begin ──▶ seal, abandon      each object by itself; the objects of a block begin together
    hold ───▶ release            what a hit needs of each group, nothing else
    touch                        the end of a use: says what goes late, and what no hit of the chain needs goes first

Each store evicts in its own order. Across the groups it only hears what has become useless, and evicts that first:

- objects of a window, a chunk or a state behind what the longest hit of a chain needs, unless the chain forks there:
  then other prompts end their hits at the fork;
- all objects of a block, and of the blocks that continue it, when the block's anchor goes and the anchor keeps all.

Positions are known from the chains that `begin` is given. Where they are wrong the order of eviction is, nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvmesh.kvcache.cache_groups import (
    CacheGroup,
    CacheKind,
    GroupPages,
    PrefixHit,
    check_groups,
    longest_hit,
    needed_blocks,
)
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PageInvariantError
from kvmesh.kvcache.quotas import NoTagQuotas
from kvmesh.kvcache.store_stats import Changes

Mask = int  # bit g: group number g
FORKS = 8  # of a chain, from its head and from its end, that `touch` looks at


def _leading(bits: int) -> int:
    """Returns how many of the lowest bits are set without a gap."""
    return (~bits & (bits + 1)).bit_length() - 1


def written_mask(groups: Sequence[CacheGroup], block: int, *, last: bool = False) -> Mask:
    """Returns which objects of a block are there to be sealed when a prompt is computed over its end: all but those of
    states, of which `keep` blocks lie between two snapshots. `last` says that it is the last block that the prompt can
    find again, behind which there is a snapshot, too."""
    return sum(
        1 << g
        for g, group in enumerate(groups)
        if last or group.kind is not CacheKind.STATE or (block + 1) % group.keep == 0
    )


class _Link:
    """A block's place in the chains that are known."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before: bytes | None = None  # the block before it, if that has a link
        self.after: dict[bytes, None] = {}  # the blocks after it that have one; several: a fork


class _Watch:
    """The journal of one group's store."""

    def __init__(self, owner: GroupedStore, group: int) -> None:
        self._owner, self._group = owner, group

    def sealed(self, key: bytes, extent: int, nbytes: int | None) -> None:
        """Ignores a sealed object: the owner has sealed it."""

    def gone(self, key: bytes, extent: int, held: bool) -> None:
        """Tells the owner."""
        self._owner._on_gone(self._group, key)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Ignores removed keys: of those that were here, `gone` tells."""


class GroupedStore:
    """The stores of all groups, `stores[g]` of group g, whose blocks have `block_tokens` tokens. It has one owner on
    one thread, as each of them has. Tag quotas count the anchor alone: the other stores have `NoTagQuotas`, else
    ValueError is raised. Nothing else may call `take_changes`, `begin`, `seal` or `abandon` of one of the stores."""

    def __init__(self, groups: Sequence[CacheGroup], stores: Sequence[NodeStore], block_tokens: int) -> None:
        check_groups(groups)
        if len(stores) != len(groups):
            raise ValueError(f"{len(stores)} stores for {len(groups)} groups")
        if not all(isinstance(store.quotas, NoTagQuotas) for store in stores[1:]):
            raise ValueError("the quotas of a group behind the first would count its blocks again")
        self.groups = tuple(groups)
        self.stores = tuple(stores)
        self._anchor = stores[0]
        self._block_tokens = block_tokens
        # No hit goes on over a block whose anchor is missing.
        self._chained = groups[0].kind is CacheKind.ALL and not groups[0].optional
        self._links: dict[bytes, _Link] = {}  # of blocks of which something is here or coming
        self._told: tuple[set[bytes], ...] = tuple(set() for _ in groups)  # objects behind, as told to their stores
        for g, store in enumerate(stores):
            store.journals.append(_Watch(self, g))
        self._anchor.on_evicted_one = self._evict_rest

    # ── what is here ─────────────────────────────────────────────────────────────────────────────────────────

    def held(self, keys: Sequence[bytes]) -> list[int]:
        """Returns which objects are sealed: a bitset of `keys` for each group."""
        return [store.sealed_bits(keys) for store in self.stores]

    def coming(self, keys: Sequence[bytes]) -> list[int]:
        """Returns which objects are being written and may be sealed then: a bitset of `keys` for each group."""
        return [store.coming_bits(keys) for store in self.stores]

    def masks(self, keys: Sequence[bytes]) -> bytes:
        """Returns which objects of each block are sealed, as one mask a key."""
        return bytes(self._mask(key) for key in keys)

    def keys(self) -> list[bytes]:
        """Returns the key of every block of which an object is sealed, each once. O(blocks)."""
        return list(dict.fromkeys(key for store in self.stores for key in store.keys()))  # noqa: SIM118

    def peek(self, keys: Sequence[bytes], most: int) -> PrefixHit:
        """Returns the longest hit of at most `most` blocks of a chain, without changing anything."""
        return longest_hit(self.groups, self._block_tokens, most, self.held(keys[:most]))

    def wanted(self, keys: Sequence[bytes], cut: int) -> list[Mask]:
        """Returns which objects a hit of `cut` blocks needs that are not sealed, as one mask a key. Those of optional
        groups are among them."""
        missing = [0] * len(keys)
        for g, store in enumerate(self.stores):
            for block in self._needed(g, cut):
                if not store.holds(keys[block]):
                    missing[block] |= 1 << g
        return missing

    def hold(self, keys: Sequence[bytes], cut: int) -> list[GroupPages]:
        """Returns the extents that a hit of `cut` blocks needs of each group, with one reference each that the caller
        must `release`. An optional group that lacks one has no entry. Raises PageInvariantError, and holds nothing,
        when it is no hit."""
        found = []
        for g, (group, store) in enumerate(zip(self.groups, self.stores, strict=True)):
            needed = self._needed(g, cut)
            if store.peek(keys[needed.start : needed.stop]) == len(needed):
                found.append((g, needed))
            elif not group.optional:
                raise PageInvariantError(f"a hit of {cut} blocks, but group {group.name} lacks some of {needed}")
        held = []
        for g, needed in found:
            mine = keys[needed.start : needed.stop]
            held.append(GroupPages(g, needed.start, tuple(self.stores[g].hold(mine))))
            self._told[g].difference_update(mine)
        return held

    def hold_of(self, group: int, keys: Sequence[bytes]) -> list[int]:
        """Returns the extents of these objects of one group, with one reference each that the caller must `release`:
        for who finds the rest of what a hit needs elsewhere. Raises PageInvariantError, and holds nothing, when one is
        not sealed."""
        store = self.stores[group]
        if store.peek(keys) < len(keys):
            raise PageInvariantError(f"group {self.groups[group].name} lacks some of {len(keys)} blocks")
        self._told[group].difference_update(keys)
        return store.hold(keys)

    def release(self, held: Iterable[GroupPages]) -> None:
        """Drops one reference of each extent, as `hold` gave them."""
        for group, _, extents in held:
            self.stores[group].release(extent for extent in extents if extent >= 0)

    def touch(self, keys: Sequence[bytes], *, use: bool = True) -> None:
        """Notes that a chain, from its prompt's first block on, was used now, as `NodeStore.touch` does. It is called
        after the sealing of a run of blocks, too: what the longest hit of the chain needs goes late, and what lies
        behind that goes first."""
        held = self.held(keys)
        cut = longest_hit(self.groups, self._block_tokens, len(keys), held).blocks
        forks = [block + 1 for block, key in enumerate(keys[:cut]) if self._forks(key)]
        if len(forks) > 2 * FORKS:
            forks = forks[:FORKS] + forks[-FORKS:]
        others = [longest_hit(self.groups, self._block_tokens, fork, held).blocks for fork in forks]
        anchored = keys[: _leading(held[0])] if self._chained else keys
        for g, store in enumerate(self.stores):
            start = self._needed(g, cut).start
            behind = held[g] & (1 << start) - 1
            for needed in (self._needed(g, other) for other in others if behind):
                behind &= ~((1 << needed.stop) - (1 << needed.start))
            used = (anchored if g else keys)[start:]
            store.touch(used, use=use)
            self._told[g].difference_update(used)
            new = [key for block, key in enumerate(keys[:start]) if behind >> block & 1 and key not in self._told[g]]
            store.evict_first(new)
            self._told[g].update(new)

    def take_changes(self) -> Changes:
        """Returns how the blocks differ from what they were at the last call; at the first, from none. The mask of a
        sealed one says what of it is here from now on; a block that has gone in every group is a removed one."""
        changed: dict[bytes, None] = {}
        for store in self.stores:
            changes = store.take_changes()
            changed.update(dict.fromkeys((*changes.sealed, *changes.removed)))
        masks = {key: self._mask(key) for key in changed}
        sealed = tuple(key for key, mask in masks.items() if mask)
        removed = tuple(key for key, mask in masks.items() if not mask)
        return Changes(sealed, removed, bytes(masks[key] for key in sealed))

    # ── writing and removing ──────────────────────────────────────────────────────────────────────────────────

    def begin(self, keys: Sequence[bytes], masks: Sequence[Mask], start: int = 0) -> list[tuple[int | None, ...]]:
        """Returns an extent for each object to be written, the caller's until `seal` or `abandon`. `keys` is the chain
        from its prompt's first block on, `masks[i]` says which objects of block `start + i` are asked for; the answer
        has one entry a mask, of one extent or None a group.

        None stands for an object that is sealed or being written already, was not asked for, or finds no room. Where
        the anchor finds none, nothing is begun from that block on. What a hit at the chain's end needs and is here, is
        touched and not evicted for the others. When room is short, the chain's first blocks get it in groups that keep
        all and in the anchor, its last ones in the other groups. Raises ValueError when there is not one mask for each
        key from `start` on."""
        if len(masks) != len(keys) - start:
            raise ValueError(f"{len(masks)} masks for {len(keys)} keys from {start} on")
        run = keys[start:]
        end = len(run)
        given: list[list[int | None]] = [[None] * end for _ in self.stores]
        for g, (group, store) in enumerate(zip(self.groups, self.stores, strict=True)):
            needed = self._needed(g, len(keys))
            at = [i for i in range(end) if self._takes_part(g, run[i], masks[i], start + i in needed)]
            if g and group.kind is not CacheKind.ALL:
                at.reverse()
            for i, extent in zip(at, store.begin([run[i] for i in at]), strict=True):
                given[g][i] = extent
            if g == 0:
                end = next((i for i in at if given[0][i] is None and not self._anchored(run[i])), end)
        self._link(keys, start, start + end)
        return list(zip(*given, strict=True))

    def seal(self, key: bytes, mask: Mask) -> Mask:
        """Makes begun objects of a block, whose bytes are all in their extents, findable and immutable. Returns which
        of them were sealed: not those that were sealed otherwise or removed meanwhile, whose extents are freed."""
        sealed = sum(1 << g for g, store in enumerate(self.stores) if mask >> g & 1 and store.seal(key))
        if self._chained and not self._anchored(key):
            self._tell_useless(key)
        self._tidy(key)
        return sealed

    def abandon(self, key: bytes, mask: Mask) -> None:
        """Frees the extents of begun objects that will not be written. The caller promises that nobody writes to
        them."""
        for g, store in enumerate(self.stores):
            if mask >> g & 1:
                store.abandon(key)
        if mask & 1 and self._chained and not self._anchored(key):
            self._tell_useless(key)
        self._tidy(key)

    def end(self, keys: Sequence[bytes], masks: Sequence[Mask], bad: Collection[tuple[int, int]] = ()) -> list[Mask]:
        """Ends the writing of a run of a chain: of block i the objects `masks[i]`, which were begun. They are sealed,
        the last block first, but for what is in doubt: `bad` has the (group, i) of objects whose numbers are not
        finite. Such an object is abandoned; and from that block on all of the run is, as no chain may go on over it,
        unless the group is optional. Returns what was sealed, as one mask a key."""
        stop = min((i for g, i in bad if not self.groups[g].optional), default=len(keys))
        sealed = [0] * len(keys)
        for i in reversed(range(len(keys))):
            lost = masks[i] if i >= stop else masks[i] & sum(1 << g for g, at in set(bad) if at == i)
            self.abandon(keys[i], lost)
            sealed[i] = self.seal(keys[i], masks[i] & ~lost)
        return sealed

    def remove(self, keys: Iterable[bytes]) -> list[bool]:
        """Removes blocks in all groups, as `NodeStore.remove` does. Returns whether something of each was here."""
        keys = list(keys)
        return [any(here) for here in zip(*(store.remove(keys) for store in self.stores), strict=True)]

    def drop_all(self) -> int:
        """Removes all blocks because their memory is gone, as `NodeStore.drop_all` does, and returns how many."""
        dropped = len(self.keys())
        for store in self.stores:
            store.drop_all()
        return dropped

    def trim(self) -> int:
        """Evicts idle objects where a store's high watermark is exceeded, as `NodeStore.trim` does, and returns how
        many."""
        return sum(store.trim() for store in self.stores)

    # ── pins ──────────────────────────────────────────────────────────────────────────────────────────────────

    def pin(self, keys: Sequence[bytes], duration_ns: int, now: int) -> list[bool]:
        """Pins what is here of a chain and needed by a hit at its end softly, as `NodeStore.pin` does. Returns whether
        something of each block is pinned."""
        pinned = [False] * len(keys)
        for store, needed in self._ends(keys):
            for block, yes in zip(needed, store.pin(keys[needed.start :], duration_ns, now), strict=True):
                pinned[block] |= yes
        return pinned

    def pin_hard(self, keys: Sequence[bytes]) -> list[bool]:
        """Pins what is here of a chain and needed by a hit at its end, as `NodeStore.pin_hard` does. Returns whether
        something of each block is pinned. Raises PinLimit, and pins none, when that exceeds the limit of one store."""
        for store, needed in self._ends(keys):
            store.check_pins(keys[needed.start :])
        pinned = [False] * len(keys)
        for store, needed in self._ends(keys):
            for block, yes in zip(needed, store.pin_hard(keys[needed.start :]), strict=True):
                pinned[block] |= yes
        return pinned

    def unpin(self, keys: Sequence[bytes]) -> list[bool]:
        """Ends soft and hard pins in all groups. Returns whether something of each block was pinned."""
        return [any(was) for was in zip(*(store.unpin(keys) for store in self.stores), strict=True)]

    def check_integrity(self) -> None:
        """Raises AssertionError (PageInvariantError) unless all stores are right, and what is known of chains is of
        blocks that are here or coming. O(total)."""
        for store in self.stores:
            store.check_integrity()
        for store in self.stores[1:]:
            store.quotas.check_integrity((store,))
        here = set(self.keys()).union(*(store.written() for store in self.stores))
        if not self._links.keys() <= here:
            raise PageInvariantError("a link of a block of which nothing is here or coming")
        for key, link in self._links.items():
            before = None if link.before is None else self._links.get(link.before)
            if link.before is not None and (before is None or key not in before.after):
                raise PageInvariantError(f"block {key.hex()} follows one that does not know it")
            if any((after := self._links.get(one)) is None or after.before != key for one in link.after):
                raise PageInvariantError(f"block {key.hex()} goes before one that does not know it")
        for store, told in zip(self.stores, self._told, strict=True):
            if not all(map(store.holds, told)):
                raise PageInvariantError("an object that is behind a chain's end is not here")

    # ── inner ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _needed(self, g: int, cut: int) -> range:
        return needed_blocks(self.groups[g], self._block_tokens, cut * self._block_tokens)

    def _ends(self, keys: Sequence[bytes]) -> list[tuple[NodeStore, range]]:
        """Returns each group's store and what a hit at the chain's end needs of it."""
        return [(store, self._needed(g, len(keys))) for g, store in enumerate(self.stores)]

    def _mask(self, key: bytes) -> Mask:
        return sum(1 << g for g, store in enumerate(self.stores) if store.holds(key))

    def _anchored(self, key: bytes) -> bool:
        """Says whether the block's anchor is here, or being written and not removed since."""
        return self._anchor.holds(key) or bool(self._anchor.coming_bits((key,)))

    def _takes_part(self, g: int, key: bytes, mask: Mask, needed: bool) -> bool:
        """Says whether `begin` names the object to its store: it is to be written, or here and needed."""
        if self.stores[g].holds(key):
            return needed and (not self._chained or self._anchored(key))
        return bool(mask >> g & 1)

    def _forks(self, key: bytes) -> bool:
        link = self._links.get(key)
        return link is not None and len(link.after) > 1

    def _link(self, keys: Sequence[bytes], start: int, end: int) -> None:
        """Notes what follows what, of the blocks start .. end - 1 of which something is here or coming."""
        links = self._links
        for block in range(start, end):
            key = keys[block]
            link = links.get(key)
            if link is None:
                if not self._is_known(key):
                    continue
                link = links[key] = _Link()
            if block and link.before is None and (before := links.get(keys[block - 1])) is not None:
                link.before = keys[block - 1]
                before.after[key] = None

    def _is_known(self, key: bytes) -> bool:
        return any(store.holds(key) or store.writing(key) for store in self.stores)

    def _tidy(self, key: bytes) -> None:
        """Forgets the block's place when nothing of it is here or coming."""
        if key in self._links and not self._is_known(key):
            link = self._links.pop(key)
            if link.before is not None:
                del self._links[link.before].after[key]
            for after in link.after:
                self._links[after].before = None

    def _on_gone(self, g: int, key: bytes) -> None:
        self._told[g].discard(key)
        if g == 0 and self._chained:
            self._tell_useless(key)
        self._tidy(key)

    def _tell_useless(self, key: bytes) -> None:
        """Has everything evicted first that no hit reaches any more without this block's anchor."""
        found, rest = [], [key]
        while rest:
            found.append(one := rest.pop())
            link = self._links.get(one)
            # What continues a block without an anchor was told when that one went.
            rest += [after for after in link.after if self._anchored(after)] if link is not None else ()
        found.reverse()  # what continues others goes before them
        for store in self.stores:
            store.evict_first(found)

    def _evict_rest(self, key: bytes) -> None:
        """Removes a block, whose anchor a quota has evicted, in the other groups: readers keep what they read, and what
        is pinned hard stays."""
        for store in self.stores[1:]:
            busy = store.evict_one(key, spared=True) is None and store.holds(key)
            if busy and not any(store.pinned_hard((key,))):
                store.remove((key,))

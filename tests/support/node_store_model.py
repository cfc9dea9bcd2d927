"""The rules that drive a NodeStore and its reference side by side."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvmesh.errors import Overloaded
from kvmesh.kvcache.store_stats import StoreExhausted
from tests.kvcache.test_node_store import chain
from tests.support.node_store_reference import Holder, Pin, Reference

NS = st.sampled_from([0, 1, 5, 20])
PATHS = st.text("ab", min_size=1, max_size=5)
SOME_KEYS = st.builds(lambda path, start: chain(path)[start:], PATHS, st.integers(0, 2))
ANY_KEYS = st.lists(st.sampled_from([key for path in ("aaaa", "abab", "bbb") for key in chain(path)]), max_size=5)


class Model(Reference):
    """What owners, readers and others do."""

    # ── its owner ────────────────────────────────────────────────────────────────────────────────────

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        if n > self.unheld() + len(self.idle()):
            with pytest.raises(StoreExhausted) as caught:
                self.store.allocate(n)
            told = caught.value
            assert (told.wanted, told.usage, told.next_expiry) == (n, self.usage(), self.next_expiry())
            return
        self.evict(n - self.unheld())
        extents = self.store.allocate(n)
        assert len(set(extents)) == n
        self.scribble(extents)
        self.holders.append(Holder(extents))

    @precondition(lambda self: self.raws())
    @rule(data=st.data())
    def share_raw(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.raws()))
        self.store.share(holder.extents)
        self.holders.append(Holder(list(holder.extents)))

    @precondition(lambda self: any(not holder.lease_id for holder in self.holders))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.holders if not holder.lease_id]))
        self.store.release(holder.extents)
        self.drop(holder)

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def begin(self, keys: list[bytes]) -> None:
        own = [key for key in reversed(keys) if key in self.idle()]
        missing = list(dict.fromkeys(key for key in keys if key not in self.sealed and key not in self.writing))
        others = [key for key in self.idle() if key not in keys]
        taken = missing[: self.unheld() + len(others)]
        self.holders.append(mine := Holder([self.sealed[key] for key in own]))
        self.evict(len(taken) - self.unheld())
        self.holders.remove(mine)
        for key in own:
            self.order.mark_idle(key)
        got = self.store.begin(keys)
        assert len(got) == len(keys)
        for index, (key, extent) in enumerate(zip(keys, got, strict=True)):
            assert (extent is not None) == (key in taken and key not in keys[:index])
        self.scribble([extent for extent in got if extent is not None])
        self.writing.update({key: extent for key, extent in zip(keys, got, strict=True) if extent is not None})
        self.lengths.update(dict.fromkeys(taken, len(keys)))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), write=st.sampled_from([True, True, False]), nbytes=st.sampled_from([None, None, 7, 100]))
    def end_writing(self, data: st.DataObject, write: bool, nbytes: int | None) -> None:
        self.written(data.draw(st.sampled_from(sorted(self.writing))), write, nbytes)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def seal_all(self, data: st.DataObject) -> None:
        """As one after the other."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.writing)), unique=True, min_size=1))
        for key in keys:
            self.ended(key, True)
        self.store.seal_all(keys)

    @rule(path=PATHS)
    def prefill(self, path: str) -> None:
        self.begin(chain(path))
        for key in chain(path):
            if key in self.writing:
                self.written(key, True)
        self.touch(chain(path), True)

    def written(self, key: bytes, complete: bool, nbytes: int | None = None) -> None:
        kept = self.ended(key, complete, nbytes)
        if complete:
            assert self.store.seal(key, nbytes) == kept
        else:
            self.store.abandon(key)

    def ended(self, key: bytes, complete: bool, nbytes: int | None = None) -> bool:
        """Whether it is a block from now on."""
        extent, length = self.writing.pop(key), self.lengths.pop(key)
        kept = complete and key not in self.orphans and key not in self.sealed
        self.orphans.discard(key)
        if complete:
            self.memory[extent] = key
        if kept:
            self.becomes(key, extent, length, nbytes)
        return kept

    @precondition(lambda self: any(holder.extents for holder in self.raws()))
    @rule(data=st.data(), path=PATHS)
    def adopt(self, data: st.DataObject, path: str) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.raws() if holder.extents]))
        extent, key = holder.extents[-1], chain(path)[-1]
        read = any(extent in holder.extents for holder in self.holders if holder.keys is not None)
        if extent in self.sealed.values() or read:
            return
        self.memory[extent] = key
        assert self.store.adopt(key, extent) == (key not in self.sealed)
        holder.extents.pop()
        if key not in self.sealed:
            self.becomes(key, extent, 1, None)
        self.tombs = {extent for extent in self.tombs if self.refs(extent)}

    @precondition(lambda self: any(holder.extents for holder in self.raws()))
    @rule(data=st.data(), path=PATHS)
    def adopt_all(self, data: st.DataObject, path: str) -> None:
        """As one after the other."""
        holder = data.draw(st.sampled_from([holder for holder in self.raws() if holder.extents]))
        pairs = list(zip(reversed(chain(path)), list(holder.extents), strict=False))
        read = {extent for other in self.holders if other.keys is not None for extent in other.extents}
        if not (read | set(self.sealed.values())).isdisjoint(extent for _, extent in pairs):
            return
        for key, extent in pairs:
            self.memory[extent] = key
            holder.extents.remove(extent)
            if key not in self.sealed:
                self.becomes(key, extent, 1, None)
            self.tombs = {extent for extent in self.tombs if self.refs(extent)}
        self.store.adopt_all([key for key, _ in pairs], [extent for _, extent in pairs])

    @rule(keys=SOME_KEYS)
    def hold(self, keys: list[bytes]) -> None:
        leading = next((i for i, key in enumerate(keys) if key not in self.sealed), len(keys))
        assert self.store.peek(keys) == leading
        extents = self.store.hold(keys)
        assert [self.memory[extent] for extent in extents] == keys[:leading]
        self.holders.append(Holder(extents, keys[:leading]))

    @rule(keys=SOME_KEYS | ANY_KEYS, use=st.booleans())
    def touch(self, keys: list[bytes], use: bool) -> None:
        self.sync()
        self.store.touch(keys, use=use)
        self.order.touch(keys, use)

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def read(self, keys: list[bytes]) -> None:
        self.sync()
        found, hits = [key for key in keys if key in self.sealed], self.store.stats.hits
        self.store.read(keys)
        assert self.store.stats.hits == hits + len(found)
        for key in reversed(found):
            self.order.touch([key], True)

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def evict_first(self, keys: list[bytes]) -> None:
        self.sync()
        self.store.evict_first(keys)
        for key in reversed(keys):
            self.order.evict_first(key)

    @rule(keys=SOME_KEYS | ANY_KEYS, elsewhere=st.booleans())
    def replicated(self, keys: list[bytes], elsewhere: bool) -> None:
        self.sync()
        self.store.replicated(keys, elsewhere)
        for key in keys:
            if key in self.sealed:
                self.order.set_replicated(key, elsewhere)

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def remove(self, keys: list[bytes]) -> None:
        here = []
        for key in keys:
            here.append(key in self.sealed or (key in self.writing and key not in self.orphans))
            if key in self.sealed:
                self.lose(key)
            if key in self.writing:
                self.orphans.add(key)
        assert self.store.remove(keys) == here

    # ── pins ─────────────────────────────────────────────────────────────────────────────────────────

    @rule(keys=SOME_KEYS | ANY_KEYS, ns=NS)
    def pin(self, keys: list[bytes], ns: int) -> None:
        self.sync()
        pinned = [key in self.sealed and ns > 0 for key in keys]
        assert self.store.pin(keys, ns, self.now) == pinned
        for key in [key for key, yes in zip(keys, pinned, strict=True) if yes][::-1]:
            self.tick += 1
            pin = self.soft.setdefault(key, Pin(0, self.tick))
            pin.until = max(pin.until, self.now + ns)
            self.order.protect(key, True)

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def pin_hard(self, keys: list[bytes]) -> None:
        here = {key for key in keys if key in self.sealed}
        if len(self.hard | here) > self.total // 2:
            with pytest.raises(Overloaded, match="hard_pins="):
                self.store.pin_hard(keys)
            return
        assert self.store.pin_hard(keys) == [key in here for key in keys]
        self.hard |= here

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def unpin(self, keys: list[bytes]) -> None:
        self.sync()
        pinned = []
        for key in reversed(keys):
            pinned.append(key in self.soft or key in self.hard)
            if self.soft.pop(key, None):
                self.order.protect(key, False)
            self.hard.discard(key)
            self.sync()
        assert self.store.unpin(keys) == pinned[::-1]

    # ── readers ──────────────────────────────────────────────────────────────────────────────────────

    @rule(keys=SOME_KEYS | ANY_KEYS, ns=NS)
    def lease(self, keys: list[bytes], ns: int) -> None:
        lease = self.store.lease(keys, ns, self.now)
        found = [key for key in keys if key in self.sealed] if ns else []
        assert (lease.lease_id != 0) == bool(found)
        assert [self.memory[extent] for extent in lease.extents if extent is not None] == found
        assert not found or [extent is not None for extent in lease.extents] == [key in found for key in keys]
        if found:
            extents = [extent for extent in lease.extents if extent is not None]
            self.holders.append(Holder(extents, found, lease.lease_id, self.now + ns))
            for key in found:
                self.order.use(key, len(keys))

    @precondition(lambda self: self.leases())
    @rule(data=st.data(), ns=NS)
    def renew(self, data: st.DataObject, ns: int) -> None:
        holder = data.draw(st.sampled_from(self.leases()))
        until = self.store.renew(holder.lease_id, ns, self.now)
        if holder.final or holder.until <= self.now:
            assert until is None
        else:
            holder.until = max(holder.until, self.now + ns)
            assert until == holder.until

    @precondition(lambda self: self.leases())
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.leases()))
        # A reader's bytes count when this is true: those of a final lease may have gone with their rank.
        assert self.store.unlease(holder.lease_id) == (not holder.final)
        self.drop(holder)
        assert not self.store.unlease(holder.lease_id)

    @rule(ns=NS, most=st.sampled_from([0, 1, None]))
    def time_passes(self, ns: int, most: int | None) -> None:
        """With most = 0 nobody has looked yet."""
        self.now += ns
        over = [holder for holder in self.leases() if holder.until <= self.now]
        # Those that end at one moment go in the order in which they began.
        over = sorted(over, key=lambda holder: holder.until)[:most]
        for holder in over:
            self.drop(holder)
        self.sync()
        pins = sorted((pin.until, pin.serial, key) for key, pin in self.soft.items() if pin.until <= self.now)
        for _, _, key in pins[:most]:
            del self.soft[key]
            self.order.protect(key, False)
        assert self.store.expire(self.now, most) == len(over)

    # ── the memory ───────────────────────────────────────────────────────────────────────────────────

    @rule()
    def trim_now(self) -> None:
        assert self.store.trim() == self.trim()

    @rule(n=st.integers(0, 2))
    def grow(self, n: int) -> None:
        if self.total < 10:
            assert self.store.grow(n) == self.total + len(self.out), "numbers are not used again"
            self.total += n

    @rule(extents=st.sets(st.integers(0, 14), max_size=4), spared=st.booleans())
    def withdraw(self, extents: set[int], spared: bool) -> None:
        extents = {extent for extent in extents if extent < self.total + len(self.out)} - self.out
        here = [key for key, extent in self.sealed.items() if extent in extents]
        others = extents - {self.sealed[key] for key in here}
        idle = self.idle() if spared else [key for key in self.idle() if key not in self.soft]
        may = set(here) <= set(idle) and not others & self.used()
        assert self.store.withdraw(sorted(extents), spared=spared) == may
        if may:
            for key in here:
                del self.sealed[key], self.sizes[key]
                self.soft.pop(key, None)
                self.order.forget(key)
            self.evicted += len(here)
            self.out |= extents
            self.total -= len(extents)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(sorted(self.out)))
        self.out.discard(extent)
        self.total += 1
        self.store.restore([extent])

    @rule()
    def rank_dies(self) -> None:
        assert self.store.drop_all() == len(self.sealed)
        for key in list(self.sealed):
            self.lose(key)
        self.orphans |= self.writing.keys()
        for holder in self.leases():
            holder.final = True

    @rule()
    def tell(self) -> None:
        changes = self.store.take_changes()
        assert not set(changes.sealed) & set(changes.removed)
        assert set(changes.removed) <= self.told
        assert not self.told & set(changes.sealed)
        self.told = self.told - set(changes.removed) | set(changes.sealed)
        assert self.told == set(self.sealed)

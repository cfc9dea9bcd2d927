"""What an engine is believed to hold, beside a plain LRU, and what conductors hear of it."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.external.engine_blocks import EngineBlocks
from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.block_map import BlockMap, Verdict

KEYS = [bytes([n]) * 16 for n in range(12)]
PROMPTS = st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)


@given(st.integers(1, 6), st.lists(st.one_of(PROMPTS, st.none()), max_size=20), st.data())
def test_conductors_know_what_is_believed(capacity: int, steps: list[list[int] | None], data: st.DataObject) -> None:
    """Whoever hears late, or loses an announcement, knows the same in the end; a prompt's head outlives its tail."""
    blocks, plain = EngineBlocks(capacity), OrderedDict[bytes, None]()
    hearers = [(Announcer("a", 1, blocks.changes(), max_keys=2), BlockMap()) for _ in range(2)]
    for step in [*steps, None]:
        if step is not None:
            keys = [KEYS[n] for n in step]
            blocks.used(keys)
            for key in reversed(keys[:capacity]):
                plain.pop(key, None)
                plain[key] = None
            while len(plain) > capacity:
                plain.popitem(last=False)
            assert blocks.cached(keys) == min(len(keys), capacity)
            continue
        for announcer, known in hearers:
            while (word := announcer.next()) is not None:
                if data.draw(st.booleans()) and data.draw(st.booleans()):
                    announcer.failed()
                else:
                    announcer.acked(known.apply(word) is Verdict.GAP)
    assert set(blocks.keys()) == set(plain)
    for announcer, known in hearers:
        while (word := announcer.next()) is not None:
            announcer.acked(known.apply(word) is Verdict.GAP)
        assert {key for key in KEYS if known.mask(key)} == set(plain)


def test_an_engine_that_was_started_anew_holds_nothing() -> None:
    blocks = EngineBlocks(8)
    changes = blocks.changes()
    blocks.used(KEYS[:3])
    assert set(changes.take_changes().sealed) == set(KEYS[:3])
    blocks.clear()
    assert set(changes.take_changes().removed) == set(KEYS[:3]) and not len(blocks)
    blocks.used(KEYS[:1])
    blocks.clear()
    assert changes.take_changes().sealed == changes.take_changes().removed == ()

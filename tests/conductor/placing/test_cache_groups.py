"""Placements of a model that keeps all tokens in some layers, a window in others and states in the rest."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.clock import Tick
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout
from kvmesh.services.conductor import mapping
from kvmesh.services.conductor.domain import Fetch, Lead, Load, PrefillSample, Replicate, Role
from kvmesh.services.conductor.settings import BalanceSettings
from tests.support.conductor.brain import BLOCK, Brain, card, chain, reset
from tests.support.conductor.sharing import BUSY

LAYOUT = CacheLayout(2, 1, 8)
GROUPS = (
    (CacheGroup("all", (0,), LAYOUT), 10_000),
    (CacheGroup("window40", (1,), LAYOUT, CacheKind.WINDOW, 40), 20_000),
    (CacheGroup("state", (2,), LAYOUT, CacheKind.STATE, 4), 500_000),
    (CacheGroup("draft", (3,), LAYOUT, optional=True), 1_000),
)
CARD = card(cache_groups=GROUPS, kv_bytes_per_token=31_000 // BLOCK)
KEYS = chain("x", 63)
PROMPT = 63 * BLOCK + 5
WHOLE = bytes(7 if (block + 1) % 4 == 0 else 3 for block in range(63))


def mesh(**settings: Any) -> Brain:
    """Two prefill instances and a decode one; p0 has all that computing the prompt leaves."""
    brain = Brain(fetch=Fetch.ALWAYS, **settings)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        brain.add(name, role, model=CARD)
    brain.step(reset(1, "p0", "p1", "d0"))
    brain.seal("p0", KEYS, groups=WHOLE)
    return brain


def test_a_hit_ends_at_a_snapshot_and_explain_says_what_was_short() -> None:
    brain = mesh()
    placed = brain.placed(PROMPT, keys=KEYS, avoid=frozenset({"p1"}))
    assert placed.cached_tokens == 60 * BLOCK and placed.pulls == ()
    decision = brain.state.explain("r1")
    assert decision is not None
    assert (decision.best_prefix_blocks, decision.short) == (60, ("state",))
    assert list(mapping.decision_out(decision, brain.now).short_groups) == ["state"]


def test_what_is_fetched_is_named_group_by_group() -> None:
    brain = mesh()
    brain.beat("p0", BUSY)  # so p1 gets it
    placed = brain.placed(PROMPT, keys=KEYS)
    assert (placed.prefill.instance_id, placed.cached_tokens) == ("p1", 60 * BLOCK)
    # The token at 960 sees 39 before it: blocks 57 (its last 7 tokens), 58 and 59; the state is that after block 59.
    assert [(r.instance_id, r.first_block, r.blocks, r.groups) for r in placed.pulls] == [
        ("p0", 0, 57, 1), ("p0", 57, 2, 3), ("p0", 59, 1, 7)
    ]  # fmt: skip
    wire = mapping.placement_out(placed)
    assert [r.groups for r in wire.pulls] == [1, 3, 7]
    # Decode fetches the same blocks itself: of the window it needs what the token at 1,013 sees, from block 60 on.
    assert [(r.instance_id, r.first_block, r.blocks, r.groups) for r in placed.decode_pulls] == [("p0", 0, 60, 1)]
    ahead = brain.state.scheduling._ledger.wires.outgoing.ahead(brain.refs["p0"].life)
    assert ahead == 60 * 10_000 + 3 * 20_000 + 500_000 + 60 * 10_000
    decision = brain.state.explain("r1")
    assert decision is not None
    (told,) = [c for c in decision.candidates if c.ref == placed.prefill]
    assert (told.local_blocks, told.pulled_blocks) == (0, 60)


def test_the_next_request_behind_it_counts_on_what_the_first_brings() -> None:
    brain = mesh()
    brain.beat("p0", BUSY)
    first = brain.placed(PROMPT, keys=KEYS)
    assert first.prefill.instance_id == "p1"
    second = brain.placed(PROMPT, keys=KEYS)
    assert (second.prefill.instance_id, second.pulls) == ("p1", ())
    assert second.cached_tokens == 63 * BLOCK  # where the first leaves a snapshot, beyond the one that was fetched


@pytest.mark.parametrize(("tokens", "cached"), [(64 * BLOCK, 60), (64 * BLOCK + 1, 64)])
def test_the_last_token_is_computed(tokens: int, cached: int) -> None:
    brain, keys = mesh(), chain("y", 64)
    brain.seal("p0", keys, groups=bytes(7 if (block + 1) % 4 == 0 else 3 for block in range(64)))
    placed = brain.placed(tokens, keys=keys, avoid=frozenset({"p1"}))
    assert placed.cached_tokens == cached * BLOCK


def test_what_was_announced_without_masks_has_the_first_group_alone() -> None:
    brain, keys = mesh(), chain("z", 20)
    brain.seal("p1", keys)
    placed = brain.placed(20 * BLOCK + 1, keys=keys)
    assert (placed.cached_tokens, placed.pulls) == (0, ())
    decision = brain.state.explain("r1")
    assert decision is not None and decision.short == ("window40", "state")


def test_decode_is_sent_nothing_that_it_has() -> None:
    brain = mesh()
    brain.seal("d0", KEYS, groups=bytes([1] * 60 + [3] * 3))  # the token at 1,013 sees blocks 60 to 63
    placed = brain.placed(PROMPT, keys=KEYS, avoid=frozenset({"p1"}))
    assert placed.sources == bytes([2] * 63 + [1])
    brain.seal("d0", removed=(KEYS[61],))
    placed = brain.placed(PROMPT, keys=KEYS, avoid=frozenset({"p1"}))
    assert placed.sources == bytes([2] * 61 + [1] * 3)


def test_a_hot_prefix_is_copied_with_what_a_hit_at_its_end_needs() -> None:
    brain = mesh(balance=BalanceSettings(replicate=True))
    brain.step(Lead(1))
    load = Load(free_pages=1000, free_extents=1000, store_capacity=1000)
    orders: list[Replicate] = []
    for _ in range(400):
        brain.now += 0.05
        for name in brain.refs:
            brain.beat(name, load)
        placed = brain.placed(PROMPT, keys=KEYS, avoid=frozenset({"p1"}))
        name = f"r{brain.requests}"
        sample = PrefillSample(name, 53, 60 * BLOCK, 0.5, 1, 0.001)
        brain.beat(placed.prefill.instance_id, load, prefill_samples=(sample,), finished_request_ids=(name,))
        brain.beat("d0", load, finished_request_ids=(name,))
        orders += [action for action in brain.step(Tick()) if isinstance(action, Replicate)]
        if orders:
            break
    assert orders, "nothing was ordered"
    order = orders[0]
    cut = order.keys.index(KEYS[len(order.keys) - 1]) + 1
    assert cut % 4 == 0 and order.keys == KEYS[:cut]  # a hit needs the state after its last block
    assert order.groups == bytes([1] * (cut - 3) + [3, 3, 7])  # and p0 has no draft to copy

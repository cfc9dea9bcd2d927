"""What an operation of NodeStore costs does not depend on how many blocks it holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvmesh.kvcache.eviction import POLICIES
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.store_stats import StoreExhausted
from tests.support.tracing import lines

SIZES = (10_000, 100_000)
PROMPT = 100
ROUNDS = 30


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def prompt(number: int) -> list[bytes]:
    return [key(number * PROMPT + block) for block in range(PROMPT)]


def requests(blocks: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """(a prompt that was cached once, a new one), again and again."""
    rng = random.Random(1)
    for turn in range(ROUNDS):
        yield prompt(rng.randrange(blocks // PROMPT)), prompt(blocks + turn)


def work(store: NodeStore, blocks: int) -> dict[str, Callable[[], None]]:
    """Every kind of operation, in a full store."""
    asked = list(requests(blocks))

    def read() -> None:
        for known, _ in asked:
            store.touch(known)
            store.release(store.hold(known))
            store.unlease(store.lease(known, 10, now=0).lease_id)

    def write() -> None:
        for _, new in asked:
            for one, extent in zip(new, store.begin(new), strict=True):
                if extent is not None:
                    store.seal(one)

    def stay() -> None:
        for known, _ in asked:
            store.pin(known, 10, now=0)
            store.pin_hard(known[:5])
            store.replicated(known[50:])
            store.evict_first(known[60:])
            store.coldest(20)
            store.unpin(known)

    def leave() -> None:
        for known, _ in asked:
            store.lease(known[:50], 10, now=0)
            store.remove(known)
        store.expire(10)

    def refuse() -> None:
        for _ in asked:
            with pytest.raises(StoreExhausted):
                store.allocate(blocks + 1)

    return {"read": read, "write": write, "stay": stay, "refuse": refuse, "leave": leave}


def costs(blocks: int, eviction: str = "lru") -> dict[str, float]:
    """Lines for each kind, of one round."""
    store = NodeStore(blocks, high_percent=100, low_percent=90, eviction=eviction)
    for number in range(blocks // PROMPT):
        keys = prompt(number)
        store.begin(keys)
        for one in keys:
            store.seal(one)
    assert store.stats.sealed == blocks
    return {kind: lines(operations) / ROUNDS for kind, operations in work(store, blocks).items()}


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.slow
def test_flat_from_ten_thousand_blocks_to_a_hundred_thousand(eviction: str) -> None:
    small, big = (costs(blocks, eviction) for blocks in SIZES)
    for kind in small:
        assert big[kind] < 1.15 * small[kind], f"{kind}: {small[kind]} lines, then {big[kind]}"


def test_what_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    few = costs(1_000)["read"]
    monkeypatch.setattr(NodeStore, "peek", searching_peek)
    assert costs(2_000)["read"] > 1.15 * few


def searching_peek(store: NodeStore, keys: Sequence[bytes]) -> int:
    """As `peek`, if all that is asked for is sealed; looks at every block."""
    found, everything = 0, store.keys()
    for one in everything:
        found += one in keys
    return found

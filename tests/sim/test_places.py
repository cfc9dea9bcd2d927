"""Blocks that a step has sealed have their places in the order of eviction: they are not touched again."""

from __future__ import annotations

import itertools

import pytest

from kvmesh.kvcache.node_store import NodeStore
from kvmesh.sim.report.records import Record
from tests.support.sim.fleets import mesh, node, request, served

REQUESTS = [request(n, 0.3 * n, 400 + 137 * (n % 9), 2, n % 5) for n in range(120)]
Touches = list[int]


def _run(eviction: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Record], Touches]:
    touched: Touches = []
    touch = NodeStore.touch

    def told(self: NodeStore, keys: tuple[bytes, ...], *, use: bool = True) -> None:
        touched.append(len(keys))
        touch(self, keys, use=use)

    with monkeypatch.context() as patched:
        patched.setattr(NodeStore, "touch", told)
        spec = node(dram_tokens=3200)
        records = served(mesh(2, 1, spec, eviction=eviction, store_high_percent=80, store_low_percent=60), REQUESTS)
    return records, touched


@pytest.mark.parametrize("eviction", ["lru", *(pytest.param(one, marks=pytest.mark.slow) for one in ("lfu", "length"))])
def test_to_touch_all_blocks_of_a_prompt_changes_nothing(eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records, few = _run(eviction, monkeypatch)
    assert any(one.cached_tokens for one in records), "nothing is found: there is no order to get wrong"
    numbers = itertools.count()
    monkeypatch.setattr(NodeStore, "evicted", property(lambda self: next(numbers)))  # as if something went each time
    again, all_of_them = _run(eviction, monkeypatch)
    assert repr(again) == repr(records)
    assert sum(few) < sum(all_of_them)

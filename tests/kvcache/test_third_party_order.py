"""A package outside the repository adds an eviction order: docs/howto/add-an-eviction-order.md, word for word."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kvmesh.config import load
from kvmesh.errors import ConfigError
from kvmesh.kvcache.eviction import ORDERS, POLICIES, EvictionOrder, make_order
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.plugins import Plugins
from kvmesh.pool.config import PoolConfig
from tests.support.nodes import keys_of
from tests.support.page_package import files_of, install, its_test_passes

FILES = files_of("add-an-eviction-order.md")
BROKEN = """
from kvmesh.kvcache.eviction import EvictionOrder


class Costless(EvictionOrder):
    pass


class NoOrder:
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's package and broken ones on the path."""
    (tmp_path / "broken_orders.py").write_text(BROKEN)
    broken = ("costless = broken_orders:Costless", "none = broken_orders:NoOrder", "gone = broken_orders:Gone")
    install(FILES, tmp_path, broken)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "few_uses", raising=False)
    monkeypatch.delitem(sys.modules, "broken_orders", raising=False)
    return tmp_path


def test_the_page_s_own_test_passes(package: Path) -> None:
    its_test_passes(FILES, package)


def test_a_store_evicts_by_it(package: Path) -> None:
    config = load(PoolConfig, {"store_eviction": "few_uses"}, toml=None, env={})
    store = NodeStore(3, high_percent=100, low_percent=100, eviction=config.store_eviction)
    keys = keys_of("nine", "four", "once")
    for key, uses in zip(keys, (9, 4, 1), strict=True):
        (extent,) = store.begin([key])
        assert extent is not None
        store.seal(key)
        for _ in range(uses):
            store.touch([key])
    assert store.coldest(3) == [keys[2], keys[0], keys[1]]


def test_an_unknown_name_is_answered_with_all_that_are_known(package: Path) -> None:
    assert list(ORDERS)[: len(POLICIES)] == list(POLICIES) and "few_uses" in ORDERS
    with pytest.raises(ConfigError, match=r"store_eviction='fifo' \(.*\): choose one of lru, lfu, length, .*few_uses"):
        load(PoolConfig, {"store_eviction": "fifo"}, toml=None, env={})
    with pytest.raises(ConfigError, match=r"eviction='fifo': choose one of lru, lfu, length, .*few_uses"):
        make_order("fifo")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("costless", "abstract .*cost"),
        ("none", "NoOrder.* is no subclass of EvictionOrder"),
        ("gone", "broken_orders:Gone does not load: AttributeError"),
    ],
)
def test_what_is_no_order_is_refused_at_the_start(package: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"store_eviction='{name}': .*{why}"):
        load(PoolConfig, {"store_eviction": name}, toml=None, env={})


def test_two_of_one_name_are_refused(package: Path) -> None:
    orders = Plugins(ORDERS.group, {"few_uses": "kvmesh.kvcache.eviction:LruOrder"})
    with pytest.raises(ConfigError, match=r"eviction='few_uses': kvmesh.*LruOrder and few_uses:FewUses have this name"):
        orders.load("few_uses", "eviction")


def test_built_in_orders_load_in_the_same_way() -> None:
    for name in POLICIES:
        assert isinstance(make_order(name), EvictionOrder)

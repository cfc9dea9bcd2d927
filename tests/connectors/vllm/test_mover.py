"""Pages against a real master and a real pool node: what one mover has saved, another one loads, byte for byte."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvmesh.connectors.vllm.book import LoadOrder, SaveOrder
from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.connectors.vllm.lookup import NOT_LOOKED_UP, HeldLookups
from kvmesh.connectors.vllm.mover import NOT_LOADED, NOT_SAVED, LoadResults, PageMover, Pages
from kvmesh.errors import ConfigError
from kvmesh.kvcache.keys import tenant_tag
from kvmesh.storeclient import SyncStoreClient
from tests.support.store_clients import Stores
from tests.support.threads import in_thread

BLOCKS, BYTES, LAYERS = 24, 40_000, 5
WAIT_S = 60.0
FIRST = range(8)


@pytest.fixture(scope="module")
def one() -> Iterator[Stores]:
    with in_thread("a") as made:
        yield made


def keys(name: str, count: int) -> tuple[bytes, ...]:
    return tuple(tenant_tag("kv") + name.encode().ljust(8, b".") + at.to_bytes(4, "big") for at in range(count))


def pages(seed: int) -> list[Pages]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (BLOCKS, BYTES), np.uint8) for _ in range(LAYERS)]


@contextlib.contextmanager
def mover(store: str, own: list[Pages], *, rank: int = 0, ranks: int = 1, **more: Any) -> Iterator[PageMover]:
    words = {"part_kib": 64, "load_staging_mb": 1, "save_staging_mb": 4, **more}
    config = ConnectorConfig(store=store, namespace="kv", **words)
    with SyncStoreClient(config.client()) as client:
        made = PageMover(client, own, rank, ranks, config)
        try:
            yield made
        finally:
            made.close()


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end, f"not within {WAIT_S} s"
        time.sleep(0.002)


def loaded(made: PageMover) -> LoadResults:
    found: list[LoadResults] = []

    def poll() -> bool:
        found.append(made.poll())
        return bool(found[-1].request_ids)

    until(poll)
    return found[-1]


def save(made: PageMover, order: SaveOrder) -> dict[str, int]:
    """Saves, and returns what was counted when all is put."""
    made.save(order)
    until(lambda: made.staging_free == made.staging_parts)
    return made.take_counts()


def held(made: SyncStoreClient, wanted: tuple[bytes, ...], ranks: int, parts: int) -> bytes:
    lookups = HeldLookups(made, ranks=ranks, parts=parts, timeout_s=10.0)
    try:
        lookups.ask("r", wanted)
        answers: list[tuple[str, bytes]] = []
        until(lambda: bool(answers) or bool(answers.extend(lookups.answers()) or answers))
        assert answers[0][0] == "r"
        return answers[0][1]
    finally:
        lookups.close()


def test_what_one_has_saved_another_loads(one: Stores) -> None:
    wanted, source, target = keys("first", len(FIRST)), pages(1), pages(2)
    untouched = [layer.copy() for layer in target]
    with mover(one.address, source) as writer, mover(one.address, target) as reader:
        assert len(writer.parts) == 3  # so that a block's parts come in several windows
        counts = save(writer, SaveOrder(tuple(FIRST), wanted))
        assert (counts["blocks_saved"], counts["blocks_not_saved"]) == (8, 0)
        assert counts["bytes_saved"] == 8 * LAYERS * BYTES
        with SyncStoreClient(ConnectorConfig(store=one.address, namespace="kv").client()) as client:
            until(lambda: held(client, (*wanted, *keys("other", 1)), 1, 3) == b"\1" * 8 + b"\0")
            assert held(client, wanted, 1, 4) == bytes(8)  # in parts that nobody has stored
        order = LoadOrder("r", tuple(23 - at for at in FIRST), wanted)
        reader.load(order)
        assert loaded(reader) == LoadResults(frozenset({"r"}), frozenset(), 0)
        assert reader.take_counts()["blocks_loaded"] == 8
        for layer in range(LAYERS):
            assert np.array_equal(target[layer][list(order.block_ids)], source[layer][list(FIRST)])
            assert np.array_equal(target[layer][:16], untouched[layer][:16])


def test_pages_that_have_no_content_are_told_and_nothing_else(one: Stores) -> None:
    wanted, target = keys("holes", 3), pages(3)
    with mover(one.address, pages(4)) as writer, mover(one.address, target, load_threads=1) as reader:
        save(writer, SaveOrder((0, 1), wanted[:2]))
        reader.load(LoadOrder("r", (5, 6, 7), wanted))
        assert loaded(reader) == LoadResults(frozenset({"r"}), frozenset({7}), 0)
        assert reader.poll() == LoadResults()


def test_ranks_keep_keys_of_their_own(one: Stores) -> None:
    wanted = keys("ranks", 1)
    sources = [pages(5), pages(6)]
    for rank, source in enumerate(sources):
        with mover(one.address, source, rank=rank, ranks=2) as writer:
            save(writer, SaveOrder((0,), wanted))
    for rank, source in enumerate(sources):
        target = pages(7)
        with mover(one.address, target, rank=rank, ranks=2) as reader:
            reader.load(LoadOrder("r", (9,), wanted))
            assert not loaded(reader).failed_pages
            assert all(np.array_equal(target[at][9], source[at][0]) for at in range(LAYERS))


def test_blocks_that_find_no_room_are_not_saved(one: Stores) -> None:
    """Staging of 20 parts holds 6 blocks of 3; what comes on top while they are put is counted and left."""
    with mover(one.address, pages(8), save_staging_mb=2) as writer:
        room = writer.staging_parts // 3
        counts = save(writer, SaveOrder((1,) * 24, keys("room", 24)))
        assert counts["blocks_saved"] + counts["blocks_not_saved"] == 24
        assert room <= counts["blocks_saved"]


def test_without_a_store_a_load_ends_in_time_and_a_lookup_finds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Both say so, with the setting that may be wrong."""
    target = pages(9)
    before = [layer.copy() for layer in target]
    with mover("127.0.0.1:9", target, load_timeout_ms=300) as reader:
        reader.load(LoadOrder("r", (1, 2), keys("none", 2)))
        assert loaded(reader).failed_pages == {1, 2}
        reader.save(SaveOrder((1,), keys("none", 1)))  # its time is longer than this test: the end does not wait
    with SyncStoreClient(ConnectorConfig(store="127.0.0.1:9").client()) as client:
        lookups = HeldLookups(client, ranks=1, parts=1, timeout_s=0.2)
        lookups.ask("r", keys("none", 2))
        answers: list[tuple[str, bytes]] = []
        until(lambda: bool(answers.extend(lookups.answers()) or answers))
        assert answers == [("r", b"")]
        lookups.close()
    assert all(np.array_equal(a, b) for a, b in zip(target, before, strict=True))
    warnings = [one.getMessage() for one in caplog.records if one.name == "vllm.kvmesh"]
    assert [kind in told for kind, told in zip((NOT_LOADED, NOT_LOOKED_UP), warnings, strict=True)] == [True, True]
    assert all("store='127.0.0.1:9' in kv_connector_extra_config" in told for told in warnings)


def test_a_save_that_a_node_cannot_read_is_told_once(one: Stores, caplog: pytest.LogCaptureFixture) -> None:
    """The engine says that it is where nothing listens: the pool node cannot read from there."""
    with mover(one.address, pages(1), transports="tcp", advertise_host="127.0.0.9") as writer:
        for name in ("once", "twice"):
            assert save(writer, SaveOrder((0,), keys(name, 1)))["blocks_not_saved"] == 1
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "vllm.kvmesh"]
    assert NOT_SAVED in warning and "127.0.0.9" in warning


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"save_staging_mb": 1, "part_kib": 1, "load_staging_mb": 4}, None),
        ({"save_staging_mb": 1}, None),
        ({"load_staging_mb": 1, "load_threads": 16}, "load_staging_mb=1: is too little: a block has 3 parts"),
    ],
)
def test_stagings_hold_a_block(more: dict[str, int], text: str | None) -> None:
    with contextlib.ExitStack() as stack:
        if text is not None:
            stack.enter_context(pytest.raises(ConfigError, match=text))
        stack.enter_context(mover("127.0.0.1:9", pages(1), **more))

"""The object tier against a real S3 server: bytes, damage, removal, and a server that is dead, frozen and back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import obstore
import pytest

from kvmesh.errors import ConfigError, InvalidRequest, Unavailable
from kvmesh.tiers.object_store import ObjectConfig, ObjectTier
from kvmesh.tiers.object_store import tier as tier_module
from tests.support.s3_server import S3, s3_server

WAIT_S = 30.0


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def url(s3: S3) -> str:
    return f"s3://{s3.bucket()}/some/prefix"


def make(url: str, **settings: Any) -> ObjectTier:
    return ObjectTier(ObjectConfig(**{"url": url, "identity": "2x64 rank 0/1", **settings}))


def done(future: Future[bool]) -> bool:
    return future.result(WAIT_S)


def read(tier: ObjectTier, key: bytes) -> bytes | None:
    length = tier.length(key)
    if length is None:
        return None
    into = bytearray(length)
    return bytes(into) if done(tier.get_into(key, memoryview(into))) else None


def put(tier: ObjectTier, blocks: dict[bytes, bytes]) -> None:
    assert all(done(future) for future in tier.put_many(list(blocks.items())))


def some(n: int, seed: int = 1) -> dict[bytes, bytes]:
    rng = random.Random(seed)
    return {rng.randbytes(16): rng.randbytes(rng.choice((1, 4096, 70_000, 300_001))) for _ in range(n)}


def raw(url: str) -> tuple[Any, list[str]]:
    """The bucket, and the names of its blocks."""
    bucket = "s3://" + url.removeprefix("s3://").split("/")[0]
    store = obstore.store.from_url(bucket, client_options={"allow_http": True})
    names = sorted(meta["path"] for page in obstore.list(store) for meta in page)
    return store, [name for name in names if not name.endswith("/identity")]


def test_blocks_come_back_after_a_start_and_to_others(url: str) -> None:
    blocks = some(20)
    with make(url) as tier:
        assert tier.keys() == []
        put(tier, blocks)
        assert set(tier.take_changes().sealed) == set(blocks)
        assert {key: read(tier, key) for key in blocks} == blocks
        assert tier.stats().live_bytes == sum(map(len, blocks.values()))
        assert tier.stats().counts.stored == tier.stats().counts.hits == len(blocks)
        assert done(tier.put(next(iter(blocks)), b"the same, says its key"))
    with make(url) as tier, make(url, identity="another layout") as other:
        assert set(tier.keys()) == set(tier.take_changes().sealed) == set(blocks)
        views = [(key, memoryview(bytearray(tier.length(key) or 0))) for key in blocks]
        assert all(done(future) for future in tier.get_many_into(views))
        assert {key: bytes(view) for key, view in views} == blocks
        assert other.keys() == []
        put(other, {key: data[::-1] for key, data in blocks.items()})
        assert {key: read(tier, key) for key in blocks} == blocks
    _, names = raw(url)
    assert len(names) == 2 * len(blocks)
    assert all(name.startswith("some/prefix/") and len(name.split("/")) == 4 for name in names)


def test_what_is_not_the_block_is_never_given_out(url: str) -> None:
    blocks = some(6, seed=2)
    flipped, cut, longer, swapped, deleted, whole = blocks
    with make(url) as tier:
        put(tier, blocks)
        store, names = raw(url)
        path = {key: next(name for name in names if name.endswith(key.hex())) for key in blocks}
        body = bytearray(obstore.get(store, path[flipped]).bytes())
        body[random.Random(3).randrange(len(body) - 8)] ^= 16
        obstore.put(store, path[flipped], bytes(body))
        obstore.put(store, path[cut], bytes(obstore.get(store, path[cut]).bytes())[:-1])
        obstore.put(store, path[longer], bytes(obstore.get(store, path[longer]).bytes()) + b"x")
        obstore.put(store, path[swapped], bytes(obstore.get(store, path[whole]).bytes()))
        obstore.delete(store, path[deleted])
        tier.take_changes()
        found = {key: read(tier, key) for key in blocks}
        assert found == dict.fromkeys(blocks) | {whole: blocks[whole]}
        assert tier.keys() == [whole]
        assert set(tier.take_changes().removed) == set(blocks) - {whole}
        counts = tier.stats().counts
        assert (counts.corrupt, counts.misses, counts.io_errors) == (4, 1, 0)
        assert done(tier.flush())
    assert raw(url)[1] == [path[whole]]


def test_strange_objects_are_passed_over(url: str) -> None:
    blocks = some(2)
    with make(url) as tier:
        put(tier, blocks)
    store, names = raw(url)
    folder = names[0].rpartition("/")[0]
    for name in ("readme", "ff" * 15, "FF" * 16, "ff" * 16):
        obstore.put(store, f"{folder}/{name}", b"short")
    with make(url) as tier:
        assert set(tier.keys()) == set(blocks)


def test_removed_is_removed_for_every_start(url: str) -> None:
    blocks = some(10, seed=4)
    gone, kept = list(blocks)[:6], list(blocks)[6:]
    with make(url) as tier:
        put(tier, blocks)
        tier.take_changes()
        removing = tier.remove([*gone, b"never here......"])
        assert not any(tier.contains(key) for key in gone)
        assert set(tier.take_changes().removed) == set(gone)
        assert done(removing)
        assert done(tier.remove(gone)), "missing ones too"
        assert tier.stats().blocks == len(kept)
        put(tier, {gone[0]: blocks[gone[0]]})
    with make(url) as tier:
        assert set(tier.keys()) == {*kept, gone[0]}


def test_puts_and_removals_of_the_same_keys_at_once(url: str) -> None:
    """Whoever heard that a key is removed, and has not put it since, finds it in no life."""
    keys = [bytes([n]) * 16 for n in range(6)]
    last: dict[bytes, str] = {}

    def work(mine: list[bytes], seed: int, tier: ObjectTier) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            key = rng.choice(mine)
            if rng.randrange(2):
                tier.put(key, key * 500)
                last[key] = "put"
            else:
                tier.put(key, key * 500)
                assert done(tier.remove([key]))
                last[key] = "removed"

    with make(url) as tier:
        threads = [threading.Thread(target=work, args=(keys[n::3], n, tier)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done(tier.flush())
        here = set(tier.keys())
        assert here == {key for key in keys if last.get(key) == "put"}
    with make(url) as tier:
        assert set(tier.keys()) == here
        assert all(read(tier, key) == key * 500 for key in here)


@pytest.mark.slow
def test_a_dead_or_frozen_server_costs_misses_and_nobody_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "REST_S", 0.0)
    blocks = some(4, seed=6)
    server = S3()
    try:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{server.bucket()}"
        tier = make(url, timeout_s=1.0, connect_s=0.5, retries=1)
        put(tier, blocks)
        key, *rest = blocks
        os.kill(server.process.pid, signal.SIGSTOP)
        assert not any(done(future) for future in tier.put_many(list(some(3, seed=7).items())))
        assert read(tier, key) is None
        assert tier.contains(key), "no answer is not a miss for good"
        os.kill(server.process.pid, signal.SIGCONT)
        until = time.monotonic() + WAIT_S
        while read(tier, key) != blocks[key]:
            assert time.monotonic() < until
        server.close()
        assert read(tier, key) is None
        assert not done(tier.put(b"k" * 16, b"data"))
        assert not done(tier.remove(rest))
        assert not any(tier.contains(each) for each in rest)
        assert tier.stats().counts.io_errors >= 3
        with pytest.raises(Unavailable, match="object store"):
            make(url, timeout_s=1.0, connect_s=0.5, retries=0)
        tier.close()
    finally:
        server.close()


def test_after_a_failure_it_is_left_alone(url: str) -> None:
    now = [0]
    with ObjectTier(ObjectConfig(url=url, identity="x"), clock=lambda: now[0]) as tier:
        put(tier, {b"k" * 16: b"data"})
        tier._failed("get", OSError("as told"))
        assert tier.stats().resting
        assert read(tier, b"k" * 16) is None and not done(tier.put(b"j" * 16, b"data"))
        assert tier.stats().counts.resting == 2
        now[0] += int(tier_module.REST_S * 1e9) + 1
        assert read(tier, b"k" * 16) == b"data" and done(tier.put(b"j" * 16, b"data"))


def test_bounds_deadlines_and_refusals(url: str) -> None:
    tier = make(url, readers=1, writers=1, queue_ops=2, queue_bytes=100_000)
    futures = tier.put_many([(bytes([n]) * 16, bytes(40_000)) for n in range(8)])
    stored = [done(future) for future in futures]
    assert stored[:2] == [True, True] and not all(stored)
    assert tier.stats().counts.busy == stored.count(False)
    assert not done(tier.put(b"late" * 4, b"data", deadline_ns=time.monotonic_ns() - 1))
    assert tier.stats().counts.expired == 1
    key = bytes(16)
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: tier.put(b"short", b"data"), "key"),
        (lambda: tier.put(b"k" * 16, b""), "data"),
        (lambda: tier.get_into(key, memoryview(bytearray(7))), "into"),
        (lambda: tier.get_into(key, memoryview(bytes(40_000))), "into"),
    ]
    for call, field in refusals:
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert refused.value.field == field
    tier.close()
    tier.close()
    assert not done(tier.put(b"k" * 16, b"data")) and not done(tier.remove([key]))
    assert read(tier, key) is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("object ")]


def test_what_cannot_be_a_store_is_refused_by_name(s3: S3) -> None:
    for bad in ("nowhere", "what://bucket", f"s3://{'no-such-bucket'}/x"):
        with pytest.raises(ConfigError) as refused:
            make(bad)
        assert refused.value.field == "url" and bad in refused.value.message
    for name in ("readers", "writers", "queue_ops", "timeout_s"):
        with pytest.raises(ConfigError, match=name):
            make("s3://bucket", **{name: 0})

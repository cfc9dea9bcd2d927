"""From the SSD tier to a real object store: what is worth it arrives, nothing waits, what is removed stays removed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.tiers.object_store import Demotion, ObjectConfig, ObjectTier
from kvmesh.tiers.ssd import SsdTier
from tests.support.s3_server import S3, s3_server
from tests.support.ssd_blocks import BUCKET, FaultyDisk, config, settle

WAIT_S = 30.0
NBYTES = 20_000


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


class Chain:
    """An SSD tier with an object tier below, and what the node's books hear."""

    def __init__(self, s3: S3, path: Path, *, uses: int = 1, disk: FaultyDisk | None = None, **changed: Any) -> None:
        self.url = f"s3://{s3.bucket()}/kv"
        self.object = self.open_object()
        self.moving: set[bytes] = set()
        self.arrived = threading.Condition()
        self.demotion = Demotion(lambda: self.object, self._moving, **changed)
        self.ssd = SsdTier(config(path, demote_uses=uses, capacity_bytes=6 * BUCKET), below=self.demotion, disk=disk)
        self.blocks: dict[bytes, bytes] = {}
        self.rng = random.Random(5)

    def _moving(self, key: bytes, over: bool) -> None:
        with self.arrived:
            (self.moving.discard if over else self.moving.add)(key)
            self.arrived.notify_all()

    def quiet(self) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: not self.moving, WAIT_S), "a block is on its way for ever"
        assert self.demotion.waiting_bytes == 0

    def open_object(self) -> ObjectTier:
        return ObjectTier(ObjectConfig(url=self.url, identity="one", timeout_s=5.0))

    def put(self, n: int) -> list[bytes]:
        """So many new blocks of random bytes; those that the SSD took."""
        new = {self.rng.randbytes(16): self.rng.randbytes(NBYTES) for _ in range(n)}
        self.blocks |= new
        return [key for key, data in new.items() if self.ssd.put(key, data).result(WAIT_S)]

    def fill(self) -> None:
        """Everything that lies on the SSD now is evicted."""
        before = set(self.ssd.keys())
        while before & set(self.ssd.keys()):
            self.put(20)
            settle(self.ssd)

    def read(self, tier: ObjectTier | SsdTier, key: bytes) -> bytes | None:
        if tier.length(key) is None:
            return None
        into = bytearray(NBYTES)
        return bytes(into) if tier.get_into(key, memoryview(into)).result(WAIT_S) else None

    def remove(self, keys: list[bytes]) -> bool:
        """In the order in which a node's front tells its ranks."""
        above = self.ssd.remove(keys)
        self.demotion.remove(keys)
        below = self.object.remove(keys)
        return above.result(WAIT_S) and below.result(WAIT_S)

    def close(self) -> None:
        self.ssd.close()
        self.object.close()


@pytest.fixture
def chain(s3: S3, tmp_path: Path) -> Iterator[Chain]:
    made = Chain(s3, tmp_path)
    yield made
    made.close()


def test_what_was_used_goes_down_and_nothing_else(chain: Chain) -> None:
    keys = chain.put(30)
    read, told, never = keys[:10], keys[10:20], keys[20:]
    for key in read:
        assert chain.read(chain.ssd, key) == chain.blocks[key]
    for key in told:
        chain.ssd.used(key, 2)
    settle(chain.ssd)
    for _ in range(5):  # what was read survives some rounds on the SSD itself
        chain.fill()
    chain.quiet()
    assert {*read, *told} <= set(chain.object.keys()) and not set(never) & set(chain.object.keys())
    assert {key: chain.read(chain.object, key) for key in (*read, *told)} == {
        key: chain.blocks[key] for key in (*read, *told)
    }
    assert chain.demotion.demoted == len(chain.object.keys()) and chain.demotion.dropped == 0


def test_with_no_uses_asked_for_everything_goes_down(s3: S3, tmp_path: Path) -> None:
    chain = Chain(s3, tmp_path, uses=0)
    keys = chain.put(120)
    settle(chain.ssd)
    chain.quiet()
    evicted = set(keys) - set(chain.ssd.keys())
    assert evicted and evicted == set(chain.object.keys())
    assert all(chain.read(chain.object, key) == chain.blocks[key] for key in evicted)
    chain.close()


def test_a_full_queue_drops_and_counts_and_nobody_waits(s3: S3, tmp_path: Path) -> None:
    chain = Chain(s3, tmp_path, uses=0, max_bytes=3 * NBYTES)
    chain.put(40)
    os.kill(s3.process.pid, signal.SIGSTOP)
    try:
        chain.put(120)  # each is acknowledged by the SSD while the store below does not answer
        settle(chain.ssd)
        evicted = len(chain.blocks) - len(chain.ssd.keys())
        assert chain.demotion.waiting_bytes == 3 * NBYTES
        assert chain.demotion.dropped == evicted - 3 - chain.demotion.demoted > 0
    finally:
        os.kill(s3.process.pid, signal.SIGCONT)
    chain.quiet()
    assert len(chain.object.keys()) == chain.demotion.demoted >= 3
    chain.close()


def test_what_is_removed_on_its_way_does_not_arrive(s3: S3, tmp_path: Path) -> None:
    disk = FaultyDisk()
    chain = Chain(s3, tmp_path, uses=0, disk=disk)
    chain.put(40)
    settle(chain.ssd)
    disk.gate["read"] = threading.Event()
    filler = threading.Thread(target=chain.put, args=(120,))
    filler.start()
    assert disk.waiting.acquire(timeout=WAIT_S), "the first block that goes down is being read"
    (going,) = chain.moving
    removed = chain.ssd.remove([going])
    chain.demotion.remove([going])
    assert chain.object.remove([going]).result(WAIT_S)
    disk.gate.pop("read").set()
    filler.join(WAIT_S)
    assert removed.result(WAIT_S)
    settle(chain.ssd)
    chain.quiet()
    assert going not in chain.object.keys() and len(chain.object.keys()) > 10  # noqa: SIM118
    chain.object.close()
    with chain.open_object() as again:
        assert not again.contains(going) and len(again.keys()) > 10, "nor after a start"
    chain.ssd.close()


def test_what_is_removed_while_it_is_put_is_deleted(s3: S3, tmp_path: Path) -> None:
    chain = Chain(s3, tmp_path, uses=0)
    chain.put(40)
    os.kill(s3.process.pid, signal.SIGSTOP)
    try:
        chain.put(120)
        settle(chain.ssd)
        going = sorted(chain.moving)
        assert going
        removing = threading.Thread(target=lambda: results.append(chain.remove(going)))
        results: list[bool] = []
        removing.start()
    finally:
        os.kill(s3.process.pid, signal.SIGCONT)
    removing.join(WAIT_S)
    assert results == [True]
    chain.quiet()
    assert not set(going) & set(chain.object.keys())
    chain.object.close()
    with chain.open_object() as again:
        assert not set(going) & set(again.keys())
    chain.ssd.close()


def test_damage_on_the_ssd_does_not_go_down(s3: S3, tmp_path: Path) -> None:
    chain = Chain(s3, tmp_path, uses=0)
    keys = chain.put(6)
    settle(chain.ssd)
    bucket = next(tmp_path.glob("bucket-*.kv"))
    whole = bucket.read_bytes()
    at = (whole.index(keys[3]) // 4096 + 1) * 4096 + 100
    with open(bucket, "r+b") as file:
        file.seek(at)
        file.write(bytes([whole[at] ^ 4]))
    chain.fill()
    chain.quiet()
    assert set(keys) - set(chain.object.keys()) == {keys[3]}
    assert chain.demotion.dropped == 1 and chain.ssd.stats().counts.corrupt == 1
    assert chain.read(chain.object, keys[2]) == chain.blocks[keys[2]]
    chain.close()


def test_a_put_that_may_still_arrive_is_not_forgotten(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(s3, tmp_path, uses=0)

    def broken(key: bytes, data: memoryview) -> None:
        raise OSError("no answer")

    monkeypatch.setattr(chain.object._client, "put", broken)
    try:
        chain.put(120)
        settle(chain.ssd)
        deadline = time.monotonic() + WAIT_S  # looked at again and again: nobody is told when the last one is dropped
        while chain.demotion.waiting_bytes or not chain.demotion.dropped:
            assert time.monotonic() < deadline, (chain.demotion.waiting_bytes, chain.demotion.dropped)
            time.sleep(0.01)
        assert chain.moving and all(chain.object.may_hold(key) for key in chain.moving)
        assert chain.demotion.demoted == 0
        assert chain.remove(list(chain.moving))
        assert not any(chain.object.may_hold(key) for key in chain.moving)
    finally:
        chain.close()

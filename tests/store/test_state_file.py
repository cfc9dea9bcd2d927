"""What the only master keeps in a file: over a restart, a kill at any moment, and from nobody else."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError, StaleTerm, Unavailable
from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.services.store import durable, main
from kvmesh.services.store.durable import StateFile
from kvmesh.services.store.policy.tombstones import Tombstones, first_seq
from tests.store.test_redis_lease import keeps_and_fences
from tests.store.test_service import config
from tests.support.services import running
from tests.support.store.mesh import TIMEOUT, joining

KEYS = [b"tag1" + i.to_bytes(12, "big") for i in range(4)]


async def test_books_in_a_file_are_those_of_the_next_life(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    books = StateFile(path)
    await keeps_and_fences(books)
    with pytest.raises(StaleTerm, match="term=3"):
        await books.put(durable.QUOTA, {b"q": b"stale"}, 3)
    before = await books.load()
    with pytest.raises(ConfigError, match=r"state_path='.*': database is locked"):
        StateFile(path)
    await books.close()
    again = StateFile(path)
    assert again.term == 4 and again.begin(9) == before and os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(StaleTerm):
        await again.delete(durable.QUOTA, [b"q"], 8)
    await again.close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version=77")
    other.close()
    with pytest.raises(ConfigError, match="it has format 77"):
        StateFile(path)


async def test_a_disk_that_refuses_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = StateFile(str(tmp_path / "state"))
    books.begin(1)
    monkeypatch.setattr(durable, "FILE_WRITE_S", 0.05)
    held = books._thread.submit(threading.Event().wait, 0.5)
    with pytest.raises(Unavailable, match="took more than"):
        await books.put(durable.QUOTA, {b"q": b"1"}, 1)
    held.result()
    monkeypatch.undo()
    books._db.execute("PRAGMA max_page_count=1")
    with pytest.raises(Unavailable, match="full"):
        await books.put(durable.NAME, {bytes([i]) * 4000: b"" for i in range(200)}, 1)
    assert (await books.load())[durable.NAME] == {}, "all or nothing"
    await books.close()


WRITER = """
import asyncio, itertools, sys
from kvmesh.services.store.durable import StateFile
async def main():
    books = StateFile(sys.argv[1])
    books.begin(books.term + 1)
    for n in itertools.count():
        some = {n.to_bytes(8, "big") + bytes([i]): bytes([i]) * 500 for i in range(20)}
        await books.put("name", some, books.term)
        print(n, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("seed", range(3))
def test_what_was_kept_is_there_after_a_kill(tmp_path: Path, seed: int) -> None:
    path, last = str(tmp_path / "state"), -1
    child = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child:
        for _ in range(random.Random(seed).randrange(1, 60)):
            last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        last = max([last, *map(int, child.stdout.read().splitlines())])
    books = StateFile(path)
    kept = books.begin(books.term + 1)["name"]
    whole = {n.to_bytes(8, "big") + bytes([i]): bytes([i]) * 500 for n in range(last + 1) for i in range(20)}
    assert {key: kept[key] for key in whole} == whole
    assert len(kept) in (len(whole), len(whole) + 20), "half a write"


async def test_names_quotas_and_removals_outlive_the_only_master(tmp_path: Path) -> None:
    settings: Any = config(state_path=str(tmp_path / "state"))
    async with running(main.run, settings) as master, channels.connect(master.address) as channel:
        stub: Any = store_pb2_grpc.StoreMasterStub(channel)
        names = [store_pb2.NamedKey(name=f"n{i}", key=key) for i, key in enumerate(KEYS)]
        await stub.Bind(store_pb2.BindRequest(namespace="ns", names=names), timeout=TIMEOUT)
        quota = store_pb2.Quota(tag=b"tag1", blocks=7, name="t")
        await stub.SetQuota(store_pb2.SetQuotaRequest(quota=quota), timeout=TIMEOUT)
        first = await stub.Remove(store_pb2.RemoveRequest(keys=KEYS[1]), timeout=TIMEOUT)
        term = (await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT)).term
    async with running(main.run, settings) as master, channels.connect(master.address) as channel:
        stub = store_pb2_grpc.StoreMasterStub(channel)
        asked = store_pb2.ResolveRequest(namespace="ns", names=["n0", "n1", "n2"])
        assert (await stub.Resolve(asked, timeout=TIMEOUT)).keys == KEYS[0] + bytes(16) + KEYS[2]
        quotas = await stub.ListQuotas(store_pb2.ListQuotasRequest(), timeout=TIMEOUT)
        assert [each.quota for each in quotas.quotas] == [quota]
        told = (await stub.Join(joining("a"), timeout=TIMEOUT)).tombstones
        assert [(each.seq, each.keys) for each in told] == [(first.seq, KEYS[1])]
        later = await stub.Remove(store_pb2.RemoveRequest(keys=KEYS[0]), timeout=TIMEOUT)
        assert later.seq > first.seq
        assert (await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT)).term > term


def test_two_lives_in_one_second_number_removals_one_after_the_other() -> None:
    """Else a node that has applied one of the first life's would take one of the second's for applied."""
    second = 200_000_000
    lives = [(second, 0.1), (second, 0.1004), (second, 0.999), (second, 1.001), (second + 1, 1.2)]
    books = [Tombstones(wall_ns=int((second + at) * 10**9)) for _, at in lives]
    given = [made.add(term, KEYS[:1], b"", 0.0).seq for made, (term, _) in zip(books, lives, strict=True)]
    assert given == sorted(set(given)) and [seq >> 32 for seq in given] == [term for term, _ in lives]
    assert first_seq(3, int((second + 0.5) * 10**9)) == 3 << 32, "terms that Redis gives"

"""Look-ups over the fast path: the same answers and the same errors as over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from kvmesh.errors import InvalidRequest, KvmeshError, NotLeader, Unavailable
from kvmesh.rpc import channels
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker, ServiceClient
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.server import Server
from kvmesh.services.store import main
from kvmesh.services.store.config import StoreConfig
from kvmesh.storeclient.directory import FAST, SERVICE, Directory
from tests.support.services import until
from tests.support.store.mesh import TIMEOUT, Node, keys


class Both:
    """One master, and a client of each path to it."""

    def __init__(self, master: main.Master, address: str) -> None:
        self.master, self.address = master, address
        self.fast, self.plain = ServiceClient(SERVICE, FAST), ServiceClient(SERVICE)
        self.fast.connect(address)
        self.plain.connect(address)

    async def connected(self) -> None:
        async def there() -> bool:
            self.fast.seek_fastpath()
            return self.fast.via_fastpath

        await until(there)

    async def ask(self, name: str, request: Message) -> Any:
        """The answer, or the error, that both paths give."""
        assert self.fast.via_fastpath
        by_fast, by_grpc = [await _outcome(client, name, request) for client in (self.fast, self.plain)]
        assert self.fast.via_fastpath
        assert type(by_fast) is type(by_grpc)
        if isinstance(by_fast, KvmeshError):
            assert vars(by_fast) == vars(by_grpc)
        else:
            assert by_fast == by_grpc
        return by_fast


async def _outcome(client: ServiceClient, name: str, request: Message) -> Any:
    try:
        return await client.call(name, request, TIMEOUT)
    except KvmeshError as error:
        return error


@contextlib.asynccontextmanager
async def both(config: StoreConfig) -> AsyncIterator[Both]:
    master, server = main.Master(config), Server("127.0.0.1", 0)
    master.add_to(server)
    door = master.door()
    door.add_to(server)
    await server.start()
    await door.open("127.0.0.1")
    made = Both(master, server.address)
    try:
        await made.connected()
        yield made
    finally:
        await made.fast.close()
        await made.plain.close()
        await door.close()
        await master.close()
        await server.stop(0)


async def test_both_paths_answer_alike(tmp_path: Path) -> None:
    known = keys(301)[1:]  # the first is 0, which is no key of a name
    async with both(StoreConfig(state_path=str(tmp_path / "state"))) as paths:
        async with channels.connect(paths.address) as channel:
            node = Node(channel, "a")
            await node.join()
            node.seal(known[:200])
            await node.announce()
        for grouped in (False, True):
            for some in (known[:1], known[250:251], known, []):
                answer = await paths.ask("Find", pb.FindRequest(keys=b"".join(some), grouped=grouped))
                held = set(some) & set(known[:200])
                if held:
                    assert [one.member.store_id for one in answer.holders] == ["a"]
                else:
                    assert not answer.holders or isinstance(answer, KvmeshError)
        for wrong in (b"short", bytes(16 * 5000)):
            assert isinstance(await paths.ask("Find", pb.FindRequest(keys=wrong)), InvalidRequest)
        names = [pb.NamedKey(name=f"n{i}", key=key) for i, key in enumerate(known[:3])]
        await paths.plain.call("Bind", pb.BindRequest(names=names), TIMEOUT)
        resolve = pb.ResolveRequest(names=["n0", "n1", "n2", "nothing"])
        assert (await paths.ask("Resolve", resolve)).keys == b"".join(known[:3]) + bytes(16)
        assert isinstance(await paths.ask("Resolve", pb.ResolveRequest(names=[""])), InvalidRequest)
        # What is kept in the file ends within a deadline, for which a call over the fast path needs a task of its own.
        unbind = pb.ResolveRequest(names=["n0"], unbind=True)
        assert (await paths.fast.call("Resolve", unbind, TIMEOUT)).keys == known[0]
        assert (await paths.ask("Resolve", resolve)).keys == bytes(16) + b"".join(known[1:3]) + bytes(16)


async def test_who_does_not_lead_says_so_by_both_paths() -> None:
    async with both(StoreConfig()) as paths:
        await paths.master.leadership.close()
        for name, request in (("Find", pb.FindRequest(keys=keys(1)[0])), ("Resolve", pb.ResolveRequest(names=["n"]))):
            assert isinstance(await paths.ask(name, request), NotLeader)


async def test_a_clients_look_ups_go_by_the_fast_path_and_over_grpc_when_it_is_gone() -> None:
    async with both(StoreConfig()) as paths:
        directory = Directory(paths.address)
        try:

            async def by_fast_path() -> bool:
                await directory.find(keys(1), TIMEOUT)
                return directory._master.via_fastpath

            await until(by_fast_path)
            counted = main.names.STORE_DOOR_CALLS.labels(method="Find")
            before = counted._value.get()
            assert (await directory.find(keys(2), TIMEOUT))[0] == [[], []]
            assert await directory.resolve("", ["nobody"], TIMEOUT) == [None]
            assert counted._value.get() == before + 1
        finally:
            await directory.close()
    assert {"Find", "Resolve"} == set(FAST)


async def test_a_master_without_a_fast_path_is_asked_over_grpc() -> None:
    master, server = main.Master(StoreConfig()), Server("127.0.0.1", 0)
    master.add_to(server)
    await server.start()
    client = LeaderClient(SERVICE, LeaderTracker(server.address), FAST)
    try:
        for _ in range(3):
            answer = await client.call("Find", pb.FindRequest(keys=keys(1)[0], grouped=True), TIMEOUT)
            assert len(answer.groups) == 1 and not client.via_fastpath
    finally:
        await client.close()
        await master.close()
        await server.stop(0)
    with pytest.raises(Unavailable):
        await client.call("Find", pb.FindRequest(keys=keys(1)[0]), 0.3)
    await client.close()

"""A whole mesh of processes that speak mTLS, each with a certificate of its own role and name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvmesh.cli.up import serving
from kvmesh.errors import KvmeshError, PermissionDenied, Unavailable
from kvmesh.rpc import security
from kvmesh.rpc.authorisation import ALL_IDENTITIES
from kvmesh.rpc.certificates import Certificates, make_role_certificates
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import (
    common_pb2,
    conductor_pb2,
    conductor_pb2_grpc,
    decode_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)
from kvmesh.rpc.security import PLAINTEXT, Security, TlsFiles
from kvmesh.rpc.status import from_rpc_error
from tests.support.mesh.client import until
from tests.support.mesh.direct import Direct, blocks_at
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [(i * 31 + i * i) % 200 + 20 for i in range(150)]


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Certificates]]:
    """The certificates of the mesh. This process has one with every role."""
    made: dict[str, Certificates] = {}
    before = security.current()

    def make(folder: Path, wanted: dict[str, Any], hosts: list[str]) -> dict[str, Certificates]:
        made.update(make_role_certificates(folder, {**wanted, "all": ALL_IDENTITIES}, hosts))
        security.use(Security.load(made["all"].files))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvmesh.rpc.certificates.make_role_certificates", make)
        yield made
    security.use(before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure(
    made: dict[str, Certificates], demo_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    async with running_mesh(demo_path, tmp_path_factory.mktemp("secure"), prefill=2, decode=1, tls=True) as running:
        yield running


async def test_blocks_travel_and_tokens_stay_the_same(secure: Running) -> None:
    """Prefill A → node store → prefill B → decode: every RPC on the way is encrypted."""
    direct = await Direct.of(secure)
    first = await direct.generate(PROMPT, 12, prefill="prefill-0", decode="decode-0")
    assert first.error is None
    keys = set(direct.keys(PROMPT))

    async def sealed() -> bool:
        return keys <= await blocks_at(secure.mesh.addresses["prefill-0"])

    await until(sealed, "the prompt's blocks at prefill-0")
    pulls = [("prefill-0", 0, len(keys))]
    again = await direct.generate(PROMPT, 12, prefill="prefill-1", decode="decode-0", pulls=pulls)
    assert again.error is None
    assert again.tokens == first.tokens
    assert (first.cached_tokens, again.cached_tokens) == (0, 128)
    assert again.timings is not None
    assert again.timings.pulled_tokens == 128
    through_the_gateway = await secure.client.generate(PROMPT, 12, ignore_eos=True)
    assert through_the_gateway.tokens == first.tokens
    await secure.settled()


async def test_up_sees_that_it_serves_with_the_meshs_own_certificates(secure: Running) -> None:
    """The process of `kvmesh up` is no member itself: without the mesh's certificates every question is refused."""

    def ask() -> list[str]:
        return serving.wait_serving(secure.mesh, serving.PATIENCE_S, threading.Event())

    before = security.use(PLAINTEXT)
    try:
        assert await asyncio.to_thread(ask) == []
        assert security.current() is PLAINTEXT
    finally:
        security.use(before)


async def test_strangers_stay_outside(secure: Running, made: dict[str, Certificates]) -> None:
    async def ask(name: str, tls: Security) -> grpc.aio.AioRpcError | None:
        async with connect(secure.mesh.addresses[name], tls=tls) as channel:
            try:
                if name == "store":
                    stub = store_pb2_grpc.StoreMasterStub(channel)
                    await stub.ListMembers(store_pb2.ListMembersRequest(), timeout=15)
                else:
                    await decode_pb2_grpc.DecodeStub(channel).GetPools(common_pb2.GetPoolsRequest(), timeout=15)
            except grpc.aio.AioRpcError as err:
                return err
        return None

    unknown = Security.load(TlsFiles(tls_ca=str(made["all"].ca)))
    for name in ("store", "decode-0"):
        assert await ask(name, security.current()) is None
        for tls in (PLAINTEXT, unknown):
            refused = await ask(name, tls)
            assert refused is not None
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
            assert isinstance(from_rpc_error(refused), Unavailable)


async def test_an_instance_speaks_for_itself_alone_and_gives_no_orders(
    secure: Running, made: dict[str, Certificates]
) -> None:
    one = Security.load(made["prefill-1"].files)
    ref = common_pb2.InstanceRef(instance_id="prefill-0", incarnation=1)
    refused: list[KvmeshError] = []
    async with (
        connect(secure.mesh.addresses["store"], tls=one) as store,
        connect(secure.mesh.addresses["conductor"], tls=one) as conductor,
        connect(secure.mesh.addresses["prefill-0"], tls=one) as other,
    ):
        master, rank = store_pb2_grpc.StoreMasterStub(store), conductor_pb2_grpc.ConductorStub(conductor)
        member = store_pb2.Member(instance=ref)
        for call in (
            master.Join(store_pb2.JoinRequest(member=member), timeout=15),
            master.Beat(store_pb2.BeatRequest(instance=ref, term=2**31 - 1), timeout=15),
            master.Leave(store_pb2.LeaveRequest(instance=ref), timeout=15),
            master.Drain(store_pb2.DrainRequest(instance_id="prefill-0"), timeout=15),
            master.Remove(store_pb2.RemoveRequest(prefix=b"a"), timeout=15),
            rank.Heartbeat(conductor_pb2.HeartbeatRequest(instance=ref), timeout=15),
            rank.Cordon(conductor_pb2.CordonRequest(instance_id="prefill-0"), timeout=15),
            instance_pb2_grpc.InstanceStub(other).SetRole(instance_pb2.SetRoleRequest(), timeout=15),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            refused.append(from_rpc_error(caught.value))
    assert [type(error) for error in refused] == [PermissionDenied] * 8
    assert (await secure.client.generate(PROMPT, 4)).error is None


async def test_an_instance_that_dies_comes_back_into_the_secure_mesh(secure: Running) -> None:
    old = secure.pid("prefill-0")
    secure.kill("prefill-0")
    await secure.restarted("prefill-0", old)
    await secure.ready("prefill-0")
    answer = await secure.client.generate(PROMPT, 4)
    assert answer.error is None

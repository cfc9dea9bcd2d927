"""A whole mesh of processes that speak mTLS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from kvmesh.cli.up import serving
from kvmesh.errors import Unavailable
from kvmesh.rpc import security
from kvmesh.rpc.certificates import Certificates, make_certificates
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2, decode_pb2_grpc, store_pb2, store_pb2_grpc
from kvmesh.rpc.security import PLAINTEXT, Security, TlsFiles
from kvmesh.rpc.status import from_rpc_error
from tests.support.mesh.client import until
from tests.support.mesh.direct import Direct, blocks_at
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [(i * 31 + i * i) % 200 + 20 for i in range(150)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Certificates]:
    """This process becomes a member of the mesh, too."""
    made = make_certificates(tmp_path_factory.mktemp("tls"))
    before = security.use(Security.load(made.files))
    yield made
    security.use(before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure(
    made: Certificates, demo_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    files = {"tls_cert": str(made.cert), "tls_key": str(made.key), "tls_ca": str(made.ca)}
    async with running_mesh(demo_path, tmp_path_factory.mktemp("secure"), prefill=2, decode=1, **files) as running:
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


async def test_strangers_stay_outside(secure: Running, made: Certificates) -> None:
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

    unknown = Security.load(TlsFiles(tls_ca=str(made.ca)))
    for name in ("store", "decode-0"):
        assert await ask(name, security.current()) is None
        for tls in (PLAINTEXT, unknown):
            refused = await ask(name, tls)
            assert refused is not None
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
            assert isinstance(from_rpc_error(refused), Unavailable)


async def test_an_instance_that_dies_comes_back_into_the_secure_mesh(secure: Running) -> None:
    old = secure.pid("prefill-0")
    secure.kill("prefill-0")
    await secure.restarted("prefill-0", old)
    await secure.ready("prefill-0")
    answer = await secure.client.generate(PROMPT, 4)
    assert answer.error is None

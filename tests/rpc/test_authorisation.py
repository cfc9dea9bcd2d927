"""Who may call what: the table against the protos, the decision, and every method by every role over real listeners."""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvmesh.errors import ConfigError, KvmeshError, PermissionDenied, TlsFailed, Unavailable
from kvmesh.rpc import authorisation, pb, security, status
from kvmesh.rpc.authorisation import (
    ALL_IDENTITIES,
    PERMISSIONS,
    ROLE_NAME,
    CallerRole,
    Identity,
    RpcCaller,
    ServerRole,
    check,
    why_no_kv,
    why_not,
)
from kvmesh.rpc.certificates import Certificates, make_role_certificates
from kvmesh.rpc.channels import connect
from kvmesh.rpc.fastpath.client import dial
from kvmesh.rpc.fastpath.server import FastServer
from kvmesh.rpc.fastpath.tickets import MAX_TICKETS, VALID_S, CallerTickets
from kvmesh.rpc.pb import prefill_pb2, prefill_pb2_grpc, store_pb2
from kvmesh.rpc.security import Security
from kvmesh.rpc.server import Server
from kvmesh.rpc.traces import SERVICE as TRACES

ROOT = Path(__file__).resolve().parents[2]
NAME = "one"
WHO = {
    **{str(role): (Identity(role, NAME),) for role in CallerRole},
    "nobody": (),
    "all": ALL_IDENTITIES,
    "other": (Identity(CallerRole.INSTANCE, "two"),),
}


def services() -> Iterator[ServiceDescriptor]:
    for module in pkgutil.iter_modules(pb.__path__):
        if module.name.endswith("_pb2"):
            yield from importlib.import_module(f"{pb.__name__}.{module.name}").DESCRIPTOR.services_by_name.values()


def methods(public: bool = False) -> Iterator[MethodDescriptor]:
    for service in services():
        for method in service.methods:
            if PERMISSIONS[service.full_name][method.name].public is public:
                yield method


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def empty(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.input_type)()


def expected(who: str, method: MethodDescriptor) -> bool:
    """What the table says of a call that names no instance."""
    permission = PERMISSIONS[method.containing_service.full_name][method.name]
    if permission.roles is None:
        return True
    held = [one for one in WHO[who] if one.role in permission.roles]
    bound = permission.claim and all(one.role in ("instance", "store") and one.name != "*" for one in held)
    return bool(held) and not bound


# ── the table and the decision ────────────────────────────────────────────────────────────────────


def test_the_table_has_every_method_and_no_other() -> None:
    """A new method without an entry would be refused to everybody."""
    found = {one.full_name: {method.name for method in one.methods} for one in services()}
    for file in (health_pb2, reflection_pb2):
        for one in file.DESCRIPTOR.services_by_name.values():
            found[one.full_name] = {method.name for method in one.methods}
    assert {service: set(entries) for service, entries in PERMISSIONS.items()} == found
    named = {service for names in authorisation.LISTENERS.values() for service in names}
    listed = {service if "." in service else f"kvmesh.v1.{service}" for service in named}
    assert listed == {one.full_name for one in services()}


def test_claims_are_fields_of_requests() -> None:
    for method in [*methods(), *methods(public=True)]:
        permission = PERMISSIONS[method.containing_service.full_name][method.name]
        if permission.claim:
            assert permission.claimed(empty(method)) == "", path_of(method)


def test_every_listener_of_the_mesh_is_a_guarded_one() -> None:
    made = re.compile(r"grpc\.aio\.server\(|grpc\.server\(")
    found = [
        str(path.relative_to(ROOT))
        for folder in ("kvmesh", "services")
        for path in (ROOT / folder).rglob("*.py")
        if made.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["kvmesh/rpc/server.py"]


BEAT = "/kvmesh.v1.StoreMaster/Beat"
HANDOFF = "/kvmesh.v1.Prefill/Handoff"


@pytest.mark.parametrize(
    ("transport", "held", "path", "claimed", "reason"),
    [
        ("grpc", None, "/kvmesh.v1.StoreMaster/SetQuota", "", ""),
        ("tcp", None, BEAT, "one", ""),
        ("grpc", WHO["instance"], BEAT, "one", ""),
        ("unix", WHO["instance"], BEAT, "one", ""),
        ("grpc", WHO["store"], BEAT, "one", ""),
        ("tcp", WHO["instance"], BEAT, "one", "not encrypted"),
        ("grpc", WHO["instance"], BEAT, "two", "instance.instance_id='two'.*instance/one"),
        ("grpc", WHO["instance"], "/kvmesh.v1.StoreMaster/Leave", "two", "instance/one"),
        ("grpc", WHO["instance"], "/kvmesh.v1.StoreMaster/Drain", "two", "instance/one"),
        ("grpc", WHO["operator"], "/kvmesh.v1.StoreMaster/Drain", "two", ""),
        ("grpc", (*WHO["instance"], *WHO["operator"]), "/kvmesh.v1.StoreMaster/Drain", "two", ""),
        ("grpc", WHO["all"], BEAT, "two", ""),
        ("grpc", WHO["instance"], HANDOFF, None, ""),  # a stream whose first message has not come
        ("grpc", WHO["store"], HANDOFF, None, "is for instance"),
        ("grpc", WHO["instance"], HANDOFF, "one", ""),
        ("grpc", WHO["instance"], HANDOFF, "two", "hello.instance.instance_id='two'.*instance/one"),
        ("grpc", WHO["instance"], "/kvmesh.v1.Conductor/Cordon", "", "is for operator; .* says instance"),
        ("grpc", WHO["nobody"], BEAT, "one", "names no role.*kvmesh certs"),
        ("grpc", WHO["nobody"], "/grpc.health.v1.Health/Check", "", ""),
        ("grpc", WHO["all"], "/kvmesh.v1.StoreMaster/New", "", "no entry"),
    ],
)
def test_the_decision(transport: str, held: Any, path: str, claimed: str | None, reason: str) -> None:
    found = why_not(RpcCaller(transport, None if held is None else frozenset(held)), path, claimed)
    assert bool(found) == bool(reason)
    assert re.search(reason, found)


def test_what_a_message_claims_is_read_from_it() -> None:
    caller = RpcCaller("grpc", frozenset(WHO["instance"]))
    join = store_pb2.JoinRequest()
    join.member.instance.instance_id = NAME
    check(caller, "/kvmesh.v1.StoreMaster/Join", join)
    join.member.instance.instance_id = "two"
    with pytest.raises(PermissionDenied, match=r"member\.instance\.instance_id='two'"):
        check(caller, "/kvmesh.v1.StoreMaster/Join", join)


@pytest.mark.parametrize("name", ["prefill-0@node 1", "a/b", "ü", "x" * 253])
def test_identities_as_uris(name: str) -> None:
    one = Identity(CallerRole.INSTANCE, name)
    assert authorisation.identities_in((one.uri.encode(),)) == {one}
    assert one.uri.isascii()


def test_uris_that_are_no_identities_are_left_out() -> None:
    assert not authorisation.identities_in((b"kvmesh://root/x", b"https://instance/x", b"\xff", b"kvmesh://"))
    assert len(authorisation.identities_in(tuple(b"kvmesh://store/%d" % i for i in range(1000)))) == 16
    for text in ("root", "instance/" + "x" * 254, "instance/a\nb", ""):
        with pytest.raises(ConfigError, match="role="):
            Identity.parse(text)


def test_tickets_are_for_once_and_soon() -> None:
    now = 100.0
    tickets = CallerTickets(lambda: now)
    known = frozenset(WHO["client"])
    first = tickets.issue(known)
    assert tickets.redeem(first) == known
    assert tickets.redeem(first) is None and tickets.redeem(b"") is None
    late = tickets.issue(known)
    now += VALID_S
    assert tickets.redeem(late) is None
    some = [tickets.issue(known) for _ in range(MAX_TICKETS + 1)]
    assert tickets.redeem(some[0]) is None and tickets.redeem(some[1]) == known


# ── every method by every role ────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificates]:
    return make_role_certificates(tmp_path_factory.mktemp("roles"), WHO)


@pytest.fixture
def mtls(made: dict[str, Certificates]) -> Iterator[dict[str, Security]]:
    loaded = {who: Security.load(one.files) for who, one in made.items()}
    before = security.use(loaded["all"])
    yield loaded
    security.use(before)


class Anything:
    """A servicer of any service, which fails in every method."""

    def __getattr__(self, name: str) -> Any:
        async def fail(request: Any, context: Any) -> Any:
            if hasattr(request, "__aiter__"):
                await anext(aiter(request))
            raise Unavailable("it was called")

        return fail


# What `Anything` answers, and Traces, which every server has of its own, to an empty message.
HEARD = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT)
REFUSED = (grpc.StatusCode.PERMISSION_DENIED,)


@contextlib.asynccontextmanager
async def listener() -> AsyncIterator[str]:
    server = Server("127.0.0.1", 0)
    for service in services():
        if service.full_name == TRACES:
            continue
        folder, _, name = service.file.name.removesuffix(".proto").rpartition("/")
        module = importlib.import_module(f"{pb.__name__}.{'' if folder == 'kvmesh/v1' else 'envoy_'}{name}_pb2_grpc")
        getattr(module, f"add_{service.name}Servicer_to_server")(Anything(), server.grpc)
        server.serves(service.full_name)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


async def told(channel: grpc.aio.Channel, method: MethodDescriptor) -> grpc.StatusCode:
    """Returns the status of a call with an empty message, or none."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(path_of(method), request_serializer=lambda message: message.SerializeToString())
    request = iter([empty(method)]) if method.client_streaming else empty(method)
    answer = call(request, timeout=20)
    return await answer.code()


@pytest.mark.parametrize("who", WHO)
async def test_every_method_over_grpc(mtls: dict[str, Security], who: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    wrong = []
    async with listener() as address, connect(address, tls=mtls[who]) as channel:
        for method in methods():
            code = await told(channel, method)
            wanted = HEARD if expected(who, method) else REFUSED
            if method.client_streaming and not expected(who, method):
                wanted = (*REFUSED, grpc.StatusCode.INTERNAL)  # the reset of a stream may overtake its status
            if code not in wanted:
                wrong.append(f"{path_of(method)}: {code}, wanted one of {wanted}")
    assert not wrong


@pytest.mark.parametrize("who", WHO)
async def test_every_method_over_the_fast_path(mtls: dict[str, Security], who: str) -> None:
    wrong = []
    for service in services():
        unary = [one for one in service.methods if not (one.client_streaming or one.server_streaming)]
        if PERMISSIONS[service.full_name][service.methods[0].name].public or not unary:
            continue
        server = FastServer(service, Anything(), 7)
        assert server.tickets is not None
        try:
            way = await server.listen_unix()
            channel = await dial((way,), 7, 5.0, server.tickets.issue(frozenset(WHO[who])))
            for method in unary:
                with pytest.raises(KvmeshError) as caught:
                    await channel.call(method.name.encode(), empty(method).SerializeToString(), 20)
                refused = isinstance(caught.value, PermissionDenied)
                if refused is expected(who, method):
                    wrong.append(f"{path_of(method)}: {caught.value!r}")
            channel.close()
        finally:
            await server.close()
    assert not wrong


async def test_the_fast_path_wants_a_ticket(mtls: dict[str, Security]) -> None:
    """The user of a Unix socket's other end is not enough where certificates are asked for."""
    service = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]
    server = FastServer(service, Anything(), 7)
    assert server.tickets is not None
    try:
        way = await server.listen_unix()
        used = server.tickets.issue(frozenset(WHO["all"]))
        (await dial((way,), 7, 5.0, used)).close()
        for ticket in (b"", used, bytes(16)):
            with pytest.raises(Unavailable):
                await dial((way,), 7, 5.0, ticket)
    finally:
        await server.close()


async def test_a_stream_speaks_for_the_instance_of_its_certificate(mtls: dict[str, Security]) -> None:
    """An instance can greet another one only with its own name, whatever it sends next."""

    async def greeted(who: str, name: str) -> KvmeshError:
        hello = prefill_pb2.HandoffRequest()
        hello.hello.instance.instance_id = name
        async with connect(address, tls=mtls[who]) as channel:
            call = prefill_pb2_grpc.PrefillStub(channel).Handoff(timeout=20)
            await call.write(hello)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()  # it says nothing more: the reset of a stream may overtake its status
            return status.from_rpc_error(caught.value)

    async with listener() as address:
        for who, name in (("instance", NAME), ("all", "two")):
            assert "it was called" in (await greeted(who, name)).message
        for who, name in (("instance", "two"), ("other", NAME)):
            error = await greeted(who, name)
            assert isinstance(error, PermissionDenied)
            assert re.search(r"hello\.instance\.instance_id='\w+': the caller's certificate is for", error.message)


async def test_only_a_stream_s_first_message_is_held_to_the_certificate() -> None:
    seen: list[int] = []

    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    requests = status.GuardedRequests(numbers(), seen.append)
    assert await anext(aiter(requests)) == 0
    assert [number async for number in requests] == [1, 2]
    assert seen == [0]
    assert [number async for number in status.GuardedRequests(numbers(), seen.append)] == [0, 1, 2]
    assert seen == [0, 0]


HEALTH = "/grpc.health.v1.Health/Check"


async def test_a_caller_may_ask_for_the_role_of_a_server(made: dict[str, Certificates]) -> None:
    """Whoever has another role's certificate and answers at an address is not believed there."""
    asking = Security.load(replace(made["operator"].files, tls_server_name=ROLE_NAME))
    before = security.current()
    try:
        for who, believed in (
            ("instance", {ServerRole.INSTANCE, ServerRole.NODE, ServerRole.MEMBER}),
            ("store", {ServerRole.STORE, ServerRole.NODE, ServerRole.MEMBER}),
            ("gateway", {ServerRole.MEMBER}),
            ("nobody", set()),
            ("all", set(ServerRole)),
        ):
            security.use(Security.load(made[who].files))
            async with listener() as address:
                security.use(asking)
                for server in ServerRole:
                    async with connect(address, server) as channel:
                        call = channel.unary_unary(HEALTH, response_deserializer=bytes)(b"", timeout=20)
                        code = await call.code()
                        assert (code is grpc.StatusCode.OK) is (server in believed), (who, server, code)
                        if server not in believed:
                            with pytest.raises(grpc.aio.AioRpcError) as caught:
                                await call
                            error = status.from_rpc_error(caught.value)
                            assert isinstance(error, TlsFailed) and "of another role" in error.message
    finally:
        security.use(before)


KV = [
    ("instance", "one/0@7f", ""),
    ("instance", "two/0@7f", "engine 'two/0@7f': the certificate is for instance/one"),
    ("instance", "client:one", "is for instance/one"),
    ("store", "one/0@1", ""),
    ("client", "client:x", ""),
    ("all", "two/0@1", ""),
    ("gateway", "one/0@1", "KV is moved by client, instance, operator, store, trainer; the certificate says gateway"),
    ("conductor", "one/0@1", "says conductor"),
    ("nobody", "one/0@1", "names no role"),
]


@pytest.mark.parametrize(("who", "engine", "reason"), KV)
def test_who_may_move_kv(who: str, engine: str, reason: str) -> None:
    found = why_no_kv(frozenset(WHO[who]), engine)
    assert bool(found) == bool(reason) and reason in found


async def test_without_client_certificates_everybody_is_heard(made: dict[str, Certificates]) -> None:
    before = security.current()
    only_server = Security(cert=made["all"].cert.read_bytes(), key=made["all"].key.read_bytes())
    try:
        for tls, client in (
            (security.PLAINTEXT, security.PLAINTEXT),
            (only_server, Security(ca=made["all"].ca.read_bytes())),
        ):
            security.use(tls)
            async with listener() as address, connect(address, tls=client) as channel:
                for method in methods():
                    assert await told(channel, method) in HEARD, path_of(method)
    finally:
        security.use(before)


async def test_a_refusal_says_why(mtls: dict[str, Security]) -> None:
    async with listener() as address:
        for who, reason in (
            ("gateway", "is for operator; the caller's certificate says gateway"),
            ("nobody", "`kvmesh certs`"),
        ):
            async with connect(address, tls=mtls[who]) as channel:
                call = channel.unary_unary("/kvmesh.v1.StoreMaster/SetQuota")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", timeout=20)
                error = status.from_rpc_error(caught.value)
                assert isinstance(error, PermissionDenied) and reason in error.message

"""Is a service ready? grpc.health.v1 for each, and `/ready` for the gateway. And who lends ranks."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.channels import CHANNEL_OPTIONS
from kvmesh.rpc.pb import ranks_pb2, ranks_pb2_grpc, store_pb2, store_pb2_grpc
from kvmesh.rpc.security import PLAINTEXT, Security


def _channel(address: str, tls: Security) -> grpc.Channel:
    credentials = tls.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    options: list[tuple[str, str | int]] = [*CHANNEL_OPTIONS]
    if name := tls.name_of(ServerRole.MEMBER):
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.secure_channel(address, credentials, options=options)


def health(address: str, timeout_s: float = 1.0, tls: Security = PLAINTEXT) -> str:
    """ "SERVING", "NOT_SERVING", or the gRPC status of a failed call, e.g. "UNAVAILABLE"."""
    with _channel(address, tls) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as err:
            return str(err.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def rank_hosts(
    masters: Iterable[str], timeout_s: float = 1.0, tls: Security = PLAINTEXT
) -> Sequence[ranks_pb2.RankHostState] | None:
    """Returns the machines that lend ranks, as the store master that leads knows them; None: none leads, or answers."""
    for address in masters:
        with _channel(address, tls) as channel:
            stub = store_pb2_grpc.StoreMasterStub(channel)
            try:
                return stub.ListRankHosts(store_pb2.ListRankHostsRequest(), timeout=timeout_s).hosts
            except grpc.RpcError:
                continue
    return None


def rank_host(
    address: str, timeout_s: float = 1.0, tls: Security = PLAINTEXT
) -> ranks_pb2.GetRankHostStatusResponse | None:
    """Returns what a rank host says of itself; None: it does not answer."""
    with _channel(address, tls) as channel:
        try:
            request = ranks_pb2.GetRankHostStatusRequest()
            return ranks_pb2_grpc.RankHostStub(channel).GetStatus(request, timeout=timeout_s)
        except grpc.RpcError:
            return None


def gateway_ready(address: str, timeout_s: float = 1.0, *, https: bool = False) -> bool:
    """Can the gateway at `host:port` serve every one of its models? With `https` whatever its certificate says: it is
    told nothing, and what it answers is no secret."""
    name, _, number = address.rpartition(":")
    host, port = name.strip("[]"), int(number)
    link = (
        http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_unchecked())
        if https
        else http.client.HTTPConnection(host, port, timeout=timeout_s)
    )
    try:
        link.request("GET", "/ready")
        answer = link.getresponse()
        models = json.loads(answer.read())["models"].values()
        return answer.status == 200 and all(one["ready"] for one in models)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
        return False
    finally:
        link.close()


def _unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def redis_ready(address: str, timeout_s: float = 1.0) -> bool:
    """Does a Redis at `host:port` take commands?"""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as peer:
            peer.sendall(b"PING\r\n")
            return peer.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def ready(address: str, http_address: str = "", tls: Security = PLAINTEXT, *, https: bool = False) -> bool:
    """Does the service say that it is ready, a gateway with all of its models?"""
    if health(address, tls=tls) != "SERVING":
        return False
    return not http_address or gateway_ready(http_address, https=https)

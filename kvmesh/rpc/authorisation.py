"""Who may call what: one table of all methods, and one pure decision for gRPC and the fast paths.

Where clients are asked for a certificate (mTLS), its URI names tell who the caller is: `kvmesh://ROLE/NAME`, NAME being
an instance's id, or `*` for any. A certificate may have several. Its DNS names tell callers what a server is
(`ServerRole`). Elsewhere nobody is known and everybody may call
everything, as far as the listener can be reached (docs/operate/security.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from kvmesh.errors import ConfigError, PermissionDenied

SCHEME = "kvmesh://"
ANY_NAME = "*"
MAX_IDENTITIES = 16  # of one certificate; further ones are not looked at
MAX_NAME = 253


class CallerRole(StrEnum):
    """What a certificate says that its owner is."""

    INSTANCE = "instance"  # prefill, decode, coupled
    STORE = "store"  # a store master, a pool node
    CONDUCTOR = "conductor"
    GATEWAY = "gateway"
    OPERATOR = "operator"  # the command line, whoever watches a mesh
    CLIENT = "client"  # a program that uses the Store as a library
    TRAINER = "trainer"  # a program that changes the weights of a model


class Identity(NamedTuple):
    """One role of a certificate and the name in it."""

    role: CallerRole
    name: str

    @property
    def uri(self) -> str:
        """The identity as a certificate has it."""
        return f"{SCHEME}{self.role}/{quote(self.name, safe=ANY_NAME)}"

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Reads ROLE, ROLE/NAME or the URI; without NAME any is meant. Raises ConfigError."""
        role, _, name = text.removeprefix(SCHEME).partition("/")
        name = unquote(name) or ANY_NAME
        if role not in list(CallerRole) or len(name) > MAX_NAME or not name.isprintable():
            roles = ", ".join(CallerRole)
            raise ConfigError(f"role={text[:80]!r}: not ROLE or ROLE/NAME, ROLE one of {roles}", field="role")
        return cls(CallerRole(role), name)


ALL_IDENTITIES = tuple(Identity(role, ANY_NAME) for role in CallerRole)


class ServerRole(StrEnum):
    """What a caller expects of a server."""

    INSTANCE = "instance"
    STORE = "store"
    CONDUCTOR = "conductor"
    NODE = "node"  # an instance, or one of the Store's
    MEMBER = "member"  # of any role

    @property
    def dns_name(self) -> str:
        """The name that certificates of such a server have. gRPC compares names, and shows URIs to nobody who calls."""
        return f"{self}.{ROLE_DOMAIN}"


ROLE_DOMAIN = "kvmesh.internal"
ROLE_NAME = "{role}." + ROLE_DOMAIN  # as `tls_server_name`: whoever is called must be of the role that is expected


def dns_names(held: Iterable[Identity]) -> tuple[str, ...]:
    """Returns the DNS names of a certificate with these identities."""
    roles = {str(one.role) for one in held}
    found = [one for one in ServerRole if one in roles]
    found += [ServerRole.NODE] if roles & BOUND else []
    found += [ServerRole.MEMBER] if roles else []
    return tuple(one.dns_name for one in found)


@dataclass(frozen=True, slots=True)
class RpcCaller:
    """Who is at the other end of a connection. `identities` is None where no certificate is asked for: everybody is
    believed. It is empty for a certificate without a role."""

    transport: str  # "grpc", or of the fast path "unix" or "tcp"
    identities: frozenset[Identity] | None


@lru_cache(maxsize=1024)
def identities_in(uris: tuple[bytes, ...]) -> frozenset[Identity]:
    """Returns the identities among a certificate's URI names; others are left out."""
    found = set()
    for uri in uris[:MAX_IDENTITIES]:
        try:
            text = uri.decode()
            if text.startswith(SCHEME):
                found.add(Identity.parse(text))
        except (UnicodeDecodeError, ConfigError):
            continue
    return frozenset(found)


def grpc_caller(context: Any) -> RpcCaller:
    """Returns the caller of a gRPC call at a listener that asks for certificates."""
    return RpcCaller("grpc", identities_in(tuple(context.auth_context().get("peer_uri", ()))))


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Permission:
    """Who may call a method. `roles` is None for everybody with a certificate of the mesh, whatever it says. `claim`
    is the field that says for which instance a call speaks, of a stream in its first message: instances and the Store's
    nodes must be that one. `public` methods belong to listeners that ask for no certificate; they are not decided
    here."""

    roles: frozenset[CallerRole] | None
    claim: str = ""
    public: bool = False

    @property
    def claimed(self) -> Callable[[Any], str]:
        """Returns the function that reads `claim` from a request."""
        return attrgetter(self.claim)


_I, _S, _C, _G, _O, _L, _T = CallerRole
_ANY = frozenset(CallerRole)
BOUND = frozenset((_I, _S))  # must be the instance that a call names

KV_ROLES = frozenset((_I, _S, _O, _L, _T))  # whose transfer engines move KV, or weights

PUBLIC = Permission(None, public=True)
EVERYBODY = Permission(None)


def _may(*roles: CallerRole, claim: str = "") -> Permission:
    return Permission(frozenset(roles), claim)


_USE_OF_BLOCKS = _may(_I, _S, _O, _L)
_USE_OF_THE_STORE = _may(_O, _L)
_OWN = "instance.instance_id"

PERMISSIONS: dict[str, dict[str, Permission]] = {
    "kvmesh.v1.StoreMaster": {
        "Join": _may(_I, _S, claim="member.instance.instance_id"),
        "Beat": _may(_I, _S, claim=_OWN),
        "Leave": _may(_I, _S, claim=_OWN),
        "Announce": _may(_I, _S, claim="announcement.store_id"),
        "ListMembers": _may(_O),
        "Watch": _may(_C, _O),
        "Lookup": _may(_I, _S, _O, _L),
        "GetStatus": _may(_S, _O, _L),
        "Find": _USE_OF_THE_STORE,
        "Grant": _USE_OF_THE_STORE,
        "Bind": _USE_OF_THE_STORE,
        "Resolve": _USE_OF_THE_STORE,
        "ChangeReplica": _USE_OF_THE_STORE,
        "Remove": _USE_OF_THE_STORE,
        "ListKeys": _USE_OF_THE_STORE,
        "Drain": _may(_I, _S, _C, _O, claim="instance_id"),
        "SetQuota": _may(_O),
        "ListQuotas": _USE_OF_THE_STORE,
        "LendRanks": _may(_I, claim="host.instance.instance_id"),
        "PlaceRanks": _may(_I, claim=_OWN),
        "ListRankHosts": _may(_I, _O),
    },
    "kvmesh.v1.Conductor": {
        "Register": _may(_I, claim=_OWN),
        "Heartbeat": _may(_I, claim=_OWN),
        "Schedule": _may(_G),
        "Release": _may(_G),
        "ListModels": _may(_G, _O),
        "GetStatus": _may(_C, _G, _O),
        "Explain": _may(_O),
        "Cordon": _may(_O),
        "GetScaleHints": _may(_O),
        "PauseModel": _may(_G, _O, _T),
        "ResumeModel": _may(_G, _O, _T),
        "UpdateModelWeights": _may(_G, _O, _T),
        "GatherModel": _may(_G, _O, _T),
        "SleepModel": _may(_G, _O, _T),
        "WakeModel": _may(_G, _O, _T),
    },
    "kvmesh.v1.NodeStore": {
        "Lease": _USE_OF_BLOCKS,
        "RenewLease": _USE_OF_BLOCKS,
        "ReleaseLease": _USE_OF_BLOCKS,
        "Exists": _USE_OF_BLOCKS,
        "Touch": _USE_OF_BLOCKS,
        "Doors": _USE_OF_BLOCKS,
        "Pull": _may(_I, _S, _C, _O, _L),
        "Put": _may(_O, _L),
        "Pin": _may(_S, _O, _L),
        "Remove": _may(_S, _O, _L),
        "ListBlocks": _may(_O),
        "GetStore": _may(_O),
    },
    "kvmesh.v1.Decode": {"Session": _may(_G), "GetPools": _may(_O)},
    "kvmesh.v1.Prefill": {"Handoff": _may(_I, claim="hello.instance.instance_id"), "GetPools": _may(_O)},
    "kvmesh.v1.Instance": {
        "SetRole": _may(_C, _O),
        "Profile": _may(_O),
        "Pause": _may(_C, _O),
        "Resume": _may(_C, _O),
        "UpdateWeights": _may(_C, _O),
        "Sleep": _may(_C, _O),
        "Wake": _may(_C, _O),
        "HoldOrder": _may(_C, _O),
    },
    "kvmesh.v1.RankHost": {
        "Run": _may(_I, claim="hello.instance.instance_id"),
        "GetStatus": _may(_I, _O),
    },
    "kvmesh.v1.Doors": {"FindDoor": Permission(_ANY)},
    "kvmesh.v1.Traces": {"Keep": _may(_G)},
    "kvmesh.v1.Gateway": {"Generate": PUBLIC, "GetGatewayStatus": PUBLIC},
    "envoy.service.ext_proc.v3.ExternalProcessor": {"Process": _may(_G, _L)},  # a proxy is a client, or of a gateway
    "kvmesh.v1.PagePush": {"Push": _may(_L), "Release": _may(_L)},
    "kvmesh.v1.Doctor": {"Greet": PUBLIC, "Attend": PUBLIC, "Step": PUBLIC},
    "grpc.health.v1.Health": {"Check": EVERYBODY, "Watch": EVERYBODY, "List": EVERYBODY},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Permission(_ANY)},
}

# Where each service is called; health is everywhere, and reflection wherever no API key is required.
LISTENERS: dict[str, tuple[str, ...]] = {
    "store master": ("StoreMaster", "Doors", "Traces"),
    "conductor": ("Conductor", "Doors", "Traces"),
    "prefill": ("Prefill", "Instance", "NodeStore", "Traces"),
    "decode": ("Decode", "Instance", "NodeStore", "Traces"),
    "coupled": ("Decode", "Prefill", "Instance", "NodeStore", "Traces"),
    "pool node": ("NodeStore", "Traces"),
    "rank host": ("RankHost", "Traces"),
    "gateway": ("Gateway",),
    "endpoint picker": ("envoy.service.ext_proc.v3.ExternalProcessor", "Traces"),
    "vLLM worker": ("PagePush", "Traces"),
    "kvmesh doctor": ("Doctor",),
}

# Services whose unary methods are called over Unix sockets, too. Those of control services go over TCP, without TLS.
FAST_PATH = frozenset(("kvmesh.v1.NodeStore",))

_BY_PATH = {
    f"/{service}/{method}": (permission, permission.claimed if permission.claim else None)
    for service, methods in PERMISSIONS.items()
    for method, permission in methods.items()
}


# ── the decision ──────────────────────────────────────────────────────────────────────────────────

_NO_ROLE = (
    "the certificate names no role of the mesh (a URI kvmesh://ROLE/NAME): make new ones with `kvmesh certs`, "
    "see docs/operate/security.md"
)


def why_not(caller: RpcCaller, path: str, claimed: str | None = "") -> str:
    """Decides whether `caller` may call the method at `path` ("/kvmesh.v1.StoreMaster/Beat") for the instance that its
    message claims to be; None before there is a message. Returns "" when it may, else why not. Pure."""
    if caller.identities is None:
        return ""
    found = _BY_PATH.get(path)
    if found is None:
        return f"{path}: has no entry in the table of permissions"
    permission = found[0]
    if caller.transport == "tcp":
        return f"{path}: not over a connection that is not encrypted"
    if permission.roles is None:
        return ""
    held = [one for one in caller.identities if one.role in permission.roles]
    if not held:
        if not caller.identities:
            return f"{path}: {_NO_ROLE}"
        said = ", ".join(sorted(one.role for one in caller.identities))
        return f"{path}: is for {', '.join(sorted(permission.roles))}; the caller's certificate says {said}"
    if claimed is None or not permission.claim:
        return ""
    if not any(one.role not in BOUND or one.name == ANY_NAME or one.name == claimed for one in held):
        said = ", ".join(sorted(one.uri.removeprefix(SCHEME) for one in held))
        return f"{path}: {permission.claim}={claimed[:80]!r}: the caller's certificate is for {said}"
    return ""


def check(caller: RpcCaller, path: str, request: Any) -> None:
    """Raises PermissionDenied unless `caller` may make this call. `request` is the message, of a stream the first one;
    None before it has come."""
    if caller.identities is None:
        return
    found = _BY_PATH.get(path)
    claimed = found[1] if found is not None else None
    if reason := why_not(caller, path, None if request is None or claimed is None else claimed(request)):
        raise PermissionDenied(reason)


def why_no_kv(held: frozenset[Identity], engine: str) -> str:
    """Decides whether the owner of a certificate may move KV as the transfer engine of this name: instances and the
    Store's nodes are "ID/RANK@INCARNATION". Returns "" when it may, else why not. Pure."""
    if not held:
        return _NO_ROLE
    able = [one for one in held if one.role in KV_ROLES]
    if not able:
        said = ", ".join(sorted(one.role for one in held))
        return f"KV is moved by {', '.join(sorted(KV_ROLES))}; the certificate says {said}"
    instance_id = engine.rpartition("/")[0]
    if not any(one.role not in BOUND or one.name in (ANY_NAME, instance_id) for one in able):
        said = ", ".join(sorted(one.uri.removeprefix(SCHEME) for one in able))
        return f"engine {engine[:80]!r}: the certificate is for {said}"
    return ""


def identities(texts: Iterable[str]) -> tuple[Identity, ...]:
    """Reads ROLE or ROLE/NAME of each text. Raises ConfigError."""
    return tuple(dict.fromkeys(map(Identity.parse, texts)))

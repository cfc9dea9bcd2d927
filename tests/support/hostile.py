"""Hostile peers for every internal RPC: raw bytes on the wire, and the checks that the service bore them.

    valid = {"Join": store_pb2.JoinRequest(...), "Watch": store_pb2.WatchRequest(), ...}   # one for each method
    service = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]
    await assault(channel, service, valid, seed=1)                      # noise: nothing crashes, nothing hangs
    await refused(channel, service, [Case("Announce", request, "INVALID_ARGUMENT", "announcement.sealed")])

Requests are messages, raw bytes, or a list of them for methods that take a stream. Messages are never serialised or
parsed by the stubs, so that bytes which no client could send reach the server too.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.errors import KvmeshError
from kvmesh.rpc import status

Request = Message | bytes
Requests = Request | Sequence[Request]

TIMEOUT_S = 10.0
# A stream that says nothing for so long is taken for open and well, and cancelled.
SILENCE_S = 0.5
MAX_MESSAGES = 8  # of a stream before it is taken for well: more than any says before the error that is waited for
# What a peer may hear for nonsense. INTERNAL and UNKNOWN are bugs, DEADLINE_EXCEEDED is a call that hung.
BORNE = frozenset(
    ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "OUT_OF_RANGE")
)


@dataclass(frozen=True)
class Case:
    """One call and the end that it must come to: status `code`, an error that names `field` ("": any)."""

    method: str
    request: Requests
    code: str
    field: str = ""


@dataclass
class Outcome:
    """How one call ended. `messages` are raw (at most MAX_MESSAGES of a stream); `error` is the named error."""

    code: str
    error: KvmeshError | None = None
    messages: list[bytes] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.code} {self.error}" if self.error else self.code


async def send(
    channel: grpc.aio.Channel,
    service: ServiceDescriptor,
    method: str,
    request: Requests,
    silence_s: float = SILENCE_S,
) -> Outcome:
    """Make one call with raw bytes and see how it ends; a stream silent for `silence_s` is OK."""
    found = service.methods_by_name[method]
    raw = [_raw(part) for part in _parts(request)]
    assert found.client_streaming or len(raw) == 1, f"{method} takes one message"
    sides = found.client_streaming, found.server_streaming
    kind = "_".join("stream" if streaming else "unary" for streaming in sides)
    make: Any = getattr(channel, kind)(f"/{service.full_name}/{method}")  # no serialisers: bytes as they are
    call = make(_each(raw) if found.client_streaming else raw[0], timeout=TIMEOUT_S)
    outcome = Outcome("OK")
    try:
        if not found.server_streaming:
            outcome.messages.append(await call)
            return outcome
        while len(outcome.messages) < MAX_MESSAGES:
            async with asyncio.timeout(silence_s):
                message = await call.read()
            if message is grpc.aio.EOF:
                outcome.code = (await call.code()).name
                break
            outcome.messages.append(message)
    except TimeoutError:
        pass
    except grpc.aio.AioRpcError as err:
        outcome.code, outcome.error = err.code().name, status.from_rpc_error(err)
    finally:
        call.cancel()
    return outcome


async def refused(channel: grpc.aio.Channel, service: ServiceDescriptor, cases: Iterable[Case]) -> None:
    """Each of `cases` ends as it says, and the service is alive after all."""
    for case in cases:
        silence_s = SILENCE_S if case.code == "OK" else TIMEOUT_S
        outcome = await send(channel, service, case.method, case.request, silence_s)
        told = f"{case.method}({_shown(case.request)}): {outcome}, wanted {case.code} {case.field}; {outcome.messages}"
        assert outcome.code == case.code, told
        if case.field:
            assert outcome.error is not None, told
            assert case.field in (outcome.error.field or "") and case.field in outcome.error.message, told
    await alive(channel, service)


async def assault(
    channel: grpc.aio.Channel,
    service: ServiceDescriptor,
    valid: Mapping[str, Requests],
    *,
    seed: int,
    rounds: int = 25,
    borne: frozenset[str] = BORNE,
    unread: frozenset[str] = frozenset(),
) -> Counter[tuple[str, str]]:
    """Noise at every method of `service`: random bytes, and what `mangled` and `extremes` make of its valid request.

    AssertionError unless each call ends soon with one of the statuses `borne`, bytes that cannot be parsed with
    INVALID_ARGUMENT (but for the methods `unread`, whose message is not received), and the service is alive after each
    method. Returns how often (method, status) came."""
    assert set(valid) == set(service.methods_by_name), "every method has its valid request"
    rng, seen = random.Random(seed), Counter[tuple[str, str]]()
    for name, request in valid.items():
        method = service.methods_by_name[name]
        for noise in _noise(rng, method, request, rounds):
            outcome = await send(channel, service, name, noise)
            told = f"seed {seed}: {name}({_shown(noise)}): {outcome}"
            assert outcome.code in borne, told
            # In a stream a message before the broken one may have ended the call already.
            if name not in unread and not method.client_streaming and not _parses(method, noise):
                assert outcome.code == "INVALID_ARGUMENT", told
            seen[(name, outcome.code)] += 1
        await alive(channel, service)
    return seen


async def alive(channel: grpc.aio.Channel, service: ServiceDescriptor) -> None:
    """AssertionError unless the health service answers for `service`."""
    request = health_pb2.HealthCheckRequest(service=service.full_name)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"{service.full_name}: {answer}"


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────


def mangled(rng: random.Random, raw: bytes) -> bytes:
    """`raw` cut short, with flipped bits, doubled, or with noise inside."""
    data = bytearray(raw or b"\x08\x01")
    at = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            del data[at:]
        case 1:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 2:
            data[at:at] = rng.randbytes(rng.randint(1, 64))
        case 3:  # a length-delimited field that claims four gibibytes
            data += bytes([rng.randint(1, 15) << 3 | 2]) + b"\xff\xff\xff\xff\x0f" + rng.randbytes(8)
        case _:
            data += bytes(data)  # its own buffer cannot grow while it is read
    return bytes(data)


def extremes(message: Message) -> Iterator[tuple[str, Message]]:
    """(path of the field, `message` with that one field at a bound of its type, unknown, empty or gone)."""
    for descriptor in message.DESCRIPTOR.fields:
        name = descriptor.name
        repeated = descriptor.is_repeated
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            if not repeated and message.HasField(name):
                for path, inner in extremes(getattr(message, name)):
                    changed = _copy(message)
                    getattr(changed, name).CopyFrom(inner)
                    yield f"{name}.{path}", changed
            gone = _copy(message)
            gone.ClearField(name)
            yield name, gone
            continue
        for value in _bounds(descriptor):
            changed = _copy(message)
            if repeated:
                getattr(changed, name).extend([value] * 3)
            else:
                setattr(changed, name, value)
            yield name, changed


_INTS: dict[int, tuple[int, ...]] = {
    FieldDescriptor.TYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (0, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_SINT32: (0, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (0, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_SINT64: (0, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_ENUM: (0, 999, -1),
    FieldDescriptor.TYPE_BOOL: (0, 1),
}


def _bounds(descriptor: Any) -> Iterable[Any]:
    if descriptor.type in _INTS:
        return _INTS[descriptor.type]
    if descriptor.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return 0.0, -1.0, 3e38, float("inf"), float("-inf"), float("nan")
    if descriptor.type == FieldDescriptor.TYPE_BYTES:
        return b"", b"\x00", b"\xff" * 15, b"\xff" * 17, bytes(1 << 20)
    return "", "\x00", "☠" * 5, "a" * (1 << 16), "../../etc/passwd", "127.0.0.1:1\r\nx: y"


def _noise(rng: random.Random, method: MethodDescriptor, valid: Requests, rounds: int) -> Iterator[Requests]:
    parts = _parts(valid)
    for _ in range(rounds):
        yield _wrapped(method, parts, 0, rng.randbytes(rng.choice((0, 1, 2, 3, 7, 16, 64, 1000))))
        at = rng.randrange(len(parts))
        yield _wrapped(method, parts, at, mangled(rng, _raw(parts[at])))
    for at, part in enumerate(parts):
        if isinstance(part, Message):
            for _, changed in extremes(part):
                yield _wrapped(method, parts, at, changed)


def _wrapped(method: MethodDescriptor, parts: list[Request], at: int, bad: Request) -> Requests:
    """`parts` up to `at`, then `bad`; only `bad` for a method that takes one message."""
    return [*parts[:at], bad] if method.client_streaming else bad


def _parts(requests: Requests) -> list[Request]:
    return [requests] if isinstance(requests, Message | bytes) else list(requests)


def _copy(message: Message) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _raw(request: Request) -> bytes:
    return request.SerializeToString() if isinstance(request, Message) else request


async def _each(raw: Sequence[bytes]) -> Any:
    for data in raw:
        yield data


def _parses(method: MethodDescriptor, request: Requests) -> bool:
    assert isinstance(request, Message | bytes)
    try:
        GetMessageClass(method.input_type).FromString(_raw(request))
    except DecodeError:
        return False
    return True


def _shown(request: Requests) -> str:
    return ", ".join(map(_one_shown, _parts(request)))


def _one_shown(request: Request) -> str:
    if isinstance(request, bytes):
        return f"{len(request)} bytes {request[:64]!r}"
    size = request.ByteSize()
    shown = " ".join(str(request).split()) if size < 1000 else "..."
    return f"{type(request).__name__} of {size} bytes {{{shown}}}"

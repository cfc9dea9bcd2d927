"""Checks of what callers pass in: each raises a TransferError that names the field and the value."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from kvmesh.errors import TransferError
from kvmesh.transfer.api import Opcode, Range, TransferRequest

MAX_NAME = 1024
MAX_S = 1e9  # what clocks and locks take
MAX_U64 = (1 << 64) - 1
_LOCATION = re.compile(r"(cpu|cuda):\d{1,4}")


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def whole(field: str, value: object, least: int = 0, most: int = MAX_U64) -> int:
    """Returns `value` as an int. Raises TransferError when it is no integer (numpy's count as one) or not in
    `least`..`most`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        raise TransferError(f"{field}={shown(value)}: must be a whole number, not {kind}", field=field) from None
    if not least <= number <= most:
        limit = "must be positive" if number < least == 1 else f"not in {least}..{most}"
        raise TransferError(f"{field}={number}: {limit}", field=field)
    return number


def seconds(field: str, value: object) -> float:
    """Returns `value` as a float. Raises TransferError when it is no number, negative, or above MAX_S."""
    if not isinstance(value, int | float | np.integer | np.floating) or not 0 <= value <= MAX_S:
        raise TransferError(f"{field}={shown(value)}: must be a number of seconds in 0..{MAX_S:.0e}", field=field)
    return float(value)


def instance(field: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise TransferError(f"{field}={shown(value)}: must be {names}, not {type(value).__name__}", field=field)


def setting(field: str, kind: str, value: object) -> object:
    """Returns a value of EngineConfig as the type that its field declares: a list of names becomes a tuple, a number of
    numpy one of Python. Raises TransferError for a value of another type."""
    if kind == "int":
        return whole(field, value, -MAX_U64)
    if kind == "float":
        if not isinstance(value, int | float):
            raise TransferError(f"{field}={shown(value)}: must be a number, not {type(value).__name__}", field=field)
        if not abs(value) <= MAX_S:
            raise TransferError(f"{field}={value!r}: must be a finite number, at most {MAX_S:.0e}", field=field)
        return float(value)
    if kind.startswith("tuple"):
        if not isinstance(value, tuple | list) or not all(isinstance(one, str) for one in value):
            like = f", like ({value!r},)" if isinstance(value, str) else ""
            raise TransferError(f"{field}={shown(value)}: must be a tuple of names{like}", field=field)
        return tuple(value)
    instance(field, value, {"str": str, "bool": bool}[kind])
    return value


def on_host(location: str) -> bool:
    """Says whether a memory location is the host's; any other is a device's, which only some transports reach."""
    return location.startswith("cpu")


def location(value: object) -> str:
    """Returns `value` if it names a memory location ("cpu:0", "cuda:1"). Raises TransferError otherwise."""
    if not isinstance(value, str) or not _LOCATION.fullmatch(value):
        raise TransferError(
            f'location={shown(value)}: must be "cpu:N", memory of NUMA node N, or "cuda:N"', field="location"
        )
    return value


def plain(requests: Sequence[TransferRequest]) -> Sequence[TransferRequest]:
    """Returns requests whose addresses, offsets and lengths are Python ints: `requests` itself if they already are.
    Raises TransferError for what is no TransferRequest."""
    try:
        if {(r.local_address + r.remote_offset + r.length).__class__ for r in requests} <= {int}:
            len(requests)
            return requests
    except (TypeError, AttributeError):
        pass
    instance("requests", requests, Sequence)
    return [_plain(i, request) for i, request in enumerate(requests)]


def _plain(i: int, request: object) -> TransferRequest:
    if not isinstance(request, TransferRequest):
        raise TransferError(f"requests[{i}]={shown(request)}: not a TransferRequest", field="requests")
    # Bounds are looked at where the memory is known.
    return replace(
        request,
        local_address=whole("local_address", request.local_address, -MAX_U64),
        remote_offset=whole("remote_offset", request.remote_offset, -MAX_U64),
        length=whole("length", request.length, -MAX_U64),
    )


def epoch_of(request: TransferRequest) -> int:
    """Returns the epoch of a request after checking opcode and traffic class. Raises TransferError when one is
    malformed."""
    if not isinstance(request.opcode, Opcode):
        raise TransferError(f"opcode={shown(request.opcode)}: must be Opcode.READ or Opcode.WRITE", field="opcode")
    if not isinstance(request.traffic_class, int):
        raise TransferError(
            f"traffic_class={shown(request.traffic_class)}: must be a TrafficClass", field="traffic_class"
        )
    if request.opcode is Opcode.READ:
        return whole("handoff_epoch", request.handoff_epoch)
    return window_epoch(request.handoff_epoch)


def window_epoch(value: object) -> int:
    """Returns the epoch of a write. Raises TransferError for 0, which stands for "no window"."""
    if value == 0:
        raise TransferError("handoff_epoch=0: a write needs the epoch of its window, 1 or more", field="handoff_epoch")
    return whole("handoff_epoch", value)


def name(field: str, value: object) -> str:
    """Returns the name of an engine, segment or peer. Raises TransferError when it is malformed."""
    if not isinstance(value, str):
        hint = " (the name that open_segment returns)" if field == "segment" else ""
        raise TransferError(f"{field}={shown(value)}: must be a name{hint}", field=field)
    if field == "name" and not (value.isprintable() and 0 < len(value.encode()) <= MAX_NAME):
        raise TransferError(
            f"name={shown(value)}: an engine needs a name, printable, of at most {MAX_NAME} bytes", field="name"
        )
    return value


def payload(value: object, most: int) -> None:
    """Raises TransferError unless a notification's payload is bytes, at most `most` of them."""
    instance("payload", value, bytes, bytearray, memoryview)
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > most:
        raise TransferError(f"payload of {len(value)} bytes is over {most}", field="payload")


def window(peer: object, epoch: object, ranges: object) -> None:
    """Checks the arguments of `open_window`, and raises TransferError. Whether the ranges are registered is checked
    elsewhere."""
    name("peer", peer)
    window_epoch(epoch)
    if not isinstance(ranges, Sequence) or not all(isinstance(one, Range) for one in ranges):
        raise TransferError(f"ranges={shown(ranges)}: must be a list of Range(offset, length)", field="ranges")
    for one in ranges:
        whole("ranges", one.offset, -MAX_U64)
        whole("ranges", one.length, -MAX_U64)

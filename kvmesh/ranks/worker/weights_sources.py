"""Where a rank reads new weights from: a folder, a prefix in object storage, or a trainer's memory; and from where it
may not, whoever orders it."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvmesh.engine.checkpoint import (
    ITEMSIZE,
    AllowedFolders,
    TensorInfo,
    check_tensors,
    open_weights,
    served_tensors,
)
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.tensor_sources import RemoteSource, TensorSource
from kvmesh.engine.tensors import canonical_name
from kvmesh.errors import CheckpointError, ConfigError, InvalidRequest, PermissionDenied, TransferError
from kvmesh.ranks import protocol as m
from kvmesh.transfer import Opcode, SegmentDescriptor, TransferEngine, TransferRequest, TransferState

if TYPE_CHECKING:
    from kvmesh.tiers.object_store.ranged import RangedReader

BOUNCE_BYTES = 64 << 20
READ_TIMEOUT_S = 60.0  # for one batch, of at most BOUNCE_BYTES
MAX_BATCH = 1024  # spans
URL = re.compile(r"[a-z][a-z0-9]*://[\w.-]+(/[\w.=+,~-]+)*/?", re.ASCII)  # no credentials, port, query or escapes
TOKEN = re.compile(r"[0-9a-zA-Z]{1,128}")  # of a segment
SEGMENT_NAME = re.compile(r"[\w.#@/:-]{1,256}", re.ASCII)


class WeightsLimits:
    """Says from where a rank takes new weights, by its own settings."""

    def __init__(self, configure: m.Configure) -> None:
        model = os.path.abspath(configure.model_path)
        parent = os.path.dirname(model)
        self.folders = AllowedFolders(configure.rollout_folders or (model if parent == "/" else parent,))
        own = {"localhost", configure.host, configure.advertise_host} - {"", "0.0.0.0", "::"}
        # Under TLS the trainer's certificate is looked at by the transfer engine.
        self._any_trainer = bool(configure.tls) and not configure.rollout_trainers
        self._names, self._networks = set[str](), list[ipaddress.IPv4Network | ipaddress.IPv6Network]()
        for one in configure.rollout_trainers or ("127.0.0.0/8", "::1", *own):
            try:
                self._networks.append(ipaddress.ip_network(one, strict=False))
            except ValueError:
                self._names.add(one)

    def check_url(self, url: str) -> None:
        """Raises InvalidRequest for what is no plain URL of a prefix, PermissionDenied for one that is not allowed."""
        if not URL.fullmatch(url) or any(
            not part.strip(".") for part in url.partition("://")[2].rstrip("/").split("/")
        ):
            raise InvalidRequest.of("path", url, "must be like s3://bucket/prefix: no port, credentials, query or dots")
        self.folders.check(url, url.rstrip("/"))

    def trainers(self, descriptor: SegmentDescriptor) -> SegmentDescriptor:
        """Returns the descriptor with those endpoints alone through which a trainer may be reached. Raises
        PermissionDenied where there are none, InvalidRequest for a name or token that is none: they are quoted to
        whoever listens at the address."""
        if not SEGMENT_NAME.fullmatch(descriptor.name) or not TOKEN.fullmatch(descriptor.token):
            raise InvalidRequest.of("segment", descriptor.name[:80], "the descriptor of a TrainerSegment")
        hosts = {endpoint.get("host", "") for endpoint in descriptor.endpoints.values()} - {""}
        kept = {}
        for transport, endpoint in descriptor.endpoints.items():
            if transport == "shm" and endpoint.get("path", "").startswith("@kvmesh-"):  # of this host and user
                kept[transport] = endpoint
            elif transport == "tcp" and self._is_allowed(endpoint.get("host", "")):
                kept[transport] = {name: endpoint[name] for name in ("host", "port") if name in endpoint}
            elif transport == "rdma" and self._is_allowed(endpoint.get("host", "")):
                kept[transport] = endpoint
        if not kept:
            named = ", ".join(sorted(hosts))[:80] or "another host"
            text = f"segment: a trainer at {named} is outside of rollout_trainers"
            raise PermissionDenied(text, field="segment")
        return replace(descriptor, endpoints=kept)

    def _is_allowed(self, host: str) -> bool:
        if self._any_trainer or host in self._names:
            return True
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def open_source(
    message: m.PrepareWeights, config: ModelConfig, engine: TransferEngine, limits: WeightsLimits
) -> TensorSource:
    """Opens the weights that an order names. Raises KvmeshError where they are not those of the model, cannot be
    reached, or are not allowed."""
    if message.segment:
        return TrainerTensors(engine, message, config, limits)
    if "://" in message.path:
        return ObjectTensors(message, config, limits)
    return open_weights(message.path, config, config.max_context_tokens, limits.folders)


class TrainerTensors(RemoteSource):
    """Reads tensors out of a running trainer's segment. Raises CheckpointError for tensors that are not those of the
    model, InvalidRequest for sizes that cannot be, TransferError when the trainer is out of reach."""

    least_gap = 4096  # reading so much takes less than one more request

    def __init__(
        self, engine: TransferEngine, message: m.PrepareWeights, config: ModelConfig, limits: WeightsLimits
    ) -> None:
        super().__init__(config)
        self.until = time.monotonic() + message.within_s
        found = {}
        for one in message.tensors:
            if one.dtype not in ITEMSIZE or any(dim < 1 for dim in one.shape):
                why = f"shape {list(one.shape)} of one of {', '.join(ITEMSIZE)}"
                raise InvalidRequest.of(f"tensors.{one.name}", f"{one.dtype} {list(one.shape)}", why)
            nbytes = math.prod(one.shape) * ITEMSIZE[one.dtype]
            name = canonical_name(config, one.name)
            found[name] = TensorInfo(name, one.dtype, one.shape, Path("trainer"), one.offset, nbytes)
        self.tensors = {name: found[name] for name in check_tensors(config, found, "the trainer's tensors")}
        self._engine = engine
        descriptor = limits.trainers(SegmentDescriptor.decode(message.segment))
        if _is_known(engine, descriptor.name):  # a trainer's must not stand for a peer's, to which KV goes
            raise InvalidRequest.of("segment", descriptor.name[:80], "another segment of this name is in use here")
        largest = max(info.nbytes for info in self.tensors.values())
        self._bounce = engine.allocate(min(BOUNCE_BYTES, largest))
        try:
            self._segment = engine.open_segment(descriptor)
        except BaseException:
            engine.unregister_memory(self._bounce)
            raise

    def _read(self, info: TensorInfo, spans: Sequence[tuple[int, int]], into: memoryview) -> None:
        bounce, at = self._bounce, 0
        assert bounce.memory is not None
        batch: list[tuple[int, int]] = []  # offset and size, one after the other in the bounce buffer
        held = 0
        for first, end in spans:
            while first < end:
                size = min(bounce.length - held, end - first)
                batch.append((info.offset + first, size))
                held, first = held + size, first + size
                if held == bounce.length or len(batch) == MAX_BATCH or at + held == len(into):
                    self._fetch(batch)
                    into[at : at + held] = bounce.memory[:held]
                    at, held, batch = at + held, 0, []

    def _fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Reads spans of the segment into the bounce buffer. Raises TransferError."""
        engine, requests, address = self._engine, [], self._bounce.address
        for offset, size in spans:
            requests.append(TransferRequest(Opcode.READ, address, self._segment, offset, size))
            address += size
        left_s = min(READ_TIMEOUT_S, self.until - time.monotonic())
        if left_s <= 0:
            raise TransferError(f"{self._segment} has not sent all weights in time")
        batch = engine.allocate_batch(len(requests))
        try:
            engine.submit(batch, requests)
            if not engine.wait_sync(batch, left_s):
                engine.cancel(batch)
                raise TransferError(f"{self._segment} has not sent a batch of reads within {left_s:.0f} s")
            for at, request in enumerate(requests):
                status = engine.status(batch, at)
                if status.state is not TransferState.COMPLETED:
                    why = status.cause or status.state.value
                    raise TransferError(f"{self._segment}: reading {request.length} bytes: {why}")
        finally:
            engine.free_batch(batch)

    def close(self) -> None:
        self._engine.close_segment(self._segment)
        self._engine.unregister_memory(self._bounce)


def _is_known(engine: TransferEngine, name: str) -> bool:
    """Says whether `name` is that of this engine's own segment, or of one that is open."""
    if name == engine.local_descriptor().name:
        return True
    try:
        engine.rails(name)
    except TransferError:
        return False
    return True


class ObjectFolder:
    """Is a prefix in object storage, as a WeightsFolder."""

    def __init__(self, reader: RangedReader) -> None:
        self._reader = reader

    def __str__(self) -> str:
        return self._reader.url

    def has(self, name: str) -> bool:
        return self._reader.version(name) is not None

    def size(self, name: str) -> int:
        version = self._reader.version(name)
        if version is None:
            raise CheckpointError(f"{self}/{name}: no such object", field="path")
        return version.size

    def read(self, name: str, first: int, length: int) -> bytes:
        into = bytearray(max(0, min(length, self.size(name) - first)))
        self._reader.read(name, [(first, first + len(into))] if into else [], memoryview(into))
        return bytes(into)

    def file(self, name: str) -> Path:
        return Path(name)


class ObjectTensors(RemoteSource):
    """Reads tensors out of safetensors in object storage. Raises as `RangedReader` does, and CheckpointError for
    tensors that are not those of the model."""

    least_gap = 1 << 20  # reading so much takes less than one more request

    def __init__(self, message: m.PrepareWeights, config: ModelConfig, limits: WeightsLimits) -> None:
        super().__init__(config)
        limits.check_url(message.path)
        try:
            from kvmesh.tiers.object_store.ranged import RangedReader
        except ImportError:
            raise ConfigError(f"path={message.path!r}: needs the extra `object` (obstore)", field="path") from None
        url, self.until = message.path.rstrip("/"), time.monotonic() + message.within_s
        self._reader = RangedReader(url, self.until)
        try:
            self.tensors = served_tensors(ObjectFolder(self._reader), config, config.max_context_tokens)
        except CheckpointError as error:
            self._reader.close()
            if url in error.message:
                raise
            raise CheckpointError(f"{url}: {error.message}", field=error.field) from None
        except BaseException:
            self._reader.close()
            raise

    @property
    def versions(self) -> str:
        """Names the versions of the objects that are read: all ranks are to have the same."""
        return self._reader.versions

    def _read(self, info: TensorInfo, spans: Sequence[tuple[int, int]], into: memoryview) -> None:
        self._reader.until = self.until
        base = info.offset
        self._reader.read(info.file.name, [(base + first, base + end) for first, end in spans], into)

    def close(self) -> None:
        self._reader.close()

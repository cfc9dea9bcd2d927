"""One end of a try between two hosts: an engine of one transport, memory to move, figures and checks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvmesh.errors import ConfigError, TransferError
from kvmesh.transfer import EngineConfig, Opcode, Range, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.host import look
from kvmesh.transfer.transports import registry

_REQUEST = 1 << 20
_LOCATION = "cpu:0"


@dataclass(frozen=True)
class Plan:
    """What the user asked for. `size` in bytes; `seconds` for each figure; `timeout_s` for any one step."""

    transports: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    size: int = 32 << 20
    seconds: float = 0.5
    timeout_s: float = 15.0
    fault: str = ""


def engine_config(transport: str, host: str, plan: Plan) -> EngineConfig:
    """Of an engine that peers reach at `host`, with the NICs that were asked for or else all that could be."""
    return EngineConfig(
        transports=(transport,),
        host=host,
        nics=nics_of(transport, host, plan.nics),
        connect_timeout_s=min(5.0, plan.timeout_s),
        ack_timeout_s=plan.timeout_s / 2,
        request_timeout_s=plan.timeout_s,
        max_attempts=2,
        max_sendings=4,
        close_timeout_s=5.0,
        fault=plan.fault,
    )


def nics_of(transport: str, host: str, wanted: Sequence[str], root: Path = Path("/")) -> tuple[str, ...]:
    """For rdma its devices, for tcp network interfaces: those wanted, else every one that has an address (rdma: ()
    means that). On loopback tcp has no choice."""
    if transport == "shm":
        return ()
    found = look(root)
    devices = [device.name for device in found.rdma]
    if transport == "rdma":
        return tuple(name for name in wanted if name in devices)
    if wanted:
        return tuple(name for name in wanted if name not in devices)
    if host.startswith("127.") or host == "::1":
        return ()
    from kvmesh.cli.doctor.network import interface_addresses

    def usable(name: str) -> bool:
        addresses = interface_addresses(name)
        return any(not address.startswith("fe80:") for address in addresses)

    bridges = {path.parent.name for path in (root / "sys/class/net").glob("*/bridge")}
    nets = [net.name for net in found.nets if net.up and not net.loopback and net.name not in bridges]
    return tuple(name for name in nets if usable(name))


def check_nics(wanted: Sequence[str], root: Path = Path("/")) -> None:
    """ConfigError: one that is not here, or there twice."""
    found = look(root)
    devices, nets = [device.name for device in found.rdma], [net.name for net in found.nets]
    for name in wanted:
        if name not in devices and name not in nets:
            has = f"RDMA devices {', '.join(devices) or 'none'}; interfaces {', '.join(nets) or 'none'}"
            raise ConfigError(f"nics={name!r}: not on this host, it has {has}", field="nics")
        if wanted.count(name) > 1:
            raise ConfigError(f"nics={','.join(wanted)!r}: {name!r} is there twice", field="nics")


def left_out(transport: str, wanted: Sequence[str], root: Path = Path("/")) -> list[str]:
    """NICs that a user would expect to be tried, and why they are not: "eth2 (no link)". None when some were asked
    for by name."""
    if wanted or transport not in ("rdma", "tcp"):
        return []
    found = look(root)
    if transport == "rdma":
        return [f"{one.name} (no link)" for one in found.rdma if not one.active]
    from kvmesh.cli.doctor.network import interface_addresses

    reasons = []
    for net in found.nets:
        addresses = interface_addresses(net.name)
        if not net.up and not net.loopback and (addresses or net.physical):
            reasons.append(f"{net.name} (no link)")
        elif net.up and net.physical and not addresses:
            reasons.append(f"{net.name} (no address)")
    return reasons


def check(plan: Plan) -> None:
    """ConfigError: a transport that nobody knows, a NIC that is not here."""
    check_nics(plan.nics)
    for name in plan.transports:
        try:
            registry.find(name)
        except TransferError as err:
            raise ConfigError(err.message, field=err.field) from None


@lru_cache(maxsize=1)
def pattern(seed: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What both ends make of a seed."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), dtype=np.uint8)


class Side:
    """An engine with one region of `size` bytes. Close it."""

    def __init__(self, transport: str, host: str, size: int, plan: Plan) -> None:
        self.plan = plan
        self.size = size
        missed = left_out(transport, plan.nics)
        self.engine = TransferEngine(f"doctor-{os.getpid()}@{time.time_ns():x}", engine_config(transport, host, plan))
        try:
            self.region = self.engine.allocate(size, _LOCATION)
        except BaseException:
            self.engine.close()
            raise
        assert self.region.memory is not None
        used = {nic.name for nic in self.engine.local_descriptor().nics}
        self.left_out = tuple(one for one in missed if one.partition(" ")[0] not in used)  # a link may change meanwhile
        self._bytes = np.frombuffer(self.region.memory, dtype=np.uint8)[:size]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def fill(self, seed: int) -> None:
        self._bytes[:] = pattern(seed, self.size)

    def wipe(self) -> None:
        self._bytes[:] = 0

    def differs_at(self, seed: int) -> int:
        """The first byte that is not what `seed` makes; -1: none."""
        wrong = self._bytes != pattern(seed, self.size)
        return int(np.argmax(wrong)) if wrong.any() else -1

    # ── as the target ─────────────────────────────────────────────────────────────────────────────

    def begin(self, writer: str, epoch: int) -> None:
        self.wipe()
        self.engine.open_window(writer, epoch, [Range(self.region.base_offset, self.size)])

    def end(self, writer: str, epoch: int) -> None:
        self.engine.fence(writer, epoch, self.plan.timeout_s)

    # ── as the caller ─────────────────────────────────────────────────────────────────────────────

    def once(self, opcode: Opcode, segment: str, offset: int, epoch: int) -> None:
        """Moves all of the region. TransferError with the cause in plain words."""
        requests = [
            TransferRequest(
                opcode,
                self.region.address + at,
                segment,
                offset + at,
                min(_REQUEST, self.size - at),
                epoch if opcode is Opcode.WRITE else 0,
            )
            for at in range(0, self.size, _REQUEST)
        ]
        batch = self.engine.allocate_batch(len(requests))
        self.engine.submit(batch, requests, self.plan.timeout_s)
        if not self.engine.wait_sync(batch, self.plan.timeout_s + 5.0):
            self.engine.cancel(batch)
            raise TransferError(f"nothing was answered for {self.plan.timeout_s:g} s")
        statuses = self.engine.statuses(batch)
        self.engine.free_batch(batch)
        bad = [status for status in statuses if status.state is not TransferState.COMPLETED]
        if bad:
            done = sum(status.bytes_done for status in statuses)
            raise TransferError(f"{bad[0].cause or bad[0].state.value} ({done >> 20} of {self.size >> 20} MiB arrived)")

    def rate(self, opcode: Opcode, segment: str, offset: int, epoch: int) -> float:
        """GB/s (10^9 bytes) over about `plan.seconds`. TransferError as `once`."""
        moved, start = 0, time.monotonic()
        while True:
            self.once(opcode, segment, offset, epoch)
            moved += self.size
            took = time.monotonic() - start
            if took >= self.plan.seconds:
                return moved / took / 1e9

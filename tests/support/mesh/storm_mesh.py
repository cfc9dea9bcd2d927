"""A mesh of several machines for storms: mTLS, API keys, a Redis with a password, and what is done to its processes.

Each machine is a network namespace (root only), so that it can be cut from the others; `m1` and `m2` hold one prefill
and one decode instance each, which share memory there. Without namespaces all live on one loopback and nothing is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import random
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvmesh.cli import collect
from kvmesh.cli.up import plan, serving
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rpc import security
from kvmesh.rpc.certificates import Certificates, make_certificates
from tests.audit.sleepers.process import ROOT, SITE
from tests.chaos.network import Loopback, network
from tests.support.mesh.client import until
from tests.support.mesh.harness import READY_S, Running

Kind = Literal["kill", "freeze", "cut", "suspend"]
KINDS: tuple[Kind, ...] = ("kill", "freeze", "cut", "suspend")

PLACES = {
    "prefill-0": "m1", "decode-0": "m1", "prefill-1": "m2", "decode-1": "m2", "pool-0": "p0", "gateway": "g0",
    "conductor-0": "c0", "conductor-1": "c1", "store-0": "s0", "store-1": "s1", "store-2": "s2", "redis": "r0",
}  # fmt: skip
HOSTS = tuple(dict.fromkeys(PLACES.values()))
# Whom a machine talks to.
PEERS = {
    "m1": ("m2", "p0", "g0", "c0", "c1", "s0", "s1", "s2"), "m2": ("m1", "p0", "g0", "c0", "c1", "s0", "s1", "s2"),
    "p0": ("m1", "m2", "s0", "s1", "s2"), "g0": ("m1", "m2", "c0", "c1"),
    "c0": ("c1", "g0", "m1", "m2", "r0", "s0", "s1", "s2"), "c1": ("c0", "g0", "m1", "m2", "r0", "s0", "s1", "s2"),
    "s0": ("m1", "m2", "p0", "c0", "c1", "r0"), "s1": ("m1", "m2", "p0", "c0", "c1", "r0"),
    "s2": ("m1", "m2", "p0", "c0", "c1", "r0"), "r0": ("c0", "c1", "s0", "s1", "s2"),
}  # fmt: skip
LEADERS = {"store leader": ("store-0", "store-1", "store-2"), "conductor leader": ("conductor-0", "conductor-1")}
TARGETS = (*PLACES, *LEADERS)
RANKED = ("prefill-0", "prefill-1", "decode-0", "decode-1")

LEASE_MS = 3_000  # of landings and of readers of the node stores; members' and leaders' leases are 2 s
ASLEEP_S = (4.0, 6.5)  # longer than any lease
MAX_AWAY = 3
BACK_S = 6.0  # a killed process counts as away for so long

PASSWORD = "storm-redis-password"
KEYS = {"alice": "sk-alice-0123456789abcdef", "bob": "sk-bob-0123456789abcdef"}


@dataclass(frozen=True, slots=True)
class Blow:
    """`seconds` after `at` it is undone. `rank`: its child processes alone; `peer`: of a cut, the machine that the
    target reaches no more ("": it reaches nobody, and nobody reaches it); `clocks`: of a suspension, whether
    CLOCK_BOOTTIME stood still, too."""

    at: float
    kind: Kind
    target: str
    seconds: float = 0.0
    rank: bool = False
    peer: str = ""
    clocks: bool = False

    def __str__(self) -> str:
        what = f"{self.kind} {self.target}{' (its rank)' if self.rank else ''}"
        what += f" → {self.peer}" if self.peer else ""
        what += f" for {self.seconds:.1f} s" if self.seconds else ""
        if self.kind == "suspend" and self.target != "redis":  # whose clocks are its own
            what += ", every clock" if self.clocks else ", but CLOCK_BOOTTIME"
        return what


def schedule(seed: int, blows: int, *, links: bool = True) -> list[Blow]:
    """So many blows, of all kinds alike, over all targets alike; at most MAX_AWAY processes or machines are away at
    once. Pure."""
    rng = random.Random(f"storm {seed}")
    kinds = [kind for kind in KINDS if links or kind != "cut"]
    found: list[Blow] = []
    at, drawn_kinds, drawn = 0.0, [*kinds[:0]], [*TARGETS[:0]]
    while len(found) < blows:
        drawn_kinds = drawn_kinds or rng.sample(kinds, len(kinds))
        kind = drawn_kinds.pop()
        at += rng.uniform(0.8, 3.2)
        while sum(_end(one) > at for one in found) >= MAX_AWAY:
            at = min(_end(one) for one in found if _end(one) > at)
        busy = {machine for one in found if _end(one) > at for machine in machines(one.target)}
        drawn = drawn or rng.sample(TARGETS, len(TARGETS))
        free = [target for target in drawn if not machines(target) & busy]
        target = rng.choice(free or [one for one in TARGETS if not machines(one) & busy])
        if target in drawn:
            drawn.remove(target)
        found.append(_blow(rng, at, kind, target))
    return found


def machines(target: str) -> set[str]:
    """Where it may be."""
    return {PLACES[name] for name in LEADERS.get(target, (target,))}


def _blow(rng: random.Random, at: float, kind: Kind, target: str) -> Blow:
    rank = target in RANKED and rng.random() < 0.4
    if kind == "kill":
        return Blow(at, kind, target, rank=rank)
    if kind == "freeze":
        return Blow(at, kind, target, rng.uniform(0.5, 4.0), rank=rank)
    if kind == "suspend":
        return Blow(at, kind, target, rng.uniform(*ASLEEP_S), clocks=rng.random() < 0.7)
    own = sorted(machines(target))
    peer = rng.choice([one for one in PEERS[own[0]] if one not in own]) if rng.random() < 0.4 else ""
    return Blow(at, kind, target, rng.uniform(1.0, 5.0), peer=peer)


def _end(blow: Blow) -> float:
    return blow.at + (BACK_S if blow.kind == "kill" else blow.seconds)


class StormMesh(Mesh):
    """Knows that a Redis that asks for a password is there."""

    def _is_ready(self, spec: plan.ProcessSpec) -> bool:
        return _redis_answers(spec.address) if spec.service == "redis" else super()._is_ready(spec)


def _redis_answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1) as peer:
        peer.sendall(b"PING\r\n")
        return peer.recv(16).startswith(b"-NOAUTH")
    return False


class Storm:
    """The running mesh, and the blows that fall on it."""

    def __init__(self, running: Running, net: Loopback, certificates: Certificates, clocks: Path) -> None:
        self.running = running
        self.net = net
        self.certificates = certificates
        self.url = running.mesh.url
        self._clocks = clocks
        self._lag = dict.fromkeys(PLACES, (0, 0))

    async def strike(self, blow: Blow) -> str:
        """Does it and undoes it; returns what was struck."""
        name = await self._who(blow.target)
        if blow.kind == "cut":
            await self._cut(name, blow)
            return name
        await until(lambda: self._alive(name), f"{name} to be there", READY_S)
        if blow.kind == "kill" and not blow.rank:
            self.running.kill(name)
        elif blow.kind == "kill":
            self._signal(name, signal.SIGKILL, rank=True)
        else:
            await self._stop(name, blow)
        return name

    def clocks_are_ours(self) -> bool:
        """Whether every Python process, ranks too, takes its clocks from the file that suspensions write."""
        return all(
            str(self._clocks / name) in Path(f"/proc/{pid}/maps").read_text()
            for name in PLACES
            if name != "redis"
            for pid in (self.running.pid(name), *self.running.rank_pids(name))
        )

    async def _who(self, target: str) -> str:
        names = LEADERS.get(target)
        if names is None:
            return target
        by_address = {self.running.mesh.addresses[name]: name for name in names}
        if target == "store leader":
            told = (await collect.ask_masters(",".join(by_address))).get("map", {}).get("address", "")
        else:
            each = (await collect.ask_conductors(",".join(by_address)))["conductors"]
            leading = [one["address"] for one in each if one.get("leadership", {}).get("role") == "leader"]
            told = leading[0] if leading else ""
        return by_address.get(told, names[0])

    async def _alive(self, name: str) -> bool:
        return bool(self.running.pid(name))

    async def _cut(self, name: str, blow: Blow) -> None:
        from tests.chaos.network import Namespaces

        assert isinstance(self.net, Namespaces)
        host = PLACES[name]
        try:
            if blow.peer:
                await asyncio.to_thread(self.net.cut_one_way, host, blow.peer)
            else:
                await asyncio.to_thread(self.net.cut, host)
            await asyncio.sleep(blow.seconds)
        finally:
            self.net.heal(host)

    async def _stop(self, name: str, blow: Blow) -> None:
        """SIGSTOP for a while, of a process with all its children (of its rank alone)."""
        started = time.monotonic_ns()
        pids = self._signal(name, signal.SIGSTOP, rank=blow.rank)
        try:
            await asyncio.sleep(blow.seconds)
        finally:
            if blow.kind == "suspend":
                slept = time.monotonic_ns() - started
                mono, boot = self._lag[name]
                self._lag[name] = (mono + slept, boot + slept * blow.clocks)
                with (self._clocks / name).open("r+b") as file:
                    file.write(struct.pack("<qq", *self._lag[name]))
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals, *, rank: bool) -> list[int]:
        pid = self.running.pid(name)
        pids = self.running.rank_pids(name) if pid else []
        pids = pids[:1] if rank and pids else [pid, *pids] if pid else []
        for one in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)
        return pids

    async def serving(self) -> None:
        """All processes are ready, and the mesh serves as `kvmesh up` understands it."""
        mesh = self.running.mesh
        await asyncio.to_thread(mesh.wait_ready, READY_S)
        left: list[str] = []

        async def serves() -> bool:
            left[:] = await asyncio.to_thread(serving.problems, mesh)
            return not left

        try:
            await until(serves, "a mesh that serves", 60.0)
        except AssertionError as error:
            raise AssertionError(f"{error}: {left}") from None


@asynccontextmanager
async def storm_mesh(model: Path, folder: Path) -> AsyncIterator[Storm]:
    """2 prefill, 2 decode, a pool node, 2 conductors, 3 store masters, a Redis and a gateway. This process becomes a
    member of the mesh."""
    before = security.current()
    with network(HOSTS) as net:
        hosts = sorted({net.address(host) for host in HOSTS})
        certificates = make_certificates(folder / "tls", hosts)
        clocks = folder / "clocks"
        clocks.mkdir()
        for name in PLACES:
            (clocks / name).write_bytes(bytes(16))
        ports = plan.Ports()
        settings = _settings(model, folder, certificates, clocks)
        mesh = StormMesh(settings, _moved(plan.plan(settings, folder / "run", ports), net))
        security.use(mesh.security)
        mesh.start()
        try:
            await asyncio.to_thread(mesh.wait_ready, READY_S)
            running = Running(mesh)
            try:
                storm = Storm(running, net, certificates, clocks)
                await storm.serving()
                yield storm
            finally:
                await running.client.close()
        finally:
            await asyncio.to_thread(mesh.stop)
            security.use(before)


def _settings(model: Path, folder: Path, certificates: Certificates, clocks: Path) -> MeshSettings:
    keys = folder / "keys.toml"
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    keys.write_text("".join(f'[[key]]\nname = "{name}"\nsha256 = "{value}"\n' for name, value in digests.items()))
    asleep = {"PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"}
    # So little room that memory is used again for other blocks all the time.
    short = {"lease_ms": LEASE_MS, "store_lease_ms": LEASE_MS, "num_pages": 96, "num_extents": 48}
    return MeshSettings(
        model=str(model),
        dtype="float32",  # who goes on elsewhere computes in other pieces: in bfloat16 that alone changes draws
        prefill=2,
        decode=2,
        pool=1,
        conductors=2,
        masters=3,
        redis="auto",
        api_keys=str(keys),
        http_port=0,
        grpc_port=0,
        memory_mb=64,
        pool_memory_mb=16,
        run_dir=str(folder / "run"),
        flags={
            **{name: {"node_id": host} for name, host in PLACES.items()},
            "prefill": {key: value for key, value in short.items() if key != "lease_ms"},
            "decode": short,
            "pool": {"store_lease_ms": LEASE_MS},
        },
        env={name: {**asleep, "TEST_CLOCKS": str(clocks / name)} for name in PLACES},
        http_tls_cert=str(certificates.cert),
        http_tls_key=str(certificates.key),
        **dataclasses.asdict(certificates.files),
    )


def _moved(specs: list[plan.ProcessSpec], net: Loopback) -> list[plan.ProcessSpec]:
    """Each process on its machine: its addresses, and all that it is told of others'; Redis gets a password."""
    here = plan.LOCALHOST
    at = {spec.name: net.address(PLACES[spec.name]) for spec in specs}
    names = {spec.address: spec.address.replace(here, at[spec.name]) for spec in specs}
    redis = next(spec.address for spec in specs if spec.name == "redis")

    def told(text: str) -> str:
        text = text.replace(f"redis://{redis}", f"redis://:{PASSWORD}@{redis}")
        for old, new in names.items():
            text = text.replace(old, new)
        return text

    moved = []
    for spec in specs:
        argv = [told(word) for word in spec.argv]
        argv = [
            at[spec.name] if word == here else word.replace(f"--host={here}", f"--host={at[spec.name]}")
            for word in argv
        ]
        if spec.name == "redis":
            argv += ["--requirepass", PASSWORD]
        moved.append(
            dataclasses.replace(
                spec,
                argv=(*net.inside(PLACES[spec.name]), *argv),
                env={key: told(value) for key, value in spec.env.items() if not key.startswith("KVMESH_STORM_")},
                **{key: getattr(spec, key).replace(here, at[spec.name]) for key in ("address", "metrics", "http")},
            )
        )
    return moved

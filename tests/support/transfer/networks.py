"""Hosts made of network namespaces, for tests of many NICs (root only), and engines that run in them.

a ── eth1 ══ bridge of "middle" ══ eth1 ── b        wired straight when `middle` is not asked for
  ── eth2 ══ bridge of "middle" ══ eth2 ──
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvmesh.transfer import EngineConfig, TransferState
from kvmesh.transfer.api import BatchId
from tests.support.transfer.peer import Actor, Peer, pattern


class HostActor(Actor):
    """What tests of networks also ask for."""

    def landed(self, writer: str, epoch: int) -> int:
        return self.engine.landed_bytes(writer, epoch)

    def counters(self) -> dict[str, int]:
        return self.engine.counters()

    def rails(self, segment: str) -> list[str]:
        return [str(rail) for rail in self.engine._sender.links[segment].rails]

    def over(self, batch: BatchId) -> bool:
        final = (TransferState.WAITING, TransferState.PENDING)
        return all(status.state not in final for status in self.engine.statuses(batch))

    def fill(self, seed: int) -> None:
        assert self.region is not None
        assert self.region.memory is not None
        self.region.memory[:] = pattern(seed, self.region.length)

    def blank(self) -> None:
        assert self.region is not None
        assert self.region.memory is not None
        self.region.memory[:] = bytes(self.region.length)

    def connected_addresses(self) -> set[tuple[str, str]]:
        """(own, peer's) of every tcp connection that its paths hold."""
        found = set()
        for path in list(self.engine._transports[0]._paths.values()):  # type: ignore[attr-defined]
            for stream in list(path.streams):
                if stream.sock is not None:
                    found.add((stream.sock.getsockname()[0], stream.sock.getpeername()[0]))
        return found


class HostPeer(Peer):
    """An engine in a process of its own in a namespace."""

    def __init__(self, network: str, name: str, config: EngineConfig) -> None:
        super().__init__(name, config, HostActor, network)


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Networks:
    """Namespaces a and b, and the bridges between them when there is a middle."""

    def __init__(self) -> None:
        self.tag = f"kvm{os.getpid()}"
        self.made: list[str] = []
        self.middle = False

    def name(self, host: str) -> str:
        return f"{self.tag}{host}"

    def host(self, host: str) -> None:
        run("ip", "netns", "add", self.name(host))
        self.made.append(host)
        self.ip(host, "link", "set", "lo", "up")

    def ip(self, host: str, *words: str) -> str:
        return run("ip", "-n", self.name(host), *words)

    def wire(self, nic: str, addresses: dict[str, list[str]], *, middle: bool = False) -> None:
        """`addresses`: host → addresses with prefixes, of "a" and "b"."""
        ends = {host: (self.name(host), nic) for host in addresses}
        if middle:
            self.ip("m", "link", "add", f"br-{nic}", "type", "bridge")
            self.ip("m", "link", "set", f"br-{nic}", "up")
            for host, (network, name) in ends.items():
                port = f"{host}-{nic}"
                self.ip("m", "link", "add", port, "type", "veth", "peer", "name", name, "netns", network)
                self.ip("m", "link", "set", port, "master", f"br-{nic}")
                self.ip("m", "link", "set", port, "up")
        else:
            (one, _), (other, _) = ends["a"], ends["b"]
            run("ip", "link", "add", nic, "netns", one, "type", "veth", "peer", "name", nic, "netns", other)
        for host, own in addresses.items():
            self.ip(host, "link", "set", nic, "addrgenmode", "none")
            self.ip(host, "link", "set", nic, "up")
            for address in own:
                self.ip(host, "address", "add", address, "dev", nic, *(["nodad"] if ":" in address else []))

    def slow(self, host: str, nic: str, rate: str) -> None:
        """What leaves here takes its time: a token bucket, `rate` in tc's units ("200mbit")."""
        words = ("qdisc", "replace", "dev", nic, "root", "tbf", "rate", rate, "burst", "256k", "latency", "100ms")
        run("tc", "-n", self.name(host), *words)

    def sent_bytes(self, host: str, nic: str) -> int:
        """As the kernel counts them."""
        (link,) = json.loads(self.ip(host, "-j", "-s", "link", "show", "dev", nic))
        return int(link["stats64"]["tx"]["bytes"])

    def swallow(self, nic: str) -> None:
        """Both ends keep their links, and no packet passes."""
        self.ip("m", "link", "set", f"a-{nic}", "nomaster")

    def deafen(self, nic: str) -> None:
        """b hears a, and a hears nothing of b: the bridge forgets where a is and may not ask."""
        self.ip("m", "link", "set", f"a-{nic}", "type", "bridge_slave", "learning", "off", "flood", "off")
        self.ip("m", "link", "set", f"a-{nic}", "type", "bridge_slave", "bcast_flood", "off", "mcast_flood", "off")
        run("bridge", "-n", self.name("m"), "fdb", "flush", "dev", f"br-{nic}")

    def close(self) -> None:
        for host in self.made:
            run("ip", "netns", "delete", self.name(host))


@contextmanager
def networks() -> Iterator[Networks]:
    """Skips the test where namespaces cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("ip and tc (iproute2) are not installed")
    made = Networks()
    try:
        try:
            for host in ("a", "b", "m"):
                made.host(host)
            run("ip", "-n", made.name("m"), "link", "add", "try", "type", "veth", "peer", "name", "try2")
        except OSError as err:
            pytest.skip(f"no network namespaces with veth here: {err}")
        yield made
    finally:
        made.close()

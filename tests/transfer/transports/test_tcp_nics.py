"""Many NICs over tcp: pairs, addresses, and what happens when one is cut, in network namespaces (root)."""

from __future__ import annotations

import dataclasses
import ipaddress
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, SegmentDescriptor, TransferState
from kvmesh.transfer.segment import why_no_answer
from kvmesh.transfer.transports.tcp.nics import Address, PeerNic, decode_nics, resolve, routes, straight
from tests.support.transfer.networks import HostPeer, Networks, networks
from tests.support.transfer.peer import pattern
from tests.support.transfer.raw import RawTcp
from tests.transfer.conftest import Nest, until

MIB = 1 << 20


# ── which NICs, which pairs: pure ─────────────────────────────────────────────────────────────────


def addresses(*rows: tuple[str, str, int]) -> list[Address]:
    found = []
    for text, interface, index in rows:
        parsed = ipaddress.ip_interface(text)
        found.append(Address(parsed.ip, parsed.network.prefixlen, interface, index))
    return found


HOST = addresses(
    ("127.0.0.1/8", "lo", 1),
    ("10.1.0.1/24", "eth1", 2),
    ("10.1.0.9/24", "eth1", 2),
    ("fe80::1/64", "eth1", 2),
    ("fd01::1/64", "eth1", 2),
    ("fe80::2/64", "eth2", 3),
)


def test_an_interface_stands_for_its_first_address_of_each_family() -> None:
    (nic,) = resolve(["eth1"], HOST)
    assert nic.name == "eth1"
    assert [str(a.ip) for a in nic.addresses] == ["10.1.0.1", "fd01::1"]
    (nic,) = resolve(["eth2"], HOST)
    assert [str(a.ip) for a in nic.addresses] == ["fe80::2"]


def test_two_addresses_of_one_family_are_two_nics() -> None:
    assert [n.name for n in resolve(["10.1.0.1", "10.1.0.9"], HOST)] == ["10.1.0.1", "10.1.0.9"]
    (nic,) = resolve(["10.1.0.9", "fd01::1"], HOST)
    assert nic.name == "eth1"
    assert [n.name for n in resolve(["127.0.0.1", "127.0.0.7"], HOST)] == ["127.0.0.1", "127.0.0.7"]


def test_link_local_addresses_keep_their_scope() -> None:
    (nic,) = resolve(["fe80::2%eth2"], HOST)
    assert nic.addresses[0].sockaddr(7) == ("fe80::2", 7, 0, 3)


@pytest.mark.parametrize("name", ["eth9", "10.9.9.9", "fe80::1%eth2"])
def test_what_is_not_here_is_an_error(name: str) -> None:
    with pytest.raises(TransferError, match=f"tcp_nics='{name}'"):
        resolve([name], HOST)


def test_one_subnet_first_and_families_never_mix() -> None:
    (mine,) = resolve(["eth1"], HOST)
    near = PeerNic("x", ((ipaddress.ip_address("10.1.0.2"), 1), (ipaddress.ip_address("fd09::2"), 2)))
    assert straight(mine, near)
    assert [(str(a.ip), str(ip)) for a, ip, _ in routes(mine, near)] == [
        ("10.1.0.1", "10.1.0.2"),
        ("fd01::1", "fd09::2"),
    ]
    (v6_only,) = resolve(["eth2"], HOST)
    assert routes(v6_only, PeerNic("y", ((ipaddress.ip_address("10.1.0.2"), 1),))) == []


@pytest.mark.parametrize("value", ["10.0.0.1", "10.0.0.1@x", "eth@5"])
def test_a_malformed_endpoint_is_an_error(value: str) -> None:
    with pytest.raises(TransferError, match="nic:eth1"):
        decode_nics({"host": "h", "port": "1", "nic:eth1": value})


def test_names_must_differ() -> None:
    with pytest.raises(TransferError) as info:
        EngineConfig(tcp_nics=("eth1", "eth1"))
    assert info.value.field == "tcp_nics"


# ── one host, two loopback addresses ──────────────────────────────────────────────────────────────

TWO = ("127.0.0.2", "127.0.0.3")


def test_listens_on_each_and_names_them(nest: Nest) -> None:
    actor = nest.actor("here#1", transports=("tcp",), tcp_nics=TWO)
    descriptor = SegmentDescriptor.decode(actor.descriptor())
    assert [(n.transport, n.name, n.address) for n in descriptor.nics] == [("tcp", n, n) for n in TWO]
    assert descriptor.endpoints["tcp"]["host"] == "127.0.0.2"
    assert [str(ip) for far in decode_nics(descriptor.endpoints["tcp"]) for ip, _ in far.addresses] == list(TWO)


@pytest.mark.parametrize(("ours", "theirs"), [(TWO, TWO), (TWO, ()), ((), TWO), (("::1",), ("::1",))])
def test_bytes_between_hosts_of_many_and_of_one_nic(nest: Nest, ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    here = nest.actor("here#1", transports=("tcp",), tcp_nics=ours)
    there = nest.actor("there#1", transports=("tcp",), tcp_nics=theirs)
    here.allocate(4 * MIB, seed=1)
    base = there.allocate(4 * MIB)
    segment = here.open(there.descriptor())
    there.window("here#1", 1, [(base, 4 * MIB)])
    assert {s.state for s in here.transfer("write", segment, [(0, base, 4 * MIB)], 1)} == {TransferState.COMPLETED}
    assert there.read(0, 4 * MIB) == pattern(1, 4 * MIB)
    (status,) = here.transfer("read", segment, [(0, base, 4 * MIB)])
    assert status.state is TransferState.COMPLETED


def test_families_that_do_not_meet_cannot_be_opened(nest: Nest) -> None:
    here = nest.actor("here#1", transports=("tcp",), tcp_nics=("127.0.0.2",))
    there = nest.actor("there#1", transports=("tcp",), tcp_nics=("::1",))
    with pytest.raises(TransferError, match="cannot be reached"):
        here.open(there.descriptor())


def test_a_greeting_on_one_nic_supersedes_what_came_over_another(nest: Nest) -> None:
    """The old connection stops in the middle of a slice; after the Welcome its bytes land nowhere."""
    target = nest.actor("target#1", transports=("tcp",), tcp_nics=TWO)
    base = target.allocate(MIB)
    target.window("writer#1", 1, [(base, MIB)])
    descriptor = SegmentDescriptor.decode(target.descriptor())
    one, other = (
        dataclasses.replace(descriptor, endpoints={"tcp": {"host": str(ip), "port": str(port)}})
        for far in decode_nics(descriptor.endpoints["tcp"])
        for ip, port in far.addresses
    )
    old = RawTcp(one, "writer#1", conn_id=1)
    old.start_write(1, 1, base, MIB)
    old.sock.sendall(b"x" * 1000)
    until(lambda: target.read(999, 1) == b"x", "half a slice landed")
    new = RawTcp(other, "writer#1", conn_id=2, supersedes=(1,))
    assert new.welcome == ""
    assert target.region is not None
    assert target.region.memory is not None
    target.region.memory[:] = bytes(MIB)
    with suppress(ConnectionError, ssl.SSLError):
        for _ in range(100):
            old.sock.sendall(b"y" * 10_000)
    assert target.read(0, MIB) == bytes(MIB)
    old.close()
    new.close()


# ── two hosts, in network namespaces ──────────────────────────────────────────────────────────────


class Hosts:
    """A writer on host a and a target on host b, 32 MiB each, with a window in epoch 1."""

    nbytes = 32 * MIB

    def __init__(self, nets: Networks, **options: object) -> None:
        base: dict[str, object] = {"transports": ("tcp",), "tcp_nics": ("eth1", "eth2"), "tcp_user_timeout_s": 0.4}
        config = EngineConfig(**(base | options))  # type: ignore[arg-type]
        self.nets = nets
        self.peers: list[HostPeer] = []
        self.a, self.b = self.start("a", "a#1", config), self.start("b", "b#1", config)
        self.a.allocate(self.nbytes, seed=1)
        self.base = self.b.allocate(self.nbytes)
        self.segment = self.a.open(self.b.descriptor())
        self.b.window("a#1", 1, [(self.base, self.nbytes)])

    def start(self, host: str, name: str, config: EngineConfig) -> HostPeer:
        peer = HostPeer(self.nets.name(host), name, config)
        self.peers.append(peer)
        return peer

    def batch(self, opcode: str) -> object:
        copies = [(i * MIB, self.base + i * MIB, MIB) for i in range(self.nbytes // MIB)]
        return self.a.start(opcode, self.segment, copies, 1 if opcode == "write" else 0)

    def moved(self, opcode: str) -> int:
        return int(self.a.counters().get(f"tcp.{opcode}_bytes", 0))

    def finish(self, batch: object, opcode: str) -> None:
        """All COMPLETED and the bytes right."""
        statuses = self.a.finish(batch, 40.0)
        assert {(s.state, s.cause) for s in statuses} == {(TransferState.COMPLETED, "")}
        assert self.a.read(0, self.nbytes) == self.b.read(0, self.nbytes)

    def end(self) -> None:
        for peer in self.peers:
            peer.end()


@pytest.fixture
def nets() -> Iterator[Networks]:
    with networks() as made:
        yield made


def two_wires(nets: Networks, *, middle: bool = False) -> None:
    for i in (1, 2):
        own = {"a": [f"10.{i}.0.1/24"], "b": [f"10.{i}.0.2/24"]}
        nets.wire(f"eth{i}", own, middle=middle)


def test_pairs_of_one_subnet_come_first(nets: Networks) -> None:
    two_wires(nets)
    hosts = Hosts(nets)
    try:
        assert hosts.a.rails(hosts.segment) == [
            "tcp eth1→eth1",
            "tcp eth2→eth2",
            "tcp eth1→eth2",
            "tcp eth2→eth1",
        ]
        hosts.finish(hosts.batch("write"), "write")
        used = hosts.a.connected_addresses()
        assert used
        assert used <= {("10.1.0.1", "10.1.0.2"), ("10.2.0.1", "10.2.0.2")}
    finally:
        hosts.end()


@pytest.mark.parametrize("cut", ["here", "there", "swallowed", "one-way"])
@pytest.mark.parametrize("opcode", ["write", "read"])
@pytest.mark.slow
def test_a_nic_is_cut_in_mid_transfer(nets: Networks, opcode: str, cut: str) -> None:
    """Both wires are slow enough that the cut falls into the transfer."""
    two_wires(nets, middle=True)
    for host in ("a", "b"):
        for nic in ("eth1", "eth2"):
            nets.slow(host, nic, "250mbit")
    hosts = Hosts(nets)
    try:
        if opcode == "read":
            hosts.b.fill(3)
        batch = hosts.batch(opcode)
        until(lambda: hosts.moved(opcode) > hosts.nbytes // 8, "some of it")
        assert not hosts.a.over(batch)
        if cut == "here":
            nets.ip("a", "link", "set", "eth1", "down")
        elif cut == "there":
            nets.ip("b", "link", "set", "eth1", "down")
        elif cut == "swallowed":
            nets.swallow("eth1")
        else:
            nets.deafen("eth1")
        hosts.finish(batch, opcode)
        assert hosts.a.counters().get("tcp.frames_lost", 0) > 0
        hosts.finish(hosts.batch(opcode), opcode)
    finally:
        hosts.end()


def test_a_slow_nic_is_dealt_less(nets: Networks) -> None:
    two_wires(nets)
    nets.slow("a", "eth1", "160mbit")
    nets.slow("a", "eth2", "1600mbit")
    hosts = Hosts(nets)
    try:
        hosts.finish(hosts.batch("write"), "write")  # what each of them is worth is measured now

        def dealt_less() -> bool:
            """Of one batch. (A busy machine makes the fast wire slow at times; who deals evenly never gets there.)"""
            before = [nets.sent_bytes("a", nic) for nic in ("eth1", "eth2")]
            hosts.b.blank()
            hosts.finish(hosts.batch("write"), "write")
            slow, fast = (nets.sent_bytes("a", nic) - was for nic, was in zip(("eth1", "eth2"), before, strict=True))
            assert slow + fast > hosts.nbytes
            return fast > 2.5 * slow

        until(dealt_less, "a batch of which the fast wire carries most")
    finally:
        hosts.end()


@pytest.mark.slow
def test_a_nic_that_comes_back_is_used_again(nets: Networks) -> None:
    two_wires(nets)
    hosts = Hosts(nets, rest_s=0.05)
    try:
        hosts.finish(hosts.batch("write"), "write")
        nets.ip("a", "link", "set", "eth1", "down")
        hosts.b.blank()
        hosts.finish(hosts.batch("write"), "write")
        nets.ip("a", "link", "set", "eth1", "up")

        def back() -> bool:
            hosts.finish(hosts.batch("write"), "write")
            return ("10.1.0.1", "10.1.0.2") in hosts.a.connected_addresses()

        until(back, "a connection over eth1")
    finally:
        hosts.end()


@pytest.mark.parametrize("kind", ["global", "link-local"])
@pytest.mark.slow
def test_ipv6_only(nets: Networks, kind: str) -> None:
    for i in (1, 2):
        net = f"fd0{i}::" if kind == "global" else "fe80::"
        nets.wire(f"eth{i}", {"a": [f"{net}{i}1/64"], "b": [f"{net}{i}2/64"]})
    hosts = Hosts(nets)
    try:
        hosts.finish(hosts.batch("write"), "write")
        nets.ip("a", "link", "set", "eth1", "down")
        hosts.b.blank()
        hosts.finish(hosts.batch("write"), "write")
        hosts.finish(hosts.batch("read"), "read")
    finally:
        hosts.end()


# ── one address, which others may not reach ───────────────────────────────────────────────────────


@pytest.mark.parametrize("transports", ["tcp", "auto"])
def test_a_host_that_advertises_loopback_is_named_elsewhere(nest: Nest, nets: Networks, transports: str) -> None:
    """The writer dials its own loopback, where nobody listens; its error says what the other one has to set."""
    nets.wire("eth1", {"a": ["10.1.0.1/24"], "b": ["10.1.0.2/24"]})
    writer = HostPeer(nets.name("a"), "a#1", EngineConfig(host="10.1.0.1"))
    nest.peers.append(writer)
    target = HostPeer(nets.name("b"), "b#1", EngineConfig(transports=(transports,)))
    nest.peers.append(target)
    base = target.allocate(MIB)
    writer.allocate(MIB, seed=1)
    segment = writer.open(target.descriptor())
    target.window("a#1", 1, [(base, MIB)])
    (status,) = writer.transfer("write", segment, [(0, base, MIB)], 1)
    assert status.state is TransferState.FAILED
    assert "b#1 runs on this machine in another network namespace and says host='127.0.0.1'" in status.cause
    assert "set its host, or advertise_host" in status.cause


def test_only_a_host_that_cannot_be_right_is_named(nest: Nest) -> None:
    own = nest.actor("here#1", transports=("tcp",)).engine.local_descriptor()
    elsewhere = replace(own, machine="another")
    assert why_no_answer(own, "tcp") == why_no_answer(own, "rdma") == ""
    assert "here#1 runs on another machine and says host='127.0.0.1'" in why_no_answer(elsewhere, "tcp")
    for endpoint in ({"host": "10.1.0.1"}, {"host": "beta"}, {}):
        assert why_no_answer(replace(elsewhere, endpoints={"tcp": endpoint}), "tcp") == ""
    assert why_no_answer(replace(own, endpoints={"tcp": {"host": "::1"}}), "tcp") == ""  # of an older version

"""What of the rdma transport needs no RDMA: layouts, messages, GIDs and pairs, admissions, versions."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig
from kvmesh.transfer.transports.rdma import gids, library, protocol, queue_pair, verbs
from kvmesh.transfer.transports.rdma.admissions import Admissions
from kvmesh.transfer.transports.rdma.device import Patience
from kvmesh.transfer.transports.rdma.gids import Gid, Network
from kvmesh.transfer.transports.wire import ProtocolBroken

# ── layouts ───────────────────────────────────────────────────────────────────────────────────────


class SendWr(ctypes.Structure):
    """ibv_send_wr as infiniband/verbs.h declares it, up to the members that we use."""

    _fields_ = (
        ("wr_id", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
        ("sg_list", ctypes.c_void_p),
        ("num_sge", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("send_flags", ctypes.c_uint),
        ("imm_data", ctypes.c_uint32),
        ("remote_addr", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
    )


def test_rows_are_the_structs_of_the_header() -> None:
    names = ["id", "next", "sges", "n_sges", "opcode", "flags", "imm", "remote", "rkey"]
    assert verbs.SEND_ROW.fields is not None
    assert [verbs.SEND_ROW.fields[name][1] for name in names] == [
        getattr(SendWr, field).offset for field, _ in SendWr._fields_
    ]
    assert verbs.SEND_ROW.itemsize == 128  # wr, qp_type and tso/bind_mw follow
    assert verbs.WORK_ROW.fields is not None and verbs.SGE_ROW.fields is not None
    for name, (kind, at, *_) in [*verbs.SEND_ROW.fields.items(), *verbs.SGE_ROW.fields.items()]:
        behind = 128 if name in verbs.SGE_ROW.fields else 0
        assert verbs.WORK_ROW.fields[name][:2] == (kind, at + behind)
    assert (verbs.SGE_ROW.itemsize, verbs.RECEIVE_ROW.itemsize, verbs.COMPLETION_ROW.itemsize) == (16, 32, 48)


class FakeNic:
    """Stands for the card: keeps the chain that was posted."""

    def __init__(self) -> None:
        self.name = "fake0"
        self.chain: list[tuple[Any, ...]] = []
        self.calls = self
        self.busy: set[int] = set()
        self.code = 0

    def make_queue_pair(self, depth: int, receives: int, inline: int, owner: object) -> tuple[Any, int, int, Any]:
        class Made:
            qp_num = 17

        return Made(), 0, 3, None

    def post_send(self, qp: int, first: int, bad: int) -> int:
        self.chain = []
        at = first
        while at:
            row = np.ctypeslib.as_array((ctypes.c_uint8 * 128).from_address(at)).view(verbs.SEND_ROW)[0]
            sge = np.ctypeslib.as_array((ctypes.c_uint8 * 16).from_address(int(row["sges"]))).view(verbs.SGE_ROW)[0]
            values = (row["id"], row["opcode"], row["flags"], row["imm"], row["remote"], row["rkey"], row["n_sges"])
            self.chain.append((*(int(v) for v in values), *(int(v) for v in sge.item())))
            at = int(row["next"])
        return self.code


class Deaf:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def chain_done(self, queue_pair: object, token: object) -> None:
        self.heard.append(token)

    def failed(self, queue_pair: object, status: int, cause: str, *, down: bool) -> None:
        self.heard.append((cause, down))

    def received(self, queue_pair: object, imm: int) -> None:
        self.heard.append(imm)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 46), st.integers(0, 1 << 46), st.integers(1, 1 << 22)), min_size=1, max_size=80
    )
)
def test_a_chain_holds_every_part_and_signals_the_last(parts: list[tuple[int, int, int]]) -> None:
    nic, sink = FakeNic(), Deaf()
    pair = queue_pair.QueuePair(nic, 80, 0, sink)  # type: ignore[arg-type]
    for count in (len(parts), 1, len(parts)):  # a longer chain after a shorter one: no link is lost
        rows = [(0, *part) for part in parts[:count]]
        pair.post(verbs.WRITE, rows, 1 << 20, 77, 88, "token")
        inline = [length <= queue_pair.INLINE_BYTES for _, _, _, length in rows]
        if count > queue_pair._FEW:
            inline = [all(inline)] * count
        assert [row[4:] for row in nic.chain] == [(o + (1 << 20), 88, 1, a, n, 77) for _, a, o, n in rows]
        flags = [verbs.INLINE if small else 0 for small in inline]
        flags[-1] |= verbs.SIGNALED
        assert [row[2] for row in nic.chain] == flags
        assert {row[0] >> 40 for row in nic.chain} == {3}
        assert pair.free == 80 - count and nic.busy == {3}
        pair.completed(nic.chain[-1][0] & ((1 << 40) - 1), verbs.SUCCESS, 1, 0)
        assert pair.free == 80 and nic.busy == set()
    assert sink.heard == ["token"] * 3


def test_a_refused_post_is_an_error_and_stays_counted() -> None:
    nic = FakeNic()
    pair = queue_pair.QueuePair(nic, 16, 0, Deaf())  # type: ignore[arg-type]
    nic.code = 12
    with pytest.raises(OSError, match="fake0: post_send"):
        pair.post(verbs.READ, [(0, 1, 2, 3)], 0, 0, 0, None)
    assert pair.free == 15


def test_polling_is_learnt_from_what_came_during_sleep() -> None:
    patience = Patience(50e-6)
    assert patience.window_s == 0  # nothing is known: it sleeps
    patience.completed(20e-6, slept=True)
    assert patience.window_s == pytest.approx(40e-6)
    patience.completed(45e-6, slept=True)
    assert patience.window_s == pytest.approx(50e-6)
    patience.completed(1.0, slept=False)
    assert patience.window_s == pytest.approx(50e-6)
    patience.completed(60e-6, slept=True)  # polling would not have found it
    assert patience.window_s == 0
    never = Patience(0.0)
    never.completed(1e-9, slept=True)
    assert never.window_s == 0


def test_a_pointer_is_found_by_what_it_points_to() -> None:
    class Slotted:
        __slots__ = ("other", "wanted")

    thing = Slotted()
    thing.other, thing.wanted = object(), "a string that only this slot points to"
    at, image = id(thing.wanted), ctypes.string_at(id(thing.wanted), 48)
    assert verbs.found(thing, lambda data: data == image, 48, "ibv_qp") == at
    with pytest.raises(TransferError, match="0 candidates for the ibv_qp"):
        verbs.found(thing, lambda data: data == bytes(48), 48, "ibv_qp")
    with pytest.raises(TransferError, match="2 candidates"):
        verbs.found(thing, lambda data: True, 16, "ibv_qp")


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


def test_messages_come_back_as_they_went() -> None:
    asked = [
        protocol.Connect(1, "a", "b", "::1", 2, 3, "::2", 0, 5, 16),
        protocol.Reset(2, "a", 9),
        protocol.AdmitEpoch(3, 1 << 63),
        protocol.Released(4, 5),
        protocol.AskKeys(6, 4096),
        protocol.Notify(7, 1, 2, 3, b"payload"),
        protocol.Checksum(8, (1, 2), (3, 4)),
        protocol.Landed(9, 10),
    ]
    for message in asked:
        data = protocol.encode(message)  # type: ignore[arg-type]
        assert protocol.LENGTH.unpack_from(data)[0] == len(data) - 4
        assert protocol.decode_asked(data[4:]) == message
    told = protocol.KeysAre(1, 2, 3, {"mlx5_0": 4})
    assert protocol.decode_told(protocol.encode(told)[4:]) == told
    for bad in (b"", b"\x93", protocol.encode(told)[4:]):
        with pytest.raises(ProtocolBroken):
            protocol.decode_asked(bad)


def test_mtu_codes() -> None:
    assert [protocol.mtu_code(n) for n in (256, 512, 1024, 2048, 4096, 0)] == [1, 2, 3, 4, 5, 5]


# ── GIDs ──────────────────────────────────────────────────────────────────────────────────────────


def fake_port(root: Path, device: str, entries: dict[int, tuple[str, str, str]], link_layer: str = "Ethernet") -> None:
    folder = root / device / "ports" / "1"
    for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (folder / name).mkdir(parents=True)
    (folder / "link_layer").write_text(link_layer + "\n")
    for index, values in entries.items():
        for name, value in zip(("gids", "gid_attrs/types", "gid_attrs/ndevs"), values, strict=True):
            (folder / name / str(index)).write_text(value + "\n")


FULL = {
    0: ("fe80:0000:0000:0000:0202:03ff:fe04:0506", "IB/RoCE v1", "eth0"),
    1: ("fe80:0000:0000:0000:0202:03ff:fe04:0506", "RoCE v2", "eth0"),
    2: ("fd00:0000:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth0"),
    4: ("0000:0000:0000:0000:0000:ffff:0a01:0203", "IB/RoCE v1", "eth0"),
    5: ("0000:0000:0000:0000:0000:ffff:0a01:0203", "RoCE v2", "eth0"),
    3: ("0000:0000:0000:0000:0000:0000:0000:0000", "", ""),
}


@pytest.mark.parametrize(
    ("indices", "best"), [((0, 1, 2, 3, 4, 5), 5), ((0, 1, 2, 3), 2), ((0, 1), 1), ((0, 3), 0), ((4, 2), 2)]
)
def test_the_best_gid(tmp_path: Path, indices: tuple[int, ...], best: int) -> None:
    fake_port(tmp_path, "mlx5_0", {i: FULL[i] for i in indices})
    assert gids.usable_gids(gids.read_gids("mlx5_0", 1, tmp_path), "mlx5_0")[0].index == best


def test_gids_by_hand_and_none(tmp_path: Path) -> None:
    fake_port(tmp_path, "mlx5_0", FULL)
    known = gids.read_gids("mlx5_0", 1, tmp_path)
    assert [gid.index for gid in known] == [0, 1, 2, 4, 5]
    assert [gid.index for gid in gids.usable_gids(known, "mlx5_0", 4)] == [4]
    for wrong, field in (((known, "mlx5_0", 3), "rdma_gid_index"), (([], "mlx5_0"), "nics")):
        with pytest.raises(TransferError, match="mlx5_0") as caught:
            gids.usable_gids(*wrong)  # type: ignore[arg-type]
        assert caught.value.field == field


def test_infiniband(tmp_path: Path) -> None:
    fake_port(tmp_path, "mlx5_0", {0: ("fe80:0000:0000:0000:0002:c903:0000:0001", "IB/RoCE v1", "")}, "InfiniBand")
    (gid,) = gids.read_gids("mlx5_0", 1, tmp_path)
    assert (gid.kind, gid.family) == ("ib", "ib")
    other = Gid(-1, "ib", gid.address + 1)
    assert len(gids.pairs({"mlx5_0": [gid]}, {"mlx5_0": [other]}, [])) == 1
    far = Gid(-1, "ib", gid.address + (1 << 64))
    assert gids.pairs({"mlx5_0": [gid]}, {"mlx5_0": [far]}, []) == []


def v4(address: str, interface: str = "", index: int = 0) -> Gid:
    return Gid(index, "v2", gids.ipaddress.IPv6Address(f"::ffff:{address}"), interface)


def link(number: int, interface: str = "") -> Gid:
    return Gid(0, "v2", gids.ipaddress.IPv6Address(f"fe80::{number}"), interface)


def networks(**by_interface: str) -> list[Network]:
    return [Network(name, gids.ipaddress.ip_network(text), False) for name, text in by_interface.items()]


def names(found: list[gids.Pair]) -> list[tuple[str, str]]:
    return [(pair.local, pair.remote) for pair in found]


def test_nics_of_one_subnet_are_paired() -> None:
    local = {"m0": [v4("10.0.0.1", "e0"), link(1, "e0")], "m1": [v4("10.0.1.1", "e1"), link(2, "e1")]}
    remote = {"n0": [v4("10.0.1.9"), link(3)], "n1": [v4("10.0.0.9"), link(4)]}
    rails = networks(e0="10.0.0.0/24", e1="10.0.1.0/24")
    assert names(gids.pairs(local, remote, rails)) == [("m0", "n1"), ("m1", "n0")]
    flat = networks(e0="10.0.0.0/16", e1="10.0.0.0/16")
    assert sorted(names(gids.pairs(local, remote, flat))) == [("m0", "n0"), ("m0", "n1"), ("m1", "n0"), ("m1", "n1")]


def test_a_router_is_the_second_choice_and_link_local_the_last() -> None:
    local = {"m0": [v4("10.0.0.1", "e0"), link(1, "e0")], "m1": [v4("10.0.1.1", "e1"), link(2, "e1")]}
    remote = {"n0": [v4("10.0.1.9"), link(3)], "n1": [v4("10.9.0.9"), link(4)]}
    routed = [
        *networks(e0="10.0.0.0/24", e1="10.0.1.0/24"),
        Network("e0", gids.ipaddress.ip_network("0.0.0.0/0"), True),
    ]
    assert names(gids.pairs(local, remote, routed)) == [("m1", "n0"), ("m0", "n0"), ("m0", "n1")]
    only_link = ({"m0": [link(1)], "m1": [link(2)]}, {"n0": [link(3)], "n1": [link(4)]})
    assert names(gids.pairs(*only_link, [])) == [("m0", "n0"), ("m1", "n1")]
    assert names(gids.given_pairs(("m1=n0", "m5=n0"), *only_link)) == [("m1", "n0")]


def test_descriptors_carry_gids() -> None:
    nics = {"m0": [v4("10.0.0.1"), link(1)], "m1": [link(2)]}
    back = gids.decode(gids.encode(nics))
    assert {n: [g.address for g in found] for n, found in back.items()} == {
        n: [g.address for g in found] for n, found in nics.items()
    }
    for bad in ("m0|v2", "m0|v9|::1", "m0|v2|nonsense"):
        with pytest.raises(TransferError, match="bad GID"):
            gids.decode(bad)


def test_routes_as_the_kernel_prints_them() -> None:
    text = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    text += "e0\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\ne0\t00000000\t01004D0A\t0003\t0\t0\t0\t00000000\n"
    assert [(str(n.network), n.gateway) for n in gids.ipv4_networks(text)] == [
        ("10.77.0.0/24", False),
        ("0.0.0.0/0", True),
    ]
    zero = "0" * 32
    rows = [
        f"fd000077000000000000000000000000 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001       e0",
        f"fe800000000000000000000000000000 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001       e0",
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo",
    ]
    assert [str(n.network) for n in gids.ipv6_networks("\n".join(rows))] == ["fd00:77::/64"]


# ── admissions ────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=8),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=30),
)
def test_parts_outside_the_ranges(spans: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    inside = {at for start, length in spans for at in range(start, start + length)}
    bounds = (
        sorted(at for at in inside if at - 1 not in inside),
        sorted(at + 1 for at in inside if at + 1 not in inside),
    )
    book = Admissions()
    book.ask(1, [5])
    assert book.admitted(1, 9, 2, *bounds) == {5}
    parts = [(0, 0, offset, length) for offset, length in asked]
    expected = tuple(i for i, (o, n) in enumerate(asked) if not set(range(o, o + n)) <= inside)
    assert book.known[1].outside(parts) == expected
    assert book.known[1].outside(parts * 20)[: len(expected)] == expected


def test_an_admission_is_given_back_when_nothing_flies() -> None:
    book = Admissions()
    book.ask(1, [])
    assert not book.ask(1, [])
    book.admitted(1, 9, 1, (), ())
    book.flew(1)
    book.flew(1)
    assert book.give_up(1) == 0
    assert not book.revoke(1, 9)
    assert 1 not in book.known
    assert (book.landed(1), book.landed(1)) == (0, 9)
    book.admitted(1, 10, 1, (), ())
    assert (book.give_up(1), book.give_up(1)) == (10, 0)


def test_a_fence_voids_older_generations() -> None:
    book = Admissions()
    book.admitted(1, 1, 1, (), ())
    book.admitted(2, 2, 2, (), ())
    book.fenced(2)
    assert set(book.known) == {2}
    book.disconnected()
    assert not book.known


# ── versions and configuration ────────────────────────────────────────────────────────────────────


def test_versions_must_fit() -> None:
    assert library.why_versions_differ("44.0", "44.0") == library.why_versions_differ("", "44.0") == ""
    assert "pyverbs 59.0 does not match libibverbs 44.0" in library.why_versions_differ("59.0", "44.0")
    maps = "7f00 r-xp 0 00:1 1   /usr/lib/libibverbs.so.1.14.44.0\n7f01 r-xp 0 00:1 1   /usr/lib/libc.so.6\n"
    assert library.version_in(library.mapped_libibverbs(maps)) == "44.0"
    assert library.version_in(library.mapped_libibverbs("")) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("No module named 'pyverbs'", "cannot be imported"),
        ("libibverbs.so.1: version `IBVERBS_PRIVATE_59' not found", "does not match the installed libibverbs"),
        ("libibverbs.so.1: cannot open shared object file", "install libibverbs1"),
    ],
)
def test_what_an_import_error_means(text: str, said: str) -> None:
    assert said in library.why_not_imported(ImportError(text))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rdma_retry_cnt", 7),
        ("rdma_slice_bytes", 8 << 20),
        ("rdma_mtu", 1500),
        ("rdma_pairs", ("mlx5_0",)),
        ("rdma_pairs", ("a=b=c",)),
        ("rdma_queue_depth", 1),
        ("rdma_qps_per_rail", 0),
        ("rdma_traffic_class", 256),
        ("rdma_service_level", 16),
        ("rdma_pkey_index", -1),
    ],
)
def test_bad_settings(field: str, value: object) -> None:
    with pytest.raises(TransferError, match=field) as caught:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field

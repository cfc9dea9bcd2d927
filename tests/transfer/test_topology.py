"""Which NICs a memory location prefers: on hosts that are made of files, and as operators say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, TransferEngine
from kvmesh.transfer.host import (
    AMD,
    NVIDIA,
    DeviceLocation,
    Host,
    HostGid,
    PcieLink,
    gids,
    look,
    memory_location,
    roce_mtu,
)
from kvmesh.transfer.segment import NicInfo, SegmentDescriptor
from kvmesh.transfer.topology import Distance, discover, distance, parse, resolve
from tests.support.transfer.sysfs import MELLANOX, NVIDIA_3D, Tree, bare_vm, laptop, two_sockets


def infos(host: Host) -> list[NicInfo]:
    return [NicInfo("rdma", d.name, "", d.place.numa, d.gbps) for d in host.rdma]


def mlx(*numbers: int) -> tuple[str, ...]:
    return tuple(f"mlx5_{n}" for n in numbers)


# ── what is found ─────────────────────────────────────────────────────────────────────────────────


def test_two_sockets_with_switches(tmp_path: Path) -> None:
    host = look(two_sockets(tmp_path).root)
    found = discover(host, infos(host))
    assert list(found) == ["cpu:0", "cpu:1", *(f"cuda:{i}" for i in range(8))]
    # A node's memory likes every fast NIC of its node; the slow one comes last though it is near.
    assert found["cpu:0"] == (mlx(0, 1, 2, 3), mlx(4, 5, 6, 7, 8))
    assert found["cpu:1"] == (mlx(4, 5, 6, 7), mlx(0, 1, 2, 3, 8))
    # A GPU likes those below its switch, then its node's, then the other node's.
    assert found["cuda:0"] == found["cuda:1"] == (mlx(0, 1), mlx(2, 3, 4, 5, 6, 7, 8))
    assert found["cuda:3"] == (mlx(2, 3), mlx(0, 1, 4, 5, 6, 7, 8))
    assert found["cuda:6"] == (mlx(6, 7), mlx(4, 5, 0, 1, 2, 3, 8))


def test_distances(tmp_path: Path) -> None:
    host = look(two_sockets(tmp_path).root)

    def to(nic: str) -> Distance:
        place = host.place_of(nic)
        assert place is not None
        return distance(host, "cuda:0", place)[0]

    assert [to(nic) for nic in ("mlx5_0", "eth1", "mlx5_2", "mlx5_8", "mlx5_4")] == [
        Distance.SWITCH, Distance.SWITCH, Distance.NODE, Distance.NODE, Distance.OTHER,
    ]  # fmt: skip
    place = host.place_of("mlx5_0")
    assert place is not None
    beside = DeviceLocation((place.chain[0], "0000:10:02.0", "0000:19:00.0"), 0)
    assert distance(host, "cuda:0", beside)[0] is Distance.ROOT
    assert Distance.OTHER.words == "other NUMA node"


def test_the_closer_of_two_below_one_root_port(tmp_path: Path) -> None:
    """Cascaded switches: the inner one is nearer."""
    tree = Tree(tmp_path)
    tree.nodes("10")
    inner = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0"
    tree.pci(f"{inner}/0000:04:00.0/0000:05:00.0", *NVIDIA_3D, 0)
    tree.rdma("near", tree.pci(f"{inner}/0000:04:01.0/0000:06:00.0", *MELLANOX, 0))
    tree.rdma("far", tree.pci("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:07:00.0", *MELLANOX, 0))
    host = look(tree.root)
    assert discover(host, infos(host)) == {"cpu:0": (("far", "near"), ()), "cuda:0": (("near",), ("far",))}


def test_nodes_of_one_socket_are_nearer_than_the_other_socket(tmp_path: Path) -> None:
    """Sub-NUMA clusters: node 1 has no NIC and takes its neighbour's."""
    tree = Tree(tmp_path)
    tree.nodes("10 12 21", "12 10 21", "21 21 10")
    tree.rdma("mlx5_0", tree.pci("pci0000:00/0000:01:00.0", *MELLANOX, 0))
    tree.rdma("mlx5_1", tree.pci("pci0000:80/0000:81:00.0", *MELLANOX, 2))
    host = look(tree.root)
    assert discover(host, infos(host))["cpu:1"] == (mlx(0), mlx(1))
    assert discover(host, infos(host))["cpu:2"] == (mlx(1), mlx(0))


def test_each_transport_is_ranked_by_itself(tmp_path: Path) -> None:
    host = look(two_sockets(tmp_path).root)
    nics = [
        *(NicInfo("rdma", f"mlx5_{n}", "", -1, 400.0) for n in (0, 4)),
        *(NicInfo("tcp", f"eth{n}", "", -1, 25.0) for n in (0, 4)),
    ]
    assert discover(host, nics)["cpu:1"] == (("mlx5_4", "eth4"), ("mlx5_0", "eth0"))


def test_a_laptop_and_a_vm_without_pci(tmp_path: Path) -> None:
    host = look(laptop(tmp_path / "laptop").root)
    assert (host.locations, host.rdma) == (("cpu:0",), ())
    net = host.net("wlp0s20f3")
    assert net is not None
    assert (net.up, net.gbps, net.physical, net.place.address) == (True, 0.0, True, "0000:00:14.3")
    lo = host.net("lo")
    assert lo is not None
    assert (lo.loopback, lo.physical, lo.place) == (True, False, DeviceLocation())
    assert discover(host, [NicInfo("tcp", "wlp0s20f3", "192.168.0.7")]) == {"cpu:0": (("wlp0s20f3",), ())}

    host = look(bare_vm(tmp_path / "vm").root)
    assert (host.locations, host.gpus) == (("cpu:0",), ())
    assert discover(host, [NicInfo("tcp", "eth0", "10.0.0.7")]) == {"cpu:0": (("eth0",), ())}
    assert discover(host, []) == {}


def test_no_sysfs_at_all(tmp_path: Path) -> None:
    assert look(tmp_path / "nothing") == Host()


def test_gpus_as_the_process_would_see_them(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    tree.file("proc/driver/nvidia/gpus/0000:13:00.0/information", "Model: X\nGPU UUID:\t GPU-aa11\nVideo BIOS: 1")

    def addresses(visible: str | None) -> list[str]:
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return [gpu.place.address for gpu in look(tree.root, env).gpus]

    everything = addresses(None)
    assert everything[:3] == ["0000:13:00.0", "0000:14:00.0", "0000:23:00.0"]
    assert addresses("2,0") == [everything[2], everything[0]]
    assert addresses("GPU-aa,1") == everything[:2]
    assert addresses("") == []
    assert addresses("1,9,2") == [everything[1]], "CUDA stops at what it does not know"


def test_gpus_of_the_other_vendor_and_those_lent_away(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.pci("pci0000:00/0000:01:00.0", "0x1002", "0x120000")
    assert [gpu.vendor for gpu in look(tmp_path).gpus] == [AMD]
    nvidia = tree.pci("pci0000:00/0000:02:00.0", *NVIDIA_3D)
    assert [gpu.vendor for gpu in look(tmp_path).gpus] == [NVIDIA]
    tree.link(f"sys/devices/pci0000:00/{nvidia.name}/driver", tree.root / "sys/bus/pci/drivers/vfio-pci")
    assert [gpu.vendor for gpu in look(tmp_path).gpus] == [AMD]


def test_ports_links_and_gids(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    tree.rdma("rxe0", None, rate="2.5 Gb/sec (1X SDR)", state="1: DOWN")
    tree.file("sys/class/infiniband/rxe0/parent", "eth3")
    tree.gid("rxe0", 0, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", "eth3")
    tree.gid("rxe0", 1, "0000:0000:0000:0000:0000:ffff:0a00:0102", "RoCE v2", "eth3")
    tree.gid("rxe0", 2, "fd00:0000:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth3")
    tree.gid("rxe0", 10, "0000:0000:0000:0000:0000:0000:0000:0000", "", "")
    host = look(tmp_path)
    by_name = {device.name: device for device in host.rdma}
    rxe, slow = by_name["rxe0"], by_name["mlx5_8"]
    assert (rxe.active, rxe.gbps, rxe.netdev) == (False, 0.0, "eth3")
    assert rxe.place == by_name["mlx5_3"].place, "Soft-RoCE is where its interface is"
    assert (slow.ports[0].state, slow.ports[0].physical, slow.gbps) == ("ACTIVE", "LinkUp", 25.0)
    assert slow.place.link == PcieLink(8.0, 4, 32.0, 8)
    assert slow.place.link.narrowed
    assert round(slow.place.link.gbps, 1) == 31.5
    assert not by_name["mlx5_0"].place.link.narrowed
    assert [gid.family for gid in gids(tmp_path, "rxe0")] == ["link-local", "IPv4", "IPv6"]
    assert gids(tmp_path, "rxe0")[1] == HostGid(1, "::ffff:10.0.1.2", "RoCE v2", "eth3")
    assert [roce_mtu(mtu) for mtu in (9000, 4200, 4191, 1500, 100)] == [4096, 4096, 2048, 1024, 0]


def test_memory_lies_where_its_process_is_bound(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    tree.file("sys/devices/system/node/node0/cpulist", "0-3,8-11")
    tree.file("sys/devices/system/node/node1/cpulist", "4-7,12-15")
    bound = [memory_location(cpus, tmp_path) for cpus in ({9}, {4, 15}, {3, 4}, {99}, set(range(16)))]
    assert bound == ["cpu:0", "cpu:1", "cpu:0", "cpu:0", "cpu:0"]
    assert memory_location({5}, tmp_path / "nothing") == "cpu:0"


# ── what operators say ────────────────────────────────────────────────────────────────────────────

LOCATIONS, NICS = ("cpu:0", "cuda:0"), ("eth0", "eth1", "mlx5_0")


def test_an_override_replaces_the_locations_it_names(tmp_path: Path) -> None:
    host = look(two_sockets(tmp_path / "host").root)
    told = {"cpu:1": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [["mlx5_7"]]}
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(told))
    found = discover(host, infos(host))
    for text in (json.dumps(told), str(file)):
        topology = resolve(text, host, infos(host))
        assert topology["cpu:1"] == (mlx(0), mlx(1))
        assert topology["cuda:0"] == (mlx(7), ())
        assert topology["cuda:1"] == found["cuda:1"]
    assert resolve(" ", host, infos(host)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"^topology=.\{.: is not JSON"),
        ("[]", "must be an object like"),
        ('{"cpu:0": ["eth0"]}', r"'cpu:0' must be \[\[preferred NICs\], \[secondary NICs\]\]"),
        ('{"cpu:0": [["eth0"], [1]]}', "'cpu:0' must be"),
        ('{"cpu:0": [[], [], []]}', "'cpu:0' must be"),
        ('{"cpu:0": {}}', "'cpu:0' must be"),
        ('{"cpu:7": [["eth0"]]}', "no memory location 'cpu:7' on this host, it has cpu:0, cuda:0"),
        ('{"cpu:0": [["eth9"]]}', "'cpu:0' names NIC 'eth9', but the transports here use eth0, eth1, mlx5_0"),
        ('{"cpu:0": [["eth0"], ["eth0"]]}', "names NIC 'eth0' twice"),
        ('{"cpu:0": [["eth0"]], "cpu:0": [["eth1"]]}', "'cpu:0' is there twice"),
        ("[" * 100_000, "^topology=.*: (nested too deep|is not JSON)"),
        ("/no/such/file", "topology='/no/such/file': cannot be read: No such file or directory"),
        ("a\0b", "cannot be read"),
        ("/", "cannot be read: Is a directory"),
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_override_is_one_clear_error(text: str, words: str) -> None:
    with pytest.raises(TransferError, match=words) as caught:
        parse(text, LOCATIONS, NICS)
    assert caught.value.field == "topology"
    assert len(caught.value.message) < 400


def test_an_override_where_there_is_no_choice() -> None:
    with pytest.raises(TransferError, match="the transports here have no choice of NICs"):
        parse('{"cpu:0": [["eth0"]]}', LOCATIONS, ())


# ── in the engine ─────────────────────────────────────────────────────────────────────────────────


def test_the_engine_refuses_what_its_transports_do_not_have() -> None:
    with pytest.raises(TransferError, match=r"nics='nope0': not here: RDMA devices .*; interfaces .*lo") as caught:
        TransferEngine("a#1", EngineConfig(transports=("shm",), nics=("nope0",)))
    assert caught.value.field == "nics"
    with pytest.raises(TransferError, match=r"nics='lo': no transport here uses it.*transports: shm; in use: none"):
        TransferEngine("a#1", EngineConfig(transports=("shm",), nics=("lo",)))
    with pytest.raises(TransferError, match=r"'cpu:0' names NIC 'nope0'"):
        TransferEngine("a#1", EngineConfig(transports=("shm",), topology='{"cpu:0": [["nope0"]]}'))
    with pytest.raises(TransferError, match="nics='a,a': names must differ"):
        EngineConfig(nics=("a", "a"))


def test_a_descriptor_carries_the_topology() -> None:
    nics = (NicInfo("tcp", "eth0", "10.0.0.1", 0, 100.0),)
    sent = SegmentDescriptor("a#1", "here", "secret", (), {}, nics, {"cpu:0": (("eth0",), ())})
    assert SegmentDescriptor.decode(sent.encode()) == sent

"""What a host has, by /sys under a given root: NUMA nodes, GPUs, RDMA devices, network interfaces, and where they are
plugged in. Nothing here raises for what is missing or odd: a laptop, a container and a VM without PCIe are hosts too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

NVIDIA, AMD = "0x10de", "0x1002"
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NOT_FOR_US = ("vfio-pci", "pci-stub", "xen-pciback")  # drivers that lend a device to a virtual machine
# What RoCE needs of an Ethernet frame beside the payload: GRH 40, UDP 8, BTH 12, XRC 4, AtomicETH 28, ICRC 4 bytes
# (the Linux kernel's iboe_get_mtu subtracts these).
_ROCE_HEADERS = 96


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A PCIe link: its present speed and width, and the most that the device supports. Speeds are in GT/s a lane; 0
    means unknown."""

    speed: float = 0.0
    width: int = 0
    max_speed: float = 0.0
    max_width: int = 0

    @property
    def gbps(self) -> float:
        """The payload bandwidth in 10^9 bits a second, before packet headers. The line code is 8b/10b up to 5 GT/s,
        128b/130b up to 32 GT/s, and FLITs with 242 of 256 bytes at 64 GT/s (PCI Express Base Specification)."""
        coding = 0.8 if self.speed <= 5 else 128 / 130 if self.speed <= 32 else 242 / 256
        return self.speed * self.width * coding

    @property
    def narrowed(self) -> bool:
        """Whether the link runs with fewer lanes or slower than the device supports."""
        return 0 < self.width < self.max_width or 0 < self.speed < self.max_speed

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.width}" if self.width else "unknown"


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Where a device is plugged in. `chain` is the PCI root complex, then every bridge, then the device itself; it is
    empty for what is not on PCI. `numa` is the NUMA node, -1 if unknown."""

    chain: tuple[str, ...] = ()
    numa: int = -1
    link: PcieLink = PcieLink()

    @property
    def address(self) -> str:
        """The PCI address of the device, or ""."""
        return self.chain[-1] if len(self.chain) > 1 else ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `location` is its torch name as this process sees it ("cuda:0")."""

    location: str
    vendor: str
    place: DeviceLocation


@dataclass(frozen=True, slots=True)
class HostGid:
    """An entry of a port's GID table. `kind` is the kernel's name of its type: "IB/RoCE v1" or "RoCE v2"."""

    index: int
    value: str
    kind: str
    netdev: str

    @property
    def family(self) -> str:
        """ "IPv4", "IPv6" or "link-local" (which only reaches its own link)."""
        address = ipaddress.IPv6Address(self.value)
        if address.ipv4_mapped:
            return "IPv4"
        return "link-local" if address.is_link_local else "IPv6"


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device. `state` is for example "ACTIVE" or "DOWN", `layer` "InfiniBand" or "Ethernet" (RoCE),
    `rate` the kernel's text ("100 Gb/sec (4X EDR)")."""

    number: int
    state: str
    physical: str
    layer: str
    rate: str
    lid: int = 0

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def gbps(self) -> float:
        found = re.match(r"[\d.]+", self.rate)
        return float(found[0]) if found else 0.0


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    name: str
    place: DeviceLocation
    ports: tuple[Port, ...]
    netdev: str  # of a RoCE device; "" for InfiniBand
    firmware: str

    @property
    def active(self) -> bool:
        return any(port.active for port in self.ports)

    @property
    def gbps(self) -> float:
        return max((port.gbps for port in self.ports if port.active), default=0.0)


@dataclass(frozen=True, slots=True)
class NetDevice:
    """A network interface. `gbps` 0 means unknown, as for virtual ones; `physical` is false for bridges, veths and
    tunnels."""

    name: str
    place: DeviceLocation
    up: bool
    mtu: int
    gbps: float
    physical: bool
    loopback: bool


@dataclass(frozen=True, slots=True)
class Host:
    """The hardware of a host. `nodes` are the NUMA nodes with memory; `distances` maps (from, to) to the firmware's
    figure, where 10 is local."""

    nodes: tuple[int, ...] = (0,)
    distances: Mapping[tuple[int, int], int] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    nets: tuple[NetDevice, ...] = ()

    @property
    def locations(self) -> tuple[str, ...]:
        """The memory locations: "cpu:N" for each NUMA node N with memory, "cuda:N" for each GPU."""
        return (*(f"cpu:{node}" for node in self.nodes), *(gpu.location for gpu in self.gpus))

    def place_of(self, nic: str) -> DeviceLocation | None:
        """Returns where an RDMA device or network interface is plugged in, or None when there is none of that name."""
        places = {net.name: net.place for net in self.nets} | {device.name: device.place for device in self.rdma}
        return places.get(nic)

    def net(self, name: str) -> NetDevice | None:
        return next((net for net in self.nets if net.name == name), None)


def look(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> Host:
    """Returns the host whose /sys and /proc lie under `root`. CUDA_VISIBLE_DEVICES in `env` restricts the GPUs."""
    sys = root / "sys"
    nodes, distances = _numa(sys)
    return Host(
        nodes=nodes,
        distances=distances,
        gpus=_gpus(root, env or {}),
        rdma=tuple(_rdma(sys, path) for path in _entries(sys / "class/infiniband")),
        nets=tuple(_net(sys, path) for path in _entries(sys / "class/net") if path.is_dir()),
    )


def memory_location(cpus: Collection[int], root: Path = Path("/")) -> str:
    """Returns the location of memory that a process bound to these CPUs touches first, such as "cpu:1". If the CPUs
    belong to several nodes it is the first of them."""
    base = root / "sys/devices/system/node"
    for node in _numa(root / "sys")[0]:
        if not _ranges(_text(base / f"node{node}/cpulist")).isdisjoint(cpus):
            return f"cpu:{node}"
    return "cpu:0"


# ── NUMA and PCI ──────────────────────────────────────────────────────────────────────────────────


def _numa(sys: Path) -> tuple[tuple[int, ...], dict[tuple[int, int], int]]:
    base = sys / "devices/system/node"
    online = sorted(int(path.name[4:]) for path in _entries(base) if re.fullmatch(r"node\d+", path.name))
    with_memory = _ranges(_text(base / "has_memory"))
    nodes = tuple(node for node in online if not with_memory or node in with_memory) or (0,)
    distances = {}
    for node in online:
        row = _text(base / f"node{node}/distance").split()
        if len(row) == len(online):
            distances.update({(node, other): int(text) for other, text in zip(online, row, strict=True)})
    return nodes, distances


def _ranges(text: str) -> set[int]:
    """Parses a list of ranges: "0-2,5" gives {0, 1, 2, 5}."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _place(device: Path) -> DeviceLocation:
    """Returns the place of the nearest PCI device above a link such as /sys/class/net/eth0/device (a virtio NIC lies
    below one)."""
    try:
        real = device.resolve(strict=True)
    except (OSError, RuntimeError):
        return DeviceLocation()
    while not _FUNCTION.fullmatch(real.name) and real != real.parent and real.name != "devices":
        real = real.parent
    chain = tuple(part for part in real.parts if _ROOT.fullmatch(part) or _FUNCTION.fullmatch(part))
    if not _FUNCTION.fullmatch(real.name):
        return DeviceLocation(numa=_number(device / "numa_node", -1))
    link = PcieLink(
        _leading(_text(real / "current_link_speed")),
        int(_leading(_text(real / "current_link_width"))),
        _leading(_text(real / "max_link_speed")),
        int(_leading(_text(real / "max_link_width"))),
    )
    width = link.width if link.width < 255 else 0  # 255: the bridge does not know
    return DeviceLocation(chain, _number(real / "numa_node", -1), link if width else PcieLink())


def _gpus(root: Path, env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Lists GPUs by PCI address, which is CUDA's order for GPUs of one kind (for others with
    CUDA_DEVICE_ORDER=PCI_BUS_ID)."""
    found: dict[str, list[tuple[str, DeviceLocation]]] = {NVIDIA: [], AMD: []}
    for path in _entries(root / "sys/bus/pci/devices"):
        vendor, kind = _text(path / "vendor"), _text(path / "class")
        display, accelerator = kind.startswith("0x03"), kind.startswith("0x12")
        if vendor not in found or not (display or accelerator):
            continue
        try:
            if (path / "driver").readlink().name in _NOT_FOR_US:
                continue
        except OSError:
            pass  # no driver yet
        found[vendor].append((path.name, _place(path)))
    vendor = NVIDIA if found[NVIDIA] else AMD
    places = [place for _, place in sorted(found[vendor], key=lambda one: one[0])]
    places = _visible(root, places, env.get("CUDA_VISIBLE_DEVICES"))
    return tuple(Gpu(f"cuda:{i}", vendor, place) for i, place in enumerate(places))


def _visible(root: Path, places: list[DeviceLocation], wanted: str | None) -> list[DeviceLocation]:
    """Applies CUDA_VISIBLE_DEVICES as CUDA does: numbers, UUIDs or beginnings of UUIDs, up to the first entry that is
    neither."""
    if wanted is None:
        return places
    chosen = []
    for text in (part.strip() for part in wanted.split(",")):
        if text.isdecimal() and int(text) < len(places):
            chosen.append(places[int(text)])
            continue
        named = [p for p in places if text.startswith("GPU-") and _uuid(root, p.address).startswith(text)]
        if len(named) != 1:
            break
        chosen.append(named[0])
    return chosen


def _uuid(root: Path, address: str) -> str:
    text = _text(root / "proc/driver/nvidia/gpus" / address / "information")
    found = re.search(r"GPU UUID:\s*(\S+)", text)
    return found[1] if found else ""


# ── NICs ──────────────────────────────────────────────────────────────────────────────────────────


def _rdma(sys: Path, path: Path) -> RdmaDevice:
    ports = []
    for port in sorted(_entries(path / "ports"), key=lambda one: one.name):
        if not port.name.isdecimal():
            continue
        ports.append(
            Port(
                int(port.name),
                _after_colon(_text(port / "state")),
                _after_colon(_text(port / "phys_state")),
                _text(port / "link_layer"),
                _text(port / "rate"),
                int(_text(port / "lid") or "0", 0) if re.fullmatch(r"0x[0-9a-f]+|\d+", _text(port / "lid")) else 0,
            )
        )
    netdev = _text(path / "parent")  # of Soft-RoCE
    if not re.fullmatch(r"\S+", netdev):
        netdev = next((_text(port / "gid_attrs/ndevs/0") for port in _entries(path / "ports")), "")
    place = _place(path / "device")
    if not place.chain and netdev:
        place = _net_place(sys, sys / "class/net" / netdev)
    return RdmaDevice(path.name, place, tuple(ports), netdev, _text(path / "fw_ver"))


def gids(root: Path, device: str, port: int = 1) -> tuple[HostGid, ...]:
    """Returns the GIDs of a port that are set. It takes hundreds of small reads, so callers do this only
    when needed."""
    base = root / "sys/class/infiniband" / device / "ports" / str(port)
    found = []
    for path in sorted(_entries(base / "gids"), key=lambda one: _leading(one.name)):
        try:
            value = ipaddress.IPv6Address(_text(path))
        except ValueError:
            continue
        if not path.name.isdecimal() or int(value) in (0, 0xFE80 << 112):
            continue
        kind, netdev = _text(base / "gid_attrs/types" / path.name), _text(base / "gid_attrs/ndevs" / path.name)
        shown = f"::ffff:{value.ipv4_mapped}" if value.ipv4_mapped else str(value)
        found.append(HostGid(int(path.name), shown, kind, netdev))
    return tuple(found)


def roce_mtu(netdev_mtu: int) -> int:
    """Returns the largest RDMA MTU (256 to 4096 bytes) that fits an interface's MTU; 0 when none does."""
    return max((mtu for mtu in (256, 512, 1024, 2048, 4096) if mtu + _ROCE_HEADERS <= netdev_mtu), default=0)


def _net(sys: Path, path: Path) -> NetDevice:
    state = _text(path / "operstate")
    flags = int(_text(path / "flags") or "0", 0)
    speed = _number(path / "speed", -1)  # Mb/s; -1 or an error: unknown
    loopback = bool(flags & 0x8)
    return NetDevice(
        name=path.name,
        place=_net_place(sys, path),
        up=state == "up" or (state == "unknown" and bool(flags & 0x1)),
        mtu=_number(path / "mtu", 0),
        gbps=max(speed, 0) / 1000,
        physical=(path / "device").exists(),
        loopback=loopback,
    )


def _net_place(sys: Path, path: Path) -> DeviceLocation:
    """Returns the place of an interface, or of the one below it for a bond or VLAN."""
    for _ in range(4):
        if (path / "device").exists():
            return _place(path / "device")
        lower = [one.name.removeprefix("lower_") for one in _entries(path) if one.name.startswith("lower_")]
        if not lower:
            break
        path = sys / "class/net" / lower[0]
    return DeviceLocation()


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, default: int) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return default


def _leading(text: str) -> float:
    found = re.match(r"\d+(?:\.\d+)?", text)
    return float(found[0]) if found else 0.0


def _after_colon(text: str) -> str:
    return text.rpartition(":")[2].strip()

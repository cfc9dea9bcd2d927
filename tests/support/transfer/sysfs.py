"""Trees like /sys of hosts that are not here."""

from __future__ import annotations

import os
from pathlib import Path

NVIDIA_3D, MELLANOX = ("0x10de", "0x030200"), ("0x15b3", "0x020700")


class Tree:
    """`root` has `sys` and `proc` below it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, text: object) -> None:
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(f"{text}\n")

    def link(self, path: str, target: Path) -> None:
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(os.path.relpath(target, at.parent))

    def nodes(self, *rows: str) -> None:
        """One a NUMA node: its distances."""
        for node, row in enumerate(rows):
            self.file(f"sys/devices/system/node/node{node}/distance", row)
        last = len(rows) - 1
        self.file("sys/devices/system/node/has_memory", f"0-{last}" if last else "0")

    def pci(
        self, path: str, vendor: str, kind: str, numa: int = -1, speed: float = 32, width: int = 16, lanes: int = 16
    ) -> Path:
        """`path`: "pci0000:00/0000:00:01.0/0000:01:00.0"."""
        at = f"sys/devices/{path}"
        for name, text in (
            ("vendor", vendor),
            ("class", kind),
            ("numa_node", numa),
            ("current_link_speed", f"{speed:.1f} GT/s PCIe"),
            ("current_link_width", width),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("max_link_width", lanes),
        ):
            self.file(f"{at}/{name}", text)
        device = self.root / at
        self.link(f"sys/bus/pci/devices/{device.name}", device)
        return device

    def rdma(self, name: str, device: Path | None, rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE") -> None:
        base = f"sys/class/infiniband/{name}"
        for key, text in (
            ("fw_ver", "28.39.1002"),
            ("ports/1/state", state),
            ("ports/1/phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled"),
            ("ports/1/link_layer", "Ethernet"),
            ("ports/1/rate", rate),
            ("ports/1/lid", "0x0"),
        ):
            self.file(f"{base}/{key}", text)
        if device is not None:
            self.link(f"{base}/device", device)

    def gid(self, name: str, index: int, value: str, kind: str, netdev: str) -> None:
        base = f"sys/class/infiniband/{name}/ports/1"
        self.file(f"{base}/gids/{index}", value)
        self.file(f"{base}/gid_attrs/types/{index}", kind)
        self.file(f"{base}/gid_attrs/ndevs/{index}", netdev)

    def net(self, name: str, device: Path | None, speed: int = 400_000, mtu: int = 9000, state: str = "up") -> None:
        base = f"sys/class/net/{name}"
        up = "0x1003" if name != "lo" else "0x9"
        for key, text in (("operstate", state), ("flags", up), ("mtu", mtu), ("speed", speed)):
            self.file(f"{base}/{key}", text)
        if device is not None:
            self.link(f"{base}/device", device)


def two_sockets(root: Path) -> Tree:
    """8 GPUs and 8 NICs: on each socket two root complexes, each with a switch of two GPUs and two NICs; on the first
    socket a slow NIC of its own root complex besides."""
    tree = Tree(root)
    tree.nodes("10 21", "21 10")
    for switch in range(4):
        numa, complex_ = switch // 2, f"{16 * (switch + 1):02x}"
        base = f"pci0000:{complex_}/0000:{complex_}:01.0/0000:{switch + 1:x}1:00.0"
        for i in range(2):
            n = 2 * switch + i
            down = f"{base}/0000:{switch + 1:x}2:0{i}.0"
            tree.pci(f"{down}/0000:{switch + 1:x}{3 + i}:00.0", *NVIDIA_3D, numa)
            down = f"{base}/0000:{switch + 1:x}2:0{i + 2}.0"
            nic = tree.pci(f"{down}/0000:{switch + 1:x}{5 + i}:00.0", *MELLANOX, numa)
            tree.rdma(f"mlx5_{n}", nic)
            tree.net(f"eth{n}", nic)
    slow = tree.pci("pci0000:00/0000:00:1c.0/0000:02:00.0", *MELLANOX, 0, speed=8, width=4, lanes=8)
    tree.rdma("mlx5_8", slow, rate="25 Gb/sec (1X EDR)")
    tree.net("eth8", slow, speed=25_000, mtu=1500)
    tree.pci("pci0000:00/0000:00:1d.0/0000:03:00.0", "0x1a03", "0x030000", 0)  # the BMC's screen
    return tree


def laptop(root: Path) -> Tree:
    """One node, Wi-Fi of unknown speed, an integrated GPU of neither vendor."""
    tree = Tree(root)
    tree.nodes("10")
    tree.pci("pci0000:00/0000:00:02.0", "0x8086", "0x030000")
    wifi = tree.pci("pci0000:00/0000:00:14.3", "0x8086", "0x028000", width=0, lanes=0)
    tree.net("wlp0s20f3", wifi, speed=-1, mtu=1500)
    tree.net("lo", None, speed=-1, mtu=65536, state="unknown")
    return tree


def bare_vm(root: Path) -> Tree:
    """No PCI, no NUMA folder; one interface on a bus that is not PCI."""
    tree = Tree(root)
    tree.file("sys/devices/virtio-mmio-cmdline/virtio-mmio.0/virtio0/device", "0x0001")
    tree.net("eth0", root / "sys/devices/virtio-mmio-cmdline/virtio-mmio.0/virtio0", speed=-1, mtu=1400)
    return tree

"""What `kvmesh doctor` finds of NICs: RDMA and its software, interfaces, buffers, firewall, topology, transports.

Everything is read below a root folder, so that tests show hosts that are not here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvmesh.cli.doctor.checks import text_of
from kvmesh.cli.doctor.findings import Finding
from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, TransferEngine
from kvmesh.transfer.host import DeviceLocation, Host, NetDevice, RdmaDevice, gids, roce_mtu
from kvmesh.transfer.segment import NicInfo
from kvmesh.transfer.topology import discover
from kvmesh.transfer.transports.registry import KNOWN_TRANSPORTS, described

RDMA_WOULD = "KV over RDMA; without it KV moves over shm and tcp"
ROCE_UDP_PORT = 4791
_GOOD_BUFFER = 4 << 20  # what 100 Gb/s needs at 300 µs
_TOOL_S = 5.0
_GIDS_SHOWN = 2  # of each kind; a card has two for every address

# ── RDMA ──────────────────────────────────────────────────────────────────────────────────────────


def verbs(root: Path, installed: tuple[str, str] | None = None) -> Finding:
    """pyverbs binds private symbols of libibverbs: both must be of one rdma-core version. `installed`: pyverbs'
    version and private ABI, "" for what is not known, both "" for none; None: look."""
    ours, abi = pyverbs() if installed is None else installed
    library = libibverbs(root)
    theirs = ".".join(library.name.split(".")[4:]) if library else ""  # libibverbs.so.1.14.44.0 is rdma-core 44.0
    if not ours and not abi:
        need = f"apt install python3-pyverbs, or the PyPI pyverbs of rdma-core {theirs or 'as installed'}"
        lib = f"libibverbs {theirs}" if library else "no libibverbs"
        if elsewhere := _unseen(root):
            return Finding(
                "pyverbs", "missing", f"not in this environment ({lib}); {elsewhere[0]}", RDMA_WOULD, elsewhere[1]
            )
        return Finding("pyverbs", "missing", f"not installed ({lib})", RDMA_WOULD, need)
    shown = f"pyverbs {ours}" if ours else f"pyverbs (private ABI {abi})"
    if library is None:
        return Finding("pyverbs", "missing", f"{shown}, but no libibverbs", RDMA_WOULD, "apt install libibverbs1")
    fits = f"IBVERBS_PRIVATE_{abi}".encode() in library.read_bytes() if abi else True
    if not fits or (ours and ours.split(".")[0] != theirs.split(".")[0]):
        todo = f"the distribution's python3-pyverbs, or the PyPI pyverbs of rdma-core {theirs}"
        return Finding("pyverbs", "missing", f"{shown} does not match libibverbs {theirs}", RDMA_WOULD, todo)
    return Finding("pyverbs", "ok", f"{shown} and libibverbs {theirs} match")


def _unseen(root: Path) -> tuple[str, str] | None:
    """Of the distribution's pyverbs, which a virtual environment does not see: that it is there, and what to do."""
    folder = root / "usr/lib/python3/dist-packages/pyverbs"
    built = next((path for path in sorted(folder.glob("device.cpython-*.so"))), None)
    if built is None:
        return None
    tag = built.name.split("-")[1]
    python = f"{tag[0]}.{tag[1:]}"
    if tag != sys.implementation.cache_tag.split("-")[1]:
        return (
            f"the system has it for Python {python}",
            f"python{python} -m venv --system-site-packages, to have it here",
        )
    return "the system has it", "a virtual environment made with --system-site-packages sees it"


def pyverbs() -> tuple[str, str]:
    """Version as its package says, and the private ABI that its modules are linked to."""
    abi = version = ""
    try:
        version = importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        pass  # the distribution's package says nothing
    spec = importlib.util.find_spec("pyverbs")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("device.*.so")):
            if found := re.search(rb"IBVERBS_PRIVATE_(\d+)", path.read_bytes()):
                abi = found[1].decode()
    return version, abi


def libibverbs(root: Path) -> Path | None:
    for folder in ("usr/lib", "usr/lib64", f"usr/lib/{platform.machine()}-linux-gnu", "usr/local/lib"):
        for path in sorted((root / folder).glob("libibverbs.so.1.*.*")):
            return path
    return None


def rdma_devices(root: Path, host: Host) -> list[Finding]:
    """One line a device; one line that says why there is none."""
    if not host.rdma:
        todo = "an RDMA card and its driver, or Soft-RoCE for trying: rdma link add rxe0 type rxe netdev eth0"
        return [Finding("RDMA devices", "missing", "the kernel shows none", RDMA_WOULD, todo)]
    return [_device(root, host, device) for device in host.rdma]


def _device(root: Path, host: Host, device: RdmaDevice) -> Finding:
    level, todo = "ok", ""
    words = []
    kinds: dict[tuple[str, str], list[str]] = {}
    for port in device.ports:
        words.append(f"port {port.number} {port.state} {port.physical}, {_layer(port.layer)}, {port.rate}")
        for gid in gids(root, device.name, port.number):
            kind = (gid.kind.replace("IB/RoCE", "RoCE"), gid.family)
            kinds.setdefault(kind, []).append(f"{gid.index}: {gid.value.removeprefix('::ffff:')}")
    roce = any(port.layer == "Ethernet" for port in device.ports)
    told = [f"{' '.join(kind)} ({', '.join(kinds[kind][:_GIDS_SHOWN])}{_more(kinds[kind])})" for kind in sorted(kinds)]
    words.append(f"GIDs: {', '.join(told) or 'none'}")
    net = host.net(device.netdev)
    if roce and net is not None:
        words.append(f"{net.name} MTU {net.mtu}: RDMA MTU {roce_mtu(net.mtu)}")
    words.append(_placed(device.place))
    if device.firmware:
        words.append(f"firmware {device.firmware}")
    if not device.active:
        level, todo = "warn", f"no link: cable, switch port, ip link set {device.netdev or device.name} up"
    elif not kinds:
        level, todo = "warn", f"no GID: give {device.netdev or 'its interface'} an IP address"
    elif roce and all(family == "link-local" for _, family in kinds):
        level, todo = (
            "warn",
            f"only link-local GIDs reach no further than one wire: ip addr add ... dev {device.netdev}",
        )
    elif slow := _bottleneck(device.place, device.gbps):
        level, todo = "warn", slow
    elif roce and net is not None and roce_mtu(net.mtu) < 4096:
        level, todo = "warn", f"ip link set {net.name} mtu 9000, if the switch takes it: RDMA MTU 4096 costs less"
    return Finding(device.name, level, "; ".join(words), todo=todo)


def _more(of: Sequence[str]) -> str:
    return f" and {len(of) - _GIDS_SHOWN} more" if len(of) > _GIDS_SHOWN else ""


def _layer(layer: str) -> str:
    return {"Ethernet": "Ethernet (RoCE)"}.get(layer, layer or "unknown layer")


def _placed(place: DeviceLocation) -> str:
    numa = f"NUMA node {place.numa}" if place.numa >= 0 else "NUMA node unknown"
    if not place.address:
        return f"not on PCI, {numa}"
    return f"PCI {place.address}, {place.link if place.link.width else 'link unknown'}, {numa}"


def _bottleneck(place: DeviceLocation, gbps: float) -> str:
    """What to do about a PCIe link that carries less than the port; "" when it is enough."""
    link = place.link
    if not link.width or link.gbps >= gbps * 0.95:
        return ""
    text = f"PCIe {link} carries {link.gbps:.0f} Gb/s of {gbps:.0f}"
    if link.narrowed:
        return f"{text}, the card could {link.max_speed:g} GT/s x{link.max_width}: another slot, or reseat it"
    return f"{text}: a slot with more lanes"


def device_memory(root: Path, host: Host) -> list[Finding]:
    """Whether NICs may reach GPUs' memory themselves."""
    if not host.gpus:
        return [Finding("GPU memory", "ok", "no GPU here: neither nvidia_peermem nor dma-buf is needed")]
    if any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")):
        return [Finding("GPU memory", "ok", "nvidia_peermem is loaded")]
    if "Open Kernel Module" in text_of(root / "proc/driver/nvidia/version"):
        return [Finding("GPU memory", "ok", "dma-buf, by NVIDIA's open kernel modules")]
    why = "neither nvidia_peermem nor NVIDIA's open kernel modules (dma-buf)"
    return [Finding("GPU memory", "missing", why, "RDMA straight from and to GPUs", "modprobe nvidia_peermem")]


# ── interfaces ────────────────────────────────────────────────────────────────────────────────────


def interfaces(host: Host, addresses: Callable[[str], Sequence[str]]) -> list[Finding]:
    """One line a physical interface; where there is none, as in a container, a line for each virtual one that has an
    address."""
    found = [_interface(net, addresses(net.name)) for net in host.nets if net.physical]
    virtual = [net for net in host.nets if not net.loopback and not net.physical and addresses(net.name)]
    if not found:
        found = [_interface(net, addresses(net.name)) for net in virtual]
    return found or [Finding("interfaces", "ok", "no physical one, only loopback")]


def _interface(net: NetDevice, addresses: Sequence[str]) -> Finding:
    speed = f"{net.gbps:g} Gb/s" if net.gbps else "speed unknown"
    if not net.up:
        return Finding(net.name, "warn", "no link", todo=f"ip link set {net.name} up, cable; or leave it out of --nics")
    has = ", ".join(addresses) or "no address"
    where = _placed(net.place) if net.physical else "virtual"
    found = f"up, {speed}, MTU {net.mtu}, {has}; {where}"
    if not addresses:
        return Finding(net.name, "warn", found, todo=f"ip addr add ADDRESS/BITS dev {net.name}, to use it for tcp")
    if slow := _bottleneck(net.place, net.gbps):
        return Finding(net.name, "warn", found, todo=slow)
    if net.physical and net.gbps >= 10 and net.mtu < 9000:
        todo = f"ip link set {net.name} mtu 9000, if the switch takes it: fewer packets, less CPU"
        return Finding(net.name, "warn", found, todo=todo)
    return Finding(net.name, "ok", found)


def interface_addresses(name: str) -> list[str]:
    """IPv4 and IPv6 addresses of an interface of this network namespace."""
    import socket

    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [one.address for one in psutil.net_if_addrs().get(name, ()) if one.family in families]


def tcp_buffers(root: Path) -> Finding:
    """How far a connection may grow: the kernel sizes them itself up to tcp_rmem and tcp_wmem."""
    sizes = {}
    for key, path in (
        ("rmem_max", "core/rmem_max"),
        ("wmem_max", "core/wmem_max"),
        ("tcp_rmem", "ipv4/tcp_rmem"),
        ("tcp_wmem", "ipv4/tcp_wmem"),
    ):
        numbers = re.findall(r"\d+", text_of(root / "proc/sys/net" / path))
        sizes[key] = int(numbers[-1]) if numbers else 0
    found = ", ".join(f"{key} {_size(size)}" for key, size in sizes.items())
    low = [key for key in ("tcp_rmem", "tcp_wmem") if 0 < sizes[key] < _GOOD_BUFFER]
    if low:
        sets = " ".join(f'net.ipv4.{key}="4096 131072 16777216"' for key in low)
        return Finding("tcp buffers", "warn", found, todo=f"fast links with delay need more: sysctl -w {sets}")
    return Finding("tcp buffers", "ok", found)


def _size(nbytes: int) -> str:
    if not nbytes:
        return "unknown"
    return f"{nbytes / (1 << 20):.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:.3g} KiB"


# ── firewall ──────────────────────────────────────────────────────────────────────────────────────


def run_tool(argv: Sequence[str]) -> str | None:
    """What a tool prints; None where it is not there, may not look, or does not answer."""
    path = shutil.which(argv[0]) or shutil.which(argv[0], path="/usr/sbin:/sbin")
    if path is None:
        return None
    try:
        done = subprocess.run([path, *argv[1:]], capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def firewall(root: Path, tool: Callable[[Sequence[str]], str | None] = run_tool) -> Finding:
    """Only hints: whether something here may turn peers away."""
    ports = re.findall(r"\d+", text_of(root / "proc/sys/net/ipv4/ip_local_port_range"))
    span = f"TCP {' to '.join(ports)}" if ports else "TCP ports that the kernel picks"
    todo = f"let mesh hosts reach {span} here, and UDP {ROCE_UDP_PORT} for RoCE v2; kvmesh doctor --peer tries it"
    seen = []
    blocking = False
    for name, argv in (
        ("nft", ("nft", "list", "ruleset")),
        ("iptables", ("iptables", "-S")),
        ("ip6tables", ("ip6tables", "-S")),
    ):
        text = tool(argv)
        if text is None:
            continue
        rules, blocks = nft_rules(text) if name == "nft" else iptables_rules(text)
        seen.append(f"{name}: {rules} rules{', incoming traffic is filtered' if blocks else ''}")
        blocking = blocking or blocks
    if not seen:
        why = "not looked at: no nft or iptables that this user may ask" if os.geteuid() else "no nft, no iptables"
        return Finding("firewall", "ok", why)
    return Finding("firewall", "warn" if blocking else "ok", "; ".join(seen), todo=todo if blocking else "")


def nft_rules(text: str) -> tuple[int, bool]:
    """Returns how many rules there are, and whether a chain of the input hook drops or rejects."""
    count, blocks, incoming = 0, False, False
    for line in (raw.strip() for raw in text.splitlines()):
        if line.startswith(("chain ", "table ")) or line == "}":
            incoming = False
        elif line.startswith("type "):
            incoming = "hook input" in line
            blocks = blocks or (incoming and "policy drop" in line)
        elif line and not line.endswith("{") and line[0] not in "#}":
            count += 1
            blocks = blocks or (incoming and bool(re.search(r"\b(drop|reject)\b", line)))
    return count, blocks


def iptables_rules(text: str) -> tuple[int, bool]:
    """Returns the same as `nft_rules`, from what `iptables -S` prints."""
    lines = text.splitlines()
    blocks = "-P INPUT DROP" in lines or any(re.match(r"-A INPUT .*-j (DROP|REJECT)\b", line) for line in lines)
    return sum(line.startswith("-A ") for line in lines), blocks


# ── what follows ──────────────────────────────────────────────────────────────────────────────────


def topology(host: Host) -> list[Finding]:
    """Which NICs each memory location would prefer; of RDMA devices where there are any, else of interfaces."""
    rdma = [NicInfo("rdma", d.name, "", d.place.numa, d.gbps) for d in host.rdma if d.active]
    nets = [NicInfo("tcp", n.name, "", n.place.numa, n.gbps) for n in host.nets if n.physical and n.up]
    virtual = [NicInfo("tcp", n.name, "", -1, n.gbps) for n in host.nets if n.up and not n.physical and not n.loopback]
    found = discover(host, rdma or nets or virtual)
    if not found:
        return [Finding("topology", "ok", "no NIC to choose from")]
    return [
        Finding(location, "ok", ", ".join(first) + (f"; then {', '.join(second)}" if second else ""))
        for location, (first, second) in found.items()
    ]


def transports(wanted: Sequence[str] = ("rdma", "shm", "tcp")) -> list[Finding]:
    """Starts an engine of each and says what came of it."""
    return [*(_transport(name) for name in wanted), auto()]


def auto() -> Finding:
    """What transports=auto chooses here, and why."""
    try:
        with TransferEngine(f"doctor@{os.getpid()}", EngineConfig(transports=("auto",))) as engine:
            return Finding("auto", "ok", described(engine.choices))
    except TransferError as err:
        return Finding("auto", "broken", err.message, "KV at all", "see the lines above")


def _transport(name: str) -> Finding:
    enables = {"rdma": RDMA_WOULD, "shm": "KV between processes of one host at memory speed"}.get(name, "KV over tcp")
    if name not in KNOWN_TRANSPORTS:
        return Finding(name, "missing", "not part of this version", enables)
    try:
        with TransferEngine(f"doctor@{os.getpid()}", EngineConfig(transports=(name,))) as engine:
            nics = [nic.name for nic in engine.local_descriptor().nics]
    except Exception as err:  # whatever keeps it from starting is what this command is for
        text = err.message if isinstance(err, TransferError) else f"{type(err).__name__}: {err}"
        level, why = "broken" if name == "tcp" else "missing", text.removeprefix(f"{name}: ")
        return Finding(name, level, why, enables, "see the lines above")
    return Finding(name, "ok", f"starts{', over ' + ', '.join(nics) if nics else ''}")

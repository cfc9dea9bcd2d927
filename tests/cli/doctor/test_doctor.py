"""What `kvmesh doctor` finds on hosts that are made of files, in plain words, and how it looks."""

from __future__ import annotations

import io
import json
import re
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.cli.console import console
from kvmesh.cli.doctor import checks as checks
from kvmesh.cli.doctor import command as doctor
from kvmesh.cli.doctor import network as network
from kvmesh.cli.doctor.findings import Finding, screen
from kvmesh.cli.doctor.fits import fits
from kvmesh.transfer.host import DeviceLocation, Host, NetDevice, look
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.transfer.sysfs import NVIDIA_3D, Tree, bare_vm, two_sockets


def by_name(found: Sequence[Finding]) -> dict[str, Finding]:
    return {one.what: one for one in found}


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def test_doctor_looks_at_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for what in (
        "python", "cpu", "torch", "cuda", "triton", "port 8000", "port 8001", "shared memory", "huge pages",
        "locked memory", "pyverbs", "tcp buffers", "firewall", "cpu:0", "rdma", "shm", "tcp",
    ):  # fmt: skip
        assert re.search(rf"^  {what} +(ok|warn|missing)  ", result.output, re.M), what
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert {"what", "level", "found", "enables", "todo", "group"} == set(told[0])
    for one in told:
        assert one["level"] in ("ok", "warn", "missing")
        assert (one["todo"] != "") == (one["level"] != "ok"), one
        assert (one["enables"] != "") == (one["level"] == "missing"), one
    counts = [f"{n} {level}" for level in ("ok", "warn", "missing") if (n := sum(o["level"] == level for o in told))]
    assert result.output.splitlines()[-1] == f"✓ kvmesh runs here ({', '.join(counts)})"


def test_doctor_leaves_with_1_when_kvmesh_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "findings", lambda: [Finding("torch", "broken", "gone", todo="pip install torch")])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert re.search(r"torch +broken +gone\s+next: pip install torch", result.output)
    assert "✗ kvmesh does not run here, because of torch (1 broken)" in result.output


def test_the_help_says_what_the_words_and_the_exit_status_mean() -> None:
    told = " ".join(
        CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output.split()
    )
    for words in ("warn (it works", "Exit status: 0", "130 Ctrl-C", "GB/s (10^9 bytes)", "kvmesh doctor --listen"):
        assert words in told, words


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_of_a_large_host_cuts_nothing(tmp_path: Path, width: int) -> None:
    tree = two_sockets(tmp_path)
    host = look(tree.root)
    found = [
        *network.rdma_devices(tree.root, host),
        *network.interfaces(host, lambda _: ["10.0.0.1", "fd00:1234:5678:9abc:def0:1234:5678:9abc"]),
        *network.topology(host),
        Finding("[bold]odd[/]", "missing", "[red]words[/]", "[x]", "[y]", "a group"),
    ]
    out = console()
    out.width, out.soft_wrap, out.file = width, False, io.StringIO()
    out.print(screen(found))
    text = out.file.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    for one in found:
        for word in f"{one.what} {one.found} {one.todo}".split():
            assert word in text


# ── RDMA ──────────────────────────────────────────────────────────────────────────────────────────


def test_devices_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    for n in (0, 1, 8):
        tree.gid(f"mlx5_{n}", 3, "0000:0000:0000:0000:0000:ffff:0a00:0102", "RoCE v2", f"eth{n}")
        tree.file(f"sys/class/infiniband/mlx5_{n}/ports/1/gid_attrs/ndevs/0", f"eth{n}")
    tree.gid("mlx5_2", 0, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", "eth2")
    tree.rdma("mlx5_1", None, state="1: DOWN")
    found = by_name(network.rdma_devices(tree.root, look(tree.root)))
    good = found["mlx5_0"]
    assert good.level == "ok"
    assert "port 1 ACTIVE LinkUp, Ethernet (RoCE), 400 Gb/sec" in good.found
    assert "GIDs: RoCE v2 IPv4 (3: 10.0.1.2); eth0 MTU 9000: RDMA MTU 4096; PCI 0000:15:00.0, 32 GT/s x16" in good.found
    assert "NUMA node 0" in good.found
    assert (found["mlx5_1"].level, found["mlx5_1"].todo) == ("warn", "no link: cable, switch port, ip link set eth1 up")
    assert (found["mlx5_2"].level, found["mlx5_2"].todo[:20]) == ("warn", "only link-local GIDs")
    assert found["mlx5_3"].todo == "no GID: give its interface an IP address"
    assert (found["mlx5_8"].level, found["mlx5_8"].todo) == (
        "warn", "ip link set eth8 mtu 9000, if the switch takes it: RDMA MTU 4096 costs less",
    )  # fmt: skip


def test_a_slot_that_is_too_narrow(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.rdma("mlx5_0", tree.pci("pci0000:00/0000:01:00.0", "0x15b3", "0x020700", 0, speed=16, width=8, lanes=16))
    tree.gid("mlx5_0", 0, "fd00:0000:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth0")
    (found,) = network.rdma_devices(tree.root, look(tree.root))
    assert (
        found.todo == "PCIe 16 GT/s x8 carries 126 Gb/s of 400, the card could 32 GT/s x16: another slot, or reseat it"
    )


@pytest.mark.parametrize(
    ("installed", "library", "level", "words"),
    [
        (("44.0", ""), "libibverbs.so.1.14.44.0", "ok", "pyverbs 44.0 and libibverbs 44.0 match"),
        (("", "34"), "libibverbs.so.1.14.44.0", "ok", "pyverbs (private ABI 34) and libibverbs 44.0 match"),
        (("", "33"), "libibverbs.so.1.14.44.0", "missing", "pyverbs (private ABI 33) does not match libibverbs 44.0"),
        (("44.0", "33"), "libibverbs.so.1.14.44.0", "missing", "pyverbs 44.0 does not match"),
        (("59.0", "34"), "libibverbs.so.1.14.44.0", "missing", "pyverbs 59.0 does not match libibverbs 44.0"),
        (("59.0", "34"), "", "missing", "pyverbs 59.0, but no libibverbs"),
        (("", ""), "libibverbs.so.1.14.44.0", "missing", "not installed (libibverbs 44.0)"),
        (("", ""), "", "missing", "not installed (no libibverbs)"),
    ],
)
def test_pyverbs_must_match(tmp_path: Path, installed: tuple[str, str], library: str, level: str, words: str) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    if library:
        (tmp_path / "usr/lib" / library).write_bytes(b"\x7fELF\0IBVERBS_PRIVATE_34\0")
    found = network.verbs(tmp_path, installed)
    assert (found.level, words in found.found) == (level, True), found
    assert bool(found.todo) == (level != "ok")


@pytest.mark.parametrize(
    ("built", "words"), [(sys.implementation.cache_tag, "the system has it"), ("cpython-399", "for Python 3.99")]
)
def test_the_pyverbs_of_the_system_that_a_virtual_environment_does_not_see(
    tmp_path: Path, built: str, words: str
) -> None:
    folder = tmp_path / "usr/lib/python3/dist-packages/pyverbs"
    folder.mkdir(parents=True)
    (folder / f"device.{built}-x86_64-linux-gnu.so").touch()
    found = network.verbs(tmp_path, ("", ""))
    assert (found.level, words in found.found, "--system-site-packages" in found.todo) == ("missing", True, True)


def test_many_gids_are_counted(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.rdma("mlx5_0", tree.pci("pci0000:00/0000:01:00.0", "0x15b3", "0x020700", 0))
    for n in range(5):
        tree.gid("mlx5_0", n, f"fd00:0000:0000:0000:0000:0000:0000:000{n + 1}", "RoCE v2", "eth0")
    (found,) = network.rdma_devices(tree.root, look(tree.root))
    assert "GIDs: RoCE v2 IPv6 (0: fd00::1, 1: fd00::2 and 3 more)" in found.found


def test_no_device_and_gpu_memory(tmp_path: Path) -> None:
    (found,) = network.rdma_devices(tmp_path, Host())
    assert (found.level, found.found) == ("missing", "the kernel shows none")
    assert [(one.level, one.found[:11]) for one in network.device_memory(tmp_path, Host())] == [("ok", "no GPU here")]
    tree = Tree(tmp_path)
    tree.pci("pci0000:00/0000:01:00.0", *NVIDIA_3D)
    host = look(tmp_path)
    assert network.device_memory(tmp_path, host)[0].todo == "modprobe nvidia_peermem"
    tree.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1")
    assert network.device_memory(tmp_path, host)[0].found == "dma-buf, by NVIDIA's open kernel modules"
    tree.file("sys/module/nvidia_peermem/refcnt", 0)
    assert network.device_memory(tmp_path, host)[0].found == "nvidia_peermem is loaded"


# ── interfaces, memory, firewall ──────────────────────────────────────────────────────────────────


def test_interfaces(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    tree.net("eth9", tree.root / "sys/devices/pci0000:00", state="down")
    host = look(tree.root)
    found = by_name(network.interfaces(host, lambda name: [] if name == "eth1" else ["10.0.0.1"]))
    assert found["eth0"].found == "up, 400 Gb/s, MTU 9000, 10.0.0.1; PCI 0000:15:00.0, 32 GT/s x16, NUMA node 0"
    assert found["eth1"].todo == "ip addr add ADDRESS/BITS dev eth1, to use it for tcp"
    assert found["eth8"].todo.startswith("ip link set eth8 mtu 9000")
    assert (found["eth9"].level, found["eth9"].found) == ("warn", "no link")
    vm = look(bare_vm(tmp_path / "vm").root)
    assert network.interfaces(vm, lambda _: ["10.0.0.9"])[0].level == "ok"
    assert network.interfaces(Host(), lambda _: [])[0].found == "no physical one, only loopback"


def test_in_a_container_the_virtual_interfaces_are_shown() -> None:
    veth = NetDevice("eth0", DeviceLocation(), True, 1500, 10.0, physical=False, loopback=False)
    cut = NetDevice("eth1", DeviceLocation(), False, 1500, 10.0, physical=False, loopback=False)
    bare = NetDevice("docker0", DeviceLocation(), True, 1500, 10.0, physical=False, loopback=False)
    host = Host(nets=(veth, cut, bare))
    found = by_name(network.interfaces(host, lambda name: [] if name == "docker0" else ["10.0.0.9"]))
    assert {name: one.level for name, one in found.items()} == {"eth0": "ok", "eth1": "warn"}
    assert found["eth0"].found == "up, 10 Gb/s, MTU 1500, 10.0.0.9; virtual"
    assert network.topology(host)[0].found == "eth0, docker0"


def test_where_warm_segments_can_lie(tmp_path: Path) -> None:
    found = checks.warm_segments(tmp_path)
    assert (found.level, "not in a memory file system" in found.found, "mount -t tmpfs" in found.todo) == (
        "missing", True, True,
    )  # fmt: skip
    assert checks.warm_segments(tmp_path / "none").found.endswith("No such file or directory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert checks.warm_segments(Path(folder), 1).level == "ok"
        little = checks.warm_segments(Path(folder), 1 << 40)
        assert little.level == "warn" and "a mesh takes 1,099,511,627,776 MiB of it" in little.todo


def test_buffers_huge_pages_and_locks(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for path, text in (("core/rmem_max", 212992), ("core/wmem_max", 212992)):
        tree.file(f"proc/sys/net/{path}", text)
    tree.file("proc/sys/net/ipv4/tcp_rmem", "4096 131072 6291456")
    tree.file("proc/sys/net/ipv4/tcp_wmem", "4096 16384 1048576")
    found = network.tcp_buffers(tmp_path)
    assert (found.level, found.found) == ("warn", "rmem_max 208 KiB, wmem_max 208 KiB, tcp_rmem 6 MiB, tcp_wmem 1 MiB")
    assert found.todo.endswith('sysctl -w net.ipv4.tcp_wmem="4096 131072 16777216"')
    assert network.tcp_buffers(tmp_path / "nothing").level == "ok"

    base = "sys/kernel/mm/transparent_hugepage"
    tree.file(f"{base}/enabled", "always [madvise] never")
    tree.file(f"{base}/shmem_enabled", "always within_size advise [never] deny force")
    tree.file("proc/meminfo", "HugePages_Total:      12\nHugepagesize:       2048 kB")
    found = checks.huge_pages(tmp_path)
    assert found.found == "transparent: madvise, for shared memory: never; 12 of 2 MiB reserved"
    assert (found.level, "shmem_enabled" in found.todo) == ("warn", True)
    tree.file(f"{base}/shmem_enabled", "always within_size [advise] never deny force")
    assert checks.huge_pages(tmp_path).level == "ok"

    assert checks.locked_memory(resource.RLIM_INFINITY, False).found == "no limit"
    assert checks.locked_memory(8 << 20, False).level == "warn"
    assert checks.locked_memory(8 << 20, True).found == "at most 8 MiB, but root may lock more"


NFT = """table inet filter {
	chain input {
		type filter hook input priority filter; policy %s;
		iif "lo" accept
		tcp dport 22 accept
		%s
	}
	chain output {
		type filter hook output priority filter; policy accept;
		ip daddr 10.0.0.9 drop
	}
}
"""


@pytest.mark.parametrize(
    ("tools", "level", "words"),
    [
        ({"nft": NFT % ("drop", "counter")}, "warn", "nft: 4 rules, incoming traffic is filtered"),
        ({"nft": NFT % ("accept", "reject")}, "warn", "incoming traffic is filtered"),
        ({"nft": NFT % ("accept", "counter")}, "ok", "nft: 4 rules"),
        ({"nft": "", "iptables": "-P INPUT DROP\n-A INPUT -i lo -j ACCEPT"}, "warn", "iptables: 1 rules, incoming"),
        ({"iptables": "-P INPUT ACCEPT\n-A INPUT -p tcp -j REJECT"}, "warn", "incoming"),
        ({"iptables": "-P INPUT ACCEPT\n-A OUTPUT -j DROP"}, "ok", "iptables: 1 rules"),
        ({}, "ok", "no"),
    ],
)
def test_firewall_hints(tmp_path: Path, tools: dict[str, str], level: str, words: str) -> None:
    Tree(tmp_path).file("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999")
    found = network.firewall(tmp_path, lambda argv: tools.get(argv[0]))
    assert (found.level, words in found.found) == (level, True), found
    assert ("TCP 32768 to 60999" in found.todo and "UDP 4791" in found.todo) == (level == "warn")


def test_transports_are_really_started() -> None:
    found = by_name(network.transports(("shm", "tcp", "smoke")))
    assert (found["shm"].level, found["tcp"].level, found["smoke"].found) == ("ok", "ok", "not part of this version")
    assert found["auto"].found.startswith(("shm, tcp; not rdma: ", "rdma, shm, tcp"))


def test_the_topology_shows_rdma_before_interfaces(tmp_path: Path) -> None:
    found = by_name(network.topology(look(two_sockets(tmp_path).root)))
    assert found["cuda:0"].found == "mlx5_0, mlx5_1; then mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7, mlx5_8"
    assert by_name(network.topology(look(bare_vm(tmp_path / "vm").root)))["cpu:0"].found == "eth0"
    assert network.topology(Host())[0].found == "no NIC to choose from"


def test_how_many_ranks_can_share_a_model(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "odd", family="qwen3", num_attention_heads=8, num_hidden_layers=3)
    tensor, stages, contexts, decode_contexts, experts = fits(str(made))
    assert tensor.found.startswith("2, 4, 8 ranks")
    assert stages.found.startswith("3 ranks")
    assert contexts.found.startswith("2, 4, 8, 16, 32 ranks (--prefill-mesh, --decode-mesh cp=N)"), contexts.found
    assert decode_contexts.found.startswith("one rank only: dcp=2: must divide the 1 of tp=2 ranks that have the same")
    assert experts.found == "one rank only: ep=dp: Qwen3ForCausalLM has no experts"
    made = make_checkpoint(tmp_path / "one", family="qwen3", num_hidden_layers=1)
    assert fits(str(made))[1].found == "one rank only: pp=2: more stages than the model's 1 layers"
    made = make_checkpoint(tmp_path / "latents", **FAMILY_ZOO["deepseek_v3"])
    assert fits(str(made))[3].found.startswith("2 ranks (--prefill-mesh, --decode-mesh tp=N,dcp=N)")
    assert fits(str(made))[4].found.startswith("2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 ranks (--prefill-mesh")
    made = make_checkpoint(tmp_path / "windows", **FAMILY_ZOO["gemma2"])
    assert fits(str(made))[2].found == "one rank only: cp=2: layers with a window or chunks are not shared by context"

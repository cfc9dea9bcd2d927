"""Transports by name: kvmesh's own, and those of distributions outside the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError, TransferError
from kvmesh.ranks import transfer_config
from kvmesh.rpc.certificates import make_certificates
from kvmesh.transfer import EngineConfig, Notification, Opcode, Range, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.config import tls_fields
from kvmesh.transfer.transports import registry
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "transport"
PAGE = ROOT / "docs" / "howto" / "add-a-transport.md"


def install(folder: Path, name: str, value: str) -> None:
    """As pip would: metadata beside the module."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {value}\n")


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with the example's module and what its pyproject.toml says of it."""
    shutil.copy(EXAMPLE / "inprocess_transport.py", tmp_path)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"][registry.GROUP].items()
    install(tmp_path, *entry)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("inprocess_transport", None)


def test_the_page_is_followed_word_for_word(third_party: Path) -> None:
    page = PAGE.read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (said,) = re.findall(r"`python try_it.py` prints `(.*)`", page)
    path = os.pathsep.join((str(third_party), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", re.sub(r"^   ", "", script, flags=re.MULTILINE)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=third_party,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.stdout, done.stderr, done.returncode) == (said + "\n", "", 0)


def test_a_third_party_s_transport_writes_reads_and_notifies_and_is_fenced(third_party: Path) -> None:
    told: list[Notification] = []
    config = EngineConfig(transports=("inprocess",))
    with TransferEngine("writer", config) as one, TransferEngine("owner", config, told.append) as two:
        near, far = one.allocate(8192), two.allocate(8192)
        assert near.memory is not None
        assert far.memory is not None
        near.memory[:] = bytes(range(256)) * 32
        segment = one.open_segment(two.local_descriptor())

        def write(offset: int, length: int) -> TransferState:
            batch = one.allocate_batch(1)
            at = far.base_offset + offset
            request = TransferRequest(Opcode.WRITE, near.address + offset, segment, at, length, 7, verify=True)
            one.submit(batch, [request])
            assert one.wait_sync(batch, 20)
            return one.status(batch, 0).state

        two.open_window("writer", 7, [Range(far.base_offset, 4096)])
        assert write(0, 4096) is TransferState.COMPLETED
        one.notify(segment, 7, b"all there")
        assert write(4096, 4096) is TransferState.FAILED
        assert bytes(far.memory) == bytes(near.memory[:4096]) + bytes(4096)
        assert [(n.peer, n.payload) for n in told] == [("writer", b"all there")]
        two.fence("writer", 7)
        assert write(0, 100) is TransferState.FAILED


def test_services_take_it_by_its_name(third_party: Path) -> None:
    transfer_config.check("inprocess,tcp", "")


def test_who_asks_for_a_transport_that_is_not_there_is_told_which_are(third_party: Path) -> None:
    with pytest.raises(TransferError, match=r"'nvlink': choose one of rdma, shm, tcp, inprocess$"):
        EngineConfig(transports=("nvlink",))
    with pytest.raises(ConfigError, match=r"a list of rdma, shm, tcp, inprocess, or auto$"):
        transfer_config.check("nvlink", "")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("moved", "inprocess_gone:Transport", "ModuleNotFoundError"),
        ("renamed", "inprocess_transport:Gone", "AttributeError"),
        ("other", "inprocess_transport:InProcessTransport", "calls itself 'inprocess'"),
    ],
)
def test_what_cannot_be_loaded_is_one_error_that_names_it(third_party: Path, name: str, value: str, said: str) -> None:
    install(third_party, name, value)
    with pytest.raises(TransferError, match=f"transports='{name}': .*{said}"):
        TransferEngine("one", EngineConfig(transports=("shm", name)))


def test_nobody_stands_in_for_a_transport_of_kvmesh_s_own(third_party: Path) -> None:
    install(third_party, "tcp", "inprocess_transport:InProcessTransport")
    assert registry.find("tcp").value == "kvmesh.transfer.transports.tcp.transport:TcpTransport"
    assert registry.known() == ("rdma", "shm", "tcp", "inprocess")


def test_two_of_one_name_are_refused(third_party: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere := third_party / "elsewhere").mkdir()
    install(elsewhere, "inprocess", "another:Transport")
    (elsewhere / "inprocess-1.0.dist-info").rename(elsewhere / "two-1.0.dist-info")
    monkeypatch.syspath_prepend(elsewhere)
    with pytest.raises(TransferError, match=r"transports='inprocess': .* and .* have this name") as caught:
        registry.find("inprocess")
    assert "another:Transport" in str(caught.value)


# ── auto ──────────────────────────────────────────────────────────────────────────────────────────


def chosen(**config: object) -> dict[str, tuple[bool, str]]:
    with TransferEngine("one", EngineConfig(**config)) as engine:  # type: ignore[arg-type]
        assert engine.config.transports == tuple(one.name for one in engine.choices if one.used)
        assert set(engine.local_descriptor().endpoints) == set(engine.config.transports)
        return {one.name: (one.used, one.why) for one in engine.choices}


@pytest.fixture
def no_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of RDMA devices: none yet."""
    monkeypatch.setattr(registry, "SYS_INFINIBAND", tmp_path)
    return tmp_path


def test_auto_takes_shm_then_tcp_where_there_is_no_rdma(no_rdma: Path) -> None:
    found = chosen()
    assert [name for name, (used, _) in found.items() if used] == ["shm", "tcp"]
    assert found["rdma"] == (False, "this host has no RDMA device")


def test_a_device_without_pyverbs_is_not_usable(no_rdma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_rdma / "mlx5_0").mkdir()
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert chosen()["rdma"] == (False, "pyverbs is not installed")


def test_a_device_that_does_not_start_is_left_out_and_its_cause_is_told(
    no_rdma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_rdma / "mlx5_0").mkdir()
    monkeypatch.setattr(registry, "find_spec", lambda name: name)
    monkeypatch.setattr(registry.os, "geteuid", lambda: 0)

    def start(name: str, *args: object) -> object:
        if name == "rdma":
            raise TransferError("rdma: no port is active of mlx5_0", field="nics")
        return honest(name, *args)

    honest = vars(registry)["_start"]
    monkeypatch.setattr(registry, "_start", start)
    found = chosen()
    assert found["rdma"] == (False, "no port is active of mlx5_0")
    assert found["shm"][0]
    assert found["tcp"][0]


def test_rdma_needs_memory_that_may_be_locked(no_rdma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_rdma / "mlx5_0").mkdir()
    monkeypatch.setattr(registry, "find_spec", lambda name: name)
    monkeypatch.setattr(registry.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(registry.resource, "getrlimit", lambda what: (8 << 20, 8 << 20))
    assert registry.why_not_chosen("rdma", EngineConfig()).startswith("only 8 MiB may be locked")


def test_what_must_not_leave_the_host_has_shm_and_tcp_on_loopback_alone(no_rdma: Path) -> None:
    assert [name for name, (used, _) in chosen(leave_host=False).items() if used] == ["shm", "tcp"]
    found = chosen(leave_host=False, host="0.0.0.0", advertise_host="192.0.2.7")
    assert [name for name, (used, _) in found.items() if used] == ["shm"]
    assert "unencrypted" in found["tcp"][1]
    assert "unencrypted" in found["rdma"][1]
    trusted = chosen(leave_host=True, host="0.0.0.0", advertise_host="192.0.2.7")
    assert [name for name, (used, _) in trusted.items() if used] == ["shm", "tcp"]


def test_what_must_not_leave_the_host_opens_no_other_host_s_segment(no_rdma: Path) -> None:
    config = EngineConfig(leave_host=False)
    with TransferEngine("far", EngineConfig(transports=("tcp",))) as far, TransferEngine("one", config) as one:
        elsewhere = replace(far.local_descriptor(), machine="another")
        with pytest.raises(TransferError, match="'far' is on another host, and nothing may leave this one"):
            one.open_segment(elsewhere)
        write = TransferRequest(Opcode.WRITE, 0, "far", 0, 1, 1)
        with pytest.raises(TransferError, match=r"'far' is on another host.*--tls-cert.* --transfer-network trusted"):
            one.submit(one.allocate_batch(1), [write])
        one.open_segment(far.local_descriptor())
        one.close_segment("far")
        with pytest.raises(TransferError, match="segment='far': not open"):
            one.submit(one.allocate_batch(1), [write])
    for options in (
        {"transports": ("rdma",)},
        {"transports": ("tcp",), "host": "0.0.0.0", "advertise_host": "192.0.2.7"},
    ):
        with pytest.raises(TransferError, match="unencrypted"):
            TransferEngine("one", EngineConfig(leave_host=False, **options))  # type: ignore[arg-type]


def test_tcp_over_tls_may_leave_the_host(no_rdma: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = tls_fields(make_certificates(tmp_path, ["192.0.2.7"]).files, network="untrusted")
    found = chosen(leave_host=False, host="0.0.0.0", advertise_host="192.0.2.7", **fields)
    assert [name for name, (used, _) in found.items() if used] == ["shm", "tcp"]
    assert found["tcp"][1] == "for peers that the others do not reach, over TLS"
    assert "unencrypted" in found["rdma"][1]
    over_tcp = EngineConfig(leave_host=False, transports=("tcp",), **fields)
    with TransferEngine("far", over_tcp) as far, TransferEngine("one", replace(over_tcp, transports=("auto",))) as one:
        one.open_segment(replace(far.local_descriptor(), machine="another"))


def test_what_is_named_is_used_or_refused(no_rdma: Path) -> None:
    assert chosen(transports=("tcp",)) == {"tcp": (True, "the configuration names it")}
    with pytest.raises(TransferError, match="rdma"):
        TransferEngine("one", EngineConfig(transports=("rdma",)))
    with pytest.raises(TransferError, match="auto stands alone"):
        EngineConfig(transports=("auto", "tcp"))


def test_the_choice_is_told_in_one_line(no_rdma: Path) -> None:
    with TransferEngine("one") as engine:
        assert registry.described(engine.choices) == "shm, tcp; not rdma: this host has no RDMA device"


@pytest.mark.parametrize(
    ("told", "leaves"),
    [
        ({}, True),
        ({"tls_cert": "cert.pem"}, False),
        ({"tls_ca": "ca.pem"}, False),
        ({"tls_cert": "cert.pem", "transfer_network": "trusted"}, True),
        ({"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}, False),
    ],
)
def test_a_service_with_tls_keeps_its_bytes_unless_the_network_is_trusted(told: dict[str, str], leaves: bool) -> None:
    config = transfer_config.TransferConfig(**told)  # type: ignore[arg-type]
    assert config.transport_list == ("auto",)
    assert config.leave_host is leaves
    assert bool(config.transfer_tls) is (len(told) == 3), "mutual TLS needs all three"
    config.check_transfer()
    named = replace(config, transports="rdma,tcp")
    if leaves:
        named.check_transfer()
    else:
        with pytest.raises(ConfigError, match=r"transports='rdma,tcp'.*unencrypted.*transfer_network=trusted"):
            named.check_transfer()

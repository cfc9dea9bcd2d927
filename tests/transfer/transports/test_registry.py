"""Transports by name: kvmesh's own, and those of distributions outside the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.errors import ConfigError, TransferError
from kvmesh.ranks import transfer_config
from kvmesh.transfer import EngineConfig, Opcode, Range, TransferEngine, TransferRequest, TransferState
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
    told = []
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
    with pytest.raises(TransferError, match=r"'nvlink': not one of rdma, shm, tcp, inprocess$"):
        EngineConfig(transports=("nvlink",))
    with pytest.raises(ConfigError, match=r"a list of rdma, shm, tcp, inprocess$"):
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

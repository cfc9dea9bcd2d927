"""What cannot start says why in one line, leaves with 2 and leaves nothing behind: in this process what is refused
before anything of it is changed, a real process for each kind of what comes later."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kvmesh import extras
from kvmesh.cli.app import app
from kvmesh.cli.serve import SERVICES
from kvmesh.cli.up.checks import check_tiers
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.paths import ROOT

MARK = "TEST_BAD_START"
DEMO = ROOT / "examples" / "demo-model"
SHARD = "model-00002-of-00002.safetensors"
NORM = "model.layers.0.input_layernorm.weight"


@dataclass
class Starts:
    """Starts `kvmesh` commands whose processes, and the processes of those, carry a mark."""

    folder: Path
    mark: str

    def refused(self, *args: str, env: dict[str, str] | None = None) -> str:
        """The one line of error of a command that must not start."""
        done = subprocess.run(
            [sys.executable, "-m", "kvmesh.cli", *args],
            env={**os.environ, MARK: self.mark, "XDG_STATE_HOME": str(self.folder), **(env or {})},
            cwd=self.folder, capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stdout + done.stderr
        assert self.left() == []
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    def left(self) -> list[str]:
        """Marked processes that still run."""
        return [" ".join(one.cmdline()) for one in psutil.process_iter() if self._mine(one)]

    def _mine(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """As `Starts.refused`, in this process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def ask(*args: str) -> str:
        done = CliRunner().invoke(app, list(args))
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return ask


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    one = Starts(tmp_path, uuid.uuid4().hex)
    yield one
    for process in psutil.process_iter():  # only after a failed test
        if one._mine(process):
            process.kill()


def broken(folder: Path, how: str) -> str:
    """Breaks a sharded checkpoint; returns what the error must say after the shard's path."""
    make_checkpoint(folder, shards=2)
    shard = folder / SHARD
    if how == "missing shard":
        shard.unlink()
        return ": no such file"
    if how == "truncated shard":
        data = shard.read_bytes()
        shard.write_bytes(data[: len(data) // 2])
        return ": truncated: its header describes"
    tensors = load_file(shard)
    tensors[NORM] = tensors[NORM][:-1].clone()
    save_file(tensors, shard)
    return f": tensor {NORM} has shape [63], config.json asks for [64]"


PEERS = ("--conductor=127.0.0.1:1", "--store=127.0.0.1:1")


@pytest.mark.parametrize(("service", "how"), [("prefill", "missing shard"), ("decode", "wrong shape")])
@pytest.mark.slow
def test_an_instance_refuses_a_broken_checkpoint(starts: Starts, service: str, how: str) -> None:
    model = starts.folder / "model"
    words = broken(model, how)
    assert starts.refused("serve", service, "--model", str(model), *PEERS).startswith(f"{model / SHARD}{words}")


@pytest.mark.mesh
@pytest.mark.parametrize("how", ["truncated shard", "wrong shape"])
def test_up_refuses_a_broken_checkpoint_and_stops_what_it_started(starts: Starts, how: str) -> None:
    model = starts.folder / "model"
    words = broken(model, how)
    line = starts.refused("up", "--model", str(model), "--http-port=0", "--grpc-port=0", "--memory-mb=16")
    # What hashing finds is told before anything starts; a wrong shape by the first instance that loads it.
    assert re.match(rf"((prefill|decode)-0: )?{re.escape(f'{model / SHARD}{words}')}", line), line


@pytest.mark.parametrize(
    ("service", "key"),
    [*((service, key) for service in SERVICES for key in ("port", "metrics_port")), ("gateway", "http_port")],
)
def test_a_port_in_use_is_told_before_anything_is_loaded(refused: Callable[..., str], service: str, key: str) -> None:
    free = {"port": "0", **({"http_port": "0"} if service == "gateway" else {})}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = free | {key: str(taken.getsockname()[1])}
        flags = [f"--{name.replace('_', '-')}={port}" for name, port in ports.items()]
        model = [] if service in ("store", "conductor", "pool") else ["--model=/no/such/model"]
        line = refused("serve", service, *flags, *model)
    assert line == f"{key}={ports[key]}: the port is in use on 127.0.0.1"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://:secret@127.0.0.1:1/0", "redis: nothing answers at 127.0.0.1:1 ("),
        ("http://x:secret@here", "redis='http://here': must be auto, redis://"),
        ("redis://127.0.0.1:x", "redis='redis://127.0.0.1:x': must be auto, redis://"),
    ],
)
def test_up_tells_of_a_redis_that_is_not_there_and_keeps_its_password(
    refused: Callable[..., str], url: str, says: str
) -> None:
    line = refused("up", "--redis", url, "--masters=2", "--http-port=0", "--grpc-port=0")
    assert line.startswith(says) and "secret" not in line


def test_a_host_that_is_not_here_is_named(starts: Starts) -> None:
    line = starts.refused("serve", "store", "--host=192.0.2.1")
    assert line == "host='192.0.2.1': is no address of this machine"


@pytest.mark.parametrize("flags", [[], ["--store=10.0.0.5"], ["--store=127.0.0.1:70020"]])
@pytest.mark.parametrize("service", ["pool", "prefill", "decode"])
def test_a_member_without_its_master_does_not_wait_for_ever(
    refused: Callable[..., str], service: str, flags: list[str]
) -> None:
    conductor = [] if service == "pool" else ["--conductor=127.0.0.1:1"]
    line = refused("serve", service, *conductor, *flags)
    if flags:
        assert line == f"store={flags[0].removeprefix('--store=')!r}: must be HOST:PORT (--store)"
    else:
        assert line == "store: not given; --store HOST:PORT says where it is"


@pytest.mark.slow
def test_a_pool_node_refuses_an_ssd_folder_that_cannot_be_made(starts: Starts) -> None:
    line = starts.refused("serve", "pool", "--store=127.0.0.1:1", "--memory-mb=16", "--ssd-path=/proc/none")
    assert line == "ssd_path='/proc/none': No such file or directory"
    line = starts.refused("serve", "pool", "--store=127.0.0.1:1", "--memory-mb=16", "--object-url=ftp://x")
    assert line.startswith("object_url='ftp://x': must be like s3://bucket/prefix; schemes: s3, ")


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        (
            "--ssd-path=/proc/none",
            "ssd_path='/proc/none': No such file or directory; name a folder that can be written to with --ssd-path",
        ),
        (
            "--warm-segment=warm",
            "warm_segment='warm': not in a memory file system (tmpfs, as /dev/shm is); name another with --warm",
        ),
        ("--object-url=s3://", "object_url='s3://': names no bucket: must be like s3://bucket/prefix (--object-url)"),
        ("--decode-tp=3", "decode_tp=3: must divide num_attention_heads=4 in "),
        ("--coupled-tp=2", "coupled_tp=2: there are no coupled instances: give --coupled as well"),
        ("--prefill-mesh=pp=3", "prefill_mesh=pp=3: must divide the model's "),
        ("--decode-mesh=tp=2,dcp=2", "decode_mesh=tp=2,dcp=2: must divide the 1 of tp=2 ranks that have the same KV"),
        ("--decode-mesh=cp=2,interleave=1", "decode_mesh='cp=2,interleave=1': an instance keeps what a rank has of a "),
        ("--decode-mesh=pp=2 --speculate=draft --draft-model=DEMO", "speculate='draft' with pp=2: a stage would wait"),
        ("--decode-mesh=pp=2 --speculate=mtp", "speculate='mtp' with pp=2: only the last stage has what the head"),
        ("--speculate=mtp", "speculate='mtp': "),
        ("--speculate=draft", "speculate='draft': name the draft model's folder (draft_model) (--draft-model)"),
        ("--memory-mb=-1", "memory_mb='-1' (from --memory-mb): must be at least 0"),
        ("--prefill-tp=0", "prefill_tp='0' (from --prefill-tp): must be at least 1"),
        ("--store-eviction=mru", "store_eviction='mru' (from --store-eviction): choose one of lru, lfu, length"),
    ],
)
def test_up_refuses_what_no_instance_could_use_before_it_starts_one(
    refused: Callable[..., str], tmp_path: Path, flag: str, line: str
) -> None:
    """In a folder on disk."""
    told = refused("up", "--http-port=0", "--grpc-port=0", *flag.replace("DEMO", str(DEMO)).split())
    assert told.startswith(line), told
    assert not list(tmp_path.rglob("logs"))


@pytest.mark.slow
def test_up_that_is_refused_leaves_no_process(starts: Starts) -> None:
    assert starts.refused("up", "--http-port=0", "--grpc-port=0", "--decode-tp=3").startswith("decode_tp=3: must")


def test_up_refuses_warm_segments_that_do_not_fit(starts: Starts, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        settings = MeshSettings(model="m", warm_segment=f"{folder}/a", memory_mb=1 << 30, decode_tp=2)
        with pytest.raises(ConfigError, match="host segments take 3,221,225,472 MiB: make that"):
            check_tiers(settings)
        check_tiers(replace(settings, memory_mb=1, ssd_path=str(tmp_path / "made" / "here")))
        assert (tmp_path / "made" / "here").is_dir()


def test_extras_are_installed_from_where_kvmesh_comes_from(tmp_path: Path) -> None:
    (tmp_path / "kvmesh").mkdir()
    assert extras.install("ha", package=tmp_path / "kvmesh").endswith(
        "'.[ha]' in the clone that kvmesh was installed from"
    )
    (tmp_path / "pyproject.toml").touch()
    command = extras.install("ha", package=tmp_path / "kvmesh")
    assert shlex.split(command) == [sys.executable, "-m", "pip", "install", "-e", f"{tmp_path}[ha]"]


@pytest.mark.parametrize("service", ["gateway", "prefill", "decode", "picker", "external"])
def test_nothing_can_be_placed_without_a_conductor(refused: Callable[..., str], service: str) -> None:
    free = ["--port=0", "--http-port=0"] if service == "gateway" else []
    line = refused("serve", service, *free)
    assert line == "conductor: not given; --conductor HOST:PORT says where it is"


@pytest.mark.parametrize("service", ["prefill", pytest.param("gateway", marks=pytest.mark.slow)])
def test_a_model_is_needed(starts: Starts, service: str) -> None:
    flags = ["--port=0", "--http-port=0", PEERS[0]] if service == "gateway" else PEERS
    assert starts.refused("serve", service, *flags).startswith("model='': ")

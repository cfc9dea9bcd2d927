"""`kvmesh store` against a real store: what it prints, its exit codes, what it says when something is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvmesh.cli import store_target
from kvmesh.cli.app import app
from kvmesh.cli.store_bench import parsed
from kvmesh.rpc.errors import ConfigError
from tests.kvcache.client.threads import in_thread

Invoke = Callable[..., Result]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with in_thread("a", "b") as made:
        yield made.address


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, address: str, tmp_path: Path) -> Invoke:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("KVMESH_STORE", address)
    return lambda *args, **more: CliRunner().invoke(app, ["store", *map(str, args)], **more)


def test_a_file_there_and_back(invoke: Invoke, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(300_000)
    (tmp_path / "in").write_bytes(data)
    put = invoke("put", tmp_path / "in", "--name", "report", "--namespace", "n", "--pin")
    assert put.exit_code == 0, put.stderr
    key = put.stdout.strip()
    assert "get it with `kvmesh store get report -o FILE --namespace n`" in put.stderr
    for ref in ("report", key):
        got = invoke("get", ref, "-o", tmp_path / "out", "--namespace", "n")
        assert got.exit_code == 0 and (tmp_path / "out").read_bytes() == data, got.stderr
        assert "dram" in got.stderr
    assert invoke("get", key).stdout_bytes == data

    told = json.loads(invoke("stat", "report", "--namespace", "n", "--json").stdout)
    assert [one["bytes"] for one in told["replicas"]] == [300_000]
    assert f"{300_000:,}" in invoke("stat", key).stdout

    other = invoke("put", "-", "--name", "report", "--namespace", "n", input=b"other")
    assert other.exit_code == 1 and "name='report': stands for block" in other.stderr
    removed = invoke("rm", "report", "--namespace", "n")
    assert removed.exit_code == 0 and "1 copy removed; acknowledged by " in removed.stdout
    gone = invoke("get", "report", "-o", tmp_path / "none", "--namespace", "n")
    assert gone.exit_code == 1 and "kvmesh store ls" in gone.stderr and not (tmp_path / "none").exists()


def test_lists_and_namespaces(invoke: Invoke) -> None:
    keys = {invoke("put", "-", "--namespace", "l", input=bytes([i]) * 50).stdout.strip() for i in range(5)}
    invoke("put", "-", "--namespace", "other", input=b"x")

    def listed() -> set[str]:
        return {one["key"] for one in json.loads(invoke("ls", "--namespace", "l", "--json").stdout)}

    for _ in range(200):  # nodes announce every 5 ms
        if listed() == keys:
            break
    assert listed() == keys
    some = invoke("ls", "--namespace", "l", "--limit", "2")
    assert "2 blocks, and more: raise --limit 2" in some.stderr and "50 B" in some.stdout
    only = sorted(keys)[0]
    assert [one["key"] for one in json.loads(invoke("ls", only[:12], "--json").stdout)] == [only]
    assert invoke("rm", "--all", "--namespace", "l").exit_code == 0
    assert listed() == set()
    assert "kvmesh store put FILE" in invoke("ls", "--namespace", "l").stderr


def test_nodes_and_a_drain(invoke: Invoke) -> None:
    told = json.loads(invoke("top", "--json").stdout)
    assert {one["member"]["store_id"] for one in told["stores"]} == {"a", "b"}
    screen = invoke("top", "--once").stdout
    assert "leader" in screen and "32.0 MiB" in screen and "ready" in screen
    assert invoke("drain", "a", "--timeout", "30").exit_code == 0
    assert "draining" in invoke("stat").stdout
    assert "back in service" in invoke("drain", "a", "--cancel").stdout
    unknown = invoke("drain", "nobody")
    assert unknown.exit_code == 1 and "node='nobody': is no member" in unknown.stderr
    assert "kvmesh store top" in unknown.stderr


def test_bench(invoke: Invoke) -> None:
    result = invoke("bench", "--size", "4k,64k", "--batch", "1,4", "--seconds", "0.05", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert [(row["bytes"], row["batch"]) for row in told] == [(4096, 1), (4096, 4), (65536, 1), (65536, 4)]
    assert all(row["put"]["gb_per_s"] > 0 and row["get"]["calls"] >= 3 for row in told)
    assert "memcpy" in invoke("bench", "--size", "4k", "--batch", "1", "--seconds", "0.05").stdout


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["rm"], 2, "name blocks, or --all"),
        (["rm", "--all"], 2, "--namespace"),
        (["put", "/no/such/file"], 2, "file='/no/such/file': No such file"),
        (["ls", "xyz"], 1, "prefix='xyz': must be hex digits"),
        (["bench", "--size", "1x"], 2, "size='1x': must be a number"),
    ],
)
def test_mistakes_name_field_and_value(invoke: Invoke, args: list[str], code: int, says: str) -> None:
    result = invoke(*args)
    assert result.exit_code == code and says in result.stderr, result.stderr


def test_without_a_store(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("put", "-", input=b"").exit_code == 1
    monkeypatch.delenv("KVMESH_STORE")
    result = invoke("ls")
    assert result.exit_code == 2 and "--store HOST:PORT" in result.stderr


def test_an_address_where_no_master_answers_is_named_within_seconds(
    invoke: Invoke, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_target, "KNOCK_S", 0.3)
    node = json.loads(invoke("top", "--json").stdout)["stores"][0]["member"]["instance"]["address"]
    for nobody, says in (("127.0.0.1:1", "refused"), (node, "Method not found")):  # a node is no master
        result = invoke("ls", "--store", nobody)
        assert result.exit_code == 1 and "--store names another" in result.stderr, result.stderr
        assert f"store='{nobody}': no store master answers there" in result.stderr and says in result.stderr


def test_sizes() -> None:
    assert parsed("size", "64k, 1m,7") == [65536, 1 << 20, 7]
    with pytest.raises(ConfigError, match="batch='0'"):
        parsed("batch", "0")

"""`kvmesh store` against a real store: what it prints, its exit codes, what it says when something is wrong."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvmesh.cli.app import app
from kvmesh.cli.store import target as store_target
from kvmesh.cli.store import top as store_top
from kvmesh.cli.store.bench import parsed
from kvmesh.errors import ConfigError
from kvmesh.kvcache.keys import tenant_tag
from tests.support.threads import in_thread

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_pins_and_replicas(invoke: Invoke) -> None:
    put = invoke("put", "-", "--name", "kept", "--namespace", "p", input=random.Random(2).randbytes(1000))
    key = put.stdout.strip()
    pinned = invoke("pin", "kept", key, "--namespace", "p")
    assert pinned.exit_code == 0 and pinned.stdout == f"kept: pinned at 1 node\n{key}: pinned at 1 node\n", (
        pinned.stderr
    )
    assert json.loads(invoke("unpin", "kept", "--namespace", "p", "--json").stdout) == [{"ref": "kept", "nodes": 1}]
    assert invoke("unpin", "nobody").stdout == "nobody: nothing to unpin, no node has it in memory\n"
    assert invoke("pin", key, "--ttl", "60").stdout == f"{key}: pinned for 60 s at 1 node\n"
    half = invoke("pin", key, "nothing", "--hard", "--namespace", "p")
    assert half.exit_code == 1 and "pinned at 1 node" in half.stdout
    assert "no node has pinned a block of the name 'nothing'; `kvmesh store stat`" in half.stderr

    for _ in range(200):  # nodes announce every 5 ms
        said = invoke("replicas", "kept", key, "2", "--namespace", "p").stdout.splitlines()
        if said[0] != "kept: at 0 nodes now, 2 wanted":
            break
    assert said[0].endswith("now, 2 wanted") and len(said) == 2
    for _ in range(500):
        if len(json.loads(invoke("stat", key, "--json").stdout)["replicas"]) == 2:
            break
    lifted = invoke("replicas", key, "0", "--json")
    assert json.loads(lifted.stdout) == [{"ref": key, "nodes": 2}], lifted.stderr
    nobody = invoke("replicas", "nothing", "1", "--namespace", "p")
    assert nobody.exit_code == 1 and "no node has a block of the name 'nothing'" in nobody.stderr


def test_copies_and_moves(invoke: Invoke, tmp_path: Path) -> None:
    data = random.Random(4).randbytes(70_000)
    (tmp_path / "in").write_bytes(data)
    assert invoke("put", tmp_path / "in", "--name", "moved", "--namespace", "m", "--pin").exit_code == 0

    def stat() -> list[str]:
        told = json.loads(invoke("stat", "moved", "--namespace", "m", "--json").stdout)
        return sorted(one["node"] for one in told["replicas"])

    (old,) = stat()
    new = "b" if old == "a" else "a"
    copied = invoke("copy", "moved", new, "--namespace", "m")
    assert (copied.exit_code, copied.stdout) == (0, f"moved: copied to {new}\n"), copied.stderr
    assert stat() == ["a", "b"]
    moved = invoke("move", "moved", new, "--from", old, "--namespace", "m")
    assert (moved.exit_code, moved.stdout) == (0, f"moved: moved from {old} to {new}, with its hard pin\n"), (
        moved.stderr
    )
    assert stat() == [new]
    again = invoke("move", "moved", new, "--namespace", "m", "--json")
    assert json.loads(again.stdout) == [{"ref": "moved", "held": True, "from": None, "pinned": False, "cause": ""}]
    got = invoke("get", "moved", "--namespace", "m", "-o", tmp_path / "out")
    assert got.exit_code == 0 and (tmp_path / "out").read_bytes() == data

    some = invoke("copy", "moved", "no-such-name", new, "--namespace", "m")
    assert some.exit_code == 1 and "moved: copied to" in some.stdout
    assert "no-such-name: not copied: no block has that name" in some.stdout
    assert "1 of 2 is not copied as wished, 'no-such-name' among them" in some.stderr
    for wrong, says in (
        (("copy", "moved", "nowhere"), "node='nowhere': no such node; there are a, b"),
        (("move", "moved", "a", "--from", "a"), "--from='a': is the node to which"),
    ):
        told = invoke(*wrong, "--namespace", "m")
        assert told.exit_code == 1 and says in told.stderr and "Traceback" not in told.stderr
    assert invoke("unpin", "moved", "--namespace", "m").exit_code == 0


@pytest.mark.slow
def test_a_limit_of_pins_says_what_to_do_next(invoke: Invoke) -> None:
    keys = [invoke("put", "-", input=random.Random(seed).randbytes(7 << 20)).stdout.strip() for seed in range(20, 26)]
    said = invoke("pin", *keys)  # 42 MiB of 64; half may be
    invoke("rm", *keys)
    assert said.exit_code == 1 and said.stdout == ""
    (line,) = said.stderr.splitlines()
    assert "hard_pins=" in line and "at most" in line
    assert line.endswith("`kvmesh store unpin` some, or give pool nodes more memory (`kvmesh serve pool --memory-mb`)")


def test_quotas(invoke: Invoke) -> None:
    assert "kvmesh store quota NAMESPACE BLOCKS" in invoke("quota").stderr
    invoke("put", "-", "--namespace", "q", input=b"quota")
    tag = tenant_tag("q").hex()
    for _ in range(200):
        (told,) = json.loads(invoke("quota", "q", "1500", "--json").stdout)
        if told["used"]:
            break
    assert told == {"namespace": "q", "tag": tag, "limit": 1500, "used": 1}
    assert invoke("quota", "", "7").exit_code == 0
    rows = [line.split() for line in invoke("quota").stdout.splitlines()]
    assert [tag, "1,500", "1", "(0%)"] in [row[1:] for row in rows] and {row[0] for row in rows[1:]} == {"q", "none"}
    assert len(json.loads(invoke("quota", "q", "--json").stdout)) == 1
    for namespace in ("q", ""):
        assert f"namespace '{namespace}' has no quota" in invoke("quota", namespace, "0").stderr
    assert json.loads(invoke("quota", "--json").stdout) == []


def test_top_fits_80_columns() -> None:
    told = {
        "leader": "10.11.12.13:7002", "leading": True, "term": 1763764012, "rebuilding": [], "stores": [], "asked": 0.0,
        "masters": "10.11.12.13:7002,10.11.12.14:7002", "blocks": 10_000_000, "replicas": 20_000_000, "shed": 0,
        "map_bytes": 1023.9 * (1 << 20), "map_limit_bytes": 4 << 30, "names": 1_048_576, "tombstones": 1_048_576,
    }  # fmt: skip
    wide = Console(width=160, file=io.StringIO())
    wide.print(store_top.screen(told, None, 80))
    shown = wide.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80, shown
    assert "4.0 GiB, 1,048,576 names, 1,048,576 tombstones" in shown


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
        (["ls", "abc"], 1, "prefix='abc': has 3 hex digits; a store looks up whole bytes"),
        (["pin", "x", "--ttl", "5", "--hard"], 2, "ttl=5: a hard pin has no end"),
        (["pin", "x", "--ttl", "0"], 2, "ttl=0: must be in 0.001.."),
        (["pin", "x", "--ttl", "nan"], 2, "ttl=nan: must be in 0.001.."),
        (["pin"], 2, "Missing argument"),
        (["replicas", "x", "0", "--hard"], 2, "hard=True: N is 0"),
        (["replicas", "x"], 2, "N"),
        (["quota", "x", "99999999999999999999"], 1, "blocks=99999999999999999999: must be in 0.."),
        (["quota", "\udcff", "1"], 2, "namespace='\\udcff': is not UTF-8"),
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
    no_master = (node, "what answers there is not what store must name")
    for nobody, says in (("127.0.0.1:1", "refused"), no_master):
        result = invoke("ls", "--store", nobody)
        assert result.exit_code == 1 and "--store names another" in result.stderr, result.stderr
        assert f"store='{nobody}': no store master answers there" in result.stderr and says in result.stderr


def test_sizes() -> None:
    assert parsed("size", "64k, 1m,7") == [65536, 1 << 20, 7]
    with pytest.raises(ConfigError, match="batch='0'"):
        parsed("batch", "0")

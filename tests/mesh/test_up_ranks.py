"""A decode instance over two machines by `kvmesh up` alone, under TLS: `--decode-hosts 2` on one waits for `--join ...
--as ranks` on the other; its tokens, and what each side says when the other goes."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvmesh.rpc.certificates import make_certificates
from tests.support.mesh.namespaces import two_machines, until, why_not
from tests.support.mesh.up import START_S, Up
from tests.support.paths import ROOT
from tests.support.reference import assert_matches_reference

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

MODEL = "demo-model"
PROMPT = list(range(10, 310))
SOON_S = 60.0


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Up, Up]]:
    with two_machines() as (a, b):
        make_certificates(tmp_path / "tls", [a.address, b.address])
        env = {f"KVMESH_TLS_{one.upper()}": str(tmp_path / "tls" / f"{one}.pem") for one in ("cert", "key", "ca")}
        env |= {"OMP_NUM_THREADS": "1"}
        network = "--rank-network=10.78.0.0/24"
        two = ("--node-id=alpha", "--decode-mesh=tp=2", "--decode-hosts=2", network, "--transports=tcp")
        up = Up(a, tmp_path / "a", f"--host={a.address}", *two, env=env)
        until(lambda: "wait for 1 more machine" in up.printed, "who is missing", START_S)
        assert f"up --join {a.address}:7001 --as ranks --tls-cert FILE" in up.printed, up.printed
        lent = ("--as=ranks", "--node-id=beta", "--transports=tcp")
        join = Up(b, tmp_path / "b", f"--join={a.address}", *lent, env=env)
        try:
            yield up, join
        finally:
            up.stop()
            join.stop()


def tokens(host: str) -> list[int]:
    """The answer to PROMPT."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    link = http.client.HTTPConnection(host, 8000, timeout=60)
    try:
        link.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}))
        told = json.loads(link.getresponse().read())
    finally:
        link.close()
    found: list[int] = told["choices"][0]["token_ids"]
    return found


def ranks_of(up: Up, process: str) -> list[psutil.Process]:
    return psutil.Process(up.told()["services"][process]["pid"]).children()


def test_an_instance_has_its_ranks_on_a_machine_that_joins(sides: tuple[Up, Up]) -> None:
    up, join = sides
    up.ready()
    join.ready()
    assert "✓ beta lends ranks" in up.printed
    assert_matches_reference(ROOT / "examples" / MODEL, PROMPT, up.machine.call(tokens, up.machine.address))
    (rank,) = ranks_of(join, "ranks")
    until(lambda: "decode-0@alpha runs rank 1 here" in join.printed, "B says whose ranks it runs", SOON_S)
    (local,) = ranks_of(up, "decode-0")

    assert "stopped; nothing is left running" in join.stop()
    assert not rank.is_running() and not join.machine.pids()
    until(lambda: "beta (10.78.0.2:" in up.printed and "lends no ranks any more" in up.printed, "who has left", SOON_S)
    until(lambda: "✗ decode-0 died" in up.printed, "the end of the instance", SOON_S)
    assert "rank 1 (pid" in up.printed and "its rank host stops" in up.printed, up.printed
    assert up.printed.count("Ranks wait for 1 more machine") == 2
    until(lambda: not local.is_running(), "the end of the other rank", SOON_S)

    pids = up.machine.pids()
    assert "stopped; nothing is left running" in up.stop()
    assert not [pid for pid in pids if pid != os.getpid() and psutil.pid_exists(pid)]

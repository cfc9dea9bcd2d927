"""Ranks on several machines: what `up` refuses, what it starts, and what both sides print while it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.instances import ranks_text
from kvmesh.cli.up import checks, joining, plan
from kvmesh.cli.up.rank_hosts import UNHEARD_MS, BorrowedRanks, LentRanks, machines_wanted
from kvmesh.cli.up.settings import Joined, MeshSettings
from kvmesh.errors import ConfigError
from kvmesh.rpc.pb import common_pb2, ranks_pb2

TWO = {"host": "10.0.0.1", "decode_mesh": "tp=4", "decode_hosts": 2}
LENDER = {"join": "10.0.0.1", "join_as": "ranks"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"join_as": "ranks"}, "as='ranks': a machine lends ranks to a mesh that it joins: give --join HOST"),
        ({**LENDER, "decode": 2}, "decode=2: with --as ranks this machine gives ranks to others, and nothing else"),
        ({**LENDER, "pool": 1}, "pool=1: with --as ranks"),
        ({**LENDER, "decode_mesh": "tp=2"}, "decode_mesh='tp=2': with --as ranks"),
        ({**TWO, "host": "127.0.0.1"}, "no other machine reaches a mesh on 127.0.0.1: give --host ADDRESS"),
        ({**TWO, "decode_mesh": ""}, "an instance of one rank is on one machine: say how it is cut with --decode-mesh"),
        ({**TWO, "decode_mesh": "tp=3"}, "2 machines do not have equal parts of 3 ranks"),
        ({**TWO, "decode_mesh": "dp=2,ep=dp"}, "the ranks of dp=2 groups are on one machine"),
        (
            {**TWO, "tls_cert": "c", "tls_key": "k"},
            "name the interface or network that you trust, as in --rank-network",
        ),
        ({**TWO, "tls": True, "rank_network": "eth1"}, "other machines need certificates, too: give --tls-cert"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        MeshSettings(model="/m", **given)
    assert says in refused.value.message


def test_an_instance_asks_for_rank_hosts(tmp_path: Path) -> None:
    settings = MeshSettings(
        model="/m/tiny", memory_mb=64, rank_network="eth1", **{**TWO, "host": "0.0.0.0", "advertise_host": "10.0.0.1"}
    )
    argv = {one.name: one.argv for one in plan.plan(settings, tmp_path, plan.Ports())}
    assert {"--rank-hosts=1", "--mesh=tp=4", "--rank-network=eth1"} <= set(argv["decode-0"])
    assert not any(one.startswith(("--rank-hosts", "--rank-network")) for one in argv["prefill-0"])
    assert (settings.ranks, machines_wanted(settings)) == (3, 1), "one of prefill, half of decode are here"


def test_a_machine_that_lends_starts_a_rank_host_alone(tmp_path: Path) -> None:
    settings = MeshSettings(model="/m/tiny", node_id="beta", advertise_host="10.0.0.2", host="0.0.0.0", **LENDER)
    settings = dataclasses.replace(settings, joined=Joined(("10.0.0.1:7001",), ("10.0.0.1:7002",)))
    (spec,) = plan.plan(settings, tmp_path, plan.Ports())
    wanted = {"--store=10.0.0.1:7002", "--model=/m/tiny", "--instance-id=ranks@beta", "--advertise-host=10.0.0.2"}
    assert wanted <= set(spec.argv) and spec.argv[3:5] == ("serve", "ranks")
    assert settings.ranks == 0


def test_a_machine_that_lends_has_the_same_checkpoint() -> None:
    card = {"name": "demo", "fingerprint": "ab" * 32, "kv_dtype": "bfloat16", "block_tokens": 32}
    mesh = Joined(("10.0.0.1:7001",), ("10.0.0.1:7002",))
    found = joining.FoundMesh("10.0.0.1:7001", mesh, "", (card,), ())
    settings = MeshSettings(model="/m/tiny", **LENDER)
    for mine in ("ab", "cd"):
        why = ""
        try:
            joining.fitted(settings, found, "10.0.0.2", {"/m/tiny": mine * 32}, named=False, hostname="beta")
        except ConfigError as refused:
            why = refused.message
        assert bool(why) == (mine == "cd")
        assert not why or "serves demo (abababababab), this checkpoint is cdcdcdcdcdcd" in why


def test_more_ranks_than_gpus_want_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.instance.rank_lending.gpu_memory", lambda: (80 << 30,) * 2)
    settings = MeshSettings(model="/m", host="10.0.0.1", device="cuda", decode_mesh="tp=8")
    with pytest.raises(ConfigError, match=r"this machine has 2: give --decode-hosts 4, and have other machines lend"):
        checks.check_ranks(settings)


def host(name: str) -> ranks_pb2.RankHostState:
    ref = common_pb2.InstanceRef(instance_id=f"ranks@{name}", address=f"{name}:7050", incarnation=1)
    return ranks_pb2.RankHostState(instance=ref, node_id=name)


def test_who_waits_says_what_to_run_and_who_comes_and_goes() -> None:
    said = BorrowedRanks(2, "kvmesh up --join 10.0.0.1 --as ranks")
    (first,) = said.lines([])
    assert "wait for 2 more machines" in first and "kvmesh up --join 10.0.0.1 --as ranks" in first
    assert said.lines([]) == []
    assert said.lines([host("b")]) == ["[green]✓[/] b lends ranks (b:7050)"]
    assert said.lines([host("b"), host("c")]) == ["[green]✓[/] c lends ranks (c:7050)"]
    gone, wait = said.lines([host("c")])
    assert "b (b:7050) lends no ranks any more" in gone and "wait for 1 more machine." in wait
    assert BorrowedRanks(0, "").lines([]) == []


def test_who_lends_says_whose_ranks_run_and_how_they_ended() -> None:
    said = LentRanks("10.0.0.1:7001")
    status = ranks_pb2.GetRankHostStatusResponse(registered="10.0.0.1:7002")
    assert said.lines(status) == []
    status.host.uses.add(instance_id="decode-0@a", ranks=[2, 3])
    assert said.lines(status) == ["[green]✓[/] decode-0@a runs ranks 2 and 3 here"]
    assert said.lines(status) == []
    status.host.uses.pop()
    status.ends = 1
    status.ended.add(instance_id="decode-0@a", ranks=[2, 3], cause="its front has ended, or is out of reach")
    (ended,) = said.lines(status)
    assert "ranks 2 and 3 of decode-0@a ended here: its front has ended, or is out of reach" in ended
    status.registered, status.unheard_ms = "", UNHEARD_MS + 1
    (silent,) = said.lines(status)
    assert "the mesh of 10.0.0.1:7001 does not answer" in silent and said.lines(status) == []
    status.registered, status.unheard_ms = "10.0.0.1:7002", 0
    (back,) = said.lines(status)
    assert "answers again" in back


def test_ranks_are_counted_as_people_do() -> None:
    assert [ranks_text(r) for r in ([1], [3, 2], [4, 5, 6])] == ["rank 1", "ranks 2 and 3", "ranks 4, 5 and 6"]

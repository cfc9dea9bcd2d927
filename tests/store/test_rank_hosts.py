"""Which machines lend ranks, and which of them an instance gets: leases, what does not fit, who comes first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest, Overloaded
from kvmesh.rpc.pb import ranks_pb2, store_pb2
from kvmesh.services.store import mapping, rank_hosts
from kvmesh.services.store.rank_hosts import KEPT_S, LEASE_S, MAX_KEPT, RankHost, RankHosts, RankPlaces


def host(name: str, **given: Any) -> RankHost:
    usual = {"incarnation": 1, "address": f"{name}:7050", "node_id": name, "build": "1-a"}
    return RankHost(**{"name": name, **usual, "max_ranks": 8, "gpus": 0, "memory_bytes": 1 << 30, **given})


def asked(name: str = "decode-0", **given: Any) -> RankPlaces:
    given = {"fingerprint": "aa"} | given
    return RankPlaces(
        **{"name": name, "incarnation": 1, "build": "1-a", "hosts": 1, "ranks_each": 4, "gpus": False} | given
    )


def known(*hosts: RankHost) -> RankHosts:
    made = RankHosts()
    for one in hosts:
        made.lend(one, 0.0)
    return made


def test_a_host_is_known_while_it_says_so() -> None:
    made = known(host("b"), host("a"))
    assert [one.name for one in made.living(LEASE_S / 2)] == ["a", "b"]
    made.lend(host("a"), LEASE_S / 2)
    assert [one.name for one in made.living(LEASE_S)] == ["a"]
    made.leave("a", 2)
    assert made.living(LEASE_S), "another life's goodbye"
    made.leave("a", 1)
    assert not made.living(LEASE_S)


def test_a_later_life_of_a_name_stands() -> None:
    made = known(host("a", incarnation=2))
    with pytest.raises(InvalidRequest, match="a later one of this name"):
        made.lend(host("a"), 0.0)


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_hosts, "MAX_HOSTS", 1)
    made = known(host("a"))
    made.lend(host("a"), 0.1)
    with pytest.raises(Overloaded):
        made.lend(host("b"), 0.1)


def test_the_emptiest_come_first() -> None:
    made = known(host("a", used=(("x", (2, 3)),)), host("b"), host("c"))
    assert made.place(asked(hosts=2), 0.0) == (["b:7050", "c:7050"], "")


def test_what_keeps_an_instance_waiting_is_said() -> None:
    assert RankHosts().place(asked(), 0.0) == ([], "0 of 1 rank hosts are there")
    made = known(host("a", build="2-b"), host("b", used=(("x", tuple(range(5))),)))
    addresses, why = made.place(asked(hosts=2), 0.0)
    assert not addresses
    assert why == (
        "0 of 2 rank hosts are there; a (a:7050) is another build of kvmesh (2); b (b:7050) has room for 3 more ranks"
    )


def test_weights_are_the_same() -> None:
    made = known(host("a", fingerprint="bb"))
    assert "a (a:7050) has other weights (bb) than the instance (aa): start it with" in made.place(asked(), 0.0)[1]
    made.lend(host("b", fingerprint="aa"), 0.0)
    assert made.place(asked(), 0.0)[0] == ["b:7050"]


def test_a_gpu_has_one_rank() -> None:
    made = known(host("a", gpus=8, used=(("x", (4,)),)), host("b", gpus=2), host("c", gpus=4))
    addresses, _ = made.place(asked(gpus=True), 0.0)
    assert addresses == ["c:7050"]
    _, why = made.place(asked("decode-1", gpus=True), 0.0)
    assert "its GPUs are those of x" in why and "has 2 GPUs, 4 are needed" in why
    assert "c (c:7050) its GPUs are those of decode-0" in why, "kept, though it does not run there yet"
    addresses, _ = made.place(asked(incarnation=2, gpus=True), 0.0)
    assert addresses == ["c:7050"], "a later life takes what an earlier one was given"
    with pytest.raises(InvalidRequest, match="a later one has asked"):
        made.place(asked(gpus=True), 0.0)


def test_what_is_kept_is_kept_for_a_while() -> None:
    made = known(host("a"))
    assert made.place(asked(), 0.0)[0]
    assert "is being taken by decode-0" in made.place(asked("other"), 1.0)[1]
    made.lend(host("a", used=(("decode-0", tuple(range(4))),)), 2.0)
    assert made.place(asked("other"), 2.0)[0] == ["a:7050"], "its own words count as soon as they say it"
    made = known(host("a"))
    assert made.place(asked(), 0.0)[0]
    made.lend(host("a"), KEPT_S)
    assert made.place(asked("other"), KEPT_S + 0.1)[0] == ["a:7050"]


def test_hosts_are_kept_for_few_at_once_who_do_not_come() -> None:
    made = known(*(host(f"h{at:03}") for at in range(MAX_KEPT + 1)))
    for at in range(MAX_KEPT):
        assert made.place(asked(f"i{at}"), 0.0)[0]
    assert "32 other instances whose ranks have not come yet" in made.place(asked("one-more"), 1.0)[1]
    taken = made.place(asked("i0"), 1.0)[0]
    assert len(taken) == 1, "one that asks again has a place among them"
    name = taken[0].partition(":")[0]
    made.lend(host(name, used=(("i0", tuple(range(4))),)), 2.0)
    assert made.place(asked("one-more"), 2.0)[0], "and where ranks run nothing is kept"
    for at in range(MAX_KEPT + 1):
        made.lend(host(f"h{at:03}"), KEPT_S)
    assert made.place(asked("another"), KEPT_S + 1.1)[0]


def test_ranks_of_an_earlier_life_take_no_room() -> None:
    made = known(host("a", used=(("decode-0", tuple(range(8))),)))
    assert made.place(asked(incarnation=2, ranks_each=8), 0.0)[0] == ["a:7050"]


def test_what_a_rank_host_may_say() -> None:
    one = host("a", used=(("x", (2, 3)),), gpus=2, fingerprint="aa")
    assert mapping.rank_host_in(mapping.rank_host_out(one)) == one
    for wrong in ({"name": ""}, {"address": "a"}, {"incarnation": 0}, {"build": "x" * 300}, {"node_id": "a\n"}):
        with pytest.raises(InvalidRequest, match="host"):
            mapping.rank_host_in(mapping.rank_host_out(dataclasses.replace(one, **wrong)))
    many = mapping.rank_host_out(one)
    many.uses.extend(ranks_pb2.RankHostUse(instance_id=str(i)) for i in range(mapping.MAX_USES))
    with pytest.raises(InvalidRequest, match="uses"):
        mapping.rank_host_in(many)


def test_what_an_instance_may_ask() -> None:
    good = {"build": "1-a", "hosts": 1, "ranks_each": 1}
    for wrong in ({}, {"build": ""}, {"hosts": 0}, {"ranks_each": 5000}):
        request = store_pb2.PlaceRanksRequest(**{**good, **wrong})
        request.instance.instance_id = "decode-0" if wrong else ""
        with pytest.raises(InvalidRequest):
            mapping.rank_places_in(request)


def test_what_keeps_an_instance_waiting_is_short() -> None:
    made = known(*(host(f"h{at:03}", build="2-b") for at in range(100)))
    why = made.place(asked(), 0.0)[1]
    assert why.count("another build") == 16 and why.endswith("; and 84 more")


def test_what_was_kept_ends_though_no_host_lives() -> None:
    made = known(host("a"))
    assert made.place(asked(incarnation=2), 0.0)[0]
    with pytest.raises(InvalidRequest, match="a later one has asked"):
        made.place(asked(), KEPT_S - 1)
    assert made.place(asked(), KEPT_S + 1) == ([], "0 of 1 rank hosts are there")

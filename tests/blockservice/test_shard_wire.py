"""Who sends to whom when the two ends of a handoff cut blocks differently, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.blockservice.object_family import ObjectFamily, PartLayout, part_of
from kvmesh.blockservice.shard_wire import from_wire, to_wire, writers_of
from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.instance.config import InstanceConfig
from kvmesh.instance.front import check_config
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks.devices import device_of
from kvmesh.rpc.pb import common_pb2 as pb


def cut(ranks: int, heads: int = 2) -> tuple[ShardLayout, ...]:
    own = max(heads // ranks, 1)
    return tuple(ShardLayout(3, own, 16, 8, 4, first_head=heads * rank // ranks) for rank in range(ranks))


def test_layouts_come_back_from_the_wire_as_they_were() -> None:
    odd = replace(cut(4)[3], first_layer=2, planes=1, turn=1, turns=2)
    assert from_wire(to_wire((*cut(2), odd)), "layouts") == (*cut(2), odd)
    with pytest.raises(InvalidRequest, match=r"layouts: .*kv_heads=0"):
        from_wire([pb.ShardLayout(layers=1)], "layouts")
    assert not to_wire(cut(2))[0].turns, "what ranks without turns tell has not changed"
    wrong = to_wire([odd])[0]
    wrong.turn = 2
    with pytest.raises(InvalidRequest, match=r"layouts: .*turn=2 of turns=2"):
        from_wire([wrong], "layouts")
    with pytest.raises(InvalidRequest, match="at most 1024"):
        from_wire([pb.ShardLayout()] * 1025, "layouts")


def test_the_text_of_a_partition_tells_of_turns() -> None:
    group = CacheGroup("all", (0, 1, 2), CacheLayout(1, 1, 40), CacheKind.ALL)
    family = ObjectFamily("model bfloat16", 16, (group,), (2,))
    cuts = tuple(replace(family.object(0), turn=turn, turns=2) for turn in range(2))
    text = family.part(0, cuts)
    assert text.endswith(" #0 L0+3H0+1T0/2|L0+3H0+1T1/2")
    read = part_of(text)
    assert read is not None and read.cuts == cuts
    assert part_of(text.replace("T1/2", "T2/2")) is None
    assert part_of(family.part(0)) == PartLayout(family, 0, (family.object(0),))


@pytest.mark.parametrize(
    ("writers", "readers", "pairs"),
    [
        (1, 1, {(0, "a")}),
        (2, 1, {(0, "a"), (0, "b")}),
        (1, 2, {(0, "a"), (1, "a")}),
        (2, 2, {(0, "a"), (1, "b")}),
        (4, 2, {(0, "a"), (0, "b"), (1, "c"), (1, "d")}),  # replicas take turns
        (2, 4, {(0, "a"), (1, "a"), (2, "b"), (3, "b")}),
    ],
)
def test_a_rank_waits_for_those_who_send_to_it(writers: int, readers: int, pairs: set[tuple[int, str]]) -> None:
    names = "abcd"[:writers]
    assert set(writers_of(names, cut(writers), cut(readers))) == pairs
    if writers == readers:
        assert set(writers_of(names, (), cut(readers))) == pairs  # who names no cut has ours


def test_ends_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"1 layouts.*2 writers"):
        writers_of("ab", cut(1), cut(2))
    with pytest.raises(InvalidRequest, match="block_tokens: source 16, destination 32"):
        writers_of("a", cut(1), (replace(cut(1)[0], block_tokens=32),))
    with pytest.raises(InvalidRequest, match="no writer holds"):
        writers_of("a", cut(2)[:1], cut(1))


def test_ranks_that_cannot_be_are_refused(tmp_path: Path) -> None:
    demo_model = str(tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel=0: at least 1"):
        check_config(InstanceConfig(model=demo_model, tensor_parallel=0))
    with pytest.raises(ConfigError, match="device='cuda:1': 2 ranks need a GPU each"):
        check_config(InstanceConfig(model=demo_model, tensor_parallel=2, device="cuda:1"))
    assert [device_of("cuda", rank, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert device_of("cuda:1", 0, 1) == "cuda:1" and device_of("cpu", 1, 2) == "cpu"

"""What a model of one cache group puts on the wire is, byte for byte, what it was before there were groups."""

from __future__ import annotations

import pytest

from kvmesh.blockservice.group_wire import groups_from_wire, groups_to_wire
from kvmesh.blockservice.shard_wire import from_wire, to_wire
from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, derive_groups, object_shard, rank_shard
from kvmesh.kvcache.layout import ShardLayout, plan
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import prefill_pb2, store_pb2

DIGEST = bytes(range(32))
GEMMA = derive_groups([4096, 0, 4096, 0], 4, 256)
STATE = CacheGroup("delta", (0, 2), CacheLayout(1, 32, 128 * 128, "float32"), CacheKind.STATE, 8, optional=True)


def test_a_model_of_one_group_says_on_the_wire_what_it_said_before() -> None:
    """The bytes were encoded by hand of the fields as they were: tag, length and value of each."""
    assert to_wire([ShardLayout(2, 4, 16, 64, 2, 6, 8)])[0].SerializeToString() == bytes(
        [8, 2, 16, 4, 24, 16, 32, 64, 40, 2, 48, 6, 56, 8, 64, 2]
    )
    card = pb.ModelCard(name="m", block_tokens=16, cache_groups=groups_to_wire(derive_groups([0, 0], 4, 64), (8192,)))
    assert card.SerializeToString() == b"\x0a\x01m\x18\x10"
    announcement = store_pb2.Announcement(store_id="n", seq=1, sealed=b"k" * 16, groups=b"")
    assert announcement.SerializeToString() == b"\x0a\x01n\x19" + (1).to_bytes(8, "little") + b"\x22\x10" + b"k" * 16
    landing = prefill_pb2.RankLanding(rank=1, segment="s", offset=[0, 64], first_block=2, groups=())
    assert landing.SerializeToString() == b"\x08\x01\x12\x01s\x1a\x02\x00\x40\x20\x02"


def test_a_shard_tells_its_group_and_no_plan_joins_two() -> None:
    everything, window = (object_shard(group, 16, 2, number) for number, group in enumerate(GEMMA))
    assert from_wire(to_wire([everything, window]), "layouts") == (everything, window)
    assert everything.shape == window.shape
    with pytest.raises(ConfigError) as refused:
        plan(everything, window)
    assert refused.value.field == "group"
    cut = rank_shard(GEMMA[1], range(2, 4), range(1, 3), 16, 2, number=1)
    assert cut is not None and cut.group == 1 and plan(cut, window)
    with pytest.raises(ConfigError, match="group=-1"):
        ShardLayout(1, 1, 1, 1, 1, group=-1)


def test_groups_come_back_from_a_model_card() -> None:
    told = groups_to_wire((*GEMMA, STATE), (1, 2, 3))
    assert groups_from_wire(told, "model.cache_groups") == tuple(zip((*GEMMA, STATE), (1, 2, 3), strict=True))
    assert groups_from_wire(groups_to_wire(GEMMA[:1], (1,)), "model.cache_groups") == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": 9},
        {"kind": 0},
        {"planes": 0},
        {"layers": [2, 1]},
        {"name": ""},
        {"object_bytes": 0},
        {"optional": True},
        {"keep": 4},
    ],
)
def test_a_card_with_groups_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    right = {"name": "all", "layers": [0], "kind": 1, "planes": 2, "heads": 1, "dim": 8, "object_bytes": 64}
    assert groups_from_wire([pb.CacheGroup(**right)], "f")
    with pytest.raises(InvalidRequest) as refused:
        groups_from_wire([pb.CacheGroup(**(right | wrong))], "f")
    assert refused.value.field == "f"


def test_more_groups_than_a_mask_has_bits_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 8"):
        groups_from_wire([pb.CacheGroup()] * 9, "f")

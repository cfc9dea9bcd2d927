"""Engines of others in the brain: each serves alone, with what it is believed to hold, which nobody fetches."""

from __future__ import annotations

import msgspec
import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.pb import common_pb2, conductor_pb2, store_pb2
from kvmesh.services.conductor import mapping
from kvmesh.services.conductor.domain import BlockKnowledge, Register, Role
from kvmesh.services.conductor.model_control import ModelControl
from tests.support.conductor.brain import Brain, card, chain, joined, reset

CARD = card(fingerprint="external-1", kv_dtype="", kv_bytes_per_token=0)
KEYS = chain("a", 60)
PROMPT = 60 * 16 + 1


def engines(brain: Brain, count: int) -> list[str]:
    names = [f"e{n}" for n in range(count)]
    for name in names:
        brain.add(name, Role.BOTH, model=CARD, http_url=f"http://{name}", knowledge=BlockKnowledge.FALLBACK)
    return names


@pytest.mark.parametrize("count", [1, 3, 40])
def test_each_serves_alone_and_prompts_go_where_their_prefix_is_believed(count: int) -> None:
    brain = Brain()
    names = engines(brain, count)
    home = names[-1]
    brain.seal(home, KEYS)
    found = brain.placed(PROMPT, keys=KEYS)
    assert (found.prefill.instance_id, found.decode.instance_id) == (home, home)
    assert found.cached_tokens == 960 and not found.pulls and not found.decode_pulls
    for _ in range(2 * count):
        other = brain.placed(PROMPT, keys=KEYS)  # those that go elsewhere compute all of it
        assert other.prefill == other.decode and not other.pulls
        assert other.cached_tokens in (0, 960)
    view = brain.view(home)
    assert (view.http_url, view.knowledge, view.indexed_blocks) == (f"http://{home}", BlockKnowledge.FALLBACK, 60)


@pytest.mark.parametrize("policy", ["kvcache", "round_robin", "least_loaded", "random", "power_of_two", "session_hash"])
def test_no_policy_pairs_them(policy: str) -> None:
    brain = Brain(policy=policy)
    engines(brain, 3)
    for n in range(6):
        found = brain.placed(100, session=f"s{n}")
        assert found.prefill == found.decode


def test_a_master_that_knows_none_of_them_leaves_their_blocks_alone() -> None:
    brain = Brain()
    [home, _] = engines(brain, 2)
    brain.seal(home, KEYS)
    brain.step(reset(7, "somebody"))
    brain.step(joined("another"))
    assert brain.placed(PROMPT, keys=KEYS).prefill.instance_id == home
    brain.add(home, Role.BOTH, model=CARD, http_url=f"http://{home}", incarnation=2)
    assert brain.view(home).indexed_blocks == 0 and brain.placed(PROMPT, keys=KEYS).cached_tokens == 0


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"model": card(), "http_url": "http://a"}, "model.fingerprint"),
        ({"model": CARD}, "model.fingerprint"),
        ({"model": CARD, "http_url": "ftp://a"}, "http_url"),
        ({"model": CARD, "http_url": "http://" + "a" * 300}, "http_url"),
        ({"model": CARD, "http_url": "http://a", "role": Role.DECODE}, "role"),
    ],
    ids=range(5),
)
def test_what_cannot_be_one_is_refused(more: dict[str, object], field: str) -> None:
    [refusal] = Brain().register("e", **({"role": Role.BOTH} | more))  # type: ignore[arg-type]
    assert isinstance(refusal.error, InvalidRequest) and refusal.error.field == field  # type: ignore[union-attr]


async def test_they_take_no_orders() -> None:
    brain = Brain()
    engines(brain, 1)
    control = ModelControl(lambda: brain.state.instances)
    with pytest.raises(InvalidRequest, match="http://e0"):
        await control.pause(conductor_pb2.PauseModelRequest(model="demo"))


def test_what_they_say_of_blocks_is_said_in_their_own_name() -> None:
    ref = common_pb2.InstanceRef(instance_id="e", incarnation=3)
    blocks = store_pb2.Announcement(store_id="victim", incarnation=9, seq=1, sealed=b"k" * 32, groups=b"\1")
    told = mapping.external_blocks_in(conductor_pb2.HeartbeatRequest(instance=ref, blocks=blocks))
    assert told is not None
    assert (told.announcement.store_id, told.announcement.incarnation, len(told.announcement.sealed)) == ("e", 3, 2)
    assert mapping.external_blocks_in(conductor_pb2.HeartbeatRequest(instance=ref)) is None
    bad = conductor_pb2.HeartbeatRequest(instance=ref, blocks=store_pb2.Announcement(sealed=b"k" * 31))
    with pytest.raises(InvalidRequest, match="sealed"):
        mapping.external_blocks_in(bad)


def test_the_decision_log_keeps_what_they_are() -> None:
    brain = Brain()
    engines(brain, 1)
    told = Register(brain.refs["e0"], Role.BOTH, "n", CARD, 8, 4, http_url="http://e0", knowledge=BlockKnowledge.EXACT)
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(told)), Register) == told

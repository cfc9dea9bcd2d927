from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.clock import Tick
from kvmesh.errors import InvalidRequest, Overloaded, UnknownInstance
from kvmesh.kvcache.announce import Announcement
from kvmesh.rpc.pb.store_pb2 import StoreStatus, StoreUsage
from kvmesh.services.store.domain import (
    Action,
    Announce,
    Beat,
    Change,
    NodeJoined,
    NodeLeft,
    NodeRole,
    Publish,
    RefuseCall,
    RegisteredNode,
)
from kvmesh.services.store.mapping import member_out
from kvmesh.services.store.state import MAX_POOLS, MasterState

LEASE = 2.0


def usage(free_bytes: int, blocks: int) -> StoreUsage:
    return StoreUsage(capacity_bytes=100, free_bytes=free_bytes, blocks=blocks)


def member(name: str = "a", incarnation: int = 1, address: str = "h:1") -> RegisteredNode:
    return RegisteredNode(name, address, incarnation, NodeRole.PREFILL, "node", name)


def state(stall_s: float = 1e9) -> MasterState:
    return MasterState(lease_s=LEASE, stall_s=stall_s)


def changes(actions: list[Action]) -> list[tuple[Change, str, int]]:
    return [(a.change, a.member.instance_id, a.member.incarnation) for a in actions if isinstance(a, Publish)]


def refusal(actions: list[Action]) -> Exception | None:
    return next((a.error for a in actions if isinstance(a, RefuseCall)), None)


class Told:
    """Feeds one state and keeps what it said."""

    def __init__(self, stall_s: float = 1e9) -> None:
        self.state = state(stall_s)

    def __call__(self, event: NodeJoined | Beat | NodeLeft | Tick, now: float) -> list[Action]:
        return list(self.state.step(event, now))


def test_joining_is_published_once() -> None:
    told = Told()
    assert changes(told(NodeJoined(member()), 0.0)) == [(Change.JOINED, "a", 1)]
    assert told(NodeJoined(member()), 0.5) == []
    assert told.state.members == [member()]


def test_a_beat_holds_the_lease_and_silence_ends_it() -> None:
    told = Told()
    told(NodeJoined(member()), 0.0)
    assert told(Beat("a", 1), 1.9) == []
    assert told(Tick(), 3.9) == []
    assert changes(told(Tick(), 3.91)) == [(Change.DIED, "a", 1)]
    assert told.state.members == []
    assert told(Tick(), 9.0) == []


def test_a_beat_after_the_lease_comes_too_late() -> None:
    told = Told()
    told(NodeJoined(member()), 0.0)
    actions = told(Beat("a", 1), LEASE + 0.1)
    assert changes(actions) == [(Change.DIED, "a", 1)]
    assert isinstance(refusal(actions), UnknownInstance)
    assert changes(told(NodeJoined(member()), LEASE + 0.2)) == [(Change.JOINED, "a", 1)]


def test_a_beat_holds_nobody_elses_lease() -> None:
    told = Told()
    told(NodeJoined(member("a")), 0.0)
    told(NodeJoined(member("b", address="h:2")), 0.0)
    assert changes(told(Beat("a", 1), 1.5)) == []
    assert changes(told(Beat("a", 1), 2.5)) == [(Change.DIED, "b", 1)]


class Walked(dict[str, Any]):
    """Counts how often all of it is looked at."""

    times = 0

    def values(self) -> Any:
        self.times += 1
        return super().values()


def test_a_step_does_not_look_at_every_member() -> None:
    """A mesh of n members takes some 20·n steps a second."""
    told = Told()
    lives = told.state._lives = Walked()
    for i in range(5):
        told(NodeJoined(member(f"m{i}")), 0.1 * i)
    for n in range(1000):
        now = 0.5 + n / 200
        assert told(Beat(f"m{n % 5}", 1), now) == []
    assert lives.times <= 10
    assert len(changes(told(Tick(), now + LEASE + 0.1))) == 5


@pytest.mark.parametrize("beat", [Beat("nobody", 1), Beat("a", 2)])
def test_an_unknown_incarnation_is_told_to_join(beat: Beat) -> None:
    told = Told()
    told(NodeJoined(member()), 0.0)
    assert isinstance(refusal(told(beat, 0.1)), UnknownInstance)


def test_a_new_incarnation_takes_the_name_and_keeps_it() -> None:
    told = Told()
    told(NodeJoined(member(incarnation=7)), 0.0)
    assert changes(told(NodeJoined(member(incarnation=3)), 0.1)) == [(Change.DIED, "a", 7), (Change.JOINED, "a", 3)]
    assert isinstance(refusal(told(Beat("a", 7), 0.2)), UnknownInstance)
    actions = told(NodeJoined(member(incarnation=7)), 0.3)
    assert isinstance(refusal(actions), InvalidRequest)
    assert changes(actions) == []
    assert told.state.members == [member(incarnation=3)]


def test_leaving_is_not_dying_and_only_for_the_living() -> None:
    told = Told()
    told(NodeJoined(member()), 0.0)
    assert told(NodeLeft("a", 2), 0.1) == []
    assert changes(told(NodeLeft("a", 1), 0.1)) == [(Change.LEFT, "a", 1)]
    assert told(NodeLeft("a", 1), 0.2) == []


def test_the_masters_own_silence_kills_nobody() -> None:
    told = Told(stall_s=1.0)
    told(NodeJoined(member()), 0.0)
    told(Tick(), 0.5)
    assert told(Tick(), 60.0) == []  # stopped for 59.5 s: nobody could be heard
    assert told(Tick(), 60.9) == []
    assert changes(told(Tick(), 61.6)) == [(Change.DIED, "a", 1)]


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (member(name=""), "member.instance.instance_id"),
        (member(name="a" * 300), "member.instance.instance_id"),
        (member(name="a\x00"), "member.instance.instance_id"),
        (member(address=""), "member.instance.address"),
        (member(address="nowhere"), "member.instance.address"),
        (member(address="h:99999"), "member.instance.address"),
        (member(address="h:1\r\n"), "member.instance.address"),
        (member(incarnation=0), "member.instance.incarnation"),
        (replace(member(), store_id="b"), "member.store_id"),
        (replace(member(), node_id="n" * 1000), "member.node_id"),
    ],
)
def test_a_member_must_say_who_it_is(broken: RegisteredNode, field: str) -> None:
    told = Told()
    error = refusal(told(NodeJoined(broken), 0.0))
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert str(error).startswith(f"{field}=")
    assert told.state.members == []


def test_members_are_bounded() -> None:
    told = Told()
    told.state = MasterState(lease_s=LEASE, stall_s=1e9, max_members=2)
    told(NodeJoined(member("a")), 0.0)
    told(NodeJoined(member("b")), 0.0)
    assert isinstance(refusal(told(NodeJoined(member("c")), 0.1)), Overloaded)
    assert changes(told(NodeJoined(member("a", 2)), 0.2)) == [(Change.DIED, "a", 1), (Change.JOINED, "a", 2)]
    told(NodeLeft("b", 1), 0.3)
    assert changes(told(NodeJoined(member("c")), 0.4)) == [(Change.JOINED, "c", 1)]


def test_pools_are_the_living_pool_nodes_with_the_most_room() -> None:
    told = Told()
    told(NodeJoined(member("prefill")), 0.0)
    told(Beat("prefill", 1, usage(100, 0)), 0.0)
    for i in range(20):
        told(NodeJoined(replace(member(f"pool-{i}"), role=NodeRole.POOL)), 0.0)
        told(Beat(f"pool-{i}", 1, usage(i, 3)), 0.0)
    found = [(m.instance_id, free) for m, free in told.state.pools("pool-18")]
    assert found == [(f"pool-{i}", i) for i in (19, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3)]
    assert len(found) == MAX_POOLS
    told(NodeLeft("pool-19", 1), 0.1)
    told(Beat("pool-17", 1, usage(0, 9)), 0.1)
    told(Beat("pool-16", 1), 0.1)  # says nothing of its usage: the last word counts
    assert [m.instance_id for m, _ in told.state.pools("")][:2] == ["pool-18", "pool-16"]
    assert told.state.statuses()[0] == StoreStatus(member=member_out(member("prefill")), usage=usage(100, 0))


KEY = b"k" * 16


def announce(told: Told, name: str = "a", incarnation: int = 1, seq: int = 1, now: float = 0.0) -> list[Action]:
    return told(Announce(Announcement(name, incarnation, seq, (KEY,))), now)


def test_only_the_living_are_heard() -> None:
    told = Told()
    assert isinstance(refusal(announce(told)), UnknownInstance)
    told(NodeJoined(member(incarnation=3)), 0.0)
    assert isinstance(refusal(announce(told, incarnation=2)), UnknownInstance)
    assert isinstance(refusal(announce(told, incarnation=4)), UnknownInstance)
    assert told.state.blocks.map.holders(KEY) == []
    assert refusal(announce(told, incarnation=3)) is None
    assert told.state.blocks.map.holders(KEY) == ["a"]
    # An announcement is no heartbeat.
    assert isinstance(refusal(announce(told, incarnation=3, seq=2, now=LEASE + 0.1)), UnknownInstance)
    assert told.state.blocks.map.holders(KEY) == []


@pytest.mark.parametrize(
    "end", [NodeLeft("a", 1), NodeJoined(member(incarnation=2)), Tick()], ids=["left", "replaced", "died"]
)
def test_blocks_end_with_the_life_that_announced_them(end: NodeLeft | NodeJoined | Tick) -> None:
    told = Told()
    told(NodeJoined(member()), 0.0)
    announce(told)
    actions = told(end, LEASE + 0.1 if end == Tick() else 0.1)
    assert isinstance(actions[0], Publish)
    assert told.state.blocks.map.holders(KEY) == []
    assert told.state.blocks.map.replicas == 0
    # Late words of the dead life change nothing.
    assert isinstance(refusal(announce(told, seq=2, now=LEASE + 0.2)), UnknownInstance)
    assert told.state.blocks.map.replicas == 0


def test_the_masters_own_silence_leaves_blocks_alone() -> None:
    told = Told(stall_s=1.0)
    told(NodeJoined(member()), 0.0)
    announce(told)
    told(Tick(), 0.5)
    told(Tick(), 60.0)
    assert told.state.blocks.map.holders(KEY) == ["a"]


names = st.sampled_from(["a", "b", "c"])
incarnations = st.integers(1, 3)
events = st.one_of(
    st.builds(lambda n, i: NodeJoined(member(n, i)), names, incarnations),
    st.builds(Beat, names, incarnations),
    st.builds(NodeLeft, names, incarnations),
    st.just(Tick()),
)


@given(st.lists(st.tuples(events, st.floats(0, 3)), max_size=60), st.sampled_from([0.5, 1e9]))
def test_the_event_stream_alone_rebuilds_the_members(steps: list[tuple[NodeJoined, float]], stall_s: float) -> None:
    """Seq counts 1, 2, 3, ...; every change is possible where it stands; their sum is the membership."""
    told, now, followed, seq = Told(stall_s), 0.0, {}, 0
    for event, pause in steps:
        now += pause
        for action in told(event, now):
            if not isinstance(action, Publish):
                continue
            seq += 1
            assert action.seq == seq
            name = action.member.instance_id
            if action.change is Change.JOINED:
                assert name not in followed
                followed[name] = action.member
            else:
                assert followed.pop(name) == action.member
        assert told.state.seq == seq
        assert list(followed.values()) == told.state.members
        # Whoever beat within the lease lives: only the silent, the replaced and the leaving end.
        if isinstance(event, Beat) and followed.get(event.instance_id) == member(event.instance_id, event.incarnation):
            assert refusal(told(event, now)) is None

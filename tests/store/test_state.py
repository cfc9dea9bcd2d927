import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.rpc.errors import InvalidRequest, UnknownInstance
from services.store.state import Action, Beat, Change, Join, Leave, MasterState, Member, Publish, Refuse, Role, Tick
from services.store.watchers import Mailbox

LEASE = 2.0


def member(name: str = "a", incarnation: int = 1, address: str = "h:1") -> Member:
    return Member(name, address, incarnation, Role.PREFILL, "node", name)


def state(stall_s: float = 1e9) -> MasterState:
    return MasterState(lease_s=LEASE, stall_s=stall_s)


def changes(actions: list[Action]) -> list[tuple[Change, str, int]]:
    return [(a.change, a.member.instance_id, a.member.incarnation) for a in actions if isinstance(a, Publish)]


def refusal(actions: list[Action]) -> Exception | None:
    return next((a.error for a in actions if isinstance(a, Refuse)), None)


class Told:
    """Feeds one state and keeps what it said."""

    def __init__(self, stall_s: float = 1e9) -> None:
        self.state = state(stall_s)

    def __call__(self, event: Join | Beat | Leave | Tick, now: float) -> list[Action]:
        return list(self.state.step(event, now))


def test_joining_is_published_once() -> None:
    told = Told()
    assert changes(told(Join(member()), 0.0)) == [(Change.JOINED, "a", 1)]
    assert told(Join(member()), 0.5) == []
    assert told.state.members == [member()]


def test_a_beat_holds_the_lease_and_silence_ends_it() -> None:
    told = Told()
    told(Join(member()), 0.0)
    assert told(Beat("a", 1), 1.9) == []
    assert told(Tick(), 3.9) == []
    assert changes(told(Tick(), 3.91)) == [(Change.DIED, "a", 1)]
    assert told.state.members == []
    assert told(Tick(), 9.0) == []


def test_a_beat_after_the_lease_comes_too_late() -> None:
    told = Told()
    told(Join(member()), 0.0)
    actions = told(Beat("a", 1), LEASE + 0.1)
    assert changes(actions) == [(Change.DIED, "a", 1)]
    assert isinstance(refusal(actions), UnknownInstance)
    assert changes(told(Join(member()), LEASE + 0.2)) == [(Change.JOINED, "a", 1)]


def test_a_beat_holds_nobody_elses_lease() -> None:
    told = Told()
    told(Join(member("a")), 0.0)
    told(Join(member("b", address="h:2")), 0.0)
    assert changes(told(Beat("a", 1), 1.5)) == []
    assert changes(told(Beat("a", 1), 2.5)) == [(Change.DIED, "b", 1)]


@pytest.mark.parametrize("beat", [Beat("nobody", 1), Beat("a", 2)])
def test_an_unknown_incarnation_is_told_to_join(beat: Beat) -> None:
    told = Told()
    told(Join(member()), 0.0)
    assert isinstance(refusal(told(beat, 0.1)), UnknownInstance)


def test_a_new_incarnation_takes_the_name_and_keeps_it() -> None:
    told = Told()
    told(Join(member(incarnation=7)), 0.0)
    assert changes(told(Join(member(incarnation=3)), 0.1)) == [(Change.DIED, "a", 7), (Change.JOINED, "a", 3)]
    assert isinstance(refusal(told(Beat("a", 7), 0.2)), UnknownInstance)
    actions = told(Join(member(incarnation=7)), 0.3)
    assert isinstance(refusal(actions), InvalidRequest)
    assert changes(actions) == []
    assert told.state.members == [member(incarnation=3)]


def test_leaving_is_not_dying_and_only_for_the_living() -> None:
    told = Told()
    told(Join(member()), 0.0)
    assert told(Leave("a", 2), 0.1) == []
    assert changes(told(Leave("a", 1), 0.1)) == [(Change.LEFT, "a", 1)]
    assert told(Leave("a", 1), 0.2) == []


def test_the_masters_own_silence_kills_nobody() -> None:
    told = Told(stall_s=1.0)
    told(Join(member()), 0.0)
    told(Tick(), 0.5)
    assert told(Tick(), 60.0) == []  # stopped for 59.5 s: nobody could be heard
    assert told(Tick(), 60.9) == []
    assert changes(told(Tick(), 61.6)) == [(Change.DIED, "a", 1)]


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (member(name=""), "instance_id"),
        (member(address=""), "address"),
        (member(incarnation=0), "incarnation"),
    ],
)
def test_a_member_must_say_who_it_is(broken: Member, field: str) -> None:
    error = refusal(Told()(Join(broken), 0.0))
    assert isinstance(error, InvalidRequest)
    assert field in str(error)


names = st.sampled_from(["a", "b", "c"])
incarnations = st.integers(1, 3)
events = st.one_of(
    st.builds(lambda n, i: Join(member(n, i)), names, incarnations),
    st.builds(Beat, names, incarnations),
    st.builds(Leave, names, incarnations),
    st.just(Tick()),
)


@given(st.lists(st.tuples(events, st.floats(0, 3)), max_size=60), st.sampled_from([0.5, 1e9]))
def test_the_event_stream_alone_rebuilds_the_members(steps: list[tuple[Join, float]], stall_s: float) -> None:
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


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=40))
def test_a_mailbox_delivers_without_gaps_or_says_so(limit: int, puts: list[bool]) -> None:
    box, seq, received = Mailbox(limit), 0, 0
    for is_put in puts:
        if is_put:
            seq += 1
            box.put(Publish(seq, Change.JOINED, member()))
        else:
            for event in box.take():
                received += 1
                assert event.seq == received
        if box.overrun:
            assert box.take() == []
            return
        assert seq - received <= limit
    received += len(box.take())
    assert received == seq

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.store.watchers import Mailbox


@given(st.integers(1, 5), st.integers(1, 50), st.lists(st.integers(0, 20) | st.just(-1), max_size=40))
def test_a_mailbox_delivers_without_gaps_or_says_so(max_events: int, max_bytes: int, steps: list[int]) -> None:
    """-1 takes, any other number puts an event of that size."""
    box: Mailbox[int] = Mailbox(max_events, max_bytes)
    put: list[int] = []
    received = 0
    for size in steps:
        if size >= 0:
            put.append(size)
            box.put(len(put), size)
        else:
            for event in box.take(1000):
                received += 1
                assert event == received
        waiting = put[received:]
        if box.overrun:
            assert len(waiting) > max_events or sum(waiting) > max_bytes
            assert box.take(1000) == []
            box.put(0, 0)
            assert not box
            return
        assert len(waiting) <= max_events and sum(waiting) <= max_bytes
        assert bool(box) == bool(waiting)
    received += len(box.take(1000))
    assert received == len(put)


def test_a_take_is_bounded_but_never_empty_handed() -> None:
    box: Mailbox[str] = Mailbox(10, 1000)
    for name, size in (("a", 60), ("b", 40), ("c", 1), ("d", 500)):
        box.put(name, size)
    assert box.take(100) == ["a", "b"]
    assert box.take(100) == ["c"]
    assert box.take(100) == ["d"]
    assert box.take(100) == []

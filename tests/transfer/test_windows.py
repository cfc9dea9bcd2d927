"""Windows alone: which slices are admitted, and what a fence waits for."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import TransferError
from kvmesh.transfer.windows import MAX_FENCED, Windows
from tests.transfer.conftest import until


class Thread:
    """A holder that notes whether it was told to leave."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def interrupt(self) -> None:
        self.interrupted.set()


SMALL = st.integers(0, 60)
RANGES = st.lists(st.tuples(SMALL, st.integers(1, 12)), max_size=8)


@given(RANGES, RANGES, st.lists(st.tuples(st.integers(0, 80), st.integers(1, 15)), min_size=1, max_size=10))
def test_admits_exactly_what_lies_inside(
    first: list[tuple[int, int]], more: list[tuple[int, int]], slices: list[tuple[int, int]]
) -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(o, n, "home") for o, n in first])
    windows.open("w", 1, [(o, n, "home") for o, n in more])
    invited = {byte for o, n in first + more for byte in range(o, o + n)}
    inside = [set(range(o, o + n)) <= invited for o, n in slices]

    admission = windows.admit("w", 1, [o for o, _ in slices], [n for _, n in slices], Thread())

    if not any(inside):
        assert admission is None
    else:
        assert admission is not None
        assert [home is not None for home in admission.homes] == inside
        assert admission.refused == [i for i, ok in enumerate(inside) if not ok]
        windows.leave(admission, 0)


def test_ranges_of_two_regions_are_never_one() -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(0, 10, "a"), (10, 10, "b")])
    assert windows.admit("w", 1, [5], [10], Thread()) is None
    admission = windows.admit("w", 1, [0, 10], [10, 10], Thread())
    assert admission is not None
    assert admission.homes == ["a", "b"]


def test_hundreds_of_adjacent_blocks_become_one_range() -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(block * 4096, 4096, "home") for block in reversed(range(500))])
    admission = windows.admit("w", 1, [4000], [400 * 4096], Thread())
    assert admission is not None
    assert admission.refused == []


@pytest.mark.parametrize(("peer", "epoch"), [("other", 1), ("w", 2)])
def test_another_peer_or_epoch_is_refused(peer: str, epoch: int) -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(0, 10, "home")])
    assert windows.admit(peer, epoch, [0], [1], Thread()) is None


def test_offsets_near_the_end_of_the_offset_space_do_not_wrap() -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(0, 10, "home")])
    assert windows.admit("w", 1, [2**64 - 4], [8], Thread()) is None
    assert windows.admit("w", 1, [4], [2**64 - 1], Thread()) is None


def test_fence_of_an_unknown_epoch_returns() -> None:
    Windows().fence("nobody", 9, timeout_s=0, grace_s=0)


def test_fence_waits_for_who_is_inside_and_refuses_newcomers() -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(0, 10, "home")])
    holder = Thread()
    admission = windows.admit("w", 1, [0], [10], holder)
    assert admission is not None
    fenced = threading.Event()

    def fence() -> None:
        windows.fence("w", 1, timeout_s=20, grace_s=0)
        fenced.set()

    threads = [threading.Thread(target=fence) for _ in range(2)]  # the second one waits as well
    for thread in threads:
        thread.start()
    assert holder.interrupted.wait(10)
    assert windows.admit("w", 1, [0], [10], Thread()) is None
    assert not fenced.is_set()
    with pytest.raises(TransferError, match="being fenced"):
        windows.open("w", 1, [(0, 10, "home")])
    windows.leave(admission, 10)
    for thread in threads:
        thread.join(10)
    assert fenced.is_set()
    assert windows.epochs("w") == []


def test_fence_that_cannot_get_a_thread_out_says_so_and_stays_closed() -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(0, 10, "home")])
    admission = windows.admit("w", 1, [0], [10], Thread())
    assert admission is not None
    with pytest.raises(TransferError, match="1 threads inside"):
        windows.fence("w", 1, timeout_s=0, grace_s=0)
    assert windows.admit("w", 1, [0], [10], Thread()) is None
    windows.leave(admission, 0)
    windows.fence("w", 1, timeout_s=0, grace_s=0)


def test_fences_race_with_admissions() -> None:
    """Whoever was admitted has left before the fence returned: the canary of the pure machine."""
    windows: Windows[str] = Windows()
    memory = [0]
    stop = threading.Event()
    late: list[int] = []

    def write(epoch: int) -> None:
        while not stop.is_set():
            admission = windows.admit("w", epoch, [0], [1], Thread())
            if admission is None:
                if windows.epochs("w") == []:
                    return
                continue
            memory[0] = epoch
            windows.leave(admission, 1)

    for epoch in range(1, 30):
        windows.open("w", epoch, [(0, 1, "home")])
        writers = [threading.Thread(target=write, args=(epoch,)) for _ in range(2)]
        for writer in writers:
            writer.start()
        until(lambda epoch=epoch: windows.landed_bytes("w", epoch) > 3, "writers write")  # type: ignore[misc]
        windows.fence("w", epoch, timeout_s=10, grace_s=1)
        memory[0] = -epoch
        for writer in writers:
            writer.join(10)
        late += [memory[0]] if memory[0] != -epoch else []
    stop.set()
    assert late == []


def test_notifications_are_taken_once_and_only_while_open() -> None:
    windows: Windows[str] = Windows()
    assert windows.take_notification("w", 1, 7) is None
    windows.open("w", 1, [(0, 1, "home")])
    assert windows.take_notification("w", 1, 7) is True
    assert windows.take_notification("w", 1, 7) is False
    windows.shut("w", 1)
    assert windows.take_notification("w", 1, 8) is None


def test_overlapping_finds_the_window_over_some_memory() -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 3, [(100, 50, "home")])
    assert windows.overlapping(0, 100) is None
    assert windows.overlapping(150, 10) is None
    assert windows.overlapping(149, 1) == ("w", 3)
    assert windows.overlapping(0, 1000) == ("w", 3)


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (-1, 5), (5, -1)])
def test_bad_ranges_are_refused(offset: int, length: int) -> None:
    with pytest.raises(TransferError, match="range="):
        Windows().open("w", 1, [(offset, length, "home")])


def test_an_epoch_that_was_fenced_is_not_opened_again() -> None:
    """A slice that was late would land in the new window. Remembered within a bound."""
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(0, 10, "home")])
    windows.fence("w", 1, timeout_s=1, grace_s=0)
    with pytest.raises(TransferError, match="handoff_epoch=1: that window of 'w' has been fenced") as caught:
        windows.open("w", 1, [(0, 10, "home")])
    assert caught.value.field == "handoff_epoch"
    windows.open("w", 2, [(0, 10, "home")])
    windows.open("other", 1, [(0, 10, "home")])
    for epoch in range(10, 10 + MAX_FENCED):
        windows.open("w", epoch, [])
        windows.fence("w", epoch, timeout_s=1, grace_s=0)
    assert len(windows._fenced) == MAX_FENCED

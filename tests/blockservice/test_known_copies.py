"""Which blocks a node asks the master about, and what it makes of the answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.blockservice import replica_tracker
from kvmesh.blockservice.replica_tracker import AGAIN_S, MOST, KnownCopies


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


@given(st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=30), st.floats(0, 20), st.booleans()), max_size=30))
def test_each_is_asked_about_once_in_a_while(turns: list[tuple[list[int], float, bool]]) -> None:
    """Against a table of when each was asked about."""
    known, now, last = KnownCopies("me"), 0.0, dict[bytes, float]()
    for numbers, pause, answered in turns:
        now += pause
        coldest = list(dict.fromkeys(key(i) for i in numbers))
        expected = [one for one in coldest if one not in last or last[one] + AGAIN_S <= now]
        chosen = known.choose(coldest, now)
        assert chosen == expected
        last.update(dict.fromkeys(chosen, now))
        if not answered:
            known.unanswered(chosen)
            for one in chosen:
                del last[one]


def test_a_question_is_bounded_and_so_is_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_tracker, "REMEMBERED", 1000)
    known = KnownCopies("me")
    assert known.choose(map(key, range(10 * MOST)), 0.0) == [key(i) for i in range(MOST)]
    for turn in range(20):
        known.choose((key(1000 * turn + i) for i in range(MOST)), 0.0)
    assert len(known._asked) <= 1000 + MOST


def test_a_copy_is_somebody_elses() -> None:
    keys = [key(i) for i in range(4)]
    holders = [["me"], ["me", "b"], ["b", "c"], []]
    assert KnownCopies("me").sort(keys, holders) == (keys[1:3], [keys[0], keys[3]])
    with pytest.raises(ValueError, match="shorter"):
        KnownCopies("me").sort(keys, holders[:3])

"""Classes, token buckets and turns, as pure decisions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvmesh.transfer.send_queue import BURST, QUANTUM, RANKS, SendTurns, Shares, rank_of

MIB = 1 << 20


@dataclass(eq=False)
class Walker:
    rank: int
    name: str = ""
    deficit: int = 0
    amid: bool = False


def test_unknown_classes_are_the_nearest_known() -> None:
    assert [rank_of(c) for c in (-3, 0, 1, 2, 5)] == [0, 0, 1, 2, 2]


def test_the_more_urgent_goes_first_until_the_other_has_earned_its_share() -> None:
    shares = Shares((1.0, 0.25, 0.1))
    rings = [[1], [1], []]
    sent = [0, 0, 0]
    for _ in range(1000):
        rank = shares.pick(rings)
        sent[rank] += MIB
        shares.spend(rank, MIB, [1, 1, 0])
    assert sent[1] / sent[0] == pytest.approx(0.25, rel=0.02)
    assert sent[2] == 0


def test_every_class_gets_its_share_when_all_wait() -> None:
    shares = Shares((1.0, 0.10, 0.05))
    sent = [0, 0, 0]
    for _ in range(5000):
        rank = shares.pick([[1], [1], [1]])
        sent[rank] += MIB
        shares.spend(rank, MIB, [1, 1, 1])
    assert sent[1] / sent[0] == pytest.approx(0.10, rel=0.1)
    assert sent[2] / (sent[0] + sent[1]) == pytest.approx(0.05, rel=0.1)


def test_an_absent_class_saves_nothing_up_and_a_lone_one_spends_nothing() -> None:
    shares = Shares((1.0, 0.5, 0.5))
    for _ in range(100):
        shares.spend(0, MIB, [1, 0, 0])
    assert shares.tokens == [0.0] * RANKS
    for _ in range(1000):
        shares.spend(0, MIB, [1, 1, 0])
    assert shares.tokens[1] == BURST
    shares.spend(1, MIB, [0, 1, 0])
    assert shares.tokens[1] == BURST
    assert shares.pick([[], [], [1]]) == 2
    assert shares.pick([[], [], []]) == -1


def test_turns_are_equal_in_bytes_not_in_frames() -> None:
    turns: SendTurns[Walker] = SendTurns()
    sizes = {"small": 4096, "middle": 1 * MIB, "large": 16 * MIB}
    for name in sizes:
        turns.put(Walker(0, name))
    sent = dict.fromkeys(sizes, 0)
    while sum(sent.values()) < 3000 * MIB:
        walker = turns.take(0)
        sent[walker.name] += sizes[walker.name]
        walker.deficit -= sizes[walker.name]
        walker.amid = True
        turns.put(walker)
    assert max(sent.values()) - min(sent.values()) <= 16 * MIB + 2 * QUANTUM


def test_who_has_not_begun_waits_behind_the_others() -> None:
    turns: SendTurns[Walker] = SendTurns()
    for name in "abc":
        turns.put(Walker(0, name, deficit=QUANTUM))
    assert [turns.take(0).name for _ in range(3)] == ["a", "b", "c"]


def test_turns_keep_classes_apart_and_count() -> None:
    turns: SendTurns[Walker] = SendTurns()
    walkers = [Walker(rank, str(i)) for i, rank in enumerate((2, 0, 2, 1))]
    for walker in walkers:
        turns.put(walker)
    assert [len(ring) for ring in turns.rings] == [1, 1, 2]
    assert turns.count == 4
    assert [turns.take(2).name for _ in range(2)] == ["0", "2"]
    assert turns.count == 2

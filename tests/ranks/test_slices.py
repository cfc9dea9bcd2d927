"""Copies in slices: a step never waits for more than one, and every block arrives."""

from __future__ import annotations

import pytest
import torch

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.device import BlockMemory, CopyPieces, CpuMemory, GroupBlocks, OnDone, byte_view
from kvmesh.ranks.worker.slices import Moves, Seals

SHARD = 4 * 6


class Rows(CpuMemory):
    """Blocks of six numbers, outside any region."""

    def __init__(self, blocks_a_slice: int) -> None:
        self.groups = (GroupBlocks(ShardLayout(1, 1, 1, 6, 4, planes=1), torch.float32, 10),)
        self.page_blocks = BlockMemory(self.groups, byte_view(torch.arange(60.0)))
        self.extent_blocks = BlockMemory(self.groups, byte_view(torch.zeros(60)))
        self.seal_bytes = self.move_bytes = blocks_a_slice * SHARD


class Later(Rows):
    """Says of a copy that it is done when it is asked."""

    def __init__(self, blocks_a_slice: int) -> None:
        super().__init__(blocks_a_slice)
        self.begun: list[tuple[CopyPieces, OnDone]] = []

    def copy(self, pieces: CopyPieces, done: OnDone, **_: bool) -> None:
        self.begun.append((pieces, done))

    def poll(self) -> None:
        begun, self.begun = self.begun, []
        for pieces, done in begun:
            super().copy(pieces, done, into_pages=False, check=True)


def made(blocks_a_slice: int, kind: type[Rows] = Rows) -> tuple[Seals, torch.Tensor, torch.Tensor, list[m.ToFront]]:
    memory = kind(blocks_a_slice)
    said: list[m.ToFront] = []
    return Seals(memory, said.append), memory.pages.view(10, 6), memory.extents.view(10, 6), said


def test_one_slice_at_a_time_is_under_way_on_a_device() -> None:
    memory = Later(3)
    said: list[m.ToFront] = []
    work = Seals(memory, said.append)
    work.add(m.SealCopy(1, (0, 1, 2, 3), (9, 8, 7, 6)))
    work.add(m.SealCopy(2, (4,), (1,)))
    assert work.ready
    for under_way in (3, 2):
        work.advance()
        work.advance()
        assert sum(len(pieces.runs) for pieces, _ in memory.begun) == under_way and not work.ready
        memory.poll()
    assert [message.ticket for message in said if isinstance(message, m.SealCopied)] == [1, 2]
    assert not work.ready and torch.equal(memory.extents[[9, 8, 7, 6, 1]], memory.pages[:5])


def test_a_slice_a_turn() -> None:
    work, pages, extents, said = made(3)
    work.add(m.SealCopy(1, (0, 1, 2, 3), (9, 8, 7, 6)))
    work.add(m.SealCopy(2, (4, 5), (1, 0)))
    work.advance()
    assert work.ready and said == []
    assert torch.equal(extents[[9, 8, 7]], pages[[0, 1, 2]])
    assert not extents[6].any(), "more than a slice was copied"
    work.advance()
    assert [message.ticket for message in said if isinstance(message, m.SealCopied)] == [1, 2]
    assert not work.ready
    assert torch.equal(extents[[6, 1, 0]], pages[[3, 4, 5]])
    work.advance()
    assert len(said) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_blocks_that_are_not_finite_are_named_across_slices(value: float) -> None:
    work, pages, _, said = made(2)
    pages[1, 3] = pages[4, 0] = value
    work.add(m.SealCopy(5, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4)))
    while work.ready:
        work.advance()
    (copied,) = said
    assert isinstance(copied, m.SealCopied)
    assert (copied.ticket, copied.bad) == (5, (1, 4))
    assert 0 < copied.start_ns <= copied.end_ns


@pytest.mark.parametrize("kind", [Rows, Later])
def test_what_somebody_waits_for_goes_in_its_order_a_slice_a_gap(kind: type[Rows]) -> None:
    memory, said = kind(2), list[m.ToFront]()
    memory.extents.add_(100)
    before = memory.pages.clone()
    moves = Moves(memory, said.append)
    moves.add(m.LoadCopy(7, (0, 1, 2), (5, 6, 7)))
    moves.add(m.CopyOut(1, (0,), (9,)))
    moves.add(m.LoadCopy(8, (), ()))
    moves.add(m.CopyIn(2, (3, 4), (8, 9)))
    gaps = []
    while moves.ready:
        done = len(said)
        moves.advance()
        memory.poll()
        gaps.append([(type(x).__name__, x.ticket if isinstance(x, m.LoadCopied) else x.handle) for x in said[done:]])  # type: ignore[union-attr]
        assert [moves.loaded(n) for n in range(3)] == [True, len(gaps) > 1, len(gaps) > 2]
    assert gaps == [[], [("LoadCopied", 7), ("Copied", 1)], [("LoadCopied", 8), ("Copied", 2)]]
    assert torch.equal(memory.extents[9], before[0])
    assert (memory.pages[5:] == 100).all() and torch.equal(memory.pages[:5], before[:5])


def test_a_device_has_its_next_slice_when_one_is_done() -> None:
    memory = Later(2)
    moves = Moves(memory, lambda _: None)
    moves.add(m.CopyIn(1, tuple(range(6)), tuple(range(6))))
    for _ in range(3):
        moves.advance()
    assert [len(pieces.runs) for pieces, _ in memory.begun] == [2, 2] and not moves.ready
    memory.poll()
    assert moves.ready

"""Sealing in slices: a step never waits for more than one, and every block arrives."""

from __future__ import annotations

import pytest
import torch

from kvmesh.node import messages as m
from kvmesh.node import seals
from kvmesh.node.seals import Seals

SHARD = 4 * 6


def made(
    monkeypatch: pytest.MonkeyPatch, blocks_a_slice: int
) -> tuple[Seals, torch.Tensor, torch.Tensor, list[m.ToFront]]:
    monkeypatch.setattr(seals, "SLICE_BYTES", blocks_a_slice * SHARD)
    pages, extents = torch.arange(60.0).view(10, 6), torch.zeros(10, 6)
    said: list[m.ToFront] = []
    return Seals(pages, extents, SHARD, said.append), pages, extents, said


def test_a_slice_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    work, pages, extents, said = made(monkeypatch, 3)
    work.add(m.SealCopy(1, (0, 1, 2, 3), (9, 8, 7, 6)))
    work.add(m.SealCopy(2, (4, 5), (1, 0)))
    work.advance()
    assert bool(work) and said == []
    assert torch.equal(extents[[9, 8, 7]], pages[[0, 1, 2]])
    assert not extents[6].any(), "more than a slice was copied"
    work.advance()
    assert [message.ticket for message in said if isinstance(message, m.SealCopied)] == [1, 2]
    assert not work
    assert torch.equal(extents[[6, 1, 0]], pages[[3, 4, 5]])
    work.advance()
    assert len(said) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_blocks_that_are_not_finite_are_named_across_slices(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    work, pages, _, said = made(monkeypatch, 2)
    pages[1, 3] = pages[4, 0] = value
    work.add(m.SealCopy(5, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4)))
    while work:
        work.advance()
    (copied,) = said
    assert isinstance(copied, m.SealCopied)
    assert (copied.ticket, copied.bad) == (5, (1, 4))
    assert 0 < copied.start_ns <= copied.end_ns

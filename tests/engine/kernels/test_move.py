"""The kernel that copies pieces: every byte to its place, none beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvmesh.kvcache.layout import Run
from kvmesh.ranks.worker.device import CopyPieces
from kvmesh.ranks.worker.device_cuda import copy_pieces


@pytest.mark.parametrize("piece", [16, 208, 9008])
@pytest.mark.parametrize("programs", [1, 3])
def test_pieces_of_several_lengths_go_where_the_runs_say(piece: int, programs: int, device: torch.device) -> None:
    from kvmesh.engine.kernels.move import as_table, move

    source = torch.randint(0, 255, (9 * piece,), dtype=torch.uint8, device=device)
    target = torch.full((8 * piece,), 255, dtype=torch.uint8, device=device)
    runs: list[Run] = [(7 * piece, 0, piece), (0, 3 * piece, piece - 16), (2 * piece, 5 * piece, 2 * piece)]
    runs = [run for run in runs if run[2]]
    wanted = target.clone()
    for begin, end, length in runs:
        wanted[end : end + length] = source[begin : begin + length]
    table = as_table(source, target, runs)
    assert table is not None
    move(source, target, table, programs)
    assert torch.equal(target, wanted)
    move(source, target, table[:0], programs)  # none


@pytest.mark.parametrize("run", [(8, 0, 16), (0, 4, 16), (0, 0, 20)])
def test_what_lies_off_a_boundary_is_not_for_the_kernel(run: Run) -> None:
    pytest.importorskip("triton")
    from kvmesh.engine.kernels.move import as_table

    source, target = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    assert as_table(source, target, [(0, 0, 16), run]) is None
    assert as_table(source[4:], target, [(0, 0, 16)]) is None


class Mover:
    """The kernel; keeps by how many programs."""

    def __init__(self) -> None:
        from kvmesh.engine.kernels import move

        self._move, self.as_table = move.move, move.as_table
        self.programs: list[int] = []

    def move(self, source: torch.Tensor, target: torch.Tensor, table: Any, programs: int) -> None:
        self.programs.append(programs)
        self._move(source, target, table, programs)


@pytest.mark.parametrize(
    ("piece", "count", "step_tokens", "programs"),
    [(16, 40, 0, [64]), (16, 40, 9, [4]), (16, 40, 5000, [4]), (20, 40, 0, []), (16, 3, 0, []), (1 << 20, 2, 0, [])],
)
def test_a_rank_copies_by_the_kernel_what_the_rule_and_the_places_allow(
    piece: int, count: int, step_tokens: int, programs: list[int], device: torch.device
) -> None:
    source = torch.randint(0, 255, (2 * count, piece), dtype=torch.uint8, device=device)
    target = torch.full((count, piece), 255, dtype=torch.uint8, device=device)
    pieces = CopyPieces(source.view(-1), target.view(-1), [(2 * i * piece, i * piece, piece) for i in range(count)])
    mover = Mover()
    copy_pieces(pieces, mover, False, step_tokens)
    assert torch.equal(target, source[::2])
    assert mover.programs == programs
    target.zero_()
    copy_pieces(pieces, None, False, step_tokens)  # without triton
    assert torch.equal(target, source[::2])


def test_a_gpu_reads_and_writes_pinned_host_memory(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("pinned memory: on a GPU only")
    from kvmesh.engine.kernels.move import as_table, move

    apart = torch.randint(0, 255, (64 * 65536,), dtype=torch.uint8, device=device)
    runs = [(page * 65536, at * 65536, 65536) for at, page in enumerate(torch.randperm(64)[:17].tolist())]
    host = torch.zeros(17 * 65536, dtype=torch.uint8, pin_memory=True)
    out = as_table(apart, host, runs)
    back = as_table(host, apart, [(at, page, length) for page, at, length in runs])
    assert out is not None and back is not None
    move(apart, host, out, 16)
    torch.cuda.synchronize()
    found = torch.zeros_like(apart)
    for page, at, length in runs:
        assert torch.equal(host[at : at + length], apart[page : page + length].cpu())
        found[page : page + length] = apart[page : page + length]
    again = torch.zeros_like(apart)
    move(host, again, back, 16)
    assert torch.equal(again, found)

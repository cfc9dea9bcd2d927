from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("piece", [4, 52, 9000])
@pytest.mark.parametrize("programs", [1, 3])
def test_pieces_go_where_the_index_says_and_back(piece: int, programs: int, device: torch.device) -> None:
    from kvmesh.engine.kernels.move import gather, scatter

    apart = torch.randint(0, 255, (9, piece), dtype=torch.uint8, device=device)
    index = torch.tensor([7, 0, 3, 8], device=device)
    together = torch.zeros(4, piece, dtype=torch.uint8, device=device)
    gather(apart, index, together, programs)
    assert torch.equal(together, apart[index])
    wanted = apart.clone()
    wanted[index] = together.flip(0)
    scatter(together.flip(0).contiguous(), index, apart, programs)
    assert torch.equal(apart, wanted)
    gather(apart, index[:0], together[:0])  # none


def test_a_gpu_writes_pinned_host_memory(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("pinned memory: on a GPU only")
    from kvmesh.engine.kernels.move import gather, scatter

    apart = torch.randint(0, 255, (64, 65536), dtype=torch.uint8, device=device)
    index = torch.randperm(64, device=device)[:17]
    host = torch.zeros(17, 65536, dtype=torch.uint8, pin_memory=True)
    gather(apart, index, host)
    torch.cuda.synchronize()
    assert torch.equal(host, apart[index].cpu())
    back = torch.zeros_like(apart)
    scatter(host, index, back)
    assert torch.equal(back[index], apart[index])

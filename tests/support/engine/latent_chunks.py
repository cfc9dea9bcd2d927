"""Chunks of prompts over K and V that are written out, against float64, with programs of one size: `python -m
tests.support.engine.latent_chunks QUERIES KEYS WARPS STAGES`. A process of its own: an address that is not there ends
all that a process does on a GPU. Prints what is wrong and exits with 1."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from kvmesh.engine.attention import triton_latent
from kvmesh.engine.kernels.latent_prefill import ExpandedVariant
from tests.support.engine.latent_oracle import (
    LATENT_TOLERANCE,
    LatentBench,
    LatentChunk,
    LatentShape,
    dense_latent_attention,
)

SHAPES = {  # rows that are copied into shared memory beside the products, and some that are not
    "small": LatentShape(3, 24, 16, 16, 48, 16, torch.float16),
    "odd": LatentShape(3, 12, 8, 10, 20, 16, torch.float16),
    "DeepSeek's": LatentShape(4, 128, 64, 128, 512, 64, torch.bfloat16),
}
CASES = ((48, (16, 35)), (8192, (16, 35)), (64, (200,)))  # tokens of the workspace, of chunks; blocks of 64: four times


class Watched(LatentBench):
    """Collects what is wrong, by chunk."""

    def __init__(self, shape: LatentShape, device: torch.device) -> None:
        super().__init__(shape, 60, backend=triton_latent.TritonLatent, device=device)
        self.wrong: list[str] = []

    def compare(self, chunks: Sequence[LatentChunk], q: torch.Tensor, answer: torch.Tensor, layer: int) -> None:
        at = 0
        for number, (request, length, _) in enumerate(chunks):
            rows = request.rows[layer, : request.done + length]
            expected = dense_latent_attention(q[at : at + length], rows, self.up.weight, request.done, self.shape)
            error = (answer[at : at + length].double() - expected).abs().amax((1, 2))
            bad = (~(error <= LATENT_TOLERANCE[self.shape.dtype])).nonzero()[:, 0].tolist()
            if bad:
                worst = float(error.max())
                self.wrong.append(
                    f"layer {layer}, chunk {number} of {length}: {len(bad)} rows from {bad[0]}, {worst:.3f}"
                )
            at += length


def main(sizes: Sequence[int]) -> int:
    device = torch.device("cuda")
    triton_latent.absorbed_costs_less = lambda *_: False
    failed = 0
    for name, shape in SHAPES.items():
        for piece, lengths in CASES:
            times = shape.block_tokens // 16
            triton_latent.PIECE_TOKENS = min(8192, piece * times)
            bench = Watched(shape, device)
            bench.backend.expanded = ExpandedVariant(*sizes)
            requests = [bench.request(length * times) for length in lengths]
            with torch.inference_mode():
                bench.step([LatentChunk(one, one.rows.shape[1]) for one in requests])
            if bench.wrong:
                failed += 1
                print(f"{name}, pieces of {triton_latent.PIECE_TOKENS}: {'; '.join(bench.wrong[:3])}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))

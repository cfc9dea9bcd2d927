"""Compiles every kernel for one GPU, as `python -m tests.support.engine.compiled 90`; no GPU is needed. Prints a line
for each: name, dtype, head_dim, shared memory in bytes."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmesh.engine.kernels import decode, prefill, write
from kvmesh.engine.kernels.tiles import tiles_for

SHAPES = (("bf16", 2, 128, 64), ("fp32", 4, 96, 32))
POINTERS = {
    "table": "*i32",
    "work": "*i32",
    "joins": "*i32",
    "sinks": "*fp32",
    "lengths": "*i32",
    "slots": "*i32",
    "partial": "*fp32",
    "weights": "*fp32",
}


def compiled(kernel: Any, dtype: str, capability: int, warps: int, **constants: Any) -> int:
    """Its shared memory. Tensors are taken to be aligned, as torch's are."""
    types, aligned = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name in ("qkv", "pages", "out") or name in POINTERS:
            types[name] = POINTERS.get(name, f"*{dtype}")
            aligned[(at,)] = [["tt.divisibility", 16]]
        else:
            types[name] = {"scale": "fp32", "softcap": "fp32", "page_stride": "i64"}.get(name, "i32")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 2}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def main(capability: int) -> None:
    for dtype, itemsize, dim, block in SHAPES:
        tiles = tiles_for(dim, itemsize, block)
        size = {"DIM": dim, "PADDED": tiles.padded_dim}
        paged = size | {"TILE": tiles.keys, "GROUP": 4, "BLOCK_TOKENS": block, "CAPPED": dim == 256, "SINKS": True}
        for name, kernel, warps, constants in (
            ("write", write._write, 1, size),
            ("decode", decode._attend, 4, paged | {"PADDED_GROUP": 16}),
            ("join", decode._join, 4, size | {"AT_ONCE": decode.JOINED_AT_ONCE, "SINKS": True}),
            ("prefill", prefill._attend, tiles.warps, paged | {"QUERIES": tiles.queries}),
        ):
            print(name, dtype, dim, compiled(kernel, dtype, capability, warps, **constants), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

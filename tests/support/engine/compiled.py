"""Compiles every kernel in the shapes that are served for one GPU, as `python -m tests.support.engine.compiled 90`, or
those of latent attention, which are not among the others, as `... 90 latents`; no GPU is needed. Prints a line for
each: name, dtype, head_dim (or row length), shared memory in bytes, registers of a thread, bytes of a thread that spill
to memory."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmesh.engine.kernels import (
    decode,
    delta,
    experts,
    fused,
    latent_decode,
    latent_prefill,
    latent_write,
    mask,
    move,
    prefill,
    sample,
    write,
)
from kvmesh.engine.kernels.tiles import power_of_two, tiles_for

# dtype, head_dim, query heads of a KV head, tokens of a block, softcap: Qwen2.5-0.5B, Phi-3-mini, Llama and Qwen3,
# Gemma 2, and what tests compute in.
SHAPES = (
    ("bf16", 64, 7, 64, False),
    ("bf16", 96, 1, 64, False),
    ("bf16", 128, 4, 64, False),
    ("fp16", 128, 8, 16, False),
    ("bf16", 256, 2, 64, True),
    ("fp32", 96, 4, 32, False),
)
# What is served most, the widest heads and what spills most. What lies between takes less.
EXTREMES = (SHAPES[2], SHAPES[4], SHAPES[5])
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
INT32 = ("of_token", "table", "owners", "requests", "work", "joins", "lengths", "slots", "source", "target", "bits")
FLOAT32 = ("sinks", "partial", "weights", "answers", "log_decay", "rate", "states", "lse")
FLOAT64 = ("temperature", "min_p", "sums", "noise", "least", "goals", "befores", "found", "cuts")
INT64 = ("rows", "tokens", "ranges", "runs", "order", "owners", "tile_ends", "row_ends", "counts", "masks")
OF_DTYPE = (
    "qkv",
    "pages",
    "out",
    "x",
    "residual",
    "inner",
    "weight",
    "cos",
    "sin",
    "logits",
    "best",
    "gate_up",
    "down",
    "bias",
    "known",
    "absorbed",
    "rotated",
    "lines",
    "expanded",
)
POINTERS = (
    dict.fromkeys(INT32, "*i32")
    | dict.fromkeys(FLOAT32, "*fp32")
    | dict.fromkeys(FLOAT64, "*fp64")
    | dict.fromkeys(INT64, "*i64")
)
SCALARS = {"alpha": "fp32", "limit": "fp32", "scale": "fp32", "softcap": "fp32", "eps": "fp32"}
STRIDES = (
    "qkv_token",
    "qkv_head",
    "page_stride",
    "kv_stride",
    "head_stride",
    "token_stride",
    "out_row",
    "row_stride",
    "x_row",
    "x_token",
    "x_head",
    "known_slot",
    "states_slot",
    "residual_row",
    "absorbed_token",
    "absorbed_head",
    "rotated_token",
    "rotated_head",
    "expanded_row",
)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(kernel: Any, dtype: str, capability: int, warps: int, stages: int, **constants: Any) -> tuple[int, ...]:
    """Returns shared memory, registers and bytes on the stack. Tensors are taken to be aligned, as torch's are."""
    types, aligned = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        if name == "limits":
            types[name] = "*i64" if constants["COUNTS"] else "*fp64"
            continue
        types[name] = POINTERS.get(name) or (f"*{dtype}" if name in OF_DTYPE else SCALARS.get(name, "i32"))
        if types[name].startswith("*") or name in STRIDES:
            aligned[(at,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        dump = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        said = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(made.metadata.shared), int(found[1]), int(found[2])


def main(capability: int, part: str = "", extent: str = "") -> None:
    """Prints a line for each kernel; with `extent` "all" of every shape, else of the extremes."""
    whole = extent == "all"

    def show(name: str, dtype: str, size: int, kernel: Any, warps: int, stages: int = 2, **constants: Any) -> None:
        print(name, dtype, size, *compiled(kernel, dtype, capability, warps, stages, **constants), flush=True)

    if part == "latents":
        latents(show, capability, whole)
        return
    for dtype, dim, group, block, capped in SHAPES if whole else EXTREMES:
        tiles = tiles_for(dim, ITEMSIZE[dtype], block)
        size = {"DIM": dim, "PADDED": tiles.padded_dim}
        paged = size | {"TILE": tiles.keys, "GROUP": group, "BLOCK_TOKENS": block, "CAPPED": capped, "SINKS": True}
        paged["CHUNKED"] = False
        show("write", dtype, dim, write._write, 1, **size)
        of_rows = {}  # one row, and rows with a draft
        for queries in (1, decode.queries_for(decode.MOST_QUERIES, group)):
            padded = power_of_two(group * queries)
            attend = {"warps": decode.warps_for(padded), "stages": decode.STAGES}
            of_rows[queries] = attend | {"PADDED_GROUP": padded, "QUERIES": queries}
            name = "decode" if queries == 1 else "decode/drafts"
            show(name, dtype, dim, decode._attend, **of_rows[queries], **paged)
        if (dtype, dim) == ("bf16", 128):  # Llama 4's
            chunked = paged | {"SINKS": False, "CHUNKED": True}
            cut = prefill.usual(dim, ITEMSIZE[dtype], block)
            of_cut = {"TILE": cut.keys, "QUERIES": cut.queries, "FOLDED": cut.folded}
            for queries, constants in of_rows.items():
                name = "decode/chunked" if queries == 1 else "decode/chunked/drafts"
                show(name, dtype, dim, decode._attend, **constants, **chunked)
            show("prefill/chunked", dtype, dim, prefill._attend, cut.warps, cut.stages, **chunked | of_cut)
        join = size | {"AT_ONCE": decode.JOINED_AT_ONCE}
        show("join", dtype, dim, decode._join, 4, **join, SINKS=True, PARTS=False, SEVERAL=False)
        show("join/drafts", dtype, dim, decode._join, 4, **join, SINKS=True, PARTS=False, SEVERAL=True)
        if (dtype, dim) == ("bf16", 128):  # of a part of a context
            show("join_parts", dtype, dim, decode._join, 4, **join, SINKS=False, PARTS=True, SEVERAL=False)
        own = (dtype, dim, block, capability) == ("bf16", 128, 64, 90)  # candidates are measured on Hopper
        for at, cut in enumerate((prefill.usual(dim, ITEMSIZE[dtype], block), *(prefill.CANDIDATES if own else ()))):
            sizes = {"TILE": cut.keys, "QUERIES": cut.queries, "FOLDED": cut.folded}
            name = f"prefill/{at}" if at else "prefill"
            show(name, dtype, dim, prefill._attend, cut.warps, cut.stages, **paged | sizes)
        half = {"DIM": dim, "HALF": dim // 2, "PADDED_HALF": power_of_two(dim // 2), "REST": 0, "PADDED_REST": 16}
        part = {"DIM": dim, "HALF": dim // 4, "PADDED_HALF": power_of_two(dim // 4)}
        part |= {"REST": dim // 2, "PADDED_REST": power_of_two(dim // 2)}
        rotates = {"AT_ONCE": fused.HEADS_AT_ONCE, "ROUND_FIRST": True}
        show("rotate", dtype, dim, fused._rotate_and_write, 4, **half, **rotates, NORMED=True)
        show("rotate/part", dtype, dim, fused._rotate_and_write, 4, **part, **rotates, NORMED=True)
        show("rotate/plain", dtype, dim, fused._rotate_and_write, 4, **half, **rotates, NORMED=False)
    for length in (896, 4096, 8192) if whole else (8192,):
        padded = power_of_two(length)
        warps = 4 if length <= fused.WIDE else 8
        show("rms_norm", "bf16", length, fused._rms_norm, warps, SIZE=length, PADDED=padded, ROUND_FIRST=True)
        row = {"SIZE": length, "PADDED": padded, "ROUND_FIRST": True}
        show("add_norm", "bf16", length, fused._add_rms_norm, warps, **row, INNER=False)
        show("add_norm/inner", "bf16", length, fused._add_rms_norm, warps, **row, INNER=True)
        show("gated", "bf16", length, fused._gated, 4, SIZE=length, BLOCK=fused.GATED_BLOCK, GELU=False)
    moes = ((2048, 768, experts.SILU, False), (2880, 2880, experts.CLAMPED, True))
    for hidden, inner, gate, biased in moes if whole else moes[1:]:
        for few in (experts.FEW, experts.MANY):  # Qwen3-30B-A3B, gpt-oss; and inputs that are scaled, as in Llama 4
            moe = {"EXPERTS": 128, "HIDDEN": hidden, "INNER": inner, "ROWS": few, "BIASED": biased}
            moe |= {"COLUMNS": experts.COLUMNS, "DEPTH": experts.DEPTH}
            show("experts/up", "bf16", few, experts._gate_up, 4, 3, **moe, GATE=gate, SCALED=False)
            show("experts/down", "bf16", few, experts._down, 4, 3, **moe, SCALED=False)
            show("experts/scaled", "bf16", few, experts._gate_up, 4, 3, **moe, GATE=gate, SCALED=True)
    for dtype in ("bf16", "fp32"):  # Qwen3-Next
        sizes = {"HEADS": 16, "WIDTH": 512, "TAPS": 4, "BLOCK": delta.CHANNELS}
        show("convolve", dtype, 512, delta._convolve, 4, **sizes)
        show("keep", dtype, 512, delta._keep, 4, **sizes)
        sizes = {"VALUE_HEADS": 32, "REPEATS": 2, "WIDTH": 512, "KEYS": 128, "VALUES": 128, "PADDED": 128}
        sizes |= {"SCALE": 128**-0.5}
        show("delta_step", dtype, 128, delta._step, 4, **sizes, BLOCK=delta.STEP_VALUES)
        if dtype == "bf16":
            chunk = {"BLOCK": delta.CHUNK_VALUES, "CHUNK": delta.CHUNK, "PRECISION": "tf32"}
            show("delta", dtype, 128, delta._chunks, 4, **sizes, **chunk)
    show("move", "i32", move.BLOCK, move._move, 4, SIZE=move.BLOCK)
    show("mask", "fp32", mask.BLOCK, mask._mask, 4, SIZE=mask.BLOCK)
    show("sum", "fp32", sample.BLOCK, sample._sum, 4, SIZE=sample.BLOCK)
    show("pick", "fp32", sample.BLOCK, sample._pick, 4, SIZE=sample.BLOCK, CHUNKS=128)
    cuts = (("fp32", True), ("fp32", False), ("fp64", False))
    for dtype, counts in cuts if whole else cuts[1:2]:
        for first in (True, False) if whole else (False,):
            kind = {"COUNTS": counts, "FIRST": first}
            show("spread", dtype, sample.SPREAD, sample._spread, 8, **kind, SIZE=sample.SPREAD)
            if dtype == "fp32":  # it reads no logits
                show("narrow", "fp64", 32, sample._narrow, 4, **kind, CHUNKS=32)
        show("finish", dtype, sample.GATHER, sample._finish, 16, COUNTS=counts, SIZE=sample.GATHER)


def latents(show: Any, capability: int, whole: bool) -> None:
    """DeepSeek-V3's latent attention, whole and of one rank of 8, where all is asked for in float16 and of one rank of
    4, too; and, of float32, the shape of a small demo."""
    of = capability // 10, capability % 10
    shapes = [("bf16", 128, 512, 64), ("bf16", 16, 512, 64), ("fp32", 8, 64, 16)]
    if whole:
        shapes += [("bf16", 32, 512, 64), ("fp16", 128, 512, 64)]
    for dtype, heads, latent, rope in shapes:
        shape = {"HEADS": heads, "LATENT": latent, "PADDED": latent, "ROPE": rope, "PADDED_ROPE": power_of_two(rope)}
        shape["OWNED"] = False
        variant = latent_decode.variant_for(heads, latent, ITEMSIZE[dtype], of)
        own = (dtype, heads, capability) == ("bf16", 128, 90)  # candidates are measured on Hopper
        for at, cut in enumerate((variant, *(latent_decode.CANDIDATES if own else ()))):
            sizes = shape | {"HEAD_TILE": cut.heads, "TILE": cut.keys, "BLOCK_TOKENS": 64, "QUERIES": 1}
            name = f"latent/{heads}" + (f"/{at}" if at else "")
            show(name, dtype, latent, latent_decode._attend, cut.warps, cut.stages, **sizes)
        most = decode.MOST_QUERIES
        cut = latent_decode.variant_for(heads * most, latent, ITEMSIZE[dtype], of)
        sizes = shape | {"HEAD_TILE": cut.heads, "TILE": cut.keys, "BLOCK_TOKENS": 64, "QUERIES": most}
        show(f"latent/{heads}/drafts", dtype, latent, latent_decode._attend, cut.warps, cut.stages, **sizes)
        nope = value = 128 if dtype != "fp32" else 32
        sizes = {"NOPE": nope, "PADDED_NOPE": nope, "ROPE": rope, "PADDED_ROPE": power_of_two(rope), "LATENT": latent}
        sizes |= {"VALUE": value, "PADDED_VALUE": value}
        if heads in (128, 8):
            chosen = latent_prefill.expanded_variant(ITEMSIZE[dtype], of)
            for at, piece in enumerate((chosen, *(latent_prefill.CANDIDATES if own else ()))):
                tiles = {"QUERIES": piece.queries, "TILE": piece.keys}
                name = "latent_prefill" + (f"/{at}" if at else "")
                show(name, dtype, nope, latent_prefill._attend, piece.warps, piece.stages, **sizes, **tiles)
            joined = {"DIM": latent, "PADDED": latent, "AT_ONCE": latent_decode.JOINED_AT_ONCE, "SINKS": False}
            joined |= {"PARTS": False, "SEVERAL": False}
            show("latent_join", dtype, latent, decode._join, 4, **joined)
            half = {"NOPE": nope, "HALF": rope // 2, "PADDED_HALF": power_of_two(rope // 2), "INTERLEAVED": True}
            half |= {"LATENT": latent, "PADDED": latent, "AT_ONCE": latent_write.HEADS_AT_ONCE, "ROUND_FIRST": True}
            for turned in (True, False):
                name = "latent_write" if turned else "latent_write/plain"
                show(name, dtype, latent, latent_write._rotate_and_write, 4, **half, TURNED=turned, NORMED=turned)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

"""Meshes on equal cores, side by side: one coupled instance with two threads, and a prefill and a decode instance with
one each. As many device pages and host extents in all. What `benchmarks.coupled` and `benchmarks.soak` compare.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvmesh.sim.workloads import trace
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.harness import Running, running_mesh

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "examples" / "traces" / "conversation-400.jsonl"
VOCAB = 512
BLOCK = 16
COUPLED, PAIR = "coupled", "1P+1D"


def make_model(folder: Path, *, layers: int, hidden: int, context: int) -> Path:
    """A random Llama of these sizes in float32, heads of 32."""
    return make_checkpoint(
        folder, family="llama", vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 32, num_key_value_heads=max(1, hidden // 128),
        head_dim=32, max_position_embeddings=context,
    )  # fmt: skip


@asynccontextmanager
async def equal_meshes(
    model: Path, home: Path, pages: int, coupled: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
) -> AsyncIterator[dict[str, Running]]:
    """`pages`: device pages, and host extents, of each half of the pair; a coupled instance has twice as many.
    `coupled`: name → flags of one mesh each; one called COUPLED as it comes by default. Nothing is refused for an SLO.
    """
    patient = {"slo_ttft_ms": 600_000, "slo_tbt_ms": 600_000}
    half, whole = ({"num_pages": n * pages, "num_extents": n * pages} for n in (1, 2))
    common = {"block_tokens": BLOCK, **patient, **settings}
    async with AsyncExitStack() as stack:
        meshes = {}
        for number, (name, flags) in enumerate((coupled or {COUPLED: {}}).items()):
            alone = running_mesh(
                model, home / f"coupled-{number}", prefill=0, decode=0, coupled=1, threads=2,
                flags={"coupled": {**whole, **flags}}, **common,
            )  # fmt: skip
            meshes[name] = await stack.enter_async_context(alone)
        pair = running_mesh(model, home / "pair", threads=1, flags={"prefill": half, "decode": half}, **common)
        meshes[PAIR] = await stack.enter_async_context(pair)
        yield meshes


def slice_of(path: Path, requests: int, scale: str, context: int, max_output: int) -> list[trace.Made]:
    """The first requests of a trace, as prompts and answers that the model's context holds."""
    shape = trace.TraceShape(scale=Fraction(scale), context_tokens=context, max_output=max_output)
    return trace.fit(trace.between(trace.read(path), count=requests), shape).made


def block_of(scale: str) -> int:
    """Tokens that a full block of the trace has then."""
    return trace.TraceShape(scale=Fraction(scale)).block

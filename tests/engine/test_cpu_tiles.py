"""Products and attention on AMX tiles, against float64. Without AMX, tiles in plain code stand in for the hardware's,
under the same kernels and blocks; with it, both are tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvmesh.engine.cpu import native
from kvmesh.engine.matrix import PackedMatrix

REASON = native.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no C++ operators: {REASON}")
BF16 = torch.bfloat16
STEP = 2.0**-8  # of a bfloat16 result's size, for each rounding
MODES = pytest.mark.parametrize("mode", [1, 2], ids=["amx", "plain"])


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture
def tiles() -> Iterator[Callable[[int], bool]]:
    """Sets how products and attention are made (`use_tiles` in ops.h); as it was, afterwards."""
    use = torch.ops.kvmesh.use_tiles.default
    yield use
    use(1)


def begin(tiles: Callable[[int], bool], mode: int) -> None:
    if not tiles(mode):
        pytest.skip("needs a CPU with AMX tiles for bf16; the plain code in their place is tested")


@pytest.mark.parametrize("rows", [5, 15, 16, 17, 31, 32, 33, 49, 65, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (301, 96), (95, 1024), (1, 32)])
@MODES
def test_products_by_tiles(mode: int, rows: int, outputs: int, inputs: int, tiles: Callable[[int], bool]) -> None:
    """The blocks around the tiles are the same for AMX and for the plain code that stands in for it here."""
    begin(tiles, mode)
    weight, wide = random(outputs, inputs, seed=1), random(rows, inputs + 32, seed=2)
    x, bias, residual = wide[:, :inputs], random(outputs, seed=3), random(rows, outputs, seed=4)
    packed = PackedMatrix.of([weight])
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert ((packed.logits(x) - exact).abs() <= size * 2.0**-18).all()
    few = packed.logits(x[:5])
    assert torch.equal(packed.logits(x)[:5], few), "sums do not depend on a block's height"
    by_tiles = packed.multiply(x, bias), packed.add_to(residual, x)
    tiles(0)
    without = packed.multiply(x, bias), packed.add_to(residual, x)
    near = 2 * STEP * (exact.abs() + bias.double().abs() + residual.double().abs()) + 1e-5 * inputs
    for one, other in zip(by_tiles, without, strict=True):
        assert ((one.double() - other.double()).abs() <= near).all()


def test_a_rows_product_depends_on_no_other_row_and_no_thread(tiles: Callable[[int], bool]) -> None:
    """Without tiles, which sum in another order than few rows do."""
    tiles(0)
    weight, x = random(700, 514, seed=1), random(65, 514, seed=2)
    packed = PackedMatrix.of([weight])
    together = packed.logits(x)
    assert torch.equal(together, torch.cat([packed.logits(row[None]) for row in x]))
    torch.set_num_threads(1)
    assert torch.equal(together, packed.logits(x))


# ── attention ─────────────────────────────────────────────────────────────────────────────────────

SCALE = 0.3


class Context:
    """One sequence's q, k and v `qkv [length, H + 2K, D]`, its K and V written to pages in no order."""

    def __init__(self, length: int, heads: int, kv_heads: int, dim: int, block: int = 16) -> None:
        self.length, self.heads, self.kv_heads = length, heads, kv_heads
        count = -(-length // block)
        self.pages = torch.full((count, 2, 2, kv_heads, block, dim), torch.nan, dtype=BF16)
        self.table = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.int32)[None]
        self.qkv = random(length, heads + 2 * kv_heads, dim, seed=length)
        # Later keys fit better, so that the largest score so far grows from tile to tile.
        self.qkv[:, heads : heads + kv_heads] *= torch.linspace(0.2, 1.5, length)[:, None, None].to(BF16)
        sequences = torch.tensor([[0, length, 0, 0]], dtype=torch.int32)
        torch.ops.kvmesh.write_kv(self.pages, 1, self.qkv, sequences, self.table)

    def attend(
        self,
        *runs: tuple[int, int],
        window: int = 0,
        softcap: float = 0.0,
        chunk: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Answers [tokens, H * D] of tokens [begin, end) of each run, each a sequence of its own in one step."""
        rows = torch.cat([self.qkv[begin:end] for begin, end in runs])
        lengths = [end - begin for begin, end in runs]
        firsts = [sum(lengths[:i]) for i in range(len(runs))]
        sequences = torch.tensor(
            [[first, n, begin, 0] for first, n, (begin, _) in zip(firsts, lengths, runs, strict=True)],
            dtype=torch.int32,
        )
        table = self.table.repeat(len(runs), 1)
        answer: torch.Tensor = torch.ops.kvmesh.paged_attention(
            self.pages, 1, rows, sequences, table, SCALE, window, chunk, softcap, sinks
        )
        return answer

    def exact(
        self, window: int = 0, softcap: float = 0.0, chunk: int = 0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same of all tokens, in float64."""
        planes = self.qkv.double().transpose(0, 1)
        k, v = planes[self.heads :].repeat_interleave(self.heads // self.kv_heads, 0).chunk(2)
        scores = planes[: self.heads] @ k.transpose(1, 2) * SCALE
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        seen = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        seen = seen.triu(1 - window) if window else seen
        if chunk:
            at = torch.arange(self.length)
            seen &= at // chunk == at[:, None] // chunk
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, self.length, 1)), -1)
        return (scores.softmax(-1)[..., : self.length] @ v).transpose(0, 1).reshape(self.length, -1)


def near(answer: torch.Tensor, exact: torch.Tensor) -> bool:
    """Weights and answers are rounded to bfloat16, values are of size 1."""
    return torch.allclose(answer.double(), exact, rtol=STEP, atol=0.02)


@MODES
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (0, 4.0), (1, 0.0), (50, 0.0), (200, 4.0)])
@pytest.mark.parametrize("length", [2, 17, 127, 128, 129, 290])
def test_prompts_by_tiles(mode: int, length: int, window: int, softcap: float, tiles: Callable[[int], bool]) -> None:
    """Around a stretch of 128 tokens and around windows that begin inside of one."""
    begin(tiles, mode)
    context = Context(length, 6, 2, 96)
    whole = context.attend((0, length), window=window, softcap=softcap)
    assert near(whole, context.exact(window, softcap))
    tiles(0)
    without = context.attend((0, length), window=window, softcap=softcap)
    assert near(without, whole.double())
    assert length < 100 or window == 1 or not torch.equal(without, whole), "tiles were not used"


@MODES
@pytest.mark.parametrize("chunk", [0, 45, 128])
@pytest.mark.parametrize("sunk", [False, True])
def test_chunks_and_sinks_by_tiles(mode: int, chunk: int, sunk: bool, tiles: Callable[[int], bool]) -> None:
    """Blocks of queries within one chunk and over several; sinks that outweigh all tokens and that are outweighed.
    Answers are the same in any pieces, and near those of decode rows, whose context is cut in parts of 256."""
    begin(tiles, mode)
    context, sinks = Context(301, 6, 2, 64), torch.tensor([-20.0, 0.0, 3.0, 40.0, -3.0, 9.0]) if sunk else None
    exact, whole = context.exact(chunk=chunk, sinks=sinks), context.attend((0, 301), chunk=chunk, sinks=sinks)
    assert near(whole, exact)
    cuts = [(0, 2), (2, 50), (50, 133), (133, 301)]
    assert torch.equal(torch.cat([context.attend(cut, chunk=chunk, sinks=sinks) for cut in cuts]), whole)
    places = [0, 44, 45, 89, 90, 127, 128, 255, 256, 299]
    rows = context.attend(*((at, at + 1) for at in places), chunk=chunk, sinks=sinks)
    assert near(rows, exact[places])
    tiles(0)
    assert near(context.attend((0, 301), chunk=chunk, sinks=sinks), exact)


@MODES
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 1), (8, 2)])
@pytest.mark.parametrize(("dim", "block"), [(64, 64), (128, 16), (256, 16), (80, 16), (10, 16), (64, 12), (128, 1)])
def test_heads_of_every_size_by_tiles(
    mode: int, dim: int, block: int, heads: int, kv_heads: int, tiles: Callable[[int], bool]
) -> None:
    """Keys that are read in their pages and, where a head or a page fits no tile, copies of them."""
    begin(tiles, mode)
    context = Context(147, heads, kv_heads, dim, block)
    assert near(context.attend((0, 147)), context.exact())


@MODES
@pytest.mark.parametrize("window", [0, 70])
def test_a_prompts_answer_by_tiles_depends_on_no_chunk_company_or_thread(
    mode: int, window: int, tiles: Callable[[int], bool]
) -> None:
    """To the last bit, where a chunk is two tokens or more; a token alone is a decode row, which has no tiles."""
    begin(tiles, mode)
    context = Context(301, 6, 2, 64)
    whole = context.attend((0, 301), window=window)
    cuts = [(0, 2), (2, 50), (50, 133), (133, 301)]
    assert torch.equal(torch.cat([context.attend(cut, window=window) for cut in cuts]), whole)
    together = context.attend((300, 301), *reversed(cuts), (7, 8), window=window)
    lengths = [1, *(end - start for start, end in reversed(cuts)), 1]
    alone, *parts, other = torch.split_with_sizes(together, lengths)
    assert torch.equal(torch.cat(parts[::-1]), whole)
    tiles(0)
    assert torch.equal(torch.cat((alone, other)), context.attend((300, 301), (7, 8), window=window))
    tiles(mode)
    torch.set_num_threads(1)
    assert torch.equal(context.attend((0, 301), window=window), whole)

"""The C++ operators against float64, and against torch's path, over shapes that fit no block; one thread and two. What
runs on AMX tiles: test_cpu_tiles.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvmesh.engine import ops
from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.config_rope import RopeConfig
from kvmesh.engine.cpu import native
from kvmesh.engine.matrix import DenseMatrix, PackedMatrix
from kvmesh.engine.rope import RotaryEmbedding, Rotation
from kvmesh.engine.runner import Runner, pages_over, shard_layout
from tests.support.checkpoints import make_checkpoint

REASON = native.why_not()
needs_native = pytest.mark.skipif(bool(REASON), reason=f"no C++ operators: {REASON}")
BF16, F32 = torch.bfloat16, torch.float32
STEP = {BF16: 2.0**-8, F32: 2.0**-22}  # of a result's size, for each rounding


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_native
@pytest.mark.parametrize("rows", [0, 1, 3, 14, 17, 65, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (33, 7), (301, 130), (95, 1030), (1, 1)])
def test_packed_products_equal_float64(rows: int, outputs: int, inputs: int) -> None:
    weight, x = random(outputs, inputs, seed=1), random(rows, inputs, seed=2)
    bias, residual = random(outputs, seed=3), random(rows, outputs, seed=4)
    packed = PackedMatrix.of([weight[: outputs // 3], weight[outputs // 3 :]])
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T + 1e-30
    assert ((packed.logits(x) - exact).abs() <= size * 2.0**-20).all()  # float32 sums
    biased = exact + bias.double()
    assert torch.allclose(packed.multiply(x, bias).double(), biased, rtol=STEP[BF16], atol=1e-5 * inputs)
    near = STEP[BF16] * (exact.abs() + residual.double().abs()) + 1e-5 * inputs
    assert ((packed.add_to(residual, x).double() - exact - residual.double()).abs() <= 2 * near).all()
    ids = torch.arange(outputs).flip(0)
    assert torch.equal(packed.rows(ids), weight[ids])


@needs_native
def test_views_parts_and_columns_of_a_matrix() -> None:
    """Rows with gaps between them on every side, and a part of the outputs over the same memory."""
    weight, x = random(200, 96, seed=1), random(9, 96, seed=2)
    packed = PackedMatrix.of([weight])
    wide = torch.zeros(9, 300, dtype=BF16)
    wide[:, 100:196] = x
    assert torch.equal(packed.multiply(wide[:, 100:196]), packed.multiply(x))
    assert torch.equal(PackedMatrix.of([weight[:, 8:72]]).multiply(x[:, 8:72]), DenseMatrix(weight[:, 8:72].float())
                       .multiply(x[:, 8:72].float()).to(BF16))  # fmt: skip
    part = packed.part(range(64, 130))
    assert part is not None
    assert torch.equal(part.logits(x), packed.logits(x)[:, 64:130])
    assert packed.part(range(10, 20)) is None


@needs_native
def test_wrong_shapes_and_ids_are_refused() -> None:
    packed = PackedMatrix.of([random(40, 16)])
    for call in (
        lambda: packed.multiply(random(2, 18)),
        lambda: packed.multiply(random(2, 16, dtype=F32)),
        lambda: packed.multiply(random(2, 16), random(39)),
        lambda: packed.add_to(random(3, 40), random(2, 16)),
        lambda: PackedMatrix.of([random(4, 8), random(4, 9)]),
    ):
        with pytest.raises(RuntimeError):
            call()
    for bad in (-1, 40):
        with pytest.raises(IndexError):
            packed.rows(torch.tensor([0, bad]))


# ── between the products ──────────────────────────────────────────────────────────────────────────


def both_ways(monkeypatch: pytest.MonkeyPatch, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What the C++ and what torch's path answer."""
    answers = [call()]
    with monkeypatch.context() as patched:
        patched.setattr(native, "loaded", lambda: False)
        answers.append(call())
    return answers


@needs_native
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("n", [16, 23, 1024])
def test_rms_norm(dtype: torch.dtype, wide: bool, rows: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(rows, n, dtype=dtype) * 3, random(n, seed=1, dtype=F32 if wide else dtype)
    exact = functional.rms_norm(x.double(), (n,), weight.double(), 1e-6)
    for answer in both_ways(monkeypatch, lambda: ops.rms_norm(x, weight, 1e-6)):
        assert answer.dtype == dtype
        assert torch.allclose(answer.double(), exact, rtol=2 * STEP[dtype], atol=1e-7)


@needs_native
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("size", "rotary"), [(128, 1.0), (24, 1.0), (10, 1.0), (96, 0.75), (80, 0.5)])
@pytest.mark.parametrize("normed", ["not", "same", "wide"])
def test_rotate_heads(
    dtype: torch.dtype, size: int, rotary: float, normed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, heads, others = 33, 5, 2
    qkv = random(tokens, heads + others, size, dtype=dtype)
    weight = None if normed == "not" else random(heads, size, seed=1, dtype=F32 if normed == "wide" else dtype)
    rope = RopeConfig(partial=rotary)
    cos, sin = RotaryEmbedding(rope, size, dtype, torch.device("cpu"))(torch.arange(7, 7 + tokens))

    def call() -> torch.Tensor:
        answer = qkv.clone()
        ops.rotate_heads(answer, Rotation(heads, cos, sin, weight, 1e-6))
        return answer

    exact = qkv[:, :heads].double()
    if weight is not None:
        exact = functional.rms_norm(exact, (size,), None, 1e-6) * weight.double()
    turned = cos.shape[-1]
    first = exact[..., :turned]
    rotated = first * cos.double() + first.roll(turned // 2, -1) * sin.double()
    exact = torch.cat((rotated, exact[..., turned:]), -1)
    for answer in both_ways(monkeypatch, call):
        assert torch.equal(answer[:, heads:], qkv[:, heads:])
        assert torch.allclose(
            answer[:, :heads].double(), exact, rtol=0, atol=4 * STEP[dtype] * float(exact.abs().max())
        )


@needs_native
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "n"), [(1, 3072), (17, 41)])
def test_gated(dtype: torch.dtype, activation: str, rows: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(rows, 2 * n, dtype=dtype) * 4
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = x.double().chunk(2, -1)
    exact = (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
    for answer in both_ways(monkeypatch, lambda: ops.gated(x, activation)):
        assert torch.allclose(answer.double(), exact, rtol=4 * STEP[dtype], atol=2e-6)


# ── a whole model ─────────────────────────────────────────────────────────────────────────────────


@needs_native
@pytest.mark.parametrize("tied", [True, False])
def test_bf16_logits_near_the_reference(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed and dense models differ from float32's logits by the roundings of bf16 alone, and by as much."""
    path = make_checkpoint(tmp_path / "m", seed=5, family="qwen3", tie_word_embeddings=tied, vocab_size=301)

    def logits(dtype: str) -> torch.Tensor:
        checkpoint = open_checkpoint(path)
        layout = shard_layout(checkpoint.config, dtype, 16)
        pages = pages_over(bytearray(layout.shard_bytes * 8), layout, 8, dtype)
        runner = Runner(checkpoint, dtype, "cpu", 16, pages)
        with torch.inference_mode():
            step = runner.attention.plan_prefill([TokenSpan(0, 40, (3, 1, 2))])

            def attend(layer: int, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
                step.rotate_and_write(layer, qkv, rotation)
                return step.attend(layer, qkv)

            hidden = runner.model.hidden(torch.arange(40) * 7 % 301, step.positions, attend)
            return runner.model.logits(hidden)

    exact = logits("float32")
    packed, dense = both_ways(monkeypatch, lambda: logits("bfloat16"))
    scale = float(exact.std())
    far = float((dense - exact).abs().mean())
    assert 0 < float((packed - exact).abs().mean()) < 1.5 * far
    assert float((packed - exact).abs().max()) < 0.5 * scale


# ── attention: what decode rows fetch ahead, and prompts over tiles ───────────────────────────────


@needs_native
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("length", [119, 120, 121, 240, 257, 300])
def test_prompts_in_chunks_and_rows_of_every_length_equal_float64(length: int, softcap: float) -> None:
    """Around a tile of 120 tokens and a part of 256, in bfloat16; chunks, and rows alone, to the last bit."""
    scale, pages = 0.3, torch.zeros(20, 1, 2, 2, 16, 96, dtype=BF16)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(length)).to(torch.int32)[None]
    qkv = random(length, 10, 96, seed=length)
    torch.ops.kvmesh.write_kv(pages, 0, qkv, torch.tensor([[0, length, 0, 1]], dtype=torch.int32), table)

    def attend(of: torch.Tensor, *runs: tuple[int, int, int], scale: float = scale) -> torch.Tensor:
        """`runs`: first row, length, position of the first."""
        sequences, tables = torch.tensor([[*run, 0] for run in runs], dtype=torch.int32), table.repeat(len(runs), 1)
        answer: torch.Tensor = torch.ops.kvmesh.paged_attention(
            pages, 0, of, sequences, tables, scale, 0, 0, softcap, None
        )
        return answer

    heads = qkv.double().transpose(0, 1)
    k, v = heads[6:].repeat_interleave(3, 0).chunk(2)
    scores = heads[:6] @ k.transpose(1, 2) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    exact = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
    whole = attend(qkv, (0, length, 0))
    assert torch.allclose(whole.double(), exact, rtol=0, atol=0.03)
    assert torch.equal(torch.cat([attend(qkv[a:b], (0, b - a, a)) for a, b in ((0, 50), (50, length))]), whole)
    places = range(0, length, 7)
    rows = attend(qkv[::7].contiguous(), *((i, 1, at) for i, at in enumerate(places)))
    assert torch.allclose(rows.double(), exact[::7], rtol=0, atol=0.03)
    assert torch.equal(attend(qkv[places[-1] :][:1], (0, 1, places[-1])), rows[-1:])
    with pytest.raises(RuntimeError, match="scale is -1"):
        attend(qkv, (0, length, 0), scale=-1.0)


@needs_native
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("vocab", [1, 16, 31, 33, 50, 64, 1000])
def test_the_best_allowed_logit_is_the_first_of_the_best(vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    logits = random(12, vocab + 3, seed=vocab, dtype=dtype)[:, :vocab]  # rows with gaps between them
    logits[3:6] = logits[3:6].round()  # the best more than once
    logits[6, :] = -torch.inf
    allowed = rng.random((10, vocab)) < rng.random((10, 1))
    allowed[np.arange(10), rng.integers(vocab, size=10)] = True
    allowed[0] = np.arange(vocab) == vocab - 1
    bits = np.zeros((10, -(-vocab // 32) * 32), np.bool_)
    bits[:, :vocab], bits[:, vocab:] = allowed, True  # what lies beyond the vocabulary is no token
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    rows, masks = torch.arange(10) + 1, torch.arange(10).flip(0)
    found = torch.ops.kvmesh.best_allowed.default(logits, rows, words, masks)
    for row, mask, token in zip(rows.tolist(), masks.tolist(), found.tolist(), strict=True):
        x = logits[row].float().numpy()
        places = np.flatnonzero(allowed[mask])
        assert token == places[x[places].argmax()], (row, mask)

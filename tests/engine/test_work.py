"""What a step moves and multiplies, against numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.engine.config import ExpertsConfig, ModelConfig
from kvmesh.engine.config_delta import DeltaConfig
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.work import FunctionWork, StepShape, attended, chunk_products, of_stage, seen, summed, work_of

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
)
# One row whose token stands at position 9, one chunk of tokens 4..6: four tokens, of which two give a sampled one.
SHAPE = StepShape((9,), ((4, 3),), 2)
BF16 = 2


def test_each_function_by_hand() -> None:
    assert SHAPE.tokens == 4
    # Matrices of a layer: queries, keys and values 8 x (2 + 2) * 4, output 8 x 8, together 192; MLP 3 * 8 * 12 = 288.
    assert work_of(CONFIG, BF16, SHAPE) == {
        "norm": FunctionWork(weights=3 * 2 * 8 * 2, activations=3 * 2 * 2 * 4 * 8 * 2),
        "projections": FunctionWork(weights=1152, activations=960, products=4608),
        "rotary": FunctionWork(activations=576),
        "write": FunctionWork(kv_written=192, activations=192),
        # The row sees 10 tokens, the chunk's 5, 6 and 7: 28 pairs. KV of 10 + 7 tokens is read, 16 bytes a layer.
        "attention": FunctionWork(kv_read=816, activations=384, products=2688),
        "mlp": FunctionWork(weights=1728, activations=2112, products=6912),
        "embedding": FunctionWork(weights=64, activations=64),
        "head": FunctionWork(weights=176, activations=176, products=320),
        "sampling": FunctionWork(activations=80),
    }


def test_experts_by_hand() -> None:
    """Two layers of three have four experts of 6 columns, two for each token, and one of 5 columns for all."""
    own = replace(CONFIG, experts=ExpertsConfig((1, 2), count=4, chosen=2, inner=6, shared_inner=5))
    # One token: the weights that are read are those that it is multiplied by. A layer's: 3 * 8 * (2 * 6 + 5) and the
    # router's 8 * 4, together 440; the dense layer's 288.
    assert work_of(own, BF16, StepShape((9,), (), 1))["mlp"] == FunctionWork(
        weights=(2 * 440 + 288) * 2, activations=(3 * 2 * 8 + 6 * (2 * 17 + 12)) * 2, products=2 * (2 * 440 + 288)
    )
    # Four tokens are expected to choose 3.75 experts, which is all: 3 * 8 * (4 * 6 + 5) + 8 * 4 = 728 a layer.
    found = work_of(own, BF16, SHAPE)["mlp"]
    assert (found.weights, found.products) == ((2 * 728 + 288) * 2, 4 * 2 * (2 * 440 + 288))


def test_latent_attention_by_hand() -> None:
    """Rows of 6 + 2, queries of 3 + 2 out of rank 5, values of 4: a decode row is absorbed, a chunk is not."""
    latent = LatentConfig(query_rank=5, latent=6, nope=3, rope=2, value=4, scale=1.0, bias=False, interleaved=True)
    own = replace(CONFIG, latent=latent, kv_heads=1, head_dim=8)
    found = work_of(own, BF16, SHAPE)
    # A layer's: down 8 x (5 + 8), queries 5 x 2 * 5, up 6 x 2 * (3 + 4), output 2 * 4 x 8.
    assert found["projections"].weights == 3 * (104 + 50 + 84 + 64) * 2
    assert found["projections"].activations == 3 * 4 * (2 * 8 + 2 * 5 + 8 + 8) * 2
    assert found["write"].kv_written == 3 * 4 * 8 * 2
    assert found["rotary"].activations == 3 * 2 * 4 * 3 * 2 * 2
    assert found["attention"] == FunctionWork(
        kv_read=3 * 17 * 8 * 2,
        activations=3 * 2 * 4 * 8 * 2,
        products=2 * 3 * (10 * 2 * (8 + 6) + 18 * 2 * (3 + 2 + 4)),
    )


def test_linear_layers_by_hand() -> None:
    """Layers 0 and 2 of three are gated DeltaNets: one key head of 3, two value heads of 5, a convolution 4 wide."""
    own = replace(CONFIG, delta=DeltaConfig((0, 2), key_heads=1, value_heads=2, key_dim=3, value_dim=5, kernel=4))
    found = work_of(own, BF16, SHAPE)
    # Channels 3 + 3 + 10; with gates of the answer and decay and rate of each head 16 + 10 + 4 = 30 columns, and the
    # output's 10 x 8. The layer that attends has a gate beside each query: 192 + 8 x 8.
    linear, attends = 8 * 30 + 10 * 8, 8 * (8 + 8 + 8) + 8 * 8
    assert found["projections"] == FunctionWork(
        weights=(2 * linear + attends) * 2,
        activations=4 * (3 * 2 * 8 + 2 * (30 + 10) + (24 + 8)) * 2,
        products=2 * 4 * (2 * linear + attends),
    )
    # Two requests, the row's and the chunk's: 2 x 3 x 5 numbers in float32 and three inputs of 16 channels, each layer.
    states = 2 * 2 * (30 * 4 + 3 * 16 * 2)
    assert found["write"] == FunctionWork(kv_written=4 * 8 * 2 + states, activations=4 * 8 * 2)
    # One layer attends: 28 pairs, KV of 17 tokens. Linear ones: three multiply-adds a number and the filters, a token.
    assert found["attention"] == FunctionWork(
        weights=2 * 16 * 4 * 4,
        kv_read=17 * 8 * 2 + states,
        activations=4 * (2 * 8 + 2 * (16 + 10)) * 2,
        products=2 * (16 * 28 + 4 * 2 * (3 * 30 + 16 * 4)),
    )
    assert found["rotary"] == FunctionWork(activations=2 * 4 * 12 * 2)
    assert found["mlp"] == work_of(CONFIG, BF16, SHAPE)["mlp"]


def test_nothing_sampled_needs_no_head() -> None:
    found = work_of(CONFIG, BF16, StepShape((), ((0, 5),), 0))
    assert found.keys() == work_of(CONFIG, BF16, SHAPE).keys() - {"head", "sampling"}


def test_ranks_sum_twice_a_layer_and_share_the_head() -> None:
    own = replace(CONFIG, heads=1, intermediate_size=6)
    found = work_of(own, 4, StepShape((0,), (), 1), ranks=2, words=5)
    assert found["collectives"] == FunctionWork(activations=3 * 2 * 2 * 8 * 4)
    assert found["head"].products == 2 * 5 * 8
    assert found["sampling"].activations == 10 * 4  # every rank samples from all of them


@pytest.mark.parametrize(("position", "window", "expected"), [(0, 0, 1), (9, 0, 10), (9, 4, 4), (2, 4, 3), (3, 4, 4)])
def test_a_token_sees_itself_and_no_more_than_its_window(position: int, window: int, expected: int) -> None:
    assert seen(position, window) == expected


def test_a_chunks_queries_share_what_they_read() -> None:
    assert attended(SHAPE, 0) == (10 + 5 + 6 + 7, 10 + 7)
    assert attended(SHAPE, 4) == (4 + 4 + 4 + 4, 4 + 6)  # the chunk's tokens 4..6 see 1..6
    assert attended(StepShape((), ((0, 3),), 0), 4) == (1 + 2 + 3, 3)


def test_layers_with_a_window_read_less() -> None:
    found = work_of(replace(CONFIG, windows=(0, 4, 4)), BF16, SHAPE)["attention"]
    assert found.kv_read == (17 + 2 * 10) * 16
    assert found.products == 4 * 2 * 4 * (28 + 2 * 16)


def test_post_norms_are_two_more_a_layer() -> None:
    assert work_of(replace(CONFIG, post_norms=True), BF16, SHAPE)["norm"].weights == 3 * 4 * 8 * 2


def test_steps_add_up() -> None:
    one = work_of(CONFIG, BF16, SHAPE)
    other = work_of(CONFIG, BF16, StepShape((), ((0, 5),), 0))
    total = summed([one, other])
    assert total["mlp"].moved == one["mlp"].moved + other["mlp"].moved
    assert total["head"] == one["head"]


def test_what_a_chunk_costs_by_token_and_pair() -> None:
    """3 layers of 192 + 288 weights a token; a pair is a score and a weighted value of 2 heads of 4. What windows of 16
    see is a token's."""
    assert chunk_products(CONFIG) == pytest.approx((2 * 3 * 480, 2 * 3 * 16))
    windowed = replace(CONFIG, windows=(16, 0, 16))
    assert chunk_products(windowed) == pytest.approx((2 * 3 * 480 + 2 * 2 * 16 * 16, 2 * 16))


def test_a_stage_has_a_part_of_the_work() -> None:
    """Two stages together do what all layers do."""
    mixed = replace(CONFIG, windows=(0, 4, 0))
    whole = work_of(mixed, BF16, SHAPE)
    first, last = (work_of(of_stage(mixed, layers), BF16, SHAPE) for layers in (range(2), range(2, 3)))
    for name in ("norm", "projections", "rotary", "write", "attention", "mlp"):
        assert summed(({name: first[name]}, {name: last[name]}))[name] == whole[name]

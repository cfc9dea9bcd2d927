"""DeepSeek's latent attention against transformers' modules, on random weights, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.attention.latent import LatentBackend
from kvmesh.engine.axes import Axes
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.models.latent import LatentAttention
from kvmesh.engine.parallel import SOLO, Group, share_of
from kvmesh.engine.rope import RotaryEmbedding
from kvmesh.engine.weights import Weights
from kvmesh.errors import CheckpointError
from tests.support.engine.given_mesh import GivenMesh

TOKENS, HEADS, HIDDEN, BLOCK = 60, 4, 48, 8
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-3,  # must not be that of the ranks' norms
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "attention_bias": False,
}


class Case(NamedTuple):
    version: int
    changes: dict[str, Any]


CASES = {
    "v2-whole-queries": Case(2, {}),
    "v2-yarn": Case(2, {"q_lora_rank": 14, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "v3": Case(3, {"q_lora_rank": 14}),
    "v3-bias": Case(3, {"q_lora_rank": 14, "attention_bias": True}),
    "v3-yarn": Case(3, {"q_lora_rank": 14, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3-yarn-two-factors": Case(3, {"rope_scaling": {**YARN, "mscale": 1.4, "mscale_all_dim": 0.6}}),
    "v3-yarn-without": Case(3, {"rope_scaling": YARN}),
    "v3-halves": Case(3, {"q_lora_rank": 14, "rope_interleave": False}),
}


class Held(Weights):
    """Weights that lie in memory, with no file behind them."""

    def __init__(self, tensors: dict[str, torch.Tensor], model: ModelConfig, dtype: torch.dtype, group: Group) -> None:
        self.tensors, self.model, self.mesh = tensors, model, GivenMesh(group)
        self.dtype, self.device = dtype, torch.device("cpu")
        self.checkpoint: Any = SimpleNamespace(info=lambda name: tensors[name])

    @property
    def config(self) -> ModelConfig:
        return self.model

    def view(self, name: str, *box: range) -> torch.Tensor:
        return self.tensors[name][tuple(slice(one.start, one.stop) for one in box)]

    def release(self, *names: str) -> None:
        """Nothing is mapped."""


class OneOf(Group):
    """One of several ranks whose sums the test makes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Bench:
    """transformers' module with random weights, what it answers, and the same as blocks of ours over pages."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.raw = SIZES | case.changes
        self.x = torch.randn(TOKENS, HIDDEN).to(dtype)
        hf = {k: v for k, v in self.raw.items() if k not in ("rope_theta", "rope_scaling")}
        params = {"rope_type": "default", **self.raw.get("rope_scaling", {})}
        params["rope_type"] = params.pop("type", params["rope_type"])
        hf["rope_parameters"] = params | {"rope_theta": self.raw["rope_theta"]}
        module: torch.nn.Module
        rotary: torch.nn.Module
        if case.version == 2:
            old = DeepseekV2Config(**hf, attn_implementation="eager")
            module, rotary = v2.DeepseekV2Attention(old, 0), v2.DeepseekV2RotaryEmbedding(old)
        else:
            new = DeepseekV3Config(**hf, attn_implementation="eager")
            module, rotary = v3.DeepseekV3Attention(new, 0), v3.DeepseekV3RotaryEmbedding(new)
        for name, parameter in module.named_parameters():
            torch.nn.init.normal_(parameter, std=1.6 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0)
            assert name.startswith(("q_", "kv_", "o_"))
        self.tensors = {name: value.detach().to(dtype) for name, value in module.named_parameters()}
        self.module, self.rotary = module.to(dtype), rotary

    @torch.inference_mode()
    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        x = self.x.to(dtype)[None]
        angles = self.rotary(x, torch.arange(TOKENS)[None])
        mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=dtype).triu(1)[None, None]
        answer: torch.Tensor = self.module.to(dtype)(hidden_states=x, position_embeddings=angles, attention_mask=mask)[
            0
        ]
        return answer[0]

    @torch.inference_mode()
    def answers(self, group: Group = SOLO) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the answer, and the pages: a chunk, a chunk behind it, then token by token beside a
        chunk of another request."""
        model = ModelConfig.from_hf(self.raw | {"architectures": ["DeepseekV3ForCausalLM"]}, None, TOKENS)
        sizes = model.latent
        assert sizes is not None and model.rotated_dim == sizes.rope
        block = LatentAttention(
            share_of(model, Axes(tp=group.size)), Held(self.tensors, model, self.dtype, group), prefix=""
        )
        pages = torch.full((20, 1, 1, 1, BLOCK, sizes.latent + sizes.rope), torch.nan, dtype=self.dtype)
        backend = LatentBackend(pages, sizes, [block.up])
        angles = RotaryEmbedding(model.rope, sizes.rope, self.dtype, torch.device("cpu"))
        own, beside = tuple(range(9, 1, -1)), tuple(range(10, 19))
        parts = []
        for start, end in ((0, 25), (25, 50), *((at, at + 1) for at in range(50, TOKENS))):
            if start < 50:
                plan, x = backend.plan_mixed([], [], [TokenSpan(start, end - start, own)]), self.x[start:end]
            else:
                plan = backend.plan_mixed([own], [start], [TokenSpan(0, 3, beside)])
                x = torch.cat((self.x[start:end], self.x[:3]))
            given = block.project(x)
            plan.rotate_and_write(0, given, block.rotation(*angles(plan.positions)))
            answer = block.out(plan.attend(0, given))
            parts.append(answer[: end - start])
        return torch.cat(parts), pages[list(own)]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_module_of_transformers(name: str) -> None:
    bench = Bench(CASES[name])
    expected = bench.reference(torch.float32)
    assert expected.std() > 0.1
    assert torch.allclose(bench.answers()[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["v2-yarn", "v3-yarn"])
def test_is_as_close_as_the_module_in_a_narrow_dtype(name: str, dtype: torch.dtype) -> None:
    """Both are measured by the module in float64 over the same rounded weights and inputs."""
    bench = Bench(CASES[name], dtype)
    narrow = bench.reference(dtype).double()
    exact = bench.reference(torch.float64)
    answers = bench.answers()[0].double()
    assert (answers - exact).square().mean() <= 1.5 * (narrow - exact).square().mean()


def test_ranks_share_heads_and_hold_the_same_rows() -> None:
    bench = Bench(CASES["v3-yarn"])
    whole, pages = bench.answers()
    ranks = [bench.answers(OneOf(rank, 2)) for rank in range(2)]
    assert torch.allclose(ranks[0][0] + ranks[1][0], whole, rtol=1e-4, atol=1e-4)
    for _, own in ranks:
        assert torch.equal(own, pages)


def test_what_a_config_leaves_out() -> None:
    """The defaults are those of transformers; null is a whole query matrix."""
    ours, theirs = LatentConfig.from_hf({}), DeepseekV3Config()
    assert (ours.query_rank, ours.latent) == (theirs.q_lora_rank, theirs.kv_lora_rank)
    assert (ours.nope, ours.rope, ours.value) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim)
    assert (ours.bias, ours.interleaved) == (theirs.attention_bias, theirs.rope_interleave)
    assert ours.scale == 192**-0.5
    assert LatentConfig.from_hf({"q_lora_rank": None}).query_rank == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("q_lora_rank", 0), ("kv_lora_rank", "512"), ("qk_rope_head_dim", 7), ("rope_interleave", 1), ("v_head_dim", -1)],
)
def test_a_config_that_cannot_be(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        LatentConfig.from_hf({key: value})
    with pytest.raises(CheckpointError, match="factor"):
        LatentConfig.from_hf({"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}})

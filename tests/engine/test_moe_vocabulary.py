"""Blocks of experts as gpt-oss, Llama 4 and Qwen3-Next have them: each against transformers' own block, at one rank and
cut over several, from tensors by the names that the files on the Hub have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvmesh.engine import ops
from kvmesh.engine.axes import Axes
from kvmesh.engine.checkpoint import Checkpoint, read_header
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_experts import ExpertsConfig, read_gpt_oss, read_llama4, read_qwen3_next
from kvmesh.engine.cpu import native
from kvmesh.engine.models.experts import LoopedExperts, PackedExperts
from kvmesh.engine.models.moe import MoE, Router, mlp_or_experts
from kvmesh.engine.parallel import SOLO, ExpertsCut, Group, cuts_experts_whole, share_of
from kvmesh.engine.tensors import layer_prefix, layer_tensors
from kvmesh.engine.weights import Weights
from kvmesh.errors import CheckpointError, ConfigError
from tests.support.engine.given_mesh import GivenMesh

HIDDEN, INNER, TOKENS = 48, 40, 23
DEMO = Path(__file__).parents[2] / "examples/demo-model/config.json"
BLOCKS = ["gpt_oss", "llama4", "qwen3_next"]


class RankByItself(Group):
    """One of several ranks that has nobody to talk to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def their_block(family: str) -> Any:
    """transformers' block with random weights."""
    make: Any
    if family == "gpt_oss":
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

        make = GptOssMLP
        config: Any = GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=7, num_experts_per_tok=3
        )
    elif family == "llama4":
        from transformers import Llama4TextConfig
        from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

        make = Llama4TextMoe
        config = Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=5)
    else:
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

        make = Qwen3NextSparseMoeBlock
        config = Qwen3NextConfig(
            hidden_size=HIDDEN,
            num_experts=9,
            num_experts_per_tok=4,
            moe_intermediate_size=INNER,
            shared_expert_intermediate_size=24,
        )
    made = make(config)
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn if "bias" in name else drawn * 4 / HIDDEN**0.5)  # large enough to be clamped
    return made.eval()


def on_the_hub(family: str, block: Any) -> dict[str, torch.Tensor]:
    """The block's tensors by their names in files, relative to the layer."""
    prefix = "feed_forward." if family == "llama4" else "mlp."
    tensors = {prefix + name: value.detach().clone() for name, value in block.named_parameters()}
    if family == "qwen3_next":  # transformers joins them as it loads
        both, down = (tensors.pop(f"mlp.experts.{name}_proj") for name in ("gate_up", "down"))
        for index in range(len(both)):
            gate, up = both[index].chunk(2)
            for name, value in (("gate", gate), ("up", up), ("down", down[index])):
                tensors[f"mlp.experts.{index}.{name}_proj.weight"] = value.contiguous()
    return tensors


def config_of(experts: ExpertsConfig) -> ModelConfig:
    return replace(ModelConfig.from_hf(json.loads(DEMO.read_text())), hidden_size=HIDDEN, experts=experts)


READERS = {
    "gpt_oss": (
        read_gpt_oss,
        {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": INNER},
    ),
    "llama4": (read_llama4, {"num_local_experts": 5, "intermediate_size": INNER}),
    "qwen3_next": (
        read_qwen3_next,
        {
            "num_experts": 9,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": INNER,
            "shared_expert_intermediate_size": 24,
        },
    ),
}


def checkpoint_of(family: str, block: Any, folder: Path) -> Checkpoint:
    read, raw = READERS[family]
    config = config_of(read(raw, 1))
    expected = layer_tensors(config, 0)
    named = on_the_hub(family, block)
    assert {name: tuple(tensor.shape) for name, tensor in named.items()}.items() <= expected.items()
    left = {name for name in expected.keys() - named.keys() if "self_attn" not in name and "norm" not in name}
    assert not left, "tensors that transformers does not have"
    file = folder / "model.safetensors"
    save_file({layer_prefix(0) + name: tensor for name, tensor in named.items()}, file)
    return Checkpoint(folder, config, read_header(file))


def ours(
    checkpoint: Checkpoint, group: Group = SOLO, dtype: torch.dtype = torch.float32, cut: ExpertsCut = "auto"
) -> MoE:
    weights = Weights(checkpoint, dtype, torch.device("cpu"), GivenMesh(group), cut)
    made = mlp_or_experts(share_of(checkpoint.config, Axes(tp=group.size)), weights, 0)
    assert isinstance(made, MoE)
    return made


def drawn_inputs(seed: int = 5) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def theirs_of(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        answer = block(x[None])
    answer = answer[0] if isinstance(answer, tuple) else answer
    return torch.as_tensor(answer).view(len(x), HIDDEN)


@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_answers_as_transformers_block_does(family: str, tmp_path: Path) -> None:
    block = their_block(family)
    x = drawn_inputs()
    expected = theirs_of(block, x)
    torch.testing.assert_close(ours(checkpoint_of(family, block, tmp_path))(x), expected, rtol=2e-5, atol=2e-5)
    assert expected.abs().max() > 1


@pytest.mark.parametrize("family", BLOCKS)
def test_in_bfloat16_a_block_is_as_close_as_transformers_block_is(family: str, tmp_path: Path) -> None:
    block = their_block(family)
    made = ours(checkpoint_of(family, block, tmp_path), dtype=torch.bfloat16)
    x = drawn_inputs().to(torch.bfloat16)
    exact = theirs_of(block, x.float())
    rounded = theirs_of(block.to(torch.bfloat16), x)
    # A token whose router is undecided in bfloat16 may have another expert there: the median does not hang on it.
    far, theirs = ((found.float() - exact).abs().median() for found in (made(x), rounded))
    assert 0 < far <= 1.5 * theirs


CUTS: list[ExpertsCut] = ["columns", "whole"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", BLOCKS)
def test_the_parts_of_all_ranks_add_up(family: str, cut: ExpertsCut, size: int, tmp_path: Path) -> None:
    """Each has its columns of every expert, or some experts whole, whose number need not divide; a bias of down is
    added once."""
    checkpoint, x = checkpoint_of(family, their_block(family), tmp_path), drawn_inputs()
    parts = [ours(checkpoint, RankByItself(rank, size), cut=cut)(x) for rank in range(size)]
    torch.testing.assert_close(torch.stack(parts).sum(0), ours(checkpoint)(x), rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(bool(native.why_not()), reason=f"no C++ operators: {native.why_not()}")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", BLOCKS)
def test_the_parts_of_packed_experts_add_up(family: str, cut: ExpertsCut, tmp_path: Path) -> None:
    checkpoint, x = checkpoint_of(family, their_block(family), tmp_path), drawn_inputs().to(torch.bfloat16)
    whole = ours(checkpoint, dtype=torch.bfloat16)._summed(x)
    blocks = [ours(checkpoint, RankByItself(rank, 2), torch.bfloat16, cut) for rank in range(2)]
    assert all(isinstance(block.experts, PackedExperts) for block in blocks)
    far = torch.stack([block._summed(x) for block in blocks]).sum(0) - whole
    assert far.abs().median() < 2e-2 * whole.abs().median()


@pytest.mark.parametrize("family", BLOCKS)
def test_a_rank_reads_no_other_s_whole_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a tensor of theirs, and of stacked tensors not an element: each other expert's are NaN here."""
    block, read = their_block(family), list[str]()
    checkpoint = checkpoint_of(family, block, tmp_path)
    expected = ours(checkpoint, RankByItself(1, 2), cut="whole")(drawn_inputs())
    own = range(READERS[family][0](READERS[family][1], 1).count // 2, 99)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "experts." in name and "shared" not in name:
                parameter[: own.start] = torch.nan
    view = Weights.view
    monkeypatch.setattr(Weights, "view", lambda self, name, *box: (read.append(name), view(self, name, *box))[1])
    made = ours(checkpoint_of(family, block, tmp_path), RankByItself(1, 2), cut="whole")
    assert torch.equal(made(drawn_inputs()), expected) and expected.abs().max() > 0.1
    numbers = {int(part) for name in read for part in name.split(".experts.")[-1].split(".")[:1] if part.isdigit()}
    assert numbers == (set() if family != "qwen3_next" else {4, 5, 6, 7, 8})


def test_experts_are_cut_by_columns_where_these_fill_a_tile() -> None:
    experts = ExpertsConfig((0,), 128, 8, 768)
    assert [cuts_experts_whole(experts, size, "auto") for size in (1, 2, 8, 12, 16)] == [False] * 4 + [True]
    assert cuts_experts_whole(experts, 5, "auto") and cuts_experts_whole(experts, 2, "whole")
    assert not cuts_experts_whole(replace(experts, count=8), 16, "auto")  # too few for so many ranks
    assert not cuts_experts_whole(experts, 1, "whole")
    with pytest.raises(ConfigError, match=r"experts_cut='columns': tensor_parallel=5 must divide .*=768"):
        cuts_experts_whole(experts, 5, "columns")
    with pytest.raises(ConfigError, match=r"experts_cut='whole': tensor_parallel=16 must be at most the 8 experts"):
        cuts_experts_whole(replace(experts, count=8), 16, "whole")


# ── pieces, by hand ───────────────────────────────────────────────────────────────────────────────


def test_a_softmax_of_the_chosen_weighs_by_their_logits_alone() -> None:
    """So it does for logits whose softmax over all would be 0."""
    experts = ExpertsConfig((0,), 4, 2, 8, "softmax_of_chosen", scale=1.5)
    bias = torch.tensor([0.0, 900.0, 901.0, -5.0])
    chosen, weights = Router(experts, torch.zeros(4, 3), bias=bias)(torch.ones(1, 3))
    assert chosen.tolist() == [[2, 1]]
    near = 1 / (1 + math.exp(-1))
    assert weights[0].tolist() == pytest.approx([1.5 * near, 1.5 * (1 - near)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clamped_swiglu_as_by_hand(dtype: torch.dtype) -> None:
    values = [(-30.0, 2.0), (3.0, -9.0), (12.0, 8.5), (0.5, -1.0), (-1.25, 0.75)]
    gate, up = zip(*values, strict=True)
    found = ops.clamped_swiglu(torch.tensor([[*gate, *up]], dtype=dtype), 1.702, 7.0)

    def by_hand(gate: float, up: float) -> float:
        gate, up = min(gate, 7.0), max(min(up, 7.0), -7.0)
        return (up + 1) * gate / (1 + math.exp(-1.702 * gate))

    expected = torch.tensor([[by_hand(*pair) for pair in values]])
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-9)


def test_an_input_is_scaled_not_the_answer(tmp_path: Path) -> None:
    """An expert is not linear: a score of the input and one of the answer are told apart."""
    made = ours(checkpoint_of("llama4", their_block("llama4"), tmp_path))
    x, before = drawn_inputs(), made(drawn_inputs())
    assert isinstance(made.experts, LoopedExperts)
    made.experts.scale_input = False
    assert not torch.allclose(made(x), before, atol=0.1)


# ── configs ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("family", "keys", "layers"),
    [
        ("qwen3_next", {"mlp_only_layers": [1], "decoder_sparse_step": 2}, (3, 5)),
        ("qwen3_next", {"mlp_only_layers": None}, (0, 1, 2, 3, 4, 5)),
        ("llama4", {"interleave_moe_layer_step": 2}, (1, 3, 5)),
        ("llama4", {"interleave_moe_layer_step": 2, "moe_layers": [0, 4]}, (0, 4)),
        ("gpt_oss", {}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_which_layers_have_experts(family: str, keys: dict[str, Any], layers: tuple[int, ...]) -> None:
    read, raw = READERS[family]
    experts = read({**raw, **keys}, 6)
    if family == "llama4":
        from transformers import Llama4TextConfig

        assert tuple(Llama4TextConfig(num_hidden_layers=6, **keys).moe_layers or []) == layers
    if family == "qwen3_next":
        layers = tuple(layer for layer in layers if layer not in (keys.get("mlp_only_layers") or []))
    assert experts.layers == layers
    shapes: Mapping[str, Any] = layer_tensors(config_of(experts), 0)
    dense = {name for name in shapes if name.endswith(("mlp.up_proj.weight", "feed_forward.up_proj.weight"))}
    assert bool(dense) == (0 not in layers)
    assert all(name.startswith("feed_forward.") == (family == "llama4") for name in dense)


def test_bad_values_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"moe_layers='all': must be a list of layers"):
        read_llama4({"moe_layers": "all"}, 4)
    with pytest.raises(CheckpointError, match=r"swiglu_limit=-1: must be a positive number"):
        read_gpt_oss({"swiglu_limit": -1}, 4)


def test_what_experts_do_not_use_is_not_in_their_fingerprint() -> None:
    """Keys of models whose experts could be computed before stay."""
    plain = ExpertsConfig((0,), 4, 2, 8)
    told = config_of(plain).canonical()["experts"]
    assert len(told) == 13 and not {"swiglu", "stacked", "router_bias"} & told.keys()
    biased = config_of(replace(plain, router_bias=True)).canonical()["experts"]
    assert biased == told | {"router_bias": True}

"""Architecture name in config.json → the function that builds it (config side: `config_families.FAMILIES`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models import (
    deepseek,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    llama4,
    minimax_m2,
    mistral,
    mixtral,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from kvmesh.engine.models.blocks import DecoderModel
from kvmesh.engine.weights import Weights

MODELS: Mapping[str, Callable[[ModelConfig, Weights], DecoderModel]] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "MinistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
    "Gemma2ForCausalLM": gemma2.build,
    "Gemma3ForCausalLM": gemma3.build,
    "Gemma3ForConditionalGeneration": gemma3.build,
    "Phi3ForCausalLM": phi3.build,
    "GraniteForCausalLM": granite.build,
    "Olmo3ForCausalLM": olmo3.build,
    "Qwen3MoeForCausalLM": qwen3_moe.build,
    "MixtralForCausalLM": mixtral.build,
    "Glm4MoeForCausalLM": glm4_moe.build,
    "MiniMaxM2ForCausalLM": minimax_m2.build,
    "Qwen3NextForCausalLM": qwen3_next.build,
    "DeepseekV2ForCausalLM": deepseek.build,
    "DeepseekV3ForCausalLM": deepseek.build,
    "KimiK2ForCausalLM": deepseek.build,
    "GptOssForCausalLM": gpt_oss.build,
    "Llama4ForCausalLM": llama4.build,
    "Llama4ForConditionalGeneration": llama4.build,
}

"""Architecture name in config.json → the function that builds it (its config side: `kvmesh.engine.config.FAMILIES`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models import llama, qwen2, qwen3
from kvmesh.engine.models.blocks import DecoderModel
from kvmesh.engine.weights import Weights

MODELS: Mapping[str, Callable[[ModelConfig, Weights], DecoderModel]] = {
    "LlamaForCausalLM": llama.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}
